//! What was done about a controller that did wrong, counted.

use std::sync::atomic::{AtomicU64, Ordering};

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
        /// [`RecoveryStats`] while they are counted. Touched only when something goes wrong.
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
