//! Layers around a disk: rate limits, metadata with protection information, zones.
//!
//! * [`LimitedDisk`] adds rate limits to any disk;
//! * [`MetadataDisk`] adds metadata and protection information to any disk;
//! * [`ZonedDisk`] divides memory or a raw image into zones (ZNS).
//!
//! A layer is a [`Disk`](shadowbell_disk::Disk) around another one. A layer that is not used costs
//! nothing.
#![forbid(unsafe_code)]

mod limit;
mod metadata;
mod zoned;

pub use limit::{Clock, LimitedDisk, Limiter, Limits, Rate};
pub use metadata::MetadataDisk;
pub use zoned::ZonedDisk;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
