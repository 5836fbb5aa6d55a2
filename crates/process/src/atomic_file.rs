//! Atomic replacement of files. A reader finds either the old or the new content, and never a
//! mixture.

use crate::exit::bad_input;
use anyhow::Context;
use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;

/// Directory of a file. The file's replacement is created in it.
fn directory_of(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Calls `write` on a temporary file that has the mode of `file`, and its owner if the caller may
/// set it, syncs the temporary file, and renames it to `file`. A symbolic link is replaced.
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
    let commit = || -> io::Result<()> {
        let about = std::fs::symlink_metadata(file).ok().filter(std::fs::Metadata::is_file);
        let mode = about.as_ref().map_or(0o644, |about| about.permissions().mode());
        if let Some(about) = about {
            let _ = fchown(new.as_file(), Some(about.uid()), Some(about.gid()));
        }
        new.as_file().set_permissions(Permissions::from_mode(mode & 0o777))?;
        new.as_file().sync_all()?;
        new.persist(file)?;
        Ok(())
    };
    commit().with_context(name).map_err(bad_input)?;
    Ok(outcome)
}
