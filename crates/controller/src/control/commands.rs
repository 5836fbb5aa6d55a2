//! Execution of admin commands, with the checks and the completion of Get LBA Status.

use super::admin_port::{AdminPort, Data, Executed, Outcome};
use super::diagnostics::{Diagnostics, hours, media};
use super::io_queues::{IoQueues, QueueEnvironment, ended_notice};
use super::lifecycle_state::{Deferred, Lifecycle};
use super::memory::HostMemory;
use super::namespace_state::{Ana, check_ana_state};
use super::pool::{self, OrderContext, PoolCommands};
use super::registers::{ControlOverride, Registers};
use crate::admin::events::RateLimit;
use crate::admin::features::{self, Effect, Features, KeepAlive, Limits, host_identifier_bytes};
use crate::admin::identify::Identity;
use crate::admin::logs::{ChangedList, ReservationLog};
use crate::admin::{ABORT_LIMIT, OutOfBandCommand, TEMPERATURE};
use crate::config::Config;
use crate::context::Context;
use crate::control_thread::TurnTask;
use crate::event::Event;
use crate::lba_status::{self, LbaStatusServer, Question};
use crate::notice::Operation;
use crate::saved::SavedFeatures;
use crate::worker::mailbox::Message;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin as decode;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::feature::{InterruptVectorConfiguration, fid};
use shadowbell_spec::lba_status::{LbaStatusDescriptor, LbaStatusList, atype};
use shadowbell_spec::opcode::AdminOpcode;
use shadowbell_spec::sqe::{Fuse, NSID_ALL, Psdt};
use shadowbell_spec::status::Status;
use std::sync::Arc;
use std::time::Instant;

/// Controller state that admin commands may access.
pub(super) struct CommandEnvironment<'a> {
    pub(super) cx: &'a Context,
    pub(super) registers: &'a Registers,
    pub(super) lifecycle: &'a Lifecycle,
    pub(super) memory: &'a mut HostMemory,
    pub(super) port: &'a mut AdminPort,
    pub(super) queues: &'a mut IoQueues,
    pub(super) overriding: Option<&'a mut (dyn ControlOverride + 'static)>,
    pub(super) deferred: &'a mut Deferred,
}

/// State of the admin commands.
pub(super) struct AdminCommands {
    pub(super) identity: Identity,
    pub(super) features: Features,
    /// Changed Attached Namespace List (log page 04h).
    pub(super) changed: ChangedList,
    /// Number of Abort commands in flight.
    aborts: u32,
    /// True while a Doorbell Buffer Config command is in flight. A second one has to wait, so that
    /// each I/O thread has at most one message about it.
    configures_shadow: bool,
    keep_alive: KeepAlive,
    /// Rate limit of the events that report full storage.
    full: RateLimit,
    /// Rate limit of the events that report lost data.
    losses: RateLimit,
    pub(super) diagnostics: Diagnostics,
    pub(super) pool: PoolCommands,
    pub(super) reservations: ReservationLog,
    pub(super) ana: Ana,
}

impl AdminCommands {
    pub(super) fn new(config: &Config) -> Self {
        Self {
            identity: Identity::new(config),
            features: Features::new(),
            changed: ChangedList::default(),
            aborts: 0,
            configures_shadow: false,
            keep_alive: KeepAlive::default(),
            full: RateLimit::default(),
            losses: RateLimit::default(),
            diagnostics: Diagnostics::default(),
            pool: PoolCommands::default(),
            reservations: ReservationLog::default(),
            ana: Ana::default(),
        }
    }

    /// True if no command waits for an I/O thread or for the pool.
    pub(super) fn is_idle(&self) -> bool {
        let is_idle = self.diagnostics.self_test.is_idle() && self.pool.is_idle();
        self.aborts == 0 && !self.configures_shadow && is_idle
    }

    /// Snapshot of feature values and Changed Attached Namespace List.
    pub(super) fn save(&self) -> (SavedFeatures, Vec<u32>) {
        (self.features.save(), self.changed.save())
    }

    pub(super) fn restore(&mut self, features: &SavedFeatures, changed: &[u32]) {
        self.features = Features::restore(features);
        // The timeout restarts, because no Keep Alive command was processed during the restore.
        self.keep_alive.set(features.keep_alive, Instant::now());
        self.changed = ChangedList::restore(changed);
    }

    /// Drops the state of namespace `nsid`, which was replaced or removed.
    pub(super) fn clear_namespace(&mut self, nsid: u32, hours: u64) {
        self.features.clear_namespace(nsid);
        self.reservations.clear_namespace(nsid);
        self.diagnostics.self_test.namespace_removed(nsid, hours);
    }

    /// Adds a namespace to the Changed Attached Namespace List.
    pub(super) fn namespace_changed(&mut self, nsid: u32) {
        self.changed.insert(nsid);
    }

    /// The Keep Alive Timer.
    pub(super) fn keep_alive(&mut self) -> &mut KeepAlive {
        &mut self.keep_alive
    }

    /// Restores the initial state at the end of a reset.
    pub(super) fn reset(&mut self) {
        self.features.reset();
        self.keep_alive.set(0, Instant::now());
        self.changed.clear();
        self.reservations = ReservationLog::default();
        self.configures_shadow = false;
        self.aborts = 0;
    }

    /// Number of bytes that a command transfers from the host. The bytes are read before the
    /// command is executed.
    pub(super) fn data_length(sqe: &Sqe) -> usize {
        if sqe.fuse() != Fuse::Normal || sqe.psdt() != Psdt::Prp {
            return 0;
        }
        if AdminOpcode::try_from(sqe.opcode) != Ok(AdminOpcode::SetFeatures) {
            return pool::data_length(sqe);
        }
        let command = decode::SetFeatures::decode(sqe);
        match command.fid {
            fid::HOST_IDENTIFIER => host_identifier_bytes(command.cdw11),
            other => features::data_length(other),
        }
    }

    /// Executes a command. `data` are the data from the host, or the error that occurred when they
    /// were read.
    pub(super) fn execute(
        &mut self,
        env: &mut CommandEnvironment<'_>,
        sqe: &Sqe,
        data: Option<Result<Vec<u8>, Status>>,
    ) -> Executed {
        if let Some(overriding) = &mut env.overriding
            && let Some(executed) = overriding.admin(sqe)
        {
            return executed;
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
        let (cx, generation) = (env.cx, env.lifecycle.generation);
        pool::barrier(cx, opcode)?;
        let queue = QueueEnvironment { registers: env.registers, memory: &*env.memory, generation };
        match opcode {
            AdminOpcode::CreateIoCq => {
                let overriding = env.overriding.as_ref().map(|overriding| overriding.queues());
                env.queues.create_cq(cx, &queue, sqe, overriding)
            }
            AdminOpcode::CreateIoSq => env.queues.create_sq(cx, &queue, sqe),
            AdminOpcode::DeleteIoSq => env.queues.delete_sq(cx, generation, sqe, env.deferred),
            AdminOpcode::DeleteIoCq => env.queues.delete_cq(cx, generation, sqe, env.deferred),
            AdminOpcode::Identify => self.identify(env, sqe),
            AdminOpcode::GetLogPage => self.get_log_page(env, sqe),
            AdminOpcode::SetFeatures => self.set_features(env, sqe, data),
            AdminOpcode::GetFeatures => self.get_features(env, sqe),
            AdminOpcode::Abort => self.abort(env, sqe),
            AdminOpcode::AsyncEventRequest => {
                let completion = env.port.events.request(sqe.cid)?;
                env.port.complete_event(completion);
                Ok(Outcome::Unplaced)
            }
            AdminOpcode::KeepAlive => {
                self.keep_alive.restart(Instant::now());
                Ok(Outcome::Done(0))
            }
            AdminOpcode::GetLbaStatus => Self::get_lba_status(env, sqe),
            AdminOpcode::NamespaceManagement
            | AdminOpcode::NamespaceAttachment
            | AdminOpcode::FormatNvm
            | AdminOpcode::Sanitize => {
                let CommandEnvironment { port, deferred, .. } = env;
                let context = OrderContext { cx, port, generation, deferred };
                self.pool.order(context, (opcode, sqe), data)
            }
            AdminOpcode::DeviceSelfTest => self.device_self_test(env, sqe),
            AdminOpcode::DoorbellBufferConfig if cx.config.shadow_doorbells => {
                self.doorbell_buffer_config(env, sqe)
            }
            _ => unsupported,
        }
    }

    /// Executes an out-of-band command, without side effects, and returns its data.
    pub(super) fn out_of_band(
        &mut self,
        env: &mut CommandEnvironment<'_>,
        command: OutOfBandCommand,
    ) -> Result<Vec<u8>, Status> {
        let sqe = command.sqe();
        let executed = match command {
            OutOfBandCommand::Identify { .. } => self.identify(env, &sqe)?,
            OutOfBandCommand::LogPage(_) => self.get_log_page(env, &sqe)?,
        };
        match executed {
            Outcome::Data(data) => Ok(data.bytes),
            _ => Ok(Vec::new()),
        }
    }

    fn identify(&mut self, env: &mut CommandEnvironment<'_>, sqe: &Sqe) -> Executed {
        let command = decode::Identify::decode(sqe);
        pool::identify(env.cx, &command, sqe.nsid, || {
            let data =
                self.identity.identify(&command, sqe.nsid, &env.cx.identified_and_visible())?;
            Ok(Outcome::Data(Data { len: data.len(), bytes: data.to_vec(), dw0: 0, log: None }))
        })
    }

    fn set_features(
        &mut self,
        env: &mut CommandEnvironment<'_>,
        sqe: &Sqe,
        data: Option<Result<Vec<u8>, Status>>,
    ) -> Executed {
        let command = decode::SetFeatures::decode(sqe);
        if let Some(executed) = self.set_shared_feature(env, sqe, data.as_ref()) {
            return executed;
        }
        let data = data.transpose()?;
        if command.fid == fid::INTERRUPT_VECTOR_CONFIGURATION {
            // Base 2.3, Interrupt Vector Configuration: a completion queue must use the vector.
            let vector = InterruptVectorConfiguration::from_bits(command.cdw11).iv();
            if vector != 0 && !env.queues.has_vector(vector) {
                return Err(Status::INVALID_FIELD.with_dnr());
            }
        }
        let limits = limits(env, sqe.nsid);
        let before = self.features.timestamp();
        let set = self.features.set(&command, sqe.nsid, data.as_deref(), &limits)?;
        if command.fid == fid::TIMESTAMP {
            let (context, since) =
                (self.event_context(env.lifecycle), env.lifecycle.reset_at.elapsed());
            self.diagnostics.events.timestamp_changed(&context, before, since);
        }
        let shared = &env.cx.shared;
        match set.effect {
            Effect::None => {}
            Effect::InterruptCoalescing { threshold, time } => {
                shared.coalescing.set(threshold, time);
            }
            Effect::InterruptVector { vector, coalescing_disabled } => {
                shared.coalescing.disable(vector, coalescing_disabled);
            }
            Effect::VolatileWriteCache(on) => {
                let was_on = !shared.is_write_through();
                shared.set_write_through(!on);
                // When the cache is disabled, its contents must be written to the medium
                // (Base 2.1, "Volatile Write Cache").
                if was_on && !on {
                    let (cx, generation) = (env.cx, env.lifecycle.generation);
                    let (registers, memory) = (env.registers, &*env.memory);
                    let queue = QueueEnvironment { registers, memory, generation };
                    let overriding = env.overriding.as_ref().map(|o| o.queues());
                    let operation = Operation::Flush { cid: sqe.cid };
                    env.queues.flush(cx, &queue, operation, overriding);
                    return Ok(Outcome::Pending);
                }
            }
            Effect::AsyncEventConfig(config) => {
                let completion = env.port.events.configure(config);
                env.port.complete_event(completion);
                // If the temperature is already beyond the threshold when its event is enabled, the
                // event is raised.
                self.check_temperature(env.port);
            }
            Effect::NumberOfQueues { submission, completion } => {
                env.queues.grant(submission, completion);
            }
            Effect::TemperatureThreshold => self.check_temperature(env.port),
            Effect::CopyFormats(formats) => shared.set_copy_formats(formats),
            Effect::KeepAlive(milliseconds) => self.keep_alive.set(milliseconds, Instant::now()),
        }
        Ok(Outcome::Done(set.dw0))
    }

    fn check_temperature(&mut self, port: &mut AdminPort) {
        if self.features.temperature_warning(TEMPERATURE) {
            port.raise(AsyncEvent::TEMPERATURE_THRESHOLD);
        }
    }

    fn get_features(&mut self, env: &mut CommandEnvironment<'_>, sqe: &Sqe) -> Executed {
        let command = decode::GetFeatures::decode(sqe);
        if let Some(executed) = self.get_shared_feature(env, sqe) {
            return executed;
        }
        let got = self.features.get(&command, sqe.nsid, &limits(env, sqe.nsid))?;
        Ok(match got.data {
            Some(bytes) => Outcome::Data(Data { len: bytes.len(), bytes, dw0: got.dw0, log: None }),
            None => Outcome::Done(got.dw0),
        })
    }

    /// Executes Device Self-test.
    fn device_self_test(&mut self, env: &CommandEnvironment<'_>, sqe: &Sqe) -> Executed {
        let nsid = sqe.nsid;
        if nsid != 0 && nsid != NSID_ALL && nsid > env.cx.serving().highest() {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr());
        }
        let health = (self.health(env).warning.into_bits() != 0, hours(env.lifecycle));
        let code = decode::DeviceSelfTest::decode(sqe).stc;
        self.diagnostics.self_test.command(code, nsid, &media(env.cx), health)?;
        Ok(Outcome::Done(0))
    }

    /// Executes Doorbell Buffer Config (Base 2.1, "Doorbell Buffer Config command").
    fn doorbell_buffer_config(&mut self, env: &mut CommandEnvironment<'_>, sqe: &Sqe) -> Executed {
        let pages = (sqe.prp1(), sqe.prp2());
        let page = env.registers.page_size() as u64;
        let is_usable = |at| env.memory.is_shadow_page(at, page);
        if !is_usable(pages.0) || !is_usable(pages.1) || pages.0 == pages.1 {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        if std::mem::replace(&mut self.configures_shadow, true) {
            return Ok(Outcome::NotYet);
        }
        env.memory.shadow = Some(pages);
        env.cx.shared.set_shadowed(true);
        env.port.change_shadow(Some(pages));
        let operation = Operation::ShadowDoorbells { cid: sqe.cid };
        let latch = env.cx.latch(ended_notice(env.lifecycle.generation, operation));
        env.cx.send_all(env.queues.workers(), |controller| Message::Shadow {
            controller,
            pages: Some(pages),
            latch: latch.clone(),
        });
        env.deferred.latches.push(latch);
        Ok(Outcome::Pending)
    }

    /// Completes Doorbell Buffer Config.
    pub(super) fn shadow_configured(&mut self, port: &mut AdminPort, cid: u16) {
        self.configures_shadow = false;
        port.complete(cid, Status::SUCCESS, 0);
    }

    fn abort(&mut self, env: &mut CommandEnvironment<'_>, sqe: &Sqe) -> Executed {
        let decode::Abort { sqid, cid } = decode::Abort::decode(sqe);
        if sqid == 0 {
            // Of the admin commands, only Asynchronous Event Requests can be aborted.
            let aborted = env.port.events.abort(cid);
            if aborted {
                env.port.complete_unplaced(cid, Status::ABORT_REQUESTED, 0);
            }
            return Ok(Outcome::Done(u32::from(!aborted)));
        }
        let Some(worker) = env.queues.worker_of(sqid) else {
            return Err(Status::INVALID_FIELD.with_dnr());
        };
        if self.aborts >= ABORT_LIMIT {
            return Err(Status::ABORT_LIMIT);
        }
        self.aborts += 1;
        let operation = Operation::Abort { cid: sqe.cid };
        let latch = env.cx.latch(ended_notice(env.lifecycle.generation, operation));
        let controller = env.cx.shared.id;
        env.cx.send(worker, Message::Abort { controller, sqid, cid, latch });
        Ok(Outcome::Pending)
    }

    /// Completes an Abort command. `status` is that of the command to abort: Command Abort
    /// Requested if it was aborted.
    pub(super) fn abort_ended(&mut self, port: &mut AdminPort, cid: u16, status: Status) {
        self.aborts = self.aborts.saturating_sub(1);
        let aborted = status.code() == Status::ABORT_REQUESTED;
        let dw0 = if aborted { 0 } else { decode::Abort::NOT_ABORTED };
        port.complete(cid, Status::SUCCESS, dw0);
    }

    /// Raises the events for the owner of the storage, for a failed command of namespace `nsid`.
    ///
    /// If the storage is full, a write ends with Capacity Exceeded and Do Not Retry, because a
    /// retry of the host cannot free space. The specification has no other report for a thinly
    /// provisioned namespace (NVM 1.1, "Capacity Exceeded"). Available Spare stays unchanged: it
    /// describes wear, and monitoring in the guest would report a failing disk. The owner of the
    /// storage gets [`Event::Full`], or [`Event::WritesLost`] if cached data of a namespace could
    /// not be written back.
    pub(super) fn command_failed(
        &mut self,
        cx: &Context,
        (nsid, status): (u32, Status),
        deferred: &mut Deferred,
    ) {
        let now = Instant::now();
        if status.code() == Status::CAPACITY_EXCEEDED {
            if cx.serving().get(nsid).is_none() {
                return;
            }
            if self.full.allows(nsid, now) {
                deferred.event(Event::Full(nsid));
            }
        } else if status.code() == Status::WRITE_FAULT {
            for namespace in cx.serving().iter().filter(|ns| ns.disk().has_lost_writes()) {
                if self.losses.allows(namespace.nsid(), now) {
                    deferred.event(Event::WritesLost(namespace.nsid()));
                }
            }
        }
    }
}

fn limits(env: &CommandEnvironment<'_>, nsid: u32) -> Limits {
    let namespaces = env.cx.identified_and_visible();
    Limits {
        io_queues: env.cx.config.io_queues,
        vectors: env.cx.shared.irqs.len() as u16,
        namespaces: namespaces.highest(),
        active: namespaces.get(nsid).is_some(),
        queues_exist: !env.queues.is_empty(),
        volatile_cache: env.cx.has_volatile_cache(),
        is_shared: env.cx.config.member.is_some(),
    }
}

/// Get LBA Status: checks and completion.
impl AdminCommands {
    /// Completes a Get LBA Status command.
    pub(super) fn lba_status_ended(&mut self, cx: &Context, port: &mut AdminPort, cid: u16) {
        let Some((sqe, bytes)) = cx.lba_status.take(cid) else { return };
        if cx.serving().get(sqe.nsid).is_none() {
            return port.fail(cid, Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr(), sqe.nsid);
        }
        let len = decode::GetLbaStatus::decode(&sqe).length() as usize;
        port.reply(sqe, Data { bytes, len, dw0: 0, log: None });
    }

    /// Checks and starts Get LBA Status. The module `lba_status` then queries the disk, in several
    /// steps.
    fn get_lba_status(env: &mut CommandEnvironment<'_>, sqe: &Sqe) -> Executed {
        let command = decode::GetLbaStatus::decode(sqe);
        let serving = env.cx.visible();
        let namespace = match serving.get(sqe.nsid) {
            Some(namespace) => namespace,
            // The NSID is valid and inactive.
            None if (1..=serving.highest()).contains(&sqe.nsid) => {
                return Err(Status::INVALID_FIELD.with_dnr());
            }
            None => return Err(Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr()),
        };
        check_ana_state(env.cx, sqe.nsid)?;
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
            // The result contains the blocks that the host has marked as uncorrectable. The
            // controller does not know of other unreadable blocks, even after a scan.
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
            let server: Arc<dyn TurnTask> = Arc::<LbaStatusServer>::clone(&env.cx.lba_status);
            let control = env.cx.pool.control().clone();
            let schedule = move || control.schedule(Arc::downgrade(&server));
            env.deferred.callbacks.push(Box::new(schedule));
        }
        Ok(Outcome::Pending)
    }
}
