//! Creation of images.

use crate::error::OpenError;
use crate::storage::FileStorage;
use imago::FormatCreateBuilder;
use imago::qcow2::Qcow2;
use std::io;
use std::path::Path;

/// Creates an image of `size` zeroes at `path`, which must not exist.
///
/// # Errors
/// [`OpenError::System`].
pub fn create(path: &Path, size: u64) -> Result<(), OpenError> {
    let make = || -> io::Result<()> {
        let file = std::fs::File::options().read(true).write(true).create_new(true).open(path)?;
        let made = FileStorage::new(file, None)
            .and_then(|storage| Qcow2::<FileStorage>::create_builder(storage).size(size).create());
        if made.is_err() {
            // This function has created the file, which is not a valid image yet.
            let _ = std::fs::remove_file(path);
        }
        made
    };
    make().map_err(|source| {
        let path = path.display().to_string();
        OpenError::System { path, what: "creating it", source }
    })
}
