//! Namespaces are added, resized and removed while a Linux guest reads and writes another
//! namespace.
//!
//! The suite measures the time from a change until the server notifies the guest, and the time
//! until the guest has updated its block device. The host takes all times. The server's trace
//! contains the completion of the Asynchronous Event Request, and the commands by which the guest
//! reacts to the event. The guest reports changes of its block device on a serial port.

use shadowbell_testing::wait::LIMIT;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use shadowbell_guest::{Guest, Kernel, RunDir};
use shadowbell_spec::opcode::AdminOpcode;

use super::dmesg;
use super::nvme_cli;
use super::setup::{Setup, finish, names};
use shadowbell_harness::Report;

const MAIN: u64 = 256 << 20;
const SMALL: u64 = 32 << 20;
const LARGE: u64 = 48 << 20;
/// Number of times that a namespace is added, resized and removed.
const ROUNDS: usize = 5;

/// Change that was requested through the control socket, and the times at which it was completed.
struct Change {
    what: &'static str,
    /// Time of the request.
    at: Instant,
    answered: Duration,
    /// Time from the request until the guest has reported the change.
    seen: Duration,
}

/// Times of a change that are in the server's trace, measured from the request.
struct EventTimes {
    /// Completion of the Asynchronous Event Request that reports the change.
    event: Duration,
    /// Completion of the last command by which the guest reacts to the event.
    reaction: Duration,
    /// Number of Get Log Page and Identify commands of the reaction.
    log_pages: usize,
    identifies: usize,
}

pub(crate) fn run(setup: &Setup, report: &mut Report, kernel: Kernel, run: &RunDir) -> Result<()> {
    let Some(program) = setup.shadowbell.clone() else {
        println!("   QEMU's own controller has no such calls");
        return Ok(());
    };
    let image = run.image("disk.img", MAIN)?;
    let (control, trace) = (run.socket("control"), run.file("serve.trace"));
    let [control_text, trace_text] = [&control, &trace].map(|path| path.display().to_string());
    // The sandbox allows access only to directories that the command line names.
    let images = image.parent().context("the image's directory")?.display().to_string();
    let options = ["--control-socket", &control_text, "--trace", &trace_text, "--allow", &images];
    let clocks = Clocks::now();
    let mut disk = setup.serve(run, "dut", &[image.display().to_string()], &options, None)?;
    let mut guest = setup.boot(run, kernel, vec![disk.device.clone()], |config| config.cpus = 2)?;
    let (controller, main) = names(&mut guest, 0)?;
    let added = format!("{controller}n2");
    let api = Api::new(control)?;

    let mut changes = Vec::new();
    report.check(
        "a namespace is added, resized and removed, five times, while fio verifies",
        |_| {
            guest.sh(&background_load(&main), LIMIT)?;
            let mut watch = SizePoll::start(&mut guest, run, &added)?;
            for round in 0..ROUNDS {
                let other = run.image(&format!("other{round}.img"), SMALL)?;
                let spec = json!({ "disk": other.display().to_string() });
                let was = count(&mut guest)?;
                changes.push(watch.expect("add", SMALL, || api.call("PUT", Some(&spec)))?);
                ensure!(count(&mut guest)? == was + 1, "nvme list does not have it");
                ensure!(bytes(&mut guest, &added)? == SMALL, "blockdev has another size");
                fs::File::options().write(true).open(&other)?.set_len(LARGE)?;
                let size = json!({ "size": "whole" });
                changes.push(watch.expect("resize", LARGE, || api.call("PATCH", Some(&size)))?);
                ensure!(bytes(&mut guest, &added)? == LARGE, "blockdev has another size");
                changes.push(watch.expect("remove", 0, || api.call("DELETE", None))?);
                ensure!(count(&mut guest)? == was, "nvme list still has it");
            }
            watch.stop(&mut guest)
        },
    );
    report.check("fio has no error", |_| {
        let wait = "touch /tmp/enough; for try in $(seq 600); do [ -e /tmp/fio.done ] && break; \
                    sleep 0.1; done; tail -n 20 /tmp/fio.out; exit $(cat /tmp/fio.done || echo 99)";
        guest.sh(wait, LIMIT).map(drop)
    });
    report.check("the kernel logs no warning", |_| dmesg::clean(&mut guest, 1));
    disk.check()?;
    report.check("each change causes one event without delay, and Linux reacts without delay", |_| {
        let records = Records::read(&program, &trace, &clocks)?;
        let event_times: Vec<EventTimes> = (0..changes.len())
            .map(|at| {
                let next = changes.get(at + 1).map(|change| change.at);
                let change = changes.get(at).context("no change")?;
                records.event_times(change, next).with_context(|| format!("{} {at}", change.what))
            })
            .collect::<Result<_>>()?;
        for what in ["add", "resize", "remove"] {
            let of = |time: &dyn Fn(&Change, &EventTimes) -> Duration| {
                let both = changes.iter().zip(&event_times).filter(|(change, _)| change.what == what);
                median_and_max(both.map(|(change, event_times)| time(change, event_times)).collect())
            };
            println!(
                "   {what}: event posted after {}, call answered after {}; Linux's last command {} \
                 after the event, its block device {} after the call",
                of(&|_, event_times| event_times.event),
                of(&|change, _| change.answered),
                of(&|_, event_times| event_times.reaction.saturating_sub(event_times.event)),
                of(&|change, _| change.seen),
            );
        }
        for (change, event_times) in changes.iter().zip(&event_times) {
            let what = change.what;
            ensure!(event_times.event < LIMIT, "{what}: the event came after {:?}", event_times.event);
            ensure!(event_times.log_pages >= 1, "{what}: Linux has not read the log page");
            ensure!(event_times.identifies >= 1, "{what}: Linux has not identified anything");
        }
        Ok(())
    });
    finish(report, guest, disk);
    Ok(())
}

/// Shell command that reads and writes the namespace that is not changed, until the file
/// /tmp/enough exists.
fn background_load(main: &str) -> String {
    format!(
        "(until [ -e /tmp/enough ]; do \
            fio --name=beside --filename=/dev/{main} --rw=randrw --bs=4k --iodepth=4 --size=8m \
                --direct=1 --ioengine=libaio --verify=crc32c --verify_state_save=0 \
                >/tmp/fio.out 2>&1 || break; \
         done; [ -e /tmp/enough ]; echo $? >/tmp/fio.done) &"
    )
}

/// Number of namespaces in the output of `nvme list`.
fn count(guest: &mut Guest) -> Result<usize> {
    let list = nvme_cli::json(guest, "list")?;
    Ok(list.get("Devices").and_then(Value::as_array).context("no devices")?.len())
}

fn bytes(guest: &mut Guest, disk: &str) -> Result<u64> {
    let text = guest.sh(&format!("blockdev --getsize64 /dev/{disk}"), LIMIT)?;
    text.trim().parse().context("a size")
}

/// Formats times as `MEDIAN (at most MAXIMUM)`.
fn median_and_max(mut times: Vec<Duration>) -> String {
    times.sort();
    let ms = |time: Option<&Duration>| time.map_or(0.0, |time| time.as_secs_f64() * 1e3);
    format!("{:.1} ms (at most {:.1})", ms(times.get(times.len() / 2)), ms(times.last()))
}

/// Namespace 2 of the controller, and its disk, on the server's control socket.
struct Api {
    socket: PathBuf,
    namespace: String,
    disk: String,
}

impl Api {
    fn new(socket: PathBuf) -> Result<Self> {
        let list = request(&socket, "GET", "/v1/controllers", None)?;
        let list: Value = serde_json::from_str(&list)?;
        let id = list.pointer("/0/id").and_then(Value::as_str).context("no controller")?;
        let id: String = id.bytes().map(|byte| format!("%{byte:02X}")).collect();
        let disk = format!("/v1/disks/{id}%2F2");
        Ok(Self { socket, namespace: format!("/v1/controllers/{id}/namespaces/2"), disk })
    }

    /// Sends a request. A change of the size (`PATCH`) is sent for the disk, all other requests for
    /// the namespace.
    fn call(&self, method: &str, body: Option<&Value>) -> Result<()> {
        let path = if method == "PATCH" { &self.disk } else { &self.namespace };
        let path = format!("{path}?force=true");
        request(&self.socket, method, &path, body).map(drop)
    }
}

fn request(socket: &Path, method: &str, path: &str, body: Option<&Value>) -> Result<String> {
    let body = body.map(Value::to_string).unwrap_or_default();
    let mut stream = UnixStream::connect(socket).context("the control socket")?;
    stream.set_read_timeout(Some(LIMIT))?;
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: guest\r\nConnection: close\r\nContent-Length: {}\r\n\
         Content-Type: application/json\r\n\r\n{body}",
        body.len()
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").context("no answer")?;
    let fine = head.split(' ').nth(1).is_some_and(|status| status.starts_with('2'));
    ensure!(fine, "{method} {path}: {answer}");
    Ok(body.to_owned())
}

/// A loop in the guest that polls the size of a disk and writes each new number of sectors to the
/// serial port.
struct SizePoll {
    log: PathBuf,
    /// Number of log lines that were already read.
    lines_read: usize,
}

impl SizePoll {
    fn start(guest: &mut Guest, run: &RunDir, disk: &str) -> Result<Self> {
        let size = format!("/sys/block/{disk}/size");
        // The loop uses only built-in commands of the shell, because starting a process is slow in
        // the guest.
        guest.sh(
            &format!(
                "(before=; until [ -e /tmp/unwatch ]; do now=0; \
                    [ -e {size} ] && read now 2>/dev/null <{size}; \
                    [ \"$now\" = \"$before\" ] || {{ before=$now; echo \"sees $now\"; }}; \
                 done >/dev/ttyS2 2>/dev/null) &"
            ),
            LIMIT,
        )?;
        let mut watch = Self { log: run.file("ack.log"), lines_read: 0 };
        watch.wait(0)?;
        Ok(watch)
    }

    /// Makes a change that sets the size of the disk to `bytes` bytes, and waits until the guest
    /// reports this size.
    fn expect(
        &mut self,
        what: &'static str,
        bytes: u64,
        change: impl FnOnce() -> Result<()>,
    ) -> Result<Change> {
        let at = Instant::now();
        change()?;
        let answered = at.elapsed();
        self.wait(bytes / 512).with_context(|| format!("after {what}"))?;
        let seen = at.elapsed();
        // In this time, the guest completes its reaction, which may continue after the report.
        sleep(Duration::from_millis(300));
        Ok(Change { what, at, answered, seen })
    }

    fn wait(&mut self, sectors: u64) -> Result<()> {
        let (words, deadline) = (format!("sees {sectors}"), Instant::now() + LIMIT);
        loop {
            let log =
                String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned();
            let lines: Vec<_> = log.lines().collect();
            // The last line may be incomplete.
            let whole = lines.len() - usize::from(!log.ends_with('\n') && !log.is_empty());
            let new = lines.get(self.lines_read..whole).unwrap_or_default();
            if let Some(at) = new.iter().position(|line| line.trim() == words) {
                self.lines_read += at + 1;
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!("the guest did not report {words}; it reported {new:?}");
            }
            // This sleep is short, because it adds to the time that is measured.
            sleep(Duration::from_micros(200));
        }
    }

    fn stop(self, guest: &mut Guest) -> Result<()> {
        guest.sh("touch /tmp/unwatch", LIMIT).map(drop)
    }
}

/// One moment on two clocks: the monotonic clock and the wall clock. The wall clock may be adjusted
/// by some milliseconds during a run, so durations are computed with the monotonic clock.
struct Clocks {
    day: SystemTime,
    steady: Instant,
}

impl Clocks {
    fn now() -> Self {
        Self { day: SystemTime::now(), steady: Instant::now() }
    }

    /// Converts a time of the wall clock to the monotonic clock. The time must be shortly after the
    /// moment of `self`.
    fn steady(&self, day: SystemTime) -> Instant {
        self.steady + day.duration_since(self.day).unwrap_or_default()
    }
}

/// Trace record of the admin queue.
#[derive(Debug, Clone, Copy)]
struct Admin {
    at: Instant,
    cid: u64,
    /// Opcode of a command; `None` for a completion.
    opcode: Option<u64>,
}

/// Records of the admin queue in the server's trace.
struct Records(Vec<Admin>);

impl Records {
    fn read(program: &Path, trace: &Path, clocks: &Clocks) -> Result<Self> {
        // The header has the start time of the trace, in nanoseconds since 1970, at byte 24.
        let mut header = [0; 32];
        fs::File::open(trace)?.read_exact(&mut header).context("the trace's header")?;
        let began = header.last_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        let began = clocks.steady(SystemTime::UNIX_EPOCH + Duration::from_nanos(began));
        let kinds = "command-seen,completion-posted";
        let output = Command::new(program)
            .arg("trace")
            .arg(trace)
            .args(["--json", "--queue", "0", "--kind", kinds])
            .output()?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8(output.stdout)?;
        let record = |line: &str| -> Result<Admin> {
            let line: Value = serde_json::from_str(line)?;
            let number = |name: &str| line.get(name).and_then(Value::as_u64);
            Ok(Admin {
                at: began + Duration::from_nanos(number("time_ns").context("time_ns")?),
                cid: number("cid").context("cid")?,
                opcode: number("opcode"),
            })
        };
        let records: Vec<_> = text.lines().map(record).collect::<Result<_>>()?;
        ensure!(!records.is_empty(), "no admin command is in the trace");
        Ok(Self(records))
    }

    /// Times of a change, from the trace records between the change and `next`, the time of the
    /// next change.
    fn event_times(&self, change: &Change, next: Option<Instant>) -> Result<EventTimes> {
        let since = |at: Instant| at.saturating_duration_since(change.at);
        let is = |record: &Admin, opcode: AdminOpcode| record.opcode == Some(opcode as u64);
        let mut asked = Vec::new();
        let mut events = Vec::new();
        let mut event_times = EventTimes {
            event: Duration::ZERO,
            reaction: Duration::ZERO,
            log_pages: 0,
            identifies: 0,
        };
        // Commands of the reaction that are in flight.
        let mut open = Vec::new();
        for record in &self.0 {
            if next.is_some_and(|next| record.at >= next) {
                break;
            }
            if is(record, AdminOpcode::AsyncEventRequest) {
                asked.push(record.cid);
            } else if record.opcode.is_none()
                && let Some(at) = asked.iter().position(|cid| *cid == record.cid)
            {
                asked.remove(at);
                if record.at >= change.at {
                    events.push(since(record.at));
                }
            } else if !events.is_empty() {
                let page = is(record, AdminOpcode::GetLogPage);
                let identify = is(record, AdminOpcode::Identify);
                event_times.log_pages += usize::from(page);
                event_times.identifies += usize::from(identify);
                if page || identify {
                    open.push(record.cid);
                } else if let Some(at) = open.iter().position(|cid| *cid == record.cid)
                    && record.opcode.is_none()
                {
                    open.remove(at);
                    // Commands more than 50 ms after the guest's report belong to `nvme list` of
                    // the test, and not to the guest's reaction.
                    if since(record.at) <= change.seen + Duration::from_millis(50) {
                        event_times.reaction = since(record.at);
                    }
                }
            }
        }
        let [event] = events[..] else {
            let around = self.0.iter().filter_map(|record| {
                let before = change.at.saturating_duration_since(record.at).as_secs_f64();
                let after = since(record.at).as_secs_f64() - before;
                let Admin { cid, opcode, .. } = record;
                (-1.0..2.0).contains(&after).then(|| format!("{after:.6}: {cid} {opcode:?}"))
            });
            let around: Vec<_> = around.collect();
            bail!("{} events, not one: {events:?}; around it: {around:#?}", events.len())
        };
        event_times.event = event;
        Ok(event_times)
    }
}
