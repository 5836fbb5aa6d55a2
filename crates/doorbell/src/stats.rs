//! Counters of the protocol, each written by a single thread without locks. Any other thread can
//! read the counters of the controller end.

use core::ops::AddAssign;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

/// Counter that a single thread writes and any thread may read.
///
/// An increment is a plain addition in memory, without a lock. If two threads wrote, counts would
/// be lost.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Adds `count`. Only the writing thread may call this.
    #[inline]
    pub fn add(&self, count: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(count), Relaxed);
    }

    /// Current value.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Replaces the value. Only the writing thread may call this.
    #[inline]
    pub fn set(&self, value: u64) {
        self.0.store(value, Relaxed);
    }
}

macro_rules! counters {
    ($(#[$outer:meta])* $name:ident { $($(#[$doc:meta])* $field:ident,)* }) => {
        $(#[$outer])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name {
            $($(#[$doc])* pub $field: u64,)*
        }

        impl AddAssign for $name {
            /// Adds the counters of another doorbell, to get the sum of a queue pair, a thread or a
            /// controller.
            fn add_assign(&mut self, other: Self) {
                $(self.$field = self.$field.wrapping_add(other.$field);)*
            }
        }
    };
}

macro_rules! shared_counters {
    (
        $(#[$outer:meta])* $name:ident counted by $shared:ident {
            $($(#[$doc:meta])* $field:ident,)*
        }
    ) => {
        counters! { $(#[$outer])* $name { $($(#[$doc])* $field,)* } }

        /// Shared counters, written by the thread that serves the doorbell.
        #[derive(Debug, Default)]
        pub struct $shared {
            $(pub(crate) $field: Counter,)*
        }

        impl AsRef<Self> for $shared {
            fn as_ref(&self) -> &Self {
                self
            }
        }

        impl $shared {
            /// Reads the current values.
            #[must_use]
            pub fn read(&self) -> $name {
                $name { $($field: self.$field.get(),)* }
            }
        }
    };
}

shared_counters! {
    /// Counters of a doorbell's controller end.
    ControllerStats counted by ControllerCounters {
        /// Number of polls.
        polls,
        /// Number of polls that found a new value.
        found_new,
        /// Number of times that EventIdx was moved while polling, so that the host does not pass
        /// it.
        event_idx_moved,
        /// Number of times that EventIdx was set to the last value, so that the host's next update
        /// rings.
        event_idx_armed,
        /// Number of rechecks, after arming and the fence.
        rechecks,
        /// Number of rechecks that found a new value. Without the recheck, each would have been a
        /// lost wakeup.
        rechecks_found,
        /// Number of values refused: outside of the ring, or a completion queue head past the tail.
        invalid,
    }
}

counters! {
    /// Counters of a doorbell's host end.
    HostStats {
        /// Number of published values.
        published,
        /// Number of published values that were written to the doorbell register.
        mmio_needed,
        /// Number of published values for which the store to the shadow entry was sufficient.
        mmio_saved,
    }
}

counters! {
    /// Counters of a sleeper.
    SleeperStats {
        /// Number of rounds: a round begins with `Sleeper::prepare`, and ends in a sleep or with
        /// work.
        rounds,
        /// Number of rounds without a sleep, because a recheck found work.
        stayed_awake,
        /// Number of rounds that ended in a permit to block.
        slept,
    }
}
