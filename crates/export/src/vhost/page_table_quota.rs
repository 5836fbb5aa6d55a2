//! Limit for sparse accesses to the guest's memory.
//!
//! A frontend can share sparse memory. Each 2 MiB of it needs a page table when it is touched
//! ([`shadowbell_memory::page_tables`]). If the guest's memory is so large that its page tables can
//! exceed the limit, the queues of the device count the page tables that their accesses may have
//! allocated (`places`). After `TOUCHES_PER_CHECK` of them, the page tables are checked, and no
//! queue takes more requests until the check has ended.

use ::shadowbell_memory::page_tables::{self, Check, TOUCHES_PER_CHECK};
use parking_lot::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize};

/// Largest number of memory pieces of the requests in flight of all queues, while page tables are
/// counted. These pieces may be touched after the check, so they add to the limit.
const IN_FLIGHT: usize = 4096;

/// Counter of the page tables that accesses of the queues of a device may have allocated.
#[derive(Debug)]
pub(super) struct PageTableQuota {
    /// Largest number of memory pieces in flight per queue; `usize::MAX` while no page tables are
    /// counted.
    in_flight: AtomicUsize,
    queues: usize,
    /// Number of page tables that may have been allocated since the last check.
    places: AtomicU64,
    pending_check: Mutex<Option<Check>>,
    /// True while the queues wait for a check.
    waits: AtomicBool,
}

impl PageTableQuota {
    pub(super) fn new(queues: usize) -> Self {
        Self {
            in_flight: AtomicUsize::new(usize::MAX),
            queues: queues.max(1),
            places: AtomicU64::new(0),
            pending_check: Mutex::default(),
            waits: AtomicBool::new(false),
        }
    }

    /// Decides whether page tables are counted. Called after a change of the guest's memory, with
    /// the lengths of its new regions.
    pub(super) fn memory_changed(&self, regions: impl Iterator<Item = u64>) {
        let counted = page_tables::may_exceed_limit(regions);
        let pieces = if counted { IN_FLIGHT / self.queues } else { usize::MAX };
        self.in_flight.store(pieces, Relaxed);
    }

    /// Largest number of memory pieces of a queue's requests in flight. A single request may exceed
    /// it.
    pub(super) fn most_in_flight(&self) -> usize {
        self.in_flight.load(Relaxed)
    }

    /// Counts the page tables of `pieces` memory pieces that will be touched.
    pub(super) fn add(&self, pieces: usize) {
        if self.most_in_flight() == usize::MAX {
            return;
        }
        // A piece may cross the border of two page tables.
        let places = 2 * pieces as u64;
        if self.places.fetch_add(places, Relaxed) + places < TOUCHES_PER_CHECK {
            return;
        }
        let mut pending_check = self.pending_check.lock();
        if self.places.swap(0, Relaxed) >= TOUCHES_PER_CHECK && pending_check.is_none() {
            *pending_check = page_tables::request_check();
            self.waits.store(pending_check.is_some(), SeqCst);
        }
    }

    /// True while a check runs, during which no requests may be taken. No event signals the end of
    /// the check, so the caller polls.
    pub(super) fn must_wait(&self) -> bool {
        if !self.waits.load(SeqCst) {
            return false;
        }
        let mut pending_check = self.pending_check.lock();
        let waits = pending_check.is_some_and(|pending_check| !pending_check.is_over());
        if !waits {
            *pending_check = None;
            self.waits.store(false, SeqCst);
        }
        waits
    }
}
