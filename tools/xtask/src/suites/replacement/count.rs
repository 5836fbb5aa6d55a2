//! How often something was done to a server.

use std::time::Duration;

/// How often it was done.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Count {
    pub(super) done: u32,
    /// The old process went on, because it did not come to rest in time: the guest notices nothing
    /// of those either.
    pub(super) put_off: u32,
    pub(super) longest: Duration,
}
