//! Pipe that fences this process: its hang-up shows another process that this process has died and
//! all its io_uring instances have ended, including their requests in flight.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Both ends of the pipe.
static ENDS: OnceLock<(PipeReader, PipeWriter)> = OnceLock::new();
static MAKING: Mutex<()> = Mutex::new(());

/// Returns a descriptor that reports `POLLHUP` when this process has died and no request of its
/// disks can reach storage or memory any more. Must be called before the first queue of a disk is
/// opened.
///
/// # Errors
/// The process has no free file descriptors.
pub fn fence() -> io::Result<OwnedFd> {
    let _one = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    let (reader, _) = match ENDS.get() {
        Some(ends) => ends,
        None => {
            let ends = io::pipe()?;
            ENDS.get_or_init(|| ends)
        }
    };
    Ok(reader.try_clone()?.into())
}

/// Write end that each ring registers, and so holds until its last request has ended.
pub(super) fn kept_by_rings() -> Option<RawFd> {
    ENDS.get().map(|(_, writer)| writer.as_raw_fd())
}
