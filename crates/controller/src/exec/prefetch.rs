//! Prefetch hints: announcements of commands to a disk before their requests are submitted.
//!
//! For a disk in memory, most of a command's time is a wait for the first cache lines of the block
//! that is copied. With a hint, the disk prefetches these lines. A processor accepts only a limited
//! number of outstanding prefetches, so each command is announced twice: two commands ahead and one
//! command ahead.

use super::namespace::{NamespaceQueue, prefetch_hint};
use crate::queue::PrefetchCursor;
use shadowbell_memory::Ring;
use shadowbell_spec::Sqe;

/// Distance of the first hint, in commands. The copy of a 4 KiB block takes about as long as a
/// memory access, so a distance of one would hardly suffice.
const FIRST: u32 = 2;

/// Completions per batch while more commands wait. A disk with hints copies the data on the I/O
/// thread, so each command occupies the thread longer than on other disks. With a smaller batch,
/// the host gets completions early enough to submit further commands before the thread begins the
/// last one.
pub(crate) const POST_AFTER: u32 = 8;

/// Prefetch state of a queue during a burst of its commands.
pub(crate) struct Prefetch {
    cursor: PrefetchCursor,
    /// Number of commands that are known to be in the queue, counted from the start of the burst.
    /// Near the end of the burst it includes newer submissions; without these, the first command of
    /// each burst would have no hint.
    known: u32,
}

impl Prefetch {
    /// Starts a burst. `cursor` counts the commands of this burst that were already announced
    /// during the previous burst.
    pub(crate) fn of(burst: u32, cursor: PrefetchCursor) -> Self {
        Self { cursor, known: burst }
    }

    /// Announces the commands that follow the command at `head`. That command has number `done` in
    /// the burst. `waiting` returns the number of commands in the queue, from `head` on. The
    /// function is called only near the end of the burst.
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
            // A tail that the host moves backwards is an error. It is detected when commands are
            // fetched, not here.
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

    /// Ends a burst of `burst` commands. Returns the cursor for the next burst.
    pub(crate) fn end(self, burst: u32) -> PrefetchCursor {
        let PrefetchCursor { once, twice } = self.cursor;
        PrefetchCursor { once: once.saturating_sub(burst), twice: twice.saturating_sub(burst) }
    }
}
