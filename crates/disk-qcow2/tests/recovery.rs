//! Tests of recovering a qcow2 image. Completed writes are in the file, and wrong reference counts
//! after a crash are repaired.

mod common;

use common::{Random, check, check_whole, directory, file_options, flush, open, read, write};
use common::{qemu_img_does, run_one};
use shadowbell_disk::{Disk, Op};
use shadowbell_disk_qcow2::{OpenError, Qcow2Disk, create};
use shadowbell_memory::Segments;
use shadowbell_state::Descriptors;
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::wait;
use std::io::{BufRead, BufReader, Write as _};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

const MIB: u64 = 1 << 20;

/// Copies the image, with the content that the file would have if the process were killed now.
fn killed(path: &Path) -> std::path::PathBuf {
    let copy = path.with_extension("copy");
    std::fs::copy(path, &copy).unwrap();
    copy
}

/// Checkpoint of the disk for the next process.
fn keep(disk: &Qcow2Disk) -> (serde_json::Value, Descriptors) {
    let mut fds = Descriptors::default();
    let state = disk.checkpoint(&mut fds).unwrap();
    assert!(Qcow2Disk::is_checkpoint(&state));
    (state, fds)
}

/// Recovers the image. A child process that another test has just forked may hold the image's lock
/// until it executes its program, so the recovery waits for the lock.
fn recover(path: &Path, (state, mut fds): (serde_json::Value, Descriptors)) -> Qcow2Disk {
    let deadline = wait::deadline();
    let wait = |_: shadowbell_disk::WaitReason<'_>| Instant::now() < deadline;
    let options = file_options("?allow-backing=on");
    Qcow2Disk::recover(path, &options, &state, &mut fds, &wait).unwrap()
}

fn try_recover(
    path: &Path,
    state: &serde_json::Value,
    fds: &mut Descriptors,
) -> Result<Qcow2Disk, OpenError> {
    Qcow2Disk::recover(path, &file_options("?allow-backing=on"), state, fds, &|_| false)
}

#[test]
fn completed_writes_are_in_the_file() {
    let directory = directory();
    let path = directory.path().join("disk.qcow2");
    create(&path, 4096 * MIB).unwrap();
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, 0, &[9; 4096]).unwrap();
    let (state, mut fds) = keep(&disk);
    let there = |at: u64, byte: u8| {
        let copy = killed(&path);
        let mut queue = open(&copy, "").queue().unwrap();
        assert_eq!(read(&mut *queue, at, 4096).unwrap(), [byte; 4096], "at {at:#x}");
    };
    // Writes before the checkpoint: some allocate clusters and some overwrite, in several parts of
    // the disk.
    there(0, 9);
    for at in [4096, 0, 65536, 65536 + 4096, 600 * MIB, 4000 * MIB, 4000 * MIB + 65536] {
        write(&mut *queue, at, &[7; 4096]).unwrap();
        there(at, 7);
    }
    let zeroes = Op::WriteZeroes { fua: false, deallocate: false };
    run_one(&mut *queue, zeroes, 65536, 65536, Segments::new()).unwrap();
    there(65536, 0);
    run_one(&mut *queue, Op::Discard, 0, 65536, Segments::new()).unwrap();
    there(0, 0);
    write(&mut *queue, 8 * MIB, &[6; 4096]).unwrap();
    there(8 * MIB, 6);
    flush(&mut *queue).unwrap();
    // The first process is alive and holds the lock, so recovery fails.
    let busy = try_recover(&path, &state, &mut fds).unwrap_err().to_string();
    assert!(busy.contains("another program"), "{busy}");
}

/// A killed process leaves no errors in the image, in any version and at any moment.
#[test]
fn reference_counts_are_right_after_a_kill() {
    let directory = directory();
    for (version, bits) in [("1.1", "16"), ("1.1", "64"), ("1.1", "1"), ("0.10", "16")] {
        let path = directory.path().join("disk.qcow2");
        let options = format!("compat={version},refcount_bits={bits}");
        let made = ["create", "-q", "-f", "qcow2", "-o", &options, path.to_str().unwrap(), "4G"];
        if !qemu_img_does(&made) {
            return;
        }
        let disk = open(&path, "");
        let mut queue = disk.queue().unwrap();
        for at in [0, 3000 * MIB, 65536] {
            write(&mut *queue, at, &[1; 4096]).unwrap();
            check(&killed(&path));
        }
        let copy = killed(&path);
        drop((queue, disk));
        check_whole(&path);
        let (state, fds) = keep(&open(&copy, "?read-only=on"));
        let mut state = state;
        state["qcow2"]["read_only"] = false.into();
        let disk = recover(&copy, (state, fds));
        let mut queue = disk.queue().unwrap();
        write(&mut *queue, 8 * MIB, &[3; 4096]).unwrap();
        drop((queue, disk));
        check(&copy);
        std::fs::remove_file(&path).unwrap();
    }
}

/// Before the old process releases the locks, it frees the clusters that it has reserved but not
/// used. After the release, it does not change the image any more.
#[test]
fn a_released_image_is_not_changed() {
    let directory = directory();
    let path = directory.path().join("disk.qcow2");
    create(&path, 64 * MIB).unwrap();
    let disk = open(&path, "");
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, MIB, &[5; 4096]).unwrap();
    let kept = keep(&disk);
    disk.release_lock();
    let next = recover(&path, kept);
    check_whole(&killed(&path));
    write(&mut *next.queue().unwrap(), 2 * MIB, &[6; 4096]).unwrap();
    let before = std::fs::read(&path).unwrap();
    drop((queue, disk));
    assert!(std::fs::read(&path).unwrap() == before, "the old process has changed the image");
    drop(next);
    check(&path);
}

/// The reference counts of an image that another program has left dirty are repaired.
#[test]
fn a_dirty_image_is_repaired() {
    let directory = directory();
    for bits in ["16", "64", "1"] {
        let path = directory.path().join("disk.qcow2");
        let options = format!("refcount_bits={bits},lazy_refcounts=on,cluster_size=4k");
        let made = ["create", "-q", "-f", "qcow2", "-o", &options, path.to_str().unwrap(), "64M"];
        if !qemu_img_does(&made) {
            return;
        }
        let disk = open(&path, "");
        let mut queue = disk.queue().unwrap();
        let content = Random(4).bytes(4 << 20);
        write(&mut *queue, 0, &content).unwrap();
        drop((queue, disk));
        if bits != "1" {
            assert!(qemu_img_does(&["snapshot", "-c", "one", path.to_str().unwrap()]));
        }
        // All counts of the first block are lost, and the image is marked as dirty.
        let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
        let number = |at: u64| {
            let mut bytes = [0; 8];
            file.read_exact_at(&mut bytes, at).unwrap();
            u64::from_be_bytes(bytes)
        };
        file.write_all_at(&[0; 4096], number(number(48))).unwrap();
        file.write_all_at(&[1], 79).unwrap();
        drop(open(&path, ""));
        check_whole(&path);
        let disk = open(&path, "");
        let mut queue = disk.queue().unwrap();
        assert!(read(&mut *queue, 0, content.len()).unwrap() == content);
        write(&mut *queue, 0, &content[4096..]).unwrap();
        drop((queue, disk));
        check_whole(&path);
        std::fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_renamed_image_is_recovered_and_another_one_refused() {
    let directory = directory();
    let path = directory.path().join("disk.qcow2");
    let base = directory.path().join("base.qcow2");
    create(&base, 64 * MIB).unwrap();
    let mut queue = open(&base, "").queue().unwrap();
    write(&mut *queue, MIB, &[5; 4096]).unwrap();
    drop(queue);
    let (to, from) = (path.to_str().unwrap(), base.to_str().unwrap());
    if !qemu_img_does(&["create", "-q", "-f", "qcow2", "-b", from, "-F", "qcow2", to]) {
        return;
    }
    let disk = open(&path, "?allow-backing=on");
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, 2 * MIB, &[6; 4096]).unwrap();
    let kept = keep(&disk);
    drop((queue, disk));
    std::fs::rename(&path, path.with_extension("moved")).unwrap();
    std::fs::rename(&base, base.with_extension("moved")).unwrap();
    create(&path, 64 * MIB).unwrap();
    create(&base, 64 * MIB).unwrap();
    let disk = recover(&path, kept);
    let mut queue = disk.queue().unwrap();
    assert_eq!(read(&mut *queue, MIB, 4096).unwrap(), [5; 4096]);
    assert_eq!(read(&mut *queue, 2 * MIB, 4096).unwrap(), [6; 4096]);
    drop((queue, disk));
    // Recovery fails if the disk has another size, or if the image is of another type.
    let (mut state, mut fds) = keep(&open(&path, ""));
    state["qcow2"]["blocks"] = 1.into();
    let error = try_recover(&path, &state, &mut fds).unwrap_err().to_string();
    assert!(error.contains("another size"), "{error}");
    let error = try_recover(&path, &serde_json::json!({}), &mut fds).unwrap_err().to_string();
    assert!(error.contains("not that of a qcow2 image"), "{error}");
}

/// Child process of [`each_completed_write_survives_a_kill`].
#[test]
fn child_that_writes() {
    let Ok(path) = std::env::var("QCOW2_TEST_IMAGE") else { return };
    let seed: u64 = std::env::var("QCOW2_TEST_SEED").unwrap().parse().unwrap();
    let disk = open(path.as_ref(), "");
    let _kept = keep(&disk);
    let mut queue = disk.queue().unwrap();
    let mut random = Random(seed);
    let mut out = std::io::stdout().lock();
    loop {
        let number = 1 + random.below(u64::from(u32::MAX)) as u32;
        let at = random.below(1 << 14) * 65536;
        match random.below(8) {
            0 => {
                run_one(&mut *queue, Op::Discard, at, 65536, Segments::new()).unwrap();
                writeln!(out, "wrote {at} 0").unwrap();
            }
            _ => {
                let mut data = vec![0; 16384];
                data[..4].copy_from_slice(&number.to_le_bytes());
                write(&mut *queue, at, &data).unwrap();
                writeln!(out, "wrote {at} {number}").unwrap();
            }
        }
        out.flush().unwrap();
    }
}

#[test]
fn each_completed_write_survives_a_kill() {
    let directory = directory();
    let path = directory.path().join("disk.qcow2");
    create(&path, 1024 * MIB).unwrap();
    let mut random = Random(21);
    let mut ended = std::collections::HashMap::new();
    for round in 0..6 {
        // Checkpoint of an earlier process. It contains the identity of the file.
        let kept = keep(&open(&path, ""));
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "child_that_writes", "--nocapture"])
            .env("QCOW2_TEST_IMAGE", &path)
            .env("QCOW2_TEST_SEED", (round + 1).to_string())
            .stdout(Stdio::piped());
        let mut child = ProcessGroup::spawn(&mut command).unwrap();
        let stop = 50 + random.below(300);
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // A write after the last reported one may have reached the file or not.
        let mut seen = 0;
        for line in lines.map_while(Result::ok) {
            let Some((_, what)) = line.split_once("wrote ") else { continue };
            let Some((at, number)) = what.split_once(' ') else { continue };
            let (Ok(at), Ok(number)) = (at.parse::<u64>(), number.parse::<u32>()) else { continue };
            ended.insert(at, number);
            seen += 1;
            if seen == stop {
                // Random time until the kill, because no moment may cause an error.
                std::thread::sleep(std::time::Duration::from_micros(random.below(3000)));
                child.kill();
            }
        }
        child.kill();
        assert!(seen >= stop);
        let disk = recover(&path, kept);
        check(&killed(&path));
        let mut queue = disk.queue().unwrap();
        let mut differ = Vec::new();
        for (at, number) in &mut ended {
            let data = read(&mut *queue, *at, 512).unwrap();
            let there = u32::from_le_bytes(data[..4].try_into().unwrap());
            if there != *number {
                differ.push((*at, *number, there));
                *number = there;
            }
        }
        // A block may differ only if its write was in flight at the kill.
        assert!(differ.len() <= 1, "{differ:?}");
        drop((queue, disk));
        check(&path);
    }
}
