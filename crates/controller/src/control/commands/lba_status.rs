//! Checks and completion of Get LBA Status.

use super::{AdminCommands, CommandEnvironment};
use crate::context::Context;
use crate::control::admin::{AdminPort, Data, Executed, Outcome};
use crate::control::ana_access;
use crate::control_thread::TakesTurns;
use crate::lba_status::{self, LbaStatusServer, Question};
use shadowbell_spec::Sqe;
use shadowbell_spec::admin as decode;
use shadowbell_spec::lba_status::{LbaStatusDescriptor, LbaStatusList, atype};
use shadowbell_spec::status::Status;
use std::sync::Arc;

impl AdminCommands {
    /// Completes a Get LBA Status command.
    pub(in crate::control) fn lba_status_ended(
        &mut self,
        cx: &Context,
        port: &mut AdminPort,
        cid: u16,
    ) {
        let Some((sqe, bytes)) = cx.lba_status.take(cid) else { return };
        if cx.serving().get(sqe.nsid).is_none() {
            return port.fail(cid, Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(), sqe.nsid);
        }
        let len = decode::GetLbaStatus::decode(&sqe).length() as usize;
        port.answer(sqe, Data { bytes, len, dw0: 0, log: None });
    }

    /// Checks and starts Get LBA Status. The disk is queried by `lba_status`, on its own turns.
    pub(super) fn get_lba_status(env: &mut CommandEnvironment<'_>, sqe: &Sqe) -> Executed {
        let command = decode::GetLbaStatus::decode(sqe);
        let serving = env.cx.visible();
        let namespace = match serving.get(sqe.nsid) {
            Some(namespace) => namespace,
            // Valid and inactive NSID.
            None if (1..=serving.highest()).contains(&sqe.nsid) => {
                return Err(Status::INVALID_FIELD.with_dnr());
            }
            None => return Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr()),
        };
        ana_access::check(env.cx, sqe.nsid)?;
        let length = command.length();
        let list = size_of::<LbaStatusList>() as u64;
        if length > 4096 << env.cx.config.mdts || length < list {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let end = match command.rl {
            0 => Some(namespace.blocks()).filter(|blocks| command.slba < *blocks),
            blocks => command.slba.checked_add(blocks.into()),
        };
        let end = end.filter(|end| *end <= namespace.blocks());
        let end = end.ok_or(Status::LBA_OUT_OF_RANGE.with_dnr())?;
        let room = ((length - list) / size_of::<LbaStatusDescriptor>() as u64) as usize;
        let question = Question {
            sqe: *sqe,
            generation: env.lifecycle.generation,
            disk: Arc::clone(namespace.disk()),
            block_shift: namespace.block_shift(),
            slba: command.slba,
            end,
            room,
        };
        match command.atype {
            atype::ALLOCATED => {}
            // Blocks that the host marked. Other unreadable blocks are unknown, even after a scan.
            atype::SCAN_UNRECOVERABLE | atype::UNRECOVERABLE => {
                let marks = env.cx.shared.uncorrectable();
                let bytes = lba_status::uncorrectable(&marks, sqe.nsid, &question);
                let len = length as usize;
                return Ok(Outcome::Data(Data { bytes, len, dw0: 0, log: None }));
            }
            _ => return Err(Status::INVALID_FIELD.with_dnr()),
        }
        if !env.cx.lba_status.has_room() {
            return Ok(Outcome::NotYet);
        }
        if env.cx.lba_status.begin(question) {
            let server: Arc<dyn TakesTurns> = Arc::<LbaStatusServer>::clone(&env.cx.lba_status);
            let control = env.cx.pool.control().clone();
            let schedule = move || control.schedule(Arc::downgrade(&server));
            env.deferred.callbacks.push(Box::new(schedule));
        }
        Ok(Outcome::Later)
    }
}
