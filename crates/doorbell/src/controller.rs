//! The controller's end of one doorbell.
//!
//! Verbs: [`look`] while polling, [`arm`] and [`recheck`] on the way to sleep, [`disarm`] after it.
//! What is looked at, and why it can be believed, is in the documentation of the crate.
//!
//! [`look`]: SqTail::look
//! [`arm`]: SqTail::arm
//! [`recheck`]: SqTail::recheck
//! [`disarm`]: SqTail::disarm

use core::fmt;

use crate::{Arming, Cell, ControllerCounters, ControllerStats, Fence, Fenced, RingSize, Sleeper};

/// A host put a value in a doorbell that cannot be: outside the ring, or a completion queue head
/// that consumes more than was posted.
///
/// The controller answers with the asynchronous event Invalid Doorbell Write Value (type Error
/// Status, 01h; NVMe Base 2.0, 5.2) and otherwise ignores the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidDoorbell {
    /// The value, as found.
    pub value: u32,
}

impl fmt::Display for InvalidDoorbell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "invalid doorbell value {:#x}", self.value)
    }
}

impl core::error::Error for InvalidDoorbell {}

/// Where a doorbell's value is to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truth {
    /// In the doorbell register: there is no shadow entry, or it has not departed from its
    /// snapshot.
    Register,
    /// Nowhere new: the queue has lived by a shadow entry, which Doorbell Buffer Config replaced by
    /// one that has not departed yet. The register is out of date by now; the last value stands.
    Last,
    /// In the shadow entry, for as long as the queue lives.
    Shadow,
}

/// What has to be kept of a doorbell to go on with it elsewhere: plain data, no cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoorbellState {
    /// The last valid value seen.
    pub last: u16,
    /// Where the next one will be found.
    pub truth: Truth,
    /// What the shadow entry held when it was put in force, if it was.
    pub snapshot: Option<u32>,
}

/// The shadow entry and its EventIdx, while they are mapped.
#[derive(Debug)]
struct Shadow<S> {
    value: S,
    event_idx: S,
    /// What we last stored in `event_idx`. The cell itself is never read: the host can write it.
    published: u16,
}

impl<S: Cell> Shadow<S> {
    #[inline]
    fn publish(&mut self, event_idx: u16) {
        self.published = event_idx;
        self.event_idx.store_release(u32::from(event_idx));
    }
}

/// What a tail and a head have in common.
#[derive(Debug)]
struct Doorbell<R, S, C> {
    size: RingSize,
    state: DoorbellState,
    register: R,
    shadow: Option<Shadow<S>>,
    /// The last value refused, so that it is reported once and not at every look.
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

    /// The present value, from where the truth is.
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
        // The register first. A host stores a value in its shadow entry before it rings; whoever
        // has read what it rang with must then find the entry departed.
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

    /// Takes the present value if it lies at most `limit` entries ahead; says whether it moved.
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

    /// Keeps EventIdx out of the way of a host whose value has just been seen to have `moved`.
    ///
    /// "Never ring" has no value: there is a position for EventIdx only behind the host, and the
    /// host comes round. So EventIdx follows, a step whenever the host is a quarter of the ring
    /// ahead. It goes to one before the value that the host moved from, not the one that it moved
    /// to: the host may be in the middle of this very update, its value stored and EventIdx not yet
    /// read, and would find it in the interval that it steps over. An update of more than an eighth
    /// of the ring is not spared that; the room is needed in front.
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
            // Until the entry departs, keep in step: if the host's first update under the new rule
            // leaves the entry as it was, a ring is the only trace of it.
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

    /// How far a completion queue's head may go: the controller posts at `tail`.
    #[inline]
    fn posted(&self, tail: u16) -> u32 {
        self.size.distance(self.state.last, tail)
    }
}

macro_rules! doorbell {
    ($(#[$outer:meta])* $name:ident) => {
        $(#[$outer])*
        ///
        /// `R` is the cell of the doorbell register: the trap stores in it, or the host itself if
        /// the page of doorbells is mapped. `S` is a cell in the Shadow Doorbell and EventIdx
        /// buffers.
        ///
        /// `C` is where it counts: here, or what others hold as well
        /// ([`counted_by`](Self::counted_by)).
        #[derive(Debug)]
        pub struct $name<R, S = R, C = ControllerCounters> {
            doorbell: Doorbell<R, S, C>,
        }

        impl<R: Cell, S: Cell> $name<R, S> {
            /// The doorbell of a queue that was just created: empty, at position 0, and with no
            /// shadow entry until [`enable`](Self::enable). `register` must hold 0.
            #[inline]
            pub fn new(size: RingSize, register: R) -> Self {
                let state = DoorbellState { last: 0, truth: Truth::Register, snapshot: None };
                Self { doorbell: Doorbell::new(size, register, state) }
            }

            /// The doorbell of a queue that lived elsewhere, from its [`state`](Self::state);
            /// nothing if that is not a state of a queue of this `size`. `register` must hold what
            /// it held there. The shadow entry, if there was one, follows with
            /// [`reattach`](Self::reattach).
            #[inline]
            pub fn resume(size: RingSize, register: R, state: DoorbellState) -> Option<Self> {
                size.position(u32::from(state.last))?;
                Some(Self { doorbell: Doorbell::new(size, register, state) })
            }
        }

        impl<R: Cell, S: Cell, C: AsRef<ControllerCounters>> $name<R, S, C> {
            /// Counts in `counters` from here on, which others may read meanwhile: an `Arc` of
            /// [`ControllerCounters`].
            #[inline]
            pub fn counted_by<D>(self, counters: D) -> $name<R, S, D>
            where
                D: AsRef<ControllerCounters>,
            {
                let Doorbell { size, state, register, shadow, refused, .. } = self.doorbell;
                let doorbell = Doorbell { size, state, register, shadow, refused, counters };
                $name { doorbell }
            }

            /// Doorbell Buffer Config is being executed, or the queue created while it is in force:
            /// `value` is the entry of the Shadow Doorbell buffer, `event_idx` that of the EventIdx
            /// buffer. To be called before the command completes.
            ///
            /// Takes the entry's value as the snapshot that it has to depart from, and arms
            /// EventIdx. `value` is never written.
            #[inline]
            pub fn enable(&mut self, value: S, event_idx: S) {
                self.doorbell.enable(value, event_idx);
            }

            /// Drops the cells of the shadow entry and of its EventIdx: a Controller Level Reset,
            /// which does this before anything else, or the host unmapped their page. What is known
            /// about the entry stays known; a queue that lives by it stands still.
            #[inline]
            pub fn disable(&mut self) {
                self.doorbell.shadow = None;
            }

            /// The same shadow entry again, mapped anew: after [`disable`](Self::disable) or
            /// [`resume`](Self::resume). Not [`enable`](Self::enable), which would wait for the
            /// entry to depart once more. An entry that was never in reach is enabled by this.
            #[inline]
            pub fn reattach(&mut self, value: S, event_idx: S) {
                self.doorbell.reattach(value, event_idx);
            }

            /// The size of the queue.
            #[inline]
            pub const fn size(&self) -> RingSize {
                self.doorbell.size
            }

            /// The last valid value seen.
            #[inline]
            pub const fn last(&self) -> u16 {
                self.doorbell.state.last
            }

            /// What to keep, to go on elsewhere.
            #[inline]
            pub const fn state(&self) -> DoorbellState {
                self.doorbell.state
            }

            /// What this doorbell did so far.
            #[inline]
            pub fn stats(&self) -> ControllerStats {
                self.doorbell.counters.as_ref().read()
            }

            /// The first half of going to sleep: asks the host to ring at its next update.
            #[inline]
            pub fn arm<T: Cell, F: Fence>(&mut self, arming: &mut Arming<'_, T, F>) {
                self.doorbell.arm();
                arming.armed();
            }

            /// After sleep, or a round that did not end in it: if the host has not moved, takes the
            /// request to ring back, so that its next update costs nothing while we poll.
            ///
            /// The sleeper is the witness that no round is under way: within one, this would lose
            /// the wakeup, and does not compile.
            #[inline]
            pub fn disarm<T: Cell, F: Fence>(&mut self, _: &Sleeper<T, F>) {
                self.doorbell.disarm();
            }
        }
    };
}

doorbell! {
    /// A submission queue's tail, as the controller reads it.
    SqTail
}

doorbell! {
    /// A completion queue's head, as the controller reads it.
    ///
    /// Look at it once per batch that is posted, and arm it only while a submission queue waits for
    /// room: the host moves it after every batch of completions, and nobody cares.
    CqHead
}

impl<R: Cell, S: Cell, C: AsRef<ControllerCounters>> SqTail<R, S, C> {
    /// The tail: entries up to it may be fetched, with what the host wrote into them.
    ///
    /// # Errors
    ///
    /// A value outside the ring; once, until there is a valid one.
    #[inline]
    pub fn look(&mut self) -> Result<u16, InvalidDoorbell> {
        self.doorbell.look(RingSize::MAX)
    }

    /// What [`look`](Self::look) would find now, without finding it: nothing may be fetched for it
    /// yet, but it can be prepared for. What `look` found last if there is nothing better.
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

    /// The second half of going to sleep: looks once more, now that EventIdx is known to be
    /// visible.
    ///
    /// # Errors
    ///
    /// As [`look`](Self::look); the round then does not end in sleep.
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
    /// The head: entries up to it are free again. `tail` is where the controller posts next.
    ///
    /// # Errors
    ///
    /// A value outside the ring or past `tail`; once, until there is a valid one.
    #[inline]
    pub fn look(&mut self, tail: u16) -> Result<u16, InvalidDoorbell> {
        self.doorbell.look(self.doorbell.posted(tail))
    }

    /// The second half of going to sleep: looks once more, now that EventIdx is known to be
    /// visible.
    ///
    /// # Errors
    ///
    /// As [`look`](Self::look); the round then does not end in sleep.
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
