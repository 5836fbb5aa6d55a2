//! Going to sleep without missing a doorbell.

use core::marker::PhantomData;

use crate::{Cell, Fence, FullFence, SleeperStats};

/// Running, and looking at everything by itself.
const AWAKE: u32 = 0;
/// Blocked, or about to be once it has looked at everything a last time.
const SLEEPING: u32 = 1;
/// Somebody found it sleeping and is about to signal it; nobody else needs to.
const WAKING: u32 = 2;

/// The thread that sleeps.
///
/// ```text
/// let mut arming = sleeper.prepare();         // "I am going to sleep"
/// for q in &mut queues { q.arm(&mut arming) } // "... so wake me for anything new"
/// let mut fenced = arming.fence();            // one full fence for all of it
/// for q in &mut queues { q.recheck(&mut fenced)? }
/// if let Some(asleep) = fenced.try_sleep() {  // nothing new anywhere, and nothing forgotten
///     block();                                // on the eventfd that a waker signals
///     drop(asleep);                           // awake again
/// }
/// ```
///
/// The order is in the types: arming takes the token that the fence consumes, a recheck takes the
/// token that only the fence gives, and the permit to block is given only if every doorbell that
/// was armed has been rechecked and none had a new value.
#[derive(Debug)]
pub struct Sleeper<C: Cell, F = FullFence> {
    state: C,
    stats: SleeperStats,
    fence: PhantomData<fn() -> F>,
}

impl<C: Cell, F: Fence> Sleeper<C, F> {
    /// A sleeper, awake, whose state its wakers read from `state`.
    #[inline]
    pub fn new(state: C) -> Self {
        state.store_release(AWAKE);
        Self { state, stats: SleeperStats::default(), fence: PhantomData }
    }

    /// What this sleeper did so far.
    #[inline]
    pub const fn stats(&self) -> SleeperStats {
        self.stats
    }

    /// Declares the intention to sleep. From here on wakers signal.
    #[inline]
    pub fn prepare(&mut self) -> Arming<'_, C, F> {
        self.stats.rounds += 1;
        self.state.store_release(SLEEPING);
        Arming { declared: Declared(self), armed: 0 }
    }

    /// Awake again after [`Asleep::stay`].
    #[inline]
    pub fn rise(&mut self) {
        self.state.store_release(AWAKE);
    }
}

/// Declared asleep; awake again when dropped, on whichever path.
#[derive(Debug)]
struct Declared<'a, C: Cell, F>(&'a mut Sleeper<C, F>);

impl<C: Cell, F> Drop for Declared<'_, C, F> {
    #[inline]
    fn drop(&mut self) {
        self.0.state.store_release(AWAKE);
    }
}

/// The first half of a round: publish what should wake the sleeper.
#[derive(Debug)]
#[must_use = "arm every doorbell, then pass the fence"]
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

    /// Passes the one full fence that makes everything armed so far visible before anything is
    /// looked at again.
    #[inline]
    pub fn fence(self) -> Fenced<'a, C, F> {
        F::full();
        Fenced { declared: self.declared, unchecked: self.armed, found_work: false }
    }
}

/// The second half of a round: look at everything once more.
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

    /// Notes the result of looking at something that is not a doorbell of this crate: a mailbox,
    /// the backend, a deadline. With `true` this round will not end in sleep.
    #[inline]
    pub fn note(&mut self, found: bool) {
        self.found_work |= found;
    }

    /// The permit to block, or nothing if there is work to do first.
    ///
    /// A doorbell that was armed and not rechecked counts as work: a forgotten recheck keeps the
    /// thread awake, where everyone can see it, instead of losing a wakeup once a month.
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

/// The permit to block. Dropping it is waking up.
///
/// The caller blocks on what its [`Waker`]s signal, with a timeout or other sources if it likes,
/// and after the drop looks at everything as if all of it had changed. A signal must stick until
/// somebody waits for it, as an eventfd's does, and must be consumed outside of the rounds only: a
/// waker that relies on the signal of another would otherwise wait for one that is gone.
#[derive(Debug)]
#[must_use = "this is the permit to block; dropping it declares the thread awake"]
pub struct Asleep<'a, C: Cell, F = FullFence> {
    declared: Declared<'a, C, F>,
}

impl<C: Cell, F> Asleep<'_, C, F> {
    /// Sleeps on beyond this call, until [`Sleeper::rise`]: for a sleeper that is not a thread but
    /// a part of what a thread looks after, which can be left alone until a doorbell of its is
    /// written.
    ///
    /// Its wakers' signal is whatever says to the thread which part it was, and may come from a
    /// kick before the last `rise`; so it makes the thread look, whatever it believes of that part.
    #[inline]
    pub fn stay(self) {
        core::mem::forget(self.declared);
    }
}

/// A thread that may have to wake a [`Sleeper`]: the one that traps doorbell writes, or one that
/// sends it control messages. Any number of them may share the sleeper's state.
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
    /// A waker for the sleeper that has the same `state` cell.
    #[inline]
    pub const fn new(state: C) -> Self {
        Self { state, fence: PhantomData }
    }

    /// A trapped doorbell write: puts `value` in the `register` cell; says whether the caller must
    /// signal the sleeper.
    ///
    /// Nothing is validated here, on the trapping thread: the owner of the queue does that when it
    /// looks.
    #[inline]
    #[must_use = "signal the sleeper if this says so"]
    pub fn ring<R: Cell>(&self, register: &R, value: u32) -> bool {
        register.store_release(value);
        self.kick()
    }

    /// After the caller has stored, wherever the sleeper looks, something that it should see: says
    /// whether the caller must signal it.
    #[inline]
    #[must_use = "signal the sleeper if this says so"]
    pub fn kick(&self) -> bool {
        // Pairs with `Arming::fence`: either the sleeper sees what we stored in its last look, or
        // we see here that it sleeps.
        F::full();
        let asleep = self.state.load_acquire() == SLEEPING;
        if asleep {
            // Our signal follows, so others may leave it to us. If the sleeper was woken and sleeps
            // again meanwhile, our signal still follows, and it will look at theirs as well.
            self.state.store_release(WAKING);
        }
        asleep
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
