//! Prefetch hints: announces requests to a disk before they are submitted.
//!
//! A disk in memory spends most of a command waiting for the first cache lines of the block that it
//! copies. With a hint it prefetches these lines. Each command is announced twice, two commands
//! ahead and one command ahead, because a processor accepts only a limited number of outstanding
//! prefetches at a time.

use super::namespace::{NamespaceQueue, prefetch_hint};
use crate::queue::PrefetchCursor;
use shadowbell_memory::Ring;
use shadowbell_spec::Sqe;

/// Distance of the first hint, in commands. The copy of a 4 KiB block takes about as long as a
/// memory access; a distance of two leaves time to spare.
const FIRST: u32 = 2;

/// Completions per batch while more commands wait. The batch is smaller than for a disk without
/// hints, since commands take longer there, and the host has to submit the next commands before
/// the last command of the batch begins.
pub(crate) const POST_AFTER: u32 = 8;

/// Prefetch state of a queue during a burst of its commands.
pub(crate) struct Prefetch {
    cursor: PrefetchCursor,
    /// Commands known, counted from the first of the burst: the whole burst and, towards its end,
    /// newer submissions of the host. Without these, the first command of each burst has no hint.
    known: u32,
}

impl Prefetch {
    /// Starts a burst; `cursor` counts the hints that the previous burst has given already.
    pub(crate) fn of(burst: u32, cursor: PrefetchCursor) -> Self {
        Self { cursor, known: burst }
    }

    /// Gives hints of the commands behind the one at `head`, which is number `done` of its burst.
    /// `waiting` returns the number of commands that wait now, from `head` on; it is called only
    /// near the end of the burst.
    #[inline]
    pub(crate) fn hint(
        &mut self,
        namespaces: &[NamespaceQueue],
        ring: &Ring<{ Sqe::SIZE }>,
        head: u16,
        done: u32,
        waiting: impl Fn() -> u32,
    ) {
        if done + FIRST >= self.known {
            // A tail that moves backwards is not detected for hints, only when commands are
            // fetched.
            self.known = self.known.max(done + waiting());
        }
        let PrefetchCursor { once, twice } = &mut self.cursor;
        for (hinted, ahead) in [(once, FIRST), (twice, 1)] {
            let from = (*hinted).max(done + 1);
            *hinted = from.max(self.known.min(done + 1 + ahead));
            (from..*hinted)
                .for_each(|n| prefetch_hint(namespaces, ring, u32::from(head) + n - done, ahead));
        }
    }

    /// Ends a burst of `burst` commands; returns the cursor for the next one.
    pub(crate) fn end(self, burst: u32) -> PrefetchCursor {
        let PrefetchCursor { once, twice } = self.cursor;
        PrefetchCursor { once: once.saturating_sub(burst), twice: twice.saturating_sub(burst) }
    }
}
