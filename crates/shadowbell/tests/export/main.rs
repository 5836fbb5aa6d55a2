//! Integration tests of `shadowbell export`.

mod fuse_killed;
mod killed;
mod machine;
mod nbd_deep;
mod nbd_killed;
mod vhost_killed;

use rustix::process::{Pid, Signal, kill_process};
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::programs::skipped;
use shadowbell_testing::wait::{LIMIT, until, until_some};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use tempfile::TempDir;

/// A running export. Killed on drop.
struct Export {
    child: ProcessGroup,
    directory: TempDir,
}

impl Export {
    /// Runs `shadowbell export` with these arguments; `DIR` in them stands for `directory`.
    fn run(directory: TempDir, arguments: &[&str]) -> Self {
        Self::run_with(directory, arguments, &[])
    }

    /// Like `run`, with environment variables.
    fn run_with(directory: TempDir, arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let place = directory.path().to_str().unwrap();
        let arguments = arguments.iter().map(|argument| argument.replace("DIR", place));
        let file = |name: &str| File::create(directory.path().join(name)).unwrap();
        let arguments: Vec<_> = arguments.collect();
        let mut command = Command::new(env!("CARGO_BIN_EXE_shadowbell"));
        command.arg("export");
        if !arguments.iter().any(|argument| argument.starts_with("--stop-timeout")) {
            command.arg("--stop-timeout=600");
        }
        command
            .args(arguments)
            .current_dir(directory.path())
            .env_remove("RUST_LOG")
            .env("SHADOWBELL_RUN_DIR", directory.path().join("run"))
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(file("stdout"))
            .stderr(file("stderr"));
        Self { child: ProcessGroup::spawn(&mut command).unwrap(), directory }
    }

    /// Starts an export, and waits until it is ready.
    fn start(arguments: &[&str]) -> Self {
        Self::start_with(arguments, &[])
    }

    /// Like `start`, with environment variables.
    fn start_with(arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut export = Self::run_with(tempfile::tempdir().unwrap(), arguments, variables);
        let protocols = ["--nbd", "--vhost-user-blk", "--fuse"];
        let count = arguments.iter().filter(|argument| protocols.contains(argument)).count();
        until("all exports", || {
            let ended = export.child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", export.stderr());
            export.stderr().matches("exporting").count() == count
        });
        export
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn stderr(&self) -> String {
        std::fs::read_to_string(self.path("stderr")).unwrap()
    }

    /// Standard output, once it contains `words`.
    #[track_caller]
    fn wait_for_output(&self, words: &str) -> String {
        until_some(words, || {
            let printed = std::fs::read_to_string(self.path("stdout")).unwrap();
            printed.contains(words).then_some(printed)
        })
    }

    fn signal(&self, signal: Signal) {
        self.child.signal(signal);
    }

    fn wait(&mut self) -> ExitStatus {
        self.child.wait()
    }

    #[track_caller]
    fn stop(self) {
        self.end();
    }

    /// Ends the export with a signal, expects success, and returns its directory.
    #[track_caller]
    fn end(mut self) -> TempDir {
        self.signal(Signal::TERM);
        let status = self.wait();
        assert_eq!(status.code(), Some(0), "{}", self.stderr());
        std::mem::replace(&mut self.directory, tempfile::tempdir().unwrap())
    }

    /// Runs an export that must not start: exit status 2, and `words` in its message.
    #[track_caller]
    fn refused(directory: TempDir, arguments: &[&str], words: &str) -> TempDir {
        Self::refused_with(2, directory, arguments, words)
    }

    /// As [`refused`](Self::refused), for a temporary cause: exit status 1.
    #[track_caller]
    fn unavailable(arguments: &[&str], words: &str) {
        Self::refused_with(1, tempfile::tempdir().unwrap(), arguments, words);
    }

    #[track_caller]
    fn refused_with(expected: i32, directory: TempDir, arguments: &[&str], words: &str) -> TempDir {
        let mut export = Self::run(directory, arguments);
        let status = export.wait();
        let said = export.stderr();
        assert_eq!(status.code(), Some(expected), "{said}");
        assert!(said.contains(words), "{said}");
        let keep = tempfile::tempdir().unwrap();
        std::mem::replace(&mut export.directory, keep)
    }
}

impl Drop for Export {
    fn drop(&mut self) {
        self.child.kill();
        if std::thread::panicking() {
            eprintln!("log of the export:\n{}", self.stderr());
        }
    }
}

/// Connects a minimal NBD client: greeting and options.
fn connect_by_nbd(socket: &Path) -> UnixStream {
    let mut client = UnixStream::connect(socket).unwrap();
    client.set_read_timeout(Some(LIMIT)).unwrap();
    let mut greeting = [0; 18];
    client.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
    client.write_all(&3u32.to_be_bytes()).unwrap();
    client.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    client.read_exact(&mut [0; 10]).unwrap();
    client
}

/// Writes by NBD and returns the error code.
fn write_by_nbd(client: &mut UnixStream, offset: u64, data: &[u8]) -> u32 {
    let mut request = b"\x25\x60\x95\x13\0\0\0\x01cookie!!".to_vec();
    request.extend(offset.to_be_bytes());
    request.extend((data.len() as u32).to_be_bytes());
    request.extend(data);
    client.write_all(&request).unwrap();
    let mut reply = [0; 16];
    client.read_exact(&mut reply).unwrap();
    assert_eq!((&reply[..4], &reply[8..]), (&b"\x67\x44\x66\x98"[..], &b"cookie!!"[..]));
    u32::from_be_bytes(reply[4..8].try_into().unwrap())
}

/// An export of `shadowbell export` is used as a disk of another controller, so both ends of
/// NBD are tested against each other.
#[test]
fn an_nbd_export_serves_as_a_disk() {
    let export = Export::start(&["local:mem:4MiB", "--nbd", "unix:DIR/nbd", "--name", "a disk"]);
    let disk = format!("nbd+unix:///a%20disk?socket={}", export.path("nbd").display());
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_shadowbell"))
            .args(arguments)
            .current_dir(export.directory.path())
            .output()
            .unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    };
    let data: Vec<u8> = (0..4_u32 << 20).map(|at| ((at / 3) ^ (at >> 11)) as u8).collect();
    std::fs::write(export.path("image"), &data).unwrap();
    let target = format!("local:{disk}");
    run(&["copy", "image", &disk]);
    run(&["copy", &target, "back"]);
    assert!(std::fs::read(export.path("back")).unwrap() == data);
    export.stop();
}

#[test]
fn written_data_is_in_the_image_after_the_export_ends() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.img");
    File::create(&image).unwrap().set_len(1 << 20).unwrap();
    let target = format!("local:{}", image.display());
    let export = Export::start(&[&target, "--nbd", "unix:DIR/nbd", "--name", "a disk"]);
    export.wait_for_output("nbdcopy 'nbd+unix:///a%20disk?socket=");
    assert_eq!(write_by_nbd(&mut connect_by_nbd(&export.path("nbd")), 1000, b"any bytes"), 0);
    export.stop();
    let mut bytes = [0; 11];
    File::open(&image).unwrap().read_exact_at(&mut bytes, 999).unwrap();
    assert_eq!(&bytes, b"\0any bytes\0");
}

#[test]
fn several_exports_share_one_disk() {
    let export = Export::start(&[
        "mem:8MiB",
        "--nbd",
        "unix:DIR/one",
        "--nbd",
        "unix:DIR/two",
        "--queues=1",
    ]);
    assert_eq!(write_by_nbd(&mut connect_by_nbd(&export.path("one")), 0, b"one"), 0);
    assert_eq!(write_by_nbd(&mut connect_by_nbd(&export.path("two")), 8 << 20, b"x"), 28, "ENOSPC");
    export.stop();
}

#[test]
fn a_read_only_export_refuses_writes() {
    let export = Export::start(&["mem:8MiB", "--nbd", "unix:DIR/nbd", "--read-only"]);
    assert!(export.stderr().contains("read-only"));
    assert_eq!(write_by_nbd(&mut connect_by_nbd(&export.path("nbd")), 0, b"data"), 1, "EPERM");
    export.stop();
}

/// A process and its descendants.
fn process_tree(pid: u32) -> Vec<u32> {
    let mut all = vec![pid];
    let mut at = 0;
    while let Some(pid) = all.get(at) {
        let children = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children"));
        let children = children.unwrap_or_default();
        all.extend(children.split_whitespace().map(|child| child.parse::<u32>().unwrap()));
        at += 1;
    }
    all
}

/// Files that a process and its descendants have open, each with true if it is open for writing.
fn open_files(pid: u32) -> Vec<(PathBuf, bool)> {
    let mut files = Vec::new();
    for pid in process_tree(pid) {
        for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
            let entry = entry.unwrap();
            // The descriptor may have been closed since it was listed.
            let Ok(file) = std::fs::read_link(entry.path()) else { continue };
            let number = entry.file_name().into_string().unwrap();
            let Ok(info) = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")) else {
                continue;
            };
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim();
            files.push((file, u32::from_str_radix(flags, 8).unwrap() & 3 != 0));
        }
    }
    files
}

/// Neither the image nor its backing files or its data file are opened for writing or locked
/// against readers, and none of them changes. An image of QEMU with a bitmap keeps its autoclear
/// bits.
#[test]
fn a_read_only_export_opens_no_file_for_writing() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let data: Vec<u8> = (0..1_u32 << 20).map(|at| (at >> 9) as u8).collect();
    std::fs::write(path("raw.img"), &data).unwrap();
    let mut kinds = vec![("raw.img", "raw.img"), ("raw.img", "raw.img?read-only=off&direct=off")];
    let qemu = |arguments: &[&str]| {
        let mut command = Command::new("qemu-img");
        let made = command.args(arguments).current_dir(&directory).stdout(Stdio::null()).status();
        made.is_ok_and(|status| status.success())
    };
    if qemu(&["create", "-fqcow2", "-braw.img", "-Fraw", "base.qcow2", "1M"])
        && qemu(&["create", "-fqcow2", "-bbase.qcow2", "-Fqcow2", "top.qcow2", "1M"])
        && qemu(&["bitmap", "--add", "top.qcow2", "changes"])
        && qemu(&["create", "-fqcow2", "-odata_file=data,data_file_raw=on", "ext.qcow2", "1M"])
    {
        kinds.extend([
            ("top.qcow2", "top.qcow2?allow-backing=on"),
            ("ext.qcow2", "ext.qcow2?allow-backing=on"),
        ]);
    } else {
        skipped("qcow2 images take qemu-img");
    }
    let fuse = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let has_fuse = rustix::process::geteuid().is_root() && fuse.is_ok();
    let files = ["raw.img", "base.qcow2", "top.qcow2", "ext.qcow2", "data"];
    let content = || files.map(|name| std::fs::read(path(name)).unwrap_or_default());
    let before = content();
    for (name, disk) in kinds {
        for front_end in ["--nbd", "--vhost-user-blk", "--fuse"] {
            if front_end == "--fuse" && !has_fuse {
                skipped("FUSE takes root and /dev/fuse");
                continue;
            }
            let target = format!("local:{}/{disk}", directory.path().display());
            let address = if front_end == "--nbd" { "unix:DIR/out" } else { "DIR/out" };
            let allowed = directory.path().to_str().unwrap();
            let arguments = [&target, front_end, address, "--read-only", "--allow", allowed];
            let export = Export::start(&arguments);
            if front_end == "--nbd" {
                let mut client = connect_by_nbd(&export.path("out"));
                assert_eq!(write_by_nbd(&mut client, 0, b"data"), 1, "EPERM");
            }
            let files = open_files(export.child.id());
            let is_disk = |file: &Path| file.starts_with(directory.path());
            let writable = files.iter().find(|(file, writes)| *writes && is_disk(file));
            assert_eq!(writable, None, "{disk} with {front_end}");
            let reads = files.iter().any(|(file, _)| *file == path(name));
            assert!(reads, "{disk} with {front_end}: its file is not open");
            export.stop();
            assert!(content() == before, "{disk} with {front_end}: a file has changed");
        }
    }
}

/// An export to an address that other machines can reach gives them access to the disk, so the
/// program warns.
#[test]
fn an_export_to_a_non_local_address_warns() {
    for (address, is_open) in
        [("tcp:0.0.0.0:0", true), ("tcp:[::]:0", true), ("tcp:127.0.0.1:0", false)]
    {
        let export = Export::start(&["mem:1MiB", "--nbd", address]);
        let said = export.stderr();
        let warned = said.contains("can read the disk and write it, because NBD");
        assert_eq!(warned, is_open, "{address}: {said}");
        export.stop();
    }
}

#[test]
fn invalid_export_arguments_are_refused_with_the_reason() {
    let refused = |arguments: &[&str], words: &str| {
        Export::refused(tempfile::tempdir().unwrap(), arguments, words);
    };
    refused(&["mem:1MiB"], "required arguments");
    refused(&["mem:1MiB", "--nbd", "DIR/nbd"], "neither `unix:PATH` nor `tcp:ADDRESS`");
    let nowhere = ["mem:1MiB", "--nbd", "unix:DIR/no/such/nbd"];
    Export::unavailable(&nowhere, "in no directory");
    Export::unavailable(&["local:DIR/none", "--nbd", "unix:DIR/nbd"], "none");
    for target in ["vfio-user:DIR/none", "vfio-user:DIR/none/7"] {
        Export::unavailable(&[target, "--nbd", "unix:DIR/nbd"], "no controller behind");
    }
    refused(&["mem:1MiB", "--nbd", "unix:DIR/nbd", "--queues=0"], "0 is not in the range 1 to 64");
    refused(&["mem:1MiB", "--fuse", "DIR"], "is not a regular file");
    refused(&["mem:1MiB", "--vhost-user-blk", "DIR"], "is a directory");
}

#[test]
fn a_socket_in_use_is_not_replaced() {
    let export = Export::start(&["mem:8MiB", "--nbd", "unix:DIR/nbd"]);
    let address = format!("unix:{}", export.path("nbd").display());
    Export::unavailable(&["mem:1MiB", "--nbd", &address], "in use");
    assert_eq!(write_by_nbd(&mut connect_by_nbd(&export.path("nbd")), 0, b"data"), 0);
    export.stop();
}

#[test]
fn a_dead_exports_socket_is_replaced() {
    let mut export = Export::start(&["mem:8MiB", "--nbd", "unix:DIR/nbd", "--no-supervisor"]);
    export.signal(Signal::KILL);
    export.wait();
    assert!(export.path("nbd").exists());
    let address = format!("unix:{}", export.path("nbd").display());
    let next = Export::start(&["mem:8MiB", "--nbd", &address]);
    assert_eq!(write_by_nbd(&mut connect_by_nbd(&export.path("nbd")), 0, b"data"), 0);
    next.stop();
    assert!(!export.path("nbd").exists());
}

#[test]
fn a_file_is_mounted_and_unmounted() {
    let fuse = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    if !rustix::process::geteuid().is_root() || fuse.is_err() {
        skipped("this takes root and /dev/fuse");
        return;
    }
    let export = Export::start(&["mem:8MiB", "--fuse", "DIR/disk"]);
    let path = export.path("disk");
    export.wait_for_output("losetup --find --show");
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.write_all_at(b"any bytes", 777).unwrap();
    let mut bytes = [0; 9];
    file.read_exact_at(&mut bytes, 777).unwrap();
    assert_eq!(&bytes, b"any bytes");
    drop(file);
    export.stop();
    assert!(!path.exists());
    // Unmounting ends the program, as the mount was its only export.
    let mut export = Export::start(&["mem:8MiB", "--fuse", "DIR/disk"]);
    assert!(Command::new("umount").arg(export.path("disk")).status().unwrap().success());
    assert_eq!(export.wait().code(), Some(0), "{}", export.stderr());
    // The mount of a killed program is replaced.
    let mut export = Export::start(&["mem:8MiB", "--fuse", "DIR/disk", "--no-supervisor"]);
    export.signal(Signal::KILL);
    export.wait();
    let path = export.path("disk");
    assert!(File::open(&path).is_err());
    let next = Export::start(&["mem:16MiB", "--fuse", path.to_str().unwrap()]);
    assert_eq!(path.metadata().unwrap().len(), 16 << 20);
    next.stop();
    assert_eq!(path.metadata().unwrap().len(), 0);
    // An image is not mounted over itself.
    let directory = tempfile::tempdir().unwrap();
    File::create(directory.path().join("image")).unwrap().set_len(8 << 20).unwrap();
    Export::refused(directory, &["DIR/image", "--fuse", "DIR/image"], "is the file of the disk");
}

/// A program cannot close a mounted file while its storage hangs, so the export does not wait for
/// the program.
#[test]
fn an_export_with_users_ends_although_its_storage_hangs() {
    let fuse = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    if !rustix::process::geteuid().is_root() || fuse.is_err() {
        skipped("this takes root and /dev/fuse");
        return;
    }
    let storage = Export::start(&["mem:8MiB", "--nbd", "unix:DIR/nbd", "--no-supervisor"]);
    let disk = format!("nbd+unix:///?socket={}&settle=50ms", storage.path("nbd").display());
    let mut export = Export::start(&[&disk, "--fuse", "DIR/disk", "--stop-timeout=5"]);
    let file = OpenOptions::new().read(true).write(true).open(export.path("disk")).unwrap();
    file.write_all_at(b"any bytes", 777).unwrap();
    storage.signal(Signal::STOP);
    // The first writes may still be answered. The order of the other ones and of the next signal
    // does not matter, because the open file is in use.
    let writes = std::thread::spawn(move || while file.write_all_at(b"other", 777).is_ok() {});
    export.signal(Signal::TERM);
    let status = export.wait();
    let log = export.stderr();
    assert_eq!(status.code(), Some(5), "{log}");
    assert!(log.contains(" requests of the export "), "{log}");
    writes.join().unwrap();
}

#[test]
fn a_mounted_file_survives_a_kill_of_the_server_process() {
    let fuse = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    if !rustix::process::geteuid().is_root() || fuse.is_err() {
        skipped("this takes root and /dev/fuse");
        return;
    }
    let export = Export::start(&["mem:8MiB", "--fuse", "DIR/disk"]);
    let path = export.path("disk");
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.write_all_at(b"any bytes", 777).unwrap();
    let supervisor = export.child.id();
    let server = || {
        let children = format!("/proc/{supervisor}/task/{supervisor}/children");
        let children = std::fs::read_to_string(children).unwrap();
        children.split_whitespace().next().map(|pid| pid.parse::<i32>().unwrap())
    };
    let before = server().unwrap();
    kill_process(Pid::from_raw(before).unwrap(), Signal::KILL).unwrap();
    until("another server process", || server().is_some_and(|now| now != before));
    let mut bytes = [0; 9];
    file.read_exact_at(&mut bytes, 777).unwrap();
    assert_eq!(&bytes, b"any bytes");
    drop(file);
    export.stop();
    assert!(!path.exists());
}

#[test]
fn a_vhost_user_blk_socket_is_created_and_removed() {
    let export = Export::start(&["mem:8MiB", "--vhost-user-blk", "DIR/vm.sock", "--queues=2"]);
    export.wait_for_output("vhost-user-blk-pci,chardev=disk,num-queues=2");
    let path = export.path("vm.sock");
    let frontend = UnixStream::connect(&path).unwrap();
    export.stop();
    assert!(!path.exists());
    drop(frontend);
}

#[test]
fn a_dead_controller_gives_clients_eio_and_fails_the_export() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("vm.sock");
    let image = directory.path().join("disk.img");
    File::create(&image).unwrap().set_len(8 << 20).unwrap();
    // With `direct=off`, the disk has a volatile write cache, so the end of the export sends a
    // Flush to the dead server.
    let image = format!("{}?direct=off", image.display());
    let mut server = Command::new(env!("CARGO_BIN_EXE_shadowbell"));
    server.args(["serve", "--no-supervisor", &image, "-q", "--socket"]).arg(&socket);
    let server = ProcessGroup::spawn(&mut server).unwrap();
    until("a server", || UnixStream::connect(&socket).is_ok());
    let target = format!("vfio-user:{}", socket.display());
    // With this `--timeout`, a command that receives no answer fails after 2 s, if nothing else
    // detects the death of the server before.
    let mut export =
        Export::start(&[&target, "--nbd", "unix:DIR/nbd", "--timeout=2", "--queues=1"]);
    // The client connects before the server dies: a later client would get no queue.
    let mut client = connect_by_nbd(&export.path("nbd"));
    assert_eq!(write_by_nbd(&mut client, 0, b"data"), 0);
    drop(server);
    assert_eq!(write_by_nbd(&mut client, 0, b"data"), 5, "EIO");
    export.signal(Signal::TERM);
    let status = export.wait();
    let said = export.stderr();
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("cannot flush"), "{said}");
}

#[test]
fn invalid_ublk_arguments_are_refused_with_the_reason() {
    let mut place = tempfile::tempdir().unwrap();
    for (arguments, words) in [
        (&["mem:1MiB", "--ublk-id", "3"][..], "--ublk"),
        (&["mem:1MiB", "--ublk-copy", "--nbd", "unix:x"], "--ublk"),
        (&["mem:1MiB", "--ublk", "--recover"], "--ublk-id"),
        (&["mem:1MiB", "--ublk", "--ublk-id", "1048576"], "1048576"),
        // The data of a memory disk are lost, whether or not a ublk device of that number exists.
        (&["mem:1MiB", "--ublk", "--ublk-id", "0", "--recover"], "was lost"),
    ] {
        place = Export::refused(place, arguments, words);
    }
    if Path::new("/dev/ublk-control").exists() {
        eprintln!("there is a ublk driver here: the guest suite `readers` tries it");
        return;
    }
    Export::refused(place, &["mem:1MiB", "--ublk"], "modprobe ublk_drv");
}
