//! Ceph images as disks of a server whose process is killed or replaced. `cargo xtask ceph` starts
//! a cluster, sets `SHADOWBELL_CEPH_CONF` to its configuration, and runs these tests; without a
//! cluster they are skipped with a message.

use crate::disk_recovery::{supervisor, survive};
use crate::harness::until;
use crate::recover::assert_no_loss;
use crate::supervisor::worker;
use crate::upgrade::{Load, upgrade};
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::programs::skipped;
use std::process::Command;

/// Creates an image, and returns its URI. `None` without a cluster.
fn image(name: &str, features: &str) -> Option<String> {
    let Ok(conf) = std::env::var("SHADOWBELL_CEPH_CONF") else {
        skipped("`SHADOWBELL_CEPH_CONF` names no cluster; `cargo xtask ceph` starts one");
        return None;
    };
    let rbd = |arguments: &[&str]| Command::new("rbd").args(["-c", &conf]).args(arguments).output();
    let _ = rbd(&["rm", "--no-progress", name]);
    let made = rbd(&["create", name, "--size", "16M", "--image-feature", features]).unwrap();
    assert!(made.status.success(), "{made:?}");
    Some(format!("rbd:rbd/{name}?conf={conf}"))
}

#[test]
fn a_ceph_image_passes_verify_and_resets() {
    let Some(disk) = image("passes", "layering,exclusive-lock") else { return };
    crate::disk_types::check_disk_type(&disk);
}

#[test]
fn a_ceph_image_survives_kills_of_the_server_process() {
    for (name, features) in [
        ("killed", "layering,exclusive-lock"),
        ("killed-bare", "layering"),
        ("killed-cache", "layering"),
    ] {
        let Some(disk) = image(name, features) else { return };
        if name == "killed-cache" {
            let conf = std::env::var("SHADOWBELL_CEPH_CONF").unwrap();
            let set = ["config", "image", "set", "rbd/killed-cache", "rbd_cache", "true"];
            let set = Command::new("rbd").args(["-c", &conf]).args(set).output().unwrap();
            assert!(set.status.success(), "{set:?}");
        }
        survive(&mut supervisor(&disk), 5);
    }
}

#[test]
fn a_server_with_a_ceph_image_is_upgraded_under_load() {
    let Some(disk) = image("replaced", "layering,exclusive-lock") else { return };
    let mut server = supervisor(&disk);
    let load = Load::at(&server.socket(), 1);
    until("the load's queue", || server.stderr().contains("I/O queue"));
    let socket = server.socket().display().to_string();
    for _ in 0..3 {
        let before = worker(&server);
        // The upgrade is repeated: the first writes are slow until the lock of the image has passed
        // from the previous process, and an upgrade may time out meanwhile.
        until("an upgrade", || {
            let (status, output, errors) = upgrade(&socket, None);
            assert!(status == Some(0) || errors.contains("try again"), "{output}{errors}");
            status == Some(0)
        });
        assert_ne!(worker(&server), before);
    }
    load.assert_no_loss();
    assert_no_loss(&server);
    assert!(server.stop().success(), "{}", server.stderr());
}

/// Ceph notifies the server of a new image size, and the server notifies the guest. After a
/// crash, the next process finds the new size.
#[test]
fn a_namespace_follows_the_size_of_its_ceph_image() {
    let Some(disk) = image("follows", "layering,exclusive-lock") else { return };
    let conf = std::env::var("SHADOWBELL_CEPH_CONF").unwrap();
    let resize = |arguments: &[&str]| {
        let mut rbd = Command::new("rbd");
        rbd.args(["-c", &conf, "resize", "--no-progress", "follows", "--size"]).args(arguments);
        assert!(rbd.status().unwrap().success());
    };
    let mut server = supervisor(&disk);
    for (size, said) in [("24M", "(24.0 MiB)"), ("8M", "(8.0 MiB)"), ("32M", "(32.0 MiB)")] {
        resize(&[size, "--allow-shrink"]);
        until("the namespace's new size", || server.stderr().contains(said));
    }
    let before = worker(&server);
    let stopped = |signal: &str| {
        let status = Command::new("kill").args([signal, &before.to_string()]).status().unwrap();
        assert!(status.success());
    };
    // The process is stopped, so that it does not receive the notification of the new size before
    // it is killed.
    stopped("-STOP");
    let mut resizing = Command::new("rbd");
    resizing.args(["-c", &conf, "resize", "--no-progress", "follows", "--size", "40M"]);
    let mut resizing = ProcessGroup::spawn(&mut resizing).unwrap();
    // Usually `rbd resize` has finished after this time.
    std::thread::sleep(std::time::Duration::from_secs(1));
    stopped("-KILL");
    assert!(resizing.wait().success());
    until("another process", || worker(&server) != before);
    until("the size of now", || server.stderr().contains("(40.0 MiB)"));
    assert!(server.stop().success(), "{}", server.stderr());
}
