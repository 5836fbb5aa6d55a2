//! What shows a process that this one has died, and that all its rings have gone, and with them
//! what they had under way.

use std::io::{self, PipeReader, PipeWriter};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, OnceLock, PoisonError};

/// The two ends of a pipe.
static ENDS: OnceLock<(PipeReader, PipeWriter)> = OnceLock::new();
static MAKING: Mutex<()> = Mutex::new(());

/// A descriptor that comes to its end (`POLLHUP`) when this process has died and nothing that its
/// disks had under way can reach them, or memory, any more. It has to be asked for before the first
/// queue of a disk is opened.
///
/// # Errors
/// The system has no more descriptors.
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

/// What each ring keeps for as long as something is under way in it.
pub(super) fn kept_by_rings() -> Option<RawFd> {
    ENDS.get().map(|(_, writer)| writer.as_raw_fd())
}
