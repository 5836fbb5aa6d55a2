//! `shadowbell top`: JSON samples, text table and terminal interface.

use crate::harness::{Server, finish, program, run, until};
use serde_json::Value;
use shadowbell_spec::Status;
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::programs::skipped;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Stdio};

fn server(disks: &[&str], options: &[&str]) -> (Server, PathBuf) {
    let server = Server::start(disks, options);
    let control = server.directory().join("run/vm/control.sock");
    (server, control)
}

/// `shadowbell top`, which runs until the test kills it.
struct Top(ProcessGroup, BufReader<ChildStdout>);

impl Top {
    fn start(control: &Path, arguments: &[&str]) -> Self {
        let mut command = program();
        command.arg("top").arg(control).args(["--interval", "50ms"]).args(arguments);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = ProcessGroup::spawn(&mut command).unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self(child, lines)
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.1.read_line(&mut line).unwrap();
        line
    }

    fn controller(&mut self) -> Value {
        let line = self.line();
        let report: Value = serde_json::from_str(&line).expect(&line);
        report["controllers"][0].clone()
    }

    /// Waits for a sample with a controller in this state.
    #[track_caller]
    fn until(&mut self, state: &str) -> Value {
        let mut found = Value::Null;
        until(state, || {
            found = self.controller();
            found["state"] == state
        });
        found
    }
}

#[test]
fn top_shows_a_guests_activity() {
    let (mut server, control) = server(&["mem:4MiB"], &[]);
    let mut top = Top::start(&control, &["--json"]);
    let row = top.until("off");
    assert_eq!((&row["queues"], &row["iops"]), (&0.into(), &0.0.into()));
    assert_eq!((&row["rings_per_io"], &row["doorbells_saved"]), (&Value::Null, &Value::Null));

    let mut controller = server.attach();
    let namespace = controller.namespace(1).unwrap().clone();
    let mut queue = controller.take_queue_pair().unwrap();
    // `top` may show the controller when only one of its two queues exists.
    until("both queues", || top.until("idle")["queues"] == 2);
    let row = top.until("idle");
    assert_eq!(row["workers"], serde_json::json!([0]));
    assert_eq!(row["socket"], server.socket().display().to_string());

    let pool = controller.buffers(1, 4096).unwrap();
    for _ in 0..100 {
        let done = run(&mut queue, namespace.read(0, 8).unwrap(), pool.take());
        assert_eq!(done.status, Status::SUCCESS);
    }
    let row = top.until("busy");
    let figure = |name: &str| row[name].as_f64().unwrap();
    assert!(figure("iops") > 0.0);
    // The sample has 4 KiB for each read, and nothing written.
    assert_eq!((figure("read_bytes_per_second") / figure("iops")).round(), 4096.0);
    assert_eq!((figure("written_bytes_per_second"), &row["errors"]), (0.0, &0.into()));
    assert!((0.0..=1.0).contains(&figure("doorbells_saved")), "{row}");

    drop((queue, pool));
    controller.detach().unwrap();
    top.until("off");
    assert!(server.stop().success());
    assert!(!control.exists());
    assert_eq!(top.0.wait().code(), Some(3));
    let mut complaint = String::new();
    top.0.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
    assert!(complaint.contains("the server has ended"), "{complaint}");
}

#[test]
fn a_namespace_has_a_line_with_latencies_while_commands_are_measured() {
    let (mut server, control) = server(&["mem:4MiB", "null:1GiB"], &["--measure"]);
    let mut top = Top::start(&control, &["--json"]);
    let mut controller = server.attach();
    let mut queue = controller.take_queue_pair().unwrap();
    let pool = controller.buffers(1, 4096).unwrap();
    let mut reads = |nsid| {
        for _ in 0..20 {
            let command = controller.namespace(nsid).unwrap().read(0, 8).unwrap();
            assert_eq!(run(&mut queue, command, pool.take()).status, Status::SUCCESS);
        }
    };
    reads(1);
    let mut found = Value::Null;
    // Only the second namespace is read, so only its values are not zero.
    until("a sample of its namespaces", || {
        reads(2);
        found = top.controller();
        let namespace = &found["namespaces"][1];
        namespace["p99_ns"].is_u64() && found["namespaces"][0]["iops"] == 0.0
    });
    let [one, two] = [&found["namespaces"][0], &found["namespaces"][1]];
    assert_eq!((&one["nsid"], &one["p50_ns"]), (&1.into(), &Value::Null));
    assert_eq!((&two["nsid"], &two["disk"]), (&2.into(), &"null:1GiB".into()));
    let figure = |name: &str| two[name].as_f64().unwrap();
    assert_eq!((figure("read_bytes_per_second") / figure("iops")).round(), 4096.0);
    assert!(0.0 < figure("p50_ns") && figure("p50_ns") <= figure("p99_ns"), "{two}");
    assert_eq!(found["p99_ns"], two["p99_ns"]);
    // The text table has a line for each namespace.
    let mut command = program();
    command.arg("top").arg(&control).args(["--interval", "50ms", "--count", "1"]);
    let (status, text, complaint) = finish(command);
    assert_eq!(status, Some(0), "{complaint}");
    let lines: Vec<_> = text.lines().collect();
    assert!(lines[0].ends_with("p99") && lines[3].starts_with("  2 null:1GiB"), "{text}");
    drop((queue, pool));
    controller.detach().unwrap();
    assert!(server.stop().success());
}

#[test]
fn top_on_a_terminal_redraws_until_q_is_pressed() {
    let (server, control) = server(&["mem:4MiB"], &[]);
    // The program `script` provides a pseudo-terminal.
    let mut command = std::process::Command::new("script");
    let line = format!("stty cols 80 rows 24; {} top {}", program_path(), control.display());
    command.args(["--quiet", "--return", "--command", &line, "/dev/null"]).env("TERM", "xterm");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let Ok(mut child) = ProcessGroup::spawn(&mut command) else {
        skipped("there is no `script`, which is in Debian's bsdutils");
        return;
    };
    let mut output = child.stdout.take().unwrap();
    let shown = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let collected = std::sync::Arc::clone(&shown);
    let reader = std::thread::spawn(move || {
        let mut piece = [0; 4096];
        while let Ok(len @ 1..) = output.read(&mut piece) {
            collected.lock().unwrap().extend_from_slice(&piece[..len]);
        }
    });
    let shows = |words: &str| String::from_utf8_lossy(&shown.lock().unwrap()).contains(words);
    until("the screen", || shows("q quit") && shows("Written") && shows("off"));
    let mut keys = child.stdin.take().unwrap();
    keys.write_all(b"d").unwrap();
    until("the doorbells", || shows("Rings/IO"));
    keys.write_all(b"\x1b[Bq").unwrap();
    assert!(child.wait().success());
    reader.join().unwrap();
    // `top` has entered the alternate screen, and has left it at the end.
    assert!(shows("\x1b[?1049h") && shows("\x1b[?1049l"));
    drop(server);
}

fn program_path() -> String {
    program().get_program().to_str().unwrap().to_owned()
}

#[test]
fn top_prints_a_table_with_one_heading() {
    let (server, control) = server(&["mem:4MiB"], &[]);
    let mut command = program();
    command.arg("top").arg(&control).args(["--interval", "50ms", "--count", "3"]);
    let (status, text, complaint) = finish(command);
    assert_eq!((status, complaint.as_str()), (Some(0), ""));
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 4, "{text}");
    assert!(lines[0].starts_with("Controller") && lines[0].contains("IOPS"), "{text}");
    let name = server.socket().display().to_string();
    assert!(
        lines[1..].iter().all(|line| line.starts_with(&name) && line.contains("off")),
        "{text}"
    );
    assert!(!text.contains('\x1b'), "{text:?}");
}

#[test]
fn top_refuses_other_sockets() {
    let (server, _) = server(&["mem:4MiB"], &[]);
    let top = |path: &Path| {
        let mut command = program();
        command.arg("top").arg(path);
        let (status, _, complaint) = finish(command);
        assert_eq!(status, Some(3), "{complaint}");
        complaint
    };
    for path in
        [Path::new("/nowhere/control"), &server.socket(), &server.directory().join("stderr")]
    {
        let complaint = top(path);
        let expected = format!("{}: not a control socket", path.display());
        assert!(complaint.contains(&expected), "{complaint}");
    }
    drop(server.attach());
}
