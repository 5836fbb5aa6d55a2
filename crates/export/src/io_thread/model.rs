//! Model of the wakeups of an event loop: the code of the loop and of the disk's queue, with every
//! order of requests and completions.
//!
//! The disk of the model completes requests at any point at which a real disk can: between two
//! calls of its queue, within them, and while the thread sleeps. The model executes every sequence
//! of these choices. A wakeup is lost if the thread sleeps although requests are unfinished, and
//! nothing can wake it: its descriptor is not readable, no request is in flight at the disk, and no
//! further request can arrive. Each [`Defect`] violates one rule of the protocol (see
//! `shadowbell_block`, module `engine`), and must cause lost wakeups.

use super::IoThread;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shadowbell_block::{BlockDevice, BlockOptions};
use shadowbell_disk::{Disk, DiskError, DiskInfo, Queue, Request, Submitted};
use shadowbell_memory::{EventFd, Segments};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

/// Violation of a rule of the wakeup protocol, to show that the model detects it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Defect {
    /// The thread sleeps although it has submitted a request since the last `run_once`.
    SleepWithSubmission,
    /// `reap` submits a request that it does not commit.
    UncommittedByReap,
    /// `reap` clears the signal after it has taken the completions.
    SignalClearedLate,
    /// A completion during `reap` does not signal.
    SilentDuringReap,
}

/// Choices of one execution, and the number of alternatives of each.
#[derive(Clone, Debug, Default)]
struct Choices {
    path: Vec<(usize, usize)>,
    at: usize,
}

impl Choices {
    /// Returns the next choice, a number below `count`.
    fn take(&mut self, count: usize) -> usize {
        if self.at == self.path.len() {
            self.path.push((0, count));
        }
        let (choice, known) = self.path[self.at];
        assert_eq!(known, count, "an execution can be repeated");
        self.at += 1;
        choice
    }

    /// Advances to the next execution. Returns false after the last one.
    fn advance(&mut self) -> bool {
        self.at = 0;
        while let Some((choice, count)) = self.path.pop() {
            if choice + 1 < count {
                self.path.push((choice + 1, count));
                return true;
            }
        }
        false
    }
}

/// State of the model's disk.
#[derive(Debug)]
struct Model {
    choices: Choices,
    defect: Option<Defect>,
    edges: bool,
    /// True if each request has two steps, the second of which `reap` starts.
    has_steps: bool,
    /// Submitted requests that were not committed.
    submitted: Vec<u32>,
    /// Requests that the disk executes.
    in_flight: Vec<u32>,
    completed: Vec<u32>,
    /// Requests whose second step has started.
    second: Vec<u32>,
    is_signalled: bool,
    is_reaping: bool,
    /// True after the execution has ended. The disk then completes all requests.
    is_over: bool,
    event: EventFd,
}

impl Model {
    /// Completes requests in flight. The choices decide how many, and in which order.
    fn act(&mut self) {
        while self.is_over && !self.in_flight.is_empty() {
            self.complete(0);
        }
        while !self.in_flight.is_empty() {
            match self.choices.take(self.in_flight.len() + 1) {
                0 => return,
                nth => self.complete(nth - 1),
            }
        }
    }

    fn complete(&mut self, nth: usize) {
        let tag = self.in_flight.remove(nth);
        self.completed.push(tag);
        if self.is_reaping && self.defect == Some(Defect::SilentDuringReap) {
            return;
        }
        // Like a `CompletionQueue`, the disk signals once until the next `reap`.
        if !std::mem::replace(&mut self.is_signalled, true) {
            self.event.signal();
        }
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.is_signalled) {
            self.event.drain();
        }
    }

    /// Returns the requests that have ended.
    fn reap(&mut self) -> Vec<u32> {
        self.act();
        let clears_late = self.defect == Some(Defect::SignalClearedLate);
        if !clears_late {
            self.clear();
        }
        self.is_reaping = true;
        let completed = std::mem::take(&mut self.completed);
        self.act();
        if clears_late {
            self.clear();
        }
        let mut ended = Vec::new();
        for tag in completed {
            if !self.has_steps || self.second.contains(&tag) {
                self.second.retain(|other| *other != tag);
                ended.push(tag);
                continue;
            }
            self.second.push(tag);
            if self.defect == Some(Defect::UncommittedByReap) {
                self.submitted.push(tag);
            } else {
                self.in_flight.push(tag);
            }
        }
        self.act();
        self.is_reaping = false;
        ended
    }
}

#[derive(Clone, Debug)]
struct ModelDisk(Arc<Mutex<Model>>);

struct ModelQueue {
    model: Arc<Mutex<Model>>,
    event: EventFd,
    edges: bool,
}

impl Disk for ModelDisk {
    fn info(&self) -> DiskInfo {
        DiskInfo::new(512, 8)
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        let model = self.0.lock();
        let (event, edges) = (model.event.try_clone()?, model.edges);
        Ok(Box::new(ModelQueue { model: Arc::clone(&self.0), event, edges }))
    }

    fn name(&self) -> String {
        "model".into()
    }
}

impl Queue for ModelQueue {
    fn submit(&mut self, tag: u32, _: &Request, _: &mut Segments) -> Submitted {
        self.model.lock().submitted.push(tag);
        Submitted::Pending
    }

    fn commit(&mut self) {
        let mut model = self.model.lock();
        let submitted = std::mem::take(&mut model.submitted);
        model.in_flight.extend(submitted);
        model.act();
    }

    fn reap(&mut self, done: &mut dyn FnMut(u32, Result<(), DiskError>, Segments)) {
        let ended = self.model.lock().reap();
        ended.into_iter().for_each(|tag| done(tag, Ok(()), Segments::new()));
    }

    fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.event.as_fd())
    }

    fn wakes_by_edges(&self) -> bool {
        self.edges
    }
}

type Flush = Pin<Box<dyn Future<Output = bool>>>;

/// Event loop that executes `left` requests.
struct Loop {
    io: IoThread<Flush>,
    model: Arc<Mutex<Model>>,
    left: usize,
}

impl Loop {
    fn choose(&self, count: usize) -> usize {
        self.model.lock().choices.take(count)
    }

    /// Chooses whether a further request arrives now. Returns true if so.
    fn arrives(&mut self) -> bool {
        let arrives = self.left != 0 && self.choose(2) == 1;
        self.left -= usize::from(arrives);
        arrives
    }

    fn is_readable(&self) -> bool {
        let mut fds = [PollFd::new(&self.io, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() != 0
    }

    /// Sleeps. Returns `None` if a wakeup was lost, otherwise true if a request arrived.
    fn sleep(&mut self) -> Option<bool> {
        let mut arrives = false;
        while !arrives && !self.is_readable() {
            let in_flight = self.model.lock().in_flight.len();
            match self.choose(in_flight + usize::from(self.left != 0)) {
                nth if nth < in_flight => self.model.lock().complete(nth),
                _ => arrives = true,
            }
            if self.left == 0 && !self.is_readable() && self.model.lock().in_flight.is_empty() {
                return None;
            }
        }
        self.left -= usize::from(arrives);
        self.io.wait(Some(Instant::now()), |_| {});
        Some(arrives)
    }

    /// Executes all requests. Returns false if a wakeup was lost.
    fn run(mut self, device: &BlockDevice) -> bool {
        let outcome = self.execute(device);
        // Permits the drop of the queue to complete the requests whose wakeup was lost.
        self.model.lock().is_over = true;
        outcome
    }

    fn execute(&mut self, device: &BlockDevice) -> bool {
        let disk = self.io.open(device).unwrap();
        let flush = || -> Flush {
            let disk = disk.clone();
            Box::pin(async move { disk.flush().await.is_ok() })
        };
        let sleeps_early = self.model.lock().defect == Some(Defect::SleepWithSubmission);
        let mut arrived = false;
        loop {
            if std::mem::take(&mut arrived) || self.arrives() {
                let slot = self.io.tasks().reserve().unwrap();
                self.io.tasks().start(slot, flush());
            }
            let mut ended = Vec::new();
            let busy = self.io.run_once(|slot, outcome| {
                assert!(outcome);
                ended.push(slot);
            });
            ended.into_iter().for_each(|slot| self.io.tasks().release(slot));
            // A request may arrive between `run_once` and the sleep.
            if self.arrives() {
                let slot = self.io.tasks().reserve().unwrap();
                assert!(self.io.tasks().start_now(slot, flush()).is_none());
            }
            if self.left == 0 && self.io.tasks().reserved() == 0 {
                return true;
            }
            if busy {
                continue;
            }
            let may_sleep = if sleeps_early {
                self.io.tasks().prepare_sleep()
            } else {
                self.io.prepare_sleep()
            };
            if may_sleep {
                // Requests are unfinished here. If the descriptor is not readable, no request is in
                // flight at the disk, and none can arrive, nothing can wake the thread any more: a
                // wakeup was lost.
                if self.left == 0 && !self.is_readable() && self.model.lock().in_flight.is_empty() {
                    return false;
                }
                match self.sleep() {
                    Some(arrives) => arrived = arrives,
                    None => return false,
                }
            }
        }
    }
}

/// Executes every sequence of choices, up to the first lost wakeup. Returns the number of
/// executions, and whether a wakeup was lost.
fn explore(requests: usize, edges: bool, has_steps: bool, defect: Option<Defect>) -> (u32, bool) {
    let mut executions = 0;
    let mut choices = Choices::default();
    let mut options = BlockOptions::default();
    (options.small_buffers, options.chunks, options.chunk_bytes) = (1, 1, 4096);
    loop {
        let model = Arc::new(Mutex::new(Model {
            choices,
            defect,
            edges,
            has_steps,
            submitted: Vec::new(),
            in_flight: Vec::new(),
            completed: Vec::new(),
            second: Vec::new(),
            is_signalled: false,
            is_reaping: false,
            is_over: false,
            event: EventFd::new().unwrap(),
        }));
        let device = BlockDevice::new(Arc::new(ModelDisk(Arc::clone(&model))), &options).unwrap();
        let io = IoThread::new(requests, EventFd::new().unwrap()).unwrap();
        let is_over = Loop { io, model: Arc::clone(&model), left: requests }.run(&device);
        executions += 1;
        let mut model = model.lock();
        choices = std::mem::take(&mut model.choices);
        if !is_over || !choices.advance() {
            return (executions, !is_over);
        }
    }
}

#[test]
fn no_order_of_requests_and_completions_loses_a_wakeup() {
    let shapes = [(1, true, false), (2, false, false), (1, true, true), (2, true, true)];
    for (requests, has_steps, edges) in shapes {
        let (executions, lost) = explore(requests, edges, has_steps, None);
        println!("{requests} requests, steps: {has_steps}, edges: {edges}: {executions}");
        assert!(executions > 20, "{executions}");
        assert!(!lost, "{requests} requests, steps: {has_steps}, edges: {edges}: {executions}");
    }
}

#[test]
fn each_defect_of_the_protocol_loses_wakeups() {
    let defects = [
        Defect::SleepWithSubmission,
        Defect::UncommittedByReap,
        Defect::SignalClearedLate,
        Defect::SilentDuringReap,
    ];
    for defect in defects {
        for edges in [false, true] {
            let (executions, lost) = explore(2, edges, true, Some(defect));
            println!("{defect:?}, edges: {edges}: after {executions}");
            assert!(lost, "{defect:?}, edges: {edges}");
        }
    }
}
