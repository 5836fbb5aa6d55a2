//! Pipe that fences this process. A hang-up of the pipe shows another process that this process has
//! died, and that all its io_uring instances and their requests have ended.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, OnceLock, PoisonError};

/// Both ends of the pipe.
static PIPE: OnceLock<(PipeReader, PipeWriter)> = OnceLock::new();
static CREATING: Mutex<()> = Mutex::new(());

/// Returns a descriptor that reports `POLLHUP` after this process has died and none of its disk
/// requests can reach storage or memory any more. Must be called before the first queue of a disk
/// is opened.
///
/// # Errors
/// The process has no free file descriptors.
pub fn fence() -> io::Result<OwnedFd> {
    let _one = CREATING.lock().unwrap_or_else(PoisonError::into_inner);
    let (reader, _) = match PIPE.get() {
        Some(created) => created,
        None => {
            let created = io::pipe()?;
            PIPE.get_or_init(|| created)
        }
    };
    Ok(reader.try_clone()?.into())
}

/// Write end of the pipe. Each ring registers it, and so holds it until the last request of the
/// ring has ended.
pub(super) fn writer_fd() -> Option<RawFd> {
    PIPE.get().map(|(_, writer)| writer.as_raw_fd())
}
