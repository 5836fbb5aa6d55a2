//! A request as commands of the SSD's, and what their statuses mean.

use shadowbell_backend::{DiskError, Op, Request};
use shadowbell_driver::{Buffer, Command, Namespace, RequestError};
use shadowbell_memory::{Segments, SharedBytes};
use shadowbell_spec::Status;
use shadowbell_spec::nvm::DsmRange;
use zerocopy::IntoBytes;

/// The most blocks that a command without data names here, below the 65536 that it could: an SSD
/// that has a lot to do with them gets it in parts.
const MAX_BLOCKS: u64 = 1 << 15;
/// How much is compared at once.
const STEP: usize = 4096;

/// How a request is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Read,
    Write {
        fua: bool,
    },
    Compare,
    /// Reads into a buffer that nobody looks at.
    ReadAway,
    Verify,
    Flush,
    WriteZeroes {
        deallocate: bool,
        fua: bool,
    },
    /// Zeroes out of a buffer.
    Fill {
        fua: bool,
    },
    Deallocate,
}

/// Whether blocks that are discarded read as zeroes, and there is a way to discard them.
pub(crate) fn discards(namespace: &Namespace) -> bool {
    deallocates(namespace) || zeroes_deallocate(namespace)
}

/// Whether Dataset Management makes blocks zero.
fn deallocates(namespace: &Namespace) -> bool {
    namespace.optional_commands().dataset_management() && namespace.identity().dlfeat.drb() == 1
}

/// Whether Write Zeroes may give blocks back.
fn zeroes_deallocate(namespace: &Namespace) -> bool {
    namespace.optional_commands().write_zeroes() && namespace.identity().dlfeat.wzds()
}

/// A request on its way.
pub(crate) struct Task {
    pub(crate) tag: u32,
    way: Way,
    offset: u64,
    len: u64,
    /// Bytes for which there is a command.
    begun: u64,
    /// Commands that the SSD has.
    pub(crate) under_way: u32,
    pub(crate) outcome: Result<(), DiskError>,
    pub(crate) data: Segments,
}

/// What of a task is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Nothing more is to be submitted.
    Nothing,
    /// A command without data.
    Bare,
    /// A command that moves the task's own data, from this byte of them on, this many left.
    Data { at: usize, left: usize },
    /// A command whose data are the queue's affair, of so many bytes.
    Own { left: u64 },
}

impl Task {
    /// A task for a request that was checked, or its result if there is nothing to do.
    pub(crate) fn new(
        tag: u32,
        request: &Request,
        namespace: &Namespace,
        volatile: bool,
    ) -> Result<Self, Result<(), DiskError>> {
        let has = namespace.optional_commands();
        let way = match request.op {
            Op::Flush if volatile => Way::Flush,
            // What has completed is where it belongs.
            Op::Flush => return Err(Ok(())),
            _ if request.len == 0 => return Err(Ok(())),
            Op::Read => Way::Read,
            Op::Write { fua } => Way::Write { fua },
            Op::Compare => Way::Compare,
            Op::Verify if has.verify() => Way::Verify,
            Op::Verify => Way::ReadAway,
            Op::WriteZeroes { deallocate, fua } if has.write_zeroes() => {
                Way::WriteZeroes { deallocate, fua }
            }
            Op::WriteZeroes { fua, .. } => Way::Fill { fua },
            Op::Discard if deallocates(namespace) => Way::Deallocate,
            Op::Discard if zeroes_deallocate(namespace) => {
                Way::WriteZeroes { deallocate: true, fua: false }
            }
            Op::Discard => return Err(Ok(())),
        };
        Ok(Self {
            tag,
            way,
            offset: request.offset,
            // A flush has no range; here it is one byte long, for which there is one command.
            len: if way == Way::Flush { 1 } else { request.len },
            begun: 0,
            under_way: 0,
            outcome: Ok(()),
            data: Segments::new(),
        })
    }

    /// What is to be submitted next.
    pub(crate) fn next(&self) -> Next {
        let left = self.len.saturating_sub(self.begun);
        if left == 0 || self.outcome.is_err() {
            return Next::Nothing;
        }
        match self.way {
            Way::Flush | Way::Verify | Way::WriteZeroes { .. } => Next::Bare,
            Way::Read | Way::Write { .. } => {
                Next::Data { at: self.begun as usize, left: left as usize }
            }
            Way::Compare | Way::ReadAway | Way::Fill { .. } | Way::Deallocate => Next::Own { left },
        }
    }

    /// Whether there is nothing more to do or to wait for.
    pub(crate) fn is_over(&self) -> bool {
        self.under_way == 0 && self.next() == Next::Nothing
    }

    /// The command for the next `len` bytes at most, and how many bytes of the task it is for.
    pub(crate) fn command(
        &self,
        namespace: &Namespace,
        len: u64,
    ) -> Result<(Command, u64), DiskError> {
        let size = u64::from(namespace.block_size());
        let len = len.min(self.len.saturating_sub(self.begun));
        let lba = (self.offset + self.begun) / size;
        let blocks = |most: u64| u32::try_from((len / size).min(most)).unwrap_or(u32::MAX);
        let fua = |command: Command, fua: bool| if fua { command.with_fua() } else { command };
        let data = blocks(u64::from(u32::MAX));
        let bare = blocks(MAX_BLOCKS);
        let made: Result<(Command, u32), RequestError> = match self.way {
            Way::Read | Way::Compare | Way::ReadAway => {
                namespace.read(lba, data).map(|command| (command, data))
            }
            Way::Write { fua: force } | Way::Fill { fua: force } => {
                namespace.write(lba, data).map(|command| (fua(command, force), data))
            }
            Way::Verify => namespace.verify(lba, bare).map(|command| (command, bare)),
            Way::WriteZeroes { deallocate, fua: force } => namespace
                .write_zeroes(lba, bare, deallocate)
                .map(|command| (fua(command, force), bare)),
            Way::Deallocate => namespace.deallocate(1).map(|command| (command, data)),
            Way::Flush => return Ok((namespace.flush(), 1)),
        };
        // The request was checked against the namespace that it is for.
        let (command, blocks) = made.map_err(|_| DiskError::OutOfRange)?;
        Ok((command, u64::from(blocks) * size))
    }

    /// Whether the commands' buffers hold something that the next `len` bytes have to be written
    /// from, or need to be of a certain content: puts it there.
    pub(crate) fn fill(&self, buffer: &mut Buffer, len: u64, size: u32) -> Result<(), DiskError> {
        match self.way {
            Way::Write { .. } => {
                let (at, len) = (self.begun as usize, len as usize);
                self.data.copy_to(at, buffer.bytes(), 0, len).ok_or(DiskError::BadBuffer)
            }
            Way::Fill { .. } => {
                buffer.fill(0);
                Ok(())
            }
            Way::Deallocate => {
                let size = u64::from(size);
                let blocks = u32::try_from(len / size).map_err(|_| DiskError::OutOfRange)?;
                let slba = (self.offset + self.begun) / size;
                let range = DsmRange { attributes: 0, blocks, slba };
                let fits = buffer.copy_from(0, range.as_bytes());
                if fits { Ok(()) } else { Err(DiskError::BadBuffer) }
            }
            _ => Ok(()),
        }
    }

    /// The most bytes that one command is for whose data are the queue's affair, out of a buffer of
    /// `buffer` bytes.
    pub(crate) fn most(&self, buffer: u64, size: u32) -> u64 {
        match self.way {
            // One range.
            Way::Deallocate => MAX_BLOCKS * u64::from(size),
            _ => buffer,
        }
    }

    /// Bytes of a buffer that the next command needs for `len` bytes of the task.
    pub(crate) fn needs(&self, len: u64) -> u64 {
        match self.way {
            Way::Deallocate => size_of::<DsmRange>() as u64,
            _ => len,
        }
    }

    /// A command for the next `len` bytes was submitted; where they begin in the task.
    pub(crate) fn began(&mut self, len: u64) -> u64 {
        let at = self.begun;
        self.begun += len;
        self.under_way += 1;
        at
    }

    /// Takes what a command has read, `len` bytes at `at`, out of the queue's buffer.
    pub(crate) fn take(&self, at: u64, len: u64, buffer: &SharedBytes) -> Result<(), DiskError> {
        let (at, len) = (at as usize, len as usize);
        match self.way {
            Way::Read => self.data.copy_from(at, buffer, 0, len).ok_or(DiskError::BadBuffer),
            Way::Compare => equal(&self.data, at, buffer, len),
            _ => Ok(()),
        }
    }

    /// A command has ended.
    pub(crate) fn ended(&mut self, outcome: Result<(), DiskError>) {
        self.under_way = self.under_way.saturating_sub(1);
        self.outcome = self.outcome.and(outcome);
    }
}

/// What the SSD said, for whoever asked.
pub(crate) fn outcome(status: Status) -> Result<(), DiskError> {
    // Whether there is more in a log page, and how long to wait, are of the SSD's own log and clock.
    let kept = if status.dnr() { status.code().with_dnr() } else { status.code() };
    if status.is_success() { Ok(()) } else { Err(DiskError::Device(kept.bits())) }
}

/// Both are memory that others may change, so they are compared as copies.
fn equal(data: &Segments, at: usize, buffer: &SharedBytes, len: usize) -> Result<(), DiskError> {
    let (mut ours, mut theirs) = ([0; STEP], [0; STEP]);
    let mut done = 0;
    while done < len {
        let n = (len - done).min(STEP);
        let (ours, theirs) = (&mut ours[..n], &mut theirs[..n]);
        data.read_into(at + done, theirs).ok_or(DiskError::BadBuffer)?;
        buffer.read_into(done, ours).ok_or(DiskError::BadBuffer)?;
        if ours != theirs {
            return Err(DiskError::CompareFailed);
        }
        done += n;
    }
    Ok(())
}
