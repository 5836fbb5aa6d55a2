//! Counter of page table losses: page tables of peers' memory that were freed.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;

/// Minimum size in bytes of a mapping whose page tables are counted. The 4096 smaller mappings that
/// a client may have need 32 MiB of page tables in total.
pub(crate) const SMALL: u64 = 4 << 20;

static FREED_EVENTS: AtomicU64 = AtomicU64::new(0);

/// Counts an event that freed page tables.
pub(crate) fn count_freed_tables() {
    FREED_EVENTS.fetch_add(1, SeqCst);
}

/// Counts the unmapping of `len` bytes of a peer's memory, because it also frees the page tables of
/// that memory.
pub(crate) fn count_unmapping(len: usize) {
    if len as u64 >= SMALL {
        count_freed_tables();
    }
}

/// Number of counted events.
pub(crate) fn count() -> u64 {
    FREED_EVENTS.load(SeqCst)
}
