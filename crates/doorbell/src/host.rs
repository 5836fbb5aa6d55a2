//! Host end of a doorbell.

use core::marker::PhantomData;

use crate::{Cell, Fence, FullFence, HostStats, RingSize};

/// Condition under which a host's update needs an MMIO write of the doorbell register.
///
/// Existing hosts use one of the two conditions, and the controller end is correct for both. All
/// arithmetic is 16 bits wide, independent of the ring size. For an EventIdx inside of the ring,
/// the width makes no difference, because the interval wraps where the ring wraps. For an EventIdx
/// outside of the ring, the condition holds once per turn; [`HostDoorbell`] ignores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Predicate {
    /// Condition of Linux, and of the host end of this crate: ring if the update passes EventIdx,
    /// that is, if EventIdx is in [old, new).
    Linux,
    /// Condition of SPDK: ring also if the update ends at EventIdx, that is, if EventIdx is in
    /// [old, new].
    SpdkInclusive,
}

impl Predicate {
    /// True if the update from `old` to `new` has to be written to the doorbell register, according
    /// to the controller's `event_idx`.
    ///
    /// Every `event_idx` is safe: a hostile controller can only cause a needless MMIO write, or
    /// miss its own wakeup.
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

/// Doorbell that this host rings: a submission queue's tail or a completion queue's head.
///
/// Initially it is a plain doorbell, for which every update is an MMIO write. After
/// [`attach_shadow`], its values are stored in the shadow entry as well. After [`enable_shadow`],
/// the MMIO write is omitted if EventIdx does not request it.
///
/// An EventIdx that is not a position of the ring requests no MMIO write, because the condition of
/// NVMe Base 2.2, B.5.1 is never met for it. Polling controllers such as SPDK's store a value
/// outside of the ring, and handle a doorbell write on a slow path.
///
/// [`attach_shadow`]: Self::attach_shadow
/// [`enable_shadow`]: Self::enable_shadow
#[derive(Debug)]
pub struct HostDoorbell<C, F = FullFence> {
    current: u16,
    /// Last position of the ring.
    last: u16,
    /// Value before the last [deferred publication](Self::publish_deferred), until EventIdx is
    /// checked for that publication.
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
    /// Shadow entry of an earlier Doorbell Buffer Config. The controller reads this entry until it
    /// has executed the new command.
    old: Option<C>,
}

impl<C: Cell, F: Fence> HostDoorbell<C, F> {
    /// Creates a doorbell at position `current`; 0 for a new queue. For a queue with fewer than
    /// 65536 entries, call [`set_ring`](Self::set_ring).
    #[inline]
    pub const fn new(current: u16) -> Self {
        let stats = HostStats { published: 0, mmio_needed: 0, mmio_saved: 0 };
        let last = u16::MAX;
        Self { current, last, deferred: None, shadow: None, stats, fence: PhantomData }
    }

    /// Sets the size of the ring. An EventIdx outside of the ring requests no notification.
    #[inline]
    pub const fn set_ring(&mut self, size: RingSize) {
        self.last = (size.entries() - 1) as u16;
    }

    /// Last published value.
    #[inline]
    pub const fn current(&self) -> u16 {
        self.current
    }

    /// Counters of this doorbell.
    #[inline]
    pub const fn stats(&self) -> HostStats {
        self.stats
    }

    /// Attaches the shadow entry and EventIdx, and sets both to the current value. Call this before
    /// Doorbell Buffer Config is submitted, or before a later queue is created. An EventIdx outside
    /// of the ring is left unchanged, because a controller that needs no notifications has stored
    /// it for all future queues.
    ///
    /// From now on every update is stored in the shadow entry *and* written to the register. So the
    /// controller can switch from the register to the entry at any time while it executes Doorbell
    /// Buffer Config, and misses no update, even with commands in flight. An entry of an earlier
    /// Doorbell Buffer Config gets the updates as well, until
    /// [`enable_shadow`](Self::enable_shadow).
    pub fn attach_shadow(&mut self, value: C, event_idx: C) {
        if event_idx.load_relaxed() as u16 <= self.last {
            event_idx.store_release(u32::from(self.current));
        }
        value.store_release(u32::from(self.current));
        let old = self.shadow.take().map(|shadow| shadow.value);
        self.shadow = Some(HostShadow { value, event_idx, trusted: false, old });
    }

    /// Relies on the shadow entry and EventIdx from now on, after Doorbell Buffer Config has
    /// completed successfully. Without [`attach_shadow`], this has no effect.
    ///
    /// [`attach_shadow`]: Self::attach_shadow
    pub fn enable_shadow(&mut self) {
        if let Some(shadow) = &mut self.shadow {
            shadow.trusted = true;
            shadow.old = None;
        }
    }

    /// Drops the shadow entry, because Doorbell Buffer Config failed, or because a controller reset
    /// has disabled both buffers.
    pub fn detach_shadow(&mut self) {
        self.shadow = None;
        self.deferred = None;
    }

    /// Publishes `new`. Returns true if the caller must also write it to the doorbell register.
    ///
    /// A controller that sees the value also sees earlier writes, such as the submission queue
    /// entries.
    #[inline]
    #[must_use = "the controller may be asleep: write the register if this is true"]
    pub fn publish(&mut self, new: u16) -> bool {
        self.publish_with(Predicate::Linux, new)
    }

    /// As [`publish`](Self::publish), but decides with `predicate`, for example that of SPDK,
    /// whether the host rings.
    #[inline]
    #[must_use = "the controller may be asleep: write the register if this is true"]
    pub fn publish_with(&mut self, predicate: Predicate, new: u16) -> bool {
        let mmio = match &self.shadow {
            Some(shadow) if shadow.trusted => {
                // The earlier update is checked separately, because EventIdx may lie in the
                // interval of either update.
                let earlier = self.notification_needed(predicate);
                self.store(new);
                self.notification_needed(predicate) | earlier
            }
            Some(shadow) => {
                // The controller reads the new entry before the old one.
                if let Some(old) = &shadow.old {
                    old.store_release(u32::from(new));
                }
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

    /// Publishes `new` and defers the check of EventIdx to
    /// [`needs_notification`](Self::needs_notification). The caller must call that method before it
    /// waits for the controller or stops submitting. Returns true if the register has to be written
    /// now, for an earlier update or because there is no trusted shadow entry.
    ///
    /// The check needs a full fence, which waits until all earlier writes are visible, including
    /// those of the queue entries. If the check is deferred to the next update, these writes are
    /// already visible, and the fence need not wait. But a sleeping controller is woken later. So
    /// use this method for queues that keep the controller busy.
    #[inline]
    #[must_use = "the controller may be asleep: write the register if this is true"]
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

    /// True if the register has to be written for a [published](Self::publish_deferred) value.
    /// False if no value was published, or if it was checked before.
    #[inline]
    #[must_use = "the controller may be asleep: write the register if this is true"]
    pub fn needs_notification(&mut self) -> bool {
        let mmio = self.notification_needed(Predicate::Linux);
        if mmio {
            // The update was counted as saved when it was published.
            self.stats.mmio_needed += 1;
            self.stats.mmio_saved -= 1;
        }
        mmio
    }

    /// True if a value was [published](Self::publish_deferred) and has not been checked by
    /// [`needs_notification`](Self::needs_notification) yet.
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
        // Pairs with the fence between `arm` and `recheck`: either the controller's recheck sees
        // the new value, or this load sees the new EventIdx.
        F::full();
        let event_idx = shadow.event_idx.load_relaxed();
        // `needs_mmio` is checked first, because it is nearly always false.
        predicate.needs_mmio(event_idx, old, self.current) && event_idx as u16 <= self.last
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
