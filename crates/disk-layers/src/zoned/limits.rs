//! Limits of active and open zones, and state transitions.

use super::table::{Record, Table};
use crate::metadata::Bell;
use shadowbell_disk::DiskError;
use shadowbell_spec::zns::ZoneState;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// State of a zone in memory: a copy of its record in the zone table, and its writes in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Zone {
    pub(super) record: Record,
    /// True while a reset discards the data of the zone.
    pub(super) resetting: bool,
    /// Number of writes in flight to the zone.
    pub(super) in_flight: u32,
}

/// State of all zones of a disk, protected by the lock of [`ZoneSet`](super::zones::ZoneSet).
#[derive(Debug)]
pub(super) struct State {
    pub(super) zones: Vec<Zone>,
    open: u32,
    active: u32,
    /// Implicitly opened zones, the oldest first. Maintained only if there is a limit of open
    /// zones.
    implicit: VecDeque<u32>,
    /// Resets that wait for writes in flight, by zone.
    pub(super) waiting: HashMap<u32, Vec<(Arc<Bell>, u64)>>,
}

impl State {
    pub(super) fn new(zones: Vec<Zone>, table: &Table) -> Self {
        let is_limited = table.layout.format.max_open != 0;
        let mut state =
            Self { zones, open: 0, active: 0, implicit: VecDeque::new(), waiting: HashMap::new() };
        for index in 0..state.zones.len() {
            let now = state.zones[index].record.state;
            state.count(index, ZoneState::Empty, now, is_limited);
        }
        state
    }

    fn count(&mut self, index: usize, from: ZoneState, to: ZoneState, is_limited: bool) {
        let change = |count: &mut u32, was: bool, is: bool| {
            *count = count.saturating_sub(u32::from(was)) + u32::from(is);
        };
        change(&mut self.open, from.is_open(), to.is_open());
        change(&mut self.active, from.is_active(), to.is_active());
        if !is_limited || from == to {
            return;
        }
        if from == ZoneState::ImplicitlyOpen {
            self.implicit.retain(|other| *other != index as u32);
        }
        if to == ZoneState::ImplicitlyOpen {
            self.implicit.push_back(index as u32);
        }
    }

    /// Sets the record of a zone, in the stored table and then in memory.
    pub(super) fn set(&mut self, table: &Table, index: usize, record: Record) {
        let before = self.zones[index].record;
        self.count(index, before.state, record.state, table.layout.format.max_open != 0);
        self.zones[index].record = record;
        // `store` fails only on read-only memory, and the zones of a read-only disk never change.
        let _ = table.store(index as u64, record);
    }

    /// Sets the state of a zone.
    pub(super) fn set_state(&mut self, table: &Table, index: usize, state: ZoneState) {
        let record = self.zones[index].record;
        self.set(table, index, Record { state, ..record });
    }

    /// Checks that `more` additional zones may become active.
    pub(super) fn check_active(&self, table: &Table, more: u32) -> Result<(), DiskError> {
        let most = table.layout.format.max_active;
        let is_too_much = most != 0 && self.active.saturating_add(more) > most;
        if is_too_much { Err(DiskError::TooManyActiveZones) } else { Ok(()) }
    }

    /// Ensures that one more zone may become open. At the limit, closes the zone that was
    /// implicitly opened first.
    pub(super) fn make_room(&mut self, table: &Table) -> Result<(), DiskError> {
        let most = table.layout.format.max_open;
        if most == 0 || self.open < most {
            return Ok(());
        }
        let first = *self.implicit.front().ok_or(DiskError::TooManyOpenZones)?;
        self.set_state(table, first as usize, ZoneState::Closed);
        Ok(())
    }

    /// Checks that `more` additional zones may become open. Implicitly opened zones are not
    /// counted, because they can be closed.
    pub(super) fn check_open(&self, table: &Table, more: u32) -> Result<(), DiskError> {
        let most = table.layout.format.max_open;
        let fixed = self.open.saturating_sub(self.implicit.len() as u32);
        let is_too_much = most != 0 && fixed.saturating_add(more) > most;
        if is_too_much { Err(DiskError::TooManyOpenZones) } else { Ok(()) }
    }

    /// Notifies the requests that wait for this zone.
    pub(super) fn wake(&mut self, index: usize) {
        for (bell, serial) in self.waiting.remove(&(index as u32)).unwrap_or_default() {
            bell.push(serial);
        }
    }

    #[cfg(test)]
    pub(super) fn counts(&self) -> (u32, u32, usize) {
        (self.open, self.active, self.implicit.len())
    }
}
