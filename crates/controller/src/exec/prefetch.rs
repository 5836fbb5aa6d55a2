//! Hints to a disk of what it will have to do.
//!
//! A disk that is memory spends most of a command waiting for the first lines of the block that it
//! copies. It can ask for them before their turn, if it gets a hint: of each command twice, two
//! commands ahead and again one ahead, because a processor takes only so many requests for lines at
//! a time.

use super::namespace::{NamespaceQueue, prefetch_hint};
use crate::queue::PrefetchCursor;
use shadowbell_memory::Ring;
use shadowbell_spec::Sqe;

/// How many commands ahead a disk gets its first hint. The copy of a block of 4 KiB takes about as
/// long as memory takes to answer; with two there is time left.
const FIRST: u32 = 2;

/// Completions that are posted together while more commands wait: fewer than of a disk without
/// hints, since commands take longer here, and the host's next ones are wanted before the last of
/// these has begun.
pub(crate) const POST_AFTER: u32 = 8;

/// What of a queue is known while a burst of its commands is executed.
pub(crate) struct Prefetch {
    cursor: PrefetchCursor,
    /// Commands, from the first of the burst: all of it, and towards its end those that the host
    /// has submitted since. Otherwise each burst would begin with a command without a hint.
    known: u32,
}

impl Prefetch {
    /// At the start of a burst, with what the last one has given hints of already.
    pub(crate) fn of(burst: u32, cursor: PrefetchCursor) -> Self {
        Self { cursor, known: burst }
    }

    /// Gives hints of the commands behind the one at `head`, which is number `done` of its burst.
    /// `waiting` counts those that wait by now, from `head` on; it is asked if the burst is nearly
    /// over.
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
            // A host that takes its tail back is found out when the tail is looked at in earnest.
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

    /// What there is to know for the burst that follows on this one of so many commands.
    pub(crate) fn end(self, burst: u32) -> PrefetchCursor {
        let PrefetchCursor { once, twice } = self.cursor;
        PrefetchCursor { once: once.saturating_sub(burst), twice: twice.saturating_sub(burst) }
    }
}
