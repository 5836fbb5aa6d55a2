//! The controller's end of one doorbell.

use core::fmt;

use crate::{Arming, Cell, ControllerStats, Fence, Fenced, RingSize};

/// A host put a value in a doorbell that cannot be: outside the ring, or a completion queue head
/// that consumes more than was posted.
///
/// The controller answers with the asynchronous event Invalid Doorbell Write Value (Error status,
/// 01h) and otherwise ignores the value.
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

/// What has to be kept of a doorbell to go on with it in another process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DoorbellState {
    /// The last valid value seen.
    pub last: u16,
    /// The shadow entry's part, if Doorbell Buffer Config is in force.
    pub shadow: Option<ShadowState>,
}

/// What has to be kept of a shadow entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShadowState {
    /// What the shadow entry held when Doorbell Buffer Config was executed.
    pub snapshot: u32,
    /// Whether it has been seen with another value since.
    pub departed: bool,
}

#[derive(Debug)]
struct Shadow<S> {
    value: S,
    event_idx: S,
    state: ShadowState,
    /// What we last stored in `event_idx`. The cell itself is never read: the host can write it.
    published: u16,
}

/// What a tail and a head have in common.
#[derive(Debug)]
struct Doorbell<R, S> {
    size: RingSize,
    last: u16,
    /// The last value refused, so that it is reported once and not at every look.
    refused: Option<u32>,
    register: R,
    shadow: Option<Shadow<S>>,
    stats: ControllerStats,
}

impl<S: Cell> Shadow<S> {
    #[inline]
    fn publish(&mut self, event_idx: u16) {
        self.published = event_idx;
        self.event_idx.store_release(u32::from(event_idx));
    }
}

impl<R: Cell, S: Cell> Doorbell<R, S> {
    fn new(size: RingSize, register: R) -> Self {
        let stats = ControllerStats::default();
        Self { size, last: 0, refused: None, register, shadow: None, stats }
    }

    fn enable(&mut self, value: S, event_idx: S) {
        let state = ShadowState { snapshot: value.load_acquire(), departed: false };
        self.attach(value, event_idx, state);
    }

    fn attach(&mut self, value: S, event_idx: S, state: ShadowState) {
        let mut shadow = Shadow { value, event_idx, state, published: self.last };
        shadow.publish(self.last);
        self.shadow = Some(shadow);
    }

    fn state(&self) -> DoorbellState {
        DoorbellState { last: self.last, shadow: self.shadow.as_ref().map(|s| s.state) }
    }

    /// The rule of truth.
    #[inline]
    fn truth(&mut self) -> u32 {
        let Some(shadow) = &mut self.shadow else { return self.register.load_acquire() };
        if shadow.state.departed {
            return shadow.value.load_acquire();
        }
        // The register first: a host that stores a value in its shadow entry before it rings has
        // then departed by the time that we read the entry.
        let register = self.register.load_acquire();
        let value = shadow.value.load_acquire();
        if value == shadow.state.snapshot {
            return register;
        }
        shadow.state.departed = true;
        value
    }

    /// Takes the present value if it lies at most `limit` entries ahead; says how far it moved.
    #[inline]
    fn take(&mut self, limit: u32) -> Result<u32, InvalidDoorbell> {
        let value = self.truth();
        if value == u32::from(self.last) {
            return Ok(0);
        }
        match self.size.position(value) {
            Some(seen) if self.size.distance(self.last, seen) <= limit => {
                let moved = self.size.distance(self.last, seen);
                self.last = seen;
                self.refused = None;
                Ok(moved)
            }
            _ => self.refuse(value),
        }
    }

    #[cold]
    fn refuse(&mut self, value: u32) -> Result<u32, InvalidDoorbell> {
        if self.refused == Some(value) {
            return Ok(0);
        }
        self.refused = Some(value);
        self.stats.invalid += 1;
        Err(InvalidDoorbell { value })
    }

    #[inline]
    fn look(&mut self, limit: u32) -> Result<u16, InvalidDoorbell> {
        self.stats.looks += 1;
        let moved = self.take(limit)?;
        self.stats.found_new += u64::from(moved != 0);
        self.run_ahead(moved);
        Ok(self.last)
    }

    /// Keeps EventIdx out of the host's way, after a look that found the value `moved` on.
    #[inline]
    fn run_ahead(&mut self, moved: u32) {
        let Some(shadow) = &mut self.shadow else { return };
        let event_idx = if !shadow.state.departed {
            if shadow.published == self.last {
                return;
            }
            self.last
        } else {
            let behind = self.size.distance(shadow.published, self.last);
            let entries = self.size.entries();
            if behind != 0 && behind <= (entries / 4).max(1) {
                return;
            }
            self.size.back(self.last, 1 + moved.min(entries / 8))
        };
        shadow.publish(event_idx);
        self.stats.event_idx_moved += 1;
    }

    #[inline]
    fn arm<C: Cell, F: Fence>(&mut self, arming: &mut Arming<'_, C, F>) {
        arming.armed.count += 1;
        if let Some(shadow) = &mut self.shadow
            && shadow.published != self.last
        {
            shadow.publish(self.last);
            self.stats.event_idx_armed += 1;
        }
    }

    #[inline]
    fn recheck<C: Cell, F: Fence>(
        &mut self,
        fenced: &mut Fenced<'_, C, F>,
        limit: u32,
    ) -> Result<u16, InvalidDoorbell> {
        self.stats.rechecks += 1;
        fenced.rechecked.left = fenced.rechecked.left.saturating_sub(1);
        let found = match self.take(limit) {
            Ok(moved) => moved != 0,
            Err(error) => {
                fenced.rechecked.found = true;
                return Err(error);
            }
        };
        self.stats.rechecks_found += u64::from(found);
        fenced.rechecked.found |= found;
        Ok(self.last)
    }
}

macro_rules! doorbell {
    ($(#[$outer:meta])* $name:ident) => {
        $(#[$outer])*
        #[derive(Debug)]
        pub struct $name<R, S = R> {
            doorbell: Doorbell<R, S>,
        }

        impl<R: Cell, S: Cell> $name<R, S> {
            /// The doorbell of a queue that was just created: empty, at position 0, and with no
            /// shadow entry until [`enable`](Self::enable).
            #[inline]
            pub fn new(size: RingSize, register: R) -> Self {
                Self { doorbell: Doorbell::new(size, register) }
            }

            /// The doorbell of a queue that lived before, from its [`state`](Self::state). The
            /// cells of the shadow entry and of its EventIdx follow with
            /// [`reattach`](Self::reattach).
            #[inline]
            pub fn resume(size: RingSize, register: R, last: u16) -> Self {
                let mut doorbell = Doorbell::new(size, register);
                doorbell.last = last;
                Self { doorbell }
            }

            /// Doorbell Buffer Config was executed, or the queue was created while it is in force:
            /// `value` is the entry of the Shadow Doorbell buffer, `event_idx` that of the EventIdx
            /// buffer. To be called before the command completes.
            ///
            /// Takes the entry's value as the snapshot that it has to depart from, and arms
            /// EventIdx. `value` is never written.
            #[inline]
            pub fn enable(&mut self, value: S, event_idx: S) {
                self.doorbell.enable(value, event_idx);
            }

            /// As [`enable`](Self::enable), for a shadow entry that was in use already.
            #[inline]
            pub fn reattach(&mut self, value: S, event_idx: S, state: ShadowState) {
                self.doorbell.attach(value, event_idx, state);
            }

            /// Drops the cells of the shadow entry and of its EventIdx. A Controller Level Reset
            /// does this first of all.
            #[inline]
            pub fn disable(&mut self) {
                self.doorbell.shadow = None;
            }

            /// The size of the queue.
            #[inline]
            pub const fn size(&self) -> RingSize {
                self.doorbell.size
            }

            /// The last valid value seen.
            #[inline]
            pub const fn last(&self) -> u16 {
                self.doorbell.last
            }

            /// What to keep, to go on in another process.
            #[inline]
            pub fn state(&self) -> DoorbellState {
                self.doorbell.state()
            }

            /// What this doorbell did so far.
            #[inline]
            pub const fn stats(&self) -> ControllerStats {
                self.doorbell.stats
            }

            /// Asks the host to ring at its next update. The first half of going to sleep.
            #[inline]
            pub fn arm<C: Cell, F: Fence>(&mut self, arming: &mut Arming<'_, C, F>) {
                self.doorbell.arm(arming);
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
    CqHead
}

impl<R: Cell, S: Cell> SqTail<R, S> {
    /// The tail: entries up to it may be fetched.
    ///
    /// # Errors
    ///
    /// A value outside the ring, once for each such value.
    #[inline]
    pub fn look(&mut self) -> Result<u16, InvalidDoorbell> {
        self.doorbell.look(RingSize::MAX)
    }

    /// The second half of going to sleep: looks once more, now that EventIdx is published.
    ///
    /// # Errors
    ///
    /// As [`look`](Self::look).
    #[inline]
    pub fn recheck<C: Cell, F: Fence>(
        &mut self,
        fenced: &mut Fenced<'_, C, F>,
    ) -> Result<u16, InvalidDoorbell> {
        self.doorbell.recheck(fenced, RingSize::MAX)
    }
}

impl<R: Cell, S: Cell> CqHead<R, S> {
    /// The head: entries up to it are free again. `tail` is where the controller posts next.
    ///
    /// # Errors
    ///
    /// A value outside the ring or past `tail`, once for each such value.
    #[inline]
    pub fn look(&mut self, tail: u16) -> Result<u16, InvalidDoorbell> {
        let limit = self.doorbell.size.distance(self.doorbell.last, tail);
        self.doorbell.look(limit)
    }

    /// The second half of going to sleep: looks once more, now that EventIdx is published.
    ///
    /// # Errors
    ///
    /// As [`look`](Self::look).
    #[inline]
    pub fn recheck<C: Cell, F: Fence>(
        &mut self,
        fenced: &mut Fenced<'_, C, F>,
        tail: u16,
    ) -> Result<u16, InvalidDoorbell> {
        let limit = self.doorbell.size.distance(self.doorbell.last, tail);
        self.doorbell.recheck(fenced, limit)
    }
}
