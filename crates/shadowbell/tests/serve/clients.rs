//! Clients that die or send malformed messages, and the clients that are served after them.

use crate::harness::{Server, attach, image, run};
use crate::supervisor::worker;
use rustix::process::Signal;
use shadowbell_driver::{AttachOptions, Controller};
use shadowbell_spec::Status;
use shadowbell_testing::process_group::ProcessGroup;
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

/// Environment variable that makes this test program the client of
/// [`a_killed_client_loses_no_completed_write`].
const VICTIM: &str = "SHADOWBELL_TEST_VICTIM";
/// Number of blocks that the victim writes, and their size in bytes.
const BLOCKS: u64 = 64;
const BLOCK: usize = 4096;

fn block(lba: u64, round: u64) -> Vec<u8> {
    let mut bytes = vec![(lba ^ round) as u8; BLOCK];
    bytes[..8].copy_from_slice(&lba.to_le_bytes());
    bytes[8..16].copy_from_slice(&round.to_le_bytes());
    bytes
}

/// Entry point of the child process that is killed; not a test of its own. It keeps many writes in
/// flight, and prints which of them have completed.
#[test]
fn victim() {
    let Ok(socket) = std::env::var(VICTIM) else { return };
    let mut controller = attach(Path::new(&socket), &AttachOptions::default());
    let namespace = controller.namespace(1).unwrap().clone();
    let mut queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(BLOCKS as usize, BLOCK).unwrap();
    let mut out = std::io::stdout();
    let first = std::env::var("SHADOWBELL_TEST_ROUND").unwrap().parse::<u64>().unwrap();
    for round in first.. {
        let mut tokens = HashMap::new();
        for lba in 0..BLOCKS {
            let mut buffer = pool.take().unwrap();
            assert!(buffer.copy_from(0, &block(lba, round)));
            tokens
                .insert(queue.submit(namespace.write(lba, 1).unwrap(), Some(buffer)).unwrap(), lba);
        }
        queue.ring().unwrap();
        while !tokens.is_empty() {
            let done = crate::harness::complete(&mut queue);
            assert_eq!(done.status, Status::SUCCESS);
            let lba = tokens.remove(&done.token).unwrap();
            writeln!(out, "\nwritten {lba} {round}").unwrap();
        }
    }
}

#[test]
fn a_killed_client_loses_no_completed_write() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "disk.img", BLOCKS * BLOCK as u64);
    let mut server = Server::start_in(directory, &["disk.img?block-size=4096"], &[]);
    let mut written = HashMap::new();
    for life in 0..3 {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "clients::victim", "--nocapture"])
            .env(VICTIM, server.socket())
            .env("SHADOWBELL_TEST_ROUND", (1 + life * 1_000_000).to_string())
            .stdout(Stdio::piped());
        let mut child = ProcessGroup::spawn(&mut command).unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut seen = 0;
        let mut note = |line: String| {
            let mut words = line.split(' ').skip_while(|word| *word != "written").skip(1);
            let mut number = || words.next()?.parse::<u64>().ok();
            if let (Some(lba), Some(round)) = (number(), number()) {
                written.insert(lba, round);
                return 1;
            }
            0
        };
        while seen < 300 + life * 50 {
            seen += note(lines.next().expect("the client ended by itself").unwrap());
        }
        child.kill();
        lines.map_while(Result::ok).for_each(|line| {
            note(line);
        });

        let mut controller = server.attach();
        let namespace = controller.namespace(1).unwrap().clone();
        let mut queue = controller.take_queue_pair().unwrap();
        let pool = controller.buffers(1, BLOCK).unwrap();
        for (lba, round) in &written {
            let done = run(&mut queue, namespace.read(*lba, 1).unwrap(), pool.take());
            let bytes = done.buffer.as_ref().unwrap().to_vec(BLOCK);
            let found = u64::from_le_bytes(bytes[8..16].try_into().unwrap());
            assert!(
                found >= *round,
                "block {lba}: round {round} was acknowledged, {found} is there"
            );
            assert_eq!(bytes, block(*lba, found), "block {lba} is torn");
        }
        assert_eq!(written.len() as u64, BLOCKS);
    }
    assert!(server.stop().success());
}

#[test]
fn a_stopped_server_disconnects_its_client() {
    let mut server = Server::start(&["mem:4MiB"], &[]);
    let controller = server.attach();
    assert!(server.stop().success());
    assert!(!server.socket().exists());
    assert!(controller.admin().identify_controller().is_err());
}

#[test]
fn sigint_and_sighup_end_the_server_like_sigterm() {
    for signal in [Signal::INT, Signal::HUP] {
        // A shell ignores these signals for commands that it starts with `&`. `env` restores their
        // default action.
        let mut command = Command::new("env");
        command.arg("--default-signal=INT,HUP").arg(env!("CARGO_BIN_EXE_shadowbell"));
        command.args(["serve", "mem:4MiB", "--socket", "vm.sock"]);
        let directory = tempfile::tempdir().unwrap();
        let mut server = Server::spawn(command, directory, &["vm.sock"]);
        server.signal(signal);
        assert!(server.wait().success());
        assert!(!server.socket().exists());
    }
}

#[test]
fn a_server_under_nohup_ignores_sighup() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new("nohup");
    command.arg(env!("CARGO_BIN_EXE_shadowbell"));
    command.args(["serve", "mem:4MiB", "--socket", "vm.sock"]);
    let mut server = Server::spawn(command, directory, &["vm.sock"]);
    server.wait_for_log("serving");
    server.signal(Signal::HUP);
    assert_one_namespace(&server.attach());
    assert!(server.stop().success());
}

/// A shell without job control ignores SIGINT for commands started with `&`.
#[test]
fn a_server_with_sigint_ignored_ends_on_sigterm() {
    let directory = tempfile::tempdir().unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", "trap '' INT; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_shadowbell")]);
    command.args(["serve", "mem:4MiB", "--socket", "vm.sock"]);
    let mut server = Server::spawn(command, directory, &["vm.sock"]);
    server.wait_for_log("serving");
    server.signal(Signal::INT);
    assert_one_namespace(&server.attach());
    assert!(server.stop().success());
}

#[test]
fn malformed_messages_do_not_block_the_next_client() {
    let mut server = Server::start(&["mem:4MiB"], &[]);
    let version = |size: u32| {
        let mut bytes = vec![0, 0, 1, 0];
        bytes.extend(size.to_le_bytes());
        bytes.extend([0; 8]);
        bytes
    };
    let mut garbage = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0xff; 4096],
        vec![0; 16],
        version(u32::MAX),
        version(0),
        version(20),
    ];
    // The garbage follows a valid version message.
    let mut later = version(20);
    later.extend([0, 0, 1, 0]);
    later.extend([0xff; 64]);
    garbage.push(later);
    for (n, bytes) in garbage.iter().enumerate() {
        let mut stream = UnixStream::connect(server.socket()).unwrap();
        // An error is ignored, because the server may have disconnected before all bytes were sent.
        let _ = stream.write_all(bytes);
        drop(stream);
        assert!(server.is_alive(), "{n}");
    }
    drop(UnixStream::connect(server.socket()).unwrap());
    assert_one_namespace(&server.attach());
}

#[test]
fn clients_leave_no_thread_or_descriptor_behind() {
    let server = Server::start(&["mem:4MiB"], &[]);
    let twenty_come_and_go = |total: usize| {
        for _ in 0..20 {
            assert_one_namespace(&server.attach());
        }
        let left = || server.stderr().matches("has left").count();
        crate::harness::until("the last one to leave", || left() == total);
    };
    let list = |what: &str| std::fs::read_dir(format!("/proc/{}/{what}", worker(&server))).unwrap();
    let threads = || list("task").count();
    let descriptors = || {
        let links = list("fd").filter_map(|fd| std::fs::read_link(fd.unwrap().path()).ok());
        let (rings, others): (Vec<_>, Vec<_>) =
            links.partition(|link| link.to_string_lossy().contains("[io_uring]"));
        (rings.len(), others.len())
    };
    twenty_come_and_go(20);
    let before = (threads(), descriptors());
    for round in 2..=4 {
        twenty_come_and_go(20 * round);
    }
    // Sixty more clients must not leave threads or descriptors behind. But a thread may keep up to
    // four descriptors for its next client (three of them are io_urings that signal eventfds). The
    // number may also be smaller than `before`, because `before` may include descriptors that were
    // about to be closed.
    let (before_threads, (before_rings, before_others)) = before;
    let is_left = || {
        let (rings, others) = descriptors();
        threads() > before_threads
            || others > before_others + before_threads
            || rings > before_rings + 3 * before_threads
    };
    crate::harness::until("no more threads and descriptors than before", || !is_left());
}

fn assert_one_namespace(controller: &Controller) {
    assert_eq!(controller.admin().active_namespaces().unwrap(), [1]);
}
