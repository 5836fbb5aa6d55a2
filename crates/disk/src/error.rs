//! Errors of opening a disk.

use crate::format::ImageFormat;
use std::io;

/// Maximum size of a memory disk in bytes. The disk needs contiguous addresses. An x86-64 process
/// has 128 TiB of address space, but the program and its libraries are in between.
pub const MAX_MEMORY: u64 = 64 << 40;

/// Error of opening a disk. Each message says what is wrong, where, and what to do.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The specification cannot be parsed.
    #[error("`{spec}` names no disk: {why}")]
    Spec {
        /// The specification as given.
        spec: String,
        /// The mistake, and a valid alternative.
        why: String,
    },
    /// Not enough address space or memory for a memory disk.
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
        /// Requested size in bytes.
        bytes: u64,
        /// The mapping error.
        source: shadowbell_memory::MapError,
    },
    /// The file does not exist.
    #[error("{path}: there is no such file; {}", missing_hint(path))]
    Missing {
        /// Path of the file.
        path: String,
    },
    /// Opening was refused, for example by the process that opens images on request.
    #[error("{path}: {why}")]
    OpenRefused {
        /// Path of the file.
        path: String,
        /// Reason of the refusal.
        why: String,
    },
    /// File without read permission for the user of this process.
    #[error("{path}: this user may not read it ({source}); change its owner or its permissions")]
    Unreadable {
        /// Path of the file.
        path: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The path is neither a regular file nor a block device.
    #[error("{path}: it is {what}; give the path of a raw image or of a block device")]
    NoFile {
        /// Path of the file.
        path: String,
        /// Kind of the file: a directory, a socket and so on.
        what: &'static str,
    },
    /// The file is an image of another format, whose raw bytes must not be exposed to a guest.
    #[error(
        "{path}: it is a {format} image, {}; with `format=raw` its bytes are served as they are",
        match .format {
            ImageFormat::Qcow2 => "which only the program `shadowbell` and the crate \
                                   `shadowbell-disk-qcow2` open".to_owned(),
            _ => format!(
                "which cannot be served; make one of another format with \
                 `qemu-img convert -O qcow2 {path} {path}.qcow2`"
            ),
        }
    )]
    Format {
        /// Path of the file.
        path: String,
        /// The detected format.
        format: ImageFormat,
    },
    /// The file is empty.
    #[error("{path}: it is empty; give it a size with `truncate -s 10G {path}`")]
    Empty {
        /// Path of the file.
        path: String,
    },
    /// The file size is not a multiple of the block size.
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
        /// Path of the file.
        path: String,
        /// File size in bytes.
        size: u64,
        /// The logical block size in bytes.
        block_size: u32,
    },
    /// The file is an image of another format, requested as raw, and its size is not a multiple of
    /// the block size.
    #[error(
        "{path}: it is a {format} image of {size} bytes, which are no multiple of the block size \
         of {block_size} bytes, so they cannot be served as they are; make a raw image of it \
         with `qemu-img convert -O raw {path} {path}.raw`"
    )]
    OddFormat {
        /// Path of the file.
        path: String,
        /// File size in bytes.
        size: u64,
        /// The logical block size in bytes.
        block_size: u32,
        /// The detected format.
        format: ImageFormat,
    },
    /// Another process uses the file.
    #[error(
        "{path}: {what}; stop what uses it (`fuser -v {}` lists it){}",
        shell_word(path),
        if *.writable { ", or open it `read-only=on`" } else { "" }
    )]
    Busy {
        /// Path of the file.
        path: String,
        /// Description of the other user of the file, as far as it is known.
        what: &'static str,
        /// True if the disk was to be opened writable.
        writable: bool,
    },
    /// `direct=on` was given, but direct I/O is not possible.
    #[error("{path}: direct I/O is not possible: {why}; leave out `direct=on`")]
    NotDirect {
        /// Path of the file.
        path: String,
        /// Cause of the failure.
        why: String,
    },
    /// `aio=io_uring` was given, but the process is not allowed to use io_uring.
    #[error(
        "{path}: io_uring is requested, but the system refuses it ({source}); it needs Linux 5.6 \
         or later, `sysctl kernel.io_uring_disabled=0`, and no container profile that forbids \
         it; or leave out `aio=io_uring`"
    )]
    Ring {
        /// Path of the file.
        path: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// The serialized state of another process belongs to another disk than the given
    /// specification.
    #[error("{disk} cannot be taken over: {why}")]
    NotThatDisk {
        /// Name of the disk.
        disk: String,
        /// The mismatch.
        why: String,
    },
    /// A system call failed for a reason without a variant of its own.
    #[error("{path}: {what} failed: {source}")]
    System {
        /// Path of the file.
        path: String,
        /// The operation that failed.
        what: &'static str,
        /// Error of the operating system.
        source: io::Error,
    },
}
impl OpenError {
    /// True if the cause may be temporary: the file is missing, or is in use.
    #[must_use]
    pub fn can_pass(&self) -> bool {
        match self {
            Self::Missing { path } => !is_form_of_qemu(path),
            Self::Busy { .. } => true,
            _ => false,
        }
    }
}

/// True for a disk as QEMU's command line has it: `driver=raw,file.filename=PATH`,
/// `PATH,format=raw`.
fn is_form_of_qemu(path: &str) -> bool {
    const KEYS: [&str; 7] = ["driver", "file", "filename", "file.filename", "format", "if", "id"];
    path.split(',').filter_map(|part| part.split_once('=')).any(|(key, _)| KEYS.contains(&key))
}

/// Remedy for a path without a file. For QEMU's forms `driver=raw,file.filename=PATH` and
/// `PATH,format=raw`, it is the specification of the same disk in this program.
fn missing_hint(path: &str) -> String {
    if !is_form_of_qemu(path) {
        return missing_file_hint(path);
    }
    let mut pairs = path.split(',').map(|part| part.split_once('=').unwrap_or(("file", part)));
    let file = pairs.find(|(key, _)| key.contains("file")).map_or("disk.img", |(_, file)| file);
    format!(
        "a disk is a path with options after a question mark, and its format is detected: `{file}`"
    )
}

/// Remedy for a path without a file that is not in one of QEMU's forms.
fn missing_file_hint(path: &str) -> String {
    if path.starts_with("/dev/") {
        return "`lsblk` lists block devices".to_owned();
    }
    let word = shell_word(path);
    if path.ends_with(".qcow2") {
        return format!(
            "correct the path, or make an image with `qemu-img create -f qcow2 {word} 10G`"
        );
    }
    format!("correct the path, or make an image of zeroes with `truncate -s 10G {word}`")
}

/// Path as a word of a shell command.
fn shell_word(path: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "/._-+:@%".contains(c);
    match path.chars().all(is_plain) {
        true => path.to_owned(),
        false => format!("'{}'", path.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_file_comes_with_the_command_for_its_path() {
        let text = |path: &str| OpenError::Missing { path: path.to_owned() }.to_string();
        for (path, words) in [
            ("a.img", "`truncate -s 10G a.img`"),
            ("sp ace.img", "`truncate -s 10G 'sp ace.img'`"),
            ("x.qcow2", "`qemu-img create -f qcow2 x.qcow2 10G`"),
            ("/dev/nvme9n1", "`lsblk`"),
        ] {
            assert!(text(path).contains(words), "{}", text(path));
        }
        assert!(!text("/dev/nvme9n1").contains("truncate"));
    }
}
