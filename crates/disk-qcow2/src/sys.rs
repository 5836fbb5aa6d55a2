//! Implementation of `imago`'s trait `Storage`. Some methods are `unsafe` to call, because the
//! trait makes their callers responsible for the alignment. Their bodies contain no unsafe
//! operation: with a wrong alignment, the system call fails.

use crate::storage::FileStorage;
use imago::Storage;
use imago::io_buffers::{IoVector, IoVectorMut};
use imago::storage::PreallocateMode;
use imago::storage::drivers::CommonStorageHelper;
use std::{fmt, io};

impl Storage for FileStorage {
    fn mem_align(&self) -> usize {
        self.alignment().memory
    }

    fn req_align(&self) -> usize {
        self.alignment().offset
    }

    fn zero_align(&self) -> usize {
        self.unit()
    }

    fn discard_align(&self) -> usize {
        self.unit()
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.len())
    }

    unsafe fn pure_readv(&self, bufv: IoVectorMut<'_>, offset: u64) -> io::Result<()> {
        self.read(bufv, offset)
    }

    unsafe fn pure_writev(&self, bufv: IoVector<'_>, offset: u64) -> io::Result<()> {
        self.write(bufv, offset)
    }

    unsafe fn pure_write_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.zero(offset, length)
    }

    unsafe fn pure_write_allocated_zeroes(&self, offset: u64, length: u64) -> io::Result<()> {
        self.allocate_zeroes(offset, length)
    }

    /// Discarded data may have any content. So if the file does not support holes, success without
    /// effect is correct.
    unsafe fn pure_discard(&self, offset: u64, length: u64) -> io::Result<()> {
        match self.punch(offset, length) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            outcome => outcome,
        }
    }

    /// Has no effect, because this storage has no cache.
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        FileStorage::sync(self)
    }

    /// Has no effect, because writes complete before their calls return.
    fn settle_writes(&self) -> io::Result<()> {
        Ok(())
    }

    /// Has no effect, because this storage has no cache.
    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        self.helper()
    }

    fn resize(&self, new_size: u64, prealloc_mode: PreallocateMode) -> io::Result<()> {
        let allocates = !matches!(prealloc_mode, PreallocateMode::None | PreallocateMode::Zero);
        if allocates && new_size > self.len() {
            // This crate never creates preallocated images.
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.set_len(new_size)
    }
}

impl fmt::Display for FileStorage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a file")
    }
}
