//! A qcow2 image on hung storage must not delay another image that the same thread uses.

mod common;

use common::{directory, flush, memory, open, read, segments, wait, write};
use shadowbell_disk::{Disk, DiskError, Op, Request, Submitted};
use shadowbell_disk_qcow2::create;
use shadowbell_testing::stalled::{Mount, run_daemon_if_requested};

const MIB: u64 = 1 << 20;
const CLUSTER: u64 = 64 << 10;

#[test]
fn fuse_daemon() {
    run_daemon_if_requested();
}

#[test]
fn hung_storage_delays_no_other_image() {
    let directory = directory();
    let [good, slow] = ["good.qcow2", "slow.qcow2"].map(|name| directory.path().join(name));
    for path in [&good, &slow] {
        create(path, 8 * MIB).unwrap();
        let disk = open(path, "");
        let mut queue = disk.queue().unwrap();
        write(&mut *queue, 0, &[7; 2 << 20]).unwrap();
        flush(&mut *queue).unwrap();
    }
    let Some(mount) = Mount::over("fuse_daemon", &slow) else { return };
    let slow = open(&mount.path(), "");
    let good = open(&good, "");
    let (mut waits, mut goes) = (slow.queue().unwrap(), good.queue().unwrap());
    // The variable is declared again after the disks and queues, so `mount` is dropped before them. Its
    // drop ends the requests that wait for the hung storage.
    let mount = mount;
    // From now on, the map contains the first clusters, so reads of them take the fast path.
    assert_eq!(read(&mut *waits, 0, 4096), Ok(vec![7; 4096]));
    mount.stall();
    let bytes = memory(200 * 4096);
    for tag in 0..200u32 {
        let at = u64::from(tag) * 4096;
        let (op, offset) = match tag % 5 {
            0 => (Op::Read, at % MIB),
            1 => (Op::Write { fua: false }, MIB + at % MIB),
            // Each of these writes allocates a cluster.
            2 => (Op::Write { fua: true }, 4 * MIB + u64::from(tag % 40) * CLUSTER),
            3 => (Op::WriteZeroes { deallocate: true, fua: false }, 7 * MIB + at),
            _ => (Op::Flush, 0),
        };
        let len = if op == Op::Flush { 0 } else { 4096 };
        let mut data = segments(&bytes, tag as usize * 4096, 4096);
        let submitted = waits.submit(tag, &Request { op, offset, len }, &mut data);
        assert_eq!(submitted, Submitted::Pending, "{tag}");
    }
    waits.commit();
    let mut ended = vec![None; 200];
    waits.reap(&mut |tag, result, _| ended[tag as usize] = Some(result));
    assert!(ended.iter().all(Option::is_none), "a request completed on hung storage: {ended:?}");
    // Meanwhile, this thread allocates, reads and syncs in the other image.
    for n in 0..16u8 {
        let at = 4 * MIB + u64::from(n) * CLUSTER;
        write(&mut *goes, at, &[n; 4096]).unwrap();
        assert_eq!(read(&mut *goes, at, 4096), Ok(vec![n; 4096]));
    }
    flush(&mut *goes).unwrap();
    // A cancelled request ends early or completes normally.
    (0..200).step_by(3).for_each(|tag| waits.cancel(tag));
    waits.reap(&mut |tag, result, _| ended[tag as usize] = Some(result));
    mount.resume();
    while waits.pending() > 0 {
        wait(&*waits);
        waits.reap(&mut |tag, result, _| {
            assert_eq!(ended[tag as usize].replace(result), None, "{tag} ended twice");
        });
    }
    for (tag, result) in ended.iter().enumerate() {
        let is_fine = matches!(result, Some(Ok(())))
            || tag.is_multiple_of(3) && *result == Some(Err(DiskError::Cancelled));
        assert!(is_fine, "{tag}: {result:?}");
    }
    assert!(ended.contains(&Some(Err(DiskError::Cancelled))), "nothing was cancelled in time");
    assert_eq!(read(&mut *waits, 0, 4096), Ok(vec![7; 4096]));
}
