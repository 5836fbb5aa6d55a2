//! Device migration: messages, states, and the callbacks of a device.
//!
//! The protocol is version 2 of the migration in `<linux/vfio.h>`, with messages instead of a
//! descriptor. DEVICE_FEATURE changes the state and controls the dirty page log. MIG_DATA_READ and
//! MIG_DATA_WRITE transfer the stream. The optional states P2P and PRE_COPY are not supported.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::Errno;
use crate::completer::Completer;

/// Maximum length of a migration stream in bytes. The stream is parsed only when it is complete,
/// and parsing may temporarily need thirty times as much memory.
pub const MAX_STREAM: usize = 1 << 20;

/// Maximum number of ranges in DMA_LOGGING_START. (`<linux/vfio.h>` requires at least 256.)
pub const MAX_LOGGED_RANGES: u32 = 4096;

/// Page size of the dirty page log, in bytes. A report of the log may use another page size.
pub const LOG_PAGE: u64 = 4096;

/// Feature indexes of DEVICE_FEATURE.
pub mod feature {
    /// Supported migration states.
    pub const MIGRATION: u32 = 1;
    /// Migration state.
    pub const MIG_DEVICE_STATE: u32 = 2;
    /// Starts logging the pages that the device writes.
    pub const DMA_LOGGING_START: u32 = 6;
    /// Stops logging the pages that the device writes.
    pub const DMA_LOGGING_STOP: u32 = 7;
    /// Reads and clears the dirty page log.
    pub const DMA_LOGGING_REPORT: u32 = 8;
}

/// Bits of [`DeviceFeature::flags`].
pub mod feature_flags {
    /// Mask of the feature index, see [`feature`](super::feature).
    pub const INDEX: u32 = 0xffff;
    /// Reads the feature.
    pub const GET: u32 = 1 << 16;
    /// Writes the feature.
    pub const SET: u32 = 1 << 17;
    /// Only checks that the feature and the requested GET and SET are supported.
    pub const PROBE: u32 = 1 << 18;
}

/// `VFIO_MIGRATION_STOP_COPY`: the device supports STOP, STOP_COPY and RESUMING.
pub const MIGRATION_STOP_COPY: u64 = 1 << 0;

/// DEVICE_FEATURE, command and reply; the data of the feature follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceFeature {
    /// Maximum payload size of the reply in bytes; in the reply, the size of the complete payload.
    pub argsz: u32,
    /// See [`feature_flags`].
    pub flags: u32,
}

/// Data of [`feature::MIG_DEVICE_STATE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceState {
    /// Number of a [`MigrationState`].
    pub state: u32,
    /// Unused, because messages transfer the stream.
    pub data_fd: u32,
}

/// Data of [`feature::DMA_LOGGING_START`]; the ranges follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LoggingControl {
    /// Requested page size; in the reply, the page size of the log.
    pub page_size: u64,
    /// Number of ranges that follow; 0 for all memory.
    pub num_ranges: u32,
    /// Reserved; the receiver ignores the value.
    pub reserved: u32,
}

/// Range of bus addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LoggingRange {
    /// First address.
    pub iova: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Data of [`feature::DMA_LOGGING_REPORT`]. In the reply, a bitmap of 64-bit words follows, with
/// one bit for each `page_size` bytes. The lowest bit of the first word is the page at `iova`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LoggingReport {
    /// First address.
    pub iova: u64,
    /// Length in bytes.
    pub length: u64,
    /// Number of bytes per bit: a power of two.
    pub page_size: u64,
}

/// MIG_DATA_READ and MIG_DATA_WRITE, command and reply; the data follow, if any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MigData {
    /// Maximum payload size of the reply in bytes; in the reply, the size of the complete payload.
    pub argsz: u32,
    /// Length of the data in bytes.
    pub size: u32,
}

/// `enum vfio_device_mig_state`, without the optional states.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MigrationState {
    /// Failed. The device is unusable until a reset.
    Error = 0,
    /// Stopped: neither the device state nor the client's memory changes.
    Stop = 1,
    /// Running.
    #[default]
    Running = 2,
    /// Stopped, and the client can read the state.
    StopCopy = 3,
    /// Stopped, and the client can write a state.
    Resuming = 4,
}

impl MigrationState {
    /// State with this number, if it is supported.
    pub fn from_wire(number: u32) -> Option<Self> {
        [Self::Error, Self::Stop, Self::Running, Self::StopCopy, Self::Resuming]
            .into_iter()
            .find(|state| *state as u32 == number)
    }

    /// First step on the shortest path from this state to `to`. `None` if no path exists, or if the
    /// states are equal.
    pub fn next(self, to: Self) -> Option<Self> {
        match (self, to) {
            (Self::Error, _) | (_, Self::Error) => None,
            (from, to) if from == to => None,
            (Self::Stop, to) => Some(to),
            _ => Some(Self::Stop),
        }
    }
}

/// Migration callbacks of a device. The server stores the migration state, and calls the methods in
/// a valid order. As for [`Device`](crate::Device), no method may block, and none is called while a
/// [`Completer`] is outstanding.
///
/// The stream does not contain the state of the client's connection. The client at the destination
/// maps its memory and connects its interrupts, before it changes the device's state to RUNNING.
pub trait Migration {
    /// RUNNING to STOP: starts no new work, and completes `done` when no work is in flight. If it
    /// fails, the device stays in RUNNING.
    fn stop(&mut self, done: Completer);

    /// STOP to RUNNING: resumes work.
    ///
    /// # Errors
    /// The device cannot run, and stays in STOP.
    fn run(&mut self) -> Result<(), Errno>;

    /// STOP to STOP_COPY: serializes the state for a device of the same type.
    ///
    /// # Errors
    /// The state cannot be serialized.
    fn save_state(&mut self) -> Result<Vec<u8>, Errno>;

    /// STOP to RESUMING: discards the state, so that another one can be loaded. Mapped memory and
    /// eventfds stay, because they belong to the client.
    fn discard_state(&mut self, done: Completer);

    /// RESUMING to STOP: parses `stream`, which comes from an untrusted client, and completes
    /// `done`. A long stream takes time, so another thread parses it. The server then calls
    /// [`use_state`](Self::use_state).
    ///
    /// If the stream is not a valid state for the device, `done` completes with an error. The
    /// device is then unusable until a reset.
    fn load_state(&mut self, stream: Vec<u8>, done: Completer);

    /// Uses the state that was parsed last.
    ///
    /// # Errors
    /// The state does not fit the device. The device is then unusable until a reset.
    fn use_state(&mut self) -> Result<(), Errno>;

    /// Starts to log the pages that the device writes: at least those in `ranges`, or all if
    /// `ranges` is empty. The server then calls [`sync_log`](Self::sync_log). All writes after the
    /// completion of that call are logged.
    ///
    /// # Errors
    /// Logging is active ([`Errno::BUSY`]), or not possible.
    fn start_logging(&mut self, ranges: &[LoggingRange]) -> Result<(), Errno>;

    /// Stops logging the pages that the device writes.
    ///
    /// # Errors
    /// Logging is not active.
    fn stop_logging(&mut self) -> Result<(), Errno>;

    /// Completes `done` when the log contains all earlier writes. The server then calls
    /// [`take_log`](Self::take_log).
    fn sync_log(&mut self, done: Completer);

    /// Sets a bit in `bitmap` for each page (`page_size` bytes) of the report's range that was
    /// written, and clears the log of the range. The server has checked the arguments: the bitmap
    /// has the required size, the range is not empty and does not overflow, and the page size is a
    /// power of two.
    ///
    /// # Errors
    /// Logging is not active.
    fn take_log(&mut self, report: &LoggingReport, bitmap: &mut [u64]) -> Result<(), Errno>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_specification() {
        assert_eq!(size_of::<DeviceFeature>(), 8);
        assert_eq!(size_of::<DeviceState>(), 8);
        assert_eq!(size_of::<LoggingControl>(), 16);
        assert_eq!(size_of::<LoggingRange>(), 16);
        assert_eq!(size_of::<LoggingReport>(), 24);
        assert_eq!(size_of::<MigData>(), 8);
    }

    #[test]
    fn every_state_except_error_is_reachable_through_stop() {
        use MigrationState::{Error, Resuming, Running, Stop, StopCopy};
        let all = [Error, Stop, Running, StopCopy, Resuming];
        for (from, to) in all.into_iter().flat_map(|from| all.map(|to| (from, to))) {
            let mut way = vec![from];
            while let Some(next) = way.last().and_then(|at| at.next(to)) {
                way.push(next);
            }
            let expected = match (from, to) {
                (Error, _) | (_, Error) => vec![from],
                _ if from == to => vec![from],
                (Stop, _) | (_, Stop) => vec![from, to],
                _ => vec![from, Stop, to],
            };
            assert_eq!(way, expected, "{from:?} to {to:?}");
        }
        assert!((0..5).all(|n| MigrationState::from_wire(n).is_some_and(|s| s as u32 == n)));
        assert!((5..10).all(|n| MigrationState::from_wire(n).is_none()));
    }
}
