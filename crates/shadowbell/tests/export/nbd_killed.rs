//! NBD clients that reconnect, and an export that is killed.

use crate::Export;
use crate::killed::{Image, Service, kills_of_each};
use rustix::process::{Pid, Signal, kill_process};
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::programs::can_run;
use shadowbell_testing::wait::until;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const MIB: u64 = 1 << 20;
/// Arbitrary times between kills, in milliseconds.
const KILL_DELAYS: [u64; 6] = [60, 5, 31, 120, 12, 77];

/// A verifying load through the NBD export.
struct Load(ProcessGroup);

impl Load {
    fn start(socket: &Path) -> Self {
        let disk = format!("local:nbd+unix:///?socket={}", socket.display());
        let mut command = Command::new(env!("CARGO_BIN_EXE_shadowbell"));
        command.args([
            "verify",
            &disk,
            "--runtime",
            "3600",
            "--iodepth",
            "32",
            "--json",
            "--force",
        ]);
        command.args(["--timeout", "300"]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self(ProcessGroup::spawn(&mut command).unwrap())
    }

    /// Ends the load, and expects no error.
    fn assert_no_loss(self) {
        self.0.signal(Signal::INT);
        let output = self.0.output();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        let text = String::from_utf8(output.stdout).unwrap();
        let line = text.lines().last().unwrap_or_default();
        let report: serde_json::Value = serde_json::from_str(line).expect(&errors);
        let row = &report["rows"][0];
        assert!(row["commands"].as_u64() > Some(0), "{row}");
        for key in ["verify_errors", "failed"] {
            assert_eq!(row[key], 0, "{key}: {row}");
        }
    }
}

fn kill(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid as i32).unwrap(), signal).unwrap();
}

#[test]
fn a_load_over_nbd_survives_kills_of_the_export() {
    let kills = kills_of_each(Image::all().len(), KILL_DELAYS.len());
    for image in Image::all() {
        let nbd = ["--nbd", "unix:DIR/nbd"];
        let mut service = Service::start_on(*image, 16 * MIB, &nbd, &[]);
        let load = Load::start(&service.path("nbd"));
        // The load runs for a while before the first kill.
        std::thread::sleep(Duration::from_millis(300));
        for moment in KILL_DELAYS.into_iter().cycle().take(kills) {
            // The kill comes at an arbitrary moment.
            std::thread::sleep(Duration::from_millis(moment));
            service.kill();
            service.restart(&[]);
            // In this time, the load usually reconnects.
            std::thread::sleep(Duration::from_millis(200));
        }
        load.assert_no_loss();
        let directory = service.stop();
        image.content(directory.path());
    }
}

/// The disk of the export is a namespace of a supervised server whose process is killed. The driver
/// of the export recovers without an error.
#[test]
fn an_export_survives_kills_of_its_supervised_server() {
    let directory = tempfile::tempdir().unwrap();
    let (image, socket) = (directory.path().join("disk.img"), directory.path().join("vm.sock"));
    File::create(&image).unwrap().set_len(16 * MIB).unwrap();
    let mut supervisor = Command::new(env!("CARGO_BIN_EXE_shadowbell"));
    supervisor.args(["serve", "--supervisor", "-q"]).arg(&image).arg("--socket").arg(&socket);
    let mut supervisor = ProcessGroup::spawn(&mut supervisor).unwrap();
    let pid = supervisor.id();
    let worker = || {
        let children = format!("/proc/{pid}/task/{pid}/children");
        let children = std::fs::read_to_string(children).unwrap();
        children.split_whitespace().next().map(|pid| pid.parse::<u32>().unwrap())
    };
    until("a server", || UnixStream::connect(&socket).is_ok());
    let target = format!("vfio-user:{}", socket.display());
    let export = Export::start(&[&target, "--nbd", "unix:DIR/nbd"]);
    let load = Load::start(&export.path("nbd"));
    // The load runs for a while before the first kill.
    std::thread::sleep(Duration::from_millis(300));
    for moment in KILL_DELAYS {
        // The time is arbitrary, but at least 100 ms, so that the supervisor does not detect a
        // crash loop.
        std::thread::sleep(Duration::from_millis(100 + moment));
        let before = worker().unwrap();
        kill(before, Signal::KILL);
        until("another worker", || worker().is_some_and(|now| now != before));
    }
    load.assert_no_loss();
    export.stop();
    supervisor.signal(Signal::TERM);
    assert!(supervisor.wait().success());
}

/// QEMU's NBD client, with requests in flight that it resubmits after a reconnect.
#[test]
fn qemus_nbd_client_survives_kills_of_the_export() {
    /// Number of rounds of writes between two kills.
    const ROUNDS: u64 = 10;
    const AT_ONCE: u64 = 8;
    const LEN: u64 = 64 << 10;
    if !can_run("qemu-io") {
        return;
    }
    let mut service = Service::start(16 * MIB, &["--nbd", "unix:DIR/nbd"], &[]);
    let path = service.path("nbd");
    let disk =
        format!("driver=nbd,server.type=unix,server.path={},reconnect-delay=300", path.display());
    let mut client = Command::new("qemu-io");
    client.args(["--image-opts", &disk]);
    client.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut client = ProcessGroup::spawn(&mut client).unwrap();
    let mut input = client.stdin.take().unwrap();
    let output = std::thread::spawn(move || client.output());
    let byte = |n: u64| (n % 251 + 1) as u8;
    let place = |n: u64| n % (16 * MIB / LEN) * LEN;
    let image = File::open(service.path("disk.img")).unwrap();
    for (part, moment) in (0..).zip(KILL_DELAYS) {
        let rounds = part * ROUNDS..(part + 1) * ROUNDS;
        for round in rounds.clone() {
            let each = round * AT_ONCE..(round + 1) * AT_ONCE;
            let writes =
                each.clone().map(|n| format!("aio_write -P {} {} {LEN}\n", byte(n), place(n)));
            let reads = each.map(|n| format!("read -P {} {} {LEN}\n", byte(n), place(n)));
            let mut script: String = writes.collect();
            script += "aio_flush\nflush\n";
            script.extend(reads);
            // An error is ignored here: if the client has ended, its output contains the reason.
            let _ = input.write_all(script.as_bytes());
        }
        // Waits until the client is in the middle of the writes of this script.
        let first = (rounds.start + 2) * AT_ONCE;
        until("the first writes", || {
            let mut found = [0];
            image.read_exact_at(&mut found, place(first)).unwrap();
            found == [byte(first)] || output.is_finished()
        });
        // The kill comes at an arbitrary moment.
        std::thread::sleep(Duration::from_millis(moment / 4));
        service.kill();
        service.restart(&[]);
    }
    let _ = input.write_all(b"quit\n");
    drop(input);
    let output = output.join().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    let all = KILL_DELAYS.len() as u64 * ROUNDS * AT_ONCE;
    let count = |words: &str| said.matches(words).count() as u64;
    assert!(!said.contains("failed") && errors.is_empty(), "{said}{errors}");
    assert_eq!(count(&format!("wrote {LEN}/{LEN}")), all, "{said}");
    assert_eq!(count(&format!("read {LEN}/{LEN}")), all, "{said}");
    // Flushed data are in the image.
    let directory = service.stop();
    let image = std::fs::read(directory.path().join("disk.img")).unwrap();
    for n in all - 16 * MIB / LEN..all {
        let at = place(n) as usize;
        assert!(image[at..at + LEN as usize].iter().all(|found| *found == byte(n)), "write {n}");
    }
}
