//! Control plane of a controller: registers, admin commands and their effects.
//!
//! The whole module runs under one lock, which no I/O thread ever takes, and under which no code
//! waits. Long operations are sent to the I/O threads as messages, and continue when the last of
//! them drops its latch and thereby sends a notice. Guest memory is not accessed under the lock:
//! the admin queue server (`admin_server`) accesses it, and gets [`Orders`].

mod admin;
mod admin_execution;
mod admin_progress;
mod alone;
mod ana;
mod commands;
pub(crate) mod control_override;
mod deferred;
mod diagnostics;
mod dirty;
mod io_queues;
mod keep_alive;
mod lifecycle;
mod memory;
mod memory_changes;
mod namespace_changes;
mod namespaces;
mod notices;
mod one_alone;
mod pool;
mod pool_events;
mod recover;
mod registers;
mod relocation;
mod reservations;
mod reset;
mod rest;
mod resting;
mod save;
mod shared_features;
mod tend;

#[cfg(feature = "faults")]
pub(crate) use admin::Executed;
mod ways;

pub(crate) use admin::{Attach, Data, Orders, Outcome};
pub(crate) use deferred::{Callback, Deferred};
pub use io_queues::DoorbellEventfds;
pub use namespace_changes::NamespaceError;
#[cfg(feature = "faults")]
pub(crate) use registers::RegisterImage;

use crate::context::Context;
use crate::event::Event;
use crate::inquiry::Inquiry;
use crate::worker::message::Message;
use admin::AdminPort;
use commands::{AdminCommands, CommandEnvironment};
use control_override::ControlOverride;
use io_queues::IoQueues;
use memory::HostMemory;
use namespace_changes::NamespaceChanges;
use one_alone::OneAlone;
use registers::{Effect, Registers};
use reset::{Lifecycle, Phase};
use rest::Rest;
use shadowbell_spec::event::AsyncEvent;
use shadowbell_spec::status::Status;
use std::any::Any;
use std::io;

/// Controller state for the admin queue server.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Standing {
    /// True if commands are served.
    pub(crate) ready: bool,
    /// True if new commands may start: no quiesce is requested.
    pub(crate) begins: bool,
    /// True if the controller is quiesced: host memory must not be written.
    pub(crate) rests: bool,
    /// CC.MPS in bytes.
    pub(crate) page_size: usize,
}

/// Control plane. State that has to survive the process is saved as `SavedControl`; the rest is
/// rebuilt from it.
pub(crate) struct Control {
    registers: Registers,
    lifecycle: Lifecycle,
    memory: HostMemory,
    port: AdminPort,
    commands: AdminCommands,
    queues: IoQueues,
    namespace_changes: NamespaceChanges,
    alone: OneAlone,
    overriding: Option<Box<dyn ControlOverride>>,
    rest: Rest,
}

impl Control {
    pub(crate) fn new(cx: &Context) -> Self {
        let mut commands = AdminCommands::new(&cx.config);
        commands.ana.begin(cx);
        Self {
            registers: Registers::new(cx.config.max_queue_entries),
            lifecycle: Lifecycle::new(),
            memory: HostMemory::new(cx.shared.id),
            port: AdminPort::default(),
            commands,
            queues: IoQueues::new(cx.config.io_queues),
            namespace_changes: NamespaceChanges::default(),
            alone: OneAlone::default(),
            overriding: None,
            rest: Rest::new(),
        }
    }

    /// Sets an override of registers, admin commands and queues.
    #[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "for fault injection only"))]
    pub(crate) fn set_override(&mut self, cx: &Context, overriding: Box<dyn ControlOverride>) {
        cx.send_all(self.queues.workers(), |controller| Message::Override {
            controller,
            overriding: overriding.queues(),
        });
        self.overriding = Some(overriding);
    }

    /// The current override, if it is a `T`.
    #[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "for fault injection only"))]
    pub(crate) fn overriding<T: Any>(&mut self) -> Option<&mut T> {
        let overriding: &mut dyn Any = self.overriding.as_deref_mut()?;
        overriding.downcast_mut()
    }

    /// Reads registers below the doorbells into `data`, which is all zeroes.
    pub(crate) fn read(&self, offset: u64, data: &mut [u8]) {
        let mut image = self.registers.image();
        if let Some(overriding) = &self.overriding {
            overriding.read(&mut image);
        }
        if let Some(from) = usize::try_from(offset).ok().and_then(|o| image.get(o..)) {
            let n = from.len().min(data.len());
            data[..n].copy_from_slice(&from[..n]);
        }
    }

    /// Writes a register below the doorbells.
    pub(crate) fn write(&mut self, cx: &Context, offset: u64, data: &[u8]) -> Deferred {
        let mut deferred = Deferred::default();
        match *data {
            [a, b, c, d] => {
                self.write32(cx, offset, u32::from_le_bytes([a, b, c, d]), &mut deferred);
            }
            [a, b, c, d, e, f, g, h] if offset.is_multiple_of(8) => {
                self.write32(cx, offset, u32::from_le_bytes([a, b, c, d]), &mut deferred);
                self.write32(cx, offset + 4, u32::from_le_bytes([e, f, g, h]), &mut deferred);
            }
            _ => tracing::debug!(offset, len = data.len(), "ignored a register write"),
        }
        deferred
    }

    fn write32(&mut self, cx: &Context, offset: u64, value: u32, deferred: &mut Deferred) {
        if let Some(overriding) = &mut self.overriding
            && overriding.write(offset, value, self.registers.cc)
        {
            return;
        }
        match self.registers.write(offset, value) {
            Effect::None => {}
            Effect::Configuration(before) => self.configure(cx, before, deferred),
            Effect::AdminCompletionQueue(acq) => {
                if self.port.place_cq(acq) {
                    self.registers.acq = acq;
                } else {
                    tracing::debug!(offset, "ignored a write while the controller is enabled");
                }
            }
        }
    }

    /// Enters a fatal state (CSTS.CFS), which only a reset ends.
    fn fail(&mut self, cx: &Context, why: &'static str, deferred: &mut Deferred) {
        if !self.registers.csts.cfs() {
            self.registers.csts.set_cfs(true);
            tracing::warn!(why, "controller fatal status");
            self.log_fatal(cx, why);
            deferred.event(Event::Fatal(why));
        }
    }

    /// Doorbell eventfds; empty without Doorbell Buffer Config.
    ///
    /// # Errors
    /// The error of the system if it has no more descriptors.
    pub(crate) fn doorbell_eventfds(&mut self, cx: &Context) -> io::Result<DoorbellEventfds> {
        if self.memory.shadow.is_none() || cx.shared.mapped {
            return Ok(DoorbellEventfds::default());
        }
        self.queues.doorbell_eventfds(cx)
    }

    fn is_ready(&self) -> bool {
        self.lifecycle.phase == Phase::Ready && !self.registers.csts.cfs()
    }

    /// Reports a write to a doorbell register without a queue.
    pub(crate) fn invalid_doorbell_register(&mut self) {
        if self.is_ready() {
            self.port.doorbell_error(AsyncEvent::INVALID_DOORBELL_REGISTER);
        }
    }

    /// Reports an invalid value of an admin doorbell.
    pub(crate) fn bad_admin_doorbell(&mut self) {
        if self.is_ready() {
            self.port.doorbell_error(AsyncEvent::INVALID_DOORBELL_VALUE);
        }
    }

    /// Splits the admin commands from their environment.
    fn split<'a>(
        &'a mut self,
        cx: &'a Context,
        deferred: &'a mut Deferred,
    ) -> (&'a mut AdminCommands, CommandEnvironment<'a>) {
        let env = CommandEnvironment {
            cx,
            registers: &self.registers,
            lifecycle: &self.lifecycle,
            memory: &mut self.memory,
            port: &mut self.port,
            queues: &mut self.queues,
            overriding: self.overriding.as_deref_mut(),
            deferred,
        };
        (&mut self.commands, env)
    }

    /// Executes an out-of-band admin command.
    pub(crate) fn inquire(&mut self, cx: &Context, inquiry: Inquiry) -> Result<Vec<u8>, Status> {
        let mut deferred = Deferred::default();
        let (commands, mut env) = self.split(cx, &mut deferred);
        commands.inquire(&mut env, inquiry)
    }
}
