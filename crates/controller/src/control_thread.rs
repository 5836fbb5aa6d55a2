//! Control thread of a pool, beside the reactor and the I/O threads: executes the admin commands of
//! all controllers and handles the notices of I/O threads.
//!
//! Controllers with pending work wait in a run queue, each at most once, and get turns. A turn is
//! short, unless it accesses guest memory: the guest can make this access block for any time. So a
//! standby thread watches the running turn while other controllers wait. If the turn takes too
//! long, the standby thread continues with the run queue, and the blocked thread exits after its
//! turn. So a controller can block one thread, but delays only its own work.
//!
//! A pool in inline mode, for a program with its own event loop, has no control threads. Turns run
//! immediately on the thread that requests them.

use crate::notice::{ControlHandle, LivenessCheck, Notice};
use parking_lot::{Condvar, Mutex, MutexGuard};
use shadowbell_memory::page_tables::Awake;
use shadowbell_memory::{AbortOnPanic, SharedU32};
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Release};
use std::sync::atomic::{AtomicBool, AtomicU8};
use std::sync::{Arc, Weak};
use std::thread::{Builder, ThreadId};
use std::time::{Duration, Instant};

/// Time limit of a turn while other tasks wait. After it, the standby thread continues with the run
/// queue.
const MAX_BLOCKED: Duration = Duration::from_millis(20);
/// Poll interval of admin doorbells that are mapped into a guest: a write to a mapped doorbell
/// causes no event.
const MAPPED_POLL: Duration = Duration::from_millis(1);
/// Time limit for [`ControlThread::stop`] to wait for the threads, because a guest may block a
/// thread for longer.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of turns per call of [`ControlThread::run_inline`].
const INLINE_TURNS: u32 = 16;

/// Result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// No work is pending. The next turn runs when one is requested.
    Idle,
    /// More work is pending. The next turn runs after those of the tasks that wait in the run
    /// queue.
    Requeue,
    /// More work is due at this time. The next turn runs then, or earlier if one is requested.
    At(Instant),
}

/// Work that runs in turns of the control thread.
pub(crate) trait TurnTask: Send + Sync {
    fn run_state(&self) -> &RunState;

    /// Executes one turn: works for a bounded time.
    fn turn(&self) -> Turn;
}

const IDLE: u8 = 0;
const SCHEDULED: u8 = 1;
const RUNNING: u8 = 2;
/// A turn is running, and another one was requested after its start.
const RUNNING_REQUESTED: u8 = 3;

/// Scheduling state of a [`TurnTask`]: idle, queued or running. The state ensures that a task is in
/// the run queue at most once, and that it runs on one thread at a time.
///
/// Every transition is a read-modify-write, even if the value stays the same. So a turn that starts
/// after [`request`](Self::request) sees all earlier writes of the caller.
#[derive(Debug, Default)]
pub(crate) struct RunState(AtomicU8);

impl RunState {
    /// Requests a turn. Returns true if the caller has to put the task into the run queue.
    pub(crate) fn request(&self) -> bool {
        let next = |state| match state {
            IDLE => SCHEDULED,
            RUNNING => RUNNING_REQUESTED,
            other => other,
        };
        self.update(next) == IDLE
    }

    fn begin(&self) {
        self.update(|_| RUNNING);
    }

    /// Ends a turn. Returns true if another turn follows.
    fn end(&self, again: bool) -> bool {
        let next = |state| if again || state == RUNNING_REQUESTED { SCHEDULED } else { IDLE };
        let before = self.update(next);
        again || before == RUNNING_REQUESTED
    }

    fn update(&self, next: impl Fn(u8) -> u8) -> u8 {
        let updated = self.0.fetch_update(AcqRel, Acquire, |state| Some(next(state)));
        updated.unwrap_or_else(|state| state)
    }
}

/// Poller of the admin doorbells of a controller whose doorbells are mapped into the guest. Writes
/// to them do not trap, so the control thread reads the registers periodically.
pub(crate) struct AdminDoorbellPoll {
    tail: SharedU32,
    head: SharedU32,
    last: (u32, u32),
    control: ControlHandle,
}

impl AdminDoorbellPoll {
    pub(crate) fn new(tail: SharedU32, head: SharedU32, control: ControlHandle) -> Self {
        Self { tail, head, last: (0, 0), control }
    }

    /// Reads the doorbells. Returns true if one has changed.
    fn poll_doorbells_once(&mut self) -> bool {
        let now = (self.tail.load(Acquire), self.head.load(Acquire));
        std::mem::replace(&mut self.last, now) != now
    }
}

type Waiting = Weak<dyn TurnTask>;

#[derive(Default)]
struct RunQueue {
    ready: VecDeque<Waiting>,
    /// Liveness checks, which are dropped between two turns.
    liveness_checks: Vec<LivenessCheck>,
    /// Tasks whose next turn has a fixed time. The address distinguishes tasks with equal times.
    timed: BTreeMap<(Instant, usize), Waiting>,
    /// Time of each task's timed turn, by the task's address.
    timers: BTreeMap<usize, Instant>,
    /// Time of the last poll of mapped doorbells.
    polled_at: Option<Instant>,
    /// Start time of the running turn.
    turn_began: Option<Instant>,
    /// Number of the thread that runs turns. Threads with lower numbers were blocked in a turn and
    /// replaced.
    leader: u32,
    /// True if the standby thread watches the running turn.
    watching: bool,
    stopped: bool,
    threads: Vec<ThreadId>,
}

struct Shared {
    queue: Mutex<RunQueue>,
    /// Wakes the thread that runs turns.
    work: Condvar,
    /// Wakes the standby thread.
    standby: Condvar,
    /// Reports the exit of a thread.
    thread_ended: Condvar,
    /// Doorbell pollers by controller. Lock order: `queue` before this lock.
    polls: Mutex<BTreeMap<u32, AdminDoorbellPoll>>,
    /// Hints that `polls` and the run queue may have entries. An inline event loop reads the hints
    /// in every iteration, so that it need not take a lock.
    has_polls: AtomicBool,
    has_turns: AtomicBool,
    /// Callback of inline mode, called if a request leaves work in the run queue; `None` if the
    /// pool has threads.
    inline: Option<Box<dyn Fn() + Send + Sync>>,
}

/// Handle of the thread that runs the control planes.
#[derive(Clone)]
pub(crate) struct ControlThread(Arc<Shared>);

impl ControlThread {
    fn new(inline: Option<Box<dyn Fn() + Send + Sync>>) -> Self {
        Self(Arc::new(Shared {
            queue: Mutex::default(),
            work: Condvar::new(),
            standby: Condvar::new(),
            thread_ended: Condvar::new(),
            polls: Mutex::default(),
            has_polls: AtomicBool::new(false),
            has_turns: AtomicBool::new(false),
            inline,
        }))
    }

    /// Starts the control thread and its standby thread.
    ///
    /// # Errors
    /// The error of the system if it cannot create a thread.
    pub(crate) fn start() -> io::Result<Self> {
        let control = Self::new(None);
        let shared = &control.0;
        let started = shared.spawn(Shared::lead).and_then(|()| shared.spawn(Shared::run_standby));
        started.inspect_err(|_| control.stop())?;
        Ok(control)
    }

    /// Creates inline mode, without threads. Turns run on the thread that requests them. If work is
    /// left for [`run_inline`](Self::run_inline), `more` is called.
    pub(crate) fn inline(more: impl Fn() + Send + Sync + 'static) -> Self {
        Self::new(Some(Box::new(more)))
    }

    /// True in inline mode, without threads.
    pub(crate) fn is_inline(&self) -> bool {
        self.0.inline.is_some()
    }

    /// Puts `task` into the run queue. The caller does this only if [`RunState::request`] has
    /// returned true.
    pub(crate) fn schedule(&self, task: Waiting) {
        let mut queue = self.0.queue.lock();
        queue.ready.push_back(task);
        self.0.has_turns.store(true, Release);
        if let Some(more) = &self.0.inline {
            drop(queue);
            self.run_inline();
            if self.has_inline_work() {
                more();
            }
        } else if queue.turn_began.is_none() {
            self.0.work.notify_one();
        } else {
            self.0.start_watching(&mut queue);
        }
    }

    /// Drops `check` between two turns. The drop shows that the control thread is alive.
    pub(crate) fn check_liveness(&self, check: LivenessCheck) {
        if self.is_inline() {
            return;
        }
        let mut queue = self.0.queue.lock();
        queue.liveness_checks.push(check);
        if queue.turn_began.is_none() {
            self.0.work.notify_one();
        } else {
            self.0.start_watching(&mut queue);
        }
    }

    /// Starts or stops polling the admin doorbells of `controller`.
    pub(crate) fn poll_doorbells(&self, controller: u32, poll: Option<AdminDoorbellPoll>) {
        let parting = match poll {
            Some(poll) => {
                let before = self.0.polls.lock().insert(controller, poll);
                self.0.has_polls.store(true, Release);
                // The thread reads `polls` under the queue's lock before it waits. The lock is
                // taken here too, so the thread either sees the new entry or is already waiting and
                // gets the signal.
                drop(self.0.queue.lock());
                self.0.work.notify_one();
                before
            }
            None => self.0.polls.lock().remove(&controller),
        };
        drop(parting);
    }

    /// True if mapped doorbells have to be polled.
    pub(crate) fn has_polls(&self) -> bool {
        !self.0.polls.lock().is_empty()
    }

    /// True if [`run_inline`](Self::run_inline) would run a turn.
    pub(crate) fn has_inline_work(&self) -> bool {
        let queue = self.0.queue.lock();
        queue.turn_began.is_none() && !queue.ready.is_empty()
    }

    /// Runs turns on the calling thread, unless a turn is already running. Returns true if at
    /// least one turn ran.
    #[inline]
    pub(crate) fn run_inline(&self) -> bool {
        self.0.has_turns.load(Acquire) && self.run_turns()
    }

    fn run_turns(&self) -> bool {
        let mut queue = self.0.queue.lock();
        let mut turns = 0;
        while turns < INLINE_TURNS && queue.turn_began.is_none() {
            let Some(next) = queue.ready.pop_front() else { break };
            turns += 1;
            queue.turn_began = Some(Instant::now());
            let again = MutexGuard::unlocked(&mut queue, || run_one(&next));
            queue.turn_began = None;
            // Inline mode has no timers, so `Turn::At` is ignored.
            if again.is_requested {
                queue.ready.push_back(next);
            }
        }
        // `schedule` also sets `has_turns` under the lock, so this store cannot overwrite a later
        // one.
        self.0.has_turns.store(!queue.ready.is_empty(), Release);
        turns != 0
    }

    /// Polls the mapped doorbells. Returns true if one was written.
    #[inline]
    pub(crate) fn poll_mapped_doorbells(&self) -> bool {
        self.0.has_polls.load(Acquire) && self.0.poll_mapped_doorbells()
    }

    /// Stops the threads and waits for their exit, for at most [`STOP_TIMEOUT`].
    pub(crate) fn stop(&self) {
        let mut queue = self.0.queue.lock();
        queue.stopped = true;
        self.0.work.notify_all();
        self.0.standby.notify_all();
        let (here, deadline) = (std::thread::current().id(), Instant::now() + STOP_TIMEOUT);
        while queue.threads.iter().any(|thread| *thread != here) {
            if self.0.thread_ended.wait_until(&mut queue, deadline).timed_out() {
                break;
            }
        }
    }
}

/// Outcome of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Next {
    turn: Turn,
    /// True if another turn was requested.
    is_requested: bool,
}

/// Runs a turn. The caller holds no lock.
fn run_one(task: &Waiting) -> Next {
    let Some(task) = task.upgrade() else { return Next { turn: Turn::Idle, is_requested: false } };
    let _awake = Awake::new();
    task.run_state().begin();
    let turn = task.turn();
    Next { turn, is_requested: task.run_state().end(turn == Turn::Requeue) }
}

impl Shared {
    fn spawn(self: &Arc<Self>, run: fn(&Arc<Self>)) -> io::Result<()> {
        let shared = Arc::clone(self);
        // The lock is held until the thread is in the list, because `stop` waits for the threads in
        // the list.
        let mut queue = self.queue.lock();
        let thread = Builder::new().name("sb-control".into()).spawn(move || {
            let _guard = AbortOnPanic::new();
            run(&shared);
            let here = std::thread::current().id();
            shared.queue.lock().threads.retain(|thread| *thread != here);
            shared.thread_ended.notify_all();
        })?;
        queue.threads.push(thread.thread().id());
        Ok(())
    }

    /// Runs turns until the control thread is stopped or the standby thread takes over.
    fn lead(self: &Arc<Self>) {
        let number = self.queue.lock().leader;
        self.run_loop(number);
    }

    fn run_loop(&self, number: u32) {
        loop {
            let mut queue = self.queue.lock();
            if queue.stopped || queue.leader != number {
                return;
            }
            if !queue.liveness_checks.is_empty() {
                let liveness_checks = std::mem::take(&mut queue.liveness_checks);
                MutexGuard::unlocked(&mut queue, || drop(liveness_checks));
                continue;
            }
            let (polling, now) = (!self.polls.lock().is_empty(), Instant::now());
            // The lock is released first, because a poll locks the queue when it wakes or drops a
            // task.
            if polling && queue.polled_at.is_none_or(|at| now >= at + MAPPED_POLL) {
                queue.polled_at = Some(now);
                drop(queue);
                self.poll_mapped_doorbells();
                continue;
            }
            let due = queue.take_due(now);
            if !due.is_empty() {
                drop(queue);
                self.wake(due);
                continue;
            }
            let Some(next) = queue.ready.pop_front() else {
                self.wait(&mut queue, polling);
                continue;
            };
            queue.turn_began = Some(Instant::now());
            if queue.is_waited_for() {
                self.start_watching(&mut queue);
            }
            let Next { turn, is_requested } = MutexGuard::unlocked(&mut queue, || run_one(&next));
            if queue.leader == number {
                queue.turn_began = None;
            } else {
                self.work.notify_one();
            }
            match turn {
                Turn::Idle => queue.set_timer(&next, None),
                Turn::At(when) => queue.set_timer(&next, Some(when)),
                Turn::Requeue => {}
            }
            if is_requested {
                queue.ready.push_back(next);
            }
            // If another thread has taken over and is in a turn, that turn must be watched as well.
            if queue.turn_began.is_some() {
                self.start_watching(&mut queue);
            }
        }
    }

    /// Waits for a signal, the next doorbell poll or the next timed turn.
    fn wait(&self, queue: &mut MutexGuard<'_, RunQueue>, polling: bool) {
        let poll = queue.polled_at.filter(|_| polling).map(|at| at + MAPPED_POLL);
        let timer = queue.timed.keys().next().map(|(when, _)| *when);
        match poll.into_iter().chain(timer).min() {
            Some(until) => drop(self.work.wait_until(queue, until)),
            None => self.work.wait(queue),
        }
    }

    /// Requests turns for tasks whose time is reached.
    fn wake(&self, due: Vec<Waiting>) {
        let mut ready = Vec::new();
        for waiting in due {
            if waiting.upgrade().is_some_and(|task| task.run_state().request()) {
                ready.push(waiting);
            }
        }
        self.queue.lock().ready.extend(ready);
    }

    /// Polls the mapped doorbells. Returns true if one was written.
    fn poll_mapped_doorbells(&self) -> bool {
        let mut rung = Vec::new();
        self.polls.lock().retain(|_, poll| {
            if poll.poll_doorbells_once() {
                rung.push(poll.control.clone());
            }
            poll.control.is_alive()
        });
        for control in &rung {
            control.notify(Notice::AdminDoorbell);
        }
        !rung.is_empty()
    }

    /// Starts the time limit of the running turn: wakes the standby thread, because other tasks
    /// wait.
    fn start_watching(&self, queue: &mut RunQueue) {
        if !std::mem::replace(&mut queue.watching, true) {
            self.standby.notify_one();
        }
    }

    /// Main function of the standby thread: watches the running turn while other tasks wait, and
    /// takes over the run queue if the turn exceeds [`MAX_BLOCKED`].
    fn run_standby(self: &Arc<Self>) {
        let mut queue = self.queue.lock();
        let number = loop {
            if queue.stopped {
                return;
            }
            let is_watched = queue.watching && queue.is_waited_for();
            match queue.turn_began.filter(|_| is_watched) {
                None => {
                    queue.watching = false;
                    self.standby.wait(&mut queue);
                }
                Some(began) if began.elapsed() < MAX_BLOCKED => {
                    self.standby.wait_until(&mut queue, began + MAX_BLOCKED);
                }
                Some(_) => {
                    queue.leader += 1;
                    queue.turn_began = None;
                    queue.watching = false;
                    break queue.leader;
                }
            }
        };
        drop(queue);
        tracing::debug!(
            "a control thread is blocked, perhaps by guest memory; the standby thread takes over"
        );
        if let Err(error) = self.spawn(Self::run_standby) {
            tracing::error!(
                %error,
                "cannot start a standby control thread: raise the limit of threads"
            );
        }
        self.run_loop(number);
    }
}

impl RunQueue {
    /// True if work waits for the end of the running turn.
    fn is_waited_for(&self) -> bool {
        !(self.ready.is_empty() && self.timed.is_empty() && self.liveness_checks.is_empty())
    }

    /// Sets the time of a task's next turn, and replaces the time that was set before. `None`
    /// removes the timer.
    fn set_timer(&mut self, task: &Waiting, when: Option<Instant>) {
        let address = task.as_ptr().addr();
        if let Some(before) = self.timers.remove(&address) {
            self.timed.remove(&(before, address));
        }
        if let Some(when) = when {
            self.timers.insert(address, when);
            self.timed.insert((when, address), task.clone());
        }
    }

    /// Removes and returns the tasks whose time is reached.
    fn take_due(&mut self, now: Instant) -> Vec<Waiting> {
        let mut due = Vec::new();
        while let Some(entry) = self.timed.first_entry()
            && entry.key().0 <= now
        {
            self.timers.remove(&entry.key().1);
            due.push(entry.remove());
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::{Receiver, Sender, channel};

    use shadowbell_testing::wait::{self, LIMIT};

    /// Task that reports its name in each of its turns.
    struct Counting {
        state: RunState,
        name: usize,
        left: AtomicUsize,
        reported: Sender<usize>,
        /// Channel that blocks the turn until a message arrives, if present.
        gate: Option<Mutex<Receiver<()>>>,
        running: AtomicBool,
    }

    impl TurnTask for Counting {
        fn run_state(&self) -> &RunState {
            &self.state
        }

        fn turn(&self) -> Turn {
            assert!(!self.running.swap(true, Ordering::SeqCst), "two turns at a time");
            let _ = self.reported.send(self.name);
            if let Some(gate) = &self.gate {
                let _ = gate.lock().recv();
            }
            self.running.store(false, Ordering::SeqCst);
            let left = self.left.fetch_sub(1, Ordering::SeqCst);
            if left > 1 { Turn::Requeue } else { Turn::Idle }
        }
    }

    fn counting(
        name: usize,
        turns: usize,
        reported: &Sender<usize>,
        gate: Option<Receiver<()>>,
    ) -> Arc<Counting> {
        Arc::new(Counting {
            state: RunState::default(),
            name,
            left: turns.into(),
            reported: reported.clone(),
            gate: gate.map(Mutex::new),
            running: AtomicBool::new(false),
        })
    }

    fn request_turn(thread: &ControlThread, task: &Arc<Counting>) {
        if task.state.request() {
            let weak: Weak<Counting> = Arc::downgrade(task);
            thread.schedule(weak);
        }
    }

    #[test]
    fn runs_round_robin() {
        // If this thread is preempted between the requests, the standby thread may run the first
        // turns before the last request. The attempt is then repeated.
        wait::until("an attempt in time", is_round_robin);
    }

    /// Checks the round-robin order. Returns false if the requests took so long that the standby
    /// thread may have taken over.
    fn is_round_robin() -> bool {
        let (reported, turns) = channel();
        let thread = ControlThread::start().unwrap();
        let (open, gate) = channel();
        let first = counting(9, 1, &reported, Some(gate));
        request_turn(&thread, &first);
        let began = Instant::now();
        assert_eq!(turns.recv_timeout(LIMIT), Ok(9));
        let others: Vec<_> = (0..3).map(|name| counting(name, 3, &reported, None)).collect();
        others.iter().for_each(|task| request_turn(&thread, task));
        // A second request must not add a second entry to the queue.
        others.iter().for_each(|task| request_turn(&thread, task));
        // If the requests took longer, another thread may have run turns meanwhile, in any order.
        let in_time = began.elapsed() < MAX_BLOCKED / 2;
        drop(open);
        let order: Vec<_> = (0..9).map(|_| turns.recv_timeout(LIMIT).unwrap()).collect();
        if in_time {
            assert_eq!(order, [0, 1, 2, 0, 1, 2, 0, 1, 2]);
        }
        assert!(turns.try_recv().is_err());
        thread.stop();
        in_time
    }

    #[test]
    fn a_blocked_turn_delays_no_other_object() {
        let (reported, turns) = channel();
        let thread = ControlThread::start().unwrap();
        let mut gates = Vec::new();
        for name in 0..5 {
            let (open, gate) = channel();
            let stuck = counting(name, 1, &reported, Some(gate));
            request_turn(&thread, &stuck);
            assert_eq!(turns.recv_timeout(LIMIT), Ok(name));
            gates.push((open, stuck));
            // No further request wakes the standby thread. It must detect by itself that `quick`
            // waits and that the turn of `stuck` exceeds its time limit.
            let quick = counting(100 + name, 2, &reported, None);
            request_turn(&thread, &quick);
            assert_eq!(turns.recv_timeout(LIMIT), Ok(100 + name));
            assert_eq!(turns.recv_timeout(LIMIT), Ok(100 + name));
        }
        for (open, _) in &gates {
            open.send(()).unwrap();
        }
        let ends = || thread.0.queue.lock().threads.len();
        let until = Instant::now() + LIMIT;
        while ends() != 2 {
            assert!(Instant::now() < until, "{} threads are left", ends());
            std::thread::yield_now();
        }
        thread.stop();
        assert_eq!(ends(), 0);
    }

    /// A turn that a guest blocks does not stop other turns, and a liveness check succeeds.
    #[test]
    fn a_liveness_check_succeeds_beside_a_blocked_turn() {
        let (reported, turns) = channel();
        let thread = ControlThread::start().unwrap();
        let check_liveness = || {
            let (check_liveness, visited) = LivenessCheck::for_tests();
            thread.check_liveness(check_liveness);
            assert_eq!(visited.recv_timeout(LIMIT), Ok(()));
        };
        check_liveness();
        let (open, gate) = channel();
        let stuck = counting(1, 1, &reported, Some(gate));
        request_turn(&thread, &stuck);
        assert_eq!(turns.recv_timeout(LIMIT), Ok(1));
        check_liveness();
        check_liveness();
        drop(open);
        thread.stop();
        // After `stop`, no thread is left that could drop the check.
        let (late, visited) = LivenessCheck::for_tests();
        thread.check_liveness(late);
        assert!(visited.try_recv().is_err());
    }

    #[test]
    fn stopping_does_not_wait_for_a_blocked_turn() {
        let (reported, turns) = channel();
        let thread = ControlThread::start().unwrap();
        let (_open, gate) = channel();
        let stuck = counting(1, 1, &reported, Some(gate));
        request_turn(&thread, &stuck);
        assert_eq!(turns.recv_timeout(LIMIT), Ok(1));
        // The blocked turn ends only at the end of the test.
        thread.stop();
    }

    #[test]
    fn a_timed_turn_is_taken_at_its_time_or_on_an_earlier_request() {
        struct TimedTask(RunState, Sender<Instant>, Instant);
        impl TurnTask for TimedTask {
            fn run_state(&self) -> &RunState {
                &self.0
            }

            fn turn(&self) -> Turn {
                let now = Instant::now();
                let _ = self.1.send(now);
                if now < self.2 { Turn::At(self.2) } else { Turn::Idle }
            }
        }
        let (reported, turns) = channel();
        let thread = ControlThread::start().unwrap();
        // Even on a busy machine, the five turns end before this time.
        let when = Instant::now() + Duration::from_secs(5);
        let task = Arc::new(TimedTask(RunState::default(), reported, when));
        let mut early = 0;
        loop {
            if task.0.request() {
                let weak: Weak<TimedTask> = Arc::downgrade(&task);
                thread.schedule(weak);
            }
            if turns.recv_timeout(LIMIT).unwrap() >= when {
                break;
            }
            early += 1;
            if early == 5 {
                assert!(thread.0.queue.lock().timed.len() <= 1, "one entry is enough");
                assert!(turns.recv_timeout(LIMIT).unwrap() >= when, "a turn before its time");
                break;
            }
        }
        assert_eq!(early, 5);
        thread.stop();
    }

    /// The last turn determines the only timer of its task, also if a turn was requested meanwhile.
    #[test]
    fn a_task_has_the_timer_of_its_last_turn() {
        struct Timed(RunState, Mutex<Vec<Turn>>, Sender<usize>);
        impl TurnTask for Timed {
            fn run_state(&self) -> &RunState {
                &self.0
            }

            fn turn(&self) -> Turn {
                let mut turns = self.1.lock();
                let turn = turns.pop().unwrap_or(Turn::Idle);
                if !turns.is_empty() {
                    self.0.request();
                }
                let _ = self.2.send(turns.len());
                turn
            }
        }
        let (soon, later) = (Instant::now() + LIMIT, Instant::now() + 2 * LIMIT);
        // Results of the turns, last turn first, and the time of the task's timer after them.
        for (turns, timer) in [
            (vec![Turn::At(soon)], Some(soon)),
            (vec![Turn::At(later), Turn::Requeue], Some(later)),
            (vec![Turn::At(later), Turn::At(soon)], Some(later)),
            (vec![Turn::Idle, Turn::At(soon)], None),
        ] {
            let (reported, left) = channel();
            let thread = ControlThread::start().unwrap();
            let task = Arc::new(Timed(RunState::default(), Mutex::new(turns), reported));
            assert!(task.0.request());
            let weak: Weak<Timed> = Arc::downgrade(&task);
            thread.schedule(weak);
            while left.recv_timeout(LIMIT).unwrap() != 0 {}
            wait::until("the timer", || {
                let queue = thread.0.queue.lock();
                let timers: Vec<_> = queue.timed.keys().map(|(when, _)| *when).collect();
                queue.turn_began.is_none() && timers == Vec::from_iter(timer)
            });
            assert_eq!(thread.0.queue.lock().timers.len(), usize::from(timer.is_some()));
            thread.stop();
        }
    }

    /// A turn sees all writes that happened before its request.
    #[test]
    fn no_request_is_lost() {
        struct Sum(RunState, AtomicUsize, AtomicUsize);
        impl TurnTask for Sum {
            fn run_state(&self) -> &RunState {
                &self.0
            }

            fn turn(&self) -> Turn {
                self.2.fetch_add(self.1.swap(0, Ordering::Relaxed), Ordering::Relaxed);
                Turn::Idle
            }
        }
        let thread = ControlThread::start().unwrap();
        let task = Arc::new(Sum(RunState::default(), 0.into(), 0.into()));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..50_000 {
                        task.1.fetch_add(1, Ordering::Relaxed);
                        if task.0.request() {
                            let weak: Weak<Sum> = Arc::downgrade(&task);
                            thread.schedule(weak);
                        }
                    }
                });
            }
        });
        let until = Instant::now() + LIMIT;
        while task.2.load(Ordering::Relaxed) != 100_000 {
            assert!(Instant::now() < until, "{} were seen", task.2.load(Ordering::Relaxed));
            std::thread::yield_now();
        }
        thread.stop();
    }
}
