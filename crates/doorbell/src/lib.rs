//! The NVMe shadow doorbell protocol (Doorbell Buffer Config), both ends, model-checked.
#![forbid(unsafe_code)]
#![cfg_attr(not(any(test, loom)), no_std)]

extern crate alloc;

mod cell;
mod controller;
mod host;
mod ring;
mod sleep;
mod stats;

pub use cell::{Cell, Fence, FullFence};
pub use controller::{CqHead, DoorbellState, InvalidDoorbell, SqTail, Truth};
pub use host::{HostDoorbell, Predicate};
pub use ring::RingSize;
pub use sleep::{Arming, Asleep, Fenced, Sleeper, Waker};
pub use stats::{ControllerStats, HostStats, SleeperStats};
