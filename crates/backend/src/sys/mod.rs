//! The system calls that have no safe form: io_uring, or threads, over memory that is not Rust's,
//! and the lock on an image.

mod call;
mod fence;
mod here;
mod jobs;
mod lock;
mod ring;
mod threads;
mod uring;
mod waker;

pub use fence::fence;
pub(crate) use lock::{lock_image, unlock_image};
pub(crate) use ring::{Call, EngineKind, Key, Memory, Ring};
#[cfg(feature = "scripted")]
pub use threads::End;
#[cfg(feature = "scripted")]
pub(crate) use threads::ThreadsShared;
pub use threads::unpin;
pub(crate) use uring::available;
pub(crate) use waker::Waker;
