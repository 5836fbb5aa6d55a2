//! Creation of an image.

use crate::error::OpenError;
use crate::storage::{FileStorage, Reach};
use std::io;
use std::path::Path;

/// Cluster size of new images: 64 KiB, as in QEMU.
const CLUSTER_BITS: u32 = 16;

/// Creates an image of `size` zeroes at `path`, which must not exist.
///
/// # Errors
/// [`OpenError::System`].
pub fn create(path: &Path, size: u64) -> Result<(), OpenError> {
    let make = || -> io::Result<()> {
        let file = std::fs::File::options().read(true).write(true).create_new(true).open(path)?;
        let made = FileStorage::new(file, None).and_then(|file| format(&file, size));
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

/// Writes the header, the refcount table with one block, and an empty L1 table.
fn format(file: &FileStorage, size: u64) -> io::Result<()> {
    let cluster = 1_u64 << CLUSTER_BITS;
    let l1_entries = size.div_ceil(cluster * cluster / 8);
    let l1_clusters = (l1_entries * 8).div_ceil(cluster);
    if size > 1 << 51 {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let mut header = vec![0; 128];
    header[..4].copy_from_slice(b"QFI\xfb");
    for (at, value) in [(4, 3), (20, CLUSTER_BITS), (36, l1_entries as u32), (56, 1), (96, 4)] {
        header[at..at + 4].copy_from_slice(&value.to_be_bytes());
    }
    header[100..104].copy_from_slice(&112_u32.to_be_bytes());
    for (at, value) in [(24, size), (40, 3 * cluster), (48, cluster)] {
        header[at..at + 8].copy_from_slice(&value.to_be_bytes());
    }
    let counts = 1_u16.to_be_bytes().repeat(3 + l1_clusters as usize);
    file.set_len((3 + l1_clusters) * cluster)?;
    file.write(&counts, 2 * cluster, Reach::Cache)?;
    file.write(&(2 * cluster).to_be_bytes(), cluster, Reach::Cache)?;
    file.write(&header, 0, Reach::Cache)
}
