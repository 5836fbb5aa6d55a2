//! Atomic replacement of a file's content.

use rustix::fs::OFlags;
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Writes `bytes` so that a reader of `path` always finds a complete file. A path that is not a
/// regular file (a symbolic link, a pipe, `/dev/stdout`) is written to in place.
///
/// # Errors
/// Errors of the file system; a regular file is unchanged then.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if std::fs::symlink_metadata(path).is_ok_and(|about| !about.is_file()) {
        let mut options = std::fs::File::options();
        // Does not wait for the reader of a pipe.
        let nonblock = OFlags::NONBLOCK.bits().cast_signed();
        let file = options.write(true).truncate(true).custom_flags(nonblock).open(path);
        return file?.write_all(bytes);
    }
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    // A new file with an unpredictable name: in a directory that others can write to, a predictable
    // name could be a symbolic link planted by another user.
    let mut draft = tempfile::Builder::new()
        .prefix(path.file_name().unwrap_or_default())
        .suffix(".tmp")
        .permissions(Permissions::from_mode(0o644))
        .tempfile_in(directory.unwrap_or(Path::new(".")))?;
    draft.write_all(bytes)?;
    draft.persist(path).map_err(|error| error.error)?;
    Ok(())
}
