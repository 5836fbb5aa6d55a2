//! Crash recovery of file-backed disks.
//!
//! # Fence
//!
//! Requests that a dead process passed to io_uring may still be in flight. The exit of a process
//! does not wait for them, and they may reach the file or guest memory much later. No request may
//! be repeated before they end. The ring holds the open file until its last request has ended, and
//! the open file holds the lock on the image. So the next process opens the image again and waits
//! for the lock. This works only if no other process holds the same open file. Therefore the
//! checkpoint contains a descriptor that only names the image (`O_PATH`). This descriptor
//! identifies the image even after a rename.
//!
//! Readers share their locks, so a reader does not wait for a dead reader. Some file systems have
//! no locks. In both cases, the checkpoint contains `locked: false`, and each ring also holds the
//! write end of a pipe. When the last ring has ended, the next process sees a hang-up of the read
//! end ([`fence`](crate::fence)). Images that are locked exclusively do not wait for the rings of
//! other images.
//!
//! Calls that threads make need no fence: they end before their process does.

use super::image::{ImageFile, Kinds, LockWait};
use super::open::take;
use super::opener::{At, name_of};
use super::options::FileOptions;
use super::shared::FileShared;
use crate::sys::is_locked_exclusively;
use serde::{Deserialize, Serialize};
use shadowbell_disk::{DiskInfo, OpenError, Wait};
use shadowbell_state::{Descriptors, FdRef};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::Ordering;

#[derive(Serialize, Deserialize)]
struct SavedFile {
    /// `O_PATH` descriptor of the image.
    image: FdRef,
    info: DiskInfo,
    end: u64,
    lost: i32,
    /// True if the image was locked exclusively, so that this lock is the fence. Otherwise the pipe
    /// is.
    #[serde(default)]
    locked: bool,
}

pub(super) fn checkpoint(
    shared: &FileShared,
    fds: &mut Descriptors,
) -> io::Result<serde_json::Value> {
    let saved = SavedFile {
        image: fds.add(name_of(&shared.file)?),
        info: shared.info.clone(),
        end: shared.end.load(Ordering::Relaxed),
        lost: shared.flusher.lost(),
        locked: is_locked_exclusively(&shared.file, !shared.info.read_only),
    };
    Ok(serde_json::to_value(saved)?)
}

pub(super) fn recover(
    path: &Path,
    options: &FileOptions,
    state: &serde_json::Value,
    fds: &mut Descriptors,
    wait: Wait<'_>,
) -> Result<FileShared, OpenError> {
    let refused = |why| OpenError::NotThatDisk { disk: path.display().to_string(), why };
    let saved = SavedFile::deserialize(state).map_err(|error| refused(error.to_string()))?;
    let named = fds.take(saved.image).map_err(|error| refused(error.to_string()))?;
    let (at, lock_wait) = (At::Named(named.as_fd()), LockWait::While(wait));
    let mut image = ImageFile::open_at(path, at, (options.read_only, Kinds::Disks), lock_wait)?;
    if image.read_only && !saved.info.read_only {
        return Err(refused("it is no longer writable".to_owned()));
    }
    // The guest keeps the disk size that it knows; reads of missing bytes fail. The image format is
    // not detected again, because the guest controls the content of the disk.
    let size = std::mem::replace(&mut image.size, saved.info.bytes());
    let mut shared = take(image, path, options)?;
    shared.info = saved.info;
    *shared.end.get_mut() = saved.end.min(size);
    shared.flusher.set_lost(saved.lost);
    Ok(shared)
}
