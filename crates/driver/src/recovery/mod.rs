//! What the driver does when a controller does not do what it should.
//!
//! # The ladder
//!
//! | what happens | what the driver does |
//! |---|---|
//! | a command is not completed within [`Timeouts::io`] | it sends Abort; if the controller aborts it, it is submitted again |
//! | a quarter of that time later it still is not | deletes the queue pair and creates it again |
//! | the controller does not, or CSTS.CFS or CSTS.NSSRO come up, or it is found disabled | resets the controller, and every queue pair is created again |
//! | the controller can not be reset in some tries | gives it up: everything ends with an error |
//! | its registers read as all ones, or the way to it breaks | the same at once |
//!
//! Every step is one line in the log, and is counted: see [`RecoveryStats`].
//!
//! # What becomes of commands
//!
//! When a queue pair is created again, the controller has confirmed that the old one is gone (or
//! that it was reset): none of the old commands will have an effect any more. Those for which it
//! makes no difference whether they were carried out already
//! ([`Command::is_repeatable`](crate::Command::is_repeatable)) are submitted again, the oldest
//! first, and complete as if nothing had happened. The others, and those that were repeated
//! [`Recovery::repeats`] times in vain, end with the status Command Aborted By Host: whether they
//! have had an effect is unknown.
//!
//! To submit a write again is safe because it has not completed as far as its submitter knows: what
//! must come after it was not submitted yet. A flush covers what had completed before it was
//! submitted; that is in the controller, and is when the flush is repeated.
//!
//! A buffer is handed back only when the controller is certain not to write to it any more: with its
//! completion, when its queue is confirmed to be deleted, or when the controller is confirmed to be
//! disabled or reset. Otherwise it is kept for as long as the process lives.
//!
//! # Who does it
//!
//! A keeper thread, one for each controller, sleeps for [`Timeouts::io`] / 8 (a second at most) at a
//! time; then it changes one word that every queue pair compares once for each batch, and reads CSTS
//! if a command was outstanding for two such looks, or if [`Recovery::watch`] has passed. The queue pair's own thread then looks at the ages of its commands. A queue that has
//! nothing outstanding notices a reset when it is used next.
//!
//! [`Timeouts::io`]: crate::Timeouts::io

mod keeper;
mod reset;

pub(crate) use self::keeper::Keeper;
pub(crate) use self::reset::Place;

use crate::options::Timeouts;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What may be done about a controller that does not do what it should. See the
/// [module](crate::recovery).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// Whether anything is done. If not, a command that is never completed stays outstanding, and a
    /// controller that fails fails everything.
    pub enabled: bool,
    /// How often a command is submitted again before it is given up.
    pub repeats: u8,
    /// How often the controller's status is looked at while commands complete, or there are none.
    /// (While one does not complete, it is looked at as often as the ages of commands are.) Each look
    /// may wake somebody at the other end.
    pub watch: Duration,
}

impl Recovery {
    /// Nothing is done.
    pub const OFF: Self = Self { enabled: false, repeats: 0, watch: Duration::MAX };
}

impl Default for Recovery {
    /// Enabled; a command is submitted again 3 times at most, and a controller that seems well is looked at
    /// every 30 s.
    fn default() -> Self {
        Self { enabled: true, repeats: 3, watch: Duration::from_secs(30) }
    }
}

/// The longest interval at which the keeper looks.
const LONGEST_TICK: Duration = Duration::from_secs(1);
/// The shortest.
const SHORTEST_TICK: Duration = Duration::from_millis(1);

/// How often ages are looked at, and how many looks make a command late and overdue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pace {
    pub(crate) tick: Duration,
    pub(crate) limit: u8,
    pub(crate) grace: u8,
    /// Within this time every command ends, one way or another.
    pub(crate) patience: Duration,
}

impl Pace {
    pub(crate) fn new(recovery: Recovery, timeouts: &Timeouts) -> Self {
        let io = timeouts.io;
        // Ages are counted in a byte.
        let least = SHORTEST_TICK.max(io / 240);
        let tick = (io / 8).clamp(least, LONGEST_TICK.max(least));
        let looks = |time: Duration| {
            let ticks = time.as_nanos().div_ceil(tick.as_nanos().max(1));
            u8::try_from(ticks).unwrap_or(u8::MAX).clamp(1, 245)
        };
        let (limit, grace) = (looks(io), looks(io / 4));
        let lives = u32::from(recovery.repeats).saturating_add(1);
        // A life: late, aborted, four commands of the control plane, a reset.
        let life = (io * 2).saturating_add(tick * 4).saturating_add(timeouts.admin * 4);
        let patience = if recovery.enabled { life.saturating_mul(lives) } else { io };
        Self { tick, limit, grace, patience }
    }
}

/// How often what was done, since the controller was attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecoveryStats {
    /// Commands that were not completed in time.
    pub late: u64,
    /// Abort commands sent.
    pub aborts: u64,
    /// Queue pairs that were deleted and created again because their commands were late.
    pub queues_recreated: u64,
    /// Queue pairs that were created again after a reset.
    pub queues_restored: u64,
    /// Controller resets.
    pub resets: u64,
    /// Tries that these took, those that failed too.
    pub reset_tries: u64,
    /// Times that CSTS.CFS was found set.
    pub fatal: u64,
    /// Times that CSTS.NSSRO was found set.
    pub subsystem_resets: u64,
    /// 1 if the controller's registers read as all ones, or the way to it broke.
    pub removed: u64,
    /// 1 if the controller was given up.
    pub given_up: u64,
    /// Commands that were submitted again when their queue was created again.
    pub repeated: u64,
    /// Commands that were ended with Command Aborted By Host.
    pub ended: u64,
    /// Times that the namespaces were read again because an event said that they changed.
    pub namespaces_read: u64,
}

macro_rules! counters {
    ($($name:ident),*) => {
        /// The same, being counted. Touched only when something goes wrong.
        #[derive(Default)]
        pub(crate) struct Counters {
            $(pub(crate) $name: AtomicU64,)*
        }

        impl Counters {
            pub(crate) fn snapshot(&self) -> RecoveryStats {
                RecoveryStats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters!(
    late,
    aborts,
    queues_recreated,
    queues_restored,
    resets,
    reset_tries,
    fatal,
    subsystem_resets,
    removed,
    given_up,
    repeated,
    ended,
    namespaces_read
);

/// Counts `by` more.
pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_fit_their_byte_and_ticks_the_deadline() {
        let pace = |millis| {
            let timeouts = Timeouts { io: Duration::from_millis(millis), ..Timeouts::default() };
            Pace::new(Recovery::default(), &timeouts)
        };
        let ms = Duration::from_millis;
        assert_eq!((pace(30_000).tick, pace(30_000).limit, pace(30_000).grace), (ms(1000), 30, 8));
        assert_eq!((pace(80).tick, pace(80).limit, pace(80).grace), (ms(10), 8, 2));
        assert_eq!((pace(1).tick, pace(1).limit, pace(1).grace), (ms(1), 1, 1));
        let hour = pace(3_600_000);
        assert_eq!((hour.tick, hour.limit), (ms(15_000), 240));
        assert_eq!(pace(0).limit, 1);
        for millis in [1, 10, 77, 999, 8001, 123_456, 1 << 40] {
            let pace = pace(millis);
            assert!(pace.tick * pace.limit.into() >= ms(millis) || millis == 1 << 40, "{pace:?}");
            assert!(pace.limit < 250 && pace.grace <= pace.limit);
            assert!(pace.patience > ms(millis));
        }
    }
}
