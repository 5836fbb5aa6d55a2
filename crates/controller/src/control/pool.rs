//! Commands of a namespace pool: Namespace Management, Namespace Attachment, Format NVM and
//! Sanitize. The [pool](crate::NamespacePool) executes them one at a time.

use super::admin_port::{AdminPort, Data, Executed, Outcome};
use super::lifecycle_state::Deferred;
use crate::admin::identify::{self, CNTLID};
use crate::admin::{namespace_management, sanitize};
use crate::context::Context;
use crate::pool::{PoolAct, PoolCallback, PoolOrder, PoolState};
use shadowbell_spec::Sqe;
use shadowbell_spec::admin as decode;
use shadowbell_spec::opcode::AdminOpcode;
use shadowbell_spec::status::Status;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;

/// State of the pool's commands.
#[derive(Debug, Default)]
pub(super) struct PoolCommands {
    /// True while the pool executes a command.
    in_progress: bool,
    /// UUID of the namespace whose creation was started last. After a crash, the next process
    /// repeats the creation with the same UUID, so that no second namespace is created.
    creating: Option<[u8; 16]>,
    /// Sanitize command that the pool is starting.
    sanitizing: Option<decode::Sanitize>,
}

impl PoolCommands {
    /// True if the pool executes no command.
    pub(super) fn is_idle(&self) -> bool {
        !self.in_progress
    }

    pub(super) fn save(&self) -> Option<[u8; 16]> {
        self.creating
    }

    pub(super) fn restore(creating: Option<[u8; 16]>) -> Self {
        Self { creating, ..Self::default() }
    }

    /// UUID for a namespace to create. If the command is repeated after a crash, the UUID is that
    /// of the first attempt.
    fn uuid(&mut self, is_repeat: bool) -> [u8; 16] {
        let known = self.creating.filter(|_| is_repeat);
        *self.creating.insert(known.unwrap_or_else(random_uuid))
    }
}

/// Random UUID of version 4 (RFC 9562, 5.4). It need not be unpredictable, so the random hash keys
/// of the standard library suffice.
fn random_uuid() -> [u8; 16] {
    let random = || RandomState::new().hash_one(0_u8).to_be_bytes();
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&random());
    uuid[8..].copy_from_slice(&random());
    uuid[6] = uuid[6] & 0x0f | 0x40;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

/// Number of bytes that a pool command transfers from the host.
pub(super) fn data_length(sqe: &Sqe) -> usize {
    match AdminOpcode::try_from(sqe.opcode) {
        Ok(AdminOpcode::NamespaceManagement) => namespace_management::data_length(sqe),
        Ok(AdminOpcode::NamespaceAttachment) => namespace_management::DATA,
        _ => 0,
    }
}

/// Checks that the current sanitize operation allows a command. The error is the command's status.
pub(super) fn barrier(cx: &Context, opcode: AdminOpcode) -> Result<(), Status> {
    let Some(pool) = cx.config.pool.as_ref().filter(|_| !sanitize::allows(opcode)) else {
        return Ok(());
    };
    pool.state().sanitize.barrier().map_or(Ok(()), |status| Err(status.with_dnr()))
}

/// Executes Identify, with the structures that a pool adds or changes.
pub(super) fn identify(
    cx: &Context,
    command: &decode::Identify,
    nsid: u32,
    plain: impl FnOnce() -> Executed,
) -> Executed {
    let Some(pool) = &cx.config.pool else { return plain() };
    let (state, namespaces) = (pool.state(), cx.identified());
    if let Some(found) = identify::with_pool(command, nsid, (&namespaces, &state)) {
        let bytes = found?.to_vec();
        return Ok(Outcome::Data(Data { len: bytes.len(), bytes, dw0: 0, log: None }));
    }
    let mut executed = plain()?;
    if let Outcome::Data(Data { bytes, .. }) = &mut executed {
        identify::amend_with_pool(bytes, command, nsid, (&namespaces, &state));
    }
    Ok(executed)
}

/// Controller state that a pool command needs.
pub(super) struct OrderContext<'a> {
    pub(super) cx: &'a Context,
    pub(super) port: &'a AdminPort,
    pub(super) generation: u64,
    pub(super) deferred: &'a mut Deferred,
}

impl PoolCommands {
    /// Ends the pool command in progress. Returns it if it is a Sanitize command.
    pub(super) fn ended(&mut self) -> Option<decode::Sanitize> {
        self.in_progress = false;
        self.sanitizing.take()
    }

    /// Executes Namespace Management, Namespace Attachment, Format NVM or Sanitize.
    pub(super) fn order(
        &mut self,
        env: OrderContext<'_>,
        (opcode, sqe): (AdminOpcode, &Sqe),
        data: Option<Result<Vec<u8>, Status>>,
    ) -> Executed {
        let cx = env.cx;
        let Some(pool) = &cx.config.pool else { return Err(Status::INVALID_OPCODE.with_dnr()) };
        let data = data.transpose()?;
        if self.in_progress {
            return Ok(Outcome::NotYet);
        }
        let (state, identified) = (pool.state(), cx.identified());
        let is_given = |nsid: u32| identified.get(nsid).is_some() && state.get(nsid).is_none();
        let given = identified.iter().any(|namespace| is_given(namespace.nsid()));
        let is_repeat = env.port.checkpoint.is_replayed();
        let act = match opcode {
            AdminOpcode::NamespaceManagement => {
                let uuid = self.uuid(is_repeat);
                let known = state.namespaces.iter().find(|namespace| namespace.uuid == uuid);
                if let Some(known) = known.filter(|_| is_repeat) {
                    return Ok(Outcome::Done(known.nsid));
                }
                let of = (uuid, is_given(sqe.nsid));
                let act = namespace_management::management(sqe, data.as_deref(), &state, of);
                match act {
                    // The process that died has already deleted the namespace.
                    Err(status) if is_repeat && status.code() == NO_SUCH_NAMESPACE => {
                        return Ok(Outcome::Done(0));
                    }
                    act => act?,
                }
            }
            AdminOpcode::NamespaceAttachment => {
                let of = (CNTLID, is_given(sqe.nsid), is_repeat);
                namespace_management::attachment(sqe, data.as_deref(), &state, of)?
            }
            AdminOpcode::FormatNvm => {
                namespace_management::format(sqe, &state, (is_given(sqe.nsid), given))?
            }
            // The process that died has already started the operation.
            _ if is_repeat && state.sanitize.command == decode::Sanitize::decode(sqe) => {
                return Ok(Outcome::Done(0));
            }
            _ => sanitize::sanitize(sqe, &state, given)?,
        };
        self.in_progress = true;
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
        let done = PoolCallback {
            control: cx.control.clone(),
            generation: env.generation,
            cid: sqe.cid,
            is_notified: false,
        };
        let (pool, order) = (Arc::clone(pool), PoolOrder { act, is_repeat });
        // The pool gets the order from a callback, which runs after the control plane's lock was
        // released and a checkpoint was stored. So if the process dies while the pool executes the
        // command, the checkpoint contains the command and the next process repeats it.
        env.deferred.callbacks.push(Box::new(move || pool.order(order, done)));
        Ok(Outcome::Pending)
    }
}

/// Status of a command for a namespace that does not exist.
const NO_SUCH_NAMESPACE: Status = Status::INVALID_NAMESPACE_OR_FORMAT;

/// Namespaces that are not served while the pool executes the command, each with the status of I/O
/// commands for it.
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
