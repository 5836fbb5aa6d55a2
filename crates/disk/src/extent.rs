//! Allocation state of byte ranges of a disk.

/// A run of bytes with the same allocation state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Length in bytes; at least one.
    pub len: u64,
    /// True if the bytes may hold data; false if they read as zeroes.
    pub allocated: bool,
}

impl Extent {
    /// Extent of `len` bytes that may hold data.
    #[must_use]
    pub fn data(len: u64) -> Self {
        Self { len, allocated: true }
    }

    /// Extent of `len` bytes that read as zeroes.
    #[must_use]
    pub fn hole(len: u64) -> Self {
        Self { len, allocated: false }
    }
}

/// Callback that receives consecutive extents. Returns true to receive more.
pub type ReportExtent<'a> = dyn FnMut(Extent) -> bool + 'a;
