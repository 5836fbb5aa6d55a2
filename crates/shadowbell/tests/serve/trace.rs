//! Trace conversion: a time line for Perfetto's viewer, and JSON lines for tools.

use crate::control::{ctl, ctl_json};
use crate::harness::{Server, finish, image, program, run, until};
use crate::idle::status_of;
use crate::supervisor::worker;
use serde_json::{Value, json};
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// Runs `shadowbell trace FILE` with these options; returns its output.
#[track_caller]
fn trace(file: &Path, options: &[&str]) -> String {
    let mut command = program();
    command.arg("trace").arg(file).args(options);
    let (status, out, errors) = finish(command);
    assert_eq!((status, errors.as_str()), (Some(0), ""));
    out
}

/// Events of a time line, without metadata events.
struct TimeLine {
    events: Vec<Value>,
    /// Names of process and thread, by their ids.
    tracks: HashMap<(u64, u64), (String, String)>,
}

/// Parses a time line by the rules of the trace event format, as a viewer does. Panics if a field
/// is missing, events are in the wrong order, slices overlap, or an arrow has only one end or an
/// end outside of a slice.
#[track_caller]
fn read(text: &str) -> TimeLine {
    let document: Value = serde_json::from_str(text).unwrap();
    let mut time_line = TimeLine { events: Vec::new(), tracks: HashMap::new() };
    let number = |event: &Value, name: &str| {
        event[name].as_u64().unwrap_or_else(|| panic!("{name} of {event}"))
    };
    // Converts to nanoseconds. The format has microseconds with three decimals.
    let time = |event: &Value, name: &str| {
        let us = event[name].as_f64().unwrap_or_else(|| panic!("{name} of {event}"));
        assert!(us >= 0.0, "{event}");
        (us * 1e3).round() as u64
    };
    for event in document["traceEvents"].as_array().unwrap() {
        let track = (number(event, "pid"), number(event, "tid"));
        let name = event["name"].as_str().unwrap();
        if event["ph"] != "M" {
            time_line.events.push(event.clone());
            continue;
        }
        let (process, thread) = time_line.tracks.entry(track).or_default();
        match name {
            "process_name" => *process = event["args"]["name"].as_str().unwrap().to_owned(),
            "thread_name" => *thread = event["args"]["name"].as_str().unwrap().to_owned(),
            _ => assert!(event["args"]["sort_index"].is_number(), "{event}"),
        }
    }
    let mut names = HashSet::new();
    for name in time_line.tracks.values() {
        assert!(!name.0.is_empty() && !name.1.is_empty() && names.insert(name), "{name:?}");
    }
    let (mut last, mut arrows, mut ended) = (0, HashMap::new(), HashSet::new());
    // Begin and end of the last slice of each track.
    let mut slices: HashMap<_, (u64, u64)> = HashMap::new();
    for event in &time_line.events {
        let (at, track) = (time(event, "ts"), (number(event, "pid"), number(event, "tid")));
        assert!(at >= last, "out of order: {event}");
        last = at;
        assert!(time_line.tracks.contains_key(&track), "without a name: {event}");
        match event["ph"].as_str().unwrap() {
            "X" => {
                let end = at + time(event, "dur");
                let before = slices.insert(track, (at, end));
                assert!(before.is_none_or(|(_, end)| end <= at), "overlaps: {event}");
            }
            side @ ("s" | "f") => {
                let (from, to) = slices[&track];
                assert!((from..=to).contains(&at), "an arrow outside of a slice: {event}");
                let key = (number(event, "id"), event["name"].to_string());
                if side == "s" {
                    assert!(arrows.insert(key, at).is_none(), "twice: {event}");
                } else {
                    assert_eq!(event["bp"], "e");
                    assert!(arrows[&key] <= at, "back in time: {event}");
                    assert!(ended.insert(key), "twice: {event}");
                }
            }
            "i" => assert_eq!(event["s"], "t", "{event}"),
            "C" => assert!(event["args"]["commands"].is_u64(), "{event}"),
            _ => panic!("{event}"),
        }
    }
    assert_eq!(arrows.len(), ended.len(), "arrows without an end");
    time_line
}

impl TimeLine {
    /// Number of events of phase `ph` on the tracks with the name `track`. The events' names begin
    /// with `name`.
    fn count(&self, ph: &str, track: &str, name: &str) -> usize {
        let matches = |event: &&Value| {
            let key = (event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap());
            event["ph"] == ph
                && self.tracks[&key].1 == track
                && event["name"].as_str().unwrap().starts_with(name)
        };
        self.events.iter().filter(matches).count()
    }
}

/// Reads some blocks, one at a time. Before each read, waits until the I/O thread sleeps.
fn work(server: &Server) {
    let pid = worker(server);
    let is_asleep = || status_of(pid, "sb-worker0", "State").starts_with('S');
    reads(server, 20, || until("the I/O thread's sleep", is_asleep));
}

/// Reads `count` blocks, one at a time, and calls `wait` before each read.
fn reads(server: &Server, count: u64, wait: impl Fn()) {
    let mut controller = server.attach();
    let mut queue = controller.take_queue_pair().unwrap();
    let namespace = controller.namespaces()[0].clone();
    let pool = controller.buffers(1, 4096).unwrap();
    for block in 0..count {
        let command = namespace.read(block % 512 * 8, 8).unwrap();
        assert!(run(&mut queue, command, pool.take()).status.is_success());
        wait();
    }
    drop(queue);
    controller.detach().unwrap();
}

#[test]
fn a_time_line_shows_commands_doorbells_sleeps_and_interrupts() {
    for (disk, doorbells) in [("mem:4MiB", "shadow"), ("disk.img", "shadow"), ("mem:4MiB", "mmio")]
    {
        let directory = tempfile::tempdir().unwrap();
        image(directory.path(), "disk.img", 4 << 20);
        let disk = disk.replace("disk.img", &directory.path().join("disk.img").to_string_lossy());
        let options = ["--trace", "trace", "--poll", "never", "--doorbells", doorbells];
        let mut server = Server::start_in(directory, &[&disk], &options);
        work(&server);
        assert!(server.stop().success());
        let file = server.directory().join("trace");
        let out = server.directory().join("picture.json");
        assert_eq!(trace(&file, &["-q", "--perfetto", out.to_str().unwrap()]), "");
        let text = std::fs::read_to_string(&out).unwrap();
        assert_eq!(trace(&file, &["--perfetto", "-"]), text);
        let time_line = read(&text);
        let what = format!("{disk}, {doorbells}");
        // Each command is shown from its submission to its completion.
        assert_eq!(time_line.count("X", "SQ 1", "1 command submitted"), 20, "{what}");
        assert_eq!(time_line.count("X", "CQ 1", "1 command completed"), 20, "{what}");
        assert_eq!(time_line.count("s", "SQ 1", "Read "), 20, "{what}");
        assert_eq!(time_line.count("f", "CQ 1", "Read "), 20, "{what}");
        assert_eq!(time_line.count("C", "SQ 1", "SQ 1 in flight"), 20, "{what}");
        assert_eq!(time_line.count("C", "CQ 1", "SQ 1 in flight"), 20, "{what}");
        assert_eq!(time_line.count("X", "worker 0", "SQ 1 of controller 1"), 20, "{what}");
        assert!(time_line.count("X", "worker 0", "asleep") > 20, "{what}");
        let rings = time_line.count("X", "SQ 1 doorbell", "rang (MMIO)");
        if doorbells == "mmio" {
            assert_eq!(rings, 20, "{what}");
            // Some commands find the I/O thread awake, so there may be fewer than 20 wakeups.
            let woken = time_line.count("s", "SQ 1 doorbell", "wakes");
            assert!((1..=20).contains(&woken), "{what}: {woken}");
            assert_eq!(time_line.count("f", "worker 0", "wakes"), woken, "{what}");
            let found = time_line.count("i", "SQ 1 doorbell", "shadow doorbell moved");
            assert_eq!(found, 0, "{what}");
        } else {
            assert!(time_line.count("i", "SQ 1 doorbell", "EventIdx armed") > 1, "{what}");
            let found = time_line.count("i", "SQ 1 doorbell", "shadow doorbell moved");
            assert_eq!(found, 20, "{what}");
        }
        // The driver waits for the interrupts of this queue.
        let raised = time_line.count("X", "vector 1", "interrupt: CQ 1");
        assert!(raised >= 20, "{what}: {raised}");
        assert_eq!(time_line.count("f", "vector 1", "interrupt"), raised, "{what}");
    }
}

/// Without pauses between commands, many commands arrive while the I/O thread goes to sleep. The
/// thread finds them when it checks again after it has armed EventIdx.
#[test]
fn commands_found_after_arming_eventidx_are_in_the_time_line() {
    let mut server = Server::start(&["mem:4MiB"], &["--trace", "trace", "--poll", "never"]);
    reads(&server, 3000, || ());
    assert!(server.stop().success());
    let out = server.directory().join("picture.json");
    let options = ["-q", "--perfetto", out.to_str().unwrap()];
    assert_eq!(trace(&server.directory().join("trace"), &options), "");
    let time_line = read(&std::fs::read_to_string(&out).unwrap());
    assert_eq!(time_line.count("X", "SQ 1", "1 command submitted"), 3000);
    assert_eq!(time_line.count("i", "SQ 1 doorbell", "shadow doorbell moved"), 3000);
}

#[test]
fn every_excerpt_of_a_trace_converts() {
    let mut server = Server::start(&["mem:4MiB"], &["--trace", "trace", "--poll", "never"]);
    work(&server);
    assert!(server.stop().success());
    let file = server.directory().join("trace");
    // Each part of the trace results in a valid time line, with any record as its first one and
    // with any filter.
    for last in 1..120 {
        read(&trace(&file, &["--last", &last.to_string(), "--perfetto", "-"]));
    }
    for kind in ["wake", "command-seen", "completion-posted", "interrupt-raised", "mmio-write"] {
        read(&trace(&file, &["--kind", kind, "--perfetto", "-"]));
    }
    let none = read(&trace(&file, &["--queue", "63", "--perfetto", "-"]));
    assert!(none.events.is_empty());
}

#[test]
fn json_lines_have_all_records() {
    let mut server = Server::start(&["mem:4MiB"], &["--trace", "trace", "--poll", "never"]);
    work(&server);
    assert!(server.stop().success());
    let file = server.directory().join("trace");
    let text = trace(&file, &["--json"]);
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let people = trace(&file, &[]);
    assert!(people.contains(&format!("\n{} records in", lines.len())), "{}", lines.len());
    let part = |kind: &str, is_admin: bool| -> Vec<Value> {
        let is_of = |line: &&Value| {
            line["kind"] == kind && (line["sq"] == 0 || line["cq"] == 0) == is_admin
        };
        lines.iter().filter(is_of).cloned().collect()
    };
    let of = |kind: &str| part(kind, false);
    let seen: Vec<_> = of("command-seen").iter().map(|line| line["cid"].clone()).collect();
    let ended: Vec<_> = of("completion-posted").iter().map(|line| line["cid"].clone()).collect();
    assert!(seen.len() == 20 && seen == ended);
    let read = |line: &Value| (line["opcode"].as_u64(), line["sq"].as_u64()) == (Some(2), Some(1));
    assert!(of("command-seen").iter().all(read));
    assert!(of("completion-posted").iter().all(|line| line["status"] == 0 && line["cq"] == 1));
    assert!(lines.iter().all(|line| line["time_ns"].is_u64()));
    // In the admin queue, Identify Controller has a completion with the same command identifier.
    // The completion's time is not earlier than the command's.
    let commands = part("command-seen", true);
    let identify = commands.iter().find(|line| line["opcode"] == 6).unwrap();
    let posted = part("completion-posted", true);
    let completion = posted.iter().find(|line| line["cid"] == identify["cid"]).unwrap();
    assert_eq!((&completion["status"], &completion["sqid"]), (&0.into(), &0.into()));
    assert!(completion["time_ns"].as_u64() >= identify["time_ns"].as_u64());
}

#[test]
fn an_unwritable_trace_output_is_refused() {
    let mut server = Server::start(&["mem:4MiB"], &["--trace", "trace"]);
    assert!(server.stop().success());
    let file = server.directory().join("trace");
    let mut command = program();
    command.arg("trace").arg(&file).args(["--perfetto", "no/such/picture.json"]);
    let (status, _, errors) = finish(command);
    assert_eq!(status, Some(2), "{errors}");
    assert!(errors.contains("cannot write the time line to no/such/picture.json"), "{errors}");
}

/// Without `--trace`, tracing can be turned on and off at run time, in a sandbox, and after an
/// upgrade.
#[test]
fn tracing_is_turned_on_and_off_at_run_time() {
    let mut server = Server::start(&["mem:4MiB"], &["--supervisor", "--poll", "never"]);
    let file = server.directory().join("saved");
    let name = file.to_str().unwrap();
    // Number of completed reads in a trace.
    let completed = |file: &Path| {
        let lines = trace(file, &["--json", "--kind", "completion-posted"]);
        let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter(|line| line["cq"] == 1).count()
    };
    let save = || {
        let (status, printed, errors) = ctl(&server, &["trace", "save", name]);
        assert_eq!(status, Some(0), "{errors}");
        assert!(printed.contains(&format!("show it with `shadowbell trace {name}`")), "{printed}");
        completed(&file)
    };
    assert_eq!(ctl_json(&server, &["trace"]), json!({"on": false}));
    let (status, _, errors) = ctl(&server, &["trace", "save", name]);
    assert_eq!(status, Some(3), "{errors}");
    assert!(errors.contains("there is no doorbell trace"), "{errors}");
    assert!(!file.exists());
    work(&server);
    // Turning the trace on twice changes nothing.
    for records in ["2048", "4096"] {
        let on = ctl_json(&server, &["trace", "on", "--records", records]);
        assert_eq!((&on["on"], &on["records"]), (&json!(true), &json!(2048)), "{on}");
    }
    work(&server);
    assert_eq!(save(), 20);
    work(&server);
    assert_eq!(save(), 40);
    let (_, printed, _) = ctl(&server, &["trace"]);
    assert!(printed.starts_with("on: the last 2048 records per I/O thread"), "{printed}");
    // Turning the trace off keeps the records.
    for _ in 0..2 {
        assert_eq!(ctl_json(&server, &["trace", "off"])["on"], false);
    }
    work(&server);
    assert_eq!(save(), 40);
    // A second trace begins without records. After an upgrade, the next process continues the trace
    // with the same maximum number of records.
    assert_eq!(ctl_json(&server, &["trace", "on", "--records", "1024"])["on"], true);
    work(&server);
    assert_eq!(save(), 20);
    assert_eq!(ctl(&server, &["upgrade"]).0, Some(0));
    let after = ctl_json(&server, &["trace"]);
    assert_eq!((&after["on"], &after["records"]), (&json!(true), &json!(1024)), "{after}");
    work(&server);
    assert_eq!(save(), 20);
    // If tracing is off, it stays off in the next process.
    assert_eq!(ctl(&server, &["trace", "off"]).0, Some(0));
    assert_eq!(ctl(&server, &["upgrade"]).0, Some(0));
    assert_eq!(ctl_json(&server, &["trace"]), json!({"on": false}));
    // A number of records above the limit is refused.
    let (status, _, errors) = ctl(&server, &["trace", "on", "--records", "16777216"]);
    assert_eq!(status, Some(2), "{errors}");
    assert!(errors.contains("too large"), "{errors}");
    assert!(server.stop().success());
}

/// A trace into a file (`--trace`) can be saved and ended by `ctl`.
#[test]
fn a_trace_into_a_file_is_saved_and_ended() {
    let mut server = Server::start(&["mem:4MiB"], &["--trace", "trace", "--poll", "never"]);
    work(&server);
    let saved = server.directory().join("saved");
    let (status, _, errors) = ctl(&server, &["trace", "save", saved.to_str().unwrap()]);
    assert_eq!(status, Some(0), "{errors}");
    let posted = |file: &Path| trace(file, &["--json", "--kind", "completion-posted"]);
    let file = server.directory().join("trace");
    assert_eq!(posted(&saved), posted(&file));
    assert_eq!(ctl_json(&server, &["trace", "off"])["on"], false);
    work(&server);
    assert_eq!(posted(&saved), posted(&file));
    assert!(server.stop().success());
}
