//! Building blocks of the models: cells, an eventfd, a host and a controller.
//!
//! `Arc` is that of the standard library: its reference count is not part of the models, and loom's
//! `Arc` must not be dropped while a model unwinds after a deadlock.

use loom::cell::UnsafeCell;
use loom::sync::atomic::AtomicU32;
use loom::sync::{Condvar, Mutex};
use shadowbell_doorbell::{
    Cell, CqHead, DoorbellState, Fence, FullFence, HostDoorbell, Predicate, RingSize, Sleeper,
    SqTail, Truth, Waker,
};
use std::sync::Arc;

pub(crate) const PREDICATES: [Predicate; 2] = [Predicate::Linux, Predicate::SpdkInclusive];

/// No fence: the defect of code that relies on release ordering.
pub(crate) struct NoFence;

impl Fence for NoFence {
    fn full() {}
}

/// Explores all executions of `f` with at most `preemptions` involuntary context switches. `None`
/// means no limit.
pub(crate) fn explore(preemptions: Option<usize>, f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = preemptions;
    builder.check(f);
}

pub(crate) fn ring(entries: u32) -> RingSize {
    RingSize::new(entries).unwrap()
}

/// Model of an eventfd.
#[derive(Default)]
pub(crate) struct Event {
    signalled: Mutex<bool>,
    condition: Condvar,
}

impl Event {
    pub(crate) fn signal(&self) {
        *self.signalled.lock().unwrap() = true;
        self.condition.notify_one();
    }

    pub(crate) fn wait(&self) {
        let mut signalled = self.signalled.lock().unwrap();
        while !*signalled {
            signalled = self.condition.wait(signalled).unwrap();
        }
        *signalled = false;
    }
}

/// Posted writes in transit, in order.
#[derive(Default)]
pub(crate) struct Bus {
    posted: Mutex<Vec<Option<u16>>>,
    condition: Condvar,
}

impl Bus {
    /// Posts a value. `None` marks the end.
    pub(crate) fn post(&self, value: Option<u16>) {
        self.posted.lock().unwrap().push(value);
        self.condition.notify_one();
    }

    /// Waits for the next posted value, and returns it.
    pub(crate) fn next(&self) -> Option<u16> {
        let mut posted = self.posted.lock().unwrap();
        while posted.is_empty() {
            posted = self.condition.wait(posted).unwrap();
        }
        posted.remove(0)
    }
}

pub(crate) type Word = Arc<AtomicU32>;

pub(crate) fn word(value: u32) -> Word {
    Arc::new(AtomicU32::new(value))
}

/// State of a queue at position `at` that has no shadow entry.
pub(crate) fn by_register(at: u16) -> DoorbellState {
    DoorbellState { last: at, truth: Truth::Register, snapshot: None }
}

/// The three cells of one doorbell.
#[derive(Clone)]
pub(crate) struct DoorbellCells {
    pub(crate) register: Word,
    pub(crate) shadow: Word,
    pub(crate) event_idx: Word,
}

impl DoorbellCells {
    /// A doorbell with all of its cells at `value`.
    pub(crate) fn at(value: u16) -> Self {
        let value = u32::from(value);
        Self { register: word(value), shadow: word(value), event_idx: word(value) }
    }

    /// The host's end, which relies on the shadow entry.
    pub(crate) fn host<F: Fence>(&self, at: u16) -> HostDoorbell<Word, F> {
        let mut host = HostDoorbell::new(at);
        host.attach_shadow(self.shadow.clone(), self.event_idx.clone());
        host.enable_shadow();
        host
    }

    /// The controller's end of a submission queue, with the shadow entry as source.
    pub(crate) fn tail(&self, size: RingSize, at: u16) -> SqTail<Word> {
        let mut tail = SqTail::resume(size, self.register.clone(), by_register(at)).unwrap();
        tail.enable(self.shadow.clone(), self.event_idx.clone()).unwrap();
        tail
    }

    /// The controller's end of a completion queue, with the shadow entry as source.
    pub(crate) fn head(&self, size: RingSize, at: u16) -> CqHead<Word> {
        let mut head = CqHead::resume(size, self.register.clone(), by_register(at)).unwrap();
        head.enable(self.shadow.clone(), self.event_idx.clone(), at).unwrap();
        head
    }
}

/// Waker of a sleeping thread, and the eventfd on which the thread sleeps.
pub(crate) struct Wake<F = FullFence> {
    pub(crate) waker: Waker<Word, F>,
    pub(crate) event: Arc<Event>,
}

impl<F> Clone for Wake<F> {
    fn clone(&self) -> Self {
        Self { waker: self.waker.clone(), event: self.event.clone() }
    }
}

/// A sleeper with fence `S`, and its waker with fence `W`.
pub(crate) fn sleep_pair<S: Fence, W: Fence>() -> (Sleeper<Word, S>, Wake<W>) {
    let state = word(0);
    let sleeper = Sleeper::new(state.clone());
    (sleeper, Wake { waker: Waker::new(state), event: Arc::default() })
}

impl<F: Fence> Wake<F> {
    /// Handles a trapped doorbell write.
    pub(crate) fn trap(&self, register: &Word, value: u16) {
        if self.waker.ring(register, u32::from(value)) {
            self.event.signal();
        }
    }

    /// Wakes the thread for a reason other than a doorbell.
    pub(crate) fn kick(&self) {
        if self.waker.kick() {
            self.event.signal();
        }
    }

    /// One update of a host doorbell, with its MMIO write trapped on the same thread.
    pub(crate) fn update<H: Fence>(
        &self,
        host: &mut HostDoorbell<Word, H>,
        predicate: Predicate,
        register: &Word,
        value: u16,
    ) {
        if host.publish_with(predicate, value) {
            self.trap(register, value);
        }
    }
}

/// Memory of a queue. Loom fails if an entry is read before it is written, or is written while it
/// is read.
pub(crate) struct Entries(Vec<UnsafeCell<()>>);

impl Entries {
    // Loom runs its threads in turn on one system thread, so the entries need not be `Sync`.
    #[allow(clippy::arc_with_non_send_sync)]
    pub(crate) fn new(size: RingSize) -> Arc<Self> {
        Arc::new(Self((0..size.entries()).map(|_| UnsafeCell::new(())).collect()))
    }

    pub(crate) fn write(&self, at: u16) {
        self.0[usize::from(at)].with_mut(|_| ());
    }

    pub(crate) fn read(&self, at: u16) {
        self.0[usize::from(at)].with(|_| ());
    }

    /// Reads the entries between two positions.
    pub(crate) fn fetch(&self, size: RingSize, mut from: u16, to: u16) {
        while from != to {
            self.read(from);
            from = size.forward(from, 1);
        }
    }
}

/// Executes one round before a sleep, with one submission queue: arms the doorbell, rechecks it,
/// and sleeps, in the order that the crate prescribes.
pub(crate) fn sleep_on<F: Fence, W: Fence>(
    tail: &mut SqTail<Word>,
    sleeper: &mut Sleeper<Word, F>,
    wake: &Wake<W>,
) {
    let mut arming = sleeper.prepare();
    tail.arm(&mut arming);
    let mut fenced = arming.fence();
    tail.recheck(&mut fenced).unwrap();
    if let Some(_asleep) = fenced.try_sleep() {
        wake.event.wait();
    }
}

/// Host and controller of a submission queue that has been in use: one entry was submitted and
/// fetched at position `at` - 1. So EventIdx is behind the tail and requests no notification, and
/// the models do not depend on initial values that are correct by chance.
pub(crate) fn in_use<F: Fence>(
    cells: &DoorbellCells,
    size: RingSize,
    at: u16,
) -> (HostDoorbell<Word, F>, SqTail<Word>) {
    let before = size.back(at, 1);
    let (mut host, mut tail) = (cells.host(before), cells.tail(size, before));
    assert!(host.publish(at), "the first update after Doorbell Buffer Config rings");
    assert_eq!(tail.poll(), Ok(at));
    (host, tail)
}

/// A completion queue that has been in use, like [`in_use`] for a submission queue.
pub(crate) fn in_use_head<F: Fence>(
    cells: &DoorbellCells,
    size: RingSize,
    at: u16,
) -> (HostDoorbell<Word, F>, CqHead<Word>) {
    let before = size.back(at, 1);
    let (mut host, mut head) = (cells.host(before), cells.head(size, before));
    assert!(host.publish(at), "the first update after Doorbell Buffer Config rings");
    assert_eq!(head.poll(at), Ok(at));
    (host, head)
}

/// Runs the controller until the tail is at `end`: it polls, fetches, and sleeps when there is
/// nothing to fetch. It ends, because the tail never moves backwards.
pub(crate) fn serve<F: Fence, W: Fence>(
    tail: &mut SqTail<Word>,
    entries: &Entries,
    end: u16,
    sleeper: &mut Sleeper<Word, F>,
    wake: &Wake<W>,
) {
    let size = tail.size();
    let mut at = tail.last();
    while at != end {
        let seen = tail.poll().unwrap();
        assert!(size.distance(at, seen) <= size.distance(at, end), "the tail moved backwards");
        entries.fetch(size, at, seen);
        if seen == at {
            sleep_on(tail, sleeper, wake);
        }
        at = seen;
    }
}

/// Reads a word as a flag.
pub(crate) fn is_set(flag: &Word) -> bool {
    flag.load_acquire() != 0
}
