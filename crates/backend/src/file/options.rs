//! How to open a file.

/// How to open a file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileOptions {
    /// Bytes in a logical block, 512 or 4096; `None` for 512, or a block device's own.
    pub block_size: Option<u32>,
    /// Refuse writes, though the file may allow them.
    pub read_only: bool,
    /// Whether to bypass the page cache.
    pub direct: Direct,
    /// How the system is called.
    pub aio: Aio,
    /// What is in the file; `None` to look at its first bytes.
    pub format: Option<Format>,
    /// Whether an image may be the difference to another file, which it names itself.
    pub allow_backing: bool,
}

/// What is in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// The bytes of the disk.
    Raw,
    /// An image of QEMU's, which the crate `shadowbell-backend-qcow2` opens.
    Qcow2,
}

/// How the system is called, so that many requests are under way at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Aio {
    /// Through io_uring, or by threads if the system refuses it.
    #[default]
    Auto,
    /// Through io_uring, or do not open at all.
    IoUring,
    /// By threads: up to 64 for each queue.
    Threads,
}

/// Whether to bypass the page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Direct {
    /// If the file system allows it for requests of one logical block.
    #[default]
    Auto,
    /// Bypass it, or do not open at all.
    On,
    /// Use it.
    Off,
}
