//! Recovery options, and counters of recovery actions.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Recovery options: permitted reactions to command timeouts and controller failures. See the
/// [module](crate::recovery).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recovery {
    /// True to enable recovery. Without recovery, a command that never completes remains
    /// outstanding, and a controller failure fails all commands.
    pub enabled: bool,
    /// Maximum number of submissions of a command after the first one.
    pub repeats: u8,
    /// Interval between status checks of a healthy or idle controller. While a command takes long,
    /// CSTS is read with every tick instead. Each read may wake a process that emulates the
    /// controller.
    pub watch: Duration,
}

impl Recovery {
    /// No recovery.
    pub const OFF: Self = Self { enabled: false, repeats: 0, watch: Duration::MAX };
}

impl Default for Recovery {
    /// Recovery is enabled. A command is submitted again at most 3 times, and the status of a
    /// healthy controller is read every 30 s.
    fn default() -> Self {
        Self { enabled: true, repeats: 3, watch: Duration::from_secs(30) }
    }
}

/// Counts of recovery actions since the controller was attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecoveryStats {
    /// Commands that did not complete in time.
    pub late: u64,
    /// Abort commands sent.
    pub aborts: u64,
    /// Queue pairs that were deleted and created again because of late commands.
    pub queues_recreated: u64,
    /// Queue pairs that were created again after a controller reset.
    pub queues_restored: u64,
    /// Controller resets.
    pub resets: u64,
    /// Attempts of controller resets, including failed ones.
    pub reset_tries: u64,
    /// Observations of CSTS.CFS.
    pub fatal: u64,
    /// Observations of CSTS.NSSRO.
    pub subsystem_resets: u64,
    /// 1 if the controller was removed or its connection broke.
    pub removed: u64,
    /// 1 if the controller failed because it could not be reset.
    pub failed: u64,
    /// Commands that were submitted again when their queue was created again.
    pub repeated: u64,
    /// Commands that the driver ended with Command Aborted By Host.
    pub ended: u64,
    /// Number of times that namespaces were identified again after a namespace change event.
    pub namespaces_read: u64,
}

macro_rules! counters {
    ($($name:ident),*) => {
        /// Counters behind [`RecoveryStats`]. They are updated only after failures and events.
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
    failed,
    repeated,
    ended,
    namespaces_read
);

/// Increments a counter by `by`.
pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}
