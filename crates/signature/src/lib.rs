//! Detection of existing data on a disk by the signatures of libblkid: [`find`].
#![deny(unsafe_code)]

mod found;
#[allow(unsafe_code)]
mod sys;

pub use found::{FindError, Found};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::pwrite;
use std::io;
use std::os::fd::OwnedFd;

/// Number of bytes at the start and at the end of a disk that contain all signatures in use. The
/// signature of btrfs is after the first 64 KiB. Those of the GPT backup and of some RAIDs are at
/// the end.
pub const SPAN: usize = 1 << 20;

/// Detects the signature on a disk of `bytes` bytes, whose `first` and `last` bytes the caller
/// has read ([`SPAN`] of each, or all). Returns `None` if there is no known signature.
///
/// # Errors
/// [`FindError`] if libblkid is missing or a system call fails.
pub fn find(bytes: u64, first: &[u8], last: &[u8]) -> Result<Option<Found>, FindError> {
    // libblkid requires a file. The parts of this file that are not written read as zeroes and use
    // no memory.
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
