//! Tests with image files that are invalid, shared, read-only, full, or that shrink.

mod common;

use common::{Host, Undo, as_root, directory, image, open, run_one};
use shadowbell_disk::{DiskError, ImageFormat, Op, OpenError, Request, ResizeError, Submitted};
use shadowbell_disk_file::{Direct, FileDisk, FileOptions};
use shadowbell_memory::{Mapping, Protection, Segments};
use shadowbell_testing::programs::skipped;
use shadowbell_testing::wait;
use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const WRITE: Op = Op::Write { fua: false };

fn options(change: impl FnOnce(&mut FileOptions)) -> FileOptions {
    let mut options = FileOptions::default();
    change(&mut options);
    options
}

fn refused(path: &Path, options: &str) -> OpenError {
    shadowbell_disk_file::open(&format!("{}{options}", path.display()))
        .expect_err("this must not open")
}

/// Checks that the error text names the file and contains these words.
fn expect_message(error: &OpenError, path: &Path, words: &[&str]) {
    let text = error.to_string();
    assert!(text.starts_with(path.to_str().unwrap()), "{text}");
    for word in words {
        assert!(text.contains(word), "`{word}` is missing in: {text}");
    }
    assert!(!text.contains('\n'), "{text}");
}

#[test]
fn a_disk_becomes_read_only_and_writable_again() {
    let directory = directory();
    let path = image(directory.path(), MIB);
    let writes = open(&path, "");
    let reads = writes.with_writes(false).unwrap();
    assert_eq!((reads.info().read_only, writes.info().read_only), (true, false));
    drop(writes);
    assert!(matches!(refused(&path, "?read-only=on"), OpenError::Busy { .. }), "the same lock");
    let host = Host::new(4096);
    let run = |disk: &dyn shadowbell_disk::Disk, op| {
        run_one(&mut *disk.queue().unwrap(), op, 0, 512, host.buffer(&[(0, 512)], true))
    };
    assert_eq!(run(&*reads, WRITE), Err(DiskError::ReadOnly));
    run(&*reads, Op::Read).unwrap();
    let writes = reads.with_writes(true).unwrap();
    run(&*writes, WRITE).unwrap();
    drop((reads, writes));
    // A disk whose file was opened read-only cannot become writable later.
    let opened = open(&path, "?read-only=on");
    assert!(matches!(opened.with_writes(true), Err(ResizeError::Opened { .. })));
    assert!(opened.with_writes(false).unwrap().info().read_only);
    for disk in ["mem:1MiB", "null:1MiB"] {
        let reads = shadowbell_disk_file::open(disk).unwrap().with_writes(false).unwrap();
        assert!(reads.info().read_only && !reads.with_writes(true).unwrap().info().read_only);
    }
}

#[test]
fn a_grown_file_is_a_larger_disk_with_the_same_lock() {
    let directory = directory();
    let path = image(directory.path(), MIB);
    let small = open(&path, "");
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    // A larger size grows the file.
    assert_eq!(small.resized(Some(2 * MIB)).unwrap().info().bytes(), 2 * MIB);
    assert_eq!(file.metadata().unwrap().len(), 2 * MIB);
    file.set_len(2 * MIB + 512).unwrap();
    file.write_all_at(&[7; 512], 2 * MIB).unwrap();
    let large = small.resized(None).unwrap();
    assert_eq!(large.info().bytes(), 2 * MIB + 512);
    assert_eq!(small.info().bytes(), MIB, "the old disk keeps its size");
    assert_eq!(small.resized(Some(MIB / 2)).unwrap().info().bytes(), MIB / 2);
    assert!(matches!(small.resized(Some(MIB + 1)), Err(ResizeError::Size { .. })));
    drop(small);
    let host = Host::new(4096);
    let data = host.buffer(&[(0, 512)], true);
    run_one(&mut *large.queue().unwrap(), Op::Read, 2 * MIB, 512, data).unwrap();
    assert_eq!(host.content()[..512], [7; 512]);
    assert!(matches!(refused(&path, ""), OpenError::Busy { .. }), "the image is still locked");
    drop(large);
    open(&path, "");
}

#[test]
fn invalid_files_are_refused_with_the_reason() {
    let directory = directory();
    let missing = directory.path().join("missing.img");
    let error = refused(&missing, "");
    assert!(matches!(error, OpenError::Missing { .. }));
    expect_message(&error, &missing, &["no such file", "truncate -s"]);
    assert!(!missing.exists(), "a typing error makes no file");

    let error = refused(directory.path(), "");
    assert!(matches!(error, OpenError::NoFile { .. }));
    expect_message(&error, directory.path(), &["it is a directory", "raw image"]);

    let under_a_file = image(directory.path(), MIB).join("x");
    expect_message(
        &refused(&under_a_file, ""),
        &under_a_file,
        &["it is below a file", "raw image"],
    );

    expect_message(
        &refused("/dev/zero".as_ref(), ""),
        "/dev/zero".as_ref(),
        &["a character device"],
    );
    let socket = directory.path().join("socket");
    let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    expect_message(&refused(&socket, ""), &socket, &["a socket"]);
    let pipe = directory.path().join("pipe");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status();
    if made.is_ok_and(|status| status.success()) {
        // Opening the pipe does not block.
        expect_message(&refused(&pipe, ""), &pipe, &["a pipe"]);
    }

    let empty = image(directory.path(), 0);
    let error = refused(&empty, "");
    assert!(matches!(error, OpenError::Empty { .. }));
    expect_message(&error, &empty, &["it is empty", "truncate -s"]);

    let odd = image(directory.path(), MIB + 100);
    expect_message(&refused(&odd, ""), &odd, &["1048676 bytes", "512", "truncate -s %512"]);
    // The image has another known format. The error for `format=raw` must not advise to extend the
    // file, because that would damage the image.
    let mut vmdk = std::fs::read(&odd).unwrap();
    vmdk[..4].copy_from_slice(b"KDMV");
    std::fs::write(&odd, vmdk).unwrap();
    let error = refused(&odd, "?format=raw");
    expect_message(&error, &odd, &["a VMDK image", "1048676 bytes", "qemu-img convert -O raw"]);
    assert!(!error.to_string().contains("truncate"), "{error}");
    let half = image(directory.path(), MIB + 512);
    let error = refused(&half, "?block-size=4096");
    assert!(matches!(error, OpenError::NotBlockMultiple { size: 1_049_088, .. }));
    expect_message(&error, &half, &["truncate -s %4096", "`block-size=512`"]);
    assert_eq!(open(&half, "").info().blocks, 2049);
}

#[test]
fn unreadable_files_are_refused() {
    if rustix::process::geteuid().is_root() {
        // Root may read every file, so for root only the message is tested.
        let source = std::io::Error::from_raw_os_error(13);
        let error = OpenError::Unreadable { path: "x.img".into(), source };
        expect_message(
            &error,
            "x.img".as_ref(),
            &["may not read it", "Permission denied", "permissions"],
        );
        return;
    }
    let directory = directory();
    let path = image(directory.path(), MIB);
    std::fs::set_permissions(&path, Permissions::from_mode(0o000)).unwrap();
    let error = refused(&path, "");
    assert!(matches!(error, OpenError::Unreadable { .. }));
    expect_message(&error, &path, &["may not read it", "permissions"]);
}

#[test]
fn a_file_name_is_percent_decoded() {
    let directory = directory();
    let path = directory.path().join("what? 100%.img");
    File::create(&path).unwrap().set_len(MIB).unwrap();
    let spec = format!("file:{}/what%3F 100%25.img?block-size=4096", directory.path().display());
    let disk = shadowbell_disk_file::open(&spec).unwrap();
    assert_eq!(disk.info().blocks, 256);
    assert_eq!(disk.name(), path.to_str().unwrap());
}

#[test]
fn read_only_disks_refuse_writes_and_serve_reads() {
    let directory = directory();
    let path = image(directory.path(), MIB);
    std::fs::write(&path, vec![7; MIB as usize]).unwrap();
    let host = Host::new(8192);
    let by_option = open(&path, "?read-only=on");
    let mut all = vec![by_option];
    std::fs::set_permissions(&path, Permissions::from_mode(0o444)).unwrap();
    if !rustix::process::geteuid().is_root() {
        all.push(open(&path, "")); // the permissions of the file make it read-only
    }
    for disk in all {
        let info = disk.info();
        assert!(info.read_only && !info.discard && !info.volatile_cache);
        let mut queue = disk.queue().unwrap();
        let queue = &mut *queue;
        let zeroes = Op::WriteZeroes { deallocate: true, fua: true };
        for op in [WRITE, zeroes, Op::Discard] {
            let data = host.buffer(&[(0, 4096)], false);
            assert_eq!(run_one(queue, op, 0, 4096, data), Err(DiskError::ReadOnly));
        }
        assert_eq!(run_one(queue, Op::Read, 0, 4096, host.buffer(&[(4096, 4096)], true)), Ok(()));
        assert_eq!(host.bytes.read::<u8>(4096), Some(7));
        assert_eq!(run_one(queue, Op::Verify, 0, MIB, Segments::new()), Ok(()));
        assert_eq!(run_one(queue, Op::Flush, 0, 0, Segments::new()), Ok(()));
    }
}

#[test]
fn a_write_protected_device_is_a_read_only_disk() {
    let directory = directory();
    let path = image(directory.path(), MIB);
    let name = path.to_str().unwrap();
    let Some(device) = as_root("losetup", &["-f", "--show", "-r", name]) else {
        return;
    };
    let _detach = Undo("losetup", vec!["-d".into(), device.clone()]);
    let disk = open(device.as_ref(), "");
    assert!(disk.info().read_only);
    let result = run_one(&mut *disk.queue().unwrap(), Op::Verify, 0, MIB, Segments::new());
    assert_eq!(result, Ok(()));
}

#[test]
fn one_image_has_one_writer() {
    let directory = directory();
    let path = image(directory.path(), MIB);
    let writer = open(&path, "");
    // The image is open for writing, so the lock excludes a reader as well.
    for options in ["", "?read-only=on"] {
        let error = refused(&path, options);
        assert!(matches!(error, OpenError::Busy { writable: false, .. }));
        expect_message(&error, &path, &["another program", "has it open", "(`fuser -v "]);
    }
    drop(writer);
    let readers = [open(&path, "?read-only=on"), open(&path, "?read-only=on")];
    let error = refused(&path, "");
    assert!(matches!(error, OpenError::Busy { writable: true, .. }));
    expect_message(&error, &path, &["or open it `read-only=on`"]);
    drop(readers);
    let disk = open(&path, "");
    let queue = disk.queue().unwrap();
    drop(disk);
    assert!(matches!(refused(&path, ""), OpenError::Busy { .. }), "a queue still uses the file");
    drop(queue);
    // The test is repeated until one attempt is quick, because a busy machine may delay some.
    wait::until("an image that is free at once", || {
        drop(open(&path, "").queue().unwrap());
        let since = Instant::now();
        drop(open(&path, ""));
        // This time is shorter than the time for which opening waits for a locked image.
        since.elapsed() < Duration::from_millis(400)
    });
}

#[test]
fn opening_waits_for_the_lock_of_an_ending_server() {
    let directory = directory();
    let path = image(directory.path(), MIB);
    // The test is repeated, because opening waits for the lock only for a limited time, and a busy
    // machine may exceed it.
    wait::until("an image that was waited for", || {
        let old = open(&path, "");
        std::thread::scope(|threads| {
            threads.spawn(|| {
                wait::short_pause();
                drop(old);
            });
            shadowbell_disk_file::open(path.to_str().unwrap()).is_ok()
        })
    });
}

#[test]
fn other_programs_see_written_data() {
    let directory = directory();
    let path = image(directory.path(), 4 * MIB);
    for options in ["", "?direct=off"] {
        let disk = open(&path, options);
        let mut queue = disk.queue().unwrap();
        let host = Host::new(MIB);
        host.bytes.fill(0, MIB as usize, 0xa5).unwrap();
        let data = host.buffer(&[(0, MIB as usize)], false);
        assert_eq!(run_one(&mut *queue, WRITE, MIB, MIB, data), Ok(()));
        assert_eq!(run_one(&mut *queue, Op::Flush, 0, 0, Segments::new()), Ok(()));
        let content = std::fs::read(&path).unwrap();
        assert!(content[MIB as usize..2 * MIB as usize].iter().all(|b| *b == 0xa5));
        assert!(content[2 * MIB as usize..].iter().all(|b| *b == 0));
        let used = || std::fs::metadata(&path).unwrap().blocks() * 512;
        assert!(used() >= MIB);
        if disk.info().discard {
            assert_eq!(run_one(&mut *queue, Op::Discard, MIB, MIB, Segments::new()), Ok(()));
            assert!(used() < MIB / 2, "the hole is given back: {} bytes are left", used());
        }
        assert_eq!(std::fs::metadata(&path).unwrap().len(), 4 * MIB, "and the size stays");
    }
}

#[test]
fn a_truncated_image_returns_errors_and_no_zeroes() {
    for options in ["", "?direct=off"] {
        let directory = directory();
        let path = image(directory.path(), MIB);
        std::fs::write(&path, vec![7; MIB as usize]).unwrap();
        let disk = open(&path, options);
        let mut queue = disk.queue().unwrap();
        let mut other = disk.queue().unwrap();
        let host = Host::new(MIB);
        let read = |queue: &mut dyn shadowbell_disk::Queue, offset: u64, len: u64| {
            run_one(queue, Op::Read, offset, len, host.buffer(&[(0, len as usize)], true))
        };
        assert_eq!(read(&mut *queue, 0, MIB), Ok(()));
        // The new end is in the middle of a block.
        OpenOptions::new().write(true).open(&path).unwrap().set_len(MIB / 2 + 1000).unwrap();
        assert_eq!(read(&mut *queue, 0, MIB / 2), Ok(()));
        assert_eq!(read(&mut *queue, 0, MIB), Err(DiskError::OutOfRange));
        assert_eq!(read(&mut *queue, MIB - 4096, 4096), Err(DiskError::OutOfRange));
        let beyond = MIB / 2 + 4096;
        for op in [Op::Verify, Op::Discard, Op::WriteZeroes { deallocate: false, fua: false }] {
            let result = run_one(&mut *queue, op, beyond, 4096, Segments::new());
            assert_eq!(result, Err(DiskError::OutOfRange), "{op:?}");
        }
        // A write must not extend the file again. If another process extends it, the old contents
        // are lost nevertheless, and every queue must detect that.
        let data = host.buffer(&[(0, 4096)], false);
        assert_eq!(run_one(&mut *other, WRITE, beyond, 4096, data), Err(DiskError::OutOfRange));
        assert_eq!(std::fs::metadata(&path).unwrap().len(), MIB / 2 + 1000);
        OpenOptions::new().write(true).open(&path).unwrap().set_len(MIB).unwrap();
        assert_eq!(read(&mut *other, MIB / 2, 4096), Err(DiskError::OutOfRange));
        assert_eq!(read(&mut *other, 0, MIB / 2), Ok(()));
        let flushed = run_one(&mut *other, Op::Flush, 0, 0, Segments::new());
        assert_eq!(flushed, Err(DiskError::Io(libc::EIO)));
        let data = host.buffer(&[(0, 4096)], false);
        assert_eq!(
            run_one(&mut *other, WRITE, 0, 4096, data),
            Ok(()),
            "the remaining blocks are writable"
        );
    }
}

#[test]
fn a_flush_notices_that_the_image_shrank() {
    let directory = directory();
    let path = image(directory.path(), MIB);
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    assert_eq!(run_one(&mut *queue, Op::Flush, 0, 0, Segments::new()), Ok(()));
    OpenOptions::new().write(true).open(&path).unwrap().set_len(0).unwrap();
    let flushed = run_one(&mut *queue, Op::Flush, 0, 0, Segments::new());
    assert_eq!(flushed, Err(DiskError::Io(libc::EIO)));
    let host = Host::new(4096);
    let data = host.buffer(&[(0, 4096)], false);
    assert_eq!(run_one(&mut *queue, WRITE, 0, 4096, data), Err(DiskError::OutOfRange));
}

#[test]
fn writes_on_a_full_file_system_fail_with_no_space() {
    let directory = directory();
    let mount = directory.path().to_str().unwrap();
    let options = ["-t", "tmpfs", "-o", "size=1m,huge=never", "tmpfs", mount];
    if as_root("mount", &options).is_none() {
        return;
    }
    let _unmount = Undo("umount", vec!["-l".into(), mount.into()]);
    // The image is sparse, and larger than the file system.
    let path = image(directory.path(), 16 * MIB);
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    let queue = &mut *queue;
    let host = Host::new(4 * MIB);
    host.bytes.fill(0, 4 * MIB as usize, 1).unwrap();
    let data = |len: u64| host.buffer(&[(0, len as usize)], false);
    assert_eq!(run_one(queue, WRITE, 0, MIB / 2, data(MIB / 2)), Ok(()));
    assert_eq!(run_one(queue, WRITE, 4 * MIB, 4 * MIB, data(4 * MIB)), Err(DiskError::NoSpace));
    let zeroes = Op::WriteZeroes { deallocate: false, fua: false };
    let result = run_one(queue, zeroes, 8 * MIB, 4 * MIB, Segments::new());
    assert_eq!(result, Err(DiskError::NoSpace));
    // The written data are readable. After space is freed, writes succeed again.
    let back = host.buffer(&[(0, MIB as usize / 2)], true);
    assert_eq!(run_one(queue, Op::Read, 0, MIB / 2, back), Ok(()));
    assert_eq!(host.bytes.read::<u8>(MIB as usize / 2 - 1), Some(1));
    assert_eq!(run_one(queue, Op::Discard, 0, 16 * MIB, Segments::new()), Ok(()));
    assert_eq!(run_one(queue, WRITE, 4 * MIB, MIB / 2, data(MIB / 2)), Ok(()));
    let holes = Op::WriteZeroes { deallocate: true, fua: true };
    assert_eq!(run_one(queue, holes, 0, 16 * MIB, Segments::new()), Ok(()));
}

#[test]
fn truncated_host_memory_is_an_error() {
    let directory = directory();
    let path = image(directory.path(), MIB);
    for options in ["", "?direct=off"] {
        let disk = open(&path, options);
        let mut queue = disk.queue().unwrap();
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let fd = rustix::fs::memfd_create("guest", flags).unwrap();
        rustix::fs::ftruncate(&fd, 16384).unwrap();
        let memory = Mapping::from_fd(&fd, 0, 16384, Protection::ReadWrite).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        for op in [Op::Read, WRITE] {
            let data = Segments::from_bytes(&memory.bytes());
            let result = run_one(&mut *queue, op, 0, 16384, data);
            assert_eq!(result, Err(DiskError::Io(libc::EFAULT)), "{op:?}");
        }
        let data = Segments::from_bytes(&memory.bytes());
        assert_eq!(run_one(&mut *queue, Op::Read, 0, 4096, data), Ok(()), "the queue still works");
    }
}

#[test]
fn large_requests_and_scattered_ones_work() {
    let directory = directory();
    let path = image(directory.path(), 64 * MIB);
    for options in ["", "?direct=off"] {
        let disk = open(&path, options);
        let mut queue = disk.queue().unwrap();
        let host = Host::new(48 * MIB);
        // The buffer has more pieces than the kernel accepts in one call. The pieces are aligned
        // for direct I/O.
        let pieces: Vec<_> = (0..3000).map(|i| (i * 8192, 512)).collect();
        for (at, len) in &pieces {
            host.bytes.fill(*at, *len, (at / 8192) as u8).unwrap();
        }
        let len = 3000 * 512;
        let data = host.buffer(&pieces, false);
        assert_eq!(run_one(&mut *queue, WRITE, 512, len, data), Ok(()));
        let mut content = vec![0; len as usize];
        File::open(&path).unwrap().read_exact_at(&mut content, 512).unwrap();
        assert!(content.chunks(512).enumerate().all(|(i, b)| b.iter().all(|b| *b == i as u8)));
        let back = host.buffer(&[(0, len as usize)], true);
        assert_eq!(run_one(&mut *queue, Op::Read, 512, len, back), Ok(()));
        let start = &host.content()[..len as usize];
        assert!(*start == content[..]);
        // The request has 48 MiB.
        let data = host.buffer(&[(0, 48 * MIB as usize)], false);
        assert_eq!(run_one(&mut *queue, Op::Write { fua: true }, 0, 48 * MIB, data), Ok(()));
        let data = host.buffer(&[(0, 48 * MIB as usize)], false);
        assert_eq!(run_one(&mut *queue, Op::Compare, 0, 48 * MIB, data), Ok(()));
    }
}

#[test]
fn flushes_and_fua_writes_reach_the_device() {
    let directory = directory();
    let path = image(directory.path(), MIB);
    let name = path.to_str().unwrap();
    let Some(device) = as_root("losetup", &["-f", "--show", name]) else {
        return;
    };
    let _detach = Undo("losetup", vec!["-d".into(), device.clone()]);
    let flushes = || {
        let block = device.trim_start_matches("/dev/");
        let stat = std::fs::read_to_string(format!("/sys/block/{block}/stat")).unwrap();
        stat.split_whitespace().nth(15).map(|n| n.parse::<u64>().unwrap())
    };
    if flushes().is_none() {
        skipped("this kernel does not count flushes");
        return;
    }
    let host = Host::new(4096);
    for options in ["", "?direct=off"] {
        let disk = open(device.as_ref(), options);
        let mut queue = disk.queue().unwrap();
        for (op, flushed) in [
            (WRITE, false),
            (Op::Write { fua: true }, true),
            (WRITE, false),
            (Op::Flush, true),
            (Op::WriteZeroes { deallocate: false, fua: false }, false),
            (Op::WriteZeroes { deallocate: false, fua: true }, true),
            (Op::WriteZeroes { deallocate: true, fua: true }, true),
        ] {
            let before = flushes();
            let data = host.buffer(&[(0, 4096)], false);
            let len = if op == Op::Flush { 0 } else { 4096 };
            assert_eq!(run_one(&mut *queue, op, 0, len, data), Ok(()));
            assert_eq!(flushes() > before, flushed, "{op:?} with `{options}`");
        }
    }
}

#[test]
fn direct_io_is_used_where_possible_and_refused_with_the_reason() {
    let directory = directory();
    let path = image(directory.path(), MIB);
    let buffered = options(|o| o.direct = Direct::Off);
    assert!(!FileDisk::open(&path, &buffered).unwrap().is_direct());
    let demanded = options(|o| o.direct = Direct::On);
    match FileDisk::open(&path, &demanded) {
        Ok(disk) => assert!(disk.is_direct()),
        Err(error) => {
            expect_message(&error, &path, &["direct I/O is not possible", "leave out `direct=on`"])
        }
    }
    // A device with sectors of 4096 bytes does not support direct I/O for blocks of 512 bytes.
    let name = path.to_str().unwrap();
    let Some(device) = as_root("losetup", &["-f", "--show", "-b", "4096", name]) else {
        return;
    };
    let _detach = Undo("losetup", vec!["-d".into(), device.clone()]);
    let device = Path::new(&device);
    let small = options(|o| o.block_size = Some(512));
    assert!(!FileDisk::open(device, &small).unwrap().is_direct());
    let own = FileDisk::open(device, &demanded).unwrap();
    assert!(own.is_direct());
    drop(own);
    let error = refused(device, "?block-size=512&direct=on");
    expect_message(&error, device, &["units of 4096 bytes", "`block-size=4096`"]);
}

#[test]
fn a_mounted_device_is_not_overwritten() {
    let directory = directory();
    let path = image(directory.path(), 16 * MIB);
    let name = path.to_str().unwrap();
    let Some(device) = as_root("losetup", &["-f", "--show", name]) else {
        return;
    };
    let _detach = Undo("losetup", vec!["-d".into(), device.clone()]);
    let mount = directory.path().join("mount");
    std::fs::create_dir(&mount).unwrap();
    let mount = mount.to_str().unwrap();
    if as_root("mkfs.ext4", &["-q", &device]).is_none()
        || as_root("mount", &[&device, mount]).is_none()
    {
        return;
    }
    let _unmount = Undo("umount", vec!["-l".into(), mount.into()]);
    let error = refused(device.as_ref(), "");
    expect_message(&error, device.as_ref(), &["the system uses it", "mounted"]);
    assert!(open(device.as_ref(), "?read-only=on").info().read_only);
}

/// If a write-back fails, the kernel reports it to only one of several concurrent syncs. All
/// flushes must fail nevertheless.
#[test]
fn concurrent_flushes_all_fail_after_a_lost_write() {
    let directory = directory();
    let place = directory.path().join("small");
    std::fs::create_dir(&place).unwrap();
    let small = place.to_str().unwrap().to_owned();
    if as_root("mount", &["-t", "tmpfs", "-o", "size=1m", "tmpfs", &small]).is_none() {
        return;
    }
    let _unmount = Undo("umount", vec!["-l".into(), small]);
    let path = image(&place, 64 * MIB);
    let Some(device) = as_root("losetup", &["-f", "--show", path.to_str().unwrap()]) else {
        return;
    };
    let _detach = Undo("losetup", vec!["-d".into(), device.clone()]);
    let host = Host::new(4 * MIB);
    const FUA: Op = Op::Write { fua: true };
    for aio in ["io_uring", "threads"] {
        for (first, second) in [(Op::Flush, Op::Flush), (Op::Flush, FUA), (FUA, Op::Flush)] {
            let disk = open(device.as_ref(), &format!("?direct=off&aio={aio}"));
            let mut queues = [disk.queue().unwrap(), disk.queue().unwrap()];
            let data = host.buffer(&[(0, 4 * MIB as usize)], false);
            assert_eq!(run_one(&mut *queues[0], WRITE, 0, 4 * MIB, data), Ok(()));
            for (queue, op) in queues.iter_mut().zip([first, second]) {
                let len = if op == FUA { 4096 } else { 0 };
                let request = Request { op, offset: 0, len };
                let mut data = host.buffer(&[(0, len as usize)], false);
                assert_eq!(queue.submit(1, &request, &mut data), Submitted::Pending);
                queue.commit();
            }
            // The results are examined in reverse order.
            for queue in queues.iter_mut().rev() {
                let mut result = None;
                while result.is_none() {
                    queue.reap(&mut |_, outcome, _| result = Some(outcome));
                    std::thread::yield_now();
                }
                assert!(result.unwrap().is_err(), "{first:?} and {second:?} by {aio}");
            }
            assert!(disk.has_lost_writes());
        }
    }
}

/// The guest must see the content of the disk in the image, and not the bytes of the image file. So
/// images of other formats are refused without `format=raw`.
#[test]
fn images_of_other_formats_need_format_raw() {
    let directory = directory();
    let path = image(directory.path(), 1 << 20);
    for (start, format) in [
        (&b"QFI\xfb\0\0\0\x03"[..], ImageFormat::Qcow2),
        (b"KDMV\x01\0\0\0", ImageFormat::Vmdk),
        (b"vhdxfile", ImageFormat::Vhdx),
        (b"QED\0", ImageFormat::Qed),
    ] {
        let mut content = vec![0; 1 << 20];
        content[..start.len()].copy_from_slice(start);
        std::fs::write(&path, content).unwrap();
        let error = shadowbell_disk_file::open(path.to_str().unwrap()).unwrap_err();
        assert!(
            matches!(error, shadowbell_disk::OpenError::Format { format: found, .. } if found == format),
            "{error}"
        );
        assert!(error.to_string().contains("`format=raw`"), "{error}");
        let raw = open(&path, "?format=raw");
        assert_eq!(raw.info().bytes(), 1 << 20);
        drop(raw);
        // Opening succeeds only if the drop has closed the first disk and released its lock.
        open(&path, "?format=raw&direct=off");
    }
}
