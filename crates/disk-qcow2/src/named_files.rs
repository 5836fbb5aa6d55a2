//! Paths of the files that an image names, for callers that open them for another process.

use crate::header::{Header, read_start};
use crate::open::{MAX_CHAIN, beside};
use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

/// Paths of the external data file and of the backing files of the image at `path`, with those of
/// its backing files. The list ends at a file that cannot be read; for a raw image it is empty.
pub fn named_files(path: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut next = header_of(path).map(|header| (path.to_owned(), header));
    while let Some((path, header)) = next.filter(|_| files.len() < MAX_CHAIN) {
        let data_file = header.data_file.and_then(|name| beside(&path, &name).ok());
        files.extend(data_file);
        let backing = header.backing.and_then(|(name, _)| beside(&path, &name).ok());
        files.extend(backing.clone());
        next = backing.and_then(|path| Some((path.clone(), header_of(&path)?)));
    }
    files
}

fn header_of(path: &Path) -> Option<Header> {
    let kind = std::fs::metadata(path).ok()?.file_type();
    // The open of other files has side effects: it blocks, rewinds a tape or starts a watchdog.
    if !kind.is_file() && !kind.is_block_device() {
        return None;
    }
    let start = read_start(&File::open(path).ok()?).ok()?;
    Header::parse(&start, u64::MAX / 2).ok()
}
