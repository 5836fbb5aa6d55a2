//! Shared helpers of the tests: images, memory of a host, and execution of batches of requests.
#![allow(dead_code, reason = "each test binary uses its part")]

use shadowbell_disk::{Disk, DiskError, Op, Queue, Request, Submitted};
use shadowbell_disk_file::{FileOptions, FileSpec};
use shadowbell_disk_qcow2::{OpenError, Qcow2Disk};
use shadowbell_memory::{Mapping, Segments, SharedBytes};
use shadowbell_testing::programs::skipped;
use shadowbell_testing::wait;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

/// Creates a directory for images in the build directory, whose file system supports direct I/O
/// more often than that of `/tmp`.
pub(crate) fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Runs `qemu-img`. Returns `None`, with a message, if it is not installed.
///
/// If the image is locked, `qemu-img` is run again. The reason may be a child process that another
/// test has just forked: it holds the descriptors of all images, and their locks, until it executes
/// its program.
pub(crate) fn qemu_img(arguments: &[&str]) -> Option<std::process::Output> {
    let begin = Instant::now();
    loop {
        match Command::new("qemu-img").args(arguments).output() {
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr);
                let is_locked = said.contains("Failed to lock") || said.contains("Failed to get");
                if !is_locked || begin.elapsed() > wait::LIMIT {
                    return Some(output);
                }
                wait::pause();
            }
            Err(error) => {
                skipped(format_args!(
                    "`qemu-img` is not here ({error}); it is in Debian's qemu-utils"
                ));
                return None;
            }
        }
    }
}

/// Runs `qemu-img`, which must succeed. Returns `false` if it is not installed.
pub(crate) fn qemu_img_does(arguments: &[&str]) -> bool {
    let Some(output) = qemu_img(arguments) else { return false };
    assert!(output.status.success(), "qemu-img {arguments:?}: {output:?}");
    true
}

/// Checks that the image at `path` is consistent. Leaked clusters are allowed.
pub(crate) fn check(path: &Path) {
    let Some(output) = qemu_img(&["check", "-f", "qcow2", path.to_str().unwrap()]) else { return };
    assert!(matches!(output.status.code(), Some(0 | 3)), "{path:?}: {output:?}");
}

/// Checks the image like `check`. Leaked clusters are not allowed.
pub(crate) fn check_whole(path: &Path) {
    let Some(output) = qemu_img(&["check", "-f", "qcow2", path.to_str().unwrap()]) else { return };
    assert_eq!(output.status.code(), Some(0), "{path:?}: {output:?}");
}

/// Opens the image at `path`. `options` has the syntax of a disk specification.
pub(crate) fn open(path: &Path, options: &str) -> Qcow2Disk {
    try_open(path, options).unwrap()
}

pub(crate) fn try_open(path: &Path, options: &str) -> Result<Qcow2Disk, OpenError> {
    Qcow2Disk::open(path, &file_options(options))
}

pub(crate) fn file_options(options: &str) -> FileOptions {
    FileSpec::parse(&format!("x{options}")).unwrap().unwrap().options
}

pub(crate) fn memory(len: usize) -> SharedBytes {
    Mapping::anonymous(len as u64).unwrap().bytes()
}

pub(crate) fn segments(bytes: &SharedBytes, at: usize, len: usize) -> Segments {
    Segments::from_bytes(&bytes.slice(at, len).unwrap())
}

/// Submits all requests in one batch, and waits for their results. Returns them in the order of the
/// requests.
pub(crate) fn run(
    queue: &mut dyn Queue,
    requests: Vec<(Request, Segments)>,
) -> Vec<Result<(), DiskError>> {
    let mut results: Vec<Option<Result<(), DiskError>>> = vec![None; requests.len()];
    for (tag, (request, mut data)) in requests.into_iter().enumerate() {
        match queue.submit(tag as u32, &request, &mut data) {
            Submitted::Done(result) => results[tag] = Some(result),
            Submitted::Pending => assert_eq!(data.len(), 0),
        }
    }
    queue.commit();
    while queue.pending() > 0 {
        wait(queue);
        queue.reap(&mut |tag, result, _| {
            assert_eq!(results[tag as usize].replace(result), None, "{tag} ended twice");
        });
    }
    results.into_iter().map(|r| r.expect("every request ends")).collect()
}

pub(crate) fn run_one(
    queue: &mut dyn Queue,
    op: Op,
    offset: u64,
    len: u64,
    data: Segments,
) -> Result<(), DiskError> {
    run(queue, vec![(Request { op, offset, len }, data)])[0]
}

pub(crate) fn write(queue: &mut dyn Queue, offset: u64, data: &[u8]) -> Result<(), DiskError> {
    let bytes = memory(data.len());
    bytes.write_from(0, data).unwrap();
    let segments = Segments::from_bytes(&bytes);
    run_one(queue, Op::Write { fua: false }, offset, data.len() as u64, segments)
}

pub(crate) fn read(queue: &mut dyn Queue, offset: u64, len: usize) -> Result<Vec<u8>, DiskError> {
    let bytes = memory(len);
    let segments = Segments::from_bytes(&bytes);
    run_one(queue, Op::Read, offset, len as u64, segments)?;
    let mut data = vec![0; len];
    bytes.read_into(0, &mut data).unwrap();
    Ok(data)
}

pub(crate) fn flush(queue: &mut dyn Queue) -> Result<(), DiskError> {
    run_one(queue, Op::Flush, 0, 0, Segments::new())
}

/// Reads the content of the whole disk.
pub(crate) fn content(disk: &dyn Disk) -> Vec<u8> {
    let mut queue = disk.queue().unwrap();
    read(&mut *queue, 0, disk.info().bytes() as usize).unwrap()
}

/// Waits until the wake descriptor is readable.
pub(crate) fn wait(queue: &dyn Queue) {
    let fd = queue.wake_fd().expect("what leaves requests pending has a wake descriptor");
    wait::readable("a signal of the wake descriptor", fd);
}

/// Generator of deterministic random numbers.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.next().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }
}
