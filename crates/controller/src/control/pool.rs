//! Namespaces that a host makes, and what it erases of them: the commands, and what follows from
//! how they end. They are carried out by the [pool](crate::NamespacePool), one at a time.

use super::admin::{AdminPort, Data, Executed, Outcome};
use super::deferred::Deferred;
use crate::admin::identify::CNTLID;
use crate::admin::{format, identify_pool, namespace_management, sanitize};
use crate::context::Context;
use crate::pool::{PoolAct, PoolDone, PoolOrder, PoolState};
use shadowbell_spec::Sqe;
use shadowbell_spec::admin as decode;
use shadowbell_spec::opcode::AdminOpcode;
use shadowbell_spec::status::Status;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

/// What the commands keep between them.
#[derive(Debug, Default)]
pub(super) struct PoolCommands {
    /// The pool carries something out.
    under_way: bool,
    /// The UUID of the namespace that a creation has begun with last. A process that goes on for
    /// this one orders the same again, and gets no second namespace.
    creating: Option<[u8; 16]>,
    /// What the pool has in hand is the beginning of this operation.
    sanitizing: Option<decode::Sanitize>,
}

impl PoolCommands {
    /// Whether the pool has nothing in hand.
    pub(super) fn is_quiet(&self) -> bool {
        !self.under_way
    }

    pub(super) fn save(&self) -> Option<[u8; 16]> {
        self.creating
    }

    pub(super) fn restore(creating: Option<[u8; 16]>) -> Self {
        Self { creating, ..Self::default() }
    }

    /// The UUID for a namespace that is to be created.
    fn uuid(&mut self, is_again: bool) -> [u8; 16] {
        let known = self.creating.filter(|_| is_again);
        *self.creating.insert(known.unwrap_or_else(random_uuid))
    }
}

/// A UUID of version 4 (RFC 9562, 5.4): nobody has to be unable to guess it, so the keys that the
/// standard library has from the system are good enough.
fn random_uuid() -> [u8; 16] {
    let random = || RandomState::new().hash_one(0_u8).to_be_bytes();
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&random());
    uuid[8..].copy_from_slice(&random());
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

/// How many bytes such a command takes from the host.
pub(super) fn data_length(sqe: &Sqe) -> usize {
    match AdminOpcode::try_from(sqe.opcode) {
        Ok(AdminOpcode::NamespaceManagement) => namespace_management::data_length(sqe),
        Ok(AdminOpcode::NamespaceAttachment) => namespace_management::DATA,
        _ => 0,
    }
}

/// Whether a sanitize operation keeps the command from being carried out.
pub(super) fn barrier(cx: &Context, opcode: AdminOpcode) -> Result<(), Status> {
    let Some(pool) = cx.config.pool.as_ref().filter(|_| !sanitize::allows(opcode)) else {
        return Ok(());
    };
    pool.state().sanitize.barrier().map_or(Ok(()), |status| Err(status.with_dnr()))
}

/// Identify, with what a pool has to say.
pub(super) fn identify(
    cx: &Context,
    command: &decode::Identify,
    nsid: u32,
    plain: impl FnOnce() -> Executed,
) -> Executed {
    let Some(pool) = &cx.config.pool else { return plain() };
    let (state, namespaces) = (pool.state(), cx.identified());
    if let Some(found) = identify_pool::identify(command, nsid, (&namespaces, &state)) {
        let bytes = found?.to_vec();
        return Ok(Outcome::Data(Data { len: bytes.len(), bytes, dw0: 0, log: None }));
    }
    let mut executed = plain()?;
    if let Outcome::Data(Data { bytes, .. }) = &mut executed {
        identify_pool::amend(bytes, command, nsid, (&namespaces, &state));
    }
    Ok(executed)
}

/// What an order needs to know of the controller, and where it goes.
pub(super) struct OrderContext<'a> {
    pub(super) cx: &'a Context,
    pub(super) port: &'a AdminPort,
    pub(super) generation: u64,
    pub(super) deferred: &'a mut Deferred,
}

impl PoolCommands {
    /// The pool has carried an order out, or has not.
    /// Which sanitize operation it was to begin, if it was that.
    pub(super) fn ended(&mut self) -> Option<decode::Sanitize> {
        self.under_way = false;
        self.sanitizing.take()
    }

    /// Namespace Management, Namespace Attachment, Format NVM, Sanitize.
    pub(super) fn order(
        &mut self,
        env: OrderContext<'_>,
        (opcode, sqe): (AdminOpcode, &Sqe),
        data: Option<Result<Vec<u8>, Status>>,
    ) -> Executed {
        let cx = env.cx;
        let Some(pool) = &cx.config.pool else { return Err(Status::INVALID_OPCODE.with_dnr()) };
        let data = data.transpose()?;
        if self.under_way {
            return Ok(Outcome::NotYet);
        }
        let (state, identified) = (pool.state(), cx.identified());
        let is_given = |nsid: u32| identified.get(nsid).is_some() && state.get(nsid).is_none();
        let given = identified.iter().any(|namespace| is_given(namespace.nsid()));
        let is_again = env.port.progress.is_replayed();
        let act = match opcode {
            AdminOpcode::NamespaceManagement => {
                let uuid = self.uuid(is_again);
                let known = state.namespaces.iter().find(|namespace| namespace.uuid == uuid);
                if let Some(known) = known.filter(|_| is_again) {
                    return Ok(Outcome::Done(known.nsid));
                }
                let of = (uuid, is_given(sqe.nsid));
                let act = namespace_management::management(sqe, data.as_deref(), &state, of);
                match act {
                    // It is gone already.
                    Err(status) if is_again && status.code() == GONE => {
                        return Ok(Outcome::Done(0));
                    }
                    act => act?,
                }
            }
            AdminOpcode::NamespaceAttachment => {
                let of = (CNTLID, is_given(sqe.nsid), is_again);
                namespace_management::attachment(sqe, data.as_deref(), &state, of)?
            }
            AdminOpcode::FormatNvm => format::format(sqe, &state, (is_given(sqe.nsid), given))?,
            // It has begun already.
            _ if is_again && state.sanitize.command == decode::Sanitize::decode(sqe) => {
                return Ok(Outcome::Done(0));
            }
            _ => sanitize::sanitize(sqe, &state, given)?,
        };
        self.under_way = true;
        self.sanitizing = match &act {
            PoolAct::Sanitize(command) if command.sanact != decode::Sanitize::EXIT_FAILURE => {
                Some(*command)
            }
            _ => None,
        };
        let barred = barred(&act, &state);
        let mut serving = cx.serving();
        for (nsid, status) in barred {
            serving = serving.barring(nsid, Some(status));
        }
        cx.serve(serving);
        let done = PoolDone {
            control: cx.control.clone(),
            generation: env.generation,
            cid: sqe.cid,
            is_told: false,
        };
        let (pool, order) = (Arc::clone(pool), PoolOrder { act, is_again });
        // Behind the lock, and when it is recorded that the command was begun.
        env.deferred.callbacks.push(Box::new(move || pool.order(order, done)));
        Ok(Outcome::Later)
    }
}

/// How a creation or a deletion of what is not there ends.
const GONE: Status = Status::INVALID_NAMESPACE_OR_FORMAT;

/// The namespaces that are not served until further notice, and how commands for them end.
fn barred(act: &PoolAct, state: &PoolState) -> Vec<(u32, Status)> {
    let attached = state.namespaces.iter().filter(|namespace| namespace.attached);
    let attached = attached.map(|namespace| namespace.nsid);
    match act {
        PoolAct::Format { nsids, .. } => attached
            .filter(|nsid| nsids.contains(nsid))
            .map(|nsid| (nsid, Status::FORMAT_IN_PROGRESS))
            .collect(),
        PoolAct::Sanitize(command) if command.sanact != decode::Sanitize::EXIT_FAILURE => {
            attached.map(|nsid| (nsid, Status::SANITIZE_IN_PROGRESS)).collect()
        }
        _ => Vec::new(),
    }
}
