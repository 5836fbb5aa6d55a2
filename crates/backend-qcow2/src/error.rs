//! Why an image can not be opened, in sentences for the person who named it.

use std::io;

/// Why an image can not be opened. Each message says what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The file can not be opened, whatever is in it.
    #[error(transparent)]
    File(#[from] shadowbell_backend::OpenError),
    /// The image is damaged, or is none.
    #[error("{path}: {why}; `qemu-img check -r all {path}` may repair it")]
    Damaged {
        /// The image.
        path: String,
        /// What is wrong with it.
        why: String,
    },
    /// The image is encrypted.
    #[error(
        "{path}: it is encrypted ({how}), which is not supported; decrypt it with `qemu-img \
         convert`, or encrypt inside of the guest"
    )]
    Encrypted {
        /// The image.
        path: String,
        /// How.
        how: &'static str,
    },
    /// The image uses something that is not supported.
    #[error(
        "{path}: it {what}, which is not supported; make an image without by `qemu-img convert -O \
         qcow2 {path} {path}.new`"
    )]
    Unsupported {
        /// The image.
        path: String,
        /// What it uses.
        what: String,
    },
    /// The image names a file of which it is the difference, and that was not allowed.
    #[error(
        "{path}: it is the difference to the file `{backing}`, which a guest could read through it; \
         allow that with `allow-backing=on`, or make one image of both by `qemu-img convert -O \
         qcow2 {path} {path}.new`"
    )]
    Backing {
        /// The image.
        path: String,
        /// The name of the other file, as the image has it.
        backing: String,
    },
    /// The image does not say what its backing file is.
    #[error(
        "{path}: it does not say of which format its backing file `{backing}` is, and guessing would \
         let whoever wrote that file choose what is opened; say it with `qemu-img rebase -u -b \
         {backing} -F FORMAT {path}`"
    )]
    BackingFormat {
        /// The image.
        path: String,
        /// The name of the other file.
        backing: String,
    },
    /// The size of the disk is no multiple of the block size.
    #[error(
        "{path}: the {size} bytes of its disk are no multiple of the block size of {block_size} \
         bytes; leave out `block-size`, or enlarge the disk with `qemu-img resize`"
    )]
    NotBlockMultiple {
        /// The image.
        path: String,
        /// Bytes of the disk.
        size: u64,
        /// The block size that was asked for.
        block_size: u32,
    },
    /// The image can not be read.
    #[error("{path}: {what} failed: {source}")]
    System {
        /// The image.
        path: String,
        /// What was tried.
        what: &'static str,
        /// The reason.
        source: io::Error,
    },
}
