//! Reservations in command execution: conflict checks and the reservation commands.
//!
//! While a controller has full access to all of its namespaces, reads and writes are not checked. A
//! namespace with restricted access routes all of its commands through the slow path, as
//! uncorrectable blocks do. Commands that change reservations are sent to the
//! [subsystem](crate::subsystem), which reports their end.

use super::copy::ParsedCopy;
use super::engine::{Engine, Started};
use super::in_flight::{InFlight, Kind, Owner};
use super::namespace::{SharedNamespace, index_of};
use super::quota::cost;
use super::resolve::{read_list, resolve_flagged};
use crate::notice::{Latch, Notice};
use crate::queue::Permit;
use crate::reservations::{Access, Action};
use crate::subsystem::{Command, Job};
use shadowbell_memory::Segments;
use shadowbell_spec::Sqe;
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::reservation::{
    ReservationAction, ReservationRegister, ReservationReport, ReservationType,
};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::status::Status;
use std::sync::atomic::{AtomicU64, Ordering};

const INVALID: Status = Status::INVALID_FIELD.with_dnr();

/// Next ticket, which identifies an in-flight reservation command in the process.
static NEXT_TICKET: AtomicU64 = AtomicU64::new(1);

/// True if a command needs an access right that the controller does not have.
fn lacks(op: NvmOpcode, access: Access) -> bool {
    match op {
        NvmOpcode::Read
        | NvmOpcode::Compare
        | NvmOpcode::Verify
        | NvmOpcode::ZoneManagementReceive => !access.read,
        NvmOpcode::Flush
        | NvmOpcode::Write
        | NvmOpcode::WriteUncorrectable
        | NvmOpcode::WriteZeroes
        | NvmOpcode::DatasetManagement
        | NvmOpcode::ZoneManagementSend
        | NvmOpcode::ZoneAppend => !access.write,
        // Copy involves several namespaces (see `copy_refusal`); reservation commands check rights
        // themselves.
        _ => false,
    }
}

/// Status of a refused command. An ANA state that refuses it has precedence, so that a controller
/// without access to the namespace learns nothing about reservations.
fn refused(op: NvmOpcode, access: Access) -> Option<Status> {
    let conflict = || lacks(op, access).then_some(Status::RESERVATION_CONFLICT.with_dnr());
    access.ana.refusal().or_else(conflict)
}

impl Engine {
    /// Status of a command that is refused because of a reservation or the ANA state.
    #[inline]
    pub(super) fn refusal(&self, op: NvmOpcode, sqe: &Sqe) -> Option<Status> {
        if self.reservations.is_restricted { self.look_for_refusal(op, sqe) } else { None }
    }

    #[cold]
    fn look_for_refusal(&self, op: NvmOpcode, sqe: &Sqe) -> Option<Status> {
        // A Flush of all namespaces is refused if it may not flush one of them.
        if op == NvmOpcode::Flush && sqe.nsid == NSID_ALL {
            return self.namespaces.iter().find_map(|namespace| refused(op, namespace.access()));
        }
        let namespace = (sqe.nsid as usize).checked_sub(1).and_then(|at| self.namespaces.get(at));
        namespace.and_then(|namespace| refused(op, namespace.access()))
    }

    /// Status of a Copy that is refused because of a reservation or the ANA state.
    pub(super) fn copy_refusal(&self, copy: &ParsedCopy) -> Option<Status> {
        if !self.reservations.is_restricted {
            return None;
        }
        let refused = |op, at: usize| refused(op, self.namespaces[at].access());
        refused(NvmOpcode::Write, copy.namespace)
            .or_else(|| copy.sources().find_map(|(at, ..)| refused(NvmOpcode::Read, at)))
    }

    /// Recomputes whether access to any namespace is restricted.
    pub(super) fn review_restrictions(&mut self) {
        let mut all = self.namespaces.iter().map(|namespace| namespace.access());
        self.reservations.is_restricted = all.any(Access::restricts);
    }

    /// Applies a change of the controller's access to a namespace. The latch is released when the
    /// commands in flight on that namespace have ended; they are aborted if `aborts` is true.
    pub(crate) fn review_access(&mut self, uuid: &[u8; 16], aborts: bool, latch: &Latch) {
        let of = |shared: &SharedNamespace| shared.uuid == *uuid;
        let found = self.namespaces.iter().position(|ns| ns.shared().is_some_and(of));
        let Some(index) = found else { return };
        self.namespaces[index].review_access();
        self.review_restrictions();
        let nsid = index as u32 + 1;
        let (copies, reservations) = (&self.copies, &self.reservations);
        let mut concerned = Vec::new();
        self.in_flight.for_each(|tag, entry| {
            let is_command = matches!(entry.owner, Owner::Command { .. } | Owner::Exclusive { .. });
            let is_there = entry.nsid == nsid || entry.nsid == NSID_ALL || copies.uses(tag, index);
            // Reservation commands are excluded: two that wait for each other would deadlock.
            if is_command && is_there && !reservations.is_one(tag) {
                concerned.push(tag);
            }
        });
        for tag in concerned {
            if aborts {
                self.cancel_command(tag);
            }
            self.in_flight.wait_for(tag, latch);
        }
    }

    /// Executes Reservation Register, Acquire, Release or Report.
    #[cold]
    pub(super) fn reservation(
        &mut self,
        op: NvmOpcode,
        sqe: &Sqe,
        sq: usize,
        permit: Permit,
    ) -> Started {
        let shared = index_of(&self.namespaces, sqe.nsid).and_then(|index| {
            let shared = self.namespaces[index].shared().cloned();
            Ok((index, shared.ok_or(Status::INVALID_OPCODE.with_dnr())?))
        });
        let (index, shared) = match shared {
            Ok(found) => found,
            Err(status) => return Started::Failed(permit, status),
        };
        self.budget -= cost::of_command(4096);
        if op == NvmOpcode::ReservationReport {
            return match self.report(sqe, &shared) {
                Ok(()) => {
                    self.count(Kind::Other);
                    Started::DoneLong(permit)
                }
                Err(status) => Started::Failed(permit, status),
            };
        }
        let Some((control, _)) = &self.exclusive.with else {
            return Started::Failed(permit, Status::INTERNAL);
        };
        let control = control.clone();
        let command = match self.reservation_command(op, sqe, &shared) {
            Ok(command) => command,
            Err(status) => return Started::Failed(permit, status),
        };
        let ticket = NEXT_TICKET.fetch_add(1, Ordering::Relaxed);
        let tag = self.in_flight.next_tag();
        let owner = Owner::Command { sq, cid: sqe.cid, permit };
        let entry = InFlight::new(owner, index, Kind::Other).at(sqe.nsid, 0);
        self.in_flight.insert(tag, entry.of_requests());
        self.last_tag = tag;
        self.reservations.begin(ticket, tag);
        let ended = Notice::ReservationEnded { ticket, status: Status::SUCCESS };
        let latch = Latch::new(control, ended);
        shared.member.submit(Job::Act { uuid: shared.uuid, command, latch });
        self.review_quota();
        Started::Pending
    }

    /// Decodes a command and reads its keys from the host.
    fn reservation_command(
        &mut self,
        op: NvmOpcode,
        sqe: &Sqe,
        shared: &SharedNamespace,
    ) -> Result<Command, Status> {
        let host = shared.member.host().ok_or(Status::HOST_ID_NOT_INITIALIZED.with_dnr())?;
        let mut keys = [0u8; 16];
        let len = if op == NvmOpcode::ReservationRelease { 8 } else { 16 };
        let list = &mut keys[..len];
        read_list(&self.view, sqe, self.limits.page_size, &mut self.scratch, list)?;
        let (key, other) = keys.split_at(8);
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let (key, other) = (number(key), number(other));
        let (mut persistent, mut aborts) = (None, false);
        let action = if op == NvmOpcode::ReservationRegister {
            let command = ReservationRegister::decode(sqe);
            persistent = match command.cptpl {
                0 => None,
                2 => Some(false),
                3 => Some(true),
                _ => return Err(INVALID),
            };
            let present = (!command.iekey).then_some(key);
            match command.rrega {
                ReservationRegister::REGISTER => Action::Register { key: other },
                ReservationRegister::UNREGISTER => Action::Unregister { key: present },
                ReservationRegister::REPLACE => Action::Replace { key: present, new: other },
                _ => return Err(INVALID),
            }
        } else {
            let command = ReservationAction::decode(sqe);
            // Base 2.1: IEKEY is not supported for Acquire and Release.
            if command.iekey {
                return Err(INVALID);
            }
            if op == NvmOpcode::ReservationRelease {
                match command.action {
                    ReservationAction::RELEASE => Action::Release { key, kind: command.rtype },
                    ReservationAction::CLEAR => Action::Clear { key },
                    _ => return Err(INVALID),
                }
            } else {
                let kind = ReservationType::from_bits(command.rtype).ok_or(INVALID)?;
                aborts = command.action == ReservationAction::PREEMPT_AND_ABORT;
                match command.action {
                    ReservationAction::ACQUIRE => Action::Acquire { key, kind },
                    ReservationAction::PREEMPT | ReservationAction::PREEMPT_AND_ABORT => {
                        Action::Preempt { key, of: other, kind }
                    }
                    _ => return Err(INVALID),
                }
            }
        };
        Ok(Command { host, action, persistent, aborts })
    }

    /// Executes Reservation Report. The host buffer beyond the report is left unchanged.
    fn report(&mut self, sqe: &Sqe, shared: &SharedNamespace) -> Result<(), Status> {
        let command = ReservationReport::decode(sqe);
        let len = usize::try_from(command.length()).unwrap_or(usize::MAX);
        if len > self.limits.max_transfer {
            return Err(INVALID);
        }
        let report = shared.member.report(&shared.uuid, command.eds)?;
        let mut data = Segments::new();
        resolve_flagged(&self.view, sqe, len, self.limits.page_size, true, &mut data)?;
        data.write_from(0, &report[..report.len().min(len)]).ok_or(Status::INTERNAL)
    }

    /// Ends the command of this ticket, which the subsystem has executed.
    pub(crate) fn reservation_ended(&mut self, ticket: u64, status: Status) {
        if let Some(tag) = self.reservations.end(ticket)
            && !status.is_success()
        {
            self.in_flight.fail(tag, status);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_that_commands_need() {
        let none = Access { read: false, write: false, ..Access::ALL };
        let reads = Access { read: true, write: false, ..Access::ALL };
        let writes = Access { read: false, write: true, ..Access::ALL };
        let needs = |access| {
            let all = NvmOpcode::ALL.iter().copied();
            all.filter(|op| lacks(*op, access)).map(u8::from).collect::<Vec<u8>>()
        };
        assert!(needs(Access::ALL).is_empty());
        assert_eq!(needs(writes), [0x02, 0x05, 0x0c, 0x7a]);
        assert_eq!(needs(reads), [0x00, 0x01, 0x04, 0x08, 0x09, 0x79, 0x7d]);
        assert_eq!(needs(none).len(), 11);
    }
}
