//! `iovec`s for system calls, in memory of the program or in memory that is shared with a device.
//!
//! No Rust reference may point into shared memory, so system calls get its address instead.

use shadowbell_memory::SharedBytes;
use std::marker::PhantomData;

/// Bytes to send, in memory of the program or in shared memory.
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) vector: libc::iovec,
    /// Bytes in memory of the program, `None` for shared memory.
    own: Option<&'a [u8]>,
}

impl<'a> Part<'a> {
    pub(crate) const NONE: Self = Self::of(&[]);

    pub(crate) const fn of(own: &'a [u8]) -> Self {
        let start = own.as_ptr().cast_mut().cast();
        Self { vector: libc::iovec { iov_base: start, iov_len: own.len() }, own: Some(own) }
    }

    /// Range `from..to` of shared memory. The range is cut at the end of the memory.
    pub(crate) fn shared(bytes: &'a SharedBytes, from: usize, to: usize) -> Self {
        Self { vector: vector(bytes, from, to), own: None }
    }

    /// Bytes in memory of the program, `None` for shared memory.
    pub(crate) fn own(&self) -> Option<&'a [u8]> {
        self.own
    }

    pub(crate) fn len(&self) -> usize {
        self.vector.iov_len
    }
}

/// Writable buffer, in memory of the program or in shared memory.
pub(crate) struct Room<'a> {
    pub(crate) vector: libc::iovec,
    borrowed: PhantomData<&'a mut [u8]>,
}

impl<'a> Room<'a> {
    pub(crate) fn of(own: &'a mut [u8]) -> Self {
        let (iov_base, iov_len) = (own.as_mut_ptr().cast(), own.len());
        Self { vector: libc::iovec { iov_base, iov_len }, borrowed: PhantomData }
    }

    /// Range `from..to` of shared memory. The range is cut at the end of the memory, and empty if
    /// the memory is read-only.
    pub(crate) fn shared(bytes: &'a SharedBytes, from: usize, to: usize) -> Self {
        let to = if bytes.is_writable() { to } else { 0 };
        Self { vector: vector(bytes, from, to), borrowed: PhantomData }
    }

    pub(crate) fn len(&self) -> usize {
        self.vector.iov_len
    }
}

/// `iovec` of the range `from..to`. The range is cut at the end of the memory.
fn vector(bytes: &SharedBytes, from: usize, to: usize) -> libc::iovec {
    let to = to.min(bytes.len());
    let from = from.min(to);
    let start = std::ptr::with_exposed_provenance_mut(bytes.address() + from);
    libc::iovec { iov_base: start, iov_len: to - from }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_memory::Mapping;

    #[test]
    fn slices_are_limited_to_the_memory() {
        let memory = Mapping::anonymous(4096).unwrap().bytes();
        for (from, to, len) in
            [(0, usize::MAX, 4096), (4096, 4097, 0), (usize::MAX, usize::MAX, 0), (9, 3, 0)]
        {
            assert_eq!(Part::shared(&memory, from, to).len(), len, "{from} {to}");
            assert_eq!(Room::shared(&memory, from, to).len(), len, "{from} {to}");
        }
    }
}
