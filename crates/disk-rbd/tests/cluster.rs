//! Tests of RBD images on a real cluster on this machine. `SHADOWBELL_CEPH_CONF` names its
//! configuration. `cargo xtask ceph` starts a cluster and runs these tests; without a cluster they
//! are skipped with a message.

use shadowbell_disk::{Disk, DiskError, Op, Queue, Request, Submitted};
use shadowbell_disk_rbd::{OpenError, RbdDisk, RbdSpec};
use shadowbell_state::Descriptors;
use shadowbell_testing::disks::{
    Random, assert_none_completes, batch, content, flush, memory, read, segments, submit_pending,
    wait, wait_completed, write,
};
use shadowbell_testing::programs::skipped;
use shadowbell_testing::wait::{self, LIMIT};
use std::path::Path;
use std::process::Command;

const MIB: u64 = 1 << 20;
/// Environment variable of the child process of `a_process_ends_when_its_images_are_closed`.
const CHILD_EXITS: &str = "SHADOWBELL_TEST_RBD_ENDS";

/// Configuration file of the cluster, if there is a cluster.
fn conf() -> Option<String> {
    let conf = std::env::var("SHADOWBELL_CEPH_CONF").ok();
    if conf.is_none() {
        skipped("`SHADOWBELL_CEPH_CONF` names no cluster; `cargo xtask ceph` starts one");
    }
    conf
}

fn rbd(conf: &str, arguments: &[&str]) {
    let output = Command::new("rbd").args(["-c", conf]).args(arguments).output().unwrap();
    assert!(output.status.success(), "rbd {arguments:?}: {output:?}");
}

fn open(conf: &str, image: &str) -> RbdDisk {
    RbdDisk::open(&RbdSpec::parse(&format!("rbd:rbd/{image}?conf={conf}")).unwrap()).unwrap()
}

/// Creates an image of this size.
fn image(conf: &str, name: &str, size: &str) {
    let purge = ["-c", conf, "snap", "purge", "--no-progress", name];
    let _ = Command::new("rbd").args(purge).output();
    let _ = Command::new("rbd").args(["-c", conf, "rm", "--no-progress", name]).output();
    rbd(conf, &["create", name, "--size", size]);
}

#[test]
fn model() {
    let Some(conf) = conf() else { return };
    image(&conf, "model", "8M");
    let disk = open(&conf, "model");
    assert!(disk.info().discard && disk.info().volatile_cache);
    let mut model = vec![0; 8 << 20];
    let mut random = Random(77);
    let mut queues = [disk.queue().unwrap(), disk.queue().unwrap()];
    for _ in 0..40 {
        let queue = &mut queues[random.below(2) as usize];
        batch(&disk, &mut **queue, &mut model, &mut random);
    }
    assert_eq!(flush(&mut *queues[0]), Ok(()));
    // Another client reads the same contents.
    let other = format!("rbd:rbd/model?conf={conf}&read-only=on&block-size=4096");
    let other = RbdDisk::open(&RbdSpec::parse(&other).unwrap()).unwrap();
    assert!(content(&other) == model && content(&disk) == model);
    let mut queue = other.queue().unwrap();
    assert_eq!(write(&mut *queue, 0, &[1; 4096]), Err(DiskError::ReadOnly));
}

#[test]
fn snapshots_are_read_only_and_sizes_change() {
    let Some(conf) = conf() else { return };
    image(&conf, "sizes", "4M");
    let disk = open(&conf, "sizes");
    let mut queue = disk.queue().unwrap();
    write(&mut *queue, 0, &[1; 512]).unwrap();
    flush(&mut *queue).unwrap();
    rbd(&conf, &["snap", "create", "--no-progress", "rbd/sizes@one"]);
    write(&mut *queue, 0, &[2; 512]).unwrap();
    flush(&mut *queue).unwrap();
    let snapshot = open(&conf, "sizes@one");
    assert!(snapshot.info().read_only);
    assert_eq!(read(&mut *snapshot.queue().unwrap(), 0, 512), Ok(vec![1; 512]));
    assert_eq!(read(&mut *queue, 0, 512), Ok(vec![2; 512]));
    rbd(&conf, &["resize", "--no-progress", "sizes", "--size", "8M"]);
    let larger = disk.resized(None).unwrap();
    assert_eq!((larger.info().bytes(), disk.info().bytes()), (8 * MIB, 4 * MIB));
    assert_eq!(write(&mut *larger.queue().unwrap(), 4 * MIB, &[3; 512]), Ok(()));
    rbd(&conf, &["resize", "--no-progress", "--allow-shrink", "sizes", "--size", "2M"]);
    assert_eq!(disk.resized(None).unwrap().info().bytes(), 2 * MIB);
    assert_eq!(read(&mut *queue, 3 * MIB, 512), Err(DiskError::OutOfRange));
}

/// Ceph reports each new size once.
#[test]
fn a_new_size_is_notified_once() {
    let Some(conf) = conf() else { return };
    image(&conf, "told", "4M");
    let disk = open(&conf, "told");
    assert!(!disk.take_size_change());
    rbd(&conf, &["resize", "--no-progress", "told", "--size", "8M"]);
    wait::until("a change of the size", || disk.take_size_change());
    assert_eq!(disk.resized(None).unwrap().info().bytes(), 8 * MIB);
}

/// Compares and writes a block. The first eight bytes of the block are a number.
fn swap(queue: &mut dyn Queue, at: u64, old: u64, new: u64) -> Result<(), DiskError> {
    let mut bytes = vec![0; 1024];
    bytes[..8].copy_from_slice(&old.to_le_bytes());
    bytes[512..520].copy_from_slice(&new.to_le_bytes());
    let mapping = memory(1024);
    mapping.write_from(0, &bytes).unwrap();
    let request = Request { op: Op::CompareAndWrite { fua: false }, offset: at, len: 512 };
    match queue.submit(1, &request, &mut segments(&mapping, 0, 1024)) {
        Submitted::Done(outcome) => outcome,
        Submitted::Pending => {
            queue.commit();
            let mut outcome = None;
            while outcome.is_none() {
                wait(queue);
                queue.reap(&mut |_, ended, _| outcome = Some(ended));
            }
            outcome.unwrap()
        }
    }
}

#[test]
fn an_unequal_block_is_not_written() {
    let Some(conf) = conf() else { return };
    image(&conf, "swap", "8M");
    let disk = open(&conf, "swap");
    let mut queue = disk.queue().unwrap();
    assert!(queue.compares_and_writes());
    // Blocks in an object that does not exist yet, on both sides of the border between two objects,
    // and at the end.
    for at in [0, 4 * MIB - 512, 4 * MIB, 8 * MIB - 512] {
        assert_eq!(swap(&mut *queue, at, 1, 2), Err(DiskError::CompareFailed), "{at}");
        assert_eq!(swap(&mut *queue, at, 0, 3), Ok(()), "{at}");
        assert_eq!(swap(&mut *queue, at, 0, 4), Err(DiskError::CompareFailed), "{at}");
        assert_eq!(swap(&mut *queue, at, 3, 5), Ok(()), "{at}");
        assert_eq!(read(&mut *queue, at, 512).unwrap()[..8], 5u64.to_le_bytes());
    }
    assert_eq!(swap(&mut *queue, 8 * MIB, 0, 1), Err(DiskError::OutOfRange));
    rbd(&conf, &["snap", "create", "--no-progress", "rbd/swap@one"]);
    let snapshot = open(&conf, "swap@one");
    let mut taken = snapshot.queue().unwrap();
    assert!(!taken.compares_and_writes());
    assert_eq!(swap(&mut *taken, 0, 5, 6), Err(DiskError::ReadOnly));
    // `checkpoint` makes the disk recoverable: from now on, a write is durable before it completes.
    // A compare and write must succeed in that mode too.
    disk.checkpoint(&mut Descriptors::default()).unwrap();
    assert_eq!(swap(&mut *queue, 0, 5, 6), Ok(()));
}

/// The image is striped in units that are shorter than a block.
#[test]
fn a_block_across_objects_has_no_compare_and_write() {
    let Some(conf) = conf() else { return };
    let _ = Command::new("rbd").args(["-c", &conf, "rm", "--no-progress", "strip"]).output();
    let stripes = ["--stripe-unit", "1024", "--stripe-count", "4"];
    rbd(&conf, &[&["create", "strip", "--size", "8M"], &stripes[..]].concat());
    let disk = open(&conf, "strip");
    let mut queue = disk.queue().unwrap();
    assert!(queue.compares_and_writes());
    for at in [0, 512, 1024, 1536] {
        assert_eq!(swap(&mut *queue, at, 0, 3), Ok(()), "{at}");
    }
    let wide = format!("rbd:rbd/strip?conf={conf}&block-size=4096");
    let wide = RbdDisk::open(&RbdSpec::parse(&wide).unwrap()).unwrap();
    assert!(!wide.queue().unwrap().compares_and_writes());
}

/// Two clients of the cluster increment a number in the same block: with an exclusive lock that
/// moves between the clients, and without a lock.
#[test]
fn two_clients_increment_the_same_block() {
    const PER_THREAD: u64 = 100;
    let Some(conf) = conf() else { return };
    for (name, features) in [("count", "layering,exclusive-lock"), ("free", "layering")] {
        let _ = Command::new("rbd").args(["-c", &conf, "rm", "--no-progress", name]).output();
        rbd(&conf, &["create", name, "--size", "4M", "--image-feature", features]);
        let lost: u64 = std::thread::scope(|scope| {
            let clients = [0; 2].map(|_| {
                scope.spawn(|| {
                    let disk = open(&conf, name);
                    let mut queue = disk.queue().unwrap();
                    let (mut added, mut lost) = (0, 0);
                    while added < PER_THREAD {
                        let now = read(&mut *queue, 512, 512).unwrap();
                        let now = u64::from_le_bytes(now[..8].try_into().unwrap());
                        match swap(&mut *queue, 512, now, now + 1) {
                            Ok(()) => added += 1,
                            Err(DiskError::CompareFailed) => lost += 1,
                            Err(other) => panic!("{other}"),
                        }
                    }
                    lost
                })
            });
            clients.map(|client| client.join().unwrap()).into_iter().sum()
        });
        println!("{name}: another client came first {lost} times");
        let disk = open(&conf, name);
        let sum = read(&mut *disk.queue().unwrap(), 512, 512).unwrap();
        assert_eq!(sum[..8], (2 * PER_THREAD).to_le_bytes(), "{name}");
    }
}

/// A process closes its images before it ends, and it ends with the intended exit status.
#[test]
fn a_process_ends_when_its_images_are_closed() {
    let Some(conf) = conf() else { return };
    if std::env::var_os(CHILD_EXITS).is_some() {
        let disk = open(&conf, "ends");
        assert_eq!(write(&mut *disk.queue().unwrap(), 0, &[1; 512]), Ok(()));
        drop(disk);
        std::process::exit(7);
    }
    image(&conf, "ends", "4M");
    for round in 0..10 {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "a_process_ends_when_its_images_are_closed"]).env(CHILD_EXITS, "1");
        let output = child.output().unwrap();
        assert_eq!(output.status.code(), Some(7), "{round}: {output:?}");
        let status = Command::new("rbd").args(["-c", &conf, "status", "ends"]).output().unwrap();
        let status = String::from_utf8_lossy(&status.stdout).into_owned();
        assert!(status.contains("Watchers: none"), "{round}: {status}");
    }
}

/// Two clients write in turns, so the exclusive lock moves between them.
#[test]
fn the_exclusive_lock_moves_between_clients() {
    let Some(conf) = conf() else { return };
    image(&conf, "lock", "4M");
    let (one, two) = (open(&conf, "lock"), open(&conf, "lock"));
    let (mut first, mut second) = (one.queue().unwrap(), two.queue().unwrap());
    for round in 1..5 {
        assert_eq!(write(&mut *first, 0, &[round; 512]), Ok(()));
        assert_eq!(flush(&mut *first), Ok(()));
        assert_eq!(write(&mut *second, 512, &[round; 512]), Ok(()));
        assert_eq!(flush(&mut *second), Ok(()));
    }
    assert_eq!(read(&mut *open(&conf, "lock").queue().unwrap(), 0, 1024), Ok(vec![4; 1024]));
}

/// After recovery, unflushed writes of the dead process are in the image, and its late writes no
/// longer reach the image. This holds with and without Ceph's exclusive lock.
#[test]
fn recovery_has_unflushed_writes_and_fences_the_dead_process() {
    let Some(conf) = conf() else { return };
    for (name, features) in [("kept", "layering,exclusive-lock"), ("bare", "layering")] {
        let _ = Command::new("rbd").args(["-c", &conf, "rm", "--no-progress", name]).output();
        rbd(&conf, &["create", name, "--size", "4M", "--image-feature", features]);
        let spec = RbdSpec::parse(&format!("rbd:rbd/{name}?conf={conf}")).unwrap();
        let dead = RbdDisk::open(&spec).unwrap();
        let state = dead.checkpoint(&mut Descriptors::default()).unwrap();
        assert!(RbdDisk::is_checkpoint(&state), "{state}");
        let mut old = dead.queue().unwrap();
        assert_eq!(flush(&mut *old), Ok(()));
        for n in 0..16 {
            assert_eq!(write(&mut *old, n * 4096, &[n as u8 + 1; 4096]), Ok(()));
        }
        let waited = |_: shadowbell_disk::WaitReason<'_>| {
            wait::pause();
            true
        };
        let next = RbdDisk::recover(&spec, &state, &waited).unwrap();
        assert_eq!(next.info(), dead.info());
        let mut new = next.queue().unwrap();
        for n in 0..16 {
            assert_eq!(read(&mut *new, n * 4096, 4096), Ok(vec![n as u8 + 1; 4096]), "{name}");
        }
        assert_eq!(write(&mut *new, 0, &[99; 4096]), Ok(()));
        assert!(write(&mut *old, 0, &[7; 4096]).is_err(), "{name}: the dead one writes");
        assert_eq!(flush(&mut *new), Ok(()));
        assert_eq!(read(&mut *open(&conf, name).queue().unwrap(), 0, 4096), Ok(vec![99; 4096]));
    }
    // If `wait` returns false, recovery fails.
    let spec = RbdSpec::parse(&format!("rbd:rbd/kept?conf={conf}")).unwrap();
    let state = open(&conf, "kept").checkpoint(&mut Descriptors::default()).unwrap();
    let refused = RbdDisk::recover(&spec, &state, &|_| false).unwrap_err();
    assert!(refused.to_string().contains("the wait was given up"), "{refused}");
    rbd(&conf, &["resize", "--no-progress", "--allow-shrink", "kept", "--size", "2M"]);
    let refused = RbdDisk::recover(&spec, &state, &|_| true).unwrap_err();
    assert!(refused.to_string().contains("smaller than it was"), "{refused}");
}

/// Stops all OSDs until dropped.
struct Stopped(Vec<String>);

impl Stopped {
    fn all(conf: &str) -> Self {
        let run = Path::new(conf).parent().unwrap().join("run");
        let files = std::fs::read_dir(run).unwrap().map(|file| file.unwrap().path());
        let of_osd = |path: &std::path::PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            name.starts_with("osd.") && name.ends_with(".pid")
        };
        let pid = |path| std::fs::read_to_string(path).unwrap().trim().to_owned();
        let stopped = Self(files.filter(of_osd).map(pid).collect());
        stopped.signal("-STOP");
        // A process stops some time after it was signalled.
        while stopped.0.iter().any(|pid| !is_stopped(pid)) {
            std::thread::yield_now();
        }
        stopped
    }

    fn signal(&self, signal: &str) {
        let status = Command::new("kill").arg(signal).args(&self.0).status().unwrap();
        assert!(status.success());
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        self.signal("-CONT");
    }
}

/// Returns true if all threads of a process are stopped.
fn is_stopped(pid: &str) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let stat = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("stat"));
    // In this file, the state follows the program name, which is in parentheses.
    threads.flatten().map(stat).all(|stat| stat.is_ok_and(|stat| stat.contains(") T ")))
}

/// The OSDs are stopped, while completed writes are in the cache of this process. A FUA write does
/// not complete, and neither does any write on a recoverable disk, for all cache settings.
#[test]
fn durable_writes_wait_for_a_hung_cluster() {
    let Some(conf) = conf().filter(|_| std::env::var_os("SHADOWBELL_CEPH_STOP").is_some()) else {
        return;
    };
    let write = |fua| Op::Write { fua };
    let zeroes = |fua| Op::WriteZeroes { fua, deallocate: false };
    // Parameters of a disk: true for `open_recoverable`, the image's own settings, and true if
    // `checkpoint` is called.
    let cached = (false, &[][..], false);
    let kept_late = (false, &[][..], true);
    let own = &[("rbd_cache", "true")][..];
    let back = &[("rbd_cache", "true"), ("rbd_cache_policy", "writeback")][..];
    for ((lasting, settings, is_kept), op, answered) in [
        (cached, write(false), true),
        (cached, write(true), false),
        (cached, zeroes(false), true),
        (cached, zeroes(true), false),
        (cached, Op::Discard, true),
        (kept_late, write(false), false),
        (kept_late, zeroes(false), false),
        (kept_late, Op::Discard, false),
        ((true, &[][..], false), write(false), false),
        ((true, &[][..], true), write(false), false),
        ((true, &[][..], true), Op::Discard, false),
        ((true, own, false), write(false), true),
        ((true, own, true), write(false), false),
        ((true, own, true), zeroes(false), false),
        ((true, back, false), write(false), true),
        ((true, back, false), write(true), false),
        ((true, back, true), write(false), false),
    ] {
        image(&conf, "waits", "8M");
        for (name, value) in settings {
            rbd(&conf, &["config", "image", "set", "rbd/waits", name, value]);
        }
        let open = if lasting { RbdDisk::open_recoverable } else { RbdDisk::open };
        let disk = open(&RbdSpec::parse(&format!("rbd:rbd/waits?conf={conf}")).unwrap()).unwrap();
        if is_kept {
            disk.checkpoint(&mut Descriptors::default()).unwrap();
        }
        let mut queue = disk.queue().unwrap();
        // The first write acquires the lock of the image.
        assert_eq!(self::write(&mut *queue, 0, &[1; 8192]), Ok(()));
        assert_eq!(flush(&mut *queue), Ok(()));
        let bytes = memory(4096);
        let stopped = Stopped::all(&conf);
        let request = Request { op, offset: 4096, len: 4096 };
        let len = if matches!(op, Op::Write { .. }) { 4096 } else { 0 };
        submit_pending(&mut *queue, 7, &request, segments(&bytes, 0, len));
        let case = format!("{op:?}, lasting: {lasting}, {settings:?}, kept: {is_kept}");
        match answered {
            true => assert_eq!(wait_completed(&mut *queue, 1), [(7, Ok(()))], "{case}"),
            false => assert_none_completes(&mut *queue),
        }
        drop(stopped);
        while queue.pending() > 0 {
            wait(&*queue);
            queue.reap(&mut |_, ended, _| assert_eq!(ended, Ok(()), "{case}"));
        }
    }
}

/// The OSDs are stopped. Reads and requests that were not submitted are cancelled at once. A
/// submitted write completes normally. All requests continue after the OSDs resume.
#[test]
fn requests_to_a_hung_cluster_can_be_cancelled() {
    let Some(conf) = conf().filter(|_| std::env::var_os("SHADOWBELL_CEPH_STOP").is_some()) else {
        return;
    };
    image(&conf, "stopped", "256M");
    let disk = open(&conf, "stopped");
    let mut queue = disk.queue().unwrap();
    assert_eq!(write(&mut *queue, 0, &[5; 4096]), Ok(()));
    assert_eq!(flush(&mut *queue), Ok(()));
    let bytes = memory(4 << 20);
    let stopped = Stopped::all(&conf);
    const MANY: u32 = 40;
    const LAST: u32 = 10 + MANY - 1;
    let long = 4 << 20;
    let submit = |queue: &mut dyn Queue, tag, op, offset: u64, len: u64| {
        let data = segments(&bytes, 0, len as usize);
        submit_pending(queue, tag, &Request { op, offset, len }, data);
    };
    submit(&mut *queue, 0, Op::Read, 0, 4096);
    submit(&mut *queue, 1, Op::Read, 4096, 4096);
    submit(&mut *queue, 2, Op::Write { fua: true }, 64 << 10, 4096);
    // The write is in Ceph's cache, and the flush that follows it is in flight.
    assert_none_completes(&mut *queue);
    // There are more requests than the buffers of the queue and Ceph's cache have room for.
    for n in 0..MANY {
        let at = (16 << 20) + u64::from(n) * long;
        submit(&mut *queue, 10 + n, Op::Write { fua: true }, at, long);
    }
    assert_none_completes(&mut *queue);
    for tag in [0, 2, LAST] {
        queue.cancel(tag);
    }
    wait(&*queue);
    let mut cancelled = wait_completed(&mut *queue, 2);
    assert_none_completes(&mut *queue);
    cancelled.sort_unstable_by_key(|(tag, _)| *tag);
    assert_eq!(cancelled, [0, LAST].map(|tag| (tag, Err(DiskError::Cancelled))));
    // There are more requests than Ceph's client allows in flight by default
    // (`objecter_inflight_ops`).
    let (told, hears) = std::sync::mpsc::channel();
    let many = std::thread::spawn({
        let (disk, bytes) = (disk.clone(), bytes.clone());
        move || {
            let mut queue = disk.queue().unwrap();
            for tag in 0..3000 {
                let op = if tag % 2 == 0 { Op::Read } else { Op::Write { fua: false } };
                let request = Request { op, offset: u64::from(tag) * 4096, len: 4096 };
                submit_pending(&mut *queue, tag, &request, segments(&bytes, 0, 4096));
            }
            told.send(()).unwrap();
            while queue.pending() > 0 {
                wait(&*queue);
                queue.reap(&mut |_, result, _| assert_eq!(result, Ok(())));
            }
        }
    });
    assert!(hears.recv_timeout(LIMIT).is_ok(), "a worker would wait");
    drop(stopped);
    many.join().unwrap();
    let mut others = Vec::new();
    while queue.pending() > 0 {
        wait(&*queue);
        queue.reap(&mut |tag, result, _| others.push((tag, result)));
    }
    others.sort_unstable_by_key(|(tag, _)| *tag);
    let expected: Vec<u32> = [1, 2].into_iter().chain(10..LAST).collect();
    assert_eq!(others, expected.iter().map(|tag| (*tag, Ok(()))).collect::<Vec<_>>());
    assert_eq!(read(&mut *queue, 0, 4096), Ok(vec![5; 4096]));
}

#[test]
fn missing_images_are_refused_with_the_reason() {
    let Some(conf) = conf() else { return };
    let refused = |spec: &str, words: &str| {
        let error = RbdDisk::open(&RbdSpec::parse(spec).unwrap()).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert!(matches!(error, OpenError::Ceph { .. }));
    };
    refused(&format!("rbd:rbd/nothing?conf={conf}"), "opening the image failed: No such file");
    refused(&format!("rbd:nowhere/x?conf={conf}"), "opening the pool failed");
    refused("rbd:rbd/x?conf=/nonexistent", "configuration");
}

/// An OSD is killed while a client writes. No request fails, and all data are in the image.
#[test]
fn a_writer_survives_a_killed_osd() {
    let (Some(conf), Ok(victim)) = (conf(), std::env::var("SHADOWBELL_CEPH_VICTIM")) else {
        return;
    };
    image(&conf, "osd", "16M");
    let disk = open(&conf, "osd");
    let mut queue = disk.queue().unwrap();
    let mut random = Random(5);
    let mut model = vec![0; 16 << 20];
    for round in 0..400 {
        if round == 100 {
            let pid = std::fs::read_to_string(&victim).unwrap();
            let killed = Command::new("kill").args(["-9", pid.trim()]).status().unwrap();
            assert!(killed.success());
        }
        let at = random.below(4095) as usize * 4096;
        let fresh = random.bytes(4096);
        model[at..at + 4096].copy_from_slice(&fresh);
        assert_eq!(write(&mut *queue, at as u64, &fresh), Ok(()), "{round}");
        if round % 4 == 0 {
            assert_eq!(flush(&mut *queue), Ok(()), "{round}");
        }
    }
    assert_eq!(flush(&mut *queue), Ok(()));
    drop((queue, disk));
    assert!(content(&open(&conf, "osd")) == model);
}
