//! Errors of opening a qcow2 image.

use std::io;

/// Error of opening a qcow2 image. Each message says what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The file cannot be opened. This does not depend on its content.
    #[error(transparent)]
    File(#[from] shadowbell_disk::OpenError),
    /// The image is damaged, or is not a qcow2 image.
    #[error("{path}: {why}; `qemu-img check -r all {path}` may repair it")]
    Damaged {
        /// Path of the image.
        path: String,
        /// The defect.
        why: String,
    },
    /// The image is encrypted.
    #[error(
        "{path}: it is encrypted ({how}), which is not supported; decrypt it with `qemu-img \
         convert`, or encrypt inside of the guest"
    )]
    Encrypted {
        /// Path of the image.
        path: String,
        /// Encryption method.
        how: &'static str,
    },
    /// The image uses a feature that is not supported.
    #[error(
        "{path}: it {what}, which is not supported; convert it with `qemu-img convert -O qcow2 \
         {path} {path}.new`"
    )]
    Unsupported {
        /// Path of the image.
        path: String,
        /// The feature, as a verb phrase.
        what: String,
    },
    /// The image has a backing file, and backing files are not allowed.
    #[error(
        "{path}: it has the backing file `{backing}`, which the guest could read; allow that with \
         `allow-backing=on`, or merge both into one image with `qemu-img convert -O qcow2 {path} \
         {path}.new`"
    )]
    Backing {
        /// Path of the image.
        path: String,
        /// Name of the backing file in the image.
        backing: String,
    },
    /// The image has an external data file, and other files are not allowed.
    #[error(
        "{path}: its data are in the file `{name}`, which the guest could change; allow that with \
         `allow-backing=on`, or merge both into one image with `qemu-img convert -O qcow2 {path} \
         {path}.new`"
    )]
    DataFile {
        /// Path of the image.
        path: String,
        /// Name of the data file in the image.
        name: String,
    },
    /// The image cannot be opened as requested.
    #[error("{path}: {why}")]
    Refused {
        /// Path of the image.
        path: String,
        /// The reason, and the remedy.
        why: String,
    },
    /// The image does not state the format of its backing file.
    #[error(
        "{path}: it does not state the format of its backing file `{backing}`, and detecting it \
         would let the content of that file choose which files are opened; state it with \
         `qemu-img rebase -u -b {backing} -F FORMAT {path}`"
    )]
    BackingFormat {
        /// Path of the image.
        path: String,
        /// Name of the backing file in the image.
        backing: String,
    },
    /// The size of the disk is not a multiple of the block size.
    #[error(
        "{path}: the size of its disk, {size} bytes, is not a multiple of the block size of \
         {block_size} bytes; leave out `block-size`, or enlarge the disk with `qemu-img resize`"
    )]
    NotBlockMultiple {
        /// Path of the image.
        path: String,
        /// Size of the disk in bytes.
        size: u64,
        /// Requested block size.
        block_size: u32,
    },
    /// A system call failed.
    #[error("{path}: {what} failed: {source}")]
    System {
        /// Path of the image.
        path: String,
        /// The failed operation.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
}
