//! The upper rungs of the ladder: looking at the controller, resetting it, giving it up.

use super::count;
use crate::admin::{Admin, LogRequest};
use crate::attach::{admin_pair, configure_again};
use crate::device::NotThere;
use crate::error::CommandError;
use crate::queue::Bell;
use crate::shared::{Condition, Control, Shared};
use crate::transport::TransportError;
use shadowbell_doorbell::RingSize;
use shadowbell_memory::EventFd;
use shadowbell_spec::log::{ChangedNamespaces, lid};
use shadowbell_spec::regs;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// How often a reset is tried.
const TRIES: u32 = 5;

/// Where the queues of a pair are, and how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) qid: u16,
    pub(crate) sq: RingSize,
    pub(crate) sq_iova: u64,
    pub(crate) cq: RingSize,
    pub(crate) cq_iova: u64,
    pub(crate) interrupts: bool,
}

/// Why a try to reset the controller failed.
enum Failure {
    /// It is not there any more.
    Gone(String),
    /// Another try may help.
    Other(String),
}

impl From<NotThere> for Failure {
    fn from(not: NotThere) -> Self {
        match not {
            NotThere::Absent | NotThere::Transport(TransportError::Gone { .. }) => {
                Self::Gone(not.to_string())
            }
            _ => Self::Other(not.to_string()),
        }
    }
}

impl From<CommandError> for Failure {
    fn from(error: CommandError) -> Self {
        Self::Other(error.to_string())
    }
}

impl Shared {
    /// Looks at the controller, and does about it what has to be done. Whether to go on looking.
    pub(crate) fn watch(&self) -> bool {
        let generation = self.generation();
        match self.condition() {
            Condition::Live => {}
            Condition::Resetting => return true,
            Condition::Detached | Condition::Over { .. } => return false,
        }
        match self.device.csts() {
            Err(error @ TransportError::Gone { .. }) => self.went_away(&error.to_string()),
            Err(error) => tracing::debug!("{} was not looked at: {error}", self.name()),
            Ok(csts) if csts.into_bits() == u32::MAX => {
                self.went_away(&format!(
                    "{} was removed (its registers read as all ones)",
                    self.name()
                ));
            }
            Ok(csts) if csts.cfs() => {
                count(&self.counters.fatal, 1);
                self.reset(generation, "it reports a fatal status (CSTS.CFS)");
            }
            Ok(csts) if csts.nssro() && !self.nssro_stuck.load(Ordering::Relaxed) => {
                count(&self.counters.subsystem_resets, 1);
                self.reset(generation, "its NVM subsystem was reset (CSTS.NSSRO)");
            }
            Ok(csts) if !csts.rdy() => {
                self.reset(generation, "it is disabled, by nobody here (CSTS.RDY)");
            }
            Ok(_) => {}
        }
        true
    }

    /// Hears what the controller tells unasked, as far as something has to be done about it.
    pub(crate) fn hear(self: &Arc<Self>) {
        if self.condition() == Condition::Live && self.admin.look() {
            self.read_namespaces();
        }
    }

    /// The controller is not there any more: everything ends.
    pub(crate) fn went_away(&self, why: &str) {
        if self.remove(why, false) {
            count(&self.counters.removed, 1);
            tracing::error!("{why}; everything that is under way ends");
            self.admin.fail_all();
        }
    }

    /// Resets the controller, unless that was done since it had been reset `seen` times. When this
    /// returns it works again, or was given up.
    pub(crate) fn reset(&self, seen: u32, why: &str) {
        let mut control = self.control();
        if self.condition() != Condition::Live || self.generation() != seen {
            return;
        }
        self.begin_reset();
        count(&self.counters.resets, 1);
        tracing::warn!("{}: {why}; resetting the controller", self.name());
        self.admin.fail_all();
        control.live.clear();
        let mut last = String::new();
        for attempt in 1..=TRIES {
            count(&self.counters.reset_tries, 1);
            match self.bring_back(&mut control, attempt > 1) {
                Ok(()) => {
                    tracing::info!("{} works again after a reset", self.name());
                    return self.end_reset();
                }
                Err(Failure::Gone(why)) => {
                    let why = format!("{} went away: {why}", self.name());
                    count(&self.counters.removed, 1);
                    tracing::error!("{why}; everything that is under way ends");
                    self.remove(&why, true);
                    return self.admin.fail_all();
                }
                Err(Failure::Other(why)) => {
                    tracing::warn!("{}: reset, try {attempt} of {TRIES}: {why}", self.name());
                    last = why;
                }
            }
        }
        count(&self.counters.given_up, 1);
        let quiet = self.device.disable().is_ok() || self.device.transport.reset().is_ok();
        let why = format!("{} could not be reset ({last}) and was given up", self.name());
        tracing::error!("{why}; everything that is under way ends");
        self.admin.fail_all();
        self.give_up(&why, quiet);
    }

    /// One try: from a controller in whatever state to one that has everything but I/O queues.
    fn bring_back(&self, control: &mut Control, thoroughly: bool) -> Result<(), Failure> {
        let transport = &self.device.transport;
        match self.device.disable() {
            Ok(()) if !thoroughly => {}
            Ok(()) => {
                if let Err(error) = transport.reset() {
                    tracing::debug!("{error}");
                }
            }
            Err(not) => {
                if let gone @ Failure::Gone(_) = Failure::from(not) {
                    return Err(gone);
                }
                transport.reset().map_err(|error| Failure::Other(error.to_string()))?;
            }
        }
        // It is disabled: what it did not confirm to be done with, it is done with now.
        control.spoiled.clear();
        let no_room = || Failure::Other("the admin queues have no room in memory".into());
        let pair = admin_pair(&self.device, self.admin_memory()).ok_or_else(no_room)?;
        let queues = pair.queues;
        self.admin.restart(pair.core);
        self.device.enable(queues)?;
        let stuck = self.device.csts().is_ok_and(|csts| csts.nssro());
        self.nssro_stuck.store(stuck, Ordering::Relaxed);
        if let Some(event) = self.admin_event.get()
            && let Err(error) = transport.set_irq(0, Some(event))
        {
            return Err(Failure::Other(error.to_string()));
        }
        configure_again(self).map_err(Failure::Other)
    }

    /// The doorbells of a queue pair that is about to be created again.
    pub(crate) fn fresh_bells(&self, qid: u16) -> Option<[Bell; 2]> {
        let late = self.late.get()?;
        let mut bells = self.bells(qid, late.doorbells);
        if let Some(shadows) = late.shadow.as_ref().and_then(|pages| pages.of(qid)) {
            for (bell, shadow) in bells.iter_mut().zip(shadows) {
                bell.mirror(shadow);
                bell.trust();
            }
        }
        Some(bells)
    }

    /// What may ring instead of the doorbells of a queue pair that exists.
    pub(crate) fn ringers(&self, qid: u16) -> [Option<EventFd>; 2] {
        let shadow = self.late.get().and_then(|late| late.shadow.as_ref());
        if shadow.and_then(|pages| pages.of(qid)).is_none() {
            return [None, None];
        }
        let dstrd = self.device.cap.dstrd();
        let offsets = [regs::sq_doorbell_offset(qid, dstrd), regs::cq_doorbell_offset(qid, dstrd)];
        self.device.transport.doorbell_events(offsets).unwrap_or_else(|error| {
            tracing::info!(qid, "doorbells are written, because {error}");
            [None, None]
        })
    }

    /// Reads the namespaces again, for whoever asks for them next.
    fn read_namespaces(self: &Arc<Self>) {
        let Some(late) = self.late.get() else { return };
        let admin = Admin::new(Arc::clone(self));
        // Reading the list has the controller tell of the next change.
        let size = size_of::<ChangedNamespaces>();
        let list = LogRequest::new(lid::CHANGED_ATTACHED_NAMESPACES, size);
        let read = admin
            .log_page(list)
            .and_then(|_| admin.identify_namespaces(&late.identity, late.max_transfer));
        match read {
            Ok(namespaces) => {
                count(&self.counters.namespaces_read, 1);
                tracing::info!("the namespaces of {} changed, and were read again", self.name());
                *self.news() = Some(namespaces);
            }
            Err(error) => tracing::warn!("the namespaces changed, and were not read: {error}"),
        }
    }
}
