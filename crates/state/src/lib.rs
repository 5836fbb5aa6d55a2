#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod abort_point;
mod bytes;
mod channel;
mod descriptors;
mod error;
mod parcel;
mod two_places;
mod version;

pub use abort_point::{
    AbortPoint, CommandStep, WrongOrder, abort_command, abort_directory, abort_point, is_as_before,
    is_wrong,
};
pub use bytes::Bytes;
pub use descriptors::{Descriptors, FdRef, LastingChange};
pub use error::StateError;
pub use parcel::Parcel;
pub use two_places::{HeadOrder, Newest, TwoPlaces};
pub use version::{READABLE, VERSION};
