//! The sandbox (`serve --sandbox`): forbidden operations fail, and all features of the server work.

use crate::control::{ctl, http_request, request};
use crate::disk_recovery::{Export, qemu_img};
use crate::harness::{Server, finish, image, program, program_with_sighup, run, until};
use crate::recover::kill;
use crate::supervisor::{signal, worker};
use crate::upgrade::{Client, upgrade};
use rustix::process::Signal;
use serde_json::json;
use shadowbell_spec::Status;
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::programs::skipped;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::process::Command;
#[cfg(all(feature = "faults", target_arch = "x86_64"))]
use std::process::Stdio;

fn status_of(pid: u32, key: &str) -> String {
    // Name of the thread: the program's name, of which the kernel keeps 15 bytes.
    crate::idle::status_of(pid, "shadowbell-serv", key)
}

#[cfg(feature = "faults")]
#[test]
fn a_forbidden_system_call_ends_the_process() {
    let directory = tempfile::tempdir().unwrap();
    let calls =
        ["execve", "execveat", "fork", "clone", "ptrace", "socket", "process_vm_writev", "bpf"];
    for call in calls.into_iter().filter(|call| cfg!(target_arch = "x86_64") || *call != "fork") {
        let mut command = program();
        command.args(["serve", "--no-supervisor", "null:1MiB", "--socket"]);
        command.arg(directory.path().join("vm.sock"));
        command.args(["--attempt", call]).env("SHADOWBELL_RUN_DIR", directory.path());
        let (status, _, errors) = finish(command);
        assert_eq!(status, None, "{call}: the process ends by a signal: {errors}");
        let line = format!("error: the sandbox forbids the system call {call} (");
        assert!(errors.contains(&line) && errors.contains("SIGSYS"), "{call}: {errors}");
        assert!(!errors.contains("attempt"), "{errors}");
    }
    // The supervisor reports that a server process was killed because of a forbidden system call.
    let server = Server::start(&["null:1MiB"], &["--attempt", "socket"]);
    server.wait_for_log("for a system call that its sandbox forbids");
    drop(server);
    let server = Server::start(
        &["null:1MiB"],
        &["--no-supervisor", "--sandbox", "off", "--attempt", "getpid"],
    );
    server.wait_for_log("attempt getpid: nothing was in the way");
    assert_eq!(status_of(server.pid(), "Seccomp"), "0");
}

#[cfg(feature = "faults")]
#[test]
fn other_files_cannot_be_opened_in_the_sandbox() {
    let directory = tempfile::tempdir().unwrap();
    let disk = image(directory.path(), "disk.img", 1 << 20);
    let attempts =
        ["open:/etc/passwd", "open:disk.img", "write:disk.img", "write:new", "open:/dev/null"];
    let attempts: Vec<_> = attempts.into_iter().flat_map(|what| ["--attempt", what]).collect();
    let mut server =
        Server::start_in(directory, &["disk.img"], &[&["--supervisor"], &attempts[..]].concat());
    for what in attempts.iter().filter(|word| **word != "--attempt") {
        server.wait_for_log(&format!("attempt {what}: Permission denied"));
    }
    assert!(!server.directory().join("new").exists());
    let mut guest = Client::attach(&server.socket());
    guest.write(1, 0, 7);
    assert_eq!(guest.read(1, 0), 7);
    drop(guest);
    assert!(server.stop().success());
    assert_eq!(std::fs::read(disk).unwrap().len(), 1 << 20);
}

#[test]
fn recovery_and_namespace_changes_work_in_the_sandbox() {
    let (directory, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    image(directory.path(), "disk.img", 4 << 20);
    let path = |name: &str| elsewhere.path().join(name).to_str().unwrap().to_owned();
    let others = ["a.img", "b.img", "c.img"];
    others.iter().for_each(|name| drop(image(elsewhere.path(), name, 4 << 20)));
    let mut server =
        Server::start_in(directory, &["disk.img"], &["--supervisor", "--sandbox", "on"]);
    server.wait_for_log("privilege gain blocked");
    let mut guest = Client::attach(&server.socket());
    guest.write(1, 0, 1);
    let (status, _, errors) =
        ctl(&server, &["namespace", "attach", "vm.sock", "2", &path("a.img")]);
    assert_eq!(status, Some(0), "{errors}");
    for round in 2..6 {
        let before = worker(&server);
        if round % 2 == 0 {
            kill(&server, Signal::KILL);
        } else {
            let (status, _, errors) = upgrade(&server.pid().to_string(), None);
            assert_eq!(status, Some(0), "{errors}");
        }
        until("another process", || worker(&server) != before);
        assert_eq!(guest.read(1, 0), round - 1);
        guest.write(1, 0, round);
        assert_eq!(guest.read(1, 0), round);
        assert_eq!(status_of(worker(&server), "Seccomp"), "2");
        assert_eq!(status_of(worker(&server), "NoNewPrivs"), "1");
    }
    // The image is renamed between kills.
    std::fs::rename(path("a.img"), path("z.img")).unwrap();
    kill(&server, Signal::KILL);
    assert_eq!(guest.read(1, 0), 5);
    let replace = ["disk", "replace", "vm.sock/2", &path("b.img"), "--force"];
    let (status, _, errors) = ctl(&server, &replace);
    assert_eq!(status, Some(0), "{errors}");
    // Clients of the control socket cannot make the server open paths outside of the allowed
    // directories.
    let namespace = |nsid: u32| {
        let id = server.socket().to_str().unwrap().replace('/', "%2F");
        format!("/v1/controllers/{id}/namespaces/{nsid}")
    };
    let wanted = |disk: &str| json!({ "disk": disk }).to_string();
    for (disk, words) in [
        (path("c.img"), "`--allow"),
        ("/etc/passwd".to_owned(), "`--allow /etc`"),
        ("nbd://127.0.0.1:1/x".to_owned(), "the sandbox permits only servers"),
        ("nbd://localhost:1/x".to_owned(), "--sandbox off"),
        ("vfio-user:/run/x.sock/1".to_owned(), "--sandbox off"),
    ] {
        let (code, body) = http_request(&server, &request("PUT", &namespace(3), &wanted(&disk)));
        assert!(code >= 400 && body.contains(words), "{disk}: {code} {body}");
    }
    drop(guest);
    assert!(server.stop().success(), "{}", server.stderr());
    assert!(!server.stderr().contains("forbids"), "{}", server.stderr());
}

/// The supervisor connects to NBD servers. So a server with NBD disks has a sandbox, and `ctl` can
/// add another one.
#[test]
fn nbd_disks_are_used_in_the_sandbox() {
    let (first, second) = (Export::start("mem:4MiB"), Export::start("mem:4MiB"));
    let options = ["--supervisor", "--sandbox", "on"];
    let mut server = Server::start(&[&first.uri("&settle=0")], &options);
    let attach = ["namespace", "attach", "vm.sock", "2", &second.uri("&settle=0")];
    let (status, _, errors) = ctl(&server, &attach);
    assert_eq!(status, Some(0), "{errors}");
    let mut guest = Client::attach(&server.socket());
    for round in 1..5 {
        guest.write(1, 0, round);
        guest.write(2, 0, 10 + round);
        let before = worker(&server);
        if round % 2 == 0 {
            kill(&server, Signal::KILL);
        } else {
            let (status, _, errors) = upgrade(&server.pid().to_string(), None);
            assert_eq!(status, Some(0), "{errors}");
        }
        until("another process", || worker(&server) != before);
        assert_eq!((guest.read(1, 0), guest.read(2, 0)), (round, 10 + round));
        assert_eq!(status_of(worker(&server), "Seccomp"), "2");
    }
    drop(guest);
    assert!(server.stop().success(), "{}", server.stderr());
    assert!(!server.stderr().contains("forbids"), "{}", server.stderr());
}

/// The backing file of an image has to be in an allowed directory, like the image itself, or `ctl`
/// has to pass its descriptor. `ctl` passes the descriptor of a backing file only if its caller
/// names the file: the server process could have written the header of the image.
#[test]
fn backing_files_need_a_grant() {
    let (directory, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    image(directory.path(), "disk.img", 1 << 20);
    let path = |name: &str| elsewhere.path().join(name).to_str().unwrap().to_owned();
    let (base, overlay) = (path("base.img"), path("overlay.qcow2"));
    std::fs::write(&base, [7; 1 << 20]).unwrap();
    if qemu_img(&["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &overlay]) != Some(0) {
        return;
    }
    let mut server =
        Server::start_in(directory, &["disk.img"], &["--supervisor", "--sandbox", "on"]);
    let disk = format!("{overlay}?allow-backing=on");
    // Without the option `allow-backing`, `ctl` passes only the descriptor of the image.
    let attach = |disk: &str| ctl(&server, &["namespace", "attach", "vm.sock", "2", disk]);
    let (status, _, errors) = attach(&overlay);
    assert!(status != Some(0) && errors.contains("allow-backing=on"), "{errors}");
    let id = server.socket().to_str().unwrap().replace('/', "%2F");
    let add = format!("/v1/controllers/{id}/namespaces/2");
    let wanted = json!({ "disk": disk }).to_string();
    let (code, body) = http_request(&server, &request("PUT", &add, &wanted));
    assert!(code >= 400 && body.contains("base.img") && body.contains("--allow"), "{code} {body}");
    for other in [&base[..0], &overlay, "/etc/passwd"] {
        let mut words = vec!["namespace", "attach", "vm.sock", "2", &disk[..], "--backing", other];
        words.truncate(if other.is_empty() { 5 } else { 7 });
        let (status, _, errors) = ctl(&server, &words);
        assert!(status != Some(0) && errors.contains("base.img"), "{other}: {errors}");
        assert!(errors.contains("`--backing`"), "{other}: {errors}");
    }
    let attach = ["namespace", "attach", "vm.sock", "2", &disk, "--backing", &base];
    let (status, _, errors) = ctl(&server, &attach);
    assert_eq!(status, Some(0), "{errors}");
    let mut guest = Client::attach(&server.socket());
    assert_eq!(guest.read(2, 0), 7);
    kill(&server, Signal::KILL);
    assert_eq!(guest.read(2, 8), 7);
    drop(guest);
    // The header of another image names the same base image as its data file, which would be
    // written. A backing file is only read.
    let other = path("other.qcow2");
    let options = format!("data_file={},data_file_raw=on", path("data.img"));
    let create = ["create", "-q", "-f", "qcow2", "-o", &options, &other, "1M"];
    assert_eq!(qemu_img(&create), Some(0));
    std::fs::copy(path("data.img"), path("saved.img")).unwrap();
    let disk = format!("{other}?allow-backing=on");
    let attach = |option: &str| {
        ctl(&server, &["namespace", "attach", "vm.sock", "3", &disk, option, &path("data.img")])
    };
    let (status, _, errors) = ctl(&server, &["namespace", "attach", "vm.sock", "3", &disk]);
    assert!(status != Some(0) && errors.contains("data files by `--data-file`"), "{errors}");
    let (status, _, errors) = attach("--backing");
    assert!(status != Some(0) && errors.contains("data file is not writable"), "{errors}");
    let (status, _, errors) = attach("--data-file");
    assert_eq!(status, Some(0), "{errors}");
    let (status, _, errors) = ctl(&server, &["status", "--backing", &base]);
    assert!(status == Some(2) && errors.contains("verbs that open disks"), "{errors}");
    let missing = path("none");
    let words = ["namespace", "attach", "vm.sock", "4", "mem:1MiB", "--backing", &missing];
    let (status, _, errors) = ctl(&server, &words);
    assert!(status == Some(2) && errors.contains("none"), "{errors}");
    // The cause of a missing file is its absence, which the sandboxed process does not find.
    let (status, _, errors) = ctl(&server, &["namespace", "attach", "vm.sock", "4", &missing]);
    let cause = format!("{missing}: not passed to the server: No such file");
    assert!(status != Some(0) && errors.contains(&cause), "{errors}");
    // A server that is started with the saved configuration has all disks, without the grants.
    // The server process could have written the names in the images, so the caller repeats them.
    let (status, text, errors) = ctl(&server, &["save-config", "-"]);
    assert_eq!(status, Some(0), "{errors}");
    let named = format!("a qcow2 image names {base}, which the saved file does not permit");
    assert!(errors.contains(&named) && !text.contains("[paths]"), "{errors}{text}");
    let data = path("data.img");
    let words = ["save-config", "saved.toml", "--backing", &base, "--data-file", &data];
    let (status, _, errors) = ctl(&server, &words);
    assert!(status == Some(0) && !errors.contains("does not permit"), "{errors}");
    assert!(server.stop().success(), "{}", server.stderr());
    let mut command = program();
    command.args(["serve", "--config", "saved.toml", "--supervisor", "--sandbox", "on"]);
    let mut server = Server::spawn(command, server.into_directory(), &["vm.sock"]);
    let mut guest = Client::attach(&server.socket());
    assert_eq!(guest.read(2, 0), 7);
    guest.write(3, 0, 9);
    drop(guest);
    assert!(server.stop().success(), "{}", server.stderr());
}

/// The supervisor releases the images of refused disks. Otherwise clients of the control socket
/// could make it hold thousands of files, whose file systems could not be unmounted.
#[test]
fn the_image_of_a_refused_disk_is_released() {
    let (directory, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let elsewhere = elsewhere.path().canonicalize().unwrap();
    image(directory.path(), "disk.img", 1 << 20);
    image(&elsewhere, "empty.img", 0);
    image(&elsewhere, "raw.img", 1 << 20);
    let allowed = elsewhere.to_str().unwrap();
    let options = ["--supervisor", "--sandbox", "on", "--allow", allowed];
    let mut server = Server::start_in(directory, &["disk.img"], &options);
    let held = || {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap();
        let files = fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
        files.filter(|file| file.starts_with(&elsewhere)).collect::<Vec<_>>()
    };
    let id = server.socket().to_str().unwrap().replace('/', "%2F");
    let put = |disk: &str| {
        let wanted = json!({ "disk": format!("{allowed}/{disk}") }).to_string();
        let path = format!("/v1/controllers/{id}/namespaces/2");
        http_request(&server, &request("PUT", &path, &wanted))
    };
    // The first disk cannot be opened, and the second one is refused after it was opened.
    for disk in ["empty.img", "raw.img?allow-backing=on"] {
        let (code, body) = put(disk);
        assert!(code >= 400 && !body.contains("--allow"), "{disk}: {code} {body}");
    }
    until("the release", || held().is_empty());
    let (code, body) = put("raw.img");
    assert!(code < 400, "{code} {body}");
    assert!(held().contains(&elsewhere.join("raw.img")));
    assert!(server.stop().success(), "{}", server.stderr());
}

/// The supervisor reads the allowed paths in the configuration file again only on request. All
/// clients of the control socket may add disks in allowed directories.
#[test]
fn allowed_paths_of_the_configuration_file_are_read_on_request() {
    let (directory, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    image(directory.path(), "disk.img", 1 << 20);
    let other = image(elsewhere.path(), "other.img", 1 << 20);
    let config = |allowed: &str| {
        let controller = "[[controller]]\nsocket = \"vm.sock\"\ndisks = [\"disk.img\"]\n";
        format!("{allowed}{controller}")
    };
    std::fs::write(directory.path().join("vm.toml"), config("")).unwrap();
    let mut command = program_with_sighup();
    command.args(["serve", "--config", "vm.toml", "--supervisor", "--sandbox", "on"]);
    let mut server = Server::spawn(command, directory, &["vm.sock"]);
    let id = server.socket().to_str().unwrap().replace('/', "%2F");
    let add = format!("/v1/controllers/{id}/namespaces/2");
    let wanted = json!({ "disk": other }).to_string();
    let put = || http_request(&server, &request("PUT", &add, &wanted));
    let allowed = format!("[paths]\nallow = [{:?}]\n", elsewhere.path());
    std::fs::write(server.directory().join("vm.toml"), config(&allowed)).unwrap();
    // A crash does not reload the file: the next process has the configuration of the previous one.
    let before = worker(&server);
    signal(before, Signal::KILL);
    let pid = || {
        let (_, status, _) = ctl(&server, &["status", "--json"]);
        serde_json::from_str::<serde_json::Value>(&status).ok()?["pid"].as_u64()
    };
    until("another process", || pid().is_some_and(|pid| pid != u64::from(before)));
    let (code, body) = put();
    assert!(code >= 400 && body.contains("--allow"), "{code} {body}");
    server.signal(Signal::HUP);
    until("the new configuration", || put().0 < 400);
    assert!(server.stop().success(), "{}", server.stderr());
}

/// Disks need few descriptors, because the queues of all disks share the I/O thread's io_uring. If
/// the limit of descriptors is too low for the disks and clients, the server refuses to start. The
/// supervisor, whose descriptors are not counted, has two for each disk.
#[test]
fn many_disks_need_few_descriptors() {
    let refused = limits_refused(250, "", &[640, 200]);
    assert_eq!(refused, [200]);
}

/// Check of the limit of open files at the server's start: it also counts the descriptors that an
/// I/O thread will open at the first command of a guest.
#[test]
fn descriptors_of_queues_are_counted_at_the_start() {
    let limits = [640, 220, 190, 170, 160, 150, 140];
    let refused = limits_refused(60, "?aio=threads", &limits);
    assert!(!refused.contains(&640) && refused.contains(&140), "{refused:?}");
}

/// Starts a server of `disks` images once with each limit of descriptors. Returns the limits at
/// which it refuses to start. Checks that a guest's commands succeed at all other limits.
fn limits_refused(disks: u32, options: &str, limits: &[u32]) -> Vec<u32> {
    let mut refused = Vec::new();
    for &limit in limits {
        let directory = tempfile::tempdir().unwrap();
        let names: Vec<_> = (1..=disks).map(|nsid| format!("{nsid}.img")).collect();
        names.iter().for_each(|name| drop(image(directory.path(), name, 1 << 20)));
        let names = names.iter().map(|name| format!("{name}{options}"));
        let socket = directory.path().join("vm.sock");
        let mut command = Command::new("prlimit");
        command.arg(format!("--nofile={limit}:{limit}")).arg(program().get_program());
        command.arg("serve").args(names).args(["--socket", "vm.sock", "--sandbox", "on"]);
        command.current_dir(&directory).env("SHADOWBELL_RUN_DIR", directory.path().join("run"));
        let errors = directory.path().join("stderr");
        command.stderr(std::fs::File::create(&errors).unwrap());
        let mut server = ProcessGroup::spawn(&mut command).unwrap();
        let mut status = None;
        until("the server's socket or end", || {
            status = server.try_wait().unwrap();
            status.is_some() || UnixStream::connect(&socket).is_ok()
        });
        let errors = || std::fs::read_to_string(&errors).unwrap();
        if status.is_some() {
            assert!(
                errors().contains("raise the hard limit of open files"),
                "{limit}: {}",
                errors()
            );
            refused.push(limit);
            continue;
        }
        let mut guest = Client::attach(&socket);
        (1..=disks).for_each(|nsid| guest.write(nsid, 0, nsid as u8));
        (1..=disks).for_each(|nsid| assert_eq!(guest.read(nsid, 0), nsid as u8));
        drop(guest);
        assert!(!errors().contains("forbids"), "{}", errors());
    }
    refused
}

/// Disks of every type work in the sandbox, although the types make different system calls.
#[test]
fn every_kind_of_disk_works() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "raw.img", 4 << 20);
    image(directory.path(), "threads.img", 4 << 20);
    shadowbell_disk_qcow2::create(&directory.path().join("disk.qcow2"), 4 << 20).unwrap();
    let disks =
        ["raw.img", "threads.img?aio=threads&direct=off", "disk.qcow2", "mem:4MiB", "null:4MiB"];
    let mut server = Server::start_in(directory, &disks, &["--supervisor", "--sandbox", "on"]);
    for nsid in 1..=4 {
        let mut command = program();
        let target = format!("vfio-user:{}/{nsid}", server.socket().display());
        command.args(["verify", &target, "--number-ios", "2000"]);
        let (status, output, errors) = finish(command);
        assert_eq!(status, Some(0), "{nsid}: {output}{errors}");
    }
    assert!(server.stop().success(), "{}", server.stderr());
    assert!(!server.stderr().contains("forbids"), "{}", server.stderr());
}

/// A qcow2 image that grows and frees clusters needs only allowed system calls, with and without
/// the page cache.
#[test]
fn a_qcow2_image_grows_and_frees_clusters_in_the_sandbox() {
    const MIB: u64 = 1 << 20;
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let names = ["direct.qcow2", "cached.qcow2"];
    let path = |name: &str| directory.path().join(name);
    for name in names {
        shadowbell_disk_qcow2::create(&path(name), 64 * MIB).unwrap();
    }
    let paths = names.map(path);
    let disks = [names[0], "cached.qcow2?direct=off"];
    let mut server = Server::start_in(directory, &disks, &["--supervisor", "--sandbox", "on"]);
    let mut controller = server.attach();
    let mut queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(2, 1 << 20).unwrap();
    let room = |at: usize| paths[at].metadata().unwrap().blocks() * 512;
    for (at, nsid) in [1, 2].into_iter().enumerate() {
        let namespace = controller.namespace(nsid).unwrap().clone();
        let mut ok = |command, buffer| {
            let done = run(&mut queue, command, buffer);
            assert_eq!(done.status, Status::SUCCESS, "{nsid}");
            done.buffer
        };
        let before = room(at);
        for piece in 0..32 {
            let mut buffer = pool.take().unwrap();
            assert!(buffer.copy_from(0, &vec![piece as u8 + 1; MIB as usize]));
            ok(namespace.write(piece * 2048 + 8, 2048).unwrap(), Some(buffer));
        }
        ok(namespace.flush(), None);
        let full = room(at);
        assert!(full >= before + 32 * MIB, "{before} {full}");
        ok(namespace.write_zeroes(1, 3000, false).unwrap(), None);
        ok(namespace.write_zeroes(4096, 2048, true).unwrap(), None);
        let mut ranges = pool.take().unwrap();
        let (blocks, lba) = (20_u32 * 2048, 4_u64 * 2048);
        let range = [&0_u32.to_le_bytes()[..], &blocks.to_le_bytes(), &lba.to_le_bytes()].concat();
        assert!(ranges.copy_from(0, &range));
        ok(namespace.deallocate(1).unwrap(), Some(ranges));
        ok(namespace.flush(), None);
        // Freed clusters are reused: the file does not grow.
        for piece in 0..18 {
            let mut buffer = pool.take().unwrap();
            assert!(buffer.copy_from(0, &vec![0xee; MIB as usize]));
            ok(namespace.write(70_000 + piece * 2048, 2048).unwrap(), Some(buffer));
        }
        ok(namespace.flush(), None);
        assert!(room(at) <= full + MIB, "{full} {}", room(at));
        for (lba, byte) in [
            (0, 0),
            (8, 0),
            (3008, 2),
            (4096, 0),
            (6144, 3),
            (10_000, 0),
            (60_000, 30),
            (70_000, 0xee),
        ] {
            let read = ok(namespace.read(lba, 8).unwrap(), pool.take()).unwrap().to_vec(4096);
            assert_eq!(read, [byte; 4096], "{nsid}: {lba}");
        }
        // Resizing a qcow2 image is refused, and does not kill the process.
        let (status, _, errors) = ctl(&server, &["disk", "resize", &format!("vm.sock/{nsid}")]);
        assert!(status == Some(4) && !errors.is_empty(), "{status:?} {errors}");
    }
    drop((queue, pool));
    controller.detach().unwrap();
    assert!(server.stop().success(), "{}", server.stderr());
    assert!(!server.stderr().contains("forbids"), "{}", server.stderr());
    for path in &paths {
        // qemu-img finds the image consistent, if it is installed.
        let qemu = std::process::Command::new("qemu-img").arg("check").arg(path).output();
        if let Ok(said) = qemu {
            assert!(said.status.success(), "{said:?}");
        }
    }
}

#[test]
fn a_directory_can_be_allowed() {
    let (directory, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let other = image(elsewhere.path(), "a.img", 4 << 20);
    let allow = elsewhere.path().to_str().unwrap();
    let options = ["--supervisor", "--allow", allow];
    let mut server = Server::start_in(directory, &["mem:1MiB"], &options);
    let id = server.socket().to_str().unwrap().replace('/', "%2F");
    let path = format!("/v1/controllers/{id}/namespaces/2");
    let (code, body) =
        http_request(&server, &request("PUT", &path, &json!({ "disk": other }).to_string()));
    assert!(code < 300, "{code} {body}");
    let socket = elsewhere.path().join("two.sock");
    let (status, _, errors) = ctl(
        &server,
        &["controller", "add", "two", "mem:1MiB", "--socket", socket.to_str().unwrap()],
    );
    assert_eq!(status, Some(0), "{errors}");
    drop(Client::attach(&socket));
    assert!(server.stop().success());
}

/// The supervisor creates sockets and files for the sandbox, and the number of allowed system calls
/// is within the documented limit.
#[test]
fn the_supervisor_creates_sockets_and_files_for_the_sandbox() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "disk.img", 4 << 20);
    let options = [
        &["--supervisor", "--sandbox", "on", "--socket-mode", "0620"][..],
        &["--trace", "trace", "--metrics", "127.0.0.1:0"],
    ];
    let mut server = Server::start_in(directory, &["disk.img"], &options.concat());
    let has = |text: &str| {
        let (_, rest) = text.split_once("sandbox on: ").unwrap();
        rest.split_once(" system calls").unwrap().0.parse::<u32>().unwrap()
    };
    let for_tests = if cfg!(feature = "faults") { 2 } else { 0 };
    // A separate thread writes the log, so the line appears with a delay.
    server.wait_for_log("sandbox on: ");
    assert!(has(&server.stderr()) - for_tests <= 62, "{}", server.stderr());
    let at = |name: &str| server.directory().join(name);
    let mode = |name: &str| std::fs::metadata(at(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode("vm.sock"), 0o620);
    assert_eq!((mode("run/vm"), mode("run/vm/control.sock")), (0o700, 0o600));
    // Port of the metrics, from the last log line that has one.
    let port = || {
        let said = server.stderr();
        let (_, rest) = said.rsplit_once("http://127.0.0.1:").unwrap();
        rest.split_once('/').unwrap().0.parse::<u16>().unwrap()
    };
    let metrics = || {
        use std::io::{Read, Write};
        let mut stream = std::net::TcpStream::connect(("127.0.0.1", port())).unwrap();
        stream
            .write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            .unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.contains("shadowbell_server_info"), "{text}");
    };
    let two = at("two.sock");
    let mut guest = Client::attach(&server.socket());
    for round in 0..3_u8 {
        let before = worker(&server);
        match round {
            0 => {}
            1 => drop(upgrade(&server.pid().to_string(), None)),
            _ => {
                kill(&server, Signal::KILL);
            }
        }
        until("another process", || round == 0 || worker(&server) != before);
        guest.write(1, 0, round);
        assert_eq!(guest.read(1, 0), round);
        until("the control socket", || ctl(&server, &["status"]).0 == Some(0));
        metrics();
        let mut top = program();
        top.arg("top").arg(at("run/vm/control.sock")).args(["--json", "--count", "1"]);
        let (status, output, errors) = finish(top);
        assert!(status == Some(0) && output.contains("vm.sock"), "{errors}");
        assert_eq!(&std::fs::read(at("trace")).unwrap()[..7], b"SBTRACE".as_slice());
        assert_eq!(at("trace.before").exists(), round > 0);
        let add = ["controller", "add", "two", "mem:1MiB", "--socket", two.to_str().unwrap()];
        let (status, _, errors) = ctl(&server, &add);
        assert_eq!(status, Some(0), "{errors}");
        assert_eq!(mode("two.sock"), 0o620);
        drop(Client::attach(&two));
        // The removal is tried again, because the server may notice the end of the client a moment
        // later.
        until("the controller's end", || {
            let (status, _, errors) = ctl(&server, &["controller", "remove", "two", "--force"]);
            assert!(status == Some(0) || errors.contains("has a client"), "{errors}");
            status == Some(0)
        });
        assert!(!two.exists());
        let elsewhere = tempfile::tempdir().unwrap();
        let other = elsewhere.path().join("three.sock");
        // A client of the control socket names no socket by itself, also not beside others.
        for path in [&other, &at("three.sock")] {
            let wanted = json!({ "socket": path, "disks": [{ "disk": "mem:1MiB" }] }).to_string();
            let add = request("PUT", "/v1/controllers/three", &wanted);
            let (code, body) = http_request(&server, &add);
            assert!(code >= 400 && body.contains("`--allow DIRECTORY`"), "{code} {body}");
            assert!(!path.exists());
        }
        // `ctl` grants the socket.
        let add = ["controller", "add", "three", "mem:1MiB", "--socket", other.to_str().unwrap()];
        let (status, _, errors) = ctl(&server, &add);
        assert_eq!(status, Some(0), "{errors}");
        drop(Client::attach(&other));
        let export = format!("unix:{}", elsewhere.path().join("nbd.sock").display());
        let (status, _, errors) =
            ctl(&server, &["export", "add", "e", "three/1", "--nbd", &export, "--share"]);
        assert!(status == Some(0) || !errors.contains("permits no socket"), "{errors}");
        let _ = ctl(&server, &["export", "remove", "e", "--force"]);
        until("the other controller's end", || {
            ctl(&server, &["controller", "remove", "three", "--force"]).0 == Some(0)
        });
        // A file that is not the socket of a dead server is not replaced.
        let (status, _, errors) = ctl(
            &server,
            &["controller", "add", "no", "mem:1MiB", "--socket", at("disk.img").to_str().unwrap()],
        );
        assert!(status != Some(0) && errors.contains("is not a socket"), "{errors}");
    }
    drop(guest);
    let directory = server.directory().to_owned();
    assert!(server.stop().success(), "{}", server.stderr());
    assert!(!server.stderr().contains("forbids"), "{}", server.stderr());
    for name in ["vm.sock", "run/vm"] {
        assert!(!directory.join(name).exists(), "{name}");
    }
}

/// With a supervisor, the sandbox forbids system calls with paths, which only a process without a
/// supervisor needs.
#[cfg(all(feature = "faults", target_arch = "x86_64"))]
#[test]
fn path_system_calls_are_forbidden_under_a_supervisor() {
    let directory = tempfile::tempdir().unwrap();
    for call in ["unlink", "renameat2", "mkdir", "chmod", "bind", "connect", "listen", "flock"] {
        let said = directory.path().join(call);
        let mut command = program();
        command.args(["serve", "--supervisor", "null:1MiB", "--socket"]);
        // Each run uses another socket, because the process of the previous run may not have ended
        // yet.
        command.arg(directory.path().join(format!("{call}.sock"))).args(["--attempt", call]);
        command.env("SHADOWBELL_RUN_DIR", directory.path());
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(std::fs::File::create(&said).unwrap());
        let supervisor =
            shadowbell_testing::process_group::ProcessGroup::spawn(&mut command).unwrap();
        let line = format!("error: the sandbox forbids the system call {call} (");
        until(&line, || std::fs::read_to_string(&said).unwrap().contains(&line));
        // The supervisor is ended first, because it would restart the killed server process.
        drop(supervisor);
    }
}

#[test]
fn options_that_exclude_the_sandbox_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("vm.sock");
    let mut command = program();
    command.args(["serve", "--sandbox", "on", "nbd://localhost:1/x", "--socket"]).arg(&socket);
    let (status, _, errors) = finish(command);
    assert_eq!(status, Some(2), "{errors}");
    assert!(errors.contains("resolves a host name") && errors.contains("--sandbox off"));
    let mut command = program();
    command
        .args(["serve", "--no-supervisor", "--sandbox", "on", "mem:1MiB", "--socket"])
        .arg(&socket);
    let (status, _, errors) = finish(command);
    assert_eq!(status, Some(2), "{errors}");
    assert!(errors.contains("there is no supervisor"), "{errors}");
    let server = Server::start(&["mem:1MiB"], &["--no-supervisor"]);
    server.wait_for_log("the sandbox does not restrict file access: there is no supervisor");
    assert_eq!(status_of(server.pid(), "Seccomp"), "2");
    let mut command = program();
    command.args(["serve", "mem:1MiB", "--user", "no such user", "--socket"]).arg(&socket);
    let (status, _, errors) = finish(command);
    assert!(status == Some(2) && errors.contains("/etc/passwd"), "{status:?} {errors}");
}

#[test]
fn a_server_process_runs_as_another_user() {
    if !rustix::process::geteuid().is_root() {
        skipped("only root can become another user");
        return;
    }
    let (user, group) = (65534, 65534);
    let directory = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let other = image(elsewhere.path(), "a.img", 4 << 20);
    let disk = image(directory.path(), "disk.img", 4 << 20);
    std::fs::set_permissions(&disk, PermissionsExt::from_mode(0o600)).unwrap();
    chown(directory.path(), Some(user), Some(group)).unwrap();
    let options = ["--supervisor", "--user", &format!("{user}:{group}")];
    let mut server = Server::start_in(directory, &["disk.img"], &options);
    let ids = |pid| status_of(pid, "Uid").split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(ids(worker(&server)), ["65534"; 4]);
    assert_eq!(status_of(worker(&server), "CapEff"), "0000000000000000");
    let control = std::fs::metadata(server.directory().join("run/vm")).unwrap();
    assert_eq!((control.uid(), control.mode() & 0o777), (user, 0o700));
    let mut guest = Client::attach(&server.socket());
    guest.write(1, 0, 1);
    kill(&server, Signal::KILL);
    assert_eq!(guest.read(1, 0), 1);
    let (status, _, errors) = upgrade(&server.pid().to_string(), None);
    assert_eq!(status, Some(0), "{errors}");
    assert_eq!(ids(worker(&server)), ["65534"; 4]);
    let add = ["namespace", "attach", "vm.sock", "2", other.to_str().unwrap()];
    let (status, _, errors) = ctl(&server, &add);
    assert_eq!(status, Some(0), "{errors}");
    assert_eq!(guest.read(1, 0), 1);
    drop(guest);
    assert!(server.stop().success(), "{}", server.stderr());
}
