//! What a disk holds already, by the signatures that libblkid knows: [`find`].
#![deny(unsafe_code)]

mod found;
#[allow(unsafe_code)]
mod sys;

pub use found::{FindError, Found};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::pwrite;
use std::io;
use std::os::fd::OwnedFd;

/// So many bytes from the beginning of a disk, and as many at its end, have all signatures that
/// are in use: that of btrfs lies behind the first 64 KiB, those of GPT's copy and of some RAIDs in
/// the last.
pub const SPAN: usize = 1 << 20;

/// What a disk of so many `bytes` holds, whose `first` and `last` bytes are these ([`SPAN`] of
/// each, or all that there are). `None`: nothing that is known.
///
/// # Errors
/// [`FindError`].
pub fn find(bytes: u64, first: &[u8], last: &[u8]) -> Result<Option<Found>, FindError> {
    // libblkid wants a file. What is not written to this one reads as zeroes, and takes no memory.
    let image = memfd_create("disk", MemfdFlags::CLOEXEC).map_err(io::Error::from)?;
    ftruncate(&image, bytes).map_err(io::Error::from)?;
    let fits = |len: usize| len as u64 <= bytes;
    if !fits(first.len()) || !fits(last.len()) {
        let why = "there are more bytes than the disk has";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why).into());
    }
    write_at(&image, first, 0)?;
    write_at(&image, last, bytes - last.len() as u64)?;
    sys::probe(&image)
}

fn write_at(image: &OwnedFd, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let written = rustix::io::retry_on_intr(|| pwrite(image, bytes, offset))?;
        bytes = bytes.get(written..).unwrap_or_default();
        offset += written as u64;
    }
    Ok(())
}

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
