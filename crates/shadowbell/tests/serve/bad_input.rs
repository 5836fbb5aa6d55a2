//! Invalid input is refused with a message, and user errors and system errors have different exit
//! statuses.

use crate::harness::{Server, finish, image, program, until};
use crate::supervisor::has_ended;
use shadowbell_process::exit::ExitStatus;
use shadowbell_testing::programs::skipped;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// Runs `serve` with these arguments in `directory`. The command must fail with a message that has
/// all of `words`.
#[track_caller]
fn refused(directory: &Path, arguments: &[&str], words: &[&str]) {
    refused_with(ExitStatus::BadInput, directory, arguments, words);
}

/// Like [`refused`], for a temporary cause: with this exit status, a systemd unit restarts the
/// service.
#[track_caller]
fn unavailable(directory: &Path, arguments: &[&str], words: &[&str]) {
    refused_with(ExitStatus::Failed, directory, arguments, words);
}

#[track_caller]
fn refused_with(expected: ExitStatus, directory: &Path, arguments: &[&str], words: &[&str]) {
    let mut command = program();
    command.arg("serve").args(arguments).current_dir(directory);
    let (status, stdout, stderr) = finish(command);
    assert_eq!(status, Some(expected as i32), "{arguments:?}: {stderr}");
    assert_eq!(stdout, "", "{arguments:?}");
    for word in words {
        // clap wraps its messages, so their lines are joined.
        let one_line = stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(one_line.contains(word), "{arguments:?}: {word:?} is not in {stderr}");
    }
}

#[test]
fn invalid_images_are_refused_with_advice() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    image(at, "empty.img", 0);
    image(at, "odd.img", 1000);
    image(at, "odd4k.img", 512 * 9);
    std::fs::create_dir(at.join("dir")).unwrap();
    for (disk, words) in [
        ("empty.img", ["empty.img: it is empty", "truncate -s"]),
        ("odd.img", ["odd.img: its 1000 bytes are no multiple", "512"]),
        ("odd4k.img?block-size=4096", ["no multiple of the block size of 4096", "block-size=512"]),
        ("dir", ["dir: it is a directory", "give the path"]),
        ("qcow3:x", ["no kind of disk called `qcow3`", "file:"]),
        ("mem:0", ["size is zero", "mem:0"]),
        ("mem:100", ["no multiple", "512"]),
        ("mem:200TiB", ["a disk of 200TiB does not fit", "one of at most 64TiB"]),
    ] {
        refused(at, &[disk, "--socket", "vm.sock"], &words);
        // The command is also refused if the invalid disk follows a valid one.
        refused(at, &["mem:1MiB", disk, "--socket", "vm.sock"], &words);
    }
    let words = ["missing.img: there is no such file", "truncate -s"];
    unavailable(at, &["missing.img", "--socket", "vm.sock"], &words);
    unavailable(at, &["mem:1MiB", "missing.img", "--socket", "vm.sock"], &words);
    assert!(!at.join("vm.sock").exists());
}

/// If an image is named twice, the error says so. It must not say that another program has locked
/// the image.
#[test]
fn an_image_named_twice_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    image(at, "a.img", 1 << 20);
    let name = ["a.img", "./a.img?direct=off", "--socket", "vm.sock"];
    let words = "./a.img (a.img): it is named as a disk twice of vm.sock: name it once";
    refused(at, &name, &[words]);
    let mut server = Server::start(&["mem:1MiB"], &[]);
    let path = image(server.directory(), "b.img", 1 << 20).display().to_string();
    let add = ["controller", "add", "b", &path, &path, "--socket", "b.sock"];
    let (code, _, errors) = crate::control::ctl(&server, &add);
    assert!(code == Some(2) && !errors.contains("another program"), "{errors}");
    assert!(server.stop().success());
    let disk = format!("{path}?read-only=on");
    let mut server = Server::start(&[&disk[..]; 2], &[]);
    assert!(server.stop().success());
}

/// Messages about invalid numbers name no Rust types.
#[test]
fn invalid_numbers_are_refused_in_plain_words() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    for (option, value, words) in [
        ("--queues", "x", "it is no whole number"),
        ("--queues", "99", "99 is not in the range 1 to 64"),
        ("--metrics", "x", "it is no ADDR:PORT, as in 127.0.0.1:9477"),
    ] {
        refused(at, &["mem:1MiB", "--socket", "vm.sock", option, value], &[words]);
    }
    let file = "[[controller]]\nsocket = \"a.sock\"\ndisks = [\"mem:1MiB\"]\n";
    for (line, words) in [
        ("queues = \"x\"", "it is a text, \"x\", expected a whole number up to 65535"),
        ("queues = 99999", "it is `99999`, expected a whole number up to 65535"),
    ] {
        std::fs::write(at.join("vms.toml"), format!("{file}{line}\n")).unwrap();
        refused(at, &["--config", "vms.toml"], &["vms.toml:4:", words]);
    }
}

/// Copy of the program in `directory`, as a user without rights. Needs root.
fn program_of_another_user(directory: &Path) -> Command {
    std::fs::set_permissions(directory, PermissionsExt::from_mode(0o755)).unwrap();
    let copy = directory.join("shadowbell");
    std::fs::copy(env!("CARGO_BIN_EXE_shadowbell"), &copy).unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]).arg(copy);
    command
}

/// A server that the user may not query is named, so that the message does not suggest that none
/// runs.
#[test]
fn a_server_of_another_user_is_named() {
    if !rustix::process::geteuid().is_root() {
        return skipped("it needs root");
    }
    let server = Server::start(&["mem:1MiB"], &["--supervisor"]);
    let socket = server.socket().display().to_string();
    let other = "servers of other users, which only root and they may query: vm";
    for (words, status, expected) in [
        (&["ctl", "status"][..], ExitStatus::NotFound, other),
        (&["ctl", "status", "--server", "vm"], ExitStatus::NotFound, other),
        (&["top", "vm", "--count", "1"], ExitStatus::NotFound, other),
        (&["ls"], ExitStatus::Success, other),
        (&["upgrade", &socket], ExitStatus::NotFound, "ask as root or as the server's own user"),
    ] {
        let mut command = program_of_another_user(server.directory());
        command.args(words).current_dir(server.directory());
        command.env("SHADOWBELL_RUN_DIR", server.directory().join("run"));
        let (code, output, errors) = finish(command);
        let said = format!("{output}{errors}");
        assert!(code == Some(status as i32) && said.contains(expected), "{words:?}: {said}");
    }
}

#[test]
fn an_unreadable_image_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = image(directory.path(), "secret.img", 4096);
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o000)).unwrap();
    // Root may read every file. So the test runs the program as another user.
    let is_root = rustix::process::geteuid().is_root();
    let mut command = if is_root { program_of_another_user(directory.path()) } else { program() };
    command.args(["serve", "secret.img", "--socket", "vm.sock"]).current_dir(directory.path());
    let (status, _, stderr) = finish(command);
    assert_eq!(status, Some(2), "{stderr}");
    assert!(stderr.contains("secret.img: this user may not read it"), "{stderr}");
}

#[test]
fn an_image_locked_by_another_server_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = image(directory.path(), "disk.img", 1 << 20);
    let server = Server::start_in(directory, &["disk.img"], &[]);
    let disk = path.to_str().unwrap();
    unavailable(
        server.directory(),
        &[disk, "--socket", "other.sock"],
        &["has it open", "stop what uses it"],
    );
}

#[test]
fn invalid_socket_paths_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    let serve =
        |socket: &str, words: &[&str]| refused(at, &["mem:1MiB", "--socket", socket], words);
    serve(&format!("{}.sock", "x".repeat(104)), &["has 109 bytes", "107", "choose a shorter one"]);
    let words = ["is in no directory", "create no/such/dir first"];
    unavailable(at, &["mem:1MiB", "--socket", "no/such/dir/vm.sock"], &words);
    std::fs::write(at.join("file"), "precious").unwrap();
    serve("file", &["exists and is not a socket"]);
    assert_eq!(std::fs::read_to_string(at.join("file")).unwrap(), "precious");
    serve("file/vm.sock", &["is in no directory"]);
    serve("unix:/no/vm.sock", &["write the path alone, `/no/vm.sock`"]);
}

#[test]
fn disks_in_the_form_of_qemu_are_answered_with_a_path() {
    let directory = tempfile::tempdir().unwrap();
    for disk in ["a.img,format=raw", "driver=raw,file.filename=a.img", "file=a.img,if=virtio"] {
        refused(directory.path(), &[disk, "--socket", "vm.sock"], &["format is detected: `a.img`"]);
    }
}

#[test]
fn a_live_servers_socket_is_kept_and_a_stale_one_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let mut server = Server::start_in(directory, &["mem:1MiB"], &[]);
    let socket = server.socket();
    unavailable(
        server.directory(),
        &["mem:1MiB", "--socket", socket.to_str().unwrap()],
        &["in use by a running server", "choose another path"],
    );
    // While a client is attached, the server does not answer on this socket. The error about the
    // socket in use is the same.
    let controller = server.attach();
    unavailable(
        server.directory(),
        &["mem:1MiB", "--socket", "vm.sock"],
        &["in use by a running server"],
    );
    drop(controller);
    drop(server.attach());
    // A killed supervisor leaves the socket file behind.
    let worker = crate::supervisor::worker(&server);
    server.signal(rustix::process::Signal::KILL);
    server.wait();
    // Without its supervisor, the server process ends, but cannot remove the socket file.
    until("the end of the process that served", || has_ended(worker));
    assert!(socket.exists());
    let mut command = program();
    command.args(["serve", "mem:1MiB", "--socket"]).arg(&socket);
    let other = tempfile::tempdir().unwrap();
    let mut second = Server::spawn(command, other, &[socket.to_str().unwrap()]);
    assert!(second.stop().success());
    assert!(!socket.exists());
}

#[test]
fn invalid_options_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    std::fs::write(at.join("notes.txt"), "precious").unwrap();
    for (options, words) in [
        (&["--queues", "0"][..], &["'0' for '--queues <N>'", "1 to 64"][..]),
        (&["--queues", "65"], &["65 is not in the range 1 to 64"]),
        (&["--queue-entries", "1"], &["1 is not in the range 2 to 4096"]),
        (&["--queue-entries", "4097"], &["4097 is not in the range 2 to 4096"]),
        (&["--queue-entries", "many"], &["invalid value 'many'"]),
        (&["--workers", "0"], &["0 is not in the range 1 to 190"]),
        (&["--workers", "255"], &["255 is not in the range 1 to 190"]),
        (&["--poll", "sometimes"], &["adaptive, always, never"]),
        (&["--poll-max", "0"], &["0 is not in the range 1 to 1000000"]),
        (&["--poll", "never", "--poll-max", "10"], &["adaptive polling only"]),
        (&["--pin", "0,0"], &["processor 0 is named twice"]),
        (&["--pin", "100000"], &["has no processor 100000"]),
        (&["--pin", "0", "--pin", "0"], &["cannot be used multiple times"]),
        (&["--doorbells", "loud"], &["shadow, mmio, mapped"]),
        (&["--doorbells", "mapped", "--no-shadow-doorbells"], &["cannot be used with"]),
        (&["--serial", ""], &["the serial number \"\"", "1 to 20"]),
        (&["--serial", "123456789012345678901"], &["the serial number", "1 to 20"]),
        (&["--model", "naïve"], &["the model number", "printable ASCII"]),
        (&["--max-transfer", "3MiB"], &["power of two from 1 MiB to 16 MiB"]),
        (&["--max-transfer", "512KiB"], &["power of two from 1 MiB to 16 MiB"]),
        (&["--max-transfer", "lots"], &["`lots` is no size"]),
        (&["--trace", "no/trace"], &["--trace", "is in no directory"]),
        (&["--trace", "notes.txt"], &["notes.txt exists and is not a trace"]),
        (&["--trace-records", "5000"], &["--trace <FILE>"]),
        (&["--trace", "t", "--trace-records", "5"], &["5 is not in the range 1024 to"]),
        (&["--trace", "."], &["is a directory"]),
        (&["--config", "x.toml"], &["cannot be used with"]),
        (&["--nonsense"], &["unexpected argument '--nonsense'"]),
    ] {
        refused(at, &[&["mem:1MiB", "--socket", "vm.sock"], options].concat(), words);
    }
    refused(at, &["--socket", "vm.sock"], &["<DISK>"]);
    refused(at, &["mem:1MiB"], &["--socket <PATH>"]);
    refused(
        at,
        &["mem:1MiB?read-only=off", "--read-only", "--socket", "vm.sock"],
        &["leave out one"],
    );
    let all: Vec<_> = std::fs::read_dir(at).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(all, ["notes.txt"], "nothing is left behind");
    assert_eq!(std::fs::read_to_string(at.join("notes.txt")).unwrap(), "precious");
}

#[test]
fn the_exit_statuses_are_in_the_help() {
    let mut command = program();
    command.args(["serve", "--help"]);
    let (status, help, _) = finish(command);
    assert_eq!(status, Some(0));
    for words in [
        "Exit status:",
        "0  success; `serve`: ended by a signal",
        "[[controller]]",
        "SIGUSR1",
        "stay ignored, as SIGINT in",
    ] {
        assert!(help.contains(words), "{help}");
    }
}
