//! A file disk whose process has died, in the next one.
//!
//! # The fence
//!
//! What the dead process had given to io_uring is under way still: the system does not wait for it,
//! and it may reach the file, or the guest's memory, much later. Nothing may be repeated before.
//! The ring keeps the open file until its last request has ended, and the open file has the lock on
//! the image. So the next process opens the image anew and waits for the lock. This works if nobody
//! else has that open file: what is kept for this time is a descriptor that only names it
//! (`O_PATH`). The image is found by that even if it was renamed, and nothing else is taken for it.
//!
//! A reader's lock is shared with the dead process, and some file systems have no locks. For these
//! each ring keeps the writing end of a pipe, too, whose end the next process sees when the last of
//! them has gone ([`fence`](crate::fence)).
//!
//! Calls made by threads end before their process does.

use super::image::{ImageFile, Kinds, LockWait, Wait};
use super::open::take;
use super::opener::{At, name_of};
use super::options::FileOptions;
use super::shared::FileShared;
use crate::error::OpenError;
use crate::info::DiskInfo;
use serde::{Deserialize, Serialize};
use shadowbell_state::{Descriptors, FdRef};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::Ordering;

#[derive(Serialize, Deserialize)]
struct KeptFile {
    /// A descriptor that names it.
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
        return Err(refused("it can not be written any more".to_owned()));
    }
    // To the guest it is what it was; what is not there any more is noticed by who reads it. What
    // it holds is the guest's, and tells nothing of its format.
    let size = std::mem::replace(&mut image.size, kept.info.bytes());
    let mut shared = take(image, path, options)?;
    shared.info = kept.info;
    *shared.end.get_mut() = kept.end.min(size);
    shared.flusher.set_lost(kept.lost);
    Ok(shared)
}
