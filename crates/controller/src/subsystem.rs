//! NVM subsystem of several controllers with shared namespaces.
//!
//! All controllers belong to one process, and each is a [`Member`] with a controller identifier.
//! The controllers share the reservations. A separate thread executes reservation commands one at a
//! time, because each change is written to a file before it takes effect, and no I/O thread may
//! wait for a file. Then the thread notifies each controller whose access rights change. The
//! command ends when all I/O threads of these controllers have applied the change, and all commands
//! that they started before the change have ended ([`Change`]).
//!
//! For the next start after a power loss, the file stores the state of namespaces with Persist
//! Through Power Loss. For the next process after a restart for upgrade or a crash, it stores the
//! state of all namespaces.

use crate::notice::{ControlHandle, Latch, Notice};
use crate::reservations::{
    Access, Action, AllReservations, Consequences, HostId, ReservationFile, Reservations,
};
use parking_lot::Mutex;
use shadowbell_spec::log::AnaState;
use shadowbell_spec::reservation::{
    EXTENDED_STATUS_HEAD, RegisteredController, RegisteredControllerExtended, ReservationStatus,
};
use shadowbell_spec::status::Status;
use std::collections::BTreeMap;
use std::fs::File;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::{fmt, io};
use zerocopy::IntoBytes;

/// Maximum number of ANA groups of a subsystem.
pub const MAX_ANA_GROUPS: u32 = 16;

/// Maximum number of controllers of a subsystem.
pub const MAX_CONTROLLERS: u16 = 64;

type Uuid = [u8; 16];

/// Error in joining a subsystem.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JoinError {
    /// The controller identifier is out of range, or all identifiers are taken.
    #[error("a subsystem has controllers 1 to {MAX_CONTROLLERS}")]
    NoRoom,
    /// Another controller has the identifier.
    #[error("the subsystem has a controller {0} already")]
    Taken(u16),
}

/// NVM subsystem of several controllers with the same namespaces. A clone is another handle of the
/// same subsystem.
#[derive(Clone, Debug)]
pub struct Subsystem {
    shared: Arc<Shared>,
    jobs: Sender<Job>,
}

impl Subsystem {
    /// Creates a subsystem. The file `state`, which is empty or was used by a subsystem before,
    /// stores the reservations. Without a file, reservations are lost when power is lost or the
    /// process ends.
    ///
    /// # Errors
    /// The file cannot be read or is not a reservation file, or the system cannot create a thread.
    pub fn new(state: Option<File>) -> io::Result<Self> {
        let state_file = state.map(ReservationFile::new);
        let all = state_file.as_ref().map_or_else(|| Ok(AllReservations::new()), |f| f.read())?;
        let state = State { all, ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), state_file });
        let (jobs, receiver) = channel();
        let its = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("sb-subsystem".into());
        thread.spawn(move || its.serve(&receiver))?;
        Ok(Self { shared, jobs })
    }

    /// Adds a member, which is then passed in a controller's [`Config`](crate::Config). Its
    /// controller identifier is `cntlid`, or the lowest free one. When the member is dropped, its
    /// identifier is free again.
    ///
    /// # Errors
    /// [`JoinError`].
    pub fn join(&self, cntlid: Option<u16>) -> Result<Arc<Member>, JoinError> {
        let mut state = self.shared.state.lock();
        let mut possible = 1..=MAX_CONTROLLERS;
        let cntlid = match cntlid {
            Some(cntlid) if !possible.contains(&cntlid) => return Err(JoinError::NoRoom),
            Some(cntlid) if state.members.contains_key(&cntlid) => {
                return Err(JoinError::Taken(cntlid));
            }
            Some(cntlid) => cntlid,
            None => possible
                .find(|cntlid| !state.members.contains_key(cntlid))
                .ok_or(JoinError::NoRoom)?,
        };
        state.members.insert(cntlid, MemberState::default());
        let (shared, jobs) = (Arc::clone(&self.shared), self.jobs.clone());
        Ok(Arc::new(Member { cntlid, shared, jobs, groups: OnceLock::new() }))
    }
}

/// Membership of a controller in a [`Subsystem`].
pub struct Member {
    cntlid: u16,
    shared: Arc<Shared>,
    jobs: Sender<Job>,
    /// ANA group by NSID, for namespaces that are not in group 1.
    groups: OnceLock<BTreeMap<u32, u32>>,
}

impl fmt::Debug for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").field("cntlid", &self.cntlid).finish_non_exhaustive()
    }
}

/// Change of a member's access rights to a namespace. Each I/O thread drops its clone of the latch
/// when it has applied the change and its earlier commands have ended.
#[derive(Debug)]
pub(crate) struct Change {
    pub(crate) uuid: Uuid,
    /// True if the change aborts commands in flight.
    pub(crate) aborts: bool,
    pub(crate) latch: Latch,
}

/// Reservation command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Command {
    pub(crate) host: HostId,
    pub(crate) action: Action,
    /// New value of Persist Through Power Loss, if it changes.
    pub(crate) persistent: Option<bool>,
    /// True if the command aborts commands in flight of preempted hosts.
    pub(crate) aborts: bool,
}

/// Job of the subsystem's thread. When the job has ended, the latch is released; if it has failed,
/// with an error status.
#[derive(Debug)]
pub(crate) enum Job {
    /// Reservation command for a namespace.
    Act { uuid: Uuid, command: Command, latch: Latch },
    /// Change of the Host Identifier of a controller's host.
    SetHost { cntlid: u16, host: Option<HostId>, latch: Latch },
    /// Change of Persist Through Power Loss of namespaces.
    Persist { uuids: Vec<Uuid>, persistent: bool, latch: Latch },
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    state_file: Option<ReservationFile>,
}

#[derive(Debug, Default)]
struct State {
    all: AllReservations,
    members: BTreeMap<u16, MemberState>,
    /// True if a controller has been started. A further one is then no power cycle of the
    /// subsystem.
    is_in_use: bool,
    /// True if the state has changed since the file was read.
    has_changed: bool,
}

#[derive(Debug, Default)]
struct MemberState {
    host: Option<HostId>,
    control: Option<ControlHandle>,
    changes: Vec<Change>,
    /// Notifications for the host: namespace UUID and type.
    notifications: Vec<(Uuid, u8)>,
    /// ANA states of the groups for this member; a missing group is optimized.
    ana: BTreeMap<u32, AnaState>,
}

impl State {
    /// Queues a change for a member, if its controller exists.
    fn change(&mut self, cntlid: u16, change: Change) {
        if let Some(member) = self.members.get_mut(&cntlid)
            && member.control.as_ref().is_some_and(ControlHandle::is_alive)
        {
            member.changes.push(change);
        }
    }

    /// Control planes of members with changes or notifications. The caller must release the lock
    /// before it notifies them, because in inline mode a control plane reads the state during the
    /// notification.
    fn concerned(&self) -> Vec<ControlHandle> {
        let has_some =
            |member: &&MemberState| !member.changes.is_empty() || !member.notifications.is_empty();
        self.members.values().filter(has_some).filter_map(|its| its.control.clone()).collect()
    }

    fn of(&self, uuid: &Uuid) -> Reservations {
        self.all.get(uuid).cloned().unwrap_or_default()
    }
}

impl Shared {
    /// Main function of the subsystem's thread. Returns when all senders of jobs are dropped.
    fn serve(&self, jobs: &Receiver<Job>) {
        while let Ok(job) = jobs.recv() {
            match job {
                Job::Act { uuid, command, latch } => {
                    if let Err(status) = self.act(uuid, &command, &latch) {
                        latch.set_status(status);
                    }
                }
                Job::SetHost { cntlid, host, latch } => {
                    if let Err(status) = self.set_host(cntlid, host, &latch) {
                        latch.set_status(status);
                    }
                }
                Job::Persist { uuids, persistent, latch } => {
                    if let Err(status) = self.persist(&uuids, persistent) {
                        latch.set_status(status);
                    }
                }
            }
        }
    }

    fn act(&self, uuid: Uuid, command: &Command, latch: &Latch) -> Result<(), Status> {
        let before = self.state.lock().of(&uuid);
        let mut after = before.clone();
        if let Some(persistent) = command.persistent {
            if persistent && self.state_file.is_none() {
                return Err(Status::INVALID_FIELD.with_dnr());
            }
            after.persistent = persistent;
        }
        let Consequences { notifications, unregistered } =
            after.act(command.host, command.action)?;
        if after == before {
            return Ok(());
        }
        self.write_with(|all| put(all, uuid, after.clone()))?;
        let mut state = self.state.lock();
        put(&mut state.all, uuid, after.clone());
        state.has_changed = true;
        let ids: Vec<_> = state.members.iter().map(|(cntlid, its)| (*cntlid, its.host)).collect();
        for (cntlid, host) in ids {
            let others = host.filter(|host| *host != command.host);
            let aborts = command.aborts && others.is_some_and(|host| unregistered.contains(&host));
            if aborts || before.access(host) != after.access(host) {
                let latch = latch.clone();
                state.change(cntlid, Change { uuid, aborts, latch });
            }
        }
        let is_there = |member: &&mut MemberState| {
            member.control.as_ref().is_some_and(ControlHandle::is_alive)
        };
        for member in state.members.values_mut().filter(is_there) {
            let its = notifications.iter().filter(|(host, _)| member.host == Some(*host));
            member.notifications.extend(its.map(|(_, notifications)| (uuid, notifications.code())));
        }
        let concerned = state.concerned();
        drop(state);
        notify(&concerned);
        Ok(())
    }

    fn set_host(&self, cntlid: u16, host: Option<HostId>, latch: &Latch) -> Result<(), Status> {
        let mut state = self.state.lock();
        if let Some(host) = host {
            // All hosts of a subsystem must use the same identifier size, because identifiers of 64
            // and 128 bits cannot be compared.
            let registrants = state.all.values().flat_map(Reservations::registrants);
            let others = state.members.iter().filter(|(other, _)| **other != cntlid);
            let others = others.filter_map(|(_, member)| member.host);
            let mut known = registrants.map(|(host, _)| host).chain(others);
            if known.any(|known| known.is_extended() != host.is_extended()) {
                return Err(Status::HOST_ID_INCONSISTENT_FORMAT.with_dnr());
            }
        }
        let Some(member) = state.members.get_mut(&cntlid) else { return Ok(()) };
        let before = std::mem::replace(&mut member.host, host);
        let changed: Vec<_> = state
            .all
            .iter()
            .filter(|(_, its)| its.access(before) != its.access(host))
            .map(|(uuid, _)| *uuid)
            .collect();
        for uuid in changed {
            state.change(cntlid, Change { uuid, aborts: false, latch: latch.clone() });
        }
        let concerned = state.concerned();
        drop(state);
        notify(&concerned);
        Ok(())
    }

    fn persist(&self, uuids: &[Uuid], persistent: bool) -> Result<(), Status> {
        if persistent && self.state_file.is_none() {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let change = |all: &mut AllReservations| {
            for uuid in uuids {
                let mut its = all.get(uuid).cloned().unwrap_or_default();
                its.persistent = persistent;
                put(all, *uuid, its);
            }
        };
        self.write_with(change)?;
        let mut state = self.state.lock();
        change(&mut state.all);
        state.has_changed = true;
        Ok(())
    }

    /// Writes the reservations, with a change, to the file. The state in memory is not changed.
    /// Called only by the subsystem's thread.
    fn write_with(&self, change: impl FnOnce(&mut AllReservations)) -> Result<(), Status> {
        let Some(file) = &self.state_file else { return Ok(()) };
        let mut all = self.state.lock().all.clone();
        change(&mut all);
        file.write(&all).map_err(|error| {
            tracing::error!(%error, "cannot write the reservation file");
            Status::INTERNAL
        })
    }
}

/// Notifies control planes of a change in the subsystem.
fn notify(concerned: &[ControlHandle]) {
    for control in concerned {
        control.notify(Notice::Shared);
    }
}

fn put(all: &mut AllReservations, uuid: Uuid, reservations: Reservations) {
    if reservations.is_untouched() {
        all.remove(&uuid);
    } else {
        all.insert(uuid, reservations);
    }
}

impl Member {
    /// Controller identifier (CNTLID).
    #[must_use]
    pub fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// Controller identifiers of all members.
    pub(crate) fn controllers(&self) -> Vec<u16> {
        self.shared.state.lock().members.keys().copied().collect()
    }

    /// Sets the control plane of the member's controller, which is notified of changes.
    pub(crate) fn attach(&self, control: ControlHandle) {
        self.with(|member| member.control = Some(control));
    }

    fn with<T: Default>(&self, act: impl FnOnce(&mut MemberState) -> T) -> T {
        self.shared.state.lock().members.get_mut(&self.cntlid).map(act).unwrap_or_default()
    }

    /// Starts a new controller. The start of the subsystem's first controller counts as a power
    /// cycle: reservations without Persist Through Power Loss are dropped.
    pub(crate) fn power_on(&self) {
        let mut state = self.shared.state.lock();
        if std::mem::replace(&mut state.is_in_use, true) {
            return;
        }
        let before = std::mem::take(&mut state.all);
        let after = before.clone().into_iter().map(|(uuid, its)| (uuid, its.after_power_loss()));
        after.for_each(|(uuid, its)| put(&mut state.all, uuid, its));
        if let Some(file) = &self.shared.state_file
            && state.all != before
            && let Err(error) = file.write(&state.all)
        {
            tracing::error!(%error, "cannot write the reservation file");
        }
    }

    /// Continues a controller that another process has served. Reads the file again, because that
    /// process may have changed it after this process first read it.
    pub(crate) fn resume(&self) {
        let mut state = self.shared.state.lock();
        state.is_in_use = true;
        if let Some(file) = &self.shared.state_file
            && !state.has_changed
        {
            match file.read() {
                Ok(all) => state.all = all,
                Err(error) => {
                    tracing::error!(%error, "cannot read the reservation file again");
                }
            }
        }
    }

    /// Access rights of the controller to a namespace.
    pub(crate) fn access(&self, nsid: u32, uuid: &Uuid) -> Access {
        let state = self.shared.state.lock();
        let member = state.members.get(&self.cntlid);
        let host = member.and_then(|member| member.host);
        let access = state.all.get(uuid).map_or(Access::ALL, |its| its.access(host));
        let group = self.ana_group(nsid);
        let ana = member.and_then(|member| member.ana.get(&group)).copied().unwrap_or_default();
        Access { ana, ..access }
    }

    /// Sets the initial ANA configuration: pairs of NSID and group for namespaces outside group 1,
    /// and states of groups that are not optimized. It must be called after
    /// [joining](Subsystem::join), before a controller is created. Invalid group identifiers are
    /// ignored.
    #[must_use]
    pub fn with_ana(
        self: Arc<Self>,
        groups: impl IntoIterator<Item = (u32, u32)>,
        states: impl IntoIterator<Item = (u32, AnaState)>,
    ) -> Arc<Self> {
        let is_one = |group: u32| (1..=MAX_ANA_GROUPS).contains(&group);
        let groups = groups.into_iter().filter(|(_, group)| is_one(*group)).collect();
        let _ = self.groups.set(groups);
        for (group, state) in states.into_iter().filter(|(group, _)| is_one(*group)) {
            self.set_ana_state(group, state);
        }
        self
    }

    /// ANA group of a namespace.
    pub(crate) fn ana_group(&self, nsid: u32) -> u32 {
        self.groups.get().and_then(|groups| groups.get(&nsid)).copied().unwrap_or(1)
    }

    /// State of an ANA group for the controller.
    pub(crate) fn ana_state(&self, group: u32) -> AnaState {
        self.with(|member| member.ana.get(&group).copied().unwrap_or_default())
    }

    /// Sets the state of an ANA group. The caller must notify the host and the I/O threads.
    pub(crate) fn set_ana_state(&self, group: u32, state: AnaState) {
        self.with(|member| member.ana.insert(group, state));
    }

    /// Host Identifier, if the host has set one.
    pub(crate) fn host(&self) -> Option<HostId> {
        self.with(|member| member.host)
    }

    /// Sets the Host Identifier of a controller without queues.
    pub(crate) fn set_host(&self, host: Option<HostId>) {
        self.with(|member| member.host = host);
    }

    /// Submits a job to the subsystem's thread.
    pub(crate) fn submit(&self, job: Job) {
        // If the subsystem's thread has ended, `send` drops the job, which releases its latch.
        let _ = self.jobs.send(job);
    }

    /// Takes the changes for the controller's I/O threads.
    pub(crate) fn take_changes(&self) -> Vec<Change> {
        self.with(|member| std::mem::take(&mut member.changes))
    }

    /// Takes the notifications for the host: namespace UUID and type.
    pub(crate) fn take_notifications(&self) -> Vec<(Uuid, u8)> {
        self.with(|member| std::mem::take(&mut member.notifications))
    }

    /// True if Persist Through Power Loss is supported.
    pub(crate) fn can_persist(&self) -> bool {
        self.shared.state_file.is_some()
    }

    /// Value of Persist Through Power Loss of a namespace.
    pub(crate) fn is_persistent(&self, uuid: &Uuid) -> bool {
        self.shared.state.lock().all.get(uuid).is_some_and(|its| its.persistent)
    }

    /// Reservation Status data structure of a namespace.
    ///
    /// # Errors
    /// Host Identifier Inconsistent Format.
    pub(crate) fn report(&self, uuid: &Uuid, extended: bool) -> Result<Vec<u8>, Status> {
        let state = self.shared.state.lock();
        let its = state.of(uuid);
        let own = state.members.get(&self.cntlid).and_then(|member| member.host);
        let mut hosts = its.registrants().map(|(host, _)| host).chain(own);
        if hosts.any(|host| host.is_extended() != extended) {
            return Err(Status::HOST_ID_INCONSISTENT_FORMAT.with_dnr());
        }
        let (mut list, mut count) = (Vec::new(), 0u16);
        for (host, rkey) in its.registrants() {
            let of_host = state.members.iter().filter(|(_, member)| member.host == Some(host));
            let mut cntlids: Vec<u16> = of_host.map(|(cntlid, _)| *cntlid).collect();
            if cntlids.is_empty() {
                cntlids.push(RegisteredController::UNKNOWN);
            }
            let rcsts = u8::from(its.is_holder(host));
            for cntlid in cntlids {
                count += 1;
                match host {
                    HostId::Short(hostid) => {
                        let one = RegisteredController {
                            cntlid,
                            rcsts,
                            hostid,
                            rkey,
                            ..RegisteredController::default()
                        };
                        list.extend_from_slice(one.as_bytes());
                    }
                    HostId::Extended(hostid) => {
                        let one = RegisteredControllerExtended {
                            cntlid,
                            rcsts,
                            hostid,
                            rkey,
                            ..RegisteredControllerExtended::default()
                        };
                        list.extend_from_slice(one.as_bytes());
                    }
                }
            }
        }
        let head = ReservationStatus {
            generation: its.generation.to_le_bytes(),
            rtype: its.kind().map_or(0, |kind| kind as u8),
            regctl: count.to_le_bytes(),
            ptpls: its.persistent.into(),
            ..ReservationStatus::default()
        };
        let mut page = head.as_bytes().to_vec();
        if extended {
            page.resize(EXTENDED_STATUS_HEAD, 0);
        }
        page.extend_from_slice(&list);
        Ok(page)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let gone = self.shared.state.lock().members.remove(&self.cntlid);
        // The member's changes must not be dropped under the lock, because that drops their
        // latches.
        drop(gone);
    }
}

#[cfg(test)]
mod tests;
