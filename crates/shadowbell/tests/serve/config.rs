//! Configuration files: several controllers in one process, and files that are refused as a
//! whole.

use crate::control::ctl_json;
use crate::harness::{Server, attach, finish, image, program, until};
use shadowbell_driver::{AttachOptions, Doorbells};
use shadowbell_process::exit::ExitStatus;
use std::path::Path;

#[test]
fn each_controller_is_configured_by_its_table() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "a.img", 1 << 20);
    let text = r#"
        workers = 2
        poll-max-us = 50

        [[controller]]
        socket = "a.sock"
        disks = ["a.img", { disk = "mem:2MiB", uuid = "0190163d-8694-739b-aea5-966c26f8ad91" }]

        [[controller]]
        socket = "b.sock"
        disks = ["mem:4MiB?block-size=4096"]
        serial = "SECOND"
        doorbells = "mapped"
        queues = 1
    "#;
    std::fs::write(directory.path().join("vms.toml"), text).unwrap();
    let mut command = program();
    command.args(["serve", "--config", "vms.toml"]);
    let mut server = Server::spawn(command, directory, &["a.sock", "b.sock"]);
    let options = AttachOptions { queue_pairs: 4, ..AttachOptions::default() };
    let a = attach(&server.directory().join("a.sock"), &options);
    let b = attach(&server.directory().join("b.sock"), &options);
    assert_eq!((a.namespaces().len(), b.namespaces().len()), (2, 1));
    assert_eq!((a.queue_pairs(), b.queue_pairs()), (4, 1));
    assert_eq!((a.doorbells(), b.doorbells()), (Doorbells::Shadow, Doorbells::Mapped));
    assert_eq!(b.identity().sn.as_slice().trim_ascii_end(), b"SECOND");
    assert_eq!(a.namespace(2).unwrap().uuid().unwrap()[..2], [0x01, 0x90]);
    assert_eq!(b.namespace(1).unwrap().block_size(), 4096);
    for name in ["a.sock", "b.sock"] {
        until("the arguments", || server.stdout().contains(&format!("{name}\",")));
    }
    let stats = ctl_json(&server, &["stats"]);
    assert_eq!(stats["controllers"][1]["serial"], "SECOND");
    drop((a, b));
    assert!(server.stop().success());
    assert!(
        !server.directory().join("a.sock").exists() && !server.directory().join("b.sock").exists()
    );
}

/// Runs `serve` with the configuration `text`. The server must refuse it with a message that has
/// all of `words`, and must not create any file.
#[track_caller]
fn refused(directory: &Path, text: &str, words: &[&str]) {
    refused_with(ExitStatus::BadInput, directory, text, words);
}

#[track_caller]
fn refused_with(expected: ExitStatus, directory: &Path, text: &str, words: &[&str]) {
    std::fs::write(directory.join("vms.toml"), text).unwrap();
    let before = std::fs::read_dir(directory).unwrap().count();
    let mut command = program();
    command.args(["serve", "--config", "vms.toml"]).current_dir(directory);
    let (status, _, stderr) = finish(command);
    assert_eq!(status, Some(expected as i32), "{text}\n{stderr}");
    for word in words {
        assert!(stderr.contains(word), "{text}\n{word:?} is not in {stderr}");
    }
    assert_eq!(std::fs::read_dir(directory).unwrap().count(), before, "{text}");
}

#[test]
fn a_bad_file_is_refused_as_a_whole() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let good = "[[controller]]\nsocket = \"a.sock\"\ndisks = [\"mem:1MiB\"]\n\n";
    let second = |lines: &str| format!("trace = \"t\"\n{good}[[controller]]\n{lines}\n");
    for (lines, words) in [
        ("socket = \"b.sock\"", &["vms.toml:7:", "one disk at least"][..]),
        (
            "socket = \"a.sock\"\ndisks = [\"mem:1MiB\"]",
            &["vms.toml:7:", "another controller too (line 3)"],
        ),
        (
            "socket = \"./a.sock\"\ndisks = [\"mem:1MiB\"]",
            &["vms.toml:7:", "another controller too (line 3)"],
        ),
        (
            "socket = \"b.sock\"\ndisks = [\"mem:1MiB\"]\nqueues = 99",
            &["vms.toml:9:", "1 to 64, not 99"],
        ),
        (
            "socket = \"b.sock\"\ndisks = [\"mem:1MiB\"]\nsreial = \"x\"",
            &["vms.toml:9:", "unknown field `sreial`"],
        ),
        (
            "socket = \"b.sock\"\ndisks = [\"mem:1MiB\"]\nserial = \"\"",
            &["vms.toml:9:", "the serial number"],
        ),
        ("socket = \"b.sock\"\ndisks = \"mem:1MiB\"", &["vms.toml:8:", "expected"]),
        ("socket = b.sock", &["vms.toml:7:"]),
    ] {
        refused(at, &second(lines), words);
    }
    // A missing file or directory may exist later, so with this exit status a systemd unit restarts
    // the service.
    for (lines, words) in [
        ("socket = \"b.sock\"\ndisks = [\"none.img\"]", "none.img: there is no such file"),
        ("socket = \"no/b.sock\"\ndisks = [\"mem:1MiB\"]", "is in no directory"),
    ] {
        refused_with(ExitStatus::Failed, at, &second(lines), &["vms.toml:6:", words]);
    }
    refused(at, "", &["vms.toml:1: it has no controller"]);
    refused(at, &format!("trace = \"no/trace\"\n{good}"), &["no/trace is in no directory"]);
}

#[test]
fn a_missing_configuration_file_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    for (name, words) in [("missing.toml", "cannot read"), (".", "not a regular file")] {
        let mut command = program();
        command.args(["serve", "--config", name]).current_dir(directory.path());
        let (status, _, stderr) = finish(command);
        assert_eq!(status, Some(2), "{stderr}");
        assert!(stderr.contains(words), "{stderr}");
    }
}

#[test]
fn a_socket_in_use_refuses_the_whole_file() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start_in(directory, &["mem:1MiB"], &[]);
    let text = "[[controller]]\nsocket = \"first.sock\"\ndisks = [\"mem:1MiB\"]\n\
                [[controller]]\nsocket = \"vm.sock\"\ndisks = [\"mem:1MiB\"]\n";
    let words = ["vms.toml:4:", "in use by a running server"];
    refused_with(ExitStatus::Failed, server.directory(), text, &words);
    assert!(!server.directory().join("first.sock").exists());
    drop(server.attach());
}
