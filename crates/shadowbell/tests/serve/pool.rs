//! Namespaces that a guest creates from a pool, and their state after restarts, crashes and
//! upgrades.

use crate::harness::{Server, finish, program, run, until};
use crate::recover::kill;
use crate::supervisor::children;
use crate::upgrade::upgrade;
use rustix::process::Signal;
use serde_json::Value;
use shadowbell_driver::{AttachOptions, Controller, QueuePair};
use shadowbell_spec::Status;
use shadowbell_spec::admin::{FormatNvm, Sanitize};
use shadowbell_spec::log::sos;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use tempfile::TempDir;

const POOL: [&str; 2] = ["--pool", "pool?capacity=64MiB"];

fn start(directory: TempDir, disks: &[&str]) -> Server {
    Server::start_in(directory, disks, &POOL)
}

/// Runs a verb of the program on the server's controller, which must succeed. Returns the output.
#[track_caller]
fn verb(server: &Server, verb: &str, options: &[&str]) -> String {
    let (status, printed, errors) = finish(command(server, verb, options));
    assert_eq!(status, Some(0), "{verb} {options:?}: {errors}\n{}", server.stderr());
    printed
}

fn command(server: &Server, verb: &str, options: &[&str]) -> Command {
    let mut command = program();
    command.arg(verb).arg(format!("vfio-user:{}", server.socket().display())).args(options);
    command.env("SHADOWBELL_RUN_DIR", server.directory().join("run"));
    command
}

#[track_caller]
fn refused(server: &Server, verb: &str, options: &[&str], words: &str) {
    let (status, _, errors) = finish(command(server, verb, options));
    assert!(status == Some(2) && errors.contains(words), "{verb} {options:?}: {errors}");
}

/// Host of a controller. The host fills each block of a namespace with one repeated byte.
struct Guest(Controller, QueuePair);

impl Guest {
    fn attach(server: &Server) -> Self {
        let options = AttachOptions { queue_pairs: 1, ..AttachOptions::default() };
        let mut controller = server.attach_with(&options);
        let queue = controller.take_queue_pair().unwrap();
        Self(controller, queue)
    }

    fn nsids(&self) -> Vec<u32> {
        self.0.namespaces().iter().map(|namespace| namespace.nsid()).collect()
    }

    #[track_caller]
    fn write(&mut self, nsid: u32, lba: u64, value: u8) {
        let status = self.try_write(nsid, lba, value);
        assert!(status.is_success(), "{status}");
    }

    fn try_write(&mut self, nsid: u32, lba: u64, value: u8) -> Status {
        let namespace = self.0.namespace(nsid).unwrap().clone();
        let mut buffer = self.0.buffers(1, 4096).unwrap().take().unwrap();
        buffer.fill(value);
        run(&mut self.1, namespace.write(lba, 1).unwrap(), Some(buffer)).status
    }

    fn read(&mut self, nsid: u32, lba: u64) -> Result<u8, Status> {
        let namespace = self.0.namespace(nsid).unwrap().clone();
        let buffer = self.0.buffers(1, 4096).unwrap().take().unwrap();
        let done = run(&mut self.1, namespace.read(lba, 1).unwrap(), Some(buffer));
        done.status.into_result().map(|()| done.buffer.unwrap().to_vec(1)[0])
    }
}

#[test]
fn namespaces_created_by_a_guest_outlive_the_server() {
    let mut server = start(tempfile::tempdir().unwrap(), &[]);
    refused(&server, "create-ns", &["-s", "65MiB"], "Namespace Insufficient Capacity");
    assert!(verb(&server, "create-ns", &["-s", "8MiB", "-b", "4096"]).contains("nsid:1"));
    assert!(verb(&server, "create-ns", &["-s", "2048"]).contains("nsid:2"));
    verb(&server, "attach-ns", &["-n", "1"]);
    verb(&server, "attach-ns", &["-n", "2", "-c", "1"]);
    refused(&server, "attach-ns", &["-n", "2"], "Already Attached");
    verb(&server, "detach-ns", &["-n", "2"]);
    refused(&server, "delete-ns", &["-n", "2"], "--force");
    let mut guest = Guest::attach(&server);
    assert_eq!(guest.nsids(), [1]);
    let before = guest.0.namespace(1).unwrap().clone();
    assert_eq!((before.bytes(), before.block_size()), (8 << 20, 4096));
    guest.write(1, 2047, 7);
    drop(guest);
    // The namespace's file is sparse.
    let file = std::fs::metadata(server.directory().join("pool/namespace-001")).unwrap();
    assert_eq!(file.len(), 8 << 20);
    assert!(file.blocks() * 512 < 1 << 20, "{}", file.blocks());
    // Another server cannot open the pool.
    let mut other = program();
    other.args(["serve", "--socket", "other.sock"]).args(POOL).current_dir(server.directory());
    let (status, _, errors) = finish(other);
    assert!(status == Some(2) && errors.contains("has it open"), "{errors}");
    assert!(server.stop().success(), "{}", server.stderr());

    let server = start(server.into_directory(), &[]);
    let mut guest = Guest::attach(&server);
    assert_eq!(guest.nsids(), [1]);
    assert_eq!(guest.0.namespace(1).unwrap().uuid(), before.uuid());
    assert_eq!(guest.read(1, 2047), Ok(7));
    drop(guest);
    verb(&server, "attach-ns", &["-n", "2"]);
    assert_eq!(Guest::attach(&server).nsids(), [1, 2]);
    verb(&server, "delete-ns", &["-n", "1", "--force"]);
    assert_eq!(Guest::attach(&server).nsids(), [2]);
    let file = std::fs::metadata(server.directory().join("pool/namespace-001")).unwrap();
    assert_eq!(file.len(), 4096, "the deleted namespace takes no space");
}

#[test]
fn namespaces_created_by_a_guest_survive_crashes_and_upgrades() {
    let directory = tempfile::tempdir().unwrap();
    crate::harness::image(directory.path(), "given.img", 1 << 20);
    let mut server = start(directory, &["given.img"]);
    let mut guest = Guest::attach(&server);
    for round in 0..4_u8 {
        let admin = guest.0.admin();
        let nsid = admin.create_namespace(2048, 0).unwrap();
        assert_eq!(nsid, u32::from(round) + 2);
        admin.attach_namespace(nsid, &[1], true).unwrap();
        guest.0.refresh_namespaces().unwrap();
        guest.write(nsid, 9, round + 1);
        if round % 2 == 0 {
            kill(&server, Signal::KILL);
        } else {
            let (status, _, errors) = upgrade(&server.pid().to_string(), None);
            assert_eq!(status, Some(0), "{errors}\n{}", server.stderr());
            until("the old one's end", || children(server.pid()).len() == 1);
        }
        for nsid in 2..=nsid {
            assert_eq!(guest.read(nsid, 9), Ok(nsid as u8 - 1));
        }
    }
    let admin = guest.0.admin();
    admin.attach_namespace(3, &[1], false).unwrap();
    admin.format(4, FormatNvm { lbaf: 1, ses: 1, ..FormatNvm::default() }).unwrap();
    admin.delete_namespace(5).unwrap();
    assert_eq!(
        admin.delete_namespace(1).unwrap_err().status().unwrap().code(),
        Status::OPERATION_DENIED
    );
    kill(&server, Signal::KILL);
    guest.0.refresh_namespaces().unwrap();
    assert_eq!(guest.nsids(), [1, 2, 4]);
    assert_eq!(guest.0.namespace(4).unwrap().block_size(), 4096);
    assert_eq!((guest.read(2, 9), guest.read(4, 9)), (Ok(1), Ok(0)));
    drop(guest);
    let log = server.stderr();
    assert!(!log.contains("have lost") && !log.contains("the pool"), "{log}");
    assert!(server.stop().success(), "{}", server.stderr());
}

/// A Sanitize operation continues in the next process after a crash. Until its end, no command can
/// access a namespace.
#[test]
fn a_sanitize_operation_continues_after_a_crash() {
    let mut server = start(tempfile::tempdir().unwrap(), &[]);
    verb(&server, "create-ns", &["-s", "8MiB"]);
    verb(&server, "attach-ns", &["-n", "1"]);
    let mut guest = Guest::attach(&server);
    for lba in (0..16384).step_by(256) {
        guest.write(1, lba, 7);
    }
    refused(&server, "sanitize", &["-a", "block-erase"], "--force");
    let overwrite = Sanitize {
        sanact: Sanitize::OVERWRITE,
        owpass: 0,
        ovrpat: 0xa5a5_a5a5,
        ..Sanitize::default()
    };
    guest.0.admin().sanitize(overwrite).unwrap();
    let mut deaths = 0;
    let log = loop {
        let log = guest.0.admin().sanitize_log().unwrap();
        if log.sstat.sos() != sos::IN_PROGRESS {
            break log;
        }
        if deaths < 2 {
            deaths += 1;
            kill(&server, Signal::KILL);
        }
        match guest.read(1, 0) {
            Err(status) => assert_eq!(status.code(), Status::SANITIZE_IN_PROGRESS),
            Ok(value) => assert_eq!(value, 0, "sanitize has ended meanwhile"),
        }
    };
    assert_eq!((log.sstat.sos(), log.sstat.opc(), log.sprog), (sos::SUCCESSFUL, 16, 0xffff));
    until("the namespace", || guest.read(1, 0) == Ok(0));
    assert!((0..16384).step_by(1024).all(|lba| guest.read(1, lba) == Ok(0)));
    drop(guest);
    let printed: Value = serde_json::from_str(&verb(&server, "sanitize-log", &["--json"])).unwrap();
    assert_eq!(printed["sprog"], 65535);
    verb(&server, "sanitize", &["-a", "2", "--force"]);
    until("the end", || verb(&server, "sanitize-log", &[]).contains("successful"));
    let events = verb(&server, "persistent-event-log", &["--json"]);
    assert!(events.contains("\"cdw11\"") && events.contains("\"sanitize_prog\""), "{events}");
    assert!(server.stop().success(), "{}", server.stderr());
}

#[test]
fn blocks_are_marked_as_uncorrectable() {
    let server = start(tempfile::tempdir().unwrap(), &[]);
    verb(&server, "create-ns", &["-s", "1MiB"]);
    verb(&server, "attach-ns", &["-n", "1"]);
    refused(&server, "write-uncor", &["-s", "5"], "--force");
    verb(&server, "write-uncor", &["-s", "5", "-c", "1", "--force"]);
    refused(&server, "write-uncor", &["-s", "2048", "--force"], "2048");
    let mut guest = Guest::attach(&server);
    assert_eq!(guest.read(1, 4), Ok(0));
    for lba in [5, 6] {
        assert_eq!(guest.read(1, lba).unwrap_err().code(), Status::UNRECOVERED_READ);
    }
    guest.write(1, 5, 1);
    assert_eq!(guest.read(1, 5), Ok(1));
}

/// An upgrade waits only for the current step of a Sanitize operation. The next process completes
/// the operation. The event log contains the start and the completion of the operation.
#[test]
fn a_sanitize_operation_continues_across_upgrades() {
    let mut server = start(tempfile::tempdir().unwrap(), &[]);
    verb(&server, "create-ns", &["-s", "16MiB"]);
    verb(&server, "attach-ns", &["-n", "1"]);
    let mut guest = Guest::attach(&server);
    for lba in (0..32768).step_by(512) {
        guest.write(1, lba, 7);
    }
    let overwrite =
        Sanitize { sanact: Sanitize::OVERWRITE, owpass: 8, ovrpat: 0x5a5a, ..Sanitize::default() };
    guest.0.admin().sanitize(overwrite).unwrap();
    let mut progress = Vec::new();
    for _ in 0..2 {
        let before = guest.0.admin().sanitize_log().unwrap();
        let (status, _, errors) = upgrade(&server.pid().to_string(), None);
        assert_eq!(status, Some(0), "{errors}\n{}", server.stderr());
        until("the old one's end", || children(server.pid()).len() == 1);
        let after = guest.0.admin().sanitize_log().unwrap();
        assert_eq!(after.scdw10, before.scdw10, "the same operation");
        progress.push((before.sstat.sos(), before.sprog, after.sstat.sos(), after.sprog));
        if after.sstat.sos() == sos::IN_PROGRESS {
            // The progress may be lower in the next process, but by no more than one pass over a
            // namespace: the next process repeats this pass.
            let a_pass = u16::MAX / 8 + 1;
            assert!(after.sprog >= before.sprog.saturating_sub(a_pass), "{progress:?}");
            match guest.read(1, 0) {
                Err(status) => assert_eq!(status.code(), Status::SANITIZE_IN_PROGRESS),
                Ok(value) => assert_eq!(value, 0, "sanitize has ended meanwhile"),
            }
        }
    }
    assert_eq!(progress[0].0, sos::IN_PROGRESS, "upgraded before its end: {progress:?}");
    let is_over = || guest.0.admin().sanitize_log().unwrap().sstat.sos() != sos::IN_PROGRESS;
    until("its end", is_over);
    let log = guest.0.admin().sanitize_log().unwrap();
    let result = (log.sstat.sos(), log.sstat.opc());
    assert_eq!(result, (sos::SUCCESSFUL, 8), "{progress:?}\n{}", server.stderr());
    until("the namespace", || guest.read(1, 0) == Ok(0));
    assert!((0..32768).step_by(512).all(|lba| guest.read(1, lba) == Ok(0)));
    drop(guest);
    let printed: Value =
        serde_json::from_str(&verb(&server, "persistent-event-log", &["--json"])).unwrap();
    let printed = printed.to_string();
    assert!(
        printed.contains("\"cdw11\"") && printed.contains("\"sanitize_prog\":65535"),
        "{printed}"
    );
    assert!(server.stop().success(), "{}", server.stderr());
}

/// With `pool` in the configuration file, namespaces that the guest has created exist after a
/// restart. The saved configuration contains the pool, but not these namespaces.
#[test]
fn a_pool_in_the_configuration_file_keeps_its_namespaces() {
    let config = "control-socket = \"ctl.sock\"\n[[controller]]\nsocket = \"vm.sock\"\n\
                  pool = \"pool?capacity=16MiB\"\n";
    let serve = |directory: TempDir| {
        std::fs::write(directory.path().join("vm.toml"), config).unwrap();
        let mut command = program();
        command.args(["serve", "--config", "vm.toml"]);
        Server::spawn(command, directory, &["vm.sock"])
    };
    let mut server = serve(tempfile::tempdir().unwrap());
    refused(&server, "create-ns", &["-s", "17MiB"], "Namespace Insufficient Capacity");
    verb(&server, "create-ns", &["-s", "8MiB"]);
    verb(&server, "attach-ns", &["-n", "1"]);
    let mut guest = Guest::attach(&server);
    guest.write(1, 3, 9);
    let ctl = |words: &[&str]| {
        let mut command = program();
        command.args(["ctl", "-s", "./ctl.sock"]).args(words).current_dir(server.directory());
        finish(command)
    };
    let (status, saved, errors) = ctl(&["save-config", "-"]);
    assert_eq!(status, Some(0), "{errors}");
    assert!(saved.contains("pool?capacity=16") && saved.contains("disks = []"), "{saved}");
    // Applying the original file changes nothing, although the guest has created namespaces.
    let (status, printed, errors) = ctl(&["apply", "vm.toml", "--dry-run"]);
    assert_eq!(status, Some(0), "{errors}");
    assert!(printed.contains("0 changed, 1 unchanged"), "{printed}");
    kill(&server, Signal::KILL);
    assert_eq!(guest.read(1, 3), Ok(9));
    drop(guest);
    assert!(server.stop().success(), "{}", server.stderr());
    let mut server = serve(server.into_directory());
    let mut guest = Guest::attach(&server);
    assert_eq!((guest.nsids(), guest.read(1, 3)), (vec![1], Ok(9)));
    drop(guest);
    assert!(server.stop().success(), "{}", server.stderr());
}

/// The file system has less space than the capacity of the pool. A write for which there is no
/// space fails, and earlier data and the index of the pool stay intact.
#[test]
fn a_full_file_system_under_a_pool_fails_writes_only() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("pool")).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--map-root-user"]);
    let mut probe = Command::new("unshare");
    probe.args(["--mount", "--map-root-user", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]);
    if !probe.output().is_ok_and(|output| output.status.success()) {
        eprintln!("not tried: this system gives us no mount namespace");
        return;
    }
    let script = "mount -t tmpfs -o size=1m,huge=never tmpfs pool && exec \"$@\"";
    command.args(["sh", "-c", script, "sh", env!("CARGO_BIN_EXE_shadowbell")]);
    command.args(["serve", "--socket", "vm.sock"]).args(POOL);
    let server = Server::spawn(command, directory, &["vm.sock"]);
    verb(&server, "create-ns", &["-s", "8MiB"]);
    verb(&server, "attach-ns", &["-n", "1"]);
    let mut guest = Guest::attach(&server);
    let mut ends = Vec::new();
    for page in 0..512_u32 {
        ends.push(guest.try_write(1, u64::from(page) * 8, page as u8 | 1));
    }
    let written = ends.iter().filter(|end| end.is_success()).count();
    assert!((64..256).contains(&written), "{written} of 1 MiB");
    let others = ends.iter().filter(|end| !end.is_success());
    assert!(others.clone().all(|end| end.code() == Status::CAPACITY_EXCEEDED), "{ends:?}");
    server.wait_for_log("there is no room left for namespace 1");
    let reads_back = |guest: &mut Guest| {
        for (page, end) in (0_u32..).zip(&ends) {
            let expected = if end.is_success() { page as u8 | 1 } else { 0 };
            assert_eq!(guest.read(1, u64::from(page) * 8), Ok(expected), "page {page}");
        }
    };
    reads_back(&mut guest);
    // The pool's index needs no additional space: on a full file system, namespaces can be created
    // and deleted, and the next process serves them.
    let admin = guest.0.admin();
    assert_eq!(admin.create_namespace(2048, 0).unwrap(), 2);
    admin.attach_namespace(2, &[1], true).unwrap();
    kill(&server, Signal::KILL);
    guest.0.refresh_namespaces().unwrap();
    assert_eq!(guest.nsids(), [1, 2]);
    reads_back(&mut guest);
    assert_eq!(guest.try_write(2, 0, 1).code(), Status::CAPACITY_EXCEEDED);
    // Deallocation and deletion of a namespace free space again.
    guest.0.admin().delete_namespace(1).unwrap();
    guest.write(2, 0, 5);
    assert_eq!(guest.read(2, 0), Ok(5));
}
