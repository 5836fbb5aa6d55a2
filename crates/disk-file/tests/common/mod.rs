//! Shared helpers of the integration tests: memory of a host with scattered buffers, and execution
//! of batches of requests.
#![allow(dead_code, reason = "each test binary uses its part")]

use shadowbell_disk::{Disk, DiskError, Op, Queue, Request, Submitted};
use shadowbell_memory::{DmaSpace, Mapping, Segments, SharedBytes, View};
use shadowbell_testing::programs::skipped;
use shadowbell_testing::wait;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// Memory of a host, mapped at IOVA 0, followed by room for SGLs.
pub(crate) struct Host {
    pub(crate) bytes: SharedBytes,
    view: View,
    sgl: u64,
}

const SGL_ROOM: u64 = 64 * 1024;

impl Host {
    pub(crate) fn new(len: u64) -> Self {
        let bytes = Mapping::anonymous(len + SGL_ROOM).unwrap().bytes();
        let mut space = DmaSpace::default();
        space.map(0, len + SGL_ROOM, &bytes).unwrap();
        let view = View::new(Arc::clone(space.table()));
        Self { bytes: bytes.slice(0, len as usize).unwrap(), view, sgl: len }
    }

    /// Creates a buffer of these pieces (address and length). `write` is true if the device writes
    /// to it.
    pub(crate) fn buffer(&self, pieces: &[(usize, usize)], write: bool) -> Segments {
        if pieces.is_empty() {
            return Segments::new();
        }
        let mut list = Vec::new();
        for (address, len) in pieces {
            list.extend_from_slice(&(*address as u64).to_le_bytes());
            list.extend_from_slice(&(*len as u32).to_le_bytes());
            list.extend_from_slice(&[0; 4]); // descriptor of a data block
        }
        assert!(list.len() as u64 <= SGL_ROOM);
        self.view.write(self.sgl, &list).unwrap();
        let mut last_segment = [0; 16];
        last_segment[..8].copy_from_slice(&self.sgl.to_le_bytes());
        last_segment[8..12].copy_from_slice(&(list.len() as u32).to_le_bytes());
        last_segment[15] = 0x30;
        let len = pieces.iter().map(|(_, len)| len).sum();
        let mut segments = Segments::new();
        self.view.resolve_sgl(&last_segment, len, write, &mut segments).unwrap();
        segments
    }

    pub(crate) fn content(&self) -> Vec<u8> {
        let mut content = vec![0; self.bytes.len()];
        self.bytes.read_into(0, &mut content).unwrap();
        content
    }
}

/// Submits all requests in one batch, and waits for their results. Returns them in the order of the
/// requests.
pub(crate) fn run(
    queue: &mut dyn Queue,
    requests: Vec<(Request, Segments)>,
) -> Vec<Result<(), DiskError>> {
    let mut results: Vec<Option<Result<(), DiskError>>> = vec![None; requests.len()];
    for (tag, (request, mut data)) in requests.into_iter().enumerate() {
        let len = data.len();
        match queue.submit(tag as u32, &request, &mut data) {
            Submitted::Done(result) => {
                assert_eq!(data.len(), len, "the buffer of what is done stays with its owner");
                results[tag] = Some(result);
            }
            Submitted::Pending => assert_eq!(data.len(), 0),
        }
    }
    queue.commit();
    while queue.pending() > 0 {
        wait(queue);
        queue.reap(&mut |tag, result, _| {
            let before = results[tag as usize].replace(result);
            assert_eq!(before, None, "{tag} ended twice");
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

/// Waits until the wake descriptor is readable.
pub(crate) fn wait(queue: &dyn Queue) {
    let fd = queue.wake_fd().expect("what leaves requests pending has a wake descriptor");
    wait::readable("a signal of the wake descriptor", fd);
}

/// Creates a directory for images, on the file system of the build. This file system supports
/// direct I/O more often than that of `/tmp`.
pub(crate) fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

pub(crate) fn image(directory: &Path, size: u64) -> PathBuf {
    let path = directory.join("disk.img");
    std::fs::File::create(&path).unwrap().set_len(size).unwrap();
    path
}

pub(crate) fn open(path: &Path, options: &str) -> Arc<dyn Disk> {
    shadowbell_disk_file::open(&format!("{}{options}", path.display())).unwrap()
}

/// Runs a system command that needs root. Returns `None`, with a message, if the process is not
/// root or the command is missing.
pub(crate) fn as_root(command: &str, arguments: &[&str]) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        skipped(format_args!("`{command}` needs root"));
        return None;
    }
    match Command::new(command).args(arguments).output() {
        Ok(output) if output.status.success() => {
            Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        }
        other => {
            skipped(format_args!("`{command} {}` failed: {other:?}", arguments.join(" ")));
            None
        }
    }
}

/// Command that undoes a change of the system. It runs on drop, also if the test fails.
pub(crate) struct Undo(pub(crate) &'static str, pub(crate) Vec<String>);

impl Drop for Undo {
    fn drop(&mut self) {
        let _ = Command::new(self.0).args(&self.1).status();
    }
}
