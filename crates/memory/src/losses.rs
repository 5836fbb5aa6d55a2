//! How often page tables of peers' memory have gone.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

/// Smaller mappings are not looked at: a client's 4096 of them have 32 MiB of page tables.
pub(crate) const SMALL: u64 = 4 << 20;

static GONE: AtomicU64 = AtomicU64::new(0);

/// They were thrown away.
pub(crate) fn tables_gone() {
    GONE.fetch_add(1, SeqCst);
}

/// A mapping of a peer's memory is about to go, and its page tables with it.
pub(crate) fn mapping_goes(len: usize) {
    if len as u64 >= SMALL {
        tables_gone();
    }
}

/// How often that has happened.
pub(crate) fn count() -> u64 {
    GONE.load(SeqCst)
}
