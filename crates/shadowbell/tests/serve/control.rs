//! The control socket, and `shadowbell ctl`.

use crate::harness::{Server, attach, finish, image, program, run, until};
use crate::supervisor::{signal, worker};
use rustix::process::Signal;
use serde_json::{Value, json};
use shadowbell_driver::AttachOptions;
use shadowbell_spec::Status;
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::wait::{LIMIT, short_pause, until_some};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

/// Runs `shadowbell ctl`. Returns exit status, output and errors.
pub(crate) fn ctl(server: &Server, arguments: &[&str]) -> (Option<i32>, String, String) {
    let mut command = program();
    command.arg("ctl").args(arguments).current_dir(server.directory());
    command.env("SHADOWBELL_RUN_DIR", server.directory().join("run"));
    finish(command)
}

/// Runs `shadowbell ctl --json`, which must succeed; returns its JSON. Waits until the server has a
/// control socket: a process that recovers creates it after it has recovered clients.
#[track_caller]
pub(crate) fn ctl_json(server: &Server, arguments: &[&str]) -> Value {
    let output = until_some("the control socket", || {
        let (status, output, errors) = ctl(server, &[arguments, &["--json"]].concat());
        let is_absent = errors.contains("no running server has its control socket");
        assert!(is_absent || status == Some(0), "{arguments:?}: {errors}");
        (!is_absent).then_some(output)
    });
    serde_json::from_str(&output).expect(&output)
}

fn control_socket(server: &Server) -> PathBuf {
    server.directory().join("run/vm/control.sock")
}

/// Guard that sets a flag on drop. The flag ends the loop of a thread. If the test panics, the
/// scope joins this thread, so the thread must end also then.
pub(crate) struct SetOnDrop<'a>(pub(crate) &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Sends an HTTP request. Returns status and body of the response.
pub(crate) fn http_request(server: &Server, request: &str) -> (u16, String) {
    let mut stream = UnixStream::connect(control_socket(server)).unwrap();
    // An error is ignored, because the server may respond and disconnect before it has read the
    // whole request.
    let _ = stream.write_all(request.as_bytes());
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    let answer = String::from_utf8(answer).unwrap();
    let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok());
    let body = answer.split_once("\r\n\r\n").unwrap_or_default().1.to_owned();
    (status.unwrap_or_else(|| panic!("{answer:?}")), body)
}

pub(crate) fn request(method: &str, path: &str, body: &str) -> String {
    format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

#[test]
fn status_reports_the_controllers_and_shutdown_ends_the_server() {
    let directory = tempfile::tempdir().unwrap();
    let disk = image(directory.path(), "disk.img", 8 << 20);
    let disk = disk.to_str().unwrap().to_owned();
    let options = ["--no-supervisor"];
    let mut server = Server::start_in(directory, &[&disk, "mem:4MiB?read-only=on"], &options);
    let status = ctl_json(&server, &["status"]);
    assert_eq!((&status["name"], &status["pid"]), (&json!("vm"), &json!(server.pid())));
    assert_eq!((&status["controllers"], &status["clients"]), (&json!(1), &json!(0)));
    assert_eq!((&status["supervisor_pid"], &status["log_filter"]), (&Value::Null, &json!("info")));
    let mode = |path: &str| {
        std::fs::metadata(server.directory().join(path)).unwrap().permissions().mode() & 0o777
    };
    assert_eq!((mode("run/vm/control.sock"), mode("run/vm")), (0o600, 0o700));

    let mut guest = server.attach();
    let socket = server.socket().canonicalize().unwrap().display().to_string();
    until("the client is seen", || ctl_json(&server, &["status"])["clients"] == 1);
    let controllers = ctl_json(&server, &["controllers"]);
    let controller = &controllers[0];
    assert_eq!((&controller["id"], &controller["socket"]), (&json!(socket), &json!(socket)));
    assert_eq!((&controller["client"], &controller["state"]), (&json!(true), &json!("ready")));
    assert_eq!(ctl_json(&server, &["controllers", "vm.sock"]), controllers);
    let namespaces = ctl_json(&server, &["namespaces"]);
    assert_eq!(&namespaces, &controller["namespaces"]);
    assert_eq!((&namespaces[0]["disk"], &namespaces[0]["bytes"]), (&json!(disk), &json!(8 << 20)));
    assert_eq!((&namespaces[1]["nsid"], &namespaces[1]["read_only"]), (&json!(2), &json!(true)));
    let uuid = guest.namespace(1).unwrap().uuid().unwrap();
    let uuid: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(namespaces[0]["uuid"].as_str().unwrap().replace('-', ""), uuid);

    let mut queue = guest.take_queue_pair().unwrap();
    let pool = guest.buffers(1, 4096).unwrap();
    let read = guest.namespace(1).unwrap().read(0, 8).unwrap();
    assert_eq!(run(&mut queue, read, pool.take()).status, Status::SUCCESS);
    let stats = ctl_json(&server, &["stats"]);
    assert_eq!(stats["controllers"][0]["io"]["bytes_read"], 4096);
    assert_eq!(stats["controllers"][0]["id"], controller["id"]);
    let (_, table, _) = ctl(&server, &["stats"]);
    assert!(table.contains("4.0 KiB") && table.lines().count() == 2, "{table}");
    for (what, word) in
        [("status", "1, 1 with a client"), ("controllers", "ready"), ("namespaces", &disk)]
    {
        let (status, text, errors) = ctl(&server, &[what]);
        assert_eq!((status, &errors[..]), (Some(0), ""), "{what}");
        assert!(text.contains(word), "{text}");
    }

    let (status, _, errors) = ctl(&server, &["shutdown"]);
    assert!(status == Some(4) && errors.contains("--force"), "{errors}");
    let (status, output, _) = ctl(&server, &["shutdown", "--force"]);
    assert_eq!(
        (status, output),
        (Some(0), format!("vm (process {}) is shutting down\n", server.pid()))
    );
    assert!(server.wait().success(), "{}", server.stderr());
    assert!(!server.directory().join("run/vm").exists(), "nothing is left behind");
}

#[test]
fn a_failed_ctl_command_has_an_exit_status_and_a_message() {
    let mut server = Server::start(&["mem:4MiB"], &["--no-supervisor"]);
    for (arguments, status, words) in [
        (&["status", "-s", "vm1"][..], 3, "there is no server `vm1`"),
        (&["status", "-s", "/nonexistent/x.sock"], 3, "no such control socket"),
        (&["controllers", "vm7"], 3, "there is no controller `vm7`"),
        (&["log-level", "loud=="], 2, "is not a log filter"),
        (&["log-level", "warnig"], 2, "is not a log filter"),
        (&["upgrade"], 4, "has no supervisor"),
        (&["upgrade", "--binary", "/nonexistent/x"], 2, "--binary"),
        (&["frobnicate"], 2, "frobnicate"),
    ] {
        let (code, _, errors) = ctl(&server, arguments);
        assert_eq!(code, Some(status), "{arguments:?}: {errors}");
        assert!(errors.contains(words), "{arguments:?}: {errors}");
    }
    // The server's name, its control socket, and its controller's socket all select it.
    for name in ["vm", "./run/vm/control.sock", "./vm.sock"] {
        assert_eq!(ctl_json(&server, &["status", "-s", name])["pid"], server.pid(), "{name}");
    }
    assert!(server.stop().success());
    let (code, _, errors) = ctl(&server, &["status"]);
    assert!(code == Some(3) && errors.contains("no running server"), "{code:?}: {errors}");
}

#[test]
fn a_default_name_in_use_gets_a_suffix() {
    let mut first = Server::start(&["mem:4MiB"], &[]);
    let other = |options: &[&str]| {
        let mut command = program();
        command.args(["serve", "--no-supervisor", "mem:4MiB", "--socket"]).args(options);
        command.current_dir(first.directory());
        command.env("SHADOWBELL_RUN_DIR", first.directory().join("run"));
        command
    };
    let directory = tempfile::tempdir().unwrap();
    let second = directory.path().join("vm.sock");
    let mut child = ProcessGroup::spawn(&mut other(&[second.to_str().unwrap()])).unwrap();
    let name = format!("vm.{}", child.id());
    until("the second one", || ctl(&first, &["status", "-s", &name]).0 == Some(0));
    let (code, _, errors) = ctl(&first, &["status"]);
    assert!(code == Some(2) && errors.contains("several servers are running"), "{errors}");
    let by_socket = ctl_json(&first, &["status", "-s", second.to_str().unwrap()]);
    assert_eq!((&by_socket["name"], &by_socket["pid"]), (&json!(name), &json!(child.id())));
    let (code, _, errors) = finish(other(&["third.sock", "--name", "vm"]));
    assert!(code == Some(1) && errors.contains("in use by a running server"), "{errors}");
    let (code, _, errors) = finish(other(&["third.sock", "--control-socket", "/nowhere/x"]));
    assert!(code == Some(1) && errors.contains("create /nowhere first"), "{errors}");
    assert_eq!(ctl(&first, &["shutdown", "-s", &name]).0, Some(0));
    assert!(child.wait().success());
    assert!(first.stop().success());
}

#[test]
fn the_log_level_changes_at_run_time_and_survives_an_upgrade() {
    let server = Server::start(&["mem:4MiB"], &["--supervisor"]);
    drop(server.attach());
    assert!(!server.stderr().contains("debug:"), "{}", server.stderr());
    assert_eq!(ctl_json(&server, &["log-level", "debug"])["filter"], "debug");
    drop(server.attach());
    server.wait_for_log("debug:");
    let before = worker(&server);
    let (status, said, errors) = ctl(&server, &["upgrade"]);
    assert_eq!(status, Some(0), "{errors}");
    assert!(said.contains("serves"), "{said}");
    let status = ctl_json(&server, &["status"]);
    assert_eq!(
        (&status["log_filter"], &status["supervisor_pid"]),
        (&json!("debug"), &json!(server.pid()))
    );
    assert_ne!(status["pid"], before);
    assert_eq!(ctl(&server, &["log-level"]).1, "debug\n");
}

/// Each request during upgrades is answered: the socket always accepts connections, and no accepted
/// connection is closed without a response. A request that would take too long gets the response
/// 503.
#[test]
fn control_requests_during_upgrades_are_all_answered() {
    let mut server = Server::start(&["mem:4MiB"], &["--supervisor"]);
    let guest = server.attach();
    let is_over = AtomicBool::new(false);
    let ask = || {
        let mut asked = 0;
        // A connection is opened one round before its request is sent, so that it may be open
        // during an upgrade.
        let mut waiting = UnixStream::connect(control_socket(&server)).unwrap();
        while !is_over.load(Ordering::Relaxed) {
            let fresh = UnixStream::connect(control_socket(&server)).unwrap();
            let mut stream = std::mem::replace(&mut waiting, fresh);
            stream.write_all(request("GET", "/v1/status", "").as_bytes()).unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            let is_late = answer.starts_with("HTTP/1.1 503");
            assert!(answer.starts_with("HTTP/1.1 200") || is_late, "{answer:?}");
            assert_eq!(is_late, answer.contains("retry-after: 1\r\n"), "{answer:?}");
            asked += 1;
        }
        asked
    };
    let asked = std::thread::scope(|scope| {
        let askers = [scope.spawn(ask), scope.spawn(ask), scope.spawn(ask)];
        let over = SetOnDrop(&is_over);
        for n in 0..5 {
            let before = worker(&server);
            if n % 2 == 0 {
                let (status, _, errors) = ctl(&server, &["upgrade"]);
                assert_eq!(status, Some(0), "{errors}");
            } else {
                // The upgrade is requested by HTTP, as other programs do.
                let (status, _) = http_request(&server, &request("POST", "/v1/upgrade", ""));
                assert_eq!(status, 202);
            }
            until("another process", || ctl_json(&server, &["status"])["pid"] != before);
            assert_eq!(ctl_json(&server, &["status"])["clients"], 1);
        }
        drop(over);
        askers.map(|asker| asker.join().unwrap())
    });
    assert!(asked.iter().all(|asked| *asked > 5), "{asked:?}");
    // An upgrade request over HTTP must not name another program.
    let other = r#"{"binary":"/bin/false"}"#;
    let (status, body) = http_request(&server, &request("POST", "/v1/upgrade", other));
    // It is refused, because a sandboxed server process must not choose the program that its
    // supervisor starts.
    assert!(status == 409 && body.contains("`shadowbell upgrade --binary`"), "{status} {body}");
    let program = server.directory().join("program");
    std::fs::copy(env!("CARGO_BIN_EXE_shadowbell"), &program).unwrap();
    // The upgrade is tried again, because a child process of another test may hold the copy open
    // for a moment (ETXTBSY).
    until("an upgrade to the copy", || {
        ctl(&server, &["upgrade", "--binary", program.to_str().unwrap()]).0 == Some(0)
    });
    std::fs::remove_file(&program).unwrap();
    let (status, _) = http_request(&server, &request("POST", "/v1/upgrade", ""));
    assert_eq!(status, 202);
    until("the reason", || ctl_json(&server, &["status"])["upgrade_error"].is_string());
    drop(guest);
    until("its end", || ctl_json(&server, &["status"])["clients"] == 0);
    assert_eq!(ctl(&server, &["shutdown"]).0, Some(0));
    assert!(server.wait().success(), "{}", server.stderr());
    assert!(!server.directory().join("run/vm").exists());
}

#[test]
fn the_control_socket_answers_after_a_kill() {
    let mut server = Server::start(&["mem:4MiB"], &["--supervisor"]);
    let before = worker(&server);
    signal(before, Signal::KILL);
    until("the next one answers", || {
        let (status, output, _) = ctl(&server, &["status", "--json"]);
        status == Some(0) && !output.contains(&format!("\"pid\": {before},"))
    });
    assert_eq!(ctl_json(&server, &["status"])["name"], "vm");
    assert!(server.stop().success());
}

#[test]
fn misbehaving_control_clients_do_not_block_others() {
    let mut server = Server::start(&["mem:4MiB"], &[]);
    let connect = || UnixStream::connect(control_socket(&server)).unwrap();
    for (head, expected) in [
        ("NONSENSE\r\n\r\n".to_owned(), 400),
        (format!("GET /v1/status HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(20 << 10)), 431),
        (request("GET", "/v1/nothing", ""), 404),
        (request("DELETE", "/v1/status", ""), 405),
        (request("PUT", "/v1/log-level", "{"), 400),
        (request("PUT", "/v1/log-level", r#"{"filter":"info","x":1}"#), 400),
        (request("PUT", "/v1/log-level", r#"{"filter":"x=y=z"}"#), 400),
        (request("POST", "/v1/upgrade", r#"{"binary":"/nonexistent"}"#), 409),
    ] {
        let (status, body) = http_request(&server, &head);
        assert_eq!(status, expected, "{body}");
        if ![400, 431].contains(&expected) {
            let problem: Value = serde_json::from_str(&body).unwrap();
            assert!(problem["message"].as_str().unwrap().len() > 10, "{body}");
        }
    }
    // If the body of a request does not end, the server closes the connection.
    let mut endless = connect();
    endless.set_write_timeout(Some(LIMIT)).unwrap();
    let head =
        format!("PUT /v1/log-level HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n", 1_u64 << 40);
    endless.write_all(head.as_bytes()).unwrap();
    let mut sent = 0_u64;
    while let Ok(len) = endless.write(&[b' '; 65536]) {
        sent += len as u64;
        assert!(sent < 64 << 20, "an endless request is accepted");
    }
    // Connections that send no request occupy all slots of the server, so the next connection has
    // to wait.
    let silent: Vec<_> = (0..16).map(|_| connect()).collect();
    let mut next = connect();
    next.write_all(request("GET", "/v1/status", "").as_bytes()).unwrap();
    short_pause();
    next.set_nonblocking(true).unwrap();
    assert!(next.read(&mut [0; 1]).is_err(), "all connection slots are taken");
    next.set_nonblocking(false).unwrap();
    // I/O of a guest continues while all slots are taken.
    let mut guest = attach(&server.socket(), &AttachOptions::default());
    let mut queue = guest.take_queue_pair().unwrap();
    let pool = guest.buffers(1, 4096).unwrap();
    let read = guest.namespace(1).unwrap().read(0, 8).unwrap();
    assert_eq!(run(&mut queue, read, pool.take()).status, Status::SUCCESS);
    drop(silent);
    let mut answer = String::new();
    next.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    drop((queue, pool, guest));
    assert!(server.stop().success());
}

/// While a guest is attached, the server executes Identify and Get Log Page out of band.
#[test]
fn a_controller_in_use_can_be_inspected() {
    let mut server = Server::start(&["mem:4MiB", "mem:8MiB?block-size=4096"], &[]);
    let target = format!("vfio-user:{}", server.socket().display());
    let look = |verb: &str, target: &str, arguments: &[&str]| {
        let mut command = program();
        command.args([verb, target]).args(arguments);
        command.env("SHADOWBELL_RUN_DIR", server.directory().join("run"));
        finish(command)
    };
    let verbs = ["list", "id-ctrl", "id-ns", "smart-log", "error-log"];
    let at_rest = verbs.map(|verb| look(verb, &target, &["--json"]));
    let mut guest = server.attach();
    until("the client is seen", || ctl_json(&server, &["status"])["clients"] == 1);
    for (verb, (status, rested, _)) in verbs.iter().zip(at_rest) {
        assert_eq!(status, Some(0), "{verb}");
        let (status, output, errors) = look(verb, &target, &["--json"]);
        assert_eq!(status, Some(0), "{verb}: {errors}");
        // The output is the same as without a guest, except for the counters of `smart-log`.
        if verb != &"smart-log" {
            assert_eq!(output, rested, "{verb}");
        }
        assert_eq!(look(verb, &target, &[]).0, Some(0), "{verb}");
    }
    let mut queue = guest.take_queue_pair().unwrap();
    let pool = guest.buffers(1, 4096).unwrap();
    let read = guest.namespace(1).unwrap().read(0, 8).unwrap();
    assert_eq!(run(&mut queue, read, pool.take()).status, Status::SUCCESS);
    let (_, health, _) = look("smart-log", &target, &["--json"]);
    let health: Value = serde_json::from_str(&health).unwrap();
    assert_eq!(health["host_read_commands"], 1);
    let (status, _, errors) = look("id-ns", &format!("{target}/3"), &[]);
    assert!(status == Some(2) && errors.contains("namespace 3 does not exist"), "{errors}");
    let (_, table, _) = look("list", &target, &[]);
    assert_eq!(table.lines().count(), 3, "{table}");
    // A verb that has to attach fails, because another client is connected.
    let (status, _, errors) = look("get-feature", &target, &[]);
    assert!(status == Some(2) && errors.contains("another client is connected"), "{errors}");
    assert!(!errors.contains("no controller"), "{errors}");
    drop((queue, pool, guest));
    assert!(server.stop().success());
}

#[test]
fn top_finds_the_servers_that_run() {
    let mut server = Server::start(&["mem:4MiB"], &[]);
    let run = server.directory().join("run");
    let socket = server.socket().display().to_string();
    let top = |what: &[&str]| {
        let mut command = program();
        command.args(["top", "--interval", "50ms", "--count", "2", "--json"]).args(what);
        command.env("SHADOWBELL_RUN_DIR", &run);
        finish(command)
    };
    let control = control_socket(&server).display().to_string();
    for what in [&[][..], &["vm"], &[&socket], &[&control]] {
        let (status, output, errors) = top(what);
        assert_eq!(status, Some(0), "{what:?}: {errors}");
        assert_eq!(output.lines().count(), 2, "{output}");
        for line in output.lines() {
            let look: Value = serde_json::from_str(line).expect(line);
            assert_eq!(look["controllers"][0]["socket"], socket, "{line}");
            assert!(look["at_ns"].as_u64().unwrap() > 0);
        }
    }
    assert!(server.stop().success());
    let (status, _, errors) = top(&[]);
    assert!(status == Some(3) && errors.contains("no running server"), "{errors}");
}

#[test]
fn controller_sockets_have_the_configured_mode_and_group() {
    // Only root may give a file to a group of which it is no member. For another user, the group is
    // that of the process.
    let is_root = rustix::process::geteuid().is_root();
    let group = if is_root { 7 } else { rustix::process::getegid().as_raw() };
    let options = ["--socket-mode", "0624", "--socket-group", &group.to_string()];
    let mut server = Server::start(&["mem:4MiB"], &options);
    ctl_json(&server, &["controller", "add", "b", "mem:1MiB", "--socket", "b.sock"]);
    for name in ["vm.sock", "b.sock"] {
        let about = std::fs::metadata(server.directory().join(name)).unwrap();
        let found = (about.permissions().mode() & 0o777, about.gid());
        assert_eq!(found, (0o624, group), "{name}");
    }
    drop(server.attach());
    assert!(server.stop().success());
    for (option, value) in [("--socket-mode", "rw"), ("--socket-group", "no such group")] {
        let mut command = program();
        command.args(["serve", "mem:1MiB", "--socket", "/nonexistent/x.sock", option, value]);
        let (code, _, errors) = finish(command);
        assert!(code == Some(2) && errors.contains(value), "{errors}");
    }
}

#[test]
fn too_large_memory_disks_and_polling_threads_are_logged() {
    let mut server = Server::start(&["mem:4TiB"], &["--doorbells", "mapped", "--workers", "1"]);
    server.wait_for_log("the machine has");
    server.wait_for_log("the I/O threads poll and use a CPU each");
    drop(server.attach());
    assert!(server.stop().success());
}
