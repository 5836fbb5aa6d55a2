#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod ab_slots;
mod bytes;
mod channel;
mod descriptors;
mod error;
mod failpoint;
mod fields;
mod state_message;
mod version;

pub use ab_slots::{AbSlots, HeadOrder, Newest};
pub use bytes::Bytes;
pub use descriptors::{Descriptors, FdRef, LastingChange};
pub use error::StateError;
pub use failpoint::{
    AbortPoint, CommandStep, ItemFault, WrongOrder, abort_command, abort_directory, abort_point,
    is_wrong, item_fault,
};
pub use fields::{read_fields, read_json};
pub use state_message::Parcel;
pub use version::{READABLE, VERSION};
