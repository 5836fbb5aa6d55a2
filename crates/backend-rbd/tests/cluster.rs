//! Images of a real cluster: one of this machine's own, which `SHADOWBELL_CEPH_CONF` names. `cargo
//! xtask ceph` starts one and runs these. Skipped with a word where there is none.

use shadowbell_backend::{Disk, DiskError};
use shadowbell_backend_rbd::{OpenError, RbdDisk, RbdSpec};
use shadowbell_testing::disks::{Random, batch, content, flush, read, write};
use std::process::Command;

const MIB: u64 = 1 << 20;

/// The cluster's configuration file.
fn conf() -> Option<String> {
    let conf = std::env::var("SHADOWBELL_CEPH_CONF").ok();
    if conf.is_none() {
        eprintln!(
            "skipped: `SHADOWBELL_CEPH_CONF` names no cluster; `cargo xtask ceph` starts one"
        );
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

/// A new image of so many MiB.
fn image(conf: &str, name: &str, size: &str) {
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
    // What another client sees.
    let other = format!("rbd:rbd/model?conf={conf}&read-only=on&block-size=4096");
    let other = RbdDisk::open(&RbdSpec::parse(&other).unwrap()).unwrap();
    assert!(content(&other) == model && content(&disk) == model);
    let mut queue = other.queue().unwrap();
    assert_eq!(write(&mut *queue, 0, &[1; 4096]), Err(DiskError::ReadOnly));
}

#[test]
fn snapshots_and_sizes() {
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

/// Two clients write in turns: the lock goes from one to the other.
#[test]
fn the_lock_is_handed_over() {
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

#[test]
fn what_is_not_there_is_said() {
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

/// An OSD is killed while a writer writes: nothing fails, and everything is there.
#[test]
fn an_osd_dies() {
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
