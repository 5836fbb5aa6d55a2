//! Atomic replacement of files: a reader finds the old or the new content, never a part.

use crate::exit::bad_input;
use anyhow::Context;
use rustix::fs::OFlags;
use std::fs::{File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Directory of a file, in which its replacement is created.
fn directory_of(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Calls `write` on a temporary file with the mode of `file`, syncs it, and renames it to `file`.
///
/// # Errors
/// Errors of `write`; errors of the file system, with the file's name.
pub fn replace<T>(
    file: &Path,
    write: impl FnOnce(&mut File) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let name = || file.display().to_string();
    let new = tempfile::NamedTempFile::new_in(directory_of(file));
    let mut new = new.with_context(name).map_err(bad_input)?;
    let outcome = write(new.as_file_mut())?;
    let keep = || -> io::Result<()> {
        let mode = std::fs::metadata(file).map_or(0o644, |about| about.permissions().mode());
        new.as_file().set_permissions(Permissions::from_mode(mode & 0o777))?;
        new.as_file().sync_all()?;
        new.persist(file)?;
        Ok(())
    };
    keep().with_context(name).map_err(bad_input)?;
    Ok(outcome)
}

/// Writes `bytes` to a temporary file and renames it to `path`, without a sync. If `path` is no
/// regular file (a symbolic link, a pipe, `/dev/stdout`), `bytes` are written to it in place.
///
/// # Errors
/// Errors of the file system; a regular file is unchanged then.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if std::fs::symlink_metadata(path).is_ok_and(|about| !about.is_file()) {
        let mut options = File::options();
        // Does not wait for the reader of a pipe.
        let nonblock = OFlags::NONBLOCK.bits().cast_signed();
        let file = options.write(true).truncate(true).custom_flags(nonblock).open(path);
        return file?.write_all(bytes);
    }
    // A new file with an unpredictable name: in a directory that others can write to, a predictable
    // name could be a symbolic link planted by another user.
    let mut draft = tempfile::Builder::new()
        .prefix(path.file_name().unwrap_or_default())
        .suffix(".tmp")
        .permissions(Permissions::from_mode(0o644))
        .tempfile_in(directory_of(path))?;
    draft.write_all(bytes)?;
    draft.persist(path).map_err(|error| error.error)?;
    Ok(())
}
