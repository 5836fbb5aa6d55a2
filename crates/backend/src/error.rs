//! Why a disk could not be opened, in sentences for the person who named it.

use crate::format::ImageFormat;
use std::io;

/// The largest disk in memory, in bytes: what fits an address space in one piece. There are
/// 128 TiB on x86-64, with the program and its libraries in between.
pub const MAX_MEMORY: u64 = 64 << 40;

/// Why a disk could not be opened. Each message says what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The specification makes no sense.
    #[error("`{spec}` names no disk: {why}")]
    Spec {
        /// What was written.
        spec: String,
        /// What is wrong with it, and what may be written instead.
        why: String,
    },
    /// The memory for a disk in memory is not to be had.
    #[error(
        "a disk of {} does not fit this process's memory; choose {}",
        crate::size::format_size(*.bytes),
        if *.bytes > MAX_MEMORY {
            "one of at most 64TiB"
        } else {
            "a smaller one, or allow the process more addresses (`ulimit -v`)"
        }
    )]
    Memory {
        /// The size asked for, in bytes.
        bytes: u64,
        /// The reason.
        source: shadowbell_memory::MapError,
    },
    /// There is no such file.
    #[error(
        "{path}: there is no such file; correct the path, or make an image of zeroes with \
         `truncate -s 10G {path}`"
    )]
    Missing {
        /// The file.
        path: String,
    },
    /// Who opens images for this process does not open this one.
    #[error("{path}: {why}")]
    NotGiven {
        /// The file.
        path: String,
        /// Why not.
        why: String,
    },
    /// The file may not be read by this user.
    #[error("{path}: this user may not read it ({source}); change its owner or its permissions")]
    Unreadable {
        /// The file.
        path: String,
        /// The system's reason.
        source: io::Error,
    },
    /// The path leads to something that is no disk.
    #[error("{path}: it is {what}; give the path of a raw image or of a block device")]
    NoFile {
        /// The file.
        path: String,
        /// What it is: a directory, a socket...
        what: &'static str,
    },
    /// The file is an image of another format, of which a guest must not see the raw bytes.
    #[error(
        "{path}: it is a {format} image, {}; with `format=raw` its bytes are served as they are",
        match .format {
            ImageFormat::Qcow2 => "which only the program `shadowbell` and the crate \
                                   `shadowbell-backend-qcow2` open".to_owned(),
            _ => format!(
                "which can not be served; make one of another format with \
                 `qemu-img convert -O qcow2 {path} {path}.qcow2`"
            ),
        }
    )]
    Format {
        /// The file.
        path: String,
        /// What it is.
        format: ImageFormat,
    },
    /// The file has no bytes.
    #[error("{path}: it is empty; give it a size with `truncate -s 10G {path}`")]
    Empty {
        /// The file.
        path: String,
    },
    /// The size of the file is not one of a disk.
    #[error(
        "{path}: its {size} bytes are no multiple of the block size of {block_size} bytes; round \
         it up with `truncate -s %{block_size} {path}`{}",
        if *.block_size == 4096 && size.is_multiple_of(512) {
            ", or use it with `block-size=512`"
        } else {
            ""
        }
    )]
    NotBlockMultiple {
        /// The file.
        path: String,
        /// Its size in bytes.
        size: u64,
        /// The logical block size in bytes.
        block_size: u32,
    },
    /// The same, of a file that is an image of a format and was asked for as raw.
    #[error(
        "{path}: it is a {format} image of {size} bytes, which are no multiple of the block size of \
         {block_size} bytes, so they can not be served as they are; make a raw image of it with \
         `qemu-img convert -O raw {path} {path}.raw`"
    )]
    OddFormat {
        /// The file.
        path: String,
        /// Its size in bytes.
        size: u64,
        /// The logical block size in bytes.
        block_size: u32,
        /// What it is an image of.
        format: ImageFormat,
    },
    /// Another process uses the file.
    #[error(
        "{path}: {what}; stop what uses it{}",
        if *.writable { ", or open it `read-only=on`" } else { "" }
    )]
    Busy {
        /// The file.
        path: String,
        /// Who has it, as far as the system says.
        what: &'static str,
        /// It was to be written.
        writable: bool,
    },
    /// Direct I/O was demanded, and is not to be had.
    #[error("{path}: direct I/O is not possible: {why}; leave out `direct=on`")]
    NotDirect {
        /// The file.
        path: String,
        /// What stands against it.
        why: String,
    },
    /// io_uring was demanded, and the process may not use it.
    #[error(
        "{path}: io_uring is demanded, and the system refuses it ({source}); it needs Linux 5.6 or \
         later, `sysctl kernel.io_uring_disabled=0`, and no container profile that forbids it; or leave \
         out `aio=io_uring`"
    )]
    Ring {
        /// The file.
        path: String,
        /// The system's reason.
        source: io::Error,
    },
    /// What another process has handed over is not this disk.
    #[error("{disk} can not be taken over: {why}")]
    NotThatDisk {
        /// The disk.
        disk: String,
        /// What does not fit.
        why: String,
    },
    /// The system refused something that has no case of its own.
    #[error("{path}: {what} failed: {source}")]
    System {
        /// The file.
        path: String,
        /// What was tried.
        what: &'static str,
        /// The system's reason.
        source: io::Error,
    },
}
