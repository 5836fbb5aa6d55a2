//! Zones of a disk: states, write pointers and permitted operations.

use super::limits::{State, Zone};
use super::table::{Layout, Record, Table};
use parking_lot::Mutex;
use shadowbell_disk::{DiskError, ZoneFormat, ZoneReport, Zones};
use shadowbell_spec::zns::ZoneState;

/// Zones of a disk, shared by all of its queues. Offsets and lengths are in bytes, as for the host.
#[derive(Debug)]
pub(super) struct ZoneSet {
    pub(super) table: Table,
    pub(super) state: Mutex<State>,
    /// Number of open queues in this process.
    queues: Mutex<usize>,
    /// Number of zones whose table entries were damaged when they were loaded.
    pub(super) damaged: u64,
}

/// Loads all zones from the table. Also returns the number of damaged entries.
fn load(table: &Table, recovers: bool) -> (State, u64) {
    let mut damaged = 0;
    let capacity = table.layout.format.capacity / u64::from(table.layout.block_size);
    let zone = |index| {
        let stored = table.load(index);
        let mut record = stored.unwrap_or_else(|| {
            // The write pointer is unknown. The zone becomes read-only, so that its data can be
            // read and cannot be overwritten.
            damaged += 1;
            Record { written: capacity, state: ZoneState::ReadOnly, has_extension: false }
        });
        if record.has_extension && table.load_extension(index).is_none() {
            record.has_extension = false;
        }
        if record.state.is_open() && !recovers {
            let is_used = record.written != 0 || record.has_extension;
            record.state = if is_used { ZoneState::Closed } else { ZoneState::Empty };
        }
        if stored != Some(record) {
            // A failure (on a read-only disk) is harmless: the next load computes the same record
            // again.
            let _ = table.store(index, record);
        }
        Zone { record, resetting: false, in_flight: 0 }
    };
    let zones = (0..table.layout.zones).map(zone).collect();
    (State::new(zones, table), damaged)
}

/// Written part of a range that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Offset in bytes.
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl ZoneSet {
    /// Loads the zones of a table. If `recovers` is true, this process continues the controllers of
    /// another one, so open zones stay open. Otherwise this is a power cycle for the host, which
    /// closes open zones.
    pub(super) fn new(table: Table, recovers: bool) -> Self {
        let (state, damaged) = load(&table, recovers);
        Self { state: Mutex::new(state), queues: Mutex::new(0), table, damaged }
    }

    /// Registers a queue. The first queue loads the table again. During an upgrade, this process
    /// opens the disk while the previous one still changes the table.
    pub(super) fn enter(&self) {
        let mut queues = self.queues.lock();
        if *queues == 0 {
            *self.state.lock() = load(&self.table, true).0;
        }
        *queues += 1;
    }

    /// Unregisters a queue.
    pub(super) fn leave(&self) {
        let mut queues = self.queues.lock();
        *queues = queues.saturating_sub(1);
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.table.layout
    }

    fn block(&self) -> u64 {
        u64::from(self.layout().block_size)
    }

    /// Index and start of the zone that contains the byte at `offset`.
    pub(super) fn zone_of(&self, offset: u64) -> Result<(usize, u64), DiskError> {
        let index = offset / self.format().size;
        if index >= self.count() {
            return Err(DiskError::OutOfRange);
        }
        Ok((index as usize, index * self.format().size))
    }

    /// Returns an error if the state of the zone allows no writes.
    fn check_writable(zone: &Zone) -> Result<(), DiskError> {
        match zone.record.state {
            ZoneState::Full => Err(DiskError::ZoneFull),
            ZoneState::ReadOnly => Err(DiskError::ZoneReadOnly),
            ZoneState::Offline => Err(DiskError::ZoneOffline),
            _ => Ok(()),
        }
    }

    fn check_position(&self, zone: &Zone, within: u64, len: u64) -> Result<(), DiskError> {
        Self::check_writable(zone)?;
        let end = within.checked_add(len).ok_or(DiskError::OutOfRange)?;
        if end > self.format().capacity {
            return Err(DiskError::ZoneBoundary);
        }
        if zone.resetting || within != zone.record.written * self.block() {
            return Err(DiskError::ZoneInvalidWrite);
        }
        Ok(())
    }

    /// Starts a write and advances the write pointer. Returns the zone, which the caller passes to
    /// [`end_write`](Self::end_write). With `replays`, the write may be a repetition after a crash:
    /// if the write pointer is already beyond it, the write is permitted and the write pointer is
    /// not changed.
    pub(super) fn begin_write(
        &self,
        offset: u64,
        len: u64,
        replays: bool,
    ) -> Result<usize, DiskError> {
        let (index, start) = self.zone_of(offset)?;
        let mut state = self.state.lock();
        let zone = &mut state.zones[index];
        let (within, written) = (offset - start, zone.record.written * self.block());
        let is_taken = within.checked_add(len).is_some_and(|end| end <= written);
        let can_be_read = !matches!(zone.record.state, ZoneState::ReadOnly | ZoneState::Offline);
        if replays && is_taken && can_be_read && !zone.resetting {
            zone.in_flight += 1;
            return Ok(index);
        }
        self.check_position(zone, within, len)?;
        self.advance(&mut state, index, len)?;
        Ok(index)
    }

    /// Starts a Zone Append to the zone that starts at `start`, and advances its write pointer.
    /// Returns the zone, as [`begin_write`](Self::begin_write) does, and the offset at which the
    /// data have to be written.
    pub(super) fn begin_append(&self, start: u64, len: u64) -> Result<(usize, u64), DiskError> {
        let (index, begin) = self.zone_of(start)?;
        if begin != start {
            return Err(DiskError::InvalidZone);
        }
        let mut state = self.state.lock();
        let zone = &state.zones[index];
        Self::check_writable(zone)?;
        if zone.resetting {
            return Err(DiskError::ZoneFull);
        }
        let within = zone.record.written * self.block();
        if within.checked_add(len).is_none_or(|end| end > self.format().capacity) {
            return Err(DiskError::ZoneBoundary);
        }
        self.advance(&mut state, index, len)?;
        Ok((index, start + within))
    }

    /// Advances the write pointer of a zone. The zone becomes open or full.
    fn advance(&self, state: &mut State, index: usize, len: u64) -> Result<(), DiskError> {
        let before = state.zones[index].record;
        if !before.state.is_open() {
            let more = u32::from(before.state == ZoneState::Empty);
            state.check_active(&self.table, more)?;
            state.make_room(&self.table)?;
        }
        let written = before.written + len / self.block();
        let now = if written * self.block() >= self.format().capacity {
            ZoneState::Full
        } else if before.state.is_open() {
            before.state
        } else {
            ZoneState::ImplicitlyOpen
        };
        state.set(&self.table, index, Record { written, state: now, ..before });
        state.zones[index].in_flight += 1;
        Ok(())
    }

    /// Ends a write, whatever its result.
    pub(super) fn end_write(&self, index: usize) {
        let mut state = self.state.lock();
        if let Some(zone) = state.zones.get_mut(index) {
            zone.in_flight = zone.in_flight.saturating_sub(1);
            if zone.in_flight == 0 {
                state.wake(index);
            }
        }
    }

    /// Lists the written parts of a range. All other parts read as zeroes. If `across` is false, a
    /// range that spans several zones is an error.
    pub(super) fn written(
        &self,
        offset: u64,
        len: u64,
        across: bool,
    ) -> Result<Vec<Piece>, DiskError> {
        let end = offset.checked_add(len).ok_or(DiskError::OutOfRange)?;
        let (first, start) = self.zone_of(offset)?;
        if !across && end > start + self.format().size {
            return Err(DiskError::ZoneBoundary);
        }
        let mut pieces = Vec::new();
        let state = self.state.lock();
        let (mut at, mut index, mut start) = (offset, first, start);
        while at < end {
            let zone = state.zones.get(index).ok_or(DiskError::OutOfRange)?;
            if zone.record.state == ZoneState::Offline {
                return Err(DiskError::ZoneOffline);
            }
            let to = end.min(start + zone.record.written * self.block());
            if at < to {
                pieces.push(Piece { offset: at, len: to - at });
            }
            (index, start) = (index + 1, start + self.format().size);
            at = start;
        }
        Ok(pieces)
    }
}

impl Zones for ZoneSet {
    fn format(&self) -> &ZoneFormat {
        &self.table.layout.format
    }

    fn count(&self) -> u64 {
        self.layout().zones
    }

    fn check_write(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        let (index, start) = self.zone_of(offset)?;
        self.check_position(&self.state.lock().zones[index], offset - start, len)
    }

    fn check_read(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.written(offset, len, self.format().read_across).map(drop)
    }

    fn report(&self, report: &ZoneReport) -> Result<Vec<u8>, DiskError> {
        self.zone_report(report)
    }
}
