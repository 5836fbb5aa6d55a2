//! The admin command set: which command does what.

pub(crate) mod events;
pub(crate) mod features;
pub(crate) mod full;
pub(crate) mod identify;
pub(crate) mod logs;
pub(crate) mod queue;
mod queues;

use crate::control::{Control, Deferred};
use crate::controller::{Event, Inner};
use crate::worker::message::{AbortReply, Message};
use features::Effect;
use logs::{ErrorRecord, Health, LogContext};
use shadowbell_memory::{Segments, View};
use shadowbell_spec::Sqe;
use shadowbell_spec::admin as decode;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::log::CriticalWarning;
use shadowbell_spec::opcode::AdminOpcode;
use shadowbell_spec::sqe::{Fuse, Psdt};
use shadowbell_spec::status::Status;
use std::sync::Arc;

/// Commands served in one turn, so that a host which never stops can not keep the thread that
/// carries it, and with it other hosts, waiting.
const TURN: u32 = 256;

/// Aborts that may be under way at once: ACL in Identify Controller, not zero-based here.
pub(crate) const ABORT_LIMIT: u32 = 4;

/// What became of an admin command.
pub(crate) enum Outcome {
    /// It is complete, with this in dword 0.
    Done(u32),
    /// It completes later, by [`Control::complete`].
    Later,
}

type Executed = Result<Outcome, Status>;

impl Control {
    /// Serves the admin queue for a turn.
    pub(crate) fn serve_admin(&mut self, inner: &Inner, deferred: &mut Deferred) {
        if self.admin.as_mut().is_some_and(queue::AdminQueue::lacks_cq) {
            return self.fail(
                "the admin completion queue is not in memory that the host shared",
                deferred,
            );
        }
        let mut turn = 0;
        while self.is_ready() && turn < TURN {
            let next = match self.admin.as_mut().map(queue::AdminQueue::next) {
                None => return,
                Some(Ok(next)) => next,
                Some(Err(_)) => {
                    self.raise(inner, AsyncEvent::INVALID_DOORBELL_VALUE);
                    None
                }
            };
            let Some(sqe) = next else {
                match self.admin.as_mut().map(|admin| {
                    admin.post(&inner.shared);
                    admin.rest()
                }) {
                    Some(Ok(false)) => {
                        turn += 1;
                        continue;
                    }
                    Some(Err(_)) => self.raise(inner, AsyncEvent::INVALID_DOORBELL_VALUE),
                    _ => {}
                }
                return;
            };
            turn += 1;
            match self.execute(inner, &sqe, deferred) {
                Ok(Outcome::Done(dw0)) => self.complete(inner, sqe.cid, Status::SUCCESS, dw0),
                Ok(Outcome::Later) => {}
                Err(status) => {
                    tracing::debug!(opcode = sqe.opcode, nsid = sqe.nsid, %status, "admin command");
                    self.log_error(0, sqe.cid, status, sqe.nsid, 0);
                    self.complete(inner, sqe.cid, status, 0);
                }
            }
        }
        deferred.again |= self.is_ready() && self.admin.is_some();
    }

    /// Completes an admin command.
    pub(crate) fn complete(&mut self, inner: &Inner, cid: u16, status: Status, dw0: u32) {
        if let Some(admin) = &mut self.admin {
            admin.complete(cid, status, dw0);
            admin.post(&inner.shared);
        }
    }

    /// Raises an asynchronous event.
    pub(crate) fn raise(&mut self, inner: &Inner, event: AsyncEvent) {
        if let Some(done) = self.events.raise(event) {
            self.complete(inner, done.cid, Status::SUCCESS, done.dw0);
        }
    }

    pub(crate) fn log_error(&mut self, sqid: u16, cid: u16, status: Status, nsid: u32, lba: u64) {
        self.errors.push(ErrorRecord { sqid, cid, status, nsid, lba });
    }

    fn execute(&mut self, inner: &Inner, sqe: &Sqe, deferred: &mut Deferred) -> Executed {
        #[cfg(feature = "faults")]
        if let Some(outcome) = crate::faults::of_admin(inner, sqe) {
            return outcome;
        }
        if sqe.fuse() != Fuse::Normal {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        // Admin commands of a PCIe controller use PRPs (Base 2.1, "Common Command Format").
        if sqe.psdt() != Psdt::Prp {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let unsupported = Err(Status::INVALID_OPCODE.with_dnr());
        let Ok(opcode) = AdminOpcode::try_from(sqe.opcode) else { return unsupported };
        match opcode {
            AdminOpcode::CreateIoCq => self.create_cq(inner, sqe),
            AdminOpcode::CreateIoSq => self.create_sq(inner, sqe),
            AdminOpcode::DeleteIoSq => self.delete_sq(inner, sqe, deferred),
            AdminOpcode::DeleteIoCq => self.delete_cq(inner, sqe, deferred),
            AdminOpcode::Identify => self.identify(inner, sqe),
            AdminOpcode::GetLogPage => self.get_log_page(inner, sqe),
            AdminOpcode::SetFeatures => self.set_features(inner, sqe),
            AdminOpcode::GetFeatures => self.get_features(inner, sqe),
            AdminOpcode::Abort => self.abort(inner, sqe),
            AdminOpcode::AsyncEventRequest => match self.events.request(sqe.cid)? {
                Some(done) => {
                    self.complete(inner, done.cid, Status::SUCCESS, done.dw0);
                    Ok(Outcome::Later)
                }
                None => Ok(Outcome::Later),
            },
            AdminOpcode::DoorbellBufferConfig if inner.config.shadow_doorbells => {
                self.doorbell_buffer_config(inner, sqe, deferred)
            }
            _ => unsupported,
        }
    }

    pub(crate) fn page_size(&self) -> usize {
        1 << (12 + u32::from(self.regs.cc.mps()))
    }

    /// Resolves the command's data pointer for `len` bytes.
    fn data(&self, sqe: &Sqe, len: usize, write: bool) -> Result<Segments, Status> {
        let view = View::new(Arc::clone(self.space.table()));
        let mut data = Segments::new();
        view.resolve_prps(sqe.prp1(), sqe.prp2(), len, self.page_size(), write, &mut data)
            .map_err(|e| e.status())?;
        Ok(data)
    }

    /// Gives the host `bytes`.
    fn give(&self, sqe: &Sqe, bytes: &[u8]) -> Result<(), Status> {
        let data = self.data(sqe, bytes.len(), true)?;
        data.write_from(0, bytes).ok_or(Status::INTERNAL)
    }

    /// Takes `len` bytes from the host.
    fn take(&self, sqe: &Sqe, len: usize) -> Result<Vec<u8>, Status> {
        let data = self.data(sqe, len, false)?;
        let mut bytes = vec![0; len];
        data.read_into(0, &mut bytes).ok_or(Status::INTERNAL)?;
        Ok(bytes)
    }

    fn identify(&mut self, inner: &Inner, sqe: &Sqe) -> Executed {
        let command = decode::Identify::decode(sqe);
        let data = self.identity.identify(&command, sqe.nsid, &inner.namespaces)?;
        self.give(sqe, &data[..])?;
        Ok(Outcome::Done(0))
    }

    fn set_features(&mut self, inner: &Inner, sqe: &Sqe) -> Executed {
        let command = decode::SetFeatures::decode(sqe);
        let data = match features::data_length(command.fid) {
            0 => None,
            len => Some(self.take(sqe, len)?),
        };
        let limits = self.limits(inner);
        let set = self.features.set(&command, sqe.nsid, data.as_deref(), &limits)?;
        match set.effect {
            Effect::None => {}
            Effect::InterruptCoalescing { threshold, time } => {
                inner.shared.coalescing.set(threshold, time);
            }
            Effect::InterruptVector { vector, coalescing_disabled } => {
                inner.shared.coalescing.disable(vector, coalescing_disabled);
            }
            Effect::VolatileWriteCache(on) => inner.shared.set_write_through(!on),
            Effect::AsyncEventConfig(config) => {
                if let Some(done) = self.events.configure(config) {
                    self.complete(inner, done.cid, Status::SUCCESS, done.dw0);
                }
                // What is the case already when the host asks to hear of it is news to the host.
                self.check_temperature(inner);
                if full::is_any_full(inner) {
                    self.raise(inner, AsyncEvent::SPARE_BELOW_THRESHOLD);
                }
            }
            Effect::NumberOfQueues { submission, completion } => {
                self.granted = (submission, completion);
            }
            Effect::TemperatureThreshold => self.check_temperature(inner),
        }
        Ok(Outcome::Done(set.dw0))
    }

    fn check_temperature(&mut self, inner: &Inner) {
        if self.features.temperature_warning(logs::TEMPERATURE) {
            self.raise(inner, AsyncEvent::TEMPERATURE_THRESHOLD);
        }
    }

    fn get_features(&mut self, inner: &Inner, sqe: &Sqe) -> Executed {
        let command = decode::GetFeatures::decode(sqe);
        let limits = self.limits(inner);
        let got = self.features.get(&command, sqe.nsid, &limits)?;
        if let Some(data) = &got.data {
            self.give(sqe, data)?;
        }
        Ok(Outcome::Done(got.dw0))
    }

    fn limits(&self, inner: &Inner) -> features::Limits {
        features::Limits {
            io_queues: inner.config.io_queues,
            vectors: inner.shared.irqs.len() as u16,
            namespaces: inner.namespaces.len() as u32,
            queues_exist: !self.cqs.is_empty() || !self.sqs.is_empty(),
            volatile_cache: inner.namespaces.iter().any(|ns| ns.info().volatile_cache),
        }
    }

    fn get_log_page(&mut self, inner: &Inner, sqe: &Sqe) -> Executed {
        let command = decode::GetLogPage::decode(sqe);
        if command.length() > 4096 << inner.config.mdts {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        // Counters come from the workers, who answer when they get to it.
        if command.lid != shadowbell_spec::log::lid::SMART_HEALTH {
            self.give_log(inner, sqe, &command, &Health::default())?;
            return Ok(Outcome::Done(0));
        }
        let gather = Arc::new(std::sync::Mutex::new(Vec::new()));
        let (sqe, generation) = (*sqe, self.generation);
        let latch = inner.latch({
            let gather = Arc::clone(&gather);
            move |inner, control, _| {
                if control.generation != generation {
                    return;
                }
                let workers =
                    std::mem::take(&mut *gather.lock().unwrap_or_else(|e| e.into_inner()));
                let health = control.health(inner, &workers);
                let command = decode::GetLogPage::decode(&sqe);
                match control.give_log(inner, &sqe, &command, &health) {
                    Ok(()) => control.complete(inner, sqe.cid, Status::SUCCESS, 0),
                    Err(status) => {
                        control.log_error(0, sqe.cid, status, sqe.nsid, 0);
                        control.complete(inner, sqe.cid, status, 0);
                    }
                }
            }
        });
        for worker in self.workers() {
            let (controller, gather) = (inner.shared.id, Arc::clone(&gather));
            inner.pool.send(worker, Message::Query { controller, gather, latch: latch.clone() });
        }
        self.parting.push(latch);
        Ok(Outcome::Later)
    }

    fn health(&self, inner: &Inner, workers: &[crate::worker::message::WorkerStats]) -> Health {
        let mut io = crate::stats::IoStats::default();
        inner.shared.retire(|retired| io.merge(&retired.io));
        let mut busy = std::time::Duration::ZERO;
        for worker in workers {
            io.merge(&worker.io);
            busy = busy.max(std::time::Duration::from_nanos(worker.sleep.awake_ns));
        }
        Health {
            bytes_read: io.bytes_read,
            bytes_written: io.bytes_written + io.bytes_copied,
            host_reads: io.reads + io.copies,
            host_writes: io.writes + io.copies,
            media_errors: io.media_errors,
            busy,
            powered: self.since.elapsed(),
            power_cycles: self.power_cycles,
            unsafe_shutdowns: self.unsafe_shutdowns,
            error_log_entries: self.errors.count(),
            warning: CriticalWarning::new()
                .with_spare(full::is_any_full(inner))
                .with_temperature(self.features.temperature_warning(logs::TEMPERATURE)),
            ..Health::default()
        }
    }

    fn give_log(
        &mut self,
        inner: &Inner,
        sqe: &Sqe,
        command: &decode::GetLogPage,
        health: &Health,
    ) -> Result<(), Status> {
        let mut context = LogContext {
            errors: &self.errors,
            health,
            changed: &mut self.changed,
            shadow_doorbells: inner.config.shadow_doorbells,
            volatile_cache: inner.namespaces.iter().any(|ns| ns.info().volatile_cache),
        };
        let page = logs::read(command, sqe.nsid, &mut context)?;
        // The page may be shorter than what was asked for. Whether PRP2 is a page or a list of pages
        // depends on what was asked for (Base 2.1, 4.3.1): a short page must not end up in the list.
        let data = self.data(sqe, command.length() as usize, true)?;
        data.write_from(0, &page).ok_or(Status::INTERNAL)?;
        if let Some(done) = self.events.log_read(command.lid, command.rae) {
            self.complete(inner, done.cid, Status::SUCCESS, done.dw0);
        }
        Ok(())
    }

    fn abort(&mut self, inner: &Inner, sqe: &Sqe) -> Executed {
        let decode::Abort { sqid, cid } = decode::Abort::decode(sqe);
        if sqid == 0 {
            // The only admin commands that stay are asynchronous event requests.
            let aborted = self.events.abort(cid);
            if aborted {
                self.complete(inner, cid, Status::ABORT_REQUESTED, 0);
            }
            return Ok(Outcome::Done(u32::from(!aborted)));
        }
        let Some(record) = self.sqs.get(&sqid) else {
            return Err(Status::INVALID_FIELD.with_dnr());
        };
        if self.aborts >= ABORT_LIMIT {
            return Err(Status::ABORT_LIMIT);
        }
        self.aborts += 1;
        let (me, generation, abort_cid) = (inner.me.clone(), self.generation, sqe.cid);
        let reply = AbortReply::new(move |aborted| {
            let Some(inner) = me.upgrade() else { return };
            let mut control = inner.lock();
            if control.generation == generation {
                control.aborts = control.aborts.saturating_sub(1);
                let dw0 = if aborted { 0 } else { decode::Abort::NOT_ABORTED };
                control.complete(&inner, abort_cid, Status::SUCCESS, dw0);
            }
        });
        let message = Message::Abort { controller: inner.shared.id, sqid, cid, reply };
        inner.pool.send(record.worker, message);
        Ok(Outcome::Later)
    }

    /// Doorbell Buffer Config (Base 2.1, "Doorbell Buffer Config command").
    fn doorbell_buffer_config(
        &mut self,
        inner: &Inner,
        sqe: &Sqe,
        deferred: &mut Deferred,
    ) -> Executed {
        let pages = (sqe.prp1(), sqe.prp2());
        let page = self.page_size() as u64;
        let usable = |at: u64| {
            at.is_multiple_of(page)
                && self.space.table().bytes(at, page).is_some_and(|bytes| bytes.is_writable())
        };
        if !usable(pages.0) || !usable(pages.1) || pages.0 == pages.1 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        self.shadow = Some(pages);
        let table = Arc::clone(self.space.table());
        if let Some(admin) = &mut self.admin {
            admin.enable_shadow(&table, pages);
        }
        let (cid, generation) = (sqe.cid, self.generation);
        let latch = inner.latch(move |inner, control, deferred| {
            if control.generation == generation {
                control.complete(inner, cid, Status::SUCCESS, 0);
                inner.note(crate::trace::Kind::ShadowConfigured, 0, 0, 0);
                deferred.event(Event::ShadowDoorbells);
                // The host may shadow the admin queue from here on.
                control.serve_admin(inner, deferred);
            }
        });
        for worker in self.workers() {
            let (controller, latch) = (inner.shared.id, latch.clone());
            inner.pool.send(worker, Message::Shadow { controller, pages, latch });
        }
        deferred.latches.push(latch);
        Ok(Outcome::Later)
    }
}
