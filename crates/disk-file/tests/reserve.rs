//! Process with a fixed number of io_uring instances: [`prepare_rings`] creates all of them in
//! advance.

mod common;

use common::{Host, directory, image, open, run_one};
use shadowbell_disk::{Op, Queue};
use shadowbell_disk_file::prepare_rings;

const MIB: u64 = 1 << 20;

/// Number of io_uring instances of this process.
fn rings() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap();
    let links = links.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    links.filter(|link| link.to_str() == Some("anon_inode:[io_uring]")).count()
}

fn read(queue: &mut dyn Queue) {
    let host = Host::new(MIB);
    let data = host.buffer(&[(0, 4096)], true);
    run_one(queue, Op::Read, 0, 4096, data).unwrap();
}

/// Single test of this test program, because it counts the rings of the whole process.
#[test]
fn threads_without_a_ring_serve_their_disks_and_rings_are_used_again() {
    if prepare_rings(1, 0) == 0 {
        println!("skipped: io_uring with restrictions is not permitted");
        return;
    }
    let made = rings();
    let directory = directory();
    let path = image(directory.path(), MIB);
    let disk = open(&path, "?aio=io_uring&direct=off");
    // All queues of this thread share the ring.
    let mut queues: Vec<_> = (0..100).map(|_| disk.queue().unwrap()).collect();
    queues.iter_mut().for_each(|queue| read(&mut **queue));
    assert!(queues.iter().all(|queue| queue.shares_wake_fd()));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut queue = disk.queue().unwrap();
            assert!(!queue.shares_wake_fd(), "it uses threads");
            read(&mut *queue);
        });
    });
    drop(queues);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut queue = disk.queue().unwrap();
            assert!(queue.shares_wake_fd(), "it uses the ring of the other thread");
            read(&mut *queue);
        });
    });
    assert_eq!(rings(), made);
}
