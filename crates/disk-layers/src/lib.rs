//! Layers around a disk: rate limits, metadata with protection information, zones, error policy.
//!
//! * [`HoldingDisk`] holds requests that fail because of the storage, until it is repaired;
//! * [`LimitedDisk`] adds rate limits to any disk;
//! * [`MetadataDisk`] adds metadata and protection information to any disk;
//! * [`ZonedDisk`] divides memory or a raw image into zones (ZNS).
//!
//! A layer is a [`Disk`](shadowbell_disk::Disk) around another one. A layer that is not used costs
//! nothing.
#![forbid(unsafe_code)]

mod error_policy;
mod limit;
mod metadata;
mod zoned;

pub use error_policy::{ErrorPolicy, HoldingDisk};
pub use limit::{Clock, LimitedDisk, Limiter, Limits, Rate};
pub use metadata::MetadataDisk;
pub use zoned::ZonedDisk;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
