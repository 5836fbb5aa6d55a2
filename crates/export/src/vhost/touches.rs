//! How much of the guest's memory is touched here and there.
//!
//! A frontend can share memory of which nothing is there, and each 2 MiB of it that is touched cost
//! a page table ([`shadowbell_memory::page_tables`]). So the places that the queues of a device
//! touch are counted, if it has enough memory for that to matter; after a number of them somebody
//! looks whether that was too much, and no queue takes more requests until then.

use ::shadowbell_memory::page_tables::{self, Look, SPEND};
use parking_lot::Mutex;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicUsize};

/// Pieces of memory that the requests in flight of all queues may have, if it is counted: they are
/// touched after the look that their queues have waited for.
const IN_FLIGHT: usize = 4096;

/// What the queues of a device have touched.
#[derive(Debug)]
pub(super) struct Touches {
    /// Pieces of memory in flight, for each queue; all that there are, if nothing is counted.
    in_flight: AtomicUsize,
    queues: usize,
    /// Places since somebody has looked.
    places: AtomicU64,
    look: Mutex<Option<Look>>,
    /// There is a look that is waited for.
    waits: AtomicBool,
}

impl Touches {
    pub(super) fn new(queues: usize) -> Self {
        Self {
            in_flight: AtomicUsize::new(usize::MAX),
            queues: queues.max(1),
            places: AtomicU64::new(0),
            look: Mutex::default(),
            waits: AtomicBool::new(false),
        }
    }

    /// The guest's memory is another one, of regions that are so long.
    pub(super) fn memory_changed(&self, regions: impl Iterator<Item = u64>) {
        let counted = page_tables::could_be_too_many(regions);
        let pieces = if counted { IN_FLIGHT / self.queues } else { usize::MAX };
        self.in_flight.store(pieces, Relaxed);
    }

    /// How many pieces of memory the requests of a queue may have, if they are more than one.
    pub(super) fn most_in_flight(&self) -> usize {
        self.in_flight.load(Relaxed)
    }

    /// So many pieces of memory were touched.
    pub(super) fn add(&self, pieces: usize) {
        if self.most_in_flight() == usize::MAX {
            return;
        }
        // A piece may lie on both sides of a border.
        let places = 2 * pieces as u64;
        if self.places.fetch_add(places, Relaxed) + places < SPEND {
            return;
        }
        let mut look = self.look.lock();
        if self.places.swap(0, Relaxed) >= SPEND && look.is_none() {
            *look = page_tables::ask();
            self.waits.store(look.is_some(), SeqCst);
        }
    }

    /// Whether no more requests may be taken for the moment. Nothing announces the end of that.
    pub(super) fn must_wait(&self) -> bool {
        if !self.waits.load(SeqCst) {
            return false;
        }
        let mut look = self.look.lock();
        let waits = look.is_some_and(|look| !look.is_over());
        if !waits {
            *look = None;
            self.waits.store(false, SeqCst);
        }
        waits
    }
}
