//! Features of a controller in a subsystem: Host Identifier, Reservation Notification Mask and
//! Reservation Persistence. Base 2.1, 5.1.25.

use super::admin_port::{Data, Executed, Outcome};
use super::commands::{AdminCommands, CommandEnvironment};
use super::io_queues::ended_notice;
use super::namespace_state::check_ana_state;
use crate::admin::features::host_identifier_bytes;
use crate::notice::Operation;
use crate::reservations::HostId;
use crate::subsystem::{Job, Member};
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{GetFeatures, SetFeatures};
use shadowbell_spec::feature::{Capabilities, Select, fid};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::status::Status;
use std::sync::Arc;

const INVALID: Status = Status::INVALID_FIELD.with_dnr();

/// Dword 11 of Reservation Persistence: Persist Through Power Loss.
const PTPL: u32 = 1;

/// Features of this module. The second value is true for features with namespace scope.
const SHARED_FEATURES: [(u8, bool); 3] = [
    (fid::HOST_IDENTIFIER, false),
    (fid::RESERVATION_NOTIFICATION_MASK, true),
    (fid::RESERVATION_PERSISTENCE, true),
];

fn is_of_namespace(fid: u8) -> Option<bool> {
    SHARED_FEATURES.iter().find(|(its, _)| *its == fid).map(|(_, is_of)| *is_of)
}

/// NSIDs and UUIDs of the namespaces that a command addresses.
fn namespaces(
    env: &CommandEnvironment<'_>,
    nsid: u32,
    allows_all: bool,
) -> Result<Vec<(u32, [u8; 16])>, Status> {
    let identified = env.cx.identified();
    let one = |nsid| identified.get(nsid).map(|namespace| (nsid, namespace.uuid()));
    match nsid {
        NSID_ALL if allows_all => {
            Ok(identified.iter().map(|namespace| (namespace.nsid(), namespace.uuid())).collect())
        }
        _ if nsid == 0 || nsid > identified.highest() => {
            Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr())
        }
        _ => one(nsid).map(|one| vec![one]).ok_or(INVALID),
    }
}

impl AdminCommands {
    /// Executes Set Features; `None` if the feature is not one of this module.
    pub(super) fn set_shared_feature(
        &mut self,
        env: &mut CommandEnvironment<'_>,
        sqe: &Sqe,
        data: Option<&Result<Vec<u8>, Status>>,
    ) -> Option<Executed> {
        let command = SetFeatures::decode(sqe);
        let is_of_namespace = is_of_namespace(command.fid)?;
        Some(match env.cx.config.member.clone() {
            None => Err(INVALID),
            Some(_) if command.sv => Err(Status::FEATURE_NOT_SAVEABLE.with_dnr()),
            Some(member) if is_of_namespace => self.set_of_namespaces(env, sqe, &command, &member),
            Some(member) => set_host(env, sqe, &command, data, &member),
        })
    }

    fn set_of_namespaces(
        &mut self,
        env: &mut CommandEnvironment<'_>,
        sqe: &Sqe,
        command: &SetFeatures,
        member: &Arc<Member>,
    ) -> Executed {
        let chosen = namespaces(env, sqe.nsid, true)?;
        chosen.iter().try_for_each(|(nsid, _)| check_ana_state(env.cx, *nsid))?;
        if command.fid == fid::RESERVATION_NOTIFICATION_MASK {
            for (nsid, _) in chosen {
                self.reservations.set_mask(nsid, command.cdw11);
            }
            return Ok(Outcome::Done(0));
        }
        let persistent = command.cdw11 & PTPL != 0;
        if persistent && !member.can_persist() {
            return Err(INVALID);
        }
        let operation = Operation::Feature { cid: sqe.cid };
        let latch = env.cx.latch(ended_notice(env.lifecycle.generation, operation));
        let uuids = chosen.into_iter().map(|(_, uuid)| uuid).collect();
        let member = Arc::clone(member);
        let job = Job::Persist { uuids, persistent, latch };
        env.deferred.callbacks.push(Box::new(move || member.submit(job)));
        Ok(Outcome::Pending)
    }

    /// Executes Get Features; `None` if the feature is not one of this module.
    pub(super) fn get_shared_feature(
        &mut self,
        env: &mut CommandEnvironment<'_>,
        sqe: &Sqe,
    ) -> Option<Executed> {
        let command = GetFeatures::decode(sqe);
        let is_of_namespace = is_of_namespace(command.fid)?;
        let member = env.cx.config.member.clone();
        Some(match (member, Select::from_bits(command.sel)) {
            (None, _) | (_, None) => Err(INVALID),
            (Some(_), Some(Select::SupportedCapabilities)) => {
                let capabilities = Capabilities::new()
                    .with_namespace_specific(is_of_namespace)
                    .with_changeable(true);
                Ok(Outcome::Done(capabilities.into_bits()))
            }
            (Some(member), Some(select)) => {
                self.get_value(env, sqe, &command, (&member, select == Select::Current))
            }
        })
    }

    fn get_value(
        &self,
        env: &CommandEnvironment<'_>,
        sqe: &Sqe,
        command: &GetFeatures,
        (member, is_current): (&Member, bool),
    ) -> Executed {
        if command.fid == fid::HOST_IDENTIFIER {
            let len = host_identifier_bytes(command.cdw11);
            let host = member.host().filter(|_| is_current);
            let bytes = host.map_or_else(|| vec![0; len], HostId::bytes);
            if bytes.len() != len {
                return Err(Status::HOST_ID_INCONSISTENT_FORMAT.with_dnr());
            }
            return Ok(Outcome::Data(Data { bytes, len, dw0: 0, log: None }));
        }
        let (nsid, uuid) = namespaces(env, sqe.nsid, false)?.pop().ok_or(INVALID)?;
        check_ana_state(env.cx, nsid)?;
        let value = if command.fid == fid::RESERVATION_PERSISTENCE {
            u32::from(member.is_persistent(&uuid))
        } else {
            self.reservations.mask(nsid)
        };
        Ok(Outcome::Done(if is_current { value } else { 0 }))
    }
}

/// Sets the Host Identifier, which can change access rights by reservations. The command completes
/// when all I/O threads have applied the new rights.
fn set_host(
    env: &mut CommandEnvironment<'_>,
    sqe: &Sqe,
    command: &SetFeatures,
    data: Option<&Result<Vec<u8>, Status>>,
    member: &Arc<Member>,
) -> Executed {
    let data = data.ok_or(INVALID)?.as_ref().map_err(|status| *status)?;
    let bytes = data.get(..host_identifier_bytes(command.cdw11)).ok_or(INVALID)?;
    let (cntlid, host) = (member.cntlid(), HostId::from_bytes(bytes));
    let operation = Operation::Feature { cid: sqe.cid };
    let latch = env.cx.latch(ended_notice(env.lifecycle.generation, operation));
    let member = Arc::clone(member);
    let job = Job::SetHost { cntlid, host, latch };
    env.deferred.callbacks.push(Box::new(move || member.submit(job)));
    Ok(Outcome::Pending)
}
