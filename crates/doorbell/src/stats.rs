//! What the protocol did: counted by the thread that did it, without locks, and for the
//! controller's end of a doorbell so that any other thread can read it.

use core::ops::AddAssign;
use core::sync::atomic::AtomicU64;
use core::sync::atomic::Ordering::Relaxed;

/// A number that one thread counts, and any may read at any time.
///
/// To count is a plain addition in memory: it takes no lock and waits for nobody. Two threads that
/// count would lose some.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Counts on. By one thread only.
    #[inline]
    pub fn add(&self, count: u64) {
        self.0.store(self.0.load(Relaxed).wrapping_add(count), Relaxed);
    }

    /// The number, as of now.
    #[inline]
    pub fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }

    /// Puts another number in its place. By the thread that counts.
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
            /// Sums up several doorbells, for a queue pair, a worker or a controller.
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

        /// Where the thread that serves a doorbell counts them.
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
            /// The numbers, each as of now.
            #[must_use]
            pub fn read(&self) -> $name {
                $name { $($field: self.$field.get(),)* }
            }
        }
    };
}

shared_counters! {
    /// One doorbell, as the controller saw it.
    ControllerStats counted by ControllerCounters {
        /// Times that the doorbell was looked at while polling.
        looks,
        /// Looks that found a new value.
        found_new,
        /// EventIdx moved out of the host's way while polling.
        event_idx_moved,
        /// EventIdx set to the last value seen, so that the host's next update rings.
        event_idx_armed,
        /// Second looks, after arming and the fence.
        rechecks,
        /// Second looks that found a new value: each would have been a lost wakeup.
        rechecks_found,
        /// Values refused: outside the ring, or a completion queue head past the tail.
        invalid,
    }
}

counters! {
    /// One doorbell, as the host rang it.
    HostStats {
        /// Values published.
        published,
        /// Published values that had to be written to the doorbell register.
        mmio_needed,
        /// Published values for which the shadow entry was enough.
        mmio_saved,
    }
}

counters! {
    /// One sleeper.
    SleeperStats {
        /// Times that it set out to sleep.
        rounds,
        /// Rounds that a second look cut short.
        stayed_awake,
        /// Rounds that ended in a permit to block.
        slept,
    }
}
