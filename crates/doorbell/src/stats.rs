//! What the protocol did, in plain counters that belong to the thread that did it.

use core::ops::AddAssign;

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

counters! {
    /// One doorbell, as the controller saw it.
    ControllerStats {
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
