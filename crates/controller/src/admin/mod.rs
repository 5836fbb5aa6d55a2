//! Admin commands: decoding, checks and data structures, independent of the control plane.

pub(crate) mod ana;
pub(crate) mod budget;
pub(crate) mod events;
pub(crate) mod features;
pub(crate) mod format;
pub(crate) mod host_behavior;
pub(crate) mod host_identifier;
pub(crate) mod identify;
pub(crate) mod identify_pool;
mod identify_zoned;
pub(crate) mod keep_alive;
pub(crate) mod limits;
pub(crate) mod logs;
pub(crate) mod namespace_management;
pub(crate) mod persistent_events;
mod pool_formats;
pub(crate) mod rate_limit;
pub(crate) mod reservation_log;
pub(crate) mod sanitize;
pub(crate) mod self_test;
pub(crate) mod telemetry;
