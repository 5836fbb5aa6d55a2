//! Exports of a server's disks by NBD, vhost-user-blk and FUSE, while controllers use the disks,
//! and after crashes and upgrades.

use crate::control::{ctl, ctl_json};
use crate::disk_recovery::Export as Below;
use crate::harness::{Server, image, program, until};
use crate::machine::{BLOCK, BLOCKS, Machine};
use crate::metrics::scrape;
use crate::recover::{Thief, kill};
use crate::supervisor::worker;
use crate::upgrade::Client;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::Signal;
use serde_json::json;
use shadowbell_testing::programs::skipped;
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// NBD client of the default export. The server sends simple replies.
pub(crate) struct Nbd(UnixStream, u64);

impl Nbd {
    /// Waits until the server listens, and connects.
    pub(crate) fn connect(socket: &Path) -> Self {
        let mut stream = None;
        until("the NBD server", || {
            stream = UnixStream::connect(socket).ok();
            stream.is_some()
        });
        let mut nbd = Self(stream.unwrap(), 0);
        assert_eq!(nbd.take::<18>()[..16], *b"NBDMAGICIHAVEOPT");
        nbd.0.write_all(&3_u32.to_be_bytes()).unwrap();
        // Requests the export with an empty name (NBD_OPT_EXPORT_NAME). The answer is size and
        // flags.
        nbd.0.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
        nbd.1 = u64::from_be_bytes(nbd.take::<10>()[..8].try_into().unwrap());
        nbd
    }

    /// Size of the disk when the client connected.
    pub(crate) fn size(&self) -> u64 {
        self.1
    }

    /// True if the server has disconnected the client.
    pub(crate) fn is_disconnected(&mut self) -> bool {
        matches!(self.0.read(&mut [0]), Ok(0) | Err(_))
    }

    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Sends a request for 512 bytes from byte `offset` on.
    pub(crate) fn send(&mut self, kind: u8, offset: u64, data: &[u8]) {
        let mut request = b"\x25\x60\x95\x13\0\0\0".to_vec();
        request.push(kind);
        request.extend([[7; 8], offset.to_be_bytes()].concat());
        request.extend(512_u32.to_be_bytes());
        request.extend(data);
        self.0.write_all(&request).unwrap();
    }

    /// Waits for the reply to a request. Returns its error.
    pub(crate) fn reply(&mut self) -> u32 {
        let reply = self.take::<16>();
        assert_eq!(reply[8..], [7; 8]);
        u32::from_be_bytes(reply[4..8].try_into().unwrap())
    }

    /// True if bytes of a reply have arrived.
    pub(crate) fn has_reply(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    }

    /// Sends a request for the first 512 bytes. Returns the error of the reply.
    fn request(&mut self, kind: u8, data: &[u8]) -> u32 {
        self.send(kind, 0, data);
        self.reply()
    }

    pub(crate) fn read(&mut self) -> u8 {
        assert_eq!(self.request(0, &[]), 0);
        let data = self.take::<512>();
        assert_eq!(data, [data[0]; 512]);
        data[0]
    }

    pub(crate) fn write(&mut self, byte: u8) -> u32 {
        self.request(1, &[byte; 512])
    }
}

#[test]
fn a_server_exports_its_disks_over_crashes_and_upgrades() {
    let directory = tempfile::tempdir().unwrap();
    let file = "socket-mode = \"0600\"\n\
                [[disk]]\nid = \"data\"\nsource = \"mem:8MiB\"\n\
                [[controller]]\nid = \"a\"\nsocket = \"vm0.sock\"\ndisks = [\"mem:4MiB\"]\n\
                [[export]]\nid = \"data\"\ndisk = \"data\"\nnbd = \"unix:data.sock\"\n\
                [[export]]\nid = \"tcp\"\ndisk = \"a/1\"\nnbd = \"tcp:127.0.0.1:0\"\nread-only = true\n";
    std::fs::write(directory.path().join("vm.toml"), file).unwrap();
    let mut command = program();
    command.args(["serve", "--supervisor", "--sandbox", "on", "--config", "vm.toml"]);
    let mut server = Server::spawn(command, directory, &["vm0.sock"]);
    let socket = server.directory().join("data.sock");
    // The control socket accepts connections only after both exports have started, so the list is
    // complete.
    assert_eq!(ctl_json(&server, &["export", "ls"]).as_array().unwrap().len(), 2);
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert_eq!(Nbd::connect(&socket).write(7), 0);
    assert_eq!(Nbd::connect(&socket).read(), 7);
    for is_crash in [true, false, true] {
        let before =
            (worker(&server), ctl_json(&server, &["export", "ls"]).as_array().unwrap().len());
        if is_crash {
            kill(&server, Signal::KILL);
        } else {
            assert_eq!(ctl(&server, &["upgrade"]).0, Some(0), "{}", server.stderr());
        }
        until("another process", || worker(&server) != before.0);
        assert_eq!(Nbd::connect(&socket).read(), 7);
        assert_eq!(ctl_json(&server, &["export", "ls"]).as_array().unwrap().len(), before.1);
    }
    // A second writer needs `share` on both writers.
    let (code, _, errors) = ctl(&server, &["namespace", "attach", "a", "2", "data"]);
    assert!(code == Some(4) && errors.contains("written by the export data"), "{errors}");
    assert_eq!(ctl(&server, &["export", "remove", "data", "--force"]).0, Some(0));
    assert!(!socket.exists());
    ctl_json(&server, &["namespace", "attach", "a", "2", "data"]);
    let add = |more: &[&str]| {
        let words = ["export", "add", "data", "data", "--nbd", "unix:data.sock"];
        ctl(&server, &[&words, more].concat())
    };
    let (code, _, errors) = add(&[]);
    assert!(code == Some(4) && errors.contains("is written by namespace 2"), "{errors}");
    assert_eq!(add(&["--share"]).0, Some(4));
    assert_eq!(add(&["--read-only"]).0, Some(0));
    let mut guest = Client::attach(&server.directory().join("vm0.sock"));
    guest.write(2, 0, 9);
    let mut client = Nbd::connect(&socket);
    assert_eq!(client.write(1), 1, "EPERM");
    kill(&server, Signal::KILL);
    assert_eq!(guest.read(2, 0), 9);
    drop(Nbd::connect(&socket));
    let all = ctl_json(&server, &["disk", "ls"]);
    let data = all.as_array().unwrap().iter().find(|disk| disk["id"] == "data").unwrap();
    assert_eq!(data["exports"], json!(["data"]));
    assert_eq!(data["namespaces"], json!([{"controller": "a", "nsid": 2}]));
    let (_, saved, _) = ctl(&server, &["save-config", "-"]);
    assert!(saved.contains("[[export]]\nid = \"data\""), "{saved}");
    drop(guest);
    assert!(server.stop().success(), "{}", server.stderr());
    assert!(!socket.exists());
}

/// An NBD server without `settle` may still execute writes of a dead process. So the next process
/// serves a writable export of its disk only when an operator adds it again.
#[test]
fn an_export_of_a_disk_without_a_fence_is_not_resumed() {
    for (settle, is_fenced) in [("", false), ("&settle=50ms", true)] {
        let below = Below::start("mem:4MiB");
        let directory = tempfile::tempdir().unwrap();
        let file = format!(
            "controller = []\n[[disk]]\nid = \"data\"\nsource = {:?}\n\
             [[export]]\nid = \"a\"\ndisk = \"data\"\nnbd = \"unix:a.sock\"\n\
             [[export]]\nid = \"b\"\ndisk = \"data\"\nnbd = \"unix:b.sock\"\nread-only = true\n",
            below.uri(settle)
        );
        std::fs::write(directory.path().join("vm.toml"), file).unwrap();
        let mut command = program();
        command.args(["serve", "--supervisor", "--sandbox", "off", "--config", "vm.toml"]);
        let server = Server::spawn(command, directory, &["a.sock", "b.sock"]);
        let writable = server.directory().join("a.sock");
        assert_eq!(Nbd::connect(&writable).write(7), 0);
        kill(&server, Signal::KILL);
        if !is_fenced {
            server.wait_for_log("export a is not served: the storage of the disk data may still");
            assert_eq!(Nbd::connect(&server.directory().join("b.sock")).read(), 7);
            assert!(UnixStream::connect(&writable).is_err());
            let add = ["export", "add", "a", "data", "--nbd", "unix:a.sock"];
            assert_eq!(ctl(&server, &add).0, Some(0), "{}", server.stderr());
        }
        assert_eq!(Nbd::connect(&writable).write(8), 0);
        assert_eq!(Nbd::connect(&writable).read(), 8);
    }
}

/// Starts a server with a sandbox, with this configuration and an image `disk.img` for the disk of
/// [`Machine`].
pub(crate) fn start(file: &str, sockets: &[&str]) -> Server {
    start_with(file, sockets, &[])
}

/// Like [`start`], with further options.
fn start_with(file: &str, sockets: &[&str], options: &[&str]) -> Server {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("vm.toml"), file).unwrap();
    let image = std::fs::File::create(directory.path().join("disk.img")).unwrap();
    image.set_len(BLOCK * BLOCKS).unwrap();
    let mut command = program();
    command.args(["serve", "--supervisor", "--sandbox", "on", "--config", "vm.toml"]);
    command.args(options);
    Server::spawn(command, directory, sockets)
}

/// Runs the machine until it has completed `requests` more requests.
fn run(machine: &mut Machine, requests: u64) {
    let end = machine.answered + requests;
    until("the requests of the machine", || {
        machine.check_completions().unwrap();
        machine.submit_requests();
        machine.wait();
        machine.answered >= end
    });
}

#[test]
fn a_virtio_disk_continues_after_crashes_and_upgrades_of_the_server() {
    let file = "name = \"vm\"\nsocket-mode = \"0600\"\n\
                [[disk]]\nid = \"data\"\nsource = \"disk.img\"\n\
                [[controller]]\nsocket = \"vm0.sock\"\ndisks = [\"mem:4MiB\"]\n\
                [[export]]\nid = \"vm\"\ndisk = \"data\"\nvhost-user-blk = \"vm.sock\"\nqueues = 1\n";
    let server = start(file, &["vm0.sock"]);
    let socket = server.directory().join("vm.sock");
    let listed = ctl_json(&server, &["export", "ls"]);
    assert_eq!(listed[0]["requests"], 0);
    assert_eq!(listed[0]["vhost_user_blk"], socket.to_str().unwrap());
    let mode = std::fs::metadata(&socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut machine = Machine::new();
    machine.connect(&socket).unwrap();
    for is_crash in [true, false, true] {
        run(&mut machine, 100);
        // Submits requests that are in flight when the process ends.
        machine.submit_requests();
        let before = worker(&server);
        if is_crash {
            kill(&server, Signal::KILL);
        } else {
            assert_eq!(ctl(&server, &["upgrade"]).0, Some(0), "{}", server.stderr());
        }
        until("another process", || worker(&server) != before);
        // The VMM tries to reconnect until the next server process listens.
        until("the device", || machine.connect(&socket).is_ok());
    }
    run(&mut machine, 100);
    let listed = ctl_json(&server, &["export", "ls"]);
    // The counters begin at zero in the new process. Up to 16 of the 100 requests were in flight at
    // the replacement, and may have been counted by the old process.
    assert!(listed[0]["requests"].as_u64().unwrap() >= 100 - 16, "{listed}");
    assert_eq!(listed[0]["queues"], 1);
    let metrics = scrape(&server);
    assert_eq!(metrics.get("shadowbell_disk_size_bytes", &[("disk", "data")]), 262_144.0);
    let labels = [("disk", "data"), ("protocol", "vhost-user-blk")];
    assert_eq!(metrics.get("shadowbell_export_info", &labels), 1.0);
    assert!(metrics.get("shadowbell_export_requests_total", &[("export", "vm")]) >= 84.0);
    let written = metrics.get("shadowbell_export_bytes_total", &[("kind", "write")]);
    assert!(written >= 4096.0, "{written}");
    until("the last requests", || {
        machine.wait();
        machine.check_completions().unwrap();
        machine.is_idle()
    });
    machine.pause();
    assert_eq!(ctl(&server, &["export", "remove", "vm", "--force"]).0, Some(0));
    assert!(!socket.exists());
    let image = std::fs::read(server.directory().join("disk.img")).unwrap();
    assert!(image == machine.image(), "the image holds something else");
    // An export with a serial number is added at run time.
    let add = ["export", "add", "vm", "data", "--vhost-user-blk", "vm.sock", "--name", "S1"];
    assert_eq!(ctl(&server, &add).0, Some(0), "{}", server.stderr());
    assert!(socket.exists());
    let (code, _, errors) = ctl(&server, &[&add[..4], &["--nbd", "unix:b", "--queues=2"]].concat());
    assert!(code == Some(2) && errors.contains("`vhost-user-blk`"), "{errors}");
    let (_, saved, _) = ctl(&server, &["save-config", "-"]);
    assert!(saved.contains("vhost-user-blk = "), "{saved}");
}

/// `ctl apply` prints its changes of disks and exports, asks before it disconnects a client, and
/// detects an address in use before it changes anything.
#[test]
fn applying_a_file_changes_disks_and_exports() {
    let file = |disk: &str, rest: &str| {
        format!(
            "name = \"vm\"\n\
             [[disk]]\nid = \"data\"\nsource = \"{disk}\"\n\
             [[controller]]\nsocket = \"vm0.sock\"\ndisks = [\"mem:4MiB\"]\n\
             [[export]]\nid = \"a\"\ndisk = \"data\"\nnbd = \"unix:a.sock\"\n{rest}"
        )
    };
    let server = start(&file("disk.img?iops=5000", ""), &["vm0.sock", "a.sock"]);
    image(server.directory(), "other.img", BLOCK * BLOCKS);
    let apply = |text: &str, options: &[&str]| {
        std::fs::write(server.directory().join("new.toml"), text).unwrap();
        ctl(&server, &[&["apply", "new.toml"], options].concat())
    };
    let mut client = Nbd::connect(&server.directory().join("a.sock"));
    assert_eq!(client.write(3), 0);

    // Limits change in place, so the client stays connected.
    let limited = file("disk.img?iops=9000", "");
    let (code, plan, _) = apply(&limited, &["--dry-run"]);
    let at = server.directory().canonicalize().unwrap().display().to_string();
    assert_eq!(code, Some(0));
    assert!(plan.contains("* disk data: ") && plan.contains("iops=9000"), "{plan}");
    assert!(!plan.contains("needs --force"), "{plan}");
    let (code, _, errors) = apply(&limited, &[]);
    assert_eq!((code, &errors[..]), (Some(0), ""));
    assert_eq!(client.read(), 3);
    let disks = ctl_json(&server, &["disk", "ls"]);
    let data = disks.as_array().unwrap().iter().find(|disk| disk["id"] == "data").unwrap();
    assert_eq!(data["limits"]["iops"], "9000", "{data}");

    // `ctl apply` detects that another server uses the address, before it changes the limits.
    let _other = UnixListener::bind(server.directory().join("b.sock")).unwrap();
    let more = "[[export]]\nid = \"b\"\ndisk = \"data\"\nnbd = \"unix:b.sock\"\n\
                read-only = true\n";
    let (code, _, errors) = apply(&file("disk.img?iops=9000", more), &[]);
    assert!(code.is_some_and(|code| code != 0), "{errors}");
    assert!(errors.contains("nothing was changed") && errors.contains("b.sock"), "{errors}");
    assert_eq!(ctl_json(&server, &["export", "ls"]).as_array().unwrap().len(), 1);
    assert_eq!(client.read(), 3);

    // Another source disconnects the client.
    let other = file("other.img", "");
    let (code, plan, _) = apply(&other, &["--dry-run"]);
    assert!(
        code == Some(0) && plan.contains("needs --force: the client of the export a"),
        "{plan}"
    );
    let (code, _, errors) = apply(&other, &[]);
    assert!(code == Some(4) && errors.contains("--force"), "{code:?} {errors}");
    assert_eq!(client.read(), 3);
    let (code, _, errors) = apply(&other, &["--force"]);
    assert_eq!((code, &errors[..]), (Some(0), ""));
    assert_eq!(Nbd::connect(&server.directory().join("a.sock")).read(), 0);

    // A source that is no image leaves the disk and the export as they were.
    std::fs::write(server.directory().join("bad.img"), [0; 700]).unwrap();
    let (code, _, errors) = apply(&file("bad.img", ""), &["--force"]);
    assert!(code.is_some_and(|code| code != 0) && errors.contains("bad.img"), "{errors}");
    assert_eq!(Nbd::connect(&server.directory().join("a.sock")).read(), 0);
    let plan = ctl_json(&server, &["apply", "new.toml", "--dry-run"]);
    assert_eq!(plan["differences"].as_array().unwrap().len(), 1, "{plan} {at}");
}

/// A new source of a named disk reaches the guest, and a file that cannot be applied leaves nothing
/// behind.
#[test]
fn applying_a_file_opens_the_new_source_of_a_controllers_disk() {
    let file = |disk: &str, rest: &str| {
        format!(
            "[[disk]]\nid = \"data\"\nsource = \"{disk}\"\n\
             [[controller]]\nid = \"a\"\nsocket = \"vm0.sock\"\ndisks = [\"data\"]\n{rest}"
        )
    };
    let server = start(&file("disk.img", ""), &["vm0.sock"]);
    image(server.directory(), "other.img", 4 * BLOCK * BLOCKS);
    let apply = |text: &str, options: &[&str]| {
        std::fs::write(server.directory().join("new.toml"), text).unwrap();
        ctl(&server, &[&["apply", "new.toml"], options].concat())
    };
    let socket = server.directory().join("vm0.sock");
    let mut guest = Client::attach(&socket);
    guest.write(1, 0, 5);
    assert_eq!(apply(&file("other.img", ""), &[]).0, Some(4));
    let (code, _, errors) = apply(&file("other.img", ""), &["--force"]);
    assert_eq!((code, &errors[..]), (Some(0), ""));
    drop(guest);
    assert_eq!(Client::attach(&socket).read(1, 0), 0, "the guest has the old image");
    let disks = ctl_json(&server, &["disk", "ls"]);
    assert!(disks[0]["source"].as_str().unwrap().ends_with("other.img"), "{disks}");

    // The export would start, but the file of the new controller is no image.
    std::fs::write(server.directory().join("bad.img"), [0; 700]).unwrap();
    let rest = "[[export]]\nid = \"e\"\ndisk = \"data\"\nnbd = \"unix:e.sock\"\nread-only = true\n\
                [[disk]]\nid = \"more\"\nsource = \"disk.img\"\n\
                [[controller]]\nsocket = \"vm1.sock\"\ndisks = [\"bad.img\"]\n";
    let (code, _, errors) = apply(&file("other.img", rest), &[]);
    assert!(code != Some(0) && errors.contains("nothing was changed"), "{code:?} {errors}");
    assert!(ctl_json(&server, &["export", "ls"]).as_array().unwrap().is_empty());
    assert_eq!(ctl_json(&server, &["disk", "ls"]).as_array().unwrap().len(), 1);
    assert!(!server.directory().join("e.sock").exists());
}

/// A controller without a guest is not removed while programs use an export of its disk.
#[test]
fn the_removal_of_a_controller_asks_for_clients_of_its_disks() {
    let file = "[[controller]]\nid = \"a\"\nsocket = \"vm0.sock\"\ndisks = [\"disk.img\"]\n\
                [[export]]\nid = \"e\"\ndisk = \"a/1\"\nnbd = \"unix:e.sock\"\nread-only = true\n";
    let server = start(file, &["vm0.sock", "e.sock"]);
    let mut client = Nbd::connect(&server.directory().join("e.sock"));
    let (code, _, errors) = ctl(&server, &["controller", "remove", "a"]);
    assert!(code == Some(4) && errors.contains("the export e would lose"), "{code:?} {errors}");
    assert_eq!(client.read(), 0);
    std::fs::write(server.directory().join("none.toml"), "controller = []\n").unwrap();
    let (code, plan, _) = ctl(&server, &["apply", "none.toml", "--dry-run"]);
    assert!(code == Some(0) && plan.contains("the export e would lose"), "{plan}");
    assert_eq!(ctl(&server, &["controller", "remove", "a", "--force"]).0, Some(0));
    assert!(client.is_disconnected());
}

#[test]
fn two_writers_of_a_disk_need_share_on_both() {
    let file = "[[disk]]\nid = \"data\"\nsource = \"disk.img\"\n\
                [[controller]]\nid = \"a\"\nsocket = \"vm0.sock\"\n\
                disks = [{ disk = \"data\", share = true }]\n\
                [[export]]\nid = \"shared\"\ndisk = \"data\"\nnbd = \"unix:a.sock\"\nshare = true\n\
                [[export]]\nid = \"one\"\ndisk = \"data\"\nnbd = \"unix:b.sock\"\nread-only = true\n\
                [[export]]\nid = \"two\"\ndisk = \"data\"\nvhost-user-blk = \"c.sock\"\n\
                read-only = true\n";
    let server = start(file, &["vm0.sock"]);
    let path = |name: &str| server.directory().join(name);
    let mut guest = Client::attach(&path("vm0.sock"));
    let (mut writer, mut reader) = (Nbd::connect(&path("a.sock")), Nbd::connect(&path("b.sock")));
    guest.write(1, 0, 5);
    assert_eq!((writer.read(), reader.read()), (5, 5));
    assert_eq!((writer.write(6), reader.write(7)), (0, 1), "only the read-only one has EPERM");
    assert_eq!(guest.read(1, 0), 6);
    let mut machine = Machine::new();
    machine.connect(&path("c.sock")).unwrap();
    // The supervisor of a sandboxed server binds only those TCP addresses that were in the
    // configuration at start-up.
    let tcp = ["export", "add", "tcp", "data", "--read-only", "--nbd", "tcp:127.0.0.1:0"];
    let (code, _, errors) = ctl(&server, &tcp);
    assert!(code == Some(2) && errors.contains("the sandbox permits only the TCP"), "{errors}");
    // A third writer is refused without `share`, and accepted with it.
    let add = ["export", "add", "three", "data", "--vhost-user-blk", "d.sock"];
    let (code, _, errors) = ctl(&server, &add);
    assert!(code == Some(4) && errors.contains("written by namespace 1"), "{errors}");
    assert_eq!(ctl(&server, &[&add[..], &["--share"]].concat()).0, Some(0));
    drop(guest);
    ctl(&server, &["export", "remove", "three"]);
    assert_eq!(ctl(&server, &["controller", "remove", "a"]).0, Some(0), "{}", server.stderr());
    let (code, _, errors) = ctl(&server, &add);
    assert!(code == Some(4) && errors.contains("written by the export shared"), "{errors}");
}

/// After a crash, another program has locked the disk of an export. The export is served as soon as
/// the disk can be recovered.
#[test]
fn an_export_waits_for_the_recovery_of_its_disk() {
    let file = "[[disk]]\nid = \"data\"\nsource = \"disk.img\"\n\
                [[controller]]\nsocket = \"vm0.sock\"\ndisks = [\"mem:4MiB\"]\n\
                [[export]]\nid = \"e\"\ndisk = \"data\"\nnbd = \"unix:e.sock\"\n";
    let server = start(file, &["vm0.sock"]);
    // The answer shows that the server is ready, so the supervisor has its checkpoint.
    assert_eq!(ctl_json(&server, &["export", "ls"])[0]["id"], "e");
    let thief = Thief::of(server.directory().join("disk.img"));
    until("the lock of the thief", || {
        // During this time, the thief starts to wait for the lock in the kernel.
        std::thread::sleep(Duration::from_millis(100));
        kill(&server, Signal::KILL);
        thief.locked.try_recv().is_ok()
    });
    server.wait_for_log("export e waits for the recovery of its disk data");
    thief.release.send(()).unwrap();
    let socket = server.directory().join("e.sock");
    until("the export", || UnixStream::connect(&socket).is_ok());
    assert_eq!(Nbd::connect(&socket).read(), 0);
    assert!(!server.stderr().contains("there is no disk"), "{}", server.stderr());
}

/// Unmounts a file at the end of a test, even if the test fails.
pub(crate) struct Unmount(pub(crate) PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_fuse_file_stays_mounted_over_crashes_and_upgrades_of_the_server() {
    let is_possible = rustix::process::geteuid().is_root()
        && OpenOptions::new().read(true).write(true).open("/dev/fuse").is_ok();
    if !is_possible {
        skipped("this takes root and /dev/fuse");
        return;
    }
    let file = "[[disk]]\nid = \"data\"\nsource = \"disk.img\"\n\
                [[controller]]\nsocket = \"vm0.sock\"\ndisks = [\"mem:4MiB\"]\n";
    let mut server = start_with(file, &["vm0.sock"], &["--stop-timeout", "4"]);
    let path = server.directory().join("file");
    let _unmount = Unmount(path.clone());
    let image = server.directory().join("disk.img");
    let image = ["export", "add", "f", "data", "--fuse", image.to_str().unwrap()];
    let (code, _, errors) = ctl(&server, &image);
    assert!(code == Some(2) && errors.contains("is the file of the disk data"), "{errors}");
    // A refused export leaves no mount.
    let add = ["export", "add", "f", "data", "--fuse", path.to_str().unwrap()];
    let (code, _, errors) = ctl(&server, &[&add[..], &["--queues=2"]].concat());
    assert!(code == Some(2) && !path.exists(), "{errors}");
    assert_eq!(ctl(&server, &add).0, Some(0), "{}", server.stderr());
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    assert_eq!(file.metadata().unwrap().len(), BLOCK * BLOCKS);
    // Adding the same export again changes nothing, and does not mount the file again.
    assert_eq!(ctl(&server, &add).0, Some(0), "{}", server.stderr());
    let ends = AtomicBool::new(false);
    let writes = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            while !ends.load(Ordering::SeqCst) {
                let count = writes.load(Ordering::SeqCst) + 1;
                let data = count.to_le_bytes();
                file.write_all_at(&data, 8 * (count % 4096)).unwrap();
                let mut back = [0; 8];
                file.read_exact_at(&mut back, 8 * (count % 4096)).unwrap();
                assert_eq!(back, data);
                writes.store(count, Ordering::SeqCst);
            }
        });
        for is_crash in [true, false, true] {
            let before = worker(&server);
            if is_crash {
                kill(&server, Signal::KILL);
            } else {
                assert_eq!(ctl(&server, &["upgrade"]).0, Some(0), "{}", server.stderr());
            }
            until("another process", || worker(&server) != before);
            let count = writes.load(Ordering::SeqCst);
            until("further writes", || {
                writer.is_finished() || writes.load(Ordering::SeqCst) > count + 100
            });
        }
        ends.store(true, Ordering::SeqCst);
        writer.join().unwrap();
    });
    let (_, saved, _) = ctl(&server, &["save-config", "-"]);
    assert!(!saved.contains("fuse"), "{saved}");
    // A program that has the file open prevents the removal of the export.
    let remove = ["export", "remove", "f"];
    let (code, _, errors) = ctl(&server, &remove);
    assert!(code == Some(4) && errors.contains("programs use"), "{errors}");
    file.write_all_at(b"still", 0).unwrap();
    // The file is still mounted after the refused removal, and stays mounted while other settings
    // are changed.
    let size = || std::fs::metadata(&path).unwrap().len();
    assert_eq!(size(), BLOCK * BLOCKS);
    ctl_json(&server, &["limit", "data", "--iops", "100000"]);
    file.write_all_at(b"still", 0).unwrap();
    assert_eq!(size(), BLOCK * BLOCKS);
    drop(file);
    // Mount namespaces that other tests have created meanwhile contain copies of the mount, and the
    // export is not removed before the last of them has ended.
    let mut errors = String::new();
    until("the removal of the export", || {
        let (code, _, text) = ctl(&server, &remove);
        let is_removed = code == Some(0);
        assert!(is_removed || text.contains("mount namespace"), "{text}");
        errors = text;
        is_removed
    });
    assert_eq!(errors, "");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 0, "the file below the mount");
    assert_eq!(ctl_json(&server, &["export", "ls"]), json!([]));
    // A program that has the file open also delays the end of the server.
    assert_eq!(ctl(&server, &add).0, Some(0), "{}", server.stderr());
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    server.signal(Signal::TERM);
    server.wait_for_log("is mounted, waiting for its users");
    // This sleep is longer than the stop timeout of 4 s, which does not limit the wait for users of
    // a mounted file.
    std::thread::sleep(Duration::from_millis(4500));
    file.write_all_at(b"at the end", 0).unwrap();
    drop(file);
    rustix::mount::unmount(&path, rustix::mount::UnmountFlags::empty()).unwrap();
    assert_eq!(server.wait().code(), Some(0), "{}", server.stderr());
    assert!(!server.stderr().contains("has not answered"), "{}", server.stderr());
}
