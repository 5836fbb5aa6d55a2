//! The thread that the control planes of all controllers run on, beside the reactor and the
//! workers: admin commands, and what follows from what workers have said.
//!
//! Controllers that have something to do wait in a queue, each at most once, and get turns. A
//! turn is short, but for one thing: it may touch memory that a guest can take its time to
//! provide. So there is a second thread that stands by. It watches only while somebody waits, and
//! takes over from the first when a turn takes too long. The thread that was held up ends when its
//! turn does. Each controller can hold up one thread, and nobody but itself.
//!
//! The pool of a program with a loop of its own has no such threads: turns are taken at once, on
//! the thread that asks for one.

use crate::notice::{ControlHandle, Notice};
use crate::visit::Visit;
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

/// A turn that takes so long is left alone with its thread, if anybody else waits.
const HELD_UP: Duration = Duration::from_millis(20);
/// Doorbells that are mapped announce nothing: somebody looks this often.
const MAPPED_POLL: Duration = Duration::from_millis(1);
/// How long the end of the threads is waited for. One that a guest holds up is not.
const END: Duration = Duration::from_secs(1);
/// Turns taken on the thread that asks for one, where there are no threads.
const INLINE_TURNS: u32 = 16;

/// How a turn has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// There is nothing to do until somebody asks for a turn.
    Idle,
    /// There is more to do: another turn, when the others had theirs.
    Again,
    /// There is more to do, and not before this time.
    At(Instant),
}

/// What gets turns.
pub(crate) trait TakesTurns: Send + Sync {
    fn run_state(&self) -> &RunState;

    /// Does what there is to do, for a while.
    fn turn(&self) -> Turn;
}

const IDLE: u8 = 0;
const SCHEDULED: u8 = 1;
const RUNNING: u8 = 2;
/// Somebody has asked for a turn while one was under way.
const RUNNING_AGAIN: u8 = 3;

/// Whether somebody waits for a turn, or has it: so it is in the queue at most once, and never on
/// two threads.
///
/// Every step is a read-modify-write, those that change nothing too: a turn that begins after
/// [`request`](Self::request) sees what its caller did before.
#[derive(Debug, Default)]
pub(crate) struct RunState(AtomicU8);

impl RunState {
    /// Asks for a turn; whether it has to be put in the queue.
    pub(crate) fn request(&self) -> bool {
        let next = |state| match state {
            IDLE => SCHEDULED,
            RUNNING => RUNNING_AGAIN,
            other => other,
        };
        self.update(next) == IDLE
    }

    fn begin(&self) {
        self.update(|_| RUNNING);
    }

    /// The turn is over; whether another one follows.
    fn end(&self, again: bool) -> bool {
        let next = |state| if again || state == RUNNING_AGAIN { SCHEDULED } else { IDLE };
        let before = self.update(next);
        again || before == RUNNING_AGAIN
    }

    fn update(&self, next: impl Fn(u8) -> u8) -> u8 {
        let updated = self.0.fetch_update(AcqRel, Acquire, |state| Some(next(state)));
        updated.unwrap_or_else(|state| state)
    }
}

/// The admin doorbells of a controller whose doorbells are mapped: nothing traps, so somebody
/// looks.
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

    /// Looks; whether there is something new.
    fn look(&mut self) -> bool {
        let now = (self.tail.load(Acquire), self.head.load(Acquire));
        std::mem::replace(&mut self.last, now) != now
    }
}

type Waiting = Weak<dyn TakesTurns>;

#[derive(Default)]
struct RunQueue {
    ready: VecDeque<Waiting>,
    /// Of who wants to know whether turns are taken.
    visits: Vec<Visit>,
    /// By when they go on; the address tells those of the same time apart.
    timed: BTreeMap<(Instant, usize), Waiting>,
    /// When mapped doorbells were last looked at.
    looked: Option<Instant>,
    /// When the turn under way began.
    turn_began: Option<Instant>,
    /// Which thread takes the turns: the others have been held up.
    leader: u32,
    /// The thread that stands by watches the turn under way.
    watching: bool,
    stopped: bool,
    threads: Vec<ThreadId>,
}

struct Shared {
    queue: Mutex<RunQueue>,
    /// The thread that takes the turns waits here.
    work: Condvar,
    /// The one that stands by waits here.
    watch: Condvar,
    /// A thread has ended.
    ended: Condvar,
    /// By controller. Whoever has locked these does not lock the queue.
    polls: Mutex<BTreeMap<u32, AdminDoorbellPoll>>,
    /// There are doorbells to be looked at, or were once; and turns to be taken, or were when that
    /// was looked at last. A loop that has no threads asks at every turn.
    has_polls: AtomicBool,
    has_turns: AtomicBool,
    /// There are no threads. This is called when there is more to do than was done at once.
    inline: Option<Box<dyn Fn() + Send + Sync>>,
}

/// The thread that the control planes run on.
#[derive(Clone)]
pub(crate) struct ControlThread(Arc<Shared>);

impl ControlThread {
    fn new(inline: Option<Box<dyn Fn() + Send + Sync>>) -> Self {
        Self(Arc::new(Shared {
            queue: Mutex::default(),
            work: Condvar::new(),
            watch: Condvar::new(),
            ended: Condvar::new(),
            polls: Mutex::default(),
            has_polls: AtomicBool::new(false),
            has_turns: AtomicBool::new(false),
            inline,
        }))
    }

    /// Starts the thread, and the one that stands by.
    ///
    /// # Errors
    /// The system's, if it has no more threads.
    pub(crate) fn start() -> io::Result<Self> {
        let control = Self::new(None);
        let shared = &control.0;
        let started = shared.spawn(Shared::lead).and_then(|()| shared.spawn(Shared::stand_by));
        started.inspect_err(|_| control.stop())?;
        Ok(control)
    }

    /// No thread: turns are taken at once, on the thread that asks for one. `more` is called when
    /// there is more to do, by [`run_inline`](Self::run_inline).
    pub(crate) fn inline(more: impl Fn() + Send + Sync + 'static) -> Self {
        Self::new(Some(Box::new(more)))
    }

    /// Whether there is no thread.
    pub(crate) fn is_inline(&self) -> bool {
        self.0.inline.is_some()
    }

    /// Gives `who` a turn. Its [`RunState`] has said that it is not in the queue.
    pub(crate) fn schedule(&self, who: Waiting) {
        let mut queue = self.0.queue.lock();
        queue.ready.push_back(who);
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

    /// Drops `visit` between two turns.
    pub(crate) fn visit(&self, visit: Visit) {
        if self.is_inline() {
            return;
        }
        let mut queue = self.0.queue.lock();
        queue.visits.push(visit);
        if queue.turn_began.is_none() {
            self.0.work.notify_one();
        } else {
            self.0.start_watching(&mut queue);
        }
    }

    /// From now on, the admin doorbells of `controller` are looked at, or no longer.
    pub(crate) fn poll_doorbells(&self, controller: u32, poll: Option<AdminDoorbellPoll>) {
        let parting = match poll {
            Some(poll) => {
                let before = self.0.polls.lock().insert(controller, poll);
                self.0.has_polls.store(true, Release);
                // Under the queue's lock, so that it is not about to wait as if there were none.
                drop(self.0.queue.lock());
                self.0.work.notify_one();
                before
            }
            None => self.0.polls.lock().remove(&controller),
        };
        drop(parting);
    }

    /// Whether mapped doorbells have to be looked at.
    pub(crate) fn has_polls(&self) -> bool {
        !self.0.polls.lock().is_empty()
    }

    /// Whether there are turns to be taken by [`run_inline`](Self::run_inline).
    pub(crate) fn has_inline_work(&self) -> bool {
        let queue = self.0.queue.lock();
        queue.turn_began.is_none() && !queue.ready.is_empty()
    }

    /// Takes turns here and now, unless some are being taken. Whether there were any.
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
            let again = MutexGuard::unlocked(&mut queue, || take_turn(&next));
            queue.turn_began = None;
            if again != Next::Nothing {
                queue.ready.push_back(next);
            }
        }
        // Under the lock under which they come.
        self.0.has_turns.store(!queue.ready.is_empty(), Release);
        turns != 0
    }

    /// Looks at the mapped doorbells.
    #[inline]
    pub(crate) fn look_at_doorbells(&self) -> bool {
        self.0.has_polls.load(Acquire) && self.0.look_at_doorbells()
    }

    /// Ends the threads, and waits for those that nobody holds up.
    pub(crate) fn stop(&self) {
        let mut queue = self.0.queue.lock();
        queue.stopped = true;
        self.0.work.notify_all();
        self.0.watch.notify_all();
        let (here, deadline) = (std::thread::current().id(), Instant::now() + END);
        while queue.threads.iter().any(|thread| *thread != here) {
            if self.0.ended.wait_until(&mut queue, deadline).timed_out() {
                break;
            }
        }
    }
}

/// What follows a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    Nothing,
    Again,
    At(Instant),
}

/// Takes a turn, without any lock.
fn take_turn(who: &Waiting) -> Next {
    let Some(who) = who.upgrade() else { return Next::Nothing };
    let _awake = Awake::new();
    who.run_state().begin();
    let turn = who.turn();
    if who.run_state().end(turn == Turn::Again) {
        return Next::Again;
    }
    match turn {
        Turn::At(when) => Next::At(when),
        Turn::Idle | Turn::Again => Next::Nothing,
    }
}

impl Shared {
    fn spawn(self: &Arc<Self>, run: fn(&Arc<Self>)) -> io::Result<()> {
        let shared = Arc::clone(self);
        // Known before it runs, so that whoever stops the threads waits for it.
        let mut queue = self.queue.lock();
        let thread = Builder::new().name("sb-control".into()).spawn(move || {
            let _guard = AbortOnPanic::new();
            run(&shared);
            let here = std::thread::current().id();
            shared.queue.lock().threads.retain(|thread| *thread != here);
            shared.ended.notify_all();
        })?;
        queue.threads.push(thread.thread().id());
        Ok(())
    }

    /// Takes turns until the end, or until another thread does.
    fn lead(self: &Arc<Self>) {
        let number = self.queue.lock().leader;
        self.take_turns(number);
    }

    fn take_turns(&self, number: u32) {
        loop {
            let mut queue = self.queue.lock();
            if queue.stopped || queue.leader != number {
                return;
            }
            if !queue.visits.is_empty() {
                let visits = std::mem::take(&mut queue.visits);
                MutexGuard::unlocked(&mut queue, || drop(visits));
                continue;
            }
            let (polling, now) = (!self.polls.lock().is_empty(), Instant::now());
            // Without the lock: whoever is woken, or dropped, takes it.
            if polling && queue.looked.is_none_or(|at| now >= at + MAPPED_POLL) {
                queue.looked = Some(now);
                drop(queue);
                self.look_at_doorbells();
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
            let follows = MutexGuard::unlocked(&mut queue, || take_turn(&next));
            if queue.leader == number {
                queue.turn_began = None;
            } else {
                self.work.notify_one();
            }
            match follows {
                Next::Nothing => {}
                Next::Again => queue.ready.push_back(next),
                Next::At(when) => {
                    queue.timed.insert((when, next.as_ptr().addr()), next);
                }
            }
        }
    }

    /// Waits until there may be something to do.
    fn wait(&self, queue: &mut MutexGuard<'_, RunQueue>, polling: bool) {
        let poll = queue.looked.filter(|_| polling).map(|at| at + MAPPED_POLL);
        let timer = queue.timed.keys().next().map(|(when, _)| *when);
        match poll.into_iter().chain(timer).min() {
            Some(until) => drop(self.work.wait_until(queue, until)),
            None => self.work.wait(queue),
        }
    }

    /// Gives those a turn whose time has come.
    fn wake(&self, due: Vec<Waiting>) {
        let mut ready = Vec::new();
        for waiting in due {
            if waiting.upgrade().is_some_and(|who| who.run_state().request()) {
                ready.push(waiting);
            }
        }
        self.queue.lock().ready.extend(ready);
    }

    /// Whether any mapped doorbell was written.
    fn look_at_doorbells(&self) -> bool {
        let mut rung = Vec::new();
        self.polls.lock().retain(|_, poll| {
            if poll.look() {
                rung.push(poll.control.clone());
            }
            poll.control.is_alive()
        });
        for control in &rung {
            control.notify(Notice::AdminDoorbell);
        }
        !rung.is_empty()
    }

    /// Somebody waits while a turn is under way: it must not take too long.
    fn start_watching(&self, queue: &mut RunQueue) {
        if !std::mem::replace(&mut queue.watching, true) {
            self.watch.notify_one();
        }
    }

    /// Watches while somebody waits, and takes over if that takes too long.
    fn stand_by(self: &Arc<Self>) {
        let mut queue = self.queue.lock();
        let number = loop {
            if queue.stopped {
                return;
            }
            let is_watched = queue.watching && queue.is_waited_for();
            match queue.turn_began.filter(|_| is_watched) {
                None => {
                    queue.watching = false;
                    self.watch.wait(&mut queue);
                }
                Some(began) if began.elapsed() < HELD_UP => {
                    self.watch.wait_until(&mut queue, began + HELD_UP);
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
            "a control thread is held up, by a guest's memory perhaps; another goes on"
        );
        if let Err(error) = self.spawn(Self::stand_by) {
            tracing::error!(
                %error,
                "there is no thread to stand by for the control thread: raise the limit of threads"
            );
        }
        self.take_turns(number);
    }
}

impl RunQueue {
    /// Whether somebody waits for the end of the turn under way.
    fn is_waited_for(&self) -> bool {
        !(self.ready.is_empty() && self.timed.is_empty() && self.visits.is_empty())
    }

    /// Those whose time has come.
    fn take_due(&mut self, now: Instant) -> Vec<Waiting> {
        let mut due = Vec::new();
        while let Some(entry) = self.timed.first_entry()
            && entry.key().0 <= now
        {
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

    use shadowbell_testing::wait::LIMIT;

    /// Says whose turn it is, as often as it has turns left.
    struct Counting {
        state: RunState,
        name: usize,
        left: AtomicUsize,
        said: Sender<usize>,
        /// Waits for a word in its turn.
        gate: Option<Mutex<Receiver<()>>>,
        running: AtomicBool,
    }

    impl TakesTurns for Counting {
        fn run_state(&self) -> &RunState {
            &self.state
        }

        fn turn(&self) -> Turn {
            assert!(!self.running.swap(true, Ordering::SeqCst), "two turns at a time");
            let _ = self.said.send(self.name);
            if let Some(gate) = &self.gate {
                let _ = gate.lock().recv();
            }
            self.running.store(false, Ordering::SeqCst);
            let left = self.left.fetch_sub(1, Ordering::SeqCst);
            if left > 1 { Turn::Again } else { Turn::Idle }
        }
    }

    fn counting(
        name: usize,
        turns: usize,
        said: &Sender<usize>,
        gate: Option<Receiver<()>>,
    ) -> Arc<Counting> {
        Arc::new(Counting {
            state: RunState::default(),
            name,
            left: turns.into(),
            said: said.clone(),
            gate: gate.map(Mutex::new),
            running: AtomicBool::new(false),
        })
    }

    fn ask(thread: &ControlThread, who: &Arc<Counting>) {
        if who.state.request() {
            let weak: Weak<Counting> = Arc::downgrade(who);
            thread.schedule(weak);
        }
    }

    #[test]
    fn turns_go_round() {
        // If this thread is held up while it asks, another one takes the first turns meanwhile.
        assert!((0..50).any(|_| went_round()));
    }

    /// Whether all had asked before the first turn could begin, and then the turns went round.
    fn went_round() -> bool {
        let (said, turns) = channel();
        let thread = ControlThread::start().unwrap();
        let (open, gate) = channel();
        let first = counting(9, 1, &said, Some(gate));
        ask(&thread, &first);
        let began = Instant::now();
        assert_eq!(turns.recv_timeout(LIMIT), Ok(9));
        let others: Vec<_> = (0..3).map(|name| counting(name, 3, &said, None)).collect();
        others.iter().for_each(|who| ask(&thread, who));
        // Who has asked is in the queue already.
        others.iter().for_each(|who| ask(&thread, who));
        // Later, another thread may have taken turns meanwhile, and their order is any.
        let in_time = began.elapsed() < HELD_UP / 2;
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
    fn who_holds_up_a_thread_holds_up_nobody_else() {
        let (said, turns) = channel();
        let thread = ControlThread::start().unwrap();
        let mut gates = Vec::new();
        for name in 0..5 {
            let (open, gate) = channel();
            let stuck = counting(name, 1, &said, Some(gate));
            ask(&thread, &stuck);
            assert_eq!(turns.recv_timeout(LIMIT), Ok(name));
            gates.push((open, stuck));
            // Nobody asks again: whoever waits when the turn begins to take long has to be seen.
            let quick = counting(100 + name, 2, &said, None);
            ask(&thread, &quick);
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

    /// A turn that a guest holds up is not the end of all turns: a visit finds that.
    #[test]
    fn a_visit_ends_when_turns_are_taken() {
        let (said, turns) = channel();
        let thread = ControlThread::start().unwrap();
        let visit = || {
            let (visit, visited) = Visit::for_tests();
            thread.visit(visit);
            assert_eq!(visited.recv_timeout(LIMIT), Ok(()));
        };
        visit();
        let (open, gate) = channel();
        let stuck = counting(1, 1, &said, Some(gate));
        ask(&thread, &stuck);
        assert_eq!(turns.recv_timeout(LIMIT), Ok(1));
        visit();
        visit();
        drop(open);
        thread.stop();
        // Then there is nobody to visit.
        let (late, visited) = Visit::for_tests();
        thread.visit(late);
        assert!(visited.try_recv().is_err());
    }

    #[test]
    fn the_end_waits_for_nobody_who_is_held_up() {
        let (said, turns) = channel();
        let thread = ControlThread::start().unwrap();
        let (_open, gate) = channel();
        let stuck = counting(1, 1, &said, Some(gate));
        ask(&thread, &stuck);
        assert_eq!(turns.recv_timeout(LIMIT), Ok(1));
        // The turn never ends.
        thread.stop();
    }

    #[test]
    fn a_turn_at_a_time_comes_then_and_earlier_if_somebody_asks() {
        struct Later(RunState, Sender<Instant>, Instant);
        impl TakesTurns for Later {
            fn run_state(&self) -> &RunState {
                &self.0
            }

            fn turn(&self) -> Turn {
                let now = Instant::now();
                let _ = self.1.send(now);
                if now < self.2 { Turn::At(self.2) } else { Turn::Idle }
            }
        }
        let (said, turns) = channel();
        let thread = ControlThread::start().unwrap();
        // Longer than five turns take on a busy machine.
        let when = Instant::now() + Duration::from_secs(5);
        let who = Arc::new(Later(RunState::default(), said, when));
        let mut early = 0;
        loop {
            if who.0.request() {
                let weak: Weak<Later> = Arc::downgrade(&who);
                thread.schedule(weak);
            }
            if turns.recv_timeout(LIMIT).unwrap() >= when {
                break;
            }
            early += 1;
            if early == 5 {
                assert!(thread.0.queue.lock().timed.len() <= 1, "one entry is enough");
                assert!(turns.recv_timeout(LIMIT).unwrap() >= when, "nobody has asked");
                break;
            }
        }
        assert_eq!(early, 5);
        thread.stop();
    }

    /// What was done before a turn was asked for is seen by it, whenever that is.
    #[test]
    fn no_request_is_lost() {
        struct Sum(RunState, AtomicUsize, AtomicUsize);
        impl TakesTurns for Sum {
            fn run_state(&self) -> &RunState {
                &self.0
            }

            fn turn(&self) -> Turn {
                self.2.fetch_add(self.1.swap(0, Ordering::Relaxed), Ordering::Relaxed);
                Turn::Idle
            }
        }
        let thread = ControlThread::start().unwrap();
        let who = Arc::new(Sum(RunState::default(), 0.into(), 0.into()));
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    for _ in 0..50_000 {
                        who.1.fetch_add(1, Ordering::Relaxed);
                        if who.0.request() {
                            let weak: Weak<Sum> = Arc::downgrade(&who);
                            thread.schedule(weak);
                        }
                    }
                });
            }
        });
        let until = Instant::now() + LIMIT;
        while who.2.load(Ordering::Relaxed) != 100_000 {
            assert!(Instant::now() < until, "{} were seen", who.2.load(Ordering::Relaxed));
            std::thread::yield_now();
        }
        thread.stop();
    }
}
