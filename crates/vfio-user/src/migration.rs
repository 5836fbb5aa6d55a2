//! Migration: what its messages carry, the states that a device goes through, and what a device
//! does on the way.
//!
//! The protocol's migration is version 2 of `<linux/vfio.h>`'s, with messages in place of a
//! descriptor: DEVICE_FEATURE changes the state and starts, stops and reads the log of pages that
//! the device has written, MIG_DATA_READ and MIG_DATA_WRITE carry the stream. Of the optional
//! states there are none (P2P, PRE_COPY).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::Errno;
use crate::done::Done;

/// The most bytes of a stream: so many are taken in before it is looked at. What is made of them
/// may take thirty times as many for a moment.
pub const MAX_STREAM: usize = 1 << 20;

/// The most ranges that a client may have logged. (`<linux/vfio.h>` has 256 as the least.)
pub const MAX_LOGGED_RANGES: u32 = 4096;

/// The page of the log, in bytes. A client may ask for reports in other units.
pub const LOG_PAGE: u64 = 4096;

/// Indexes of features.
pub mod feature {
    /// Which states there are.
    pub const MIGRATION: u32 = 1;
    /// The state.
    pub const MIG_DEVICE_STATE: u32 = 2;
    /// Pages that the device writes are logged from here on.
    pub const DMA_LOGGING_START: u32 = 6;
    /// They are not any more.
    pub const DMA_LOGGING_STOP: u32 = 7;
    /// Which pages it has written since that was last asked.
    pub const DMA_LOGGING_REPORT: u32 = 8;
}

/// Bits of [`DeviceFeature::flags`].
pub mod feature_flags {
    /// The bits that hold the index, see [`feature`](super::feature).
    pub const INDEX: u32 = 0xffff;
    /// Read it.
    pub const GET: u32 = 1 << 16;
    /// Write it.
    pub const SET: u32 = 1 << 17;
    /// Only say whether the other bits that are set would work.
    pub const PROBE: u32 = 1 << 18;
}

/// `VFIO_MIGRATION_STOP_COPY`: STOP, STOP_COPY and RESUMING are there.
pub const MIGRATION_STOP_COPY: u64 = 1 << 0;

/// DEVICE_FEATURE, command and reply; what belongs to the feature follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceFeature {
    /// Largest payload of the reply; in the reply, the size of all of it.
    pub argsz: u32,
    /// See [`feature_flags`].
    pub flags: u32,
}

/// The data of [`feature::MIG_DEVICE_STATE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceState {
    /// A [`MigrationState`].
    pub state: u32,
    /// Of no use here: messages carry the stream.
    pub data_fd: u32,
}

/// The data of [`feature::DMA_LOGGING_START`]; the ranges follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LoggingControl {
    /// The page that is wanted; in the reply, that of the log.
    pub page_size: u64,
    /// How many ranges follow; 0 for everything.
    pub num_ranges: u32,
    /// Not looked at.
    pub reserved: u32,
}

/// A range of bus addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LoggingRange {
    /// First address.
    pub iova: u64,
    /// Length in bytes.
    pub length: u64,
}

/// The data of [`feature::DMA_LOGGING_REPORT`]; in the reply the bitmap follows, one bit for each
/// `page_size` bytes from `iova` on, the first one the lowest of the first 64.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LoggingReport {
    /// First address.
    pub iova: u64,
    /// Length in bytes.
    pub length: u64,
    /// What a bit stands for: a power of two.
    pub page_size: u64,
}

/// MIG_DATA_READ and MIG_DATA_WRITE, command and reply; data follows where there is any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MigData {
    /// Largest payload of the reply; in the reply, the size of all of it.
    pub argsz: u32,
    /// Length of the data in bytes.
    pub size: u32,
}

/// `enum vfio_device_mig_state`, without the optional ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum MigrationState {
    /// Of no use until it is reset.
    Error = 0,
    /// It changes nothing, neither of its own nor of the client's memory.
    Stop = 1,
    /// At work.
    #[default]
    Running = 2,
    /// As STOP, and its state can be read.
    StopCopy = 3,
    /// As STOP, and it takes the state of another one.
    Resuming = 4,
}

impl MigrationState {
    /// The state of this number, if there is one here.
    pub fn from_wire(number: u32) -> Option<Self> {
        [Self::Error, Self::Stop, Self::Running, Self::StopCopy, Self::Resuming]
            .into_iter()
            .find(|state| *state as u32 == number)
    }

    /// The first step on the shortest way from here to `to`. `None`: there is no way, or none is
    /// needed.
    pub fn next(self, to: Self) -> Option<Self> {
        match (self, to) {
            (Self::Error, _) | (_, Self::Error) => None,
            (from, to) if from == to => None,
            (Self::Stop, to) => Some(to),
            _ => Some(Self::Stop),
        }
    }
}

/// What a device does when it is migrated. The server sees to the order of all this, and answers
/// for the state meanwhile. As for [`Device`](crate::Device): nothing blocks, and while a [`Done`]
/// is outstanding nothing else is called.
///
/// What belongs to the client's connection is not in the stream: the client of the destination
/// shares its memory and connects its interrupts before it has the device run.
pub trait Migration {
    /// RUNNING to STOP: what is in flight ends, and nothing new is begun. If that fails, the device
    /// runs.
    fn stop(&mut self, done: Done);

    /// STOP to RUNNING.
    ///
    /// # Errors
    /// It can not go on; it is in STOP still.
    fn run(&mut self) -> Result<(), Errno>;

    /// STOP to STOP_COPY: its state, for a device of the same kind.
    ///
    /// # Errors
    /// It can not be had.
    fn save_state(&mut self) -> Result<Vec<u8>, Errno>;

    /// STOP to RESUMING: another state will come. The one that it has is forgotten, but for what is
    /// the client's.
    fn forget_state(&mut self, done: Done);

    /// RESUMING to STOP: the stream, which is whatever a client has sent.
    ///
    /// # Errors
    /// It is no state of such a device. Only a reset makes the device good for anything then.
    fn load_state(&mut self, stream: &[u8]) -> Result<(), Errno>;

    /// Logs the pages that the device writes, in these ranges at least. None: in all.
    /// [`settle_log`](Self::settle_log) follows: what is written after that is logged.
    ///
    /// # Errors
    /// They are logged already ([`Errno::BUSY`]), or can not be.
    fn start_logging(&mut self, ranges: &[LoggingRange]) -> Result<(), Errno>;

    /// Logs them no more.
    ///
    /// # Errors
    /// They are not logged.
    fn stop_logging(&mut self) -> Result<(), Errno>;

    /// What was written until now is about to be asked for: `done` when it is known.
    fn settle_log(&mut self, done: Done);

    /// Sets a bit in `bitmap`, which has as many as are needed, for each unit of the range in which
    /// something was written, and forgets that it was. The range was checked: it does not overflow,
    /// is not empty, and its unit is a power of two.
    ///
    /// # Errors
    /// They are not logged.
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
    fn every_state_but_error_is_reached_from_every_other_by_way_of_stop() {
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
