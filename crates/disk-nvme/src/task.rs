//! Execution of a request by NVMe commands, and interpretation of their statuses.

use shadowbell_disk::{DiskError, Op, Request, compare};
use shadowbell_driver::{Buffer, Command, Namespace, RequestError};
use shadowbell_memory::{Segments, SharedBytes};
use shadowbell_spec::Status;
use shadowbell_spec::nvm::DsmRange;
use zerocopy::IntoBytes;

/// Maximum number of blocks per command without data. It is below the NVMe limit of 65536. So a
/// long request is split into several commands, and a slow SSD can complete each in time.
const MAX_BLOCKS: u64 = 1 << 15;

/// Kind of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Action {
    Read,
    Write {
        fua: bool,
    },
    Compare,
    /// Reads into a buffer of the queue and ignores the data: a Verify on an SSD without that
    /// command.
    ReadAndDrop,
    Verify,
    Flush,
    WriteZeroes {
        deallocate: bool,
        fua: bool,
    },
    /// Writes zeroes from a buffer.
    Fill {
        fua: bool,
    },
    Deallocate,
}

/// True if blocks can be discarded and then read as zeroes.
pub(crate) fn discards(namespace: &Namespace) -> bool {
    deallocates(namespace) || zeroes_deallocate(namespace)
}

/// True if blocks that Dataset Management has deallocated read as zeroes.
fn deallocates(namespace: &Namespace) -> bool {
    namespace.optional_commands().dataset_management() && namespace.identity().dlfeat.drb() == 1
}

/// True if Write Zeroes may deallocate blocks.
fn zeroes_deallocate(namespace: &Namespace) -> bool {
    namespace.optional_commands().write_zeroes() && namespace.identity().dlfeat.wzds()
}

/// A request in execution.
pub(crate) struct Task {
    action: Action,
    offset: u64,
    len: u64,
    /// Number of bytes for which a command was submitted.
    submitted: u64,
    /// Number of commands in flight.
    pub(crate) in_flight: u32,
    pub(crate) outcome: Result<(), DiskError>,
    pub(crate) data: Segments,
}

/// Next command of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// No further command.
    Nothing,
    /// A command without data.
    NoData,
    /// A command that transfers data of the task. `at` is the first byte that is not submitted yet,
    /// `left` the number of bytes from there on.
    Data { at: usize, left: usize },
    /// A command with a buffer of the queue. `left` is the number of bytes of the disk that no
    /// command covers yet.
    PrivateBuffer { left: u64 },
}

impl Task {
    /// Creates the task of a checked request, or returns its result if there is nothing to do.
    pub(crate) fn new(
        request: &Request,
        namespace: &Namespace,
        volatile: bool,
    ) -> Result<Self, Result<(), DiskError>> {
        let has = namespace.optional_commands();
        let action = match request.op {
            Op::Flush if volatile => Action::Flush,
            // Without a volatile cache, completed writes are durable.
            Op::Flush => return Err(Ok(())),
            _ if request.len == 0 => return Err(Ok(())),
            Op::Read => Action::Read,
            Op::Write { fua } => Action::Write { fua },
            Op::Compare => Action::Compare,
            Op::Verify if has.verify() => Action::Verify,
            Op::Verify => Action::ReadAndDrop,
            Op::WriteZeroes { deallocate, fua } if has.write_zeroes() => {
                Action::WriteZeroes { deallocate, fua }
            }
            Op::WriteZeroes { fua, .. } => Action::Fill { fua },
            Op::Discard if deallocates(namespace) => Action::Deallocate,
            Op::Discard if zeroes_deallocate(namespace) => {
                Action::WriteZeroes { deallocate: true, fua: false }
            }
            Op::Discard => return Err(Ok(())),
            _ => return Err(Err(DiskError::Unsupported)),
        };
        Ok(Self {
            action,
            offset: request.offset,
            // A flush has no range. With length 1, it is one command that covers this length.
            len: if action == Action::Flush { 1 } else { request.len },
            submitted: 0,
            in_flight: 0,
            outcome: Ok(()),
            data: Segments::new(),
        })
    }

    /// Selects the next command.
    pub(crate) fn next(&self) -> Next {
        let left = self.len.saturating_sub(self.submitted);
        if left == 0 || self.outcome.is_err() {
            return Next::Nothing;
        }
        match self.action {
            Action::Flush | Action::Verify | Action::WriteZeroes { .. } => Next::NoData,
            Action::Read | Action::Write { .. } => {
                Next::Data { at: self.submitted as usize, left: left as usize }
            }
            Action::Compare | Action::ReadAndDrop | Action::Fill { .. } | Action::Deallocate => {
                Next::PrivateBuffer { left }
            }
        }
    }

    /// True if no command is in flight or left to submit.
    pub(crate) fn is_finished(&self) -> bool {
        self.in_flight == 0 && self.next() == Next::Nothing
    }

    /// Builds the command for at most the next `len` bytes. Also returns the number of bytes that
    /// it covers.
    pub(crate) fn command(
        &self,
        namespace: &Namespace,
        len: u64,
    ) -> Result<(Command, u64), DiskError> {
        let size = u64::from(namespace.block_size());
        let len = len.min(self.len.saturating_sub(self.submitted));
        let lba = (self.offset + self.submitted) / size;
        let blocks = |max_len: u64| u32::try_from((len / size).min(max_len)).unwrap_or(u32::MAX);
        let fua = |command: Command, fua: bool| if fua { command.with_fua() } else { command };
        let data = blocks(u64::from(u32::MAX));
        let bare = blocks(MAX_BLOCKS);
        let made: Result<(Command, u32), RequestError> = match self.action {
            Action::Read | Action::Compare | Action::ReadAndDrop => {
                namespace.read(lba, data).map(|command| (command, data))
            }
            Action::Write { fua: force } | Action::Fill { fua: force } => {
                namespace.write(lba, data).map(|command| (fua(command, force), data))
            }
            Action::Verify => namespace.verify(lba, bare).map(|command| (command, bare)),
            Action::WriteZeroes { deallocate, fua: force } => namespace
                .write_zeroes(lba, bare, deallocate)
                .map(|command| (fua(command, force), bare)),
            Action::Deallocate => namespace.deallocate(1).map(|command| (command, data)),
            Action::Flush => return Ok((namespace.flush(), 1)),
        };
        // The request was checked against this namespace, so only a bug can cause an error here.
        let (command, blocks) = made.map_err(|_| DiskError::OutOfRange)?;
        Ok((command, u64::from(blocks) * size))
    }

    /// Fills the buffer of the command for the next `len` bytes. The content is data of the task,
    /// zeroes, or the range of a Dataset Management command. For commands that do not read the
    /// buffer, it stays unchanged.
    pub(crate) fn fill(&self, buffer: &mut Buffer, len: u64, size: u32) -> Result<(), DiskError> {
        match self.action {
            Action::Write { .. } => {
                let (at, len) = (self.submitted as usize, len as usize);
                self.data.copy_to(at, buffer.bytes(), 0, len).ok_or(DiskError::BadBuffer)
            }
            Action::Fill { .. } => {
                buffer.fill(0);
                Ok(())
            }
            Action::Deallocate => {
                let size = u64::from(size);
                let blocks = u32::try_from(len / size).map_err(|_| DiskError::OutOfRange)?;
                let slba = (self.offset + self.submitted) / size;
                let range = DsmRange { attributes: 0, blocks, slba };
                let fits = buffer.copy_from(0, range.as_bytes());
                if fits { Ok(()) } else { Err(DiskError::BadBuffer) }
            }
            _ => Ok(()),
        }
    }

    /// Maximum number of bytes of the disk that one command can cover with a queue buffer of
    /// `buffer` bytes.
    pub(crate) fn max_len(&self, buffer: u64, size: u32) -> u64 {
        match self.action {
            // The buffer contains only one range.
            Action::Deallocate => MAX_BLOCKS * u64::from(size),
            _ => buffer,
        }
    }

    /// Number of buffer bytes that a command for `len` bytes of the disk needs.
    pub(crate) fn needs(&self, len: u64) -> u64 {
        match self.action {
            Action::Deallocate => size_of::<DsmRange>() as u64,
            _ => len,
        }
    }

    /// Records that a command for the next `len` bytes was submitted. Returns its offset in the
    /// task.
    pub(crate) fn began(&mut self, len: u64) -> u64 {
        let at = self.submitted;
        self.submitted += len;
        self.in_flight += 1;
        at
    }

    /// Copies or compares data that a command has read into a buffer of the queue: `len` bytes,
    /// from byte `at` of the task on.
    pub(crate) fn take(&self, at: u64, len: u64, buffer: &SharedBytes) -> Result<(), DiskError> {
        let (at, len) = (at as usize, len as usize);
        match self.action {
            Action::Read => self.data.copy_from(at, buffer, 0, len).ok_or(DiskError::BadBuffer),
            Action::Compare => compare(&self.data, at, buffer, 0, len),
            _ => Ok(()),
        }
    }

    /// Records the end of a command.
    pub(crate) fn complete(&mut self, outcome: Result<(), DiskError>) {
        self.in_flight = self.in_flight.saturating_sub(1);
        self.outcome = self.outcome.and(outcome);
    }
}

/// Converts the SSD's status to the result of the request.
pub(crate) fn outcome(status: Status) -> Result<(), DiskError> {
    // The bits More (M) and Command Retry Delay (CRD) are dropped, because they refer to the Error
    // Information log and the delay times of the SSD and not of the emulated controller.
    let saved = if status.dnr() { status.code().with_dnr() } else { status.code() };
    if status.is_success() { Ok(()) } else { Err(DiskError::Device(saved.bits())) }
}
