//! Controller end of a doorbell.
//!
//! Operations: [`poll`] while polling, [`arm`] and [`recheck`] before a sleep, [`disarm`] after it.
//! The rules behind them are in the documentation of the crate.
//!
//! [`poll`]: SqTail::poll
//! [`arm`]: SqTail::arm
//! [`recheck`]: SqTail::recheck
//! [`disarm`]: SqTail::disarm

use crate::ring::{InvalidDoorbell, RingSize};
use crate::{Arming, Cell, ControllerCounters, ControllerStats, Fence, Fenced, Sleeper};

/// Source of a doorbell's current value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truth {
    /// The doorbell register: there is no shadow entry, or the entry still has the value of its
    /// snapshot.
    Register,
    /// The last valid value that the controller has read. A second Doorbell Buffer Config has
    /// replaced the shadow entry, and the host has not written the new entry yet. Until it does,
    /// neither the new entry nor the register has the current value.
    Last,
    /// The shadow entry, for the rest of the queue's lifetime.
    Shadow,
    /// The last valid value, for the rest of the queue's lifetime: the submission queue tail was
    /// invalid.
    Invalid,
}

/// Serializable state of a doorbell: plain data without cells, to continue the doorbell in another
/// process or thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoorbellState {
    /// Last valid value of the doorbell.
    pub last: u16,
    /// Source of the doorbell's next value.
    pub truth: Truth,
    /// Value of the shadow entry when the entry was enabled; `None` if it never was.
    pub snapshot: Option<u32>,
}

/// Value that the controller stores in the register at a second Doorbell Buffer Config. No ring has
/// this many entries, so the controller can recognize a later register write of the host.
const UNWRITTEN: u32 = u32::MAX;

/// Shadow entry and EventIdx, while the host's pages with them are mapped.
#[derive(Debug)]
struct Shadow<S> {
    value: S,
    event_idx: S,
    /// Last value stored in `event_idx`. The cell itself is never read, because the host can write
    /// it.
    published: u16,
}

impl<S: Cell> Shadow<S> {
    #[inline]
    fn publish(&mut self, event_idx: u16) {
        self.published = event_idx;
        self.event_idx.store_release(u32::from(event_idx));
    }
}

/// Common part of a submission queue tail and a completion queue head.
#[derive(Debug)]
struct Doorbell<R, S, C> {
    size: RingSize,
    state: DoorbellState,
    register: R,
    shadow: Option<Shadow<S>>,
    /// Last invalid value. It is reported once and not at every poll.
    refused: Option<u32>,
    counters: C,
}

impl<R: Cell, S: Cell> Doorbell<R, S, ControllerCounters> {
    fn new(size: RingSize, register: R, state: DoorbellState) -> Self {
        let counters = ControllerCounters::default();
        Self { size, state, register, shadow: None, refused: None, counters }
    }
}

impl<R: Cell, S: Cell, C: AsRef<ControllerCounters>> Doorbell<R, S, C> {
    /// Replaces the shadow entry. An update in the old entry that was not read yet is accepted, if
    /// it is at most `limit` entries ahead of the last value.
    fn enable(&mut self, value: S, event_idx: S, limit: u32) -> Result<(), InvalidDoorbell> {
        // The new entry is read before the old one. A host that stores an update in both entries
        // stores it in the old one first. So if the new entry has the update, the read of the old
        // entry sees it, too. If both are the same entry, an update in between is a difference from
        // the snapshot.
        let snapshot = value.load_acquire();
        let pending = if self.shadow.is_some() { self.take(limit) } else { Ok(false) };
        self.state.snapshot = Some(snapshot);
        if matches!(self.state.truth, Truth::Last | Truth::Shadow) {
            // An entry with the last value is up to date. If the new entry has changed since it was
            // read, the host already uses it.
            let is_current = snapshot == u32::from(self.state.last);
            let is_used = value.load_acquire() != snapshot;
            self.state.truth = if is_current || is_used { Truth::Shadow } else { Truth::Last };
        }
        if self.state.truth == Truth::Last {
            self.register.store_release(UNWRITTEN);
        }
        self.reattach(value, event_idx);
        pending.map(drop)
    }

    fn reattach(&mut self, value: S, event_idx: S) {
        self.state.snapshot.get_or_insert_with(|| value.load_acquire());
        let mut shadow = Shadow { value, event_idx, published: self.state.last };
        shadow.publish(self.state.last);
        self.shadow = Some(shadow);
    }

    /// Reads the current value from its source.
    #[inline]
    fn read(&mut self) -> u32 {
        let last = u32::from(self.state.last);
        let Some(shadow) = &self.shadow else {
            return if self.state.truth == Truth::Register {
                self.register.load_acquire()
            } else {
                last
            };
        };
        if self.state.truth == Truth::Shadow {
            return shadow.value.load_acquire();
        }
        if self.state.truth == Truth::Invalid {
            return last;
        }
        // The register is read first. A host stores a value in its shadow entry before it writes
        // the register. So if the register has the value, the read of the entry sees it, too.
        let register = self.register.load_acquire();
        let value = shadow.value.load_acquire();
        // With the source `Last`, the register is current if the host has written it after the
        // second Doorbell Buffer Config; then the register equals the entry. If the register
        // contains a late posted write of an earlier value, it differs from the entry.
        let is_rung = self.state.truth == Truth::Last && register == value;
        if self.state.snapshot != Some(value) || is_rung {
            self.state.truth = Truth::Shadow;
            value
        } else if self.state.truth == Truth::Register {
            register
        } else {
            last
        }
    }

    /// Accepts the current value if it is at most `limit` entries ahead of the last value.
    /// Returns true if the value has changed.
    #[inline]
    fn take(&mut self, limit: u32) -> Result<bool, InvalidDoorbell> {
        let value = self.read();
        if value == u32::from(self.state.last) {
            return Ok(false);
        }
        let Ok(seen) = self.size.validate(self.state.last, value, limit) else {
            return self.refuse(value);
        };
        let moved = self.size.distance(self.state.last, seen);
        self.refused = None;
        self.state.last = seen;
        self.run_ahead(moved);
        Ok(true)
    }

    #[cold]
    fn refuse(&mut self, value: u32) -> Result<bool, InvalidDoorbell> {
        if self.refused == Some(value) {
            return Ok(false);
        }
        self.refused = Some(value);
        self.counters.as_ref().invalid.add(1);
        Err(InvalidDoorbell { value })
    }

    /// Moves EventIdx, so that a host whose value has just moved by `moved` entries does not pass
    /// it.
    ///
    /// No EventIdx value means "never ring", because the host passes every position of the ring
    /// once per turn. So EventIdx follows behind the host: it moves whenever the host is a quarter
    /// of the ring ahead. The new position is one before the value that the host moved from. It is
    /// not one before the new value, because the host may have stored the new value and not yet
    /// read EventIdx: if EventIdx were between the old and the new value, the host would ring.
    /// After an update of more than an eighth of the ring, EventIdx is between the two values
    /// nevertheless: if it were further behind, the host would pass it too soon.
    #[inline]
    fn run_ahead(&mut self, moved: u32) {
        let Some(shadow) = &mut self.shadow else { return };
        let last = self.state.last;
        let event_idx = if self.state.truth == Truth::Shadow {
            let entries = self.size.entries();
            let behind = self.size.distance(shadow.published, last);
            if behind != 0 && behind <= (entries / 4).max(1) {
                return;
            }
            self.size.back(last, 1 + moved.min(entries / 8))
        } else {
            // Until the entry differs from its snapshot, EventIdx equals the last value: if the
            // host's first shadow update leaves the entry's value unchanged, only the register
            // write shows the update.
            last
        };
        shadow.publish(event_idx);
        self.counters.as_ref().event_idx_moved.add(1);
    }

    #[inline]
    fn poll(&mut self, limit: u32) -> Result<u16, InvalidDoorbell> {
        self.counters.as_ref().polls.add(1);
        let moved = self.take(limit)?;
        self.counters.as_ref().found_new.add(u64::from(moved));
        Ok(self.state.last)
    }

    #[inline]
    fn recheck(&mut self, limit: u32) -> Result<bool, InvalidDoorbell> {
        self.counters.as_ref().rechecks.add(1);
        let moved = self.take(limit)?;
        self.counters.as_ref().rechecks_found.add(u64::from(moved));
        Ok(moved)
    }

    #[inline]
    fn arm(&mut self) {
        if let Some(shadow) = &mut self.shadow
            && shadow.published != self.state.last
        {
            self.counters.as_ref().event_idx_armed.add(1);
            shadow.publish(self.state.last);
        }
    }

    #[inline]
    fn disarm(&mut self) {
        if let Some(shadow) = &mut self.shadow
            && self.state.truth == Truth::Shadow
            && shadow.published == self.state.last
        {
            shadow.publish(self.size.back(self.state.last, 1));
            self.counters.as_ref().event_idx_moved.add(1);
        }
    }

    /// Number of entries that a completion queue's head may move: up to `tail`, the next entry to
    /// be posted.
    #[inline]
    fn posted(&self, tail: u16) -> u32 {
        self.size.distance(self.state.last, tail)
    }
}

macro_rules! doorbell {
    ($(#[$outer:meta])* $name:ident) => {
        $(#[$outer])*
        ///
        /// `R` is the cell of the doorbell register. The trap handler writes it, or the host itself
        /// if the doorbell page is mapped. `S` is a cell in the Shadow Doorbell and EventIdx
        /// buffers.
        ///
        /// `C` holds the counters: owned, or shared with other threads
        /// ([`counted_by`](Self::counted_by)).
        #[derive(Debug)]
        pub struct $name<R, S = R, C = ControllerCounters> {
            doorbell: Doorbell<R, S, C>,
        }

        impl<R: Cell, S: Cell> $name<R, S> {
            /// Creates the doorbell of a new, empty queue, at position 0 and without a shadow
            /// entry until [`enable`](Self::enable). `register` must hold 0.
            #[inline]
            pub fn new(size: RingSize, register: R) -> Self {
                let state = DoorbellState { last: 0, truth: Truth::Register, snapshot: None };
                Self { doorbell: Doorbell::new(size, register, state) }
            }

            /// Continues the doorbell of a queue from its saved [`state`](Self::state). Returns
            /// `None` if the state is invalid for a queue of this `size`. `register` must have the
            /// same value as when the state was saved. If the doorbell had a shadow entry, attach
            /// it with [`reattach`](Self::reattach).
            #[inline]
            pub fn resume(size: RingSize, register: R, state: DoorbellState) -> Option<Self> {
                size.position(u32::from(state.last))?;
                Some(Self { doorbell: Doorbell::new(size, register, state) })
            }
        }

        impl<R: Cell, S: Cell, C: AsRef<ControllerCounters>> $name<R, S, C> {
            /// Replaces the counters, for example by an `Arc` of [`ControllerCounters`] that other
            /// threads read.
            #[inline]
            pub fn counted_by<D>(self, counters: D) -> $name<R, S, D>
            where
                D: AsRef<ControllerCounters>,
            {
                let Doorbell { size, state, register, shadow, refused, .. } = self.doorbell;
                let doorbell = Doorbell { size, state, register, shadow, refused, counters };
                $name { doorbell }
            }

            /// Drops the cells of the shadow entry and of EventIdx. Call this as the first step of
            /// a Controller Level Reset, and when the host has unmapped their pages. The doorbell
            /// still records whether the entry is the source of the value. If it is, the value does
            /// not change until [`reattach`](Self::reattach).
            #[inline]
            pub fn disable(&mut self) {
                self.doorbell.shadow = None;
            }

            /// Attaches the same shadow entry, mapped again, after [`disable`](Self::disable) or
            /// [`resume`](Self::resume). In contrast, [`enable`](Self::enable) would take a new
            /// snapshot. An entry that was never attached is enabled.
            #[inline]
            pub fn reattach(&mut self, value: S, event_idx: S) {
                self.doorbell.reattach(value, event_idx);
            }

            /// Size of the queue.
            #[inline]
            pub const fn size(&self) -> RingSize {
                self.doorbell.size
            }

            /// Last valid value.
            #[inline]
            pub const fn last(&self) -> u16 {
                self.doorbell.state.last
            }

            /// State that is sufficient to [continue](Self::resume) the doorbell.
            #[inline]
            pub const fn state(&self) -> DoorbellState {
                self.doorbell.state
            }

            /// Counters of this doorbell.
            #[inline]
            pub fn stats(&self) -> ControllerStats {
                self.doorbell.counters.as_ref().read()
            }

            /// First phase before a sleep: sets EventIdx so that the host rings at its next update.
            #[inline]
            pub fn arm<T: Cell, F: Fence>(&mut self, arming: &mut Arming<'_, T, F>) {
                self.doorbell.arm();
                arming.armed();
            }

            /// Withdraws the request to ring, after a sleep or after a round without a sleep. If
            /// the host has not moved, its next update then costs no MMIO while the controller
            /// polls.
            ///
            /// The `&Sleeper` proves that no round is in progress. Within a round, a call would
            /// lose a wakeup, so it does not compile.
            #[inline]
            pub fn disarm<T: Cell, F: Fence>(&mut self, _: &Sleeper<T, F>) {
                self.doorbell.disarm();
            }
        }
    };
}

doorbell! {
    /// Submission queue tail, as read by the controller.
    SqTail
}

doorbell! {
    /// Completion queue head, as read by the controller.
    ///
    /// Read it once per batch of posted completions. Arm it only while a submission queue waits for
    /// room in the completion queue; otherwise the host rings without need after every batch of
    /// completions.
    CqHead
}

impl<R: Cell, S: Cell, C: AsRef<ControllerCounters>> SqTail<R, S, C> {
    /// Enables the shadow entry `value` and the EventIdx entry `event_idx`, when Doorbell Buffer
    /// Config is executed, or when a queue is created while shadow doorbells are enabled. Call this
    /// before the command completes.
    ///
    /// Takes the entry's value as the snapshot, and arms EventIdx. The entry becomes the source of
    /// the value when it first differs from the snapshot. `value` is never written.
    ///
    /// If the doorbell has a shadow entry already, the value of that entry is read a last time, so
    /// an update just before a second Doorbell Buffer Config is not lost. The two entries may be
    /// the same one.
    ///
    /// # Errors
    ///
    /// The value of the old entry is invalid. The new entry is enabled even then.
    #[inline]
    pub fn enable(&mut self, value: S, event_idx: S) -> Result<(), InvalidDoorbell> {
        let outcome = self.doorbell.enable(value, event_idx, RingSize::MAX);
        outcome.inspect_err(|_| self.doorbell.state.truth = Truth::Invalid)
    }

    /// Reads the tail. Entries before it may be fetched, because the host's writes to them are
    /// visible.
    ///
    /// # Errors
    ///
    /// A value outside of the ring. It is reported once, and the tail stays at its last valid value
    /// ([`Truth::Invalid`]): the positions of host and controller differ until the host creates the
    /// queue again.
    #[inline]
    pub fn poll(&mut self) -> Result<u16, InvalidDoorbell> {
        self.doorbell
            .poll(RingSize::MAX)
            .inspect_err(|_| self.doorbell.state.truth = Truth::Invalid)
    }

    /// Value that [`poll`](Self::poll) would return now. The value is not accepted, so it is only a
    /// hint for prefetches. Returns the last value if the current one is invalid, or if it is
    /// undecided whether the register or the shadow entry is its source.
    #[inline]
    pub fn peek(&self) -> u16 {
        let doorbell = &self.doorbell;
        let value = match (&doorbell.shadow, doorbell.state.truth) {
            (Some(shadow), Truth::Shadow) => shadow.value.load_acquire(),
            (None, Truth::Register) => doorbell.register.load_acquire(),
            _ => return self.last(),
        };
        match u16::try_from(value) {
            Ok(value) if u32::from(value) < doorbell.size.entries() => value,
            _ => self.last(),
        }
    }

    /// Second phase before a sleep: reads the tail again, after the fence has made EventIdx
    /// visible.
    ///
    /// # Errors
    ///
    /// Errors of [`poll`](Self::poll). The round then does not end in a sleep.
    #[inline]
    pub fn recheck<T: Cell, F: Fence>(
        &mut self,
        fenced: &mut Fenced<'_, T, F>,
    ) -> Result<u16, InvalidDoorbell> {
        let result = self.doorbell.recheck(RingSize::MAX);
        fenced.rechecked(!matches!(result, Ok(false)));
        if result.is_err() {
            self.doorbell.state.truth = Truth::Invalid;
        }
        result.map(|_| self.last())
    }
}

impl<R: Cell, S: Cell, C: AsRef<ControllerCounters>> CqHead<R, S, C> {
    /// Enables the shadow entry `value` and the EventIdx entry `event_idx`, when Doorbell Buffer
    /// Config is executed, or when a queue is created while shadow doorbells are enabled. Call this
    /// before the command completes. `tail` is the next entry to be posted.
    ///
    /// Takes the entry's value as the snapshot, and arms EventIdx. The entry becomes the source of
    /// the value when it first differs from the snapshot. `value` is never written.
    ///
    /// If the doorbell has a shadow entry already, the value of that entry is read a last time, so
    /// an update just before a second Doorbell Buffer Config is not lost. The two entries may be
    /// the same one.
    ///
    /// # Errors
    ///
    /// The value of the old entry is invalid. The new entry is enabled even then.
    #[inline]
    pub fn enable(&mut self, value: S, event_idx: S, tail: u16) -> Result<(), InvalidDoorbell> {
        self.doorbell.enable(value, event_idx, self.doorbell.posted(tail))
    }

    /// Reads the head. Entries before it are free again. `tail` is the next entry to be posted.
    ///
    /// # Errors
    ///
    /// A value outside of the ring or past `tail`. It is reported once, until there is a valid
    /// value.
    #[inline]
    pub fn poll(&mut self, tail: u16) -> Result<u16, InvalidDoorbell> {
        self.doorbell.poll(self.doorbell.posted(tail))
    }

    /// Second phase before a sleep: reads the head again, after the fence has made EventIdx
    /// visible.
    ///
    /// # Errors
    ///
    /// Errors of [`poll`](Self::poll). The round then does not end in a sleep.
    #[inline]
    pub fn recheck<T: Cell, F: Fence>(
        &mut self,
        fenced: &mut Fenced<'_, T, F>,
        tail: u16,
    ) -> Result<u16, InvalidDoorbell> {
        let result = self.doorbell.recheck(self.doorbell.posted(tail));
        fenced.rechecked(!matches!(result, Ok(false)));
        result.map(|_| self.last())
    }
}

#[cfg(all(test, not(loom)))]
mod run_ahead_model;
#[cfg(all(test, not(loom)))]
mod tests;
