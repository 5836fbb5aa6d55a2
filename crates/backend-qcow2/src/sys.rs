//! A file as `imago`'s trait of storage has it, some of whose methods are `unsafe` to call: their
//! callers see to the alignment. Nothing in them is `unsafe`; a wrong alignment is an error here.

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

    /// What is discarded may read as anything, so nothing is lost where there are no holes.
    unsafe fn pure_discard(&self, offset: u64, length: u64) -> io::Result<()> {
        match self.punch(offset, length) {
            Err(error) if error.kind() == io::ErrorKind::Unsupported => Ok(()),
            outcome => outcome,
        }
    }

    /// Nothing is kept here.
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        FileStorage::sync(self)
    }

    /// Every call is over when it returns.
    fn settle_writes(&self) -> io::Result<()> {
        Ok(())
    }

    /// Nothing is kept here.
    unsafe fn invalidate_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn get_storage_helper(&self) -> &CommonStorageHelper {
        self.helper()
    }

    fn resize(&self, new_size: u64, prealloc_mode: PreallocateMode) -> io::Result<()> {
        let allocates = !matches!(prealloc_mode, PreallocateMode::None | PreallocateMode::Zero);
        if allocates && new_size > self.len() {
            // No image of ours is made that way.
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
