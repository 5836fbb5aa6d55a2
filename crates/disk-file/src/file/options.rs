//! Options for opening a file-backed disk.

/// Options for opening a file-backed disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileOptions {
    /// Logical block size in bytes, 512 or 4096. `None` means 512, or the block size of a block
    /// device.
    pub block_size: Option<u32>,
    /// True to refuse writes even if the file allows them.
    pub read_only: bool,
    /// Use of direct I/O, which bypasses the page cache.
    pub direct: Direct,
    /// I/O engine.
    pub aio: Aio,
    /// Image format; `None` to detect it by the first bytes.
    pub format: Option<Format>,
    /// True if the image may have backing files and an external data file. The image itself
    /// contains their names, so an untrusted image could otherwise name any file.
    pub allow_backing: bool,
}

/// Image format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// Raw: byte n of the disk is byte n of the file.
    Raw,
    /// QEMU qcow2, opened by the crate `shadowbell-disk-qcow2`.
    Qcow2,
}

/// I/O engine: mechanism by which many calls on the file are in flight at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Aio {
    /// io_uring, or threads if the system refuses io_uring.
    #[default]
    Auto,
    /// io_uring; opening fails without it.
    IoUring,
    /// Threads: up to 64 per queue.
    Threads,
}

/// Page cache mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// Direct I/O if the file system supports it for requests of one logical block.
    #[default]
    Auto,
    /// Direct I/O; opening fails without it.
    On,
    /// No direct I/O: reads and writes go through the page cache.
    Off,
}
