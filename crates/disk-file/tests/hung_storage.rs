//! An image on hung storage must not delay another image that the same thread uses.

mod common;

use common::{Host, directory, image, open, run_one};
use shadowbell_disk::{Disk, Op, Request, Submitted};
use shadowbell_testing::stalled::{Mount, run_daemon_if_requested};
use shadowbell_testing::wait::LIMIT;
use std::sync::{Arc, mpsc};

const MIB: u64 = 1 << 20;

#[test]
fn fuse_daemon() {
    run_daemon_if_requested();
}

#[test]
fn a_hung_image_delays_no_other() {
    let Some(mount) = Mount::with_image("fuse_daemon") else { return };
    let bad = open(&mount.path(), "?direct=off&format=raw");
    holds_up_no_other(mount, bad);
}

/// Like `a_hung_image_delays_no_other`, with a file system that does not even return the length of
/// the file.
#[test]
fn a_hung_fstat_delays_no_other_image() {
    let directory = directory();
    let behind = image(directory.path(), MIB);
    let Some(mount) = Mount::over("fuse_daemon", &behind) else { return };
    let bad = open(&mount.path(), "?direct=off&format=raw");
    mount.stall();
    holds_up_no_other(mount, bad);
}

fn holds_up_no_other(mut mount: Mount, bad: Arc<dyn Disk>) {
    let directory = directory();
    let good = image(directory.path(), 64 * MIB);
    let (done, is_done) = mpsc::channel();
    // One thread serves both images, like an I/O thread. The risk: the kernel executes the calls of
    // both images on the same few io_uring workers, and all of these may hang.
    let worker = std::thread::spawn(move || {
        let host = Host::new(MIB);
        let mut bad = bad.queue().unwrap();
        for tag in 0..200 {
            let op = match tag % 4 {
                0 => Op::Write { fua: false },
                1 => Op::WriteZeroes { deallocate: true, fua: false },
                2 => Op::Flush,
                _ => Op::Read,
            };
            let len = if op == Op::Flush { 0 } else { 4096 };
            let request = Request { op, offset: u64::from(tag) * 4096, len };
            let mut data = host.buffer(&[(0, 4096)], true);
            let _: Submitted = bad.submit(tag, &request, &mut data);
            bad.commit();
            bad.reap(&mut |_, _, _| ());
        }
        for options in ["?direct=off", ""] {
            let disk = open(&good, options);
            let mut queue = disk.queue().unwrap();
            for n in 0..64 {
                let at = n * MIB;
                for op in [
                    Op::Write { fua: false },
                    Op::Read,
                    Op::Write { fua: true },
                    Op::WriteZeroes { deallocate: true, fua: true },
                    Op::Flush,
                ] {
                    let len = if op == Op::Flush { 0 } else { 4096 };
                    let data = host.buffer(&[(8192, 4096)], true);
                    assert_eq!(run_one(&mut *queue, op, at, len, data), Ok(()), "{op:?}");
                }
            }
        }
        done.send(()).unwrap();
        drop(bad);
    });
    let outcome = is_done.recv_timeout(LIMIT);
    // Ending the mount ends the requests that wait for the storage.
    mount.end();
    let _ = worker.join();
    assert!(outcome.is_ok(), "one image waits for the other");
}
