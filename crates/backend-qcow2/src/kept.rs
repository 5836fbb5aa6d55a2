//! An image whose process has died, in the next one.
//!
//! # The fence
//!
//! The storage is read and written by threads. A thread that is in a call when its process is
//! killed ends that call before the process has gone, and the lock on the image goes with the last
//! of them: the next process opens the image anew, by a descriptor that only names it, and waits
//! for the lock. What the dead process had given to io_uring keeps the open file, and so the lock,
//! until it has ended, as of a raw image; and where a lock does not show it, the ring keeps the end
//! of a pipe ([`fence`](shadowbell_backend::fence)). The files below are only read, into memory
//! that was the dead process's alone.
//!
//! # What is in the image then
//!
//! What was answered is in the file: while an image is kept for the next process, a write is
//! answered when the tables that name its clusters are written (`Image::last`), and a cluster is
//! overwritten past the format only after that. What was not
//! answered is there, or in part, or not at all, and is carried out again. Counts of clusters are
//! [looked at](crate::mend) before anything else is written, as in any image that is opened.

use crate::error::OpenError;
use crate::image::Image;
use crate::open::Files;
use serde::{Deserialize, Serialize};
use shadowbell_backend::{ImageFile, Wait};
use shadowbell_state::{Descriptors, FdRef};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

#[derive(Serialize, Deserialize)]
pub(crate) struct KeptImage {
    /// Descriptors that name the image, and what is below it in order.
    files: Vec<FdRef>,
    pub(crate) block_size: u32,
    pub(crate) blocks: u64,
    pub(crate) read_only: bool,
    pub(crate) lost: i32,
}

pub(crate) fn keep(image: &Image, fds: &mut Descriptors) -> io::Result<KeptImage> {
    let mut files = Vec::new();
    for file in image.files() {
        files.push(fds.add(file.name_for_next()?));
    }
    let info = &image.info;
    Ok(KeptImage {
        files,
        block_size: info.block_size,
        blocks: info.blocks,
        read_only: info.read_only,
        lost: image.lost(),
    })
}

/// Opens what was kept.
pub(crate) struct Kept<'a> {
    files: std::vec::IntoIter<FdRef>,
    fds: &'a mut Descriptors,
    wait: Wait<'a>,
}

impl<'a> Kept<'a> {
    pub(crate) fn new(kept: &KeptImage, fds: &'a mut Descriptors, wait: Wait<'a>) -> Self {
        Self { files: kept.files.clone().into_iter(), fds, wait }
    }
}

impl Files for Kept<'_> {
    fn open(&mut self, path: &Path, read_only: bool) -> Result<ImageFile, OpenError> {
        let named = self.files.next().ok_or_else(|| "it has other backing files now".to_owned());
        let named = named.and_then(|fd| self.fds.take(fd).map_err(|error| error.to_string()));
        let named = named.map_err(|why| refused(path, why))?;
        Ok(ImageFile::recover(path, named.as_fd(), read_only, self.wait)?)
    }
}

/// It is not the image that was kept.
pub(crate) fn refused(path: &Path, why: String) -> OpenError {
    let disk = path.display().to_string();
    OpenError::File(shadowbell_backend::OpenError::NotThatDisk { disk, why })
}
