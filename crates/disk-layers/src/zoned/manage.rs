//! Zone Management Send: state changes of one zone or of all zones.

use super::table::Record;
use super::zones::ZoneSet;
use crate::metadata::Bell;
use shadowbell_disk::{DiskError, Zones};
use shadowbell_spec::zns::{ZoneAction, ZoneState};
use std::sync::Arc;

/// Next step of a zone reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reset {
    /// The reset has ended: the zone is empty.
    Finished,
    /// Writes or another reset are in flight in the zone. When the caller may try again, its
    /// [`Bell`] is rung.
    Wait,
    /// The caller has to discard this many bytes from the start of the zone, then [end the
    /// reset](ZoneSet::end_reset).
    Discard(u64),
}

impl ZoneSet {
    /// Opens, closes or finishes a zone, or takes it offline. The zone starts at `at`.
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

    /// Applies an action other than Reset to all zones whose state permits it (Select All).
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
            // If there would be too many open zones, none is opened.
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

    /// Stores the Zone Descriptor Extension of an empty zone. This changes the state of the zone to
    /// closed.
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

    /// Starts the reset of the zone that starts at `at`. If the reset has to wait, `bell` is rung
    /// later with `serial`, the serial number of the request.
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
            ZoneState::Empty => return Ok(Reset::Finished),
            _ => {}
        }
        if zone.resetting || zone.in_flight != 0 {
            state.waiting.entry(index as u32).or_default().push((Arc::clone(bell), serial));
            return Ok(Reset::Wait);
        }
        zone.resetting = true;
        Ok(Reset::Discard(zone.record.written * u64::from(self.layout().block_size)))
    }

    /// Ends the reset of a zone. `is_done` is true if the data were discarded, and false if the
    /// reset was cancelled.
    pub(super) fn end_reset(&self, at: u64, is_done: bool) {
        let Ok((index, _)) = self.zone_of(at) else { return };
        let mut state = self.state.lock();
        if is_done {
            state.set(&self.table, index, Record::EMPTY);
        }
        state.zones[index].resetting = false;
        state.wake(index);
    }

    /// Returns the first zone from `at` on that a reset of all zones applies to.
    pub(super) fn next_resettable(&self, at: u64) -> Option<u64> {
        let first = usize::try_from(at.div_ceil(self.format().size)).ok()?;
        let state = self.state.lock();
        let is_one = |now: ZoneState| now.is_active() || now == ZoneState::Full;
        let mut zones = state.zones.iter().enumerate().skip(first);
        let found = zones.find(|(_, zone)| is_one(zone.record.state))?;
        Some(found.0 as u64 * self.format().size)
    }

    /// Removes the waiting requests of a dropped queue. `bell` identifies the queue.
    pub(super) fn cancel_waits(&self, bell: &Arc<Bell>) {
        let mut state = self.state.lock();
        state.waiting.values_mut().for_each(|all| all.retain(|(of, _)| !Arc::ptr_eq(of, bell)));
    }
}
