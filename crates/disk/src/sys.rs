//! The system calls that have no safe form: io_uring over memory that is not Rust's, and the lock
//! on an image.

mod lock;
mod ring;

pub(crate) use lock::{lock_image, unlock_image};
pub(crate) use ring::{Call, Key, Memory, Ring, available};
