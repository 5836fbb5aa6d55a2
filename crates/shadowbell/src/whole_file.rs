//! A file that is there as a whole, or not at all.

use rustix::fs::OFlags;
use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Writes these bytes, so that a reader of `path` finds all of them at any time. What is there and
/// is no file (a link, a pipe, `/dev/stdout`) stays what it is, and is written to.
///
/// # Errors
/// The system's; a file is as it was then.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if std::fs::symlink_metadata(path).is_ok_and(|about| !about.is_file()) {
        let mut options = std::fs::File::options();
        // Nobody waits for a pipe's reader.
        let nonblock = OFlags::NONBLOCK.bits().cast_signed();
        let file = options.write(true).truncate(true).custom_flags(nonblock).open(path);
        return file?.write_all(bytes);
    }
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    // A name that nobody can foresee, and a file that was not there: in a directory that others can
    // write to, a link may wait under any other.
    let mut draft = tempfile::Builder::new()
        .prefix(path.file_name().unwrap_or_default())
        .suffix(".tmp")
        .permissions(Permissions::from_mode(0o644))
        .tempfile_in(directory.unwrap_or(Path::new(".")))?;
    draft.write_all(bytes)?;
    draft.persist(path).map_err(|error| error.error)?;
    Ok(())
}
