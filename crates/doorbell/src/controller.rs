//! Controller end of a doorbell.
//!
//! Operations: [`look`] while polling, [`arm`] and [`recheck`] before a sleep, [`disarm`] after it.
//! The rules behind them are in the documentation of the crate.
//!
//! [`look`]: SqTail::look
//! [`arm`]: SqTail::arm
//! [`recheck`]: SqTail::recheck
//! [`disarm`]: SqTail::disarm

use core::fmt;

use crate::{Arming, Cell, ControllerCounters, ControllerStats, Fence, Fenced, RingSize, Sleeper};

/// Invalid doorbell value: outside of the ring, or a completion queue head that consumes more
/// entries than were posted.
///
/// The controller reports the asynchronous event Invalid Doorbell Write Value (type Error Status,
/// 01h; NVMe Base 2.0, 5.2) and otherwise ignores the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidDoorbell {
    /// The invalid value.
    pub value: u32,
}

impl fmt::Display for InvalidDoorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "invalid doorbell value {:#x}", self.value)
    }
}

impl core::error::Error for InvalidDoorbell {}

/// Source of a doorbell's current value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truth {
    /// The doorbell register: there is no shadow entry, or the entry has not departed from its
    /// snapshot.
    Register,
    /// The last value seen: the queue used a shadow entry, which a second Doorbell Buffer Config
    /// replaced by an entry that has not departed yet. The register is out of date, so neither is
    /// read as the value.
    Last,
    /// The shadow entry, for the rest of the queue's lifetime.
    Shadow,
}

/// Serializable state of a doorbell, for continuing it elsewhere: plain data without cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoorbellState {
    /// Last valid value.
    pub last: u16,
    /// Source of the next value.
    pub truth: Truth,
    /// Value of the shadow entry when it was enabled, if it was.
    pub snapshot: Option<u32>,
}

/// Shadow entry and EventIdx while they are mapped.
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
    /// Last invalid value, which is reported once and not at every look.
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
    fn enable(&mut self, value: S, event_idx: S) {
        self.state.snapshot = None;
        if self.state.truth == Truth::Shadow {
            self.state.truth = Truth::Last;
        }
        self.reattach(value, event_idx);
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
        // The register is read first. A host stores a value in its shadow entry before it writes
        // the register, so a controller that has read the register then finds the entry departed.
        let register = self.register.load_acquire();
        let value = shadow.value.load_acquire();
        if self.state.snapshot != Some(value) {
            self.state.truth = Truth::Shadow;
            value
        } else if self.state.truth == Truth::Register {
            register
        } else {
            last
        }
    }

    /// Accepts the current value if it is at most `limit` entries ahead. True if it has changed.
    #[inline]
    fn take(&mut self, limit: u32) -> Result<bool, InvalidDoorbell> {
        let value = self.read();
        if value == u32::from(self.state.last) {
            return Ok(false);
        }
        let Some(seen) = self.size.position(value) else { return self.refuse(value) };
        let moved = self.size.distance(self.state.last, seen);
        if moved > limit {
            return self.refuse(value);
        }
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

    /// Moves EventIdx out of the way of a host whose value has just moved by `moved` entries.
    ///
    /// No EventIdx value means "never ring": every position of the ring is passed by the host once
    /// per turn. So EventIdx follows behind the host, with a step whenever the host is a quarter of
    /// the ring ahead. The new position is one before the value that the host moved from, not
    /// before the value that it moved to: the host may be in the middle of this update, with its
    /// value stored and EventIdx not read yet, and must not find EventIdx in the interval of the
    /// update. An update of more than an eighth of the ring is not protected, because the distance
    /// in front of the host is needed, too.
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
            // Until the entry departs, EventIdx follows exactly: if the host's first shadow update
            // leaves the entry's value unchanged, the register write is the only sign of it.
            last
        };
        shadow.publish(event_idx);
        self.counters.as_ref().event_idx_moved.add(1);
    }

    #[inline]
    fn look(&mut self, limit: u32) -> Result<u16, InvalidDoorbell> {
        self.counters.as_ref().looks.add(1);
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

    /// Distance that a completion queue's head may move: up to `tail`, the next entry to be posted.
    #[inline]
    fn posted(&self, tail: u16) -> u32 {
        self.size.distance(self.state.last, tail)
    }
}

macro_rules! doorbell {
    ($(#[$outer:meta])* $name:ident) => {
        $(#[$outer])*
        ///
        /// `R` is the cell of the doorbell register, which is written by the trap handler, or by
        /// the host itself if the doorbell page is mapped. `S` is a cell in the Shadow Doorbell and
        /// EventIdx buffers.
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

            /// Continues the doorbell of a queue from elsewhere, from its [`state`](Self::state);
            /// `None` if the state is invalid for a queue of this `size`. `register` must hold the
            /// same value as there. The shadow entry, if there was one, is attached with
            /// [`reattach`](Self::reattach).
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

            /// Enables the shadow entry `value` and the EventIdx entry `event_idx`, when Doorbell
            /// Buffer Config is executed, or when a queue is created while it is enabled. Call this
            /// before the command completes.
            ///
            /// Takes the entry's value as the snapshot from which it has to depart, and arms
            /// EventIdx. `value` is never written.
            #[inline]
            pub fn enable(&mut self, value: S, event_idx: S) {
                self.doorbell.enable(value, event_idx);
            }

            /// Drops the cells of the shadow entry and of EventIdx: first step of a Controller
            /// Level Reset, or after the host has unmapped their page. The state of the entry is
            /// kept; a queue whose value is in the entry stops.
            #[inline]
            pub fn disable(&mut self) {
                self.doorbell.shadow = None;
            }

            /// Attaches the same shadow entry after [`disable`](Self::disable) or
            /// [`resume`](Self::resume), mapped anew. [`enable`](Self::enable) would instead wait
            /// for the entry to depart once more. An entry that was never attached is enabled.
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

            /// State for continuing the doorbell elsewhere.
            #[inline]
            pub const fn state(&self) -> DoorbellState {
                self.doorbell.state
            }

            /// Counters of this doorbell.
            #[inline]
            pub fn stats(&self) -> ControllerStats {
                self.doorbell.counters.as_ref().read()
            }

            /// First phase before a sleep: makes the host ring at its next update.
            #[inline]
            pub fn arm<T: Cell, F: Fence>(&mut self, arming: &mut Arming<'_, T, F>) {
                self.doorbell.arm();
                arming.armed();
            }

            /// After a sleep, or after a round without sleep: withdraws the request to ring if the
            /// host has not moved, so that its next update costs no MMIO while the controller
            /// polls.
            ///
            /// The `&Sleeper` proves that no round is in progress: within a round, this would lose
            /// a wakeup, and does not compile.
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
    /// Read it once per batch of posted completions, and arm it only while a submission queue waits
    /// for room: otherwise the host rings after every batch of completions for no purpose.
    CqHead
}

impl<R: Cell, S: Cell, C: AsRef<ControllerCounters>> SqTail<R, S, C> {
    /// Reads the tail. Entries before it may be fetched; the host's writes to them are visible.
    ///
    /// # Errors
    ///
    /// A value outside of the ring; reported once, until there is a valid one.
    #[inline]
    pub fn look(&mut self) -> Result<u16, InvalidDoorbell> {
        self.doorbell.look(RingSize::MAX)
    }

    /// Value that [`look`](Self::look) would return now, without accepting it: a hint for
    /// prefetches only. Returns the last value if the current one is invalid or its source is not
    /// decided.
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
    /// Those of [`look`](Self::look); the round then does not end in a sleep.
    #[inline]
    pub fn recheck<T: Cell, F: Fence>(
        &mut self,
        fenced: &mut Fenced<'_, T, F>,
    ) -> Result<u16, InvalidDoorbell> {
        let result = self.doorbell.recheck(RingSize::MAX);
        fenced.rechecked(!matches!(result, Ok(false)));
        result.map(|_| self.last())
    }
}

impl<R: Cell, S: Cell, C: AsRef<ControllerCounters>> CqHead<R, S, C> {
    /// Reads the head. Entries before it are free again. `tail` is the next entry to be posted.
    ///
    /// # Errors
    ///
    /// A value outside of the ring or past `tail`; reported once, until there is a valid one.
    #[inline]
    pub fn look(&mut self, tail: u16) -> Result<u16, InvalidDoorbell> {
        self.doorbell.look(self.doorbell.posted(tail))
    }

    /// Second phase before a sleep: reads the head again, after the fence has made EventIdx
    /// visible.
    ///
    /// # Errors
    ///
    /// Those of [`look`](Self::look); the round then does not end in a sleep.
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
