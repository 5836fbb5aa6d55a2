//! The host's end of one doorbell.

use core::marker::PhantomData;

use crate::{Cell, Fence, FullFence, HostStats, RingSize};

/// Which question a host asks to find out whether an update needs an MMIO write.
///
/// Both are in the wild, and the controller's end is correct for both. All arithmetic is 16 bits
/// wide, whatever the size of the ring; for an EventIdx inside the ring that makes no difference
/// (where the ring wraps, so does the interval), for one outside it means once per turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Predicate {
    /// Linux, and this crate's own host end: ring if the update steps over EventIdx, that is if
    /// EventIdx lies in [old, new).
    Linux,
    /// SPDK: ring also if the update ends at EventIdx, that is if it lies in [old, new].
    SpdkInclusive,
}

impl Predicate {
    /// Whether the update from `old` to `new` has to be written to the doorbell register, the
    /// controller having asked for it with `event_idx`.
    ///
    /// Any `event_idx` is harmless: the worst that a hostile controller gets is an MMIO write too
    /// many or its own sleep.
    #[inline]
    pub const fn needs_mmio(self, event_idx: u32, old: u16, new: u16) -> bool {
        let behind = new.wrapping_sub(event_idx as u16);
        let moved = new.wrapping_sub(old);
        match self {
            Self::Linux => behind.wrapping_sub(1) < moved,
            Self::SpdkInclusive => behind <= moved,
        }
    }
}

/// One doorbell that this host rings: a submission queue's tail or a completion queue's head.
///
/// It starts as a plain doorbell, for which every update is an MMIO write. With [`mirror`] its
/// values are stored in the shadow entry as well, and with [`trust`] the shadow entry is enough
/// whenever EventIdx says so.
///
/// An EventIdx that is no position of the ring asks for nothing: no value is greater than it, which
/// is what NVMe Base 2.2, B.5.1 makes the condition. Controllers that poll have it there, SPDK's
/// for one, and take a write at each turn as slowly as a message that nobody hurries for.
///
/// [`mirror`]: Self::mirror
/// [`trust`]: Self::trust
#[derive(Debug)]
pub struct HostDoorbell<C, F = FullFence> {
    current: u16,
    /// The last position of the ring.
    last: u16,
    /// The value before the one that was [published](Self::publish_deferred), if EventIdx has not
    /// been looked at yet.
    deferred: Option<u16>,
    shadow: Option<HostShadow<C>>,
    stats: HostStats,
    fence: PhantomData<fn() -> F>,
}

#[derive(Debug)]
struct HostShadow<C> {
    value: C,
    event_idx: C,
    trusted: bool,
}

impl<C: Cell, F: Fence> HostDoorbell<C, F> {
    /// A doorbell whose queue is at `current`; 0 for a queue that was just created. A queue with
    /// fewer entries than there can be says how many, with [`set_ring`](Self::set_ring).
    #[inline]
    pub const fn new(current: u16) -> Self {
        let stats = HostStats { published: 0, mmio_needed: 0, mmio_saved: 0 };
        let last = u16::MAX;
        Self { current, last, deferred: None, shadow: None, stats, fence: PhantomData }
    }

    /// Says how many positions there are: an EventIdx beyond them asks for no notification.
    #[inline]
    pub const fn set_ring(&mut self, size: RingSize) {
        self.last = (size.entries() - 1) as u16;
    }

    /// The last value published.
    #[inline]
    pub const fn current(&self) -> u16 {
        self.current
    }

    /// What this doorbell did so far.
    #[inline]
    pub const fn stats(&self) -> HostStats {
        self.stats
    }

    /// Puts the shadow entry and its EventIdx under this doorbell, both set to the current value.
    /// To be called before Doorbell Buffer Config is submitted, or for a queue that is created
    /// later, before that. An EventIdx outside of the ring stays: a controller that asks for
    /// nothing has put it there for all queues that are to come.
    ///
    /// From here on every update is in the shadow entry *and* in the register, so the controller
    /// may change over from one to the other whenever it executes the command, with commands in
    /// flight, and miss nothing.
    pub fn mirror(&mut self, value: C, event_idx: C) {
        if event_idx.load_relaxed() as u16 <= self.last {
            event_idx.store_release(u32::from(self.current));
        }
        value.store_release(u32::from(self.current));
        self.shadow = Some(HostShadow { value, event_idx, trusted: false });
    }

    /// Doorbell Buffer Config has completed with success: from here on the controller reads the
    /// shadow entry, and EventIdx says when it wants to be notified. Without a [`mirror`] this does
    /// nothing.
    ///
    /// [`mirror`]: Self::mirror
    pub fn trust(&mut self) {
        if let Some(shadow) = &mut self.shadow {
            shadow.trusted = true;
        }
    }

    /// Forgets the shadow entry: Doorbell Buffer Config failed, or the controller was reset, which
    /// ends the life of both buffers.
    pub fn forget(&mut self) {
        self.shadow = None;
        self.deferred = None;
    }

    /// Publishes `new`; says whether the caller must now write it to the doorbell register too.
    ///
    /// What was written before (the submission queue entries) is visible to the controller with
    /// the value.
    #[inline]
    #[must_use = "the controller may be asleep: write the register if this says so"]
    pub fn publish(&mut self, new: u16) -> bool {
        self.publish_with(Predicate::Linux, new)
    }

    /// [`publish`](Self::publish) under another host's predicate.
    #[inline]
    #[must_use = "the controller may be asleep: write the register if this says so"]
    pub fn publish_with(&mut self, predicate: Predicate, new: u16) -> bool {
        let mmio = match &self.shadow {
            Some(shadow) if shadow.trusted => {
                // The earlier one by itself: EventIdx keeps out of the way of one update at a time.
                let earlier = self.notification_needed(predicate);
                self.store(new);
                self.notification_needed(predicate) | earlier
            }
            Some(shadow) => {
                shadow.value.store_release(u32::from(new));
                self.current = new;
                true
            }
            None => {
                self.current = new;
                true
            }
        };
        self.stats.published += 1;
        self.stats.mmio_needed += u64::from(mmio);
        self.stats.mmio_saved += u64::from(!mmio);
        mmio
    }

    /// Publishes `new`, and leaves for later whether the controller has to be notified:
    /// [`needs_notification`](Self::needs_notification) says that, and must be called before the
    /// caller waits for anything that the controller does, or turns to something else. Says whether
    /// the register has to be written now, for what was published before, or because there is no
    /// shadow entry to rely on.
    ///
    /// The question takes a full fence, which waits until everything that was written before is
    /// visible, the entries with it. Asked at the next update, it has nothing left to wait for. A
    /// controller that sleeps meanwhile is woken as much later, so this is for queues in which it
    /// has enough to do.
    #[inline]
    #[must_use = "the controller may be asleep: write the register if this says so"]
    pub fn publish_deferred(&mut self, new: u16) -> bool {
        if !self.shadow.as_ref().is_some_and(|shadow| shadow.trusted) {
            return self.publish(new);
        }
        let earlier = self.needs_notification();
        self.store(new);
        self.stats.published += 1;
        self.stats.mmio_saved += 1;
        earlier
    }

    /// Whether the register has to be written for what was
    /// [published](Self::publish_deferred). Not if nothing was, or if this was asked before.
    #[inline]
    #[must_use = "the controller may be asleep: write the register if this says so"]
    pub fn needs_notification(&mut self) -> bool {
        let mmio = self.notification_needed(Predicate::Linux);
        if mmio {
            // It was counted as saved when it was published.
            self.stats.mmio_needed += 1;
            self.stats.mmio_saved -= 1;
        }
        mmio
    }

    /// Whether something was [published](Self::publish_deferred), and
    /// [`needs_notification`](Self::needs_notification) not called for it yet.
    #[inline]
    pub fn has_deferred(&self) -> bool {
        self.deferred.is_some()
    }

    #[inline]
    fn store(&mut self, new: u16) {
        self.deferred = Some(core::mem::replace(&mut self.current, new));
        if let Some(shadow) = &self.shadow {
            shadow.value.store_release(u32::from(new));
        }
    }

    #[inline]
    fn notification_needed(&mut self, predicate: Predicate) -> bool {
        let (Some(old), Some(shadow)) = (self.deferred.take(), &self.shadow) else { return false };
        // Pairs with the fence between `arm` and `recheck`: either the controller sees our value
        // there, or we see its EventIdx here.
        F::full();
        let event_idx = shadow.event_idx.load_relaxed();
        // Asked in this order, because the first answer is nearly always no.
        predicate.needs_mmio(event_idx, old, self.current) && event_idx as u16 <= self.last
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
