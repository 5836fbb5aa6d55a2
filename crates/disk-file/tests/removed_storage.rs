//! Tests with storage that is removed while an image is open: a FUSE file system whose daemon is
//! killed, a file system that is shut down, and a device that loses its backing file.

mod common;

use common::{Host, Undo, as_root, directory, image, open, run_one, wait};
use shadowbell_disk::{DiskError, Op, Queue, Request, Submitted};
use shadowbell_testing::programs::skipped;
use shadowbell_testing::stalled::{Mount, run_daemon_if_requested};
use shadowbell_testing::wait;
use std::fs::{File, OpenOptions};
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;
const ALL: [&str; 4] = ["?direct=off", "?direct=off&aio=threads", "", "?aio=threads"];

#[test]
fn fuse_daemon() {
    run_daemon_if_requested();
}

/// Runs one request. Its buffer is the host's memory from 0 on.
fn one(queue: &mut dyn Queue, host: &Host, op: Op, offset: u64) -> Result<(), DiskError> {
    let len = if op == Op::Flush { 0 } else { 4096 };
    let moves = matches!(op, Op::Read | Op::Write { .. } | Op::Compare);
    let data = host.buffer(if moves { &[(0, 4096)] } else { &[] }, op == Op::Read);
    run_one(queue, op, offset, len, data)
}

fn write(queue: &mut dyn Queue, host: &Host, offset: u64, byte: u8) -> Result<(), DiskError> {
    host.bytes.write_from(0, &[byte; 4096]).unwrap();
    one(queue, host, Op::Write { fua: false }, offset)
}

/// Reads a page. Returns the byte that fills it.
fn read(queue: &mut dyn Queue, host: &Host, offset: u64) -> Result<u8, DiskError> {
    one(queue, host, Op::Read, offset)?;
    let page = host.content()[..4096].to_vec();
    assert!(page.iter().all(|byte| *byte == page[0]), "a page in parts");
    Ok(page[0])
}

/// Submits many requests of all kinds. When this returns, each request is in flight or has
/// completed.
fn submit_many(queue: &mut dyn Queue, host: &Host) -> Vec<Option<Result<(), DiskError>>> {
    let mut ended = vec![None; 200];
    for tag in 0..200_u32 {
        let op = match tag % 5 {
            0 => Op::Write { fua: tag % 2 == 0 },
            1 => Op::WriteZeroes { deallocate: tag % 2 == 0, fua: false },
            2 => Op::Flush,
            3 => Op::Discard,
            _ => Op::Read,
        };
        let len = if op == Op::Flush { 0 } else { 4096 };
        let request = Request { op, offset: MIB / 2 + u64::from(tag % 64) * 4096, len };
        let moves = matches!(op, Op::Read | Op::Write { .. });
        let mut data = host.buffer(if moves { &[(8192, 4096)] } else { &[] }, op == Op::Read);
        if let Submitted::Done(result) = queue.submit(tag, &request, &mut data) {
            ended[tag as usize] = Some(result);
        }
    }
    queue.commit();
    ended
}

/// Waits until all requests have completed.
fn wait_all_ended(queue: &mut dyn Queue, ended: &mut [Option<Result<(), DiskError>>]) {
    while queue.pending() > 0 {
        wait(queue);
        queue.reap(&mut |tag, result, _| {
            assert_eq!(ended[tag as usize].replace(result), None, "{tag} ended twice");
        });
    }
}

/// Checks that all requests fail with one of `errors`. They must not fail with `OutOfRange`.
fn fails(queue: &mut dyn Queue, host: &Host, errors: &[i32], context: &str) {
    for op in [
        Op::Read,
        Op::Write { fua: false },
        Op::Write { fua: true },
        Op::WriteZeroes { deallocate: false, fua: false },
        Op::WriteZeroes { deallocate: true, fua: true },
        Op::Compare,
        Op::Verify,
        Op::Flush,
        Op::Read,
    ] {
        let result = one(queue, host, op, 0);
        let is_one = errors.iter().any(|errno| result == Err(DiskError::Io(*errno)));
        assert!(is_one, "{context}: {op:?} ended with {result:?}");
    }
}

/// Checks that another disk on the same thread still works.
fn writes_and_reads(queue: &mut dyn Queue, host: &Host, byte: u8) {
    assert_eq!(write(queue, host, 0, byte), Ok(()));
    assert_eq!(one(queue, host, Op::Flush, 0), Ok(()));
    assert_eq!(read(queue, host, 0), Ok(byte));
}

/// The daemon of a FUSE file system is killed during I/O. Some requests wait for the daemon, and
/// some of them were cancelled. After a new mount, the image is opened again.
#[test]
fn the_server_of_a_file_system_is_killed() {
    let directory = directory();
    let behind = image(directory.path(), MIB);
    let other = directory.path().join("other.img");
    File::create(&other).unwrap().set_len(MIB).unwrap();
    let other = open(&other, "");
    let mut other = other.queue().unwrap();
    let host = Host::new(MIB);
    for (round, options) in ALL.into_iter().enumerate() {
        let byte = round as u8 + 1;
        let Some(mut mount) = Mount::over("fuse_daemon", &behind) else { return };
        let options = if options.is_empty() {
            "?format=raw".to_owned()
        } else {
            format!("{options}&format=raw")
        };
        let disk = open(&mount.path(), &options);
        let mut queue = disk.queue().unwrap();
        assert_eq!(write(&mut *queue, &host, 0, byte), Ok(()));
        assert_eq!(one(&mut *queue, &host, Op::Flush, 0), Ok(()));
        mount.stall();
        let mut ended = submit_many(&mut *queue, &host);
        writes_and_reads(&mut *other, &host, byte);
        (0..200).step_by(3).for_each(|tag| queue.cancel(tag));
        mount.end();
        wait_all_ended(&mut *queue, &mut ended);
        for (tag, result) in ended.iter().enumerate() {
            let is_fine = match result.unwrap() {
                Ok(()) => true,
                Err(DiskError::Cancelled) => tag.is_multiple_of(3),
                Err(DiskError::Io(errno)) => {
                    matches!(errno, libc::ENOTCONN | libc::ECONNABORTED)
                }
                Err(_) => false,
            };
            assert!(is_fine, "{options}: {tag} ended with {result:?}");
        }
        let gone = [libc::ENOTCONN, libc::ECONNABORTED];
        fails(&mut *queue, &host, &gone, &options);
        writes_and_reads(&mut *other, &host, byte + 100);
        // Cancelled requests must end even if the storage is gone.
        let mut ended = submit_many(&mut *queue, &host);
        (0..200).for_each(|tag| queue.cancel(tag));
        wait_all_ended(&mut *queue, &mut ended);
        assert_ne!(ended[4], Some(Ok(())));
        drop(mount);
        let Some(mount) = Mount::over("fuse_daemon", &behind) else { return };
        fails(&mut *queue, &host, &gone, &options);
        let again = open(&mount.path(), &options);
        let mut queue = again.queue().unwrap();
        assert_eq!(read(&mut *queue, &host, 0), Ok(byte), "{options}");
        assert_eq!(write(&mut *queue, &host, 4096, byte), Ok(()));
        assert_eq!(read(&mut *queue, &host, 4096), Ok(byte));
    }
}

/// The daemon of the FUSE file system does not implement fsync, so the kernel reports success for
/// every fsync, even after the death of the daemon. A flush must fail nevertheless, and the disk
/// must not conclude that the image was truncated.
#[test]
fn a_dead_file_system_without_fsync_returns_errors() {
    let directory = directory();
    let behind = image(directory.path(), MIB);
    let host = Host::new(MIB);
    for options in ["?direct=off&format=raw", "?direct=off&aio=threads&format=raw"] {
        let Some(mut mount) = Mount::without_syncs("fuse_daemon", &behind) else { return };
        let disk = open(&mount.path(), options);
        let mut queue = disk.queue().unwrap();
        assert_eq!(write(&mut *queue, &host, 0, 7), Ok(()));
        assert_eq!(one(&mut *queue, &host, Op::Flush, 0), Ok(()));
        mount.end();
        fails(&mut *queue, &host, &[libc::ENOTCONN, libc::ECONNABORTED], options);
    }
}

/// Creates a loop device with the backing file `file`.
fn device(file: &Path) -> Option<(String, Undo)> {
    let device = as_root("losetup", &["-f", "--show", file.to_str().unwrap()])?;
    let detach = Undo("losetup", vec!["-d".into(), device.clone()]);
    Some((device, detach))
}

/// The backing file of a loop device is empty for a while. When the file has its size again, the
/// open image works again. The test flushes every write before: if a completed write were only in
/// the page cache, it would be lost, and the image would have to be opened again.
#[test]
fn a_device_without_backing_storage_recovers() {
    let directory = directory();
    let behind = image(directory.path(), 4 * MIB);
    let Some((device, _detach)) = device(&behind) else { return };
    let host = Host::new(MIB);
    for (round, options) in ["?direct=on", "?direct=on&aio=threads"].into_iter().enumerate() {
        let byte = round as u8 + 1;
        let disk = open(device.as_ref(), options);
        let mut queue = disk.queue().unwrap();
        assert_eq!(write(&mut *queue, &host, 0, byte), Ok(()));
        assert_eq!(one(&mut *queue, &host, Op::Flush, 0), Ok(()));
        let file = OpenOptions::new().write(true).open(&behind).unwrap();
        file.set_len(0).unwrap();
        for op in [Op::Read, Op::Verify, Op::Compare] {
            assert_eq!(one(&mut *queue, &host, op, 0), Err(DiskError::Io(libc::EIO)), "{op:?}");
        }
        // The file has its old size again, but other contents.
        file.set_len(4 * MIB).unwrap();
        assert_eq!(read(&mut *queue, &host, 0), Ok(0), "{options}");
        assert_eq!(write(&mut *queue, &host, 4096, byte), Ok(()));
        assert_eq!(one(&mut *queue, &host, Op::Flush, 0), Ok(()));
        assert_eq!(read(&mut *queue, &host, 4096), Ok(byte));
    }
}

/// A file system is shut down, as after a fatal error or by an operator. From then on, every
/// request fails until the file system is mounted again.
#[test]
fn a_file_system_is_shut_down() {
    let directory = directory();
    let behind = image(directory.path(), 64 * MIB);
    let Some((device, _detach)) = device(&behind) else { return };
    let mount = directory.path().join("mount");
    std::fs::create_dir(&mount).unwrap();
    let name = mount.to_str().unwrap();
    let host = Host::new(MIB);
    if as_root("mkfs.ext4", &["-q", &device]).is_none() {
        return;
    }
    for (round, options) in ALL.into_iter().enumerate() {
        let byte = round as u8 + 1;
        if as_root("mount", &[&device, name]).is_none() {
            return;
        }
        let _unmount = Undo("umount", vec![name.into()]);
        let path = mount.join("disk.img");
        if round == 0 {
            File::create(&path).unwrap().set_len(MIB).unwrap();
        }
        let disk = open(&path, options);
        let mut queue = disk.queue().unwrap();
        assert_eq!(write(&mut *queue, &host, 0, byte), Ok(()));
        assert_eq!(one(&mut *queue, &host, Op::Flush, 0), Ok(()));
        let mut ended = submit_many(&mut *queue, &host);
        let Ok(status) = Command::new("xfs_io").args(["-x", "-c", "shutdown", name]).status()
        else {
            skipped("`xfs_io` is not here; it is in Debian's xfsprogs");
            return;
        };
        assert!(status.success());
        wait_all_ended(&mut *queue, &mut ended);
        // After the shutdown, a read may be served from the page cache, and a write to allocated
        // blocks may reach the device. But no flush may succeed.
        let mut statuses = vec![one(&mut *queue, &host, Op::Flush, 0)];
        statuses.push(write(&mut *queue, &host, 0, 99));
        statuses.push(one(&mut *queue, &host, Op::WriteZeroes { deallocate: true, fua: true }, 0));
        statuses.push(one(&mut *queue, &host, Op::Flush, 0));
        // A write to ext4 may also fail with EROFS: after the shutdown, ext4 aborts its journal and
        // becomes read-only.
        let has_failed =
            |status: &Result<_, _>| matches!(status, Err(DiskError::Io(libc::EIO | libc::EROFS)));
        assert!(statuses.iter().all(has_failed), "{options}: {statuses:?}");
        drop((queue, disk));
        // Another test may have forked a child process, which holds copies of all open descriptors
        // until it executes its program. These would make the unmount fail, so it is repeated.
        wait::until("an unmount", || {
            Command::new("umount").arg(name).output().unwrap().status.success()
        });
        assert!(as_root("mount", &[&device, name]).is_some(), "it can not be mounted again");
        let again = open(&path, options);
        let mut queue = again.queue().unwrap();
        assert_eq!(read(&mut *queue, &host, 0), Ok(byte), "{options}");
        assert_eq!(write(&mut *queue, &host, 4096, byte), Ok(()));
        assert_eq!(one(&mut *queue, &host, Op::Flush, 0), Ok(()));
    }
}
