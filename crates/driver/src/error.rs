//! Error types.

use crate::copy_limits::CopyLimits;
use crate::dma::{Buffer, DmaError};
use crate::transport::TransportError;
use shadowbell_spec::Status;
use shadowbell_spec::opcode::{AdminOpcode, NvmOpcode};
use std::io;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Failure to attach to a controller.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AttachError {
    /// The device is unreachable.
    #[error("attach: {0}")]
    Transport(#[from] TransportError),
    /// An option has an invalid value.
    #[error("attach: {option} is {value}, which is not possible: {why}")]
    Option {
        /// The field of [`AttachOptions`](crate::AttachOptions).
        option: &'static str,
        /// Value of the option.
        value: u64,
        /// Valid values, or the reason for the refusal.
        why: &'static str,
    },
    /// Every register reads as all ones.
    #[error("attach: {device} answers with all ones; it was removed, or is no NVMe controller")]
    Absent {
        /// Name of the device ([`Transport::name`](crate::Transport::name)).
        device: String,
    },
    /// The controller lacks a feature that this driver needs.
    #[error("attach: {device} {what}, which this driver does not support")]
    Unsupported {
        /// Name of the device ([`Transport::name`](crate::Transport::name)).
        device: String,
        /// Unsupported or missing feature.
        what: String,
    },
    /// CSTS.RDY did not change in time (CAP.TO, Base 2.1, 3.1.4.1).
    #[error(
        "attach: {device} did not finish {step} within {waited:?} (CSTS {csts:#010x}); \
         reset the device and try again"
    )]
    NotReady {
        /// Name of the device ([`Transport::name`](crate::Transport::name)).
        device: String,
        /// Step of the attach.
        step: &'static str,
        /// Time that the driver waited.
        waited: Duration,
        /// Controller Status register (CSTS) at the timeout.
        csts: u32,
    },
    /// The controller reported Controller Fatal Status (CSTS.CFS).
    #[error(
        "attach: {device} reports a fatal status (CSTS.CFS) during {step}; \
         reset the device and try again"
    )]
    Fatal {
        /// Name of the device ([`Transport::name`](crate::Transport::name)).
        device: String,
        /// Step of the attach.
        step: &'static str,
    },
    /// An admin command that is needed to attach failed.
    #[error("attach: {step}: {source}")]
    Command {
        /// Step of the attach.
        step: &'static str,
        /// Failure of the command.
        source: CommandError,
    },
    /// Memory could not be shared with the device.
    #[error("attach: {0}")]
    Dma(#[from] DmaError),
    /// No eventfd is available for an interrupt.
    #[error("attach: no event descriptor for an interrupt: {0}; raise the limit of open files")]
    Event(io::Error),
    /// No thread is available for the watchdog.
    #[error("attach: no thread for the watchdog: {0}; or disable recovery")]
    Thread(io::Error),
}

/// Failure of an admin command.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum CommandError {
    /// The command completed with an error status.
    #[error("{device} ended {command} with: {status}")]
    Status {
        /// Name of the device ([`Transport::name`](crate::Transport::name)).
        device: String,
        /// Name of the command in the specification.
        command: String,
        /// Status of the completion.
        status: Status,
    },
    /// The command did not complete in time. The controller may still execute it.
    #[error("{device} did not complete {command} within {waited:?}; reset the controller")]
    Timeout {
        /// Name of the device ([`Transport::name`](crate::Transport::name)).
        device: String,
        /// Name of the command in the specification.
        command: String,
        /// Time that the driver waited.
        waited: Duration,
    },
    /// The command could not be submitted.
    #[error("{command} was not submitted: {source}")]
    Queue {
        /// Name of the command in the specification.
        command: String,
        /// Reason of the refusal.
        source: QueueError,
    },
    /// No memory could be shared with the device for the data of the command.
    #[error("{command} was not submitted: {source}")]
    Dma {
        /// Name of the command in the specification.
        command: String,
        /// Reason of the failure.
        source: DmaError,
    },
    /// The returned data violate the specification or are inconsistent.
    #[error("{device} returned invalid data for {command}: {what}")]
    InvalidData {
        /// Name of the device ([`Transport::name`](crate::Transport::name)).
        device: String,
        /// Name of the command in the specification.
        command: String,
        /// Description of the violation.
        what: String,
    },
}

impl CommandError {
    pub(crate) fn not_submitted(opcode: u8, source: QueueError) -> Self {
        Self::Queue { command: admin_name(opcode), source }
    }

    pub(crate) fn invalid_data(device: &str, command: &str, what: impl Into<String>) -> Self {
        Self::InvalidData {
            device: device.to_owned(),
            command: command.to_owned(),
            what: what.into(),
        }
    }

    /// The completion status, if the controller completed the command with an error.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        match self {
            Self::Status { status, .. } => Some(*status),
            _ => None,
        }
    }
}

/// Failure of a queue, or its refusal of a command.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum QueueError {
    /// The maximum number of commands is outstanding.
    #[error("queue {qid} is full with {outstanding} commands; poll for completions first")]
    Full {
        /// Identifier of the queue.
        qid: u16,
        /// Number of outstanding commands.
        outstanding: u32,
    },
    /// The command transfers more bytes than the controller or the queue supports.
    #[error("{bytes} bytes are more than the {max} that one command moves; split the request")]
    TooLong {
        /// Number of bytes that the command transfers.
        bytes: u64,
        /// Maximum number of bytes of one command.
        max: u64,
    },
    /// The command transfers data, but its buffer is missing or too short.
    #[error("the command moves {needed} bytes at offset {offset} of a buffer of {len} bytes")]
    BufferTooShort {
        /// Number of bytes that the command transfers.
        needed: u32,
        /// Offset of the data in the buffer.
        offset: u32,
        /// Length of the buffer in bytes; 0 without a buffer.
        len: usize,
    },
    /// The data do not begin at a multiple of 4 bytes (Base 2.1, 4.1.1).
    #[error("data at offset {offset} of a buffer is not aligned; use a multiple of 4")]
    Misaligned {
        /// Offset of the data in the buffer.
        offset: u32,
    },
    /// This program detached the controller.
    #[error("the controller was detached; attach again to use queue {qid}")]
    Detached {
        /// Identifier of the queue.
        qid: u16,
    },
    /// The queue failed and cannot be used any more.
    #[error("queue {qid} failed: {why}; detach, and attach again when the device is available")]
    Failed {
        /// Identifier of the queue.
        qid: u16,
        /// Cause of the failure.
        why: Arc<str>,
    },
}

/// A command that was not submitted, with its unused buffer.
#[derive(Debug, Error)]
#[error("{reason}")]
pub struct Refused {
    /// Reason of the refusal.
    pub reason: QueueError,
    /// The buffer of the command, unchanged.
    pub buffer: Option<Buffer>,
}

/// Invalid request: no command can be created for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The request has no blocks, or more than the 65536 of one command.
    #[error("{blocks} blocks are not 1 to 65536, what one command can name")]
    Blocks {
        /// Number of requested blocks.
        blocks: u64,
    },
    /// The request exceeds the transfer limit of one command ([`Namespace::max_transfer_bytes`]).
    ///
    /// [`Namespace::max_transfer_bytes`]: crate::Namespace::max_transfer_bytes
    #[error("{bytes} bytes are more than the {max} that one command moves; split the request")]
    TooLong {
        /// Number of requested bytes.
        bytes: u64,
        /// Maximum number of bytes of one command.
        max: u64,
    },
    /// The length is not a multiple of the block size.
    #[error("{bytes} bytes are no whole number of blocks of {block_size} bytes")]
    Unaligned {
        /// Number of requested bytes.
        bytes: u64,
        /// Block size of the namespace.
        block_size: u32,
    },
    /// The request extends beyond the end of the namespace.
    #[error("blocks {lba} to {end} reach past the namespace's {blocks} blocks")]
    PastEnd {
        /// First block of the request.
        lba: u64,
        /// First block after the request.
        end: u64,
        /// Number of blocks of the namespace.
        blocks: u64,
    },
    /// The format of the namespace's blocks is not supported by this driver.
    #[error(
        "namespace {nsid} {what}, which this driver does not support; format it with another LBA format"
    )]
    Unusable {
        /// Namespace identifier.
        nsid: u32,
        /// Unsupported property, in words that follow "namespace N" in the message.
        what: &'static str,
    },
    /// The namespace has no metadata, or a metadata format that this driver does not support.
    #[error("namespace {nsid} has no metadata that a command could move")]
    NoMetadata {
        /// Namespace identifier.
        nsid: u32,
    },
    /// Compare without metadata on a namespace with metadata.
    #[error("blocks of namespace {nsid} have metadata, which a Compare moves as well")]
    CompareMetadata {
        /// Namespace identifier.
        nsid: u32,
    },
    /// The number of ranges is not 1 to 256, the limits of Dataset Management.
    #[error("{ranges} ranges are not 1 to 256, what one Dataset Management command takes")]
    Ranges {
        /// Number of requested ranges.
        ranges: usize,
    },
    /// The controller does not support Copy with source range entries of format 0h.
    #[error("the controller has no Copy command")]
    NoCopy,
    /// The copy is empty, or exceeds the limits of one command
    /// ([`Namespace::copy_limits`](crate::Namespace::copy_limits)).
    #[error(
        "a copy of {blocks} blocks in {ranges} ranges of up to {longest}, where one command copies 1 \
         to {} in up to {} of up to {}", limits.blocks, limits.ranges, limits.range_blocks
    )]
    CopyTooLong {
        /// Number of source ranges.
        ranges: usize,
        /// Number of blocks of the longest source range.
        longest: u32,
        /// Number of blocks of all source ranges.
        blocks: u64,
        /// Limits of one Copy command.
        limits: CopyLimits,
    },
}

/// A failed I/O command, with its buffer if the device no longer uses it.
#[derive(Debug, Error)]
#[error("{kind}")]
pub struct IoError {
    /// Cause of the failure.
    pub kind: IoErrorKind,
    /// The buffer of the command. `None` if the command had no buffer, or if the device may still
    /// use the buffer. A buffer in use stays with the queue until the device no longer uses it.
    pub buffer: Option<Buffer>,
}

/// Cause of the failure of an I/O command.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum IoErrorKind {
    /// The request was invalid.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The command could not be submitted, or the queue failed while it was in flight.
    #[error(transparent)]
    Queue(#[from] QueueError),
    /// The command completed with an error status.
    #[error("{} ended with: {status}", io_name(*opcode))]
    Status {
        /// Opcode of the command.
        opcode: u8,
        /// Status of the completion.
        status: Status,
        /// Command specific result, dword 0. For Copy: the lowest source range that was not copied.
        dw0: u32,
    },
    /// The command did not complete in time. The controller may still execute it.
    #[error("{} was not completed within {waited:?}; reset the controller", io_name(*opcode))]
    TimedOut {
        /// Opcode of the command.
        opcode: u8,
        /// Time that the driver waited.
        waited: Duration,
    },
    /// The queue was full for the whole timeout, so the command was not submitted.
    #[error(
        "{} was not submitted: the queue was full for {waited:?}; reset the controller",
        io_name(*opcode)
    )]
    QueueFull {
        /// Opcode of the command.
        opcode: u8,
        /// Time that the driver waited.
        waited: Duration,
    },
    /// No memory could be shared with the device for the ranges of the command.
    #[error(transparent)]
    Dma(Arc<DmaError>),
    /// The command completed without its buffer: a bug of this driver.
    #[error("the command completed without its buffer, which is a defect of the driver")]
    NoBuffer,
}

/// Name of an admin command in the specification.
pub(crate) fn admin_name(opcode: u8) -> String {
    AdminOpcode::try_from(opcode)
        .map_or_else(|unknown| unknown.to_string(), |opcode| opcode.name().to_owned())
}

/// Name of an I/O command in the specification.
fn io_name(opcode: u8) -> String {
    NvmOpcode::try_from(opcode)
        .map_or_else(|unknown| unknown.to_string(), |opcode| opcode.name().to_owned())
}

/// Failure to shut a controller down cleanly.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum DetachError {
    /// The controller is disabled and no longer accesses memory, but did not confirm that its
    /// volatile data are on the medium.
    #[error("{device} was detached, but not cleanly: {why}")]
    Unclean {
        /// Name of the device ([`Transport::name`](crate::Transport::name)).
        device: String,
        /// Failed step.
        why: String,
    },
    /// The controller could not be disabled. Memory that was shared with it is leaked until the
    /// process ends, because the controller may still write to this memory.
    #[error(
        "{device} could not be disabled ({why}); the memory that was shared with it is kept; \
         reset the device before it is used again"
    )]
    Lost {
        /// Name of the device ([`Transport::name`](crate::Transport::name)).
        device: String,
        /// Failed step.
        why: String,
    },
}
