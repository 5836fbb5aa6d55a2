//! Sleep without a missed doorbell.

use core::marker::PhantomData;

use crate::{Cell, Fence, FullFence, SleeperStats};

/// State: the thread runs and polls all its sources.
const AWAKE: u32 = 0;
/// State: the thread is blocked, or will block after its rechecks.
const SLEEPING: u32 = 1;
/// State: a waker found the thread sleeping and is about to signal it. Other wakers need not
/// signal.
const WAKING: u32 = 2;

/// Thread that sleeps.
///
/// ```text
/// let mut arming = sleeper.prepare();         // announces the sleep
/// for q in &mut queues { q.arm(&mut arming) } // requests wakeups
/// let mut fenced = arming.fence();            // one full fence for all queues
/// for q in &mut queues { q.recheck(&mut fenced)? }
/// if let Some(asleep) = fenced.try_sleep() {  // no new value, and all rechecked
///     block();                                // on the eventfd that a waker signals
///     drop(asleep);                           // awake again
/// }
/// ```
///
/// The types enforce the order: arming needs the token that the fence consumes, a recheck needs the
/// token that only the fence returns, and the permit to block is returned only if every armed
/// doorbell was rechecked and none had a new value.
#[derive(Debug)]
pub struct Sleeper<C: Cell, F = FullFence> {
    state: C,
    stats: SleeperStats,
    fence: PhantomData<fn() -> F>,
}

impl<C: Cell, F: Fence> Sleeper<C, F> {
    /// Creates a sleeper in the state awake. Its wakers read `state`.
    #[inline]
    pub fn new(state: C) -> Self {
        state.store_release(AWAKE);
        Self { state, stats: SleeperStats::default(), fence: PhantomData }
    }

    /// Counters of this sleeper.
    #[inline]
    pub const fn stats(&self) -> SleeperStats {
        self.stats
    }

    /// Announces the sleep. From now on wakers signal.
    #[inline]
    pub fn prepare(&mut self) -> Arming<'_, C, F> {
        self.stats.rounds += 1;
        self.state.store_release(SLEEPING);
        Arming { declared: Declared(self), armed: 0 }
    }

    /// Returns to the state awake after [`Asleep::stay`].
    #[inline]
    pub fn rise(&mut self) {
        self.state.store_release(AWAKE);
    }
}

/// Guard of the announced sleep. Its drop returns to the state awake, on every path.
#[derive(Debug)]
struct Declared<'a, C: Cell, F>(&'a mut Sleeper<C, F>);

impl<C: Cell, F> Drop for Declared<'_, C, F> {
    #[inline]
    fn drop(&mut self) {
        self.0.state.store_release(AWAKE);
    }
}

/// First phase of a round (an attempt to sleep): arms every source that has to wake the sleeper.
#[derive(Debug)]
#[must_use = "arm every doorbell, then execute the fence"]
pub struct Arming<'a, C: Cell, F = FullFence> {
    declared: Declared<'a, C, F>,
    armed: u32,
}

impl<'a, C: Cell, F: Fence> Arming<'a, C, F> {
    /// Counts a doorbell that will have to be rechecked.
    #[inline]
    pub(crate) fn armed(&mut self) {
        self.armed += 1;
    }

    /// Executes one full fence, which orders the EventIdx stores of all armed doorbells before
    /// every recheck.
    #[inline]
    pub fn fence(self) -> Fenced<'a, C, F> {
        F::full();
        Fenced { declared: self.declared, unchecked: self.armed, found_work: false }
    }
}

/// Second phase of a round: rechecks every source.
#[derive(Debug)]
#[must_use = "recheck every doorbell, then try to sleep"]
pub struct Fenced<'a, C: Cell, F = FullFence> {
    declared: Declared<'a, C, F>,
    unchecked: u32,
    found_work: bool,
}

impl<'a, C: Cell, F: Fence> Fenced<'a, C, F> {
    /// Counts a doorbell that was rechecked.
    #[inline]
    pub(crate) fn rechecked(&mut self, found: bool) {
        self.unchecked = self.unchecked.saturating_sub(1);
        self.found_work |= found;
    }

    /// Adds the recheck of a source that is not a doorbell of this crate: a mailbox, a disk, a
    /// deadline. If `found` is true, this round does not end in a sleep.
    #[inline]
    pub fn note(&mut self, found: bool) {
        self.found_work |= found;
    }

    /// Returns the permit to block, or `None` if there is work to do first.
    ///
    /// A doorbell that was armed and not rechecked counts as work. So a forgotten recheck keeps the
    /// thread awake. This is noticed at once, in contrast to a rare lost wakeup.
    #[inline]
    #[must_use = "without the permit there is work to do"]
    pub fn try_sleep(self) -> Option<Asleep<'a, C, F>> {
        let stats = &mut self.declared.0.stats;
        if self.found_work || self.unchecked != 0 {
            stats.stayed_awake += 1;
            None
        } else {
            stats.slept += 1;
            Some(Asleep { declared: self.declared })
        }
    }
}

/// Permit to block. The drop of the permit ends the sleep.
///
/// The caller blocks until its [`Waker`]s signal, with a timeout or other sources if desired. After
/// the drop, the caller polls all sources as if all had changed. A signal must stay pending until a
/// wait consumes it, like the signal of an eventfd. No signal may be consumed between
/// [`Sleeper::prepare`] and the permit. Otherwise a waker could rely on the signal of another waker
/// although the thread has consumed that signal.
#[derive(Debug)]
#[must_use = "this is the permit to block; dropping it declares the thread awake"]
pub struct Asleep<'a, C: Cell, F = FullFence> {
    declared: Declared<'a, C, F>,
}

impl<C: Cell, F> Asleep<'_, C, F> {
    /// Keeps the sleeper asleep after this call, until [`Sleeper::rise`]. Used if the sleeper is
    /// not a thread, but an object that a thread serves. The thread ignores this object until one
    /// of the object's doorbells is written.
    ///
    /// The wakers' signal identifies the object to the thread. The signal may come from a kick
    /// before the last `rise`, so the thread has to check the object even if it is not asleep.
    #[inline]
    pub fn stay(self) {
        core::mem::forget(self.declared);
    }
}

/// Waking side of a [`Sleeper`], for a thread that traps doorbell writes or sends control messages.
/// Any number of wakers may share the sleeper's state.
#[derive(Debug)]
pub struct Waker<C, F = FullFence> {
    state: C,
    fence: PhantomData<fn() -> F>,
}

impl<C: Clone, F> Clone for Waker<C, F> {
    fn clone(&self) -> Self {
        Self { state: self.state.clone(), fence: PhantomData }
    }
}

impl<C: Cell, F: Fence> Waker<C, F> {
    /// Creates a waker for the sleeper with the same `state` cell.
    #[inline]
    pub const fn new(state: C) -> Self {
        Self { state, fence: PhantomData }
    }

    /// Handles a trapped doorbell write: stores `value` in the `register` cell. Returns true if the
    /// caller must signal the sleeper.
    ///
    /// The value need not be valid: the queue's owner validates it when it reads the cell.
    #[inline]
    #[must_use = "signal the sleeper if this is true"]
    pub fn ring<R: Cell>(&self, register: &R, value: u32) -> bool {
        register.store_release(value);
        self.kick()
    }

    /// Ends the sleep of the sleeper, or prevents it. Before this call, the caller has stored
    /// something that the sleeper checks. Returns true if the caller must signal the sleeper to
    /// wake it.
    #[inline]
    #[must_use = "signal the sleeper if this is true"]
    pub fn kick(&self) -> bool {
        // Pairs with `Arming::fence`: either the sleeper's recheck sees the caller's store, or this
        // load sees that the sleeper sleeps.
        F::full();
        let asleep = self.state.load_acquire() == SLEEPING;
        if asleep {
            // Other wakers may now rely on this caller's signal. If the sleeper wakes and sleeps
            // again before the signal arrives, the signal ends that sleep as well, and the sleeper
            // checks the stores of all wakers.
            self.state.store_release(WAKING);
        }
        asleep
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
