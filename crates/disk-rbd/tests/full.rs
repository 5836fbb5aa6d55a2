//! Test of a full Ceph cluster on this machine. `cargo xtask ceph` starts the cluster. The test
//! fills it completely, so it requires `SHADOWBELL_CEPH_FILL` in addition to
//! `SHADOWBELL_CEPH_CONF`.

use shadowbell_disk::{Disk, DiskError, Op, Queue, Request};
use shadowbell_disk_rbd::{RbdDisk, RbdSpec};
use shadowbell_testing::disks::{
    assert_none_completes, flush, memory, read, run_one, segments, submit_pending, wait,
    wait_completed, write,
};
use shadowbell_testing::programs::skipped;
use shadowbell_testing::wait;
use std::process::Command;

const MIB: u64 = 1 << 20;

fn ceph(conf: &str, program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(["-c", conf]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Full cluster. Dropping this value makes space again.
struct Full(String);

impl Full {
    fn new(conf: &str) -> Self {
        let full = Self(conf.to_owned());
        full.ratios("0.00001", true);
        full
    }

    /// Sets the full ratios, and waits until the cluster is full (`is_full`) or no longer full.
    fn ratios(&self, from: &str, is_full: bool) {
        for kind in ["full", "backfillfull", "nearfull"] {
            ceph(&self.0, "ceph", &["osd", &format!("set-{kind}-ratio"), from]);
        }
        let pool = |map: String| {
            let line = map.lines().find(|line| line.starts_with("pool ")).map(str::to_owned);
            line.is_some_and(|line| line.contains(",full"))
        };
        wait::until("a change of the pool's state", || {
            pool(ceph(&self.0, "ceph", &["osd", "dump"])) == is_full
        });
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        self.ratios("0.9", false);
    }
}

fn spec(conf: &str, image: &str) -> RbdSpec {
    RbdSpec::parse(&format!("rbd:rbd/{image}?conf={conf}")).unwrap()
}

#[test]
fn a_full_cluster_fails_or_delays_writes() {
    let Ok(conf) = std::env::var("SHADOWBELL_CEPH_CONF") else {
        skipped("`SHADOWBELL_CEPH_CONF` names no cluster");
        return;
    };
    if std::env::var_os("SHADOWBELL_CEPH_FILL").is_none() {
        skipped("`SHADOWBELL_CEPH_FILL` does not allow to fill the cluster");
        return;
    }
    ceph(&conf, "rbd", &["create", "fill", "--size", "256M"]);
    reports_full(&conf);
    waits_with_a_cache(&conf);
}

/// Without a cache in this process, a write that allocates space fails with `NoSpace`, and all
/// other requests succeed.
fn reports_full(conf: &str) {
    let disk = RbdDisk::open_recoverable(&spec(conf, "fill")).unwrap();
    let mut queue = disk.queue().unwrap();
    for at in [0, 4 * MIB] {
        assert_eq!(write(&mut *queue, at, &[7; MIB as usize]), Ok(()));
    }
    assert!(!disk.is_full());
    let full = Full::new(conf);
    // Each kind of write fails if it needs a new object.
    let no_room = Err(DiskError::NoSpace);
    // The cluster may have become full while the first write was in flight, so the write is
    // repeated.
    wait::until("a full cluster", || write(&mut *queue, 8 * MIB, &[1; 4096]) == no_room);
    assert!(disk.is_full());
    assert_eq!(write(&mut *queue, 12 * MIB, &[1; MIB as usize]), no_room);
    let bytes = memory(4096);
    bytes.write_from(0, &[1; 4096]).unwrap();
    for (op, len) in [
        (Op::Write { fua: true }, 4096),
        (Op::WriteZeroes { deallocate: false, fua: false }, 8 * MIB),
    ] {
        let moves = matches!(op, Op::Write { .. });
        let data = segments(&bytes, 0, if moves { 4096 } else { 0 });
        assert_eq!(run_one(&mut *queue, op, 16 * MIB, len, data), no_room, "{op:?}");
    }
    // A write across an existing object and a new one fails as well.
    assert_eq!(write(&mut *queue, 8 * MIB - 4096, &[2; 8192]), no_room);
    // Reads, overwrites, flushes and discards succeed.
    assert_eq!(read(&mut *queue, 0, 4096), Ok(vec![7; 4096]));
    assert_eq!(read(&mut *queue, 8 * MIB, 4096), Ok(vec![0; 4096]));
    assert_eq!(write(&mut *queue, 4096, &[8; 4096]), Ok(()));
    assert_eq!(read(&mut *queue, 0, 8192), Ok([[7; 4096], [8; 4096]].concat()));
    assert_eq!(flush(&mut *queue), Ok(()));
    let discard = |queue: &mut dyn Queue| {
        run_one(queue, Op::Discard, 4 * MIB, 4 * MIB, segments(&bytes, 0, 0))
    };
    assert_eq!(discard(&mut *queue), Ok(()));
    assert_eq!(read(&mut *queue, 4 * MIB, 4096), Ok(vec![0; 4096]));
    // A disk can be opened on a full cluster.
    let second = RbdDisk::open_recoverable(&spec(conf, "fill")).unwrap();
    let mut other = second.queue().unwrap();
    assert_eq!(read(&mut *other, 4096, 4096), Ok(vec![8; 4096]));
    assert_eq!(write(&mut *other, 20 * MIB, &[1; 4096]), no_room);
    assert!(second.is_full());
    drop((other, second));
    // When the cluster has space again, all writes succeed.
    drop(full);
    wait::until("room in the cluster", || write(&mut *queue, 8 * MIB, &[9; 4096]) == Ok(()));
    assert!(!disk.is_full());
    assert_eq!(write(&mut *queue, 12 * MIB, &[9; MIB as usize]), Ok(()));
    assert_eq!(read(&mut *queue, 8 * MIB, 4096), Ok(vec![9; 4096]));
}

/// On a full cluster, writes may have completed into Ceph's cache in this process. Their data are
/// not dropped: the cache writes them when the cluster has room, and later writes and flushes wait
/// for that. Reads succeed, and requests that were not submitted to Ceph can be cancelled. The same
/// holds for a recoverable disk whose image has the cache enabled in its settings in the cluster.
fn waits_with_a_cache(conf: &str) {
    ceph(conf, "rbd", &["create", "own", "--size", "256M"]);
    ceph(conf, "rbd", &["config", "image", "set", "rbd/own", "rbd_cache", "true"]);
    let disks = [
        RbdDisk::open(&spec(conf, "fill")).unwrap(),
        RbdDisk::open_recoverable(&spec(conf, "own")).unwrap(),
    ];
    let mut queues = disks.each_ref().map(|disk| disk.queue().unwrap());
    for queue in &mut queues {
        assert_eq!(write(&mut **queue, 24 * MIB, &[3; 4096]), Ok(()));
        assert_eq!(flush(&mut **queue), Ok(()));
    }
    let full = Full::new(conf);
    for (disk, queue) in disks.iter().zip(&mut queues) {
        let bytes = memory(4 * MIB as usize);
        let submit = |queue: &mut dyn Queue, tag, op, offset: u64, len: u64| {
            let data = segments(&bytes, 0, len as usize);
            submit_pending(queue, tag, &Request { op, offset, len }, data);
        };
        // The requests exceed the cache and the queue's buffers, so the last ones are not submitted
        // to Ceph.
        for n in 0..40 {
            let at = 4 * MIB * u64::from(n);
            submit(&mut **queue, n, Op::Write { fua: true }, at, 4 * MIB);
        }
        submit(&mut **queue, 40, Op::Flush, 0, 0);
        assert_none_completes(&mut **queue);
        // All buffers of the first queue are in use, so another queue reads.
        let mut reads = disk.queue().unwrap();
        assert_eq!(read(&mut *reads, 200 * MIB, 4096), Ok(vec![0; 4096]));
        queue.cancel(39);
        assert_eq!(wait_completed(&mut **queue, 1), [(39, Err(DiskError::Cancelled))]);
        assert_none_completes(&mut **queue);
    }
    drop(full);
    for queue in &mut queues {
        let mut others = Vec::new();
        while queue.pending() > 0 {
            wait(&**queue);
            queue.reap(&mut |tag, result, _| others.push((tag, result)));
        }
        others.sort_unstable_by_key(|(tag, _)| *tag);
        let expected: Vec<_> = (0..39).chain([40]).map(|tag| (tag, Ok(()))).collect();
        assert_eq!(others, expected);
    }
}
