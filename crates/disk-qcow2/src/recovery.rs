//! Crash recovery of an image.
//!
//! # Fence
//!
//! The storage is accessed by threads and by io_uring. If a process is killed, a thread finishes
//! its current system call before the process ends, and the image's lock is released with the last
//! reference to the open file. So the next process opens the image again, through a descriptor that
//! only names it, and waits for the lock. Requests in io_uring hold a reference to the open file
//! until they complete, as for a raw image. If the lock does not show the end of these requests,
//! the ring holds one end of a pipe ([`fence`](shadowbell_disk_file::fence)). Backing files need no
//! fence: the dead process only read them, into its own memory.
//!
//! # Content after a crash
//!
//! Completed writes are in the file, with their tables. Other requests were executed completely, in
//! part, or not at all; they are executed again. The tables need no repair: see
//! [`write`](crate::write) for the order of writes.

use crate::error::OpenError;
use crate::image::Image;
use crate::open::Files;
use serde::{Deserialize, Serialize};
use shadowbell_disk::Wait;
use shadowbell_disk_file::ImageFile;
use shadowbell_state::{Descriptors, FdRef};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

#[derive(Serialize, Deserialize)]
pub(crate) struct SavedImage {
    /// Descriptors that name the image, its data file and its backing files, in this order.
    files: Vec<FdRef>,
    pub(crate) block_size: u32,
    pub(crate) blocks: u64,
    pub(crate) read_only: bool,
    pub(crate) lost: i32,
    /// True if the exclusive lock of the image is its fence. Otherwise the pipe of the rings is.
    #[serde(default)]
    locked: bool,
}

pub(crate) fn save(image: &Image, fds: &mut Descriptors) -> io::Result<SavedImage> {
    let mut files = Vec::new();
    for file in &image.files {
        files.push(fds.add(file.name_for_next()?));
    }
    let info = &image.info;
    Ok(SavedImage {
        files,
        block_size: info.block_size,
        blocks: info.blocks,
        read_only: info.read_only,
        lost: image.lost(),
        locked: image.files.first().is_some_and(ImageFile::is_locked_exclusively),
    })
}

/// Source of the files of a checkpoint.
pub(crate) struct SavedFiles<'a> {
    files: std::vec::IntoIter<FdRef>,
    fds: &'a mut Descriptors,
    wait: Wait<'a>,
}

impl<'a> SavedFiles<'a> {
    pub(crate) fn new(kept: &SavedImage, fds: &'a mut Descriptors, wait: Wait<'a>) -> Self {
        Self { files: kept.files.clone().into_iter(), fds, wait }
    }
}

impl Files for SavedFiles<'_> {
    fn open(&mut self, path: &Path, read_only: bool) -> Result<ImageFile, OpenError> {
        let named = self.files.next().ok_or_else(|| "it has other files".to_owned());
        let named = named.and_then(|fd| self.fds.take(fd).map_err(|error| error.to_string()));
        let named = named.map_err(|why| refused(path, why))?;
        Ok(ImageFile::recover(path, named.as_fd(), read_only, self.wait)?)
    }
}

/// Creates the error for an image that cannot be recovered.
pub(crate) fn refused(path: &Path, why: String) -> OpenError {
    let disk = path.display().to_string();
    OpenError::File(shadowbell_disk::OpenError::NotThatDisk { disk, why })
}
