//! Output of a trace in Chrome's trace event format, which Perfetto's viewer and
//! `chrome://tracing` open.
//!
//! An I/O thread is a thread of the process "workers". A controller is a process with two tracks
//! for each of its queues (commands and doorbell) and a track for each interrupt vector. Arrows
//! connect a command to its completion, and completions to their interrupt. If a doorbell write
//! ended the sleep of an I/O thread, an arrow connects the write to the end of the sleep.
//!
//! Requirements of the format: slices of a track do not overlap, and an arrow ends at the slice of
//! its track that began last. Viewers process events with equal times in the order of the file.

use serde::Serialize;
use serde_json::{Map, Value, json};
use shadowbell_controller::trace::{Kind, Queue, Record};
use shadowbell_spec::opcode::{AdminOpcode, NvmOpcode};
use std::collections::{BTreeMap, HashMap};
use std::io::{self, Write};

/// Process ID of the I/O threads and the control plane.
const WORKERS: u32 = 1;
/// Thread ID of the control plane in the process [`WORKERS`]; the I/O threads have the IDs after
/// it.
const CONTROL: u32 = 1;
/// Track numbers per controller: the thread IDs of controller N begin at N times this.
const TRACKS: u32 = 4096;
/// Offset of the interrupt vectors among the track numbers of a controller.
const VECTORS: u32 = 1024;

/// Event, with the field names of the format.
#[derive(Debug, Serialize)]
struct Event {
    name: String,
    cat: &'static str,
    ph: char,
    /// Time in microseconds.
    ts: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    dur: Option<f64>,
    pid: u32,
    tid: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u64>,
    /// Binding point: `e` binds the end of an arrow to the enclosing slice. Without it, the viewer
    /// uses the next slice.
    #[serde(skip_serializing_if = "Option::is_none")]
    bp: Option<char>,
    /// Scope of an instant event: `t` is its track.
    #[serde(skip_serializing_if = "Option::is_none")]
    s: Option<char>,
    #[serde(skip_serializing_if = "Map::is_empty")]
    args: Map<String, Value>,
    /// Sort key: time in nanoseconds, then rank. At equal times, slices precede the arrows that
    /// bind to them.
    #[serde(skip)]
    order: (u64, u8),
}

/// Track of the time line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Track {
    pid: u32,
    tid: u32,
}

impl Track {
    fn worker(worker: Option<u16>) -> Self {
        let tid = worker.map_or(CONTROL, |worker| CONTROL + 1 + u32::from(worker));
        Self { pid: WORKERS, tid }
    }

    fn of(controller: u16, number: u32) -> Self {
        let controller = u32::from(controller);
        Self { pid: WORKERS + controller, tid: controller * TRACKS + number }
    }

    fn queue(controller: u16, queue: Queue) -> Self {
        let number = match queue {
            Queue::Submission(qid) => u32::from(qid) * 4 + 1,
            Queue::Completion(qid) => u32::from(qid) * 4 + 2,
        };
        Self::of(controller, number)
    }

    fn doorbell(controller: u16, queue: Queue) -> Self {
        let number = match queue {
            Queue::Submission(qid) => u32::from(qid) * 4,
            Queue::Completion(qid) => u32::from(qid) * 4 + 3,
        };
        Self::of(controller, number)
    }

    fn vector(controller: u16, vector: u16) -> Self {
        Self::of(controller, VECTORS + u32::from(vector))
    }
}

/// Consecutive records of an I/O thread that are all of one kind (command seen, or completion
/// posted) and of one queue. Drawn as one slice.
struct Run {
    worker: Option<u16>,
    track: Track,
    what: &'static str,
    first: u64,
    last: u64,
    count: u64,
    /// Commands that this run completes, with the record of their submission.
    ended: Vec<(Command, FetchedCommand)>,
    /// Number of commands in flight after the run, per submission queue.
    in_flight: BTreeMap<u16, usize>,
}

/// Command: controller, submission queue and command identifier.
type Command = (u16, u16, u16);

/// Time and opcode of a command that was fetched.
#[derive(Clone, Copy)]
struct FetchedCommand {
    at: u64,
    opcode: u32,
}

#[derive(Default)]
struct TimeLine {
    events: Vec<Event>,
    tracks: BTreeMap<Track, String>,
    arrows: u64,
    /// Current run of each queue.
    runs: HashMap<(u16, Queue), Run>,
    /// Commands in flight.
    commands: HashMap<Command, FetchedCommand>,
    in_flight: HashMap<(u16, u16), usize>,
    /// End of the last slice of each track.
    ends: HashMap<Track, u64>,
    /// Beginning of the current sleep of each sleeping I/O thread.
    sleeping_since: HashMap<u16, u64>,
    /// First doorbell write since the current sleep of each I/O thread began: its time and its
    /// track.
    first_ring: HashMap<u16, (u64, Track)>,
    /// I/O thread of each queue.
    owners: HashMap<(u16, Queue), u16>,
    /// Time at which the first command or new shadow value was seen after the last fetch from the
    /// queue.
    first_seen: HashMap<(u16, Queue), u64>,
    /// Interrupt vector of each completion queue.
    vectors: HashMap<(u16, Queue), u16>,
    /// Time of the last completion of each queue: the start of the arrow to the interrupt.
    posted: HashMap<(u16, Queue), u64>,
}

/// Writes the time line of `records`. They must be sorted by time.
///
/// # Errors
/// `out` cannot be written.
pub(super) fn write(records: &[Record], out: &mut impl Write) -> io::Result<()> {
    let mut time_line = TimeLine::default();
    for record in records {
        time_line.draw(record);
    }
    let end = records.last().map_or(0, |record| record.time_ns);
    let TimeLine { mut events, tracks, .. } = time_line.finish(end);
    events.sort_by_key(|event| event.order);
    out.write_all(b"{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n")?;
    let mut first = true;
    let named = tracks.iter().flat_map(|(track, name)| names(*track, name));
    let events = events.iter().map(json_line);
    for line in named.map(Ok).chain(events) {
        if !std::mem::take(&mut first) {
            out.write_all(b",\n")?;
        }
        out.write_all(line?.as_bytes())?;
    }
    out.write_all(b"\n]}\n")
}

fn json_line(event: &Event) -> io::Result<String> {
    Ok(serde_json::to_string(event)?)
}

/// Metadata events with names and sort positions of a track and its process.
fn names(track: Track, name: &str) -> [String; 4] {
    let Track { pid, tid } = track;
    let process = match pid {
        WORKERS => "workers".to_owned(),
        pid => format!("controller {}", pid - WORKERS),
    };
    let meta = |name: &str, args: Value| {
        json!({"name": name, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args}).to_string()
    };
    [
        meta("process_name", json!({ "name": process })),
        meta("process_sort_index", json!({ "sort_index": pid })),
        meta("thread_name", json!({ "name": name })),
        meta("thread_sort_index", json!({ "sort_index": tid })),
    ]
}

fn microseconds(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// Fields of a record, besides its kind.
fn args(record: &Record) -> Map<String, Value> {
    record.fields().into_iter().map(|(name, value)| (name.to_owned(), value.into())).collect()
}

fn opcode_name(qid: u16, opcode: u32) -> String {
    let opcode = u8::try_from(opcode).unwrap_or(u8::MAX);
    let known = match qid {
        0 => AdminOpcode::try_from(opcode).ok().map(|opcode| format!("{opcode:?}")),
        _ => NvmOpcode::try_from(opcode).ok().map(|opcode| format!("{opcode:?}")),
    };
    known.unwrap_or_else(|| format!("opcode {opcode:#04x}"))
}

impl TimeLine {
    fn event(&mut self, track: Track, at: u64, ph: char, name: impl Into<String>) -> &mut Event {
        let rank = match ph {
            'X' => 0,
            's' | 'f' => 1,
            _ => 2,
        };
        self.events.push(Event {
            name: name.into(),
            cat: "shadowbell",
            ph,
            ts: microseconds(at),
            dur: None,
            pid: track.pid,
            tid: track.tid,
            id: None,
            bp: None,
            s: None,
            args: Map::new(),
            order: (at, rank),
        });
        let last = self.events.len() - 1;
        &mut self.events[last]
    }

    /// Adds a slice and returns its start and end. The start is delayed to the end of the track's
    /// last slice, because slices must not overlap.
    fn slice(
        &mut self,
        track: Track,
        (start, end): (u64, u64),
        name: impl Into<String>,
        args: Map<String, Value>,
    ) -> (u64, u64) {
        let start = start.max(self.ends.get(&track).copied().unwrap_or(0));
        let end = end.max(start);
        self.ends.insert(track, end);
        let event = self.event(track, start, 'X', name);
        event.dur = Some(microseconds(end - start));
        event.args = args;
        (start, end)
    }

    fn instant(
        &mut self,
        track: Track,
        at: u64,
        name: impl Into<String>,
        args: Map<String, Value>,
    ) {
        let event = self.event(track, at, 'i', name);
        event.s = Some('t');
        event.args = args;
    }

    fn arrow(&mut self, name: &str, from: (Track, u64), to: (Track, u64)) {
        self.arrows += 1;
        let id = Some(self.arrows);
        self.event(from.0, from.1, 's', name).id = id;
        let end = self.event(to.0, to.1, 'f', name);
        (end.id, end.bp) = (id, Some('e'));
    }

    fn track(&mut self, track: Track, name: impl FnOnce() -> String) -> Track {
        self.tracks.entry(track).or_insert_with(name);
        track
    }

    fn worker(&mut self, worker: Option<u16>) -> Track {
        self.track(Track::worker(worker), || match worker {
            Some(worker) => format!("worker {worker}"),
            None => "control".to_owned(),
        })
    }

    fn doorbell(&mut self, controller: u16, queue: Queue) -> Track {
        self.track(Track::doorbell(controller, queue), || format!("{queue} doorbell"))
    }

    fn draw(&mut self, record: &Record) {
        let Record { time_ns: at, kind, worker, controller, .. } = *record;
        let queue = record.queue().map(|queue| (controller, queue));
        self.end_runs(worker, queue.filter(|_| is_of_run(kind)));
        match (kind, queue) {
            (Kind::CommandSeen, Some(queue)) => self.seen(record, queue),
            (Kind::CompletionPosted, Some(queue)) => self.completed(record, queue),
            (Kind::Batch, Some(queue)) => self.fetched(record, queue),
            (Kind::InterruptRaised, Some(queue)) => {
                let vector = record.extra as u16;
                self.vectors.insert(queue, vector);
                let track = self.vector(controller, vector);
                let name = format!("interrupt: {}", queue.1);
                let (start, _) = self.slice(track, (at, at), name, args(record));
                if let Some(posted) = self.posted.remove(&queue) {
                    let from = Track::queue(controller, queue.1);
                    self.arrow("interrupt", (from, posted), (track, start));
                }
            }
            (Kind::InterruptSuppressed, Some(queue)) => {
                let track = match self.vectors.get(&queue) {
                    Some(vector) => self.vector(controller, *vector),
                    None => self.doorbell(controller, queue.1),
                };
                self.instant(track, at, format!("held back: {}", queue.1), args(record));
            }
            (Kind::MmioWrite, Some(queue)) => {
                let track = self.doorbell(controller, queue.1);
                let (start, _) = self.slice(track, (at, at), "rang (MMIO)", args(record));
                if let Some(owner) = self.owners.get(&queue).copied()
                    && self.sleeping_since.contains_key(&owner)
                {
                    self.first_ring.entry(owner).or_insert((start, track));
                }
            }
            (_, Some(queue)) => {
                if kind == Kind::QueueCreated && matches!(queue.1, Queue::Completion(_)) {
                    self.vectors.insert(queue, record.extra as u16);
                }
                if kind == Kind::ShadowNew {
                    self.first_seen.entry(queue).or_insert(at);
                }
                let track = self.doorbell(controller, queue.1);
                self.instant(track, at, kind.name(), args(record));
            }
            (Kind::Sleep, None) => {
                if let Some(worker) = worker {
                    self.sleeping_since.insert(worker, at);
                }
            }
            (Kind::Wake, None) => self.woke(record),
            (kind, None) => {
                let track = self.worker(worker);
                let name = match controller {
                    0 => kind.name().to_owned(),
                    controller => format!("controller {controller}: {}", kind.name()),
                };
                self.instant(track, at, name, args(record));
            }
        }
    }

    fn vector(&mut self, controller: u16, vector: u16) -> Track {
        self.track(Track::vector(controller, vector), || format!("vector {vector}"))
    }

    fn seen(&mut self, record: &Record, queue: (u16, Queue)) {
        let Queue::Submission(qid) = queue.1 else { return };
        let (at, controller) = (record.time_ns, record.controller);
        self.first_seen.entry(queue).or_insert(at);
        let command = (controller, qid, record.value as u16);
        let before = self.commands.insert(command, FetchedCommand { at, opcode: record.extra });
        let in_flight = self.in_flight.entry((controller, qid)).or_default();
        // If the identifier was in flight already, the host reused it too early or the queue was
        // recreated. It is counted once.
        *in_flight += usize::from(before.is_none());
        let in_flight = *in_flight;
        self.run(record, queue, "submitted").in_flight.insert(qid, in_flight);
    }

    fn completed(&mut self, record: &Record, queue: (u16, Queue)) {
        let (qid, cid) = ((record.value >> 16) as u16, record.value as u16);
        let command = (record.controller, qid, cid);
        let seen = self.commands.remove(&command);
        let in_flight = self.in_flight.entry((record.controller, qid)).or_default();
        *in_flight = in_flight.saturating_sub(usize::from(seen.is_some()));
        let in_flight = *in_flight;
        let run = self.run(record, queue, "completed");
        run.in_flight.insert(qid, in_flight);
        run.ended.extend(seen.map(|seen| (command, seen)));
    }

    /// Adds a record to the current run of its queue, or begins a run.
    fn run(&mut self, record: &Record, queue: (u16, Queue), what: &'static str) -> &mut Run {
        let at = record.time_ns;
        let track = self.track(Track::queue(queue.0, queue.1), || queue.1.to_string());
        let run = self.runs.entry(queue).or_insert(Run {
            worker: record.worker,
            track,
            what,
            first: at,
            last: at,
            count: 0,
            ended: Vec::new(),
            in_flight: BTreeMap::new(),
        });
        (run.last, run.count) = (at, run.count + 1);
        run
    }

    /// Ends the runs of the I/O thread `worker` at all queues except `but`, the queue of the
    /// current record.
    fn end_runs(&mut self, worker: Option<u16>, but: Option<(u16, Queue)>) {
        let over = |(queue, run): (&(u16, Queue), &Run)| {
            (run.worker == worker && Some(*queue) != but).then_some(*queue)
        };
        let over: Vec<_> = self.runs.iter().filter_map(over).collect();
        for queue in over {
            if let Some(run) = self.runs.remove(&queue) {
                self.end_run(queue, run);
            }
        }
    }

    fn end_run(&mut self, (controller, queue): (u16, Queue), run: Run) {
        let Run { track, what, first, last, count, ended, in_flight, .. } = run;
        let commands = if count == 1 { "command" } else { "commands" };
        let name = format!("{count} {commands} {what}");
        let (start, end) = self.slice(track, (first, last), name, Map::new());
        for ((controller, qid, cid), seen) in ended {
            let from = Track::queue(controller, Queue::Submission(qid));
            let name = format!("{} {cid}", opcode_name(qid, seen.opcode));
            self.arrow(&name, (from, seen.at), (track, end));
        }
        let at = match queue {
            Queue::Submission(_) => start,
            Queue::Completion(_) => {
                self.posted.insert((controller, queue), end);
                end
            }
        };
        for (qid, commands) in in_flight {
            let event = self.event(track, at, 'C', format!("SQ {qid} in flight"));
            event.args.insert("commands".to_owned(), commands.into());
        }
    }

    fn fetched(&mut self, record: &Record, queue: (u16, Queue)) {
        if let Some(worker) = record.worker {
            self.owners.insert(queue, worker);
        }
        let track = self.worker(record.worker);
        let began = self.first_seen.remove(&queue).unwrap_or(record.time_ns);
        let (controller, queue) = queue;
        let name = format!("{queue} of controller {controller}: {} fetched", record.extra);
        self.slice(track, (began, record.time_ns), name, args(record));
    }

    fn woke(&mut self, record: &Record) {
        let (Some(worker), at) = (record.worker, record.time_ns) else { return };
        let slept = u64::from(record.value) * 1000;
        let since = self.sleeping_since.remove(&worker).unwrap_or(at.saturating_sub(slept));
        let track = self.worker(Some(worker));
        self.slice(track, (since, at), "asleep", args(record));
        if let Some((first_ring, doorbell)) = self.first_ring.remove(&worker) {
            let (woke, _) = self.slice(track, (at, at), "wake", Map::new());
            self.arrow("wakes", (doorbell, first_ring), (track, woke));
        }
    }

    /// Extends unfinished runs and sleeps to the end of the trace.
    fn finish(mut self, end: u64) -> Self {
        let runs: Vec<_> = self.runs.drain().collect();
        for (queue, run) in runs {
            self.end_run(queue, run);
        }
        let sleeping_since: Vec<_> = self.sleeping_since.drain().collect();
        for (worker, since) in sleeping_since {
            let track = self.worker(Some(worker));
            self.slice(track, (since, end), "asleep", Map::new());
        }
        self
    }
}

/// True for kinds whose consecutive records are combined into one slice.
fn is_of_run(kind: Kind) -> bool {
    matches!(kind, Kind::CommandSeen | Kind::CompletionPosted)
}
