//! Commands that change states: of one zone, or of all that can be changed so.

use super::table::Record;
use super::zones::Zones;
use crate::metadata::Bell;
use crate::request::DiskError;
use shadowbell_spec::zns::{ZoneAction, ZoneState};
use std::sync::Arc;

/// What comes next of a reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reset {
    /// Nothing: the zone is empty.
    Over,
    /// Something is under way in the zone; the bell says when it is to be asked again.
    Wait,
    /// The data are thrown away: so many bytes. Then the reset [ends](Zones::end_reset).
    Discard(u64),
}

impl Zones {
    /// Opens, closes, finishes a zone or takes it offline. `at` is where it begins.
    pub(super) fn manage(&self, action: ZoneAction, at: u64) -> Result<(), DiskError> {
        let (index, start) = self.zone_of(at)?;
        if start != at {
            return Err(DiskError::InvalidZone);
        }
        let mut state = self.state.lock();
        let zone = &state.zones[index];
        let impossible = Err(DiskError::ZoneTransition);
        if zone.resetting {
            return impossible;
        }
        let now = zone.record.state;
        match (action, now) {
            (ZoneAction::Open, ZoneState::ExplicitlyOpen)
            | (ZoneAction::Close, ZoneState::Closed)
            | (ZoneAction::Finish, ZoneState::Full)
            | (ZoneAction::Offline, ZoneState::Offline) => {}
            (ZoneAction::Open, ZoneState::ImplicitlyOpen) => {
                state.set_state(&self.table, index, ZoneState::ExplicitlyOpen);
            }
            (ZoneAction::Open, ZoneState::Empty | ZoneState::Closed) => {
                state.check_active(&self.table, u32::from(now == ZoneState::Empty))?;
                state.make_room(&self.table)?;
                state.set_state(&self.table, index, ZoneState::ExplicitlyOpen);
            }
            (ZoneAction::Close, _) if now.is_open() => {
                state.set_state(&self.table, index, ZoneState::Closed);
            }
            (ZoneAction::Finish, _) if now.has_write_pointer() => {
                state.set_state(&self.table, index, ZoneState::Full);
            }
            (ZoneAction::Offline, ZoneState::ReadOnly) => {
                state.set_state(&self.table, index, ZoneState::Offline);
            }
            _ => return impossible,
        }
        Ok(())
    }

    /// The same of all zones that are in a state for it: for a reset, [`resettable`] says which.
    ///
    /// [`resettable`]: Self::next_resettable
    pub(super) fn manage_all(&self, action: ZoneAction) -> Result<(), DiskError> {
        let mut state = self.state.lock();
        let (which, to): (fn(ZoneState) -> bool, _) = match action {
            ZoneAction::Close => (ZoneState::is_open, ZoneState::Closed),
            ZoneAction::Finish => (ZoneState::is_active, ZoneState::Full),
            ZoneAction::Open => (|now| now == ZoneState::Closed, ZoneState::ExplicitlyOpen),
            ZoneAction::Offline => (|now| now == ZoneState::ReadOnly, ZoneState::Offline),
            ZoneAction::Reset | ZoneAction::SetExtension => return Err(DiskError::InvalidZone),
        };
        let concerned: Vec<_> = (0..state.zones.len())
            .filter(|index| !state.zones[*index].resetting)
            .filter(|index| which(state.zones[*index].record.state))
            .collect();
        if action == ZoneAction::Open {
            // All of them, or none.
            state.check_open(&self.table, concerned.len() as u32)?;
        }
        for index in concerned {
            if action == ZoneAction::Open {
                state.make_room(&self.table)?;
            }
            state.set_state(&self.table, index, to);
        }
        Ok(())
    }

    /// Keeps these bytes with an empty zone, which is closed then.
    pub(super) fn set_extension(&self, at: u64, bytes: &[u8]) -> Result<(), DiskError> {
        let (index, start) = self.zone_of(at)?;
        if start != at || bytes.is_empty() || bytes.len() != self.format().extension_bytes() {
            return Err(DiskError::InvalidZone);
        }
        let mut state = self.state.lock();
        let zone = &state.zones[index];
        if zone.record.state != ZoneState::Empty || zone.resetting {
            return Err(DiskError::ZoneTransition);
        }
        state.check_active(&self.table, 1)?;
        self.table.store_extension(index as u64, bytes).ok_or(DiskError::ReadOnly)?;
        let record = Record { written: 0, state: ZoneState::Closed, has_extension: true };
        state.set(&self.table, index, record);
        Ok(())
    }

    /// A reset of the zone that begins at `at` is asked for, by a request with this serial number.
    pub(super) fn begin_reset(
        &self,
        at: u64,
        (bell, serial): (&Arc<Bell>, u64),
    ) -> Result<Reset, DiskError> {
        let (index, start) = self.zone_of(at)?;
        if start != at {
            return Err(DiskError::InvalidZone);
        }
        let mut state = self.state.lock();
        let zone = &mut state.zones[index];
        match zone.record.state {
            ZoneState::ReadOnly | ZoneState::Offline => return Err(DiskError::ZoneTransition),
            ZoneState::Empty => return Ok(Reset::Over),
            _ => {}
        }
        if zone.resetting || zone.in_flight != 0 {
            state.waiting.entry(index as u32).or_default().push((Arc::clone(bell), serial));
            return Ok(Reset::Wait);
        }
        zone.resetting = true;
        Ok(Reset::Discard(zone.record.written * u64::from(self.layout().block_size)))
    }

    /// The data of a zone that was being reset are thrown away, or the reset is given up.
    pub(super) fn end_reset(&self, at: u64, is_done: bool) {
        let Ok((index, _)) = self.zone_of(at) else { return };
        let mut state = self.state.lock();
        if is_done {
            state.set(&self.table, index, Record::EMPTY);
        }
        state.zones[index].resetting = false;
        state.wake(index);
    }

    /// The first zone from `at` on that a reset of all is about.
    pub(super) fn next_resettable(&self, at: u64) -> Option<u64> {
        let first = usize::try_from(at.div_ceil(self.format().size)).ok()?;
        let state = self.state.lock();
        let is_one = |now: ZoneState| now.is_active() || now == ZoneState::Full;
        let mut zones = state.zones.iter().enumerate().skip(first);
        let found = zones.find(|(_, zone)| is_one(zone.record.state))?;
        Some(found.0 as u64 * self.format().size)
    }

    /// The queue with this bell is gone: nothing of it waits any more.
    pub(super) fn forget(&self, bell: &Arc<Bell>) {
        let mut state = self.state.lock();
        state.waiting.values_mut().for_each(|all| all.retain(|(of, _)| !Arc::ptr_eq(of, bell)));
    }
}
