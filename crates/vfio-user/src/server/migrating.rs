//! Migration state of a device, and the requests of migration.

use zerocopy::{FromBytes, IntoBytes};

use crate::Errno;
use crate::device::{Completer, Device};
use crate::migration::{
    DeviceFeature, DeviceState, LOG_PAGE, LoggingControl, LoggingRange, LoggingReport,
    MAX_LOGGED_RANGES, MAX_STREAM, MIGRATION_STOP_COPY, MigData, MigrationState, feature,
    feature_flags,
};
use crate::wire::split;

/// Migration state that the client has set, and the stream that it reads or writes.
#[derive(Default)]
pub(super) struct Migrating {
    state: MigrationState,
    /// Stream that the client reads in STOP_COPY, or has written in RESUMING.
    stream: Vec<u8>,
    /// Number of bytes that the client has read.
    read: usize,
    /// True if the device has parsed a state, which it does not use yet.
    is_parsed: bool,
}

/// Result of parsing a DEVICE_FEATURE request.
pub(super) enum FeatureOutcome {
    /// Payload of the reply.
    Reply(Vec<u8>),
    /// Change to another migration state, and the flags of the reply.
    State { to: MigrationState, flags: u32 },
    /// Payload of a reply that is sent when
    /// [`Migration::sync_log`](crate::migration::Migration::sync_log) has completed.
    Logs(Vec<u8>),
    /// Report of the dirty page log. It is sent when
    /// [`Migration::sync_log`](crate::migration::Migration::sync_log) has completed.
    Log { report: LoggingReport, flags: u32 },
}

/// Result of a step towards another migration state.
pub(super) enum Progress {
    /// The state is reached.
    Reached,
    /// The device has started an asynchronous step, and will complete a [`Completer`].
    Waits,
}

impl Migrating {
    pub(super) fn is_running(&self) -> bool {
        self.state == MigrationState::Running
    }

    /// True if the DEVICE_FEATURE request changes the state.
    pub(super) fn changes(payload: &[u8]) -> bool {
        let what = feature_flags::SET | feature_flags::INDEX;
        let state = feature_flags::SET | feature::MIG_DEVICE_STATE;
        split::<DeviceFeature>(payload).is_ok_and(|(request, _)| request.flags & what == state)
    }

    /// Resets the migration state, when the device is reset.
    pub(super) fn reset(&mut self) {
        *self = Self::default();
    }

    /// Parses a DEVICE_FEATURE request, and executes it if that needs no wait.
    pub(super) fn feature(
        &self,
        payload: &[u8],
        max_xfer: u32,
        device: &mut dyn Device,
    ) -> Result<FeatureOutcome, Errno> {
        use feature_flags::{GET, INDEX, PROBE, SET};
        let (request, data) = split::<DeviceFeature>(payload)?;
        // The VFIO driver of the kernel returns the same error for a device without features.
        let device = device.migration().ok_or(Errno::NOTTY)?;
        let index = request.flags & INDEX;
        let methods = match index {
            feature::MIGRATION | feature::DMA_LOGGING_REPORT => GET,
            feature::MIG_DEVICE_STATE => GET | SET,
            feature::DMA_LOGGING_START | feature::DMA_LOGGING_STOP => SET,
            _ => return Err(Errno::NOTTY),
        };
        let method = request.flags & (GET | SET);
        let is_unknown = request.flags & !(INDEX | GET | SET | PROBE) != 0;
        if is_unknown || method & !methods != 0 {
            return Err(Errno::INVAL);
        }
        let reply = |parts: &[&[u8]]| FeatureOutcome::Reply(reply(request.flags, parts));
        if request.flags & PROBE != 0 {
            return Ok(reply(&[]));
        }
        match (index, method) {
            (feature::MIGRATION, GET) => Ok(reply(&[MIGRATION_STOP_COPY.as_bytes()])),
            (feature::MIG_DEVICE_STATE, GET) => {
                let state = DeviceState { state: self.state as u32, data_fd: u32::MAX };
                Ok(reply(&[state.as_bytes()]))
            }
            (feature::MIG_DEVICE_STATE, SET) => {
                let (wanted, _) = split::<DeviceState>(data)?;
                let to = MigrationState::from_wire(wanted.state).ok_or(Errno::INVAL)?;
                Ok(FeatureOutcome::State { to, flags: request.flags })
            }
            (feature::DMA_LOGGING_START, SET) => {
                let (mut control, rest) = split::<LoggingControl>(data)?;
                let ranges = ranges(&control, rest)?;
                device.start_logging(&ranges)?;
                control.page_size = LOG_PAGE;
                let head = request.flags;
                Ok(FeatureOutcome::Logs(self::reply(
                    head,
                    &[control.as_bytes(), ranges.as_bytes()],
                )))
            }
            (feature::DMA_LOGGING_STOP, SET) => {
                device.stop_logging()?;
                Ok(reply(&[data]))
            }
            (feature::DMA_LOGGING_REPORT, GET) => {
                let (report, _) = split::<LoggingReport>(data)?;
                let bytes = bitmap_len(&report)?.checked_mul(8).ok_or(Errno::INVAL)?;
                // The client has to split a range whose bitmap is too long.
                if bytes > max_xfer as usize {
                    return Err(Errno::TOOBIG);
                }
                Ok(FeatureOutcome::Log { report, flags: request.flags })
            }
            // A request with neither GET nor SET, or with both, is invalid.
            _ => Err(Errno::INVAL),
        }
    }

    /// Reply to DMA_LOGGING_REPORT, after the log contains all earlier writes.
    pub(super) fn report(
        report: &LoggingReport,
        flags: u32,
        device: &mut dyn Device,
    ) -> Result<Vec<u8>, Errno> {
        let mut bitmap = vec![0; bitmap_len(report)?];
        device.migration().ok_or(Errno::NOTTY)?.take_log(report, &mut bitmap)?;
        Ok(reply(flags, &[report.as_bytes(), bitmap.as_bytes()]))
    }

    /// Reply to a state change, after the device has reached `state`.
    pub(super) fn state_reply(state: MigrationState, flags: u32) -> Vec<u8> {
        let state = DeviceState { state: state as u32, data_fd: u32::MAX };
        reply(flags, &[state.as_bytes()])
    }

    /// Takes all steps towards the state `to` that need no wait. If the result is
    /// [`Progress::Waits`], the device has started a further step, and has the callback from
    /// `done`. When it completes, the caller calls [`stepped`](Self::stepped) after a success, or
    /// [`failed`](Self::failed) after a failure.
    pub(super) fn step_towards(
        &mut self,
        to: MigrationState,
        device: &mut dyn Device,
        mut done: impl FnMut() -> Completer,
    ) -> Result<Progress, Errno> {
        use MigrationState::{Error, Resuming, Running, StopCopy};
        let device = device.migration().ok_or(Errno::NOTTY)?;
        if to == Error || self.state == Error {
            return Err(Errno::INVAL);
        }
        if std::mem::take(&mut self.is_parsed) {
            device.use_state().inspect_err(|_| self.state = Error)?;
        }
        while let Some(next) = self.state.next(to) {
            match (self.state, next) {
                (Running, _) => {
                    device.stop(done());
                    return Ok(Progress::Waits);
                }
                (_, Resuming) => {
                    device.discard_state(done());
                    return Ok(Progress::Waits);
                }
                (Resuming, _) => {
                    device.load_state(self.take_stream(), done());
                    return Ok(Progress::Waits);
                }
                (_, StopCopy) => {
                    let stream = device.save_state()?;
                    if stream.len() > MAX_STREAM {
                        return Err(Errno::FBIG);
                    }
                    (self.stream, self.read) = (stream, 0);
                }
                (_, Running) => device.run()?,
                // The remaining case is STOP_COPY to STOP.
                _ => drop(self.take_stream()),
            }
            self.state = next;
        }
        Ok(Progress::Reached)
    }

    /// Finishes an asynchronous step towards `to`, after its success.
    pub(super) fn stepped(&mut self, to: MigrationState) {
        self.is_parsed = self.state == MigrationState::Resuming;
        self.state = self.state.next(to).unwrap_or(self.state);
    }

    /// Handles a failed step towards `to`. If the device could not discard its state, or could not
    /// parse the new one, the device is then unusable.
    pub(super) fn failed(&mut self, to: MigrationState) {
        let states = [Some(self.state), self.state.next(to)];
        if states.contains(&Some(MigrationState::Resuming)) {
            self.state = MigrationState::Error;
        }
    }

    /// Reply to MIG_DATA_READ.
    pub(super) fn read(&mut self, payload: &[u8], max_xfer: u32) -> Result<Vec<u8>, Errno> {
        let (request, _) = split::<MigData>(payload)?;
        if self.state != MigrationState::StopCopy || request.size > max_xfer {
            return Err(Errno::INVAL);
        }
        let left = self.stream.get(self.read..).unwrap_or_default();
        let piece = left.get(..request.size as usize).unwrap_or(left);
        let size = u32::try_from(piece.len()).map_err(|_| Errno::INVAL)?;
        let head = MigData { argsz: size.saturating_add(8), size };
        let reply = [head.as_bytes(), piece].concat();
        self.read += piece.len();
        Ok(reply)
    }

    /// Executes MIG_DATA_WRITE.
    pub(super) fn write(&mut self, payload: &[u8], max_xfer: u32) -> Result<(), Errno> {
        let (request, data) = split::<MigData>(payload)?;
        if self.state != MigrationState::Resuming || request.size > max_xfer {
            return Err(Errno::INVAL);
        }
        let data = data.get(..request.size as usize).ok_or(Errno::INVAL)?;
        if data.len() > MAX_STREAM - self.stream.len().min(MAX_STREAM) {
            return Err(Errno::FBIG);
        }
        self.stream.extend_from_slice(data);
        Ok(())
    }

    fn take_stream(&mut self) -> Vec<u8> {
        self.read = 0;
        std::mem::take(&mut self.stream)
    }
}

/// Payload of a DEVICE_FEATURE reply.
fn reply(flags: u32, parts: &[&[u8]]) -> Vec<u8> {
    let data = parts.concat();
    let argsz = u32::try_from(size_of::<DeviceFeature>() + data.len()).unwrap_or(u32::MAX);
    [DeviceFeature { argsz, flags }.as_bytes(), &data].concat()
}

/// Parses the ranges of a DMA_LOGGING_START.
fn ranges(control: &LoggingControl, bytes: &[u8]) -> Result<Vec<LoggingRange>, Errno> {
    if control.num_ranges > MAX_LOGGED_RANGES {
        return Err(Errno::TOOBIG);
    }
    let len = control.num_ranges as usize * size_of::<LoggingRange>();
    let ranges: Vec<_> = bytes
        .get(..len)
        .ok_or(Errno::INVAL)?
        .chunks_exact(size_of::<LoggingRange>())
        .filter_map(|range| LoggingRange::read_from_bytes(range).ok())
        .collect();
    let is_range =
        |range: &LoggingRange| range.length != 0 && range.iova.checked_add(range.length).is_some();
    if ranges.iter().all(is_range) { Ok(ranges) } else { Err(Errno::INVAL) }
}

/// Number of 64-bit words in the bitmap of a report.
fn bitmap_len(report: &LoggingReport) -> Result<usize, Errno> {
    let LoggingReport { iova, length, page_size } = *report;
    if length == 0 || iova.checked_add(length).is_none() || !page_size.is_power_of_two() {
        return Err(Errno::INVAL);
    }
    usize::try_from(length.div_ceil(page_size).div_ceil(64)).map_err(|_| Errno::TOOBIG)
}
