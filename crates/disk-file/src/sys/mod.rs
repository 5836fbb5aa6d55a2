//! System calls without a safe interface: io_uring, threads that access memory not owned by Rust,
//! NVMe passthrough, and the image lock.

mod call;
mod fence;
mod inline_writes;
mod jobs;
mod lock;
mod namespace_ring;
mod passthrough;
mod ring;
mod slot;
mod threads;
mod uring;
mod waker;

pub(crate) use call::NVME_STATUS;
pub use fence::fence;
pub(crate) use lock::{is_locked_exclusively, lock_image, unlock_image};
pub(crate) use passthrough::{Identity, Namespace, flush, identify, read_start};
pub(crate) use ring::{EngineKind, Key, Ring};
pub(crate) use slot::{Call, Memory};
#[cfg(feature = "scripted")]
pub use threads::CallOutcome;
#[cfg(feature = "scripted")]
pub(crate) use threads::ThreadsShared;
pub use threads::unpin;
pub(crate) use uring::available;
pub use uring::prepare;
pub(crate) use uring::supports_commands;
pub(crate) use waker::Waker;
