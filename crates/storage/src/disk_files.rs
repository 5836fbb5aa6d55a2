//! Files that a disk needs, for a process that opens them on behalf of the server.

use shadowbell_config::disk_spec::{file, split};
use shadowbell_disk_file::FileSpec;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// File of a disk, as a process opens it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskFile {
    /// Path.
    pub path: PathBuf,
    /// True if the file is only read.
    pub is_read_only: bool,
}

/// Files of a disk: the file or device in `spec`, and the files that a qcow2 image names, if the
/// options permit them. A relative path in `spec` starts at `directory`. Empty for disks that are
/// neither files nor devices.
#[must_use]
pub fn files(spec: &str, directory: &Path) -> Vec<PathBuf> {
    let Some(FileSpec { path, options, .. }) = parse(spec) else { return Vec::new() };
    let path = directory.join(path);
    let named = match options.allow_backing {
        true => shadowbell_disk_qcow2::named_files(&path),
        false => Vec::new(),
    };
    [path].into_iter().chain(named).collect()
}

/// File or device in `spec`. A relative path starts at `directory`. `None` for other disks.
#[must_use]
pub fn image(spec: &str, directory: &Path) -> Option<DiskFile> {
    let FileSpec { path, options, .. } = parse(spec)?;
    Some(DiskFile { path: directory.join(path), is_read_only: options.read_only })
}

fn parse(spec: &str) -> Option<FileSpec> {
    file(spec).and_then(|_| FileSpec::parse(&split(spec).ok()?.0).ok()?)
}

/// True if `path` is one of the [files] of a disk, by device and inode.
#[must_use]
pub fn uses(spec: &str, directory: &Path, path: &Path) -> bool {
    let id = |path: &Path| path.metadata().ok().map(|about| (about.dev(), about.ino()));
    let wanted = id(path);
    wanted.is_some() && files(spec, directory).iter().any(|file| id(file) == wanted)
}
