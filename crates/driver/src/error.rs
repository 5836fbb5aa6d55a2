//! What can go wrong, in sentences.

use crate::copy_limits::CopyLimits;
use crate::dma::{Buffer, DmaError};
use crate::transport::TransportError;
use shadowbell_spec::Status;
use shadowbell_spec::opcode::{AdminOpcode, NvmOpcode};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Why the driver could not attach to a controller.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The device can not be reached.
    #[error("attach: {0}")]
    Transport(#[from] TransportError),
    /// An option has a value that no controller could honour.
    #[error("attach: {option} is {value}, which is not possible: {why}")]
    Option {
        /// The field of [`AttachOptions`](crate::AttachOptions).
        option: &'static str,
        /// Its value.
        value: u64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Every register reads as all ones.
    #[error("attach: {device} answers with all ones; it was removed, or is no NVMe controller")]
    Absent {
        /// [`Transport::name`](crate::Transport::name).
        device: String,
    },
    /// The controller is one that this driver can not use.
    #[error("attach: {device} {what}, which this driver can not use")]
    Unsupported {
        /// [`Transport::name`](crate::Transport::name).
        device: String,
        /// What it has or lacks.
        what: String,
    },
    /// The controller did not get ready or not ready in time (CAP.TO, Base 2.1, 3.1.4.1).
    #[error(
        "attach: {device} did not finish {step} within {waited:?} (CSTS {csts:#010x}); \
         reset the device and try again"
    )]
    NotReady {
        /// [`Transport::name`](crate::Transport::name).
        device: String,
        /// The step.
        step: &'static str,
        /// How long the driver waited.
        waited: Duration,
        /// The Controller Status register at the end.
        csts: u32,
    },
    /// Controller Fatal Status came up (CSTS.CFS).
    #[error(
        "attach: {device} reports a fatal status (CSTS.CFS) during {step}; \
         reset the device and try again"
    )]
    Fatal {
        /// [`Transport::name`](crate::Transport::name).
        device: String,
        /// The step.
        step: &'static str,
    },
    /// A command that is needed to attach failed.
    #[error("attach: {step}: {source}")]
    Command {
        /// The step.
        step: &'static str,
        /// Why it failed.
        source: CommandError,
    },
    /// There is no memory to share with the device.
    #[error("attach: {0}")]
    Dma(#[from] DmaError),
    /// The system has no event descriptors left.
    #[error("attach: no event descriptor for an interrupt: {0}; raise the limit of open files")]
    Event(io::Error),
    /// The system has no thread left to watch the controller with.
    #[error("attach: no thread to watch the controller with: {0}; or turn recovery off")]
    Thread(io::Error),
}

/// Why a command of the control plane failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The controller says so.
    #[error("{device} ended {command} with: {status}")]
    Status {
        /// [`Transport::name`](crate::Transport::name).
        device: String,
        /// The command's name in the specification.
        command: String,
        /// The status of its completion.
        status: Status,
    },
    /// There was no completion in time. What the command was to do may still happen.
    #[error("{device} did not complete {command} within {waited:?}; reset the controller")]
    Timeout {
        /// [`Transport::name`](crate::Transport::name).
        device: String,
        /// The command's name in the specification.
        command: String,
        /// How long the driver waited.
        waited: Duration,
    },
    /// The command could not be submitted.
    #[error("{command} was not submitted: {source}")]
    Queue {
        /// The command's name in the specification.
        command: String,
        /// Why not.
        source: QueueError,
    },
    /// There is no memory for its data.
    #[error("{command} was not submitted: {source}")]
    Dma {
        /// The command's name in the specification.
        command: String,
        /// Why not.
        source: DmaError,
    },
    /// The device's answer contradicts the specification or itself.
    #[error("{device} answered {command} with nonsense: {what}")]
    Nonsense {
        /// [`Transport::name`](crate::Transport::name).
        device: String,
        /// The command's name in the specification.
        command: String,
        /// What is wrong with it.
        what: String,
    },
}

impl CommandError {
    pub(crate) fn not_submitted(opcode: u8, source: QueueError) -> Self {
        Self::Queue { command: admin_name(opcode), source }
    }

    pub(crate) fn nonsense(device: &str, command: &str, what: impl Into<String>) -> Self {
        Self::Nonsense { device: device.to_owned(), command: command.to_owned(), what: what.into() }
    }

    /// The status, if it is the controller that refused.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Status { status, .. } => Some(*status),
            _ => None,
        }
    }
}

/// Why a queue does not take a command, or does not work any more.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum QueueError {
    /// As many commands as the queue can hold are outstanding.
    #[error("queue {qid} is full with {outstanding} commands; poll for completions first")]
    Full {
        /// The queue's identifier.
        qid: u16,
        /// How many commands are outstanding.
        outstanding: u32,
    },
    /// A command moves more than the controller or the queue takes.
    #[error("{bytes} bytes are more than the {max} that one command moves; split the request")]
    TooLong {
        /// What the command moves.
        bytes: u64,
        /// What a command may move at most.
        max: u64,
    },
    /// A command moves data, and there is no buffer or a short one.
    #[error("the command moves {needed} bytes at offset {offset} of a buffer of {len} bytes")]
    BufferTooShort {
        /// What the command moves.
        needed: u32,
        /// Where in the buffer it begins.
        offset: u32,
        /// The length of the buffer; 0 if there is none.
        len: usize,
    },
    /// Data must begin at a multiple of 4 bytes (Base 2.1, 4.1.1).
    #[error("data at offset {offset} of a buffer is not aligned; use a multiple of 4")]
    Misaligned {
        /// The offset.
        offset: u32,
    },
    /// The controller was detached, by this program.
    #[error("the controller was detached; attach again to use queue {qid}")]
    Detached {
        /// The queue's identifier.
        qid: u16,
    },
    /// The queue does not work any more.
    #[error("queue {qid} failed earlier: {why}; detach and attach again")]
    Failed {
        /// The queue's identifier.
        qid: u16,
        /// What happened.
        why: Arc<str>,
    },
}

/// A command that was not submitted, with the buffer that it would have used.
#[derive(Debug, Error)]
#[error("{reason}")]
pub struct Refused {
    /// Why.
    pub reason: QueueError,
    /// The buffer, untouched.
    pub buffer: Option<Buffer>,
}

/// Why a request can not be made into a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RequestError {
    /// A request of no blocks, or of more than the 65536 that a command can name.
    #[error("{blocks} blocks are not 1 to 65536, what one command can name")]
    Blocks {
        /// How many.
        blocks: u64,
    },
    /// A request for more bytes than one command moves ([`Namespace::max_transfer_bytes`]).
    ///
    /// [`Namespace::max_transfer_bytes`]: crate::Namespace::max_transfer_bytes
    #[error("{bytes} bytes are more than the {max} that one command moves; split the request")]
    TooLong {
        /// How many.
        bytes: u64,
        /// How many at most.
        max: u64,
    },
    /// A length that is no multiple of the block size.
    #[error("{bytes} bytes are no whole number of blocks of {block_size} bytes")]
    Unaligned {
        /// How many.
        bytes: u64,
        /// The namespace's block size.
        block_size: u32,
    },
    /// A request that reaches past the end of the namespace.
    #[error("blocks {lba} to {end} reach past the namespace's {blocks} blocks")]
    PastEnd {
        /// The first block.
        lba: u64,
        /// The block after the last.
        end: u64,
        /// How many the namespace has.
        blocks: u64,
    },
    /// A namespace whose blocks this driver can not move.
    #[error("namespace {nsid} {what}, which this driver can not handle; format it without")]
    Unusable {
        /// The namespace.
        nsid: u32,
        /// What it has.
        what: &'static str,
    },
    /// Metadata of a namespace that has none, or none that this driver knows.
    #[error("namespace {nsid} has no metadata that a command could move")]
    NoMetadata {
        /// The namespace.
        nsid: u32,
    },
    /// A Compare of blocks with metadata without these.
    #[error("blocks of namespace {nsid} have metadata, which a Compare moves as well")]
    CompareMetadata {
        /// The namespace.
        nsid: u32,
    },
    /// More ranges than one Dataset Management command takes, or none.
    #[error("{ranges} ranges are not 1 to 256, what one Dataset Management command takes")]
    Ranges {
        /// How many.
        ranges: usize,
    },
    /// The controller has no Copy command, or none with source range entries of format 0h.
    #[error("the controller has no Copy command")]
    NoCopy,
    /// A copy of nothing, or of more than one command copies
    /// ([`Namespace::copy_limits`](crate::Namespace::copy_limits)).
    #[error(
        "a copy of {blocks} blocks in {ranges} ranges of up to {longest}, where one command copies 1 \
         to {} in up to {} of up to {}", limits.blocks, limits.ranges, limits.range_blocks
    )]
    CopyTooLong {
        /// How many source ranges.
        ranges: usize,
        /// Blocks of the longest of them.
        longest: u32,
        /// Blocks of all of them.
        blocks: u64,
        /// What there may be.
        limits: CopyLimits,
    },
}

/// An I/O command that failed, with its buffer if the device is done with it.
#[derive(Debug, Error)]
#[error("{kind}")]
pub struct IoError {
    /// Why.
    pub kind: IoErrorKind,
    /// The buffer. There is none if the command had none, or if the device may still use it: then
    /// the queue keeps it until the device is certainly done.
    pub buffer: Option<Buffer>,
}

/// Why an I/O command failed.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum IoErrorKind {
    /// It could not be made.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// It could not be submitted, or the queue failed while it was under way.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The controller says so.
    #[error("{} ended with: {status}", io_name(*opcode))]
    Status {
        /// The command's opcode.
        opcode: u8,
        /// The status of its completion.
        status: Status,
        /// Command specific result, dword 0: of a Copy, the lowest source range that was not
        /// copied.
        dw0: u32,
    },
    /// There was no completion in time. What the command was to do may still happen.
    #[error("{} was not completed within {waited:?}; reset the controller", io_name(*opcode))]
    TimedOut {
        /// The command's opcode.
        opcode: u8,
        /// How long was waited.
        waited: Duration,
    },
    /// The queue was full for too long. The command was not submitted.
    #[error(
        "{} was not submitted: the queue was full for {waited:?}; reset the controller",
        io_name(*opcode)
    )]
    QueueFull {
        /// The command's opcode.
        opcode: u8,
        /// How long was waited.
        waited: Duration,
    },
    /// There was no memory for the command's own data.
    #[error(transparent)]
    Dma(Arc<DmaError>),
    /// The command completed without its buffer: a defect of this driver.
    #[error("the command completed without its buffer, which is a defect of the driver")]
    NoBuffer,
}

/// What the specification calls the admin command.
pub(crate) fn admin_name(opcode: u8) -> String {
    AdminOpcode::try_from(opcode)
        .map_or_else(|unknown| unknown.to_string(), |opcode| opcode.name().to_owned())
}

/// What the specification calls the I/O command.
fn io_name(opcode: u8) -> String {
    NvmOpcode::try_from(opcode)
        .map_or_else(|unknown| unknown.to_string(), |opcode| opcode.name().to_owned())
}

/// Why a controller was not left as it should be.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DetachError {
    /// It is disabled and touches no memory any more, but did not say that everything it held is
    /// on the medium.
    #[error("{device} was detached, but not cleanly: {why}")]
    Unclean {
        /// [`Transport::name`](crate::Transport::name).
        device: String,
        /// What went wrong.
        why: String,
    },
    /// It could not be disabled. The memory that it was given is kept until the process ends,
    /// because it may still write there.
    #[error(
        "{device} could not be disabled ({why}); the memory that was shared with it is kept; \
         reset the device before it is used again"
    )]
    Lost {
        /// [`Transport::name`](crate::Transport::name).
        device: String,
        /// What went wrong.
        why: String,
    },
}
