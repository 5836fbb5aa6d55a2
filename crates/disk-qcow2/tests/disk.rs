//! Tests with qcow2 images that are locked, refused, full, damaged or truncated, and with a process
//! that is killed during writes.

mod common;

use common::{
    Random, check, check_whole, content, directory, flush, memory, open, qemu_img, qemu_img_does,
    read, run_one, segments, try_open, wait, write,
};
use shadowbell_disk::{self as disk, Disk, DiskError, Op, Request, Submitted};
use shadowbell_disk_qcow2::{OpenError, create, named_files};
use shadowbell_memory::Segments;
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::programs::skipped;
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

const MIB: u64 = 1 << 20;

fn image(directory: &Path, size: u64) -> PathBuf {
    let path = directory.join("disk.qcow2");
    create(&path, size).unwrap();
    path
}

fn name(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn a_qcow2_image_is_locked_like_a_raw_one() {
    let directory = directory();
    let path = image(directory.path(), MIB);
    let first = open(&path, "");
    let busy = |options| {
        let error = try_open(&path, options).unwrap_err();
        assert!(matches!(error, OpenError::File(disk::OpenError::Busy { .. })), "{error}");
    };
    busy("");
    busy("?read-only=on");
    drop(first);
    let one = open(&path, "?read-only=on");
    let two = open(&path, "?read-only=on");
    busy("");
    let mut queue = one.queue().unwrap();
    assert_eq!(write(&mut *queue, 0, &[1; 512]), Err(DiskError::ReadOnly));
    assert_eq!(flush(&mut *queue), Ok(()));
    drop((one, queue, two));
    open(&path, "");
}

/// If the header declares no snapshots, the offset of the snapshot table is ignored, whatever its
/// value is.
#[test]
fn an_empty_snapshot_table_is_nowhere() {
    let directory = directory();
    let path = image(directory.path(), MIB);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&(1_u64 << 40).to_be_bytes(), 64).unwrap();
    // The image is marked as dirty, so that all references are counted.
    file.write_all_at(&1_u64.to_be_bytes(), 72).unwrap();
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    assert_eq!(write(&mut *queue, 0, &[1; 512]), Ok(()));
    drop((queue, disk));
    check_whole(&path);
}

/// The first write to a part of a cluster writes the whole cluster to the data file, except for the
/// part of the cluster that is beyond the end of the disk.
#[test]
fn a_data_file_does_not_grow_beyond_the_disk() {
    for raw in ["on", "off"] {
        let directory = directory();
        let path = directory.path().join("disk.qcow2");
        let data = directory.path().join("data");
        let options = format!("data_file={},data_file_raw={raw}", data.display());
        if !qemu_img_does(&["create", "-q", "-fqcow2", "-o", &options, name(&path), "100K"]) {
            return;
        }
        // QEMU rounds the length of a raw data file up.
        let before = std::fs::metadata(&data).unwrap().len();
        let disk = open(&path, "?allow-backing=on");
        let mut queue = disk.queue().unwrap();
        assert_eq!(write(&mut *queue, 65536 + 512, &[7; 1024]), Ok(()));
        let len = std::fs::metadata(&data).unwrap().len();
        assert_eq!(len, before, "{raw}: the data file has grown");
        let mut expected = vec![0; 36 << 10];
        expected[512..1536].fill(7);
        assert!(read(&mut *queue, 65536, 36 << 10).unwrap() == expected);
        drop((queue, disk));
        check_whole(&path);
    }
}

#[test]
fn an_image_has_the_properties_of_its_format() {
    let directory = directory();
    let path = image(directory.path(), 3 * MIB + 512);
    let disk = open(&path, "");
    let info = disk.info();
    assert_eq!((info.bytes(), info.block_size, info.granularity), (3 * MIB + 512, 512, 128));
    assert!(info.discard && info.volatile_cache && !info.read_only);
    assert!(disk.describe().starts_with("qcow2 version 3, clusters of 64 KiB, "));
    drop(disk);
    let error = try_open(&path, "?block-size=4096").unwrap_err().to_string();
    assert!(error.contains("not a multiple of the block size"), "{error}");
    assert!(create(&path, MIB).is_err(), "what is there stays");
    open(&path, "");
}

#[test]
fn invalid_images_are_refused_with_the_reason() {
    let directory = directory();
    let path = directory.path().join("disk.qcow2");
    let refused = |options: &str| try_open(&path, options).unwrap_err().to_string();
    std::fs::write(&path, [7; 4096]).unwrap();
    assert!(refused("").contains("it is not a qcow2 image"));
    std::fs::write(&path, b"QFI\xfb\0\0\0\x03").unwrap();
    assert!(refused("").contains("ends inside of its header"));
    let base = directory.path().join("base");
    std::fs::write(&base, [1; 4096]).unwrap();
    // The header declares encryption, like an image of `qemu-img create -o encrypt.format=luks`.
    create(&path.with_extension("luks"), MIB).unwrap();
    let luks = std::fs::File::options().write(true).open(path.with_extension("luks")).unwrap();
    luks.write_all_at(&2_u32.to_be_bytes(), 32).unwrap();
    let error = try_open(&path.with_extension("luks"), "").unwrap_err().to_string();
    assert!(error.contains("encrypted (LUKS)"), "{error}");
    let path = name(&path);
    if qemu_img(&["--version"]).is_none() {
        return;
    }
    let create = |options: &[&str]| {
        let arguments = [&["create", "-f", "qcow2"], options, &[path, "1M"]].concat();
        let output = qemu_img(&arguments).unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    create(&["-o", &format!("data_file={}/data", directory.path().display())]);
    assert!(refused("").contains("allow-backing=on"));
    // A backing file is opened only if that is allowed, and if the image states its format.
    create(&["-b", name(&base), "-F", "raw"]);
    assert!(refused("").contains("allow-backing=on"));
    assert_eq!(named_files(path.as_ref()), std::slice::from_ref(&base));
    assert!(named_files(&base).is_empty() && named_files(directory.path()).is_empty());
    assert_eq!(content(&try_open(path.as_ref(), "?allow-backing=on").unwrap())[..4096], [1; 4096]);
    let mut bytes = std::fs::read(path).unwrap();
    let format = bytes.windows(4).position(|kind| kind == [0xe2, 0x79, 0x2a, 0xca]).unwrap();
    bytes[format] = 0x11;
    std::fs::write(path, bytes).unwrap();
    assert!(refused("?allow-backing=on").contains("does not state the format"));
    qemu_img_does(&["rebase", "-u", "-f", "qcow2", "-b", "nbd://host/x", "-F", "raw", path]);
    assert!(refused("?allow-backing=on").contains("not a local file"));
    qemu_img_does(&["rebase", "-u", "-f", "qcow2", "-b", "base", "-F", "vmdk", path]);
    assert!(refused("?allow-backing=on").contains("vmdk"));
    qemu_img_does(&["rebase", "-u", "-f", "qcow2", "-b", "disk.qcow2", "-F", "qcow2", path]);
    for options in ["?allow-backing=on", "?allow-backing=on&read-only=on"] {
        let error = refused(options);
        assert!(error.contains("its own backing file"), "{error}");
    }
    // A corrupt image is readable. Bit 1 of the incompatible features marks it.
    create(&[]);
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.write_all_at(&[2], 79).unwrap();
    assert!(refused("").contains("marked as corrupt"));
    assert_eq!(content(&try_open(path.as_ref(), "?read-only=on").unwrap())[..512], [0; 512]);
    // The image has an unknown feature.
    file.write_all_at(&[64], 79).unwrap();
    assert!(refused("").contains("unknown features"));
}

#[test]
fn a_cancelled_read_writes_no_memory_and_writes_complete() {
    let directory = directory();
    let path = image(directory.path(), 64 * MIB);
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, 0, &vec![7; 8 << 20]).unwrap();
    for round in 0..20 {
        let bytes = memory(64 << 10);
        let requests = 64;
        let mut pending = 0;
        for tag in 0..requests {
            let op = if tag % 4 == 3 { Op::Write { fua: false } } else { Op::Read };
            let at = u64::from(tag) << 10;
            let request = Request { op, offset: at, len: 1024 };
            let mut data = segments(&bytes, at as usize, 1024);
            assert_eq!(queue.submit(tag, &request, &mut data), Submitted::Pending);
            pending += 1;
        }
        queue.commit();
        if round % 2 == 0 {
            queue.reap(&mut |_, result, _| {
                result.unwrap();
                pending -= 1;
            });
        }
        (0..requests).for_each(|tag| queue.cancel(tag));
        assert_eq!(queue.pending(), pending);
        while queue.pending() > 0 {
            wait(&*queue);
            queue.reap(&mut |_, result, _| {
                assert!(matches!(result, Ok(()) | Err(DiskError::Cancelled)), "{result:?}");
                pending -= 1;
            });
        }
        assert_eq!(pending, 0);
        // No request is in flight any more, so no thread may still change the memory.
        let before = bytes.slice(0, 64 << 10).unwrap();
        let mut one = vec![0; 64 << 10];
        before.read_into(0, &mut one).unwrap();
        flush(&mut *queue).unwrap();
        run_one(&mut *queue, Op::Verify, 0, 64 << 10, Segments::new()).unwrap();
        let mut two = vec![0; 64 << 10];
        before.read_into(0, &mut two).unwrap();
        assert!(one == two);
    }
    drop((queue, disk));
    check_whole(&path);
}

#[test]
fn a_waiting_request_is_cancelled_before_its_start() {
    let directory = directory();
    let path = image(directory.path(), MIB);
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    let request = Request { op: Op::Write { fua: false }, offset: 0, len: 512 };
    let bytes = memory(512);
    bytes.fill(0, 512, 9).unwrap();
    let mut data = segments(&bytes, 0, 512);
    assert_eq!(queue.submit(1, &request, &mut data), Submitted::Pending);
    queue.cancel(1);
    queue.cancel(77);
    let mut ended = Vec::new();
    wait(&*queue);
    queue.reap(&mut |tag, result, _| ended.push((tag, result)));
    assert_eq!(ended, [(1, Err(DiskError::Cancelled))]);
    assert_eq!(read(&mut *queue, 0, 512).unwrap(), [0; 512]);
}

#[test]
fn requests_wait_for_buffers() {
    let directory = directory();
    let path = image(directory.path(), 256 * MIB);
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    let len = 2 << 20;
    let bytes = memory(len);
    bytes.fill(0, len, 3).unwrap();
    let requests = (0..64_u64).map(|n| {
        let request =
            Request { op: Op::Write { fua: n % 16 == 0 }, offset: n * len as u64, len: len as u64 };
        (request, segments(&bytes, 0, len))
    });
    let results = common::run(&mut *queue, requests.collect());
    assert!(results.iter().all(|result| result.is_ok()), "{results:?}");
    assert!(content(&disk)[..64 * len].iter().all(|byte| *byte == 3));
}

/// An incomplete copy is refused with the reason, and is not extended. It is readable, as is an
/// image that was not closed; neither is changed by a reader.
#[test]
fn incomplete_copies_are_named_and_readers_change_nothing() {
    let directory = directory();
    let path = image(directory.path(), 4 * MIB);
    let mut queue = open(&path, "").queue().unwrap();
    write(&mut *queue, 0, &vec![1; 1 << 20]).unwrap();
    drop(queue);
    // Bit 0 of the incompatible features marks an image that was not closed.
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[1], 79).unwrap();
    let whole = std::fs::read(&path).unwrap();
    let content = |path: &Path| {
        let disk = try_open(path, "?read-only=on").unwrap();
        read(&mut *disk.queue().unwrap(), 0, 4096).unwrap()
    };
    assert_eq!(content(&path), [1; 4096]);
    assert!(std::fs::read(&path).unwrap() == whole, "a reader has changed the image");
    for is_dirty in [1, 0] {
        std::fs::write(&path, &whole[..whole.len() - (128 << 10)]).unwrap();
        file.write_all_at(&[is_dirty], 79).unwrap();
        let before = std::fs::read(&path).unwrap();
        let error = try_open(&path, "").unwrap_err().to_string();
        assert!(error.contains("its copy is not complete"), "{error}");
        assert_eq!(content(&path), [1; 4096]);
        assert!(std::fs::read(&path).unwrap() == before, "the copy was changed");
    }
}

#[test]
fn a_truncated_file_returns_errors_and_no_zeroes() {
    let directory = directory();
    let path = image(directory.path(), 4 * MIB);
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, 0, &vec![1; 1 << 20]).unwrap();
    flush(&mut *queue).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(MIB / 2).unwrap();
    assert_eq!(read(&mut *queue, 512 << 10, 4096), Err(DiskError::Io(libc::EIO)));
    assert!(disk.has_lost_writes());
    assert_eq!(write(&mut *queue, 0, &[1; 512]), Err(DiskError::Io(libc::EIO)));
    assert_eq!(flush(&mut *queue), Err(DiskError::Io(libc::EIO)));
    drop((queue, disk));
    assert_eq!(std::fs::metadata(&path).unwrap().len(), MIB / 2, "nothing was written any more");
}

/// Clusters that are allocated neither in the image nor in its backing files are reported as holes.
/// A written cluster is reported as data, even if the table entry for it is so far only in memory.
#[test]
fn unallocated_clusters_are_holes() {
    let extents = |disk: &dyn Disk| {
        let mut all: Vec<(u64, bool)> = Vec::new();
        disk.extents(0, disk.info().bytes(), &mut |extent| {
            match all.last_mut() {
                Some(last) if last.1 == extent.allocated => last.0 += extent.len,
                _ => all.push((extent.len, extent.allocated)),
            }
            true
        });
        all
    };
    let directory = directory();
    let path = image(directory.path(), 2048 * MIB);
    let disk = open(&path, "");
    assert_eq!(extents(&disk), [(2048 * MIB, false)]);
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, 600 * MIB + 512, &[1; 512]).unwrap();
    let cluster = 64 << 10;
    let all = [(600 * MIB, false), (cluster, true), (1448 * MIB - cluster, false)];
    assert_eq!(extents(&disk), all);
    flush(&mut *queue).unwrap();
    assert_eq!(extents(&disk), all);
    run_one(&mut *queue, Op::Discard, 600 * MIB, cluster, Segments::new()).unwrap();
    assert_eq!(extents(&disk), [(2048 * MIB, false)]);
    // If the tables cannot be read, all of the disk is reported as data.
    write(&mut *queue, 0, &vec![1; 1 << 20]).unwrap();
    flush(&mut *queue).unwrap();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(MIB / 2).unwrap();
    assert_eq!(extents(&disk), [(2048 * MIB, true)]);
}

/// On a full file system, writes fail with `NoSpace`. When there is space again, they succeed.
#[test]
fn writes_on_full_storage_fail_until_there_is_space() {
    let directory = directory();
    let point = directory.path().join("small");
    std::fs::create_dir(&point).unwrap();
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=3M", "tmpfs", name(&point)])
        .status();
    if !mounted.is_ok_and(|status| status.success()) {
        skipped("this user may not mount a small file system");
        return;
    }
    struct Unmount(PathBuf);
    impl Drop for Unmount {
        fn drop(&mut self) {
            let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        }
    }
    let _unmount = Unmount(point.clone());
    let ballast = point.join("ballast");
    std::fs::write(&ballast, vec![0; 1 << 20]).unwrap();
    let path = image(&point, 16 * MIB);
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    let mut refused = None;
    for n in 0..64_u64 {
        match write(&mut *queue, n * 65536, &[n as u8 + 1; 65536]) {
            Ok(()) => assert!(refused.is_none()),
            Err(error) => {
                assert_eq!(error, DiskError::NoSpace);
                refused.get_or_insert(n);
            }
        }
    }
    let refused = refused.expect("no request fails on a full file system");
    assert!(disk.is_full());
    for n in 0..refused {
        let there = read(&mut *queue, n * 65536, 65536).unwrap();
        assert!(there.iter().all(|byte| *byte == n as u8 + 1), "{n}");
    }
    std::fs::remove_file(&ballast).unwrap();
    for n in refused..refused + 8 {
        write(&mut *queue, n * 65536, &[n as u8 + 1; 65536]).unwrap();
    }
    write(&mut *queue, 63 * 65536, &[64; 65536]).unwrap();
    flush(&mut *queue).unwrap();
    assert!(!disk.is_full());
    for n in 0..refused + 8 {
        let there = read(&mut *queue, n * 65536, 65536).unwrap();
        assert!(there.iter().all(|byte| *byte == n as u8 + 1), "{n}");
    }
    drop((queue, disk));
    check(&path);
}

/// Moves the refcount table of an image to the end of the file, enlarges it to `clusters` clusters,
/// and adds a refcount block whose counts are all 1 as entry `nth`. Returns the new length of the
/// file.
fn count_far_away(path: &Path, bits: u32, clusters: u64, nth: u64) -> u64 {
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let number = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    let put = |at: u64, value: u64| file.write_all_at(&value.to_be_bytes(), at).unwrap();
    let table = file.metadata().unwrap().len().next_multiple_of(1 << bits);
    let block = table + (clusters << bits);
    let len = block + (1 << bits);
    file.set_len(len).unwrap();
    let old = number(48);
    (0..8).for_each(|n| put(table + n * 8, number(old + n * 8)));
    put(table + nth * 8, block);
    file.write_all_at(&vec![0xff; 1 << bits], block).unwrap();
    put(48, table);
    file.write_all_at(&(clusters as u32).to_be_bytes(), 56).unwrap();
    len
}

/// An image is refused if it has refcount blocks for clusters whose offsets do not fit into a table
/// entry. If one of these clusters were allocated, its table entry would refer to another cluster.
#[test]
fn counts_beyond_the_largest_offset_are_refused() {
    let directory = directory();
    let path = directory.path().join("disk.qcow2");
    let options = ["create", "-q", "-f", "qcow2", "-o", "cluster_size=2M,refcount_bits=1"];
    if !qemu_img_does(&[&options[..], &[name(&path), "64M"]].concat()) {
        return;
    }
    count_far_away(&path, 21, 4, (1 << 19) - 1);
    let before = std::fs::read(&path).unwrap();
    let error = try_open(&path, "").unwrap_err().to_string();
    assert!(error.contains("beyond the largest offset"), "{error}");
    assert!(std::fs::read(&path).unwrap() == before, "nothing is changed");
}

/// The repair of a dirty image handles refcounts of clusters that do not exist: it neither enlarges
/// the file nor needs much memory.
#[test]
fn counts_of_missing_clusters_do_not_matter_to_a_repair() {
    let directory = directory();
    let path = image(directory.path(), 64 * MIB);
    let disk = open(&path, "");
    write(&mut *disk.queue().unwrap(), 0, &[7; 65536]).unwrap();
    drop(disk);
    let len = count_far_away(&path, 16, 1, 8000);
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&1_u64.to_be_bytes(), 72).unwrap();
    drop(file);
    let disk = open(&path, "");
    assert_eq!(read(&mut *disk.queue().unwrap(), 0, 65536).unwrap(), [7; 65536]);
    drop(disk);
    assert!(std::fs::metadata(&path).unwrap().len() <= len + (1 << 20));
    check(&path);
}

/// Messages of the panics in the code of the disk. The disk catches a panic, so that only a request
/// fails; the test finds the panic here.
static PANICS: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn record_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if panic.location().is_some_and(|at| at.file().contains("disk-qcow2/src")) {
            PANICS.lock().unwrap().push(panic.to_string());
        }
        before(panic);
    }));
}

/// With any damage in the tables, each request ends, and no code panics.
#[test]
fn damaged_tables_never_panic() {
    record_panics();
    let directory = directory();
    let path = image(directory.path(), 64 * MIB);
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    for n in 0..64 {
        write(&mut *queue, n * MIB, &[n as u8; 4096]).unwrap();
    }
    drop((queue, disk));
    let good = std::fs::read(&path).unwrap();
    let mut random = Random(4711);
    for _ in 0..60 {
        let mut bad = good.clone();
        for _ in 0..1 + random.below(20) {
            // The first part of the image contains the header and all tables, which precede the
            // data.
            let at = random.below(8 * 65536.min(bad.len() as u64 / 8)) as usize;
            bad[at] = random.next() as u8;
            let aligned = at & !7;
            if random.below(2) == 0 {
                // Writes a table entry with a plausible offset.
                let entry = (random.below(40) << 16) | (1 << 63);
                bad[aligned..aligned + 8].copy_from_slice(&entry.to_be_bytes());
            }
        }
        std::fs::write(&path, &bad).unwrap();
        let Ok(disk) = try_open(&path, "") else { continue };
        let mut queue = disk.queue().unwrap();
        for _ in 0..30 {
            let at = random.below(64) * MIB;
            match random.below(4) {
                0 => drop(read(&mut *queue, at, 65536)),
                1 => drop(write(&mut *queue, at, &[5; 8192])),
                2 => drop(run_one(&mut *queue, Op::Discard, at, MIB, Segments::new())),
                _ => drop(flush(&mut *queue)),
            }
        }
    }
    assert_eq!(*PANICS.lock().unwrap(), [] as [String; 0]);
}

/// Child process of [`a_killed_writer_leaves_a_consistent_image`]. It writes until it is killed,
/// and prints which writes were flushed.
#[test]
fn child_that_writes() {
    let Ok(path) = std::env::var("QCOW2_TEST_IMAGE") else { return };
    let seed: u64 = std::env::var("QCOW2_TEST_SEED").unwrap().parse().unwrap();
    let disk = open(path.as_ref(), "");
    let mut queue = disk.queue().unwrap();
    let mut random = Random(seed);
    let mut out = std::io::stdout().lock();
    for number in 1_u32.. {
        // The numbers are in different blocks, so that a number that was flushed is not overwritten
        // soon.
        let at = u64::from(number % 4096) * 16384;
        let mut data = vec![0; 16384];
        data[..4].copy_from_slice(&number.to_le_bytes());
        write(&mut *queue, at, &data).unwrap();
        if random.below(8) == 0 {
            let at = (4096 + random.below(4096)) * 16384;
            run_one(&mut *queue, Op::Discard, at, 65536, Segments::new()).unwrap();
        } else if random.below(2) == 0 {
            let at = (4096 + random.below(4096)) * 16384;
            write(&mut *queue, at, &random.bytes(4096)).unwrap();
        }
        if random.below(16) == 0 {
            flush(&mut *queue).unwrap();
            writeln!(out, "flushed {number}").unwrap();
            out.flush().unwrap();
        }
    }
}

#[test]
fn a_killed_writer_leaves_a_consistent_image() {
    let directory = directory();
    let path = image(directory.path(), 256 * MIB);
    let mut random = Random(20);
    for round in 0..12 {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "child_that_writes", "--nocapture"])
            .env("QCOW2_TEST_IMAGE", &path)
            .env("QCOW2_TEST_SEED", (round + 1).to_string())
            .stdout(Stdio::piped());
        let mut child = ProcessGroup::spawn(&mut command).unwrap();
        let mut flushed = 0_u32;
        let stop = 1 + random.below(20);
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let numbers = lines.map_while(Result::ok).filter_map(|line| {
            line.rsplit_once("flushed ").and_then(|(_, number)| number.parse().ok())
        });
        for (seen, number) in numbers.enumerate() {
            flushed = number;
            if seen as u64 == stop {
                // The kill comes after a random delay, so that it interrupts different operations.
                std::thread::sleep(std::time::Duration::from_micros(random.below(3000)));
                child.kill();
            }
        }
        child.kill();
        assert!(flushed > 0);
        check(&path);
        let disk = open(&path, "");
        let mut queue = disk.queue().unwrap();
        for number in flushed.saturating_sub(4000).max(1)..=flushed {
            let data = read(&mut *queue, u64::from(number % 4096) * 16384, 512).unwrap();
            let there = u32::from_le_bytes(data[..4].try_into().unwrap());
            assert!(there == number || there == number + 4096, "{number} was flushed: {there}");
        }
    }
}

/// Tables that refer to the data of a completed write are in the file. So a kill of the process
/// does not lose the write.
#[test]
fn tables_are_written_with_the_data() {
    let directory = directory();
    let path = image(directory.path(), 16 * MIB);
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    let field = |at: u64| {
        let mut bytes = [0; 8];
        std::fs::File::open(&path).unwrap().read_exact_at(&mut bytes, at).unwrap();
        u64::from_be_bytes(bytes)
    };
    write(&mut *queue, 0, &[1; 4096]).unwrap();
    let l2 = field(field(40)) & 0x00ff_ffff_ffff_fe00;
    assert!(l2 != 0 && field(l2) != 0);
}

/// A read-only disk does not change the image, not even a bit of the header, and has no writable
/// descriptor of a file.
#[test]
fn a_read_only_image_is_not_changed() {
    let directory = directory();
    let (path, base) = (directory.path().join("disk.qcow2"), directory.path().join("base"));
    std::fs::write(&base, Random(9).bytes(MIB as usize)).unwrap();
    if !qemu_img_does(&[
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        "base",
        "-F",
        "raw",
        name(&path),
        "1M",
    ]) || !qemu_img_does(&["bitmap", "--add", name(&path), "one"])
    {
        return;
    }
    // The image is marked as dirty, and has an unknown autoclear bit.
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    for (at, bit) in [(79, 1), (95, 4)] {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] | bit], at).unwrap();
    }
    let before = std::fs::read(&path).unwrap();
    let disk = open(&path, "?read-only=on&allow-backing=on");
    assert!(content(&disk) == std::fs::read(&base).unwrap());
    let mut queue = disk.queue().unwrap();
    assert_eq!(write(&mut *queue, 0, &[1; 512]), Err(DiskError::ReadOnly));
    flush(&mut *queue).unwrap();
    let mut found = 0;
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let target = std::fs::read_link(entry.path()).unwrap_or_default();
        if target != path && target != base || entry.file_name() == fd_name(&file).as_str() {
            continue;
        }
        let info = std::fs::read_to_string(format!(
            "/proc/self/fdinfo/{}",
            entry.file_name().to_str().unwrap()
        ));
        let info = info.unwrap();
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
        let flags = u32::from_str_radix(flags.trim(), 8).unwrap();
        assert_eq!(flags & libc::O_ACCMODE as u32, libc::O_RDONLY as u32, "{target:?}");
        found += 1;
    }
    assert!(found >= 2, "{found}");
    drop((queue, disk));
    assert!(std::fs::read(&path).unwrap() == before);
    // A writable disk repairs the counts, and clears the bits.
    drop(open(&path, "?allow-backing=on"));
    let after = std::fs::read(&path).unwrap();
    assert_eq!((after[79], after[95]), (0, 0));
    check(&path);
}

fn fd_name(file: &std::fs::File) -> String {
    use std::os::fd::AsRawFd;
    file.as_raw_fd().to_string()
}
