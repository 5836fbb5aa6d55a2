//! Atomic replacement of a file.

use crate::exit::bad_input;
use anyhow::Context;
use std::fs::{File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Calls `write` on a temporary file, then renames it to `file`, whose mode it takes over.
///
/// # Errors
/// Errors of `write`; errors of the file system, with the file's name.
pub(crate) fn replace<T>(
    file: &Path,
    write: impl FnOnce(&mut File) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let directory = match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let name = || file.display().to_string();
    let new = tempfile::NamedTempFile::new_in(directory).with_context(name).map_err(bad_input)?;
    let mut new = new;
    let outcome = write(new.as_file_mut())?;
    let keep = || -> std::io::Result<()> {
        let mode = std::fs::metadata(file).map_or(0o644, |about| about.permissions().mode());
        new.as_file().set_permissions(Permissions::from_mode(mode & 0o777))?;
        new.as_file().sync_all()?;
        new.persist(file)?;
        Ok(())
    };
    keep().with_context(name).map_err(bad_input)?;
    Ok(outcome)
}
