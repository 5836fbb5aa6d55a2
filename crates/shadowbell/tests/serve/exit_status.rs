//! Exit statuses: one table for all verbs.

use crate::control::{ctl, ctl_json};
use crate::harness::{Server, attach, finish, image, program, until};
use shadowbell_driver::AttachOptions;
use shadowbell_process::exit::ExitStatus;
use std::path::Path;

/// Runs `shadowbell` with these arguments. Returns exit status and errors.
fn run(at: &Path, words: &[&str]) -> (Option<i32>, String) {
    let mut command = program();
    command.args(words).current_dir(at).env("SHADOWBELL_RUN_DIR", at.join("run"));
    let (status, _, errors) = finish(command);
    (status, errors)
}

/// Returns the verbs in the help of `shadowbell` with these arguments.
fn verbs(words: &[&str]) -> Vec<String> {
    let mut command = program();
    command.args(words).arg("--help");
    let (status, help, _) = finish(command);
    assert_eq!(status, Some(0));
    let Some((_, verbs)) = help.split_once("Commands:\n") else { return Vec::new() };
    let lines = verbs.lines().take_while(|line| line.starts_with("  "));
    let names = lines.filter(|line| !line.starts_with("   "));
    let names = names.filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

fn all_verbs(words: &[&str], found: &mut Vec<Vec<String>>) {
    for verb in verbs(words) {
        let deeper: Vec<&str> = words.iter().copied().chain([&verb[..]]).collect();
        found.push(deeper.iter().map(|word| (*word).to_owned()).collect());
        all_verbs(&deeper, found);
    }
}

#[test]
fn a_wrong_option_has_one_status_in_all_verbs() {
    let directory = tempfile::tempdir().unwrap();
    let mut all = Vec::new();
    all_verbs(&[], &mut all);
    let names: Vec<_> = all.iter().map(|words| words.join(" ")).collect();
    assert!(all.len() > 50 && names.iter().any(|name| name == "ctl disk resize"), "{names:?}");
    for verb in all {
        let words: Vec<&str> = verb.iter().map(String::as_str).chain(["--no-such"]).collect();
        let (status, errors) = run(directory.path(), &words);
        assert_eq!(status, Some(ExitStatus::BadInput as i32), "{words:?}: {errors}");
    }
}

/// Each kind of missing object has one exit status in all verbs: bad input for a target, and "not
/// found" for a server or an object of a server. If a service lacks its image or directory, the
/// status is that of a failure, after which a systemd unit restarts the service.
#[test]
fn what_does_not_exist_has_one_status_in_all_verbs() {
    let directory = tempfile::tempdir().unwrap();
    let (bad, missing) = (ExitStatus::BadInput, ExitStatus::NotFound);
    let may_pass = ExitStatus::Failed;
    let mut checked = Vec::new();
    for (words, expected) in [
        (&["serve", "no.img", "--socket", "x.sock"][..], may_pass),
        (&["serve", "mem:1MiB", "--socket", "nowhere/x.sock"], may_pass),
        (&["serve", "--check", "no.toml"], bad),
        (&["config", "check", "no.toml"], bad),
        (&["export", "no.img", "--nbd", "unix:x.sock"], may_pass),
        (&["bench", "no.img"], bad),
        (&["verify", "no.img"], bad),
        (&["list", "no.img"], bad),
        (&["id-ctrl", "no.img"], bad),
        (&["id-ns", "no.img"], bad),
        (&["smart-log", "no.img"], bad),
        (&["error-log", "no.img"], bad),
        (&["get-feature", "no.img"], bad),
        (&["device-self-test", "no.img"], bad),
        (&["self-test-log", "no.img"], bad),
        (&["telemetry-log", "no.img", "--output-file", "x"], bad),
        (&["persistent-event-log", "no.img"], bad),
        (&["create-ns", "no.img", "--nsze", "1MiB"], bad),
        (&["delete-ns", "no.img", "--namespace-id", "1"], bad),
        (&["attach-ns", "no.img", "--namespace-id", "1"], bad),
        (&["detach-ns", "no.img", "--namespace-id", "1"], bad),
        (&["format", "no.img", "--force"], bad),
        (&["sanitize", "no.img", "--sanact", "2", "--force"], bad),
        (&["sanitize-log", "no.img"], bad),
        (&["ana-log", "no.img"], bad),
        (&["write-uncor", "no.img", "--start-block", "0", "--force"], bad),
        (&["read", "no.img"], bad),
        (&["write", "no.img"], bad),
        (&["copy", "no.img", "mem:1MiB"], bad),
        (&["attach-many", "no.img"], bad),
        (&["trace", "no.trace"], bad),
        (&["demo", "--runtime", "never"], bad),
        // A time without a unit counts seconds in every command.
        (&["demo", "--runtime", "100"], bad),
        (&["bind", "0000:zz:00.0"], bad),
        (&["unbind", "0000:zz:00.0"], bad),
        (&["nvme", "id-ctrl", "no.img"], bad),
        (&["completions", "no-shell"], bad),
        (&["manual", "/dev/null/x"], may_pass),
        (&["ls", "no-server"], missing),
        (&["status", "no-server"], missing),
        (&["stop", "no-server"], missing),
        (&["explain", "vm0", "--server", "no-server"], missing),
        (&["top", "no-server"], missing),
        (&["top", "nowhere/x.sock"], missing),
        (&["upgrade", "no-server"], missing),
        (&["upgrade", "nowhere/x.sock"], missing),
        (&["ctl", "status"], missing),
        (&["ctl", "-s", "no-server", "shutdown"], missing),
    ] {
        let (status, errors) = run(directory.path(), words);
        assert_eq!(status, Some(expected as i32), "{words:?}: {errors}");
        checked.push(words[0]);
    }
    let others = verbs(&[]).into_iter().filter(|verb| !checked.contains(&&verb[..]));
    assert_eq!(others.collect::<Vec<_>>(), [""; 0], "verbs without a check");

    let server = Server::start_in(directory, &["mem:1MiB"], &["--name", "vm"]);
    for words in [
        &["controllers", "no"][..],
        &["controller", "remove", "no"],
        &["explain", "no"],
        &["namespace", "attach", "no", "2", "mem:1MiB"],
        &["namespace", "detach", "vm.sock", "7"],
        &["disk", "remove", "no"],
        &["disk", "resize", "no"],
        &["disk", "replace", "no", "mem:1MiB"],
        &["disk", "read-only", "no", "on"],
        &["export", "add", "e", "no", "--nbd", "unix:e.sock"],
        &["export", "remove", "no"],
        &["limit", "no"],
        &["limit", "no", "--iops", "5"],
        &["limit-group", "set", "no", "--iops", "5"],
        &["ana", "no"],
    ] {
        let (status, _, errors) = ctl(&server, words);
        assert_eq!(status, Some(missing as i32), "{words:?}: {errors}");
    }
}

/// Error messages say in words what to do: about a command that the controller does not support, a
/// missing directory, and a limit of the file size.
#[test]
fn messages_name_the_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    image(at, "out.img", 4 << 20);
    let pool = "serve it with `--pool DIRECTORY`";
    for (words, expected, text) in [
        (&["create-ns", "mem:1MiB", "--nsze", "1MiB"][..], ExitStatus::BadInput, pool),
        (&["delete-ns", "mem:1MiB", "--namespace-id", "1", "--force"], ExitStatus::BadInput, pool),
        (&["attach-ns", "mem:1MiB", "--namespace-id", "1"], ExitStatus::BadInput, pool),
        (&["format", "mem:1MiB", "--force"], ExitStatus::BadInput, pool),
        (
            &["serve", "mem:1MiB", "--socket", "x.sock", "--allow", "nope"],
            ExitStatus::Failed,
            "--allow nope: there is no such directory",
        ),
    ] {
        let (status, errors) = run(at, words);
        assert_eq!(status, Some(expected as i32), "{words:?}: {errors}");
        assert!(errors.contains(text), "{words:?}: {errors}");
    }
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", "ulimit -f 8; exec \"$0\" read mem:1MiB -o out.raw"]);
    let (status, _, errors) = finish({
        limited.arg(program().get_program()).current_dir(at);
        limited
    });
    assert!(status == Some(1) && errors.contains("File too large"), "{status:?} {errors}");
}

/// A service that ends because of a temporary cause has an exit status after which a systemd unit
/// restarts it. After bad input, it has a status after which the unit does not restart it.
#[test]
fn a_service_is_restarted_only_after_a_cause_that_can_pass() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "a.img", 1 << 20);
    image(directory.path(), "odd.img", 1000);
    let mut server = Server::start_in(directory, &["a.img"], &[]);
    let at = server.directory().to_owned();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = port.local_addr().unwrap().to_string();
    let tcp = format!("tcp:{address}");
    let mem = ["serve", "mem:1MiB", "--socket"];
    let (failed, bad) = (ExitStatus::Failed, ExitStatus::BadInput);
    for (words, expected) in [
        (&["serve", "a.img", "--socket", "x.sock"][..], failed),
        (&[&mem[..], &["vm.sock"]].concat(), failed),
        (&[&mem[..], &["x.sock", "--metrics", &address]].concat(), failed),
        (&["export", "mem:1MiB", "--nbd", &tcp], failed),
        (&["export", "vfio-user:no.sock/1", "--nbd", "unix:x.sock"], failed),
        (&["serve", "odd.img", "--socket", "x.sock"], bad),
        (&["serve", "a.img?no=1", "--socket", "x.sock"], bad),
        (&[&mem[..], &["x.sock", "--serial", "a serial number of 33 characters"]].concat(), bad),
    ] {
        let (status, errors) = run(&at, words);
        assert_eq!(status, Some(expected as i32), "{words:?}: {errors}");
        let supervised = [words, &["--supervisor"]].concat();
        let (status, errors) = run(&at, &supervised);
        assert_eq!(status, Some(expected as i32), "{supervised:?}: {errors}");
    }
    assert!(server.stop().success());
}

/// Each verb accepts the name, a process ID or a socket of a server. A server's name takes
/// precedence over a file with the same name.
#[test]
fn a_server_is_named_alike_in_each_verb() {
    let directory = tempfile::tempdir().unwrap();
    image(directory.path(), "vm", 1 << 20);
    let mut server = Server::start_in(directory, &["mem:1MiB"], &["--supervisor"]);
    let at = server.directory().to_owned();
    let socket = server.socket().display().to_string();
    let control = at.join("run/vm/control.sock").display().to_string();
    let guest = attach(&server.socket(), &AttachOptions::default());
    until("a client", || ctl_json(&server, &["status"])["clients"] == 1);
    for kind in 0..5 {
        // Each upgrade starts another server process, so the process ID is read anew.
        let status = ctl_json(&server, &["status"]);
        let (pid, keeper) = (status["pid"].to_string(), status["supervisor_pid"].to_string());
        let name = ["vm", &pid, &keeper, &socket, &control][kind];
        for words in [
            &["ctl", "-s", name, "status"][..],
            &["ls", name],
            &["ps", name],
            &["info", name],
            &["status", name],
            &["top", name, "--count", "1", "--interval", "50ms"],
            &["upgrade", name],
        ] {
            let (status, errors) = run(&at, words);
            assert_eq!(status, Some(0), "{words:?}: {errors}");
        }
    }
    for words in [&["status"][..], &["ps"], &["nvme", "id-ctrl", &socket], &["completions", "bash"]]
    {
        let (status, errors) = run(&at, words);
        assert_eq!(status, Some(0), "{words:?}: {errors}");
    }
    let (status, errors) = run(&at, &["stop", "vm"]);
    assert!(status == Some(4) && errors.contains("--force"), "{errors}");
    // Without a verb, the servers and their objects are listed, in 80 columns.
    let mut command = program();
    command.current_dir(&at).env("SHADOWBELL_RUN_DIR", "run");
    let (status, listed, errors) = finish(command);
    assert_eq!((status, &errors[..]), (Some(0), ""));
    for words in ["server", "vm", "controller", "ready, client", "1.0 MiB", "namespace 1"] {
        assert!(listed.contains(words), "{listed}");
    }
    drop(guest);
    assert!(server.stop().success());
    let mut command = program();
    command.current_dir(&at).env("SHADOWBELL_RUN_DIR", "run");
    let (status, listed, _) = finish(command);
    assert!(status == Some(0) && listed.contains("no server is running"), "{listed}");
}
