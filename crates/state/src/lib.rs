#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod bytes;
mod channel;
mod descriptors;
mod error;
mod parcel;
mod version;

pub use bytes::Bytes;
pub use descriptors::{Descriptors, FdRef};
pub use error::StateError;
pub use parcel::Parcel;
pub use version::{READABLE, VERSION};
