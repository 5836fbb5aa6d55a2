//! Crash recovery of file-backed disks.
//!
//! # Fence
//!
//! Requests that a dead process passed to io_uring may still be in flight: process exit does not
//! wait for them, and they may reach the file or guest memory much later. Nothing may be repeated
//! before they end. The ring holds the open file until its last request has ended, and the open
//! file holds the lock on the image. So the next process opens the image anew and waits for the
//! lock. This works only if no other process holds the same open file; therefore the checkpoint
//! contains a descriptor that only names the image (`O_PATH`). It finds the image after a rename
//! and cannot match another file.
//!
//! A reader's lock is shared with the dead process, and some file systems have no locks. For these
//! cases each ring also holds the write end of a pipe; the next process sees the hang-up of the
//! read end when the last ring has ended ([`fence`](crate::fence)).
//!
//! Calls made by threads end before their process does.

use super::image::{ImageFile, Kinds, LockWait};
use super::open::take;
use super::opener::{At, name_of};
use super::options::FileOptions;
use super::shared::FileShared;
use serde::{Deserialize, Serialize};
use shadowbell_disk::{DiskInfo, OpenError, Wait};
use shadowbell_state::{Descriptors, FdRef};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::Ordering;

#[derive(Serialize, Deserialize)]
struct KeptFile {
    /// `O_PATH` descriptor of the image.
    image: FdRef,
    info: DiskInfo,
    end: u64,
    lost: i32,
}

pub(super) fn keep(shared: &FileShared, fds: &mut Descriptors) -> io::Result<serde_json::Value> {
    let kept = KeptFile {
        image: fds.add(name_of(&shared.file)?),
        info: shared.info.clone(),
        end: shared.end.load(Ordering::Relaxed),
        lost: shared.flusher.lost(),
    };
    Ok(serde_json::to_value(kept)?)
}

pub(super) fn recover(
    path: &Path,
    options: &FileOptions,
    state: &serde_json::Value,
    fds: &mut Descriptors,
    wait: Wait<'_>,
) -> Result<FileShared, OpenError> {
    let refused = |why| OpenError::NotThatDisk { disk: path.display().to_string(), why };
    let kept = KeptFile::deserialize(state).map_err(|error| refused(error.to_string()))?;
    let named = fds.take(kept.image).map_err(|error| refused(error.to_string()))?;
    let (at, lock_wait) = (At::Named(named.as_fd()), LockWait::AsLongAs(wait));
    let mut image = ImageFile::open_at(path, at, (options.read_only, Kinds::Disks), lock_wait)?;
    if image.read_only && !kept.info.read_only {
        return Err(refused("it is no longer writable".to_owned()));
    }
    // The guest keeps the disk size that it knows; reads of missing bytes fail. The content belongs
    // to the guest, so it says nothing about the image format and is not checked.
    let size = std::mem::replace(&mut image.size, kept.info.bytes());
    let mut shared = take(image, path, options)?;
    shared.info = kept.info;
    *shared.end.get_mut() = kept.end.min(size);
    shared.flusher.set_lost(kept.lost);
    Ok(shared)
}
