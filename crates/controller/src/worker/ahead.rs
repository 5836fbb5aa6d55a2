//! Telling a disk what it will have to do.
//!
//! A disk that is memory spends most of a command waiting for the first lines of the block that it
//! copies. It can ask for them before their turn, if it is told: of each command twice, two commands
//! ahead and again one ahead, because a processor takes only so many requests for lines at a time.

use super::io::Engine;
use shadowbell_memory::Ring;
use shadowbell_spec::Sqe;

/// How many commands ahead a disk is told for the first time. The copy of a block of 4 KiB takes
/// about as long as memory takes to answer; with two there is time left.
const FIRST: u32 = 2;

/// Completions that are posted together while more commands wait: fewer than of a disk that is not
/// told, since commands take longer here, and the host's next ones are wanted before the last of
/// these has begun.
pub(crate) const POST_AFTER: u32 = 8;

/// What a disk has been told of, as numbers of commands that wait: of all before the first number
/// once, of all before the second number twice.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Told {
    once: u32,
    twice: u32,
}

/// What of a queue is known while a burst of its commands is executed.
pub(crate) struct Ahead {
    told: Told,
    /// Commands, from the first of the burst: all of it, and towards its end those that the host has
    /// submitted since. Otherwise each burst would begin with a command that nobody has spoken of.
    known: u32,
}

impl Ahead {
    /// At the start of a burst, with what the last one could tell already.
    pub(crate) fn of(burst: u32, told: Told) -> Self {
        Self { told, known: burst }
    }

    /// Tells of the commands behind the one at `head`, which is number `done` of its burst. `waiting`
    /// counts those that wait by now, from `head` on; it is asked if the burst is nearly over.
    #[inline]
    pub(crate) fn prefetch_hint(
        &mut self,
        engine: &Engine,
        ring: &Ring<{ Sqe::SIZE }>,
        head: u16,
        done: u32,
        waiting: impl Fn() -> u32,
    ) {
        if done + FIRST >= self.known {
            // A host that takes its tail back is found out when the tail is looked at in earnest.
            self.known = self.known.max(done + waiting());
        }
        let Told { once, twice } = &mut self.told;
        for (told, ahead) in [(once, FIRST), (twice, 1)] {
            let from = (*told).max(done + 1);
            *told = from.max(self.known.min(done + 1 + ahead));
            (from..*told)
                .for_each(|n| engine.prefetch_hint(ring, u32::from(head) + n - done, ahead));
        }
    }

    /// What there is to know for the burst that follows on this one of so many commands.
    pub(crate) fn end(self, burst: u32) -> Told {
        let Told { once, twice } = self.told;
        Told { once: once.saturating_sub(burst), twice: twice.saturating_sub(burst) }
    }
}
