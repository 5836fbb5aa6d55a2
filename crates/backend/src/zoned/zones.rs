//! The zones of a disk: their states, and what may be done with them.

use super::format::ZoneFormat;
use super::limits::{State, Zone};
use super::table::{Layout, Record, Table};
use crate::request::DiskError;
use parking_lot::Mutex;
use shadowbell_spec::zns::ZoneState;

/// The zones of a disk, for all of its queues. Places and lengths are in bytes of what the host
/// sees.
#[derive(Debug)]
pub struct Zones {
    pub(super) table: Table,
    pub(super) state: Mutex<State>,
    /// Queues of this process that there are.
    queues: Mutex<usize>,
    /// Zones whose state was damaged when they were read.
    pub(super) damaged: u64,
}

/// What a table says, and how many zones of it are damaged.
fn load(table: &Table, goes_on: bool) -> (State, u64) {
    let mut damaged = 0;
    let capacity = table.layout.format.capacity / u64::from(table.layout.block_size);
    let zone = |index| {
        let stored = table.load(index);
        let mut record = stored.unwrap_or_else(|| {
            // What was written is not known: it can be read, and not lost by a write.
            damaged += 1;
            Record { written: capacity, state: ZoneState::ReadOnly, has_extension: false }
        });
        if record.has_extension && table.load_extension(index).is_none() {
            record.has_extension = false;
        }
        if record.state.is_open() && !goes_on {
            let is_used = record.written != 0 || record.has_extension;
            record.state = if is_used { ZoneState::Closed } else { ZoneState::Empty };
        }
        if stored != Some(record) {
            // A disk that takes no writes says the same again next time.
            let _ = table.store(index, record);
        }
        Zone { record, resetting: false, in_flight: 0 }
    };
    let zones = (0..table.layout.zones).map(zone).collect();
    (State::new(zones, table), damaged)
}

/// A part of a read that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    /// Where it is.
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Zones {
    /// Of a table. Zones that were open are so yet if the server `goes_on` for another one; else
    /// the power was off, for their host.
    pub(super) fn new(table: Table, goes_on: bool) -> Self {
        let (state, damaged) = load(&table, goes_on);
        Self { state: Mutex::new(state), queues: Mutex::new(0), table, damaged }
    }

    /// A queue is opened. The first of this process reads what another one may have stored since:
    /// that serves no longer when a successor begins to.
    pub(super) fn enter(&self) {
        let mut queues = self.queues.lock();
        if *queues == 0 {
            *self.state.lock() = load(&self.table, true).0;
        }
        *queues += 1;
    }

    /// A queue is gone.
    pub(super) fn leave(&self) {
        let mut queues = self.queues.lock();
        *queues = queues.saturating_sub(1);
    }

    /// What the zones are.
    #[must_use]
    pub fn format(&self) -> &ZoneFormat {
        &self.table.layout.format
    }

    pub(super) fn layout(&self) -> &Layout {
        &self.table.layout
    }

    /// How many there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.layout().zones
    }

    fn block(&self) -> u64 {
        u64::from(self.layout().block_size)
    }

    /// The zone that a byte is in, and where it begins.
    pub(super) fn zone_of(&self, offset: u64) -> Result<(usize, u64), DiskError> {
        let index = offset / self.format().size;
        if index >= self.count() {
            return Err(DiskError::OutOfRange);
        }
        Ok((index as usize, index * self.format().size))
    }

    /// Why nothing can be written to a zone in this state, if nothing can.
    fn check_writable(zone: &Zone) -> Result<(), DiskError> {
        match zone.record.state {
            ZoneState::Full => Err(DiskError::ZoneFull),
            ZoneState::ReadOnly => Err(DiskError::ZoneReadOnly),
            ZoneState::Offline => Err(DiskError::ZoneOffline),
            _ => Ok(()),
        }
    }

    /// Whether a write of these bytes would be possible now.
    ///
    /// # Errors
    /// How it would end.
    pub fn check_write(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        let (index, start) = self.zone_of(offset)?;
        self.check_place(&self.state.lock().zones[index], offset - start, len)
    }

    fn check_place(&self, zone: &Zone, within: u64, len: u64) -> Result<(), DiskError> {
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

    /// A write takes its place, and the write pointer goes on. The zone, which is to be told of its
    /// [end](Self::end_write). With `replays`, a process that is dead may have taken that place.
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
        self.check_place(zone, within, len)?;
        self.advance(&mut state, index, len)?;
        Ok(index)
    }

    /// As [`begin_write`](Self::begin_write), at the write pointer of the zone that begins at
    /// `start`. Also where that is.
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

    /// The write pointer of a zone goes on: it is opened, and may be full.
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

    /// A write has ended, however it has.
    pub(super) fn end_write(&self, index: usize) {
        let mut state = self.state.lock();
        if let Some(zone) = state.zones.get_mut(index) {
            zone.in_flight = zone.in_flight.saturating_sub(1);
            if zone.in_flight == 0 {
                state.wake(index);
            }
        }
    }

    /// Whether a host may read these bytes.
    ///
    /// # Errors
    /// Why not.
    pub fn check_read(&self, offset: u64, len: u64) -> Result<(), DiskError> {
        self.written(offset, len, self.format().read_across).map(drop)
    }

    /// The parts of these bytes that were written. What is between them reads as zeroes. With
    /// `across` they may be of several zones.
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
