//! What an eventfd is told from others by: its descriptor may be given away again.

use std::sync::atomic::{AtomicU64, Ordering};

/// Which eventfd it is, in all of this process's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Id(u64);

impl Id {
    /// Another one than all before.
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}
