//! Register and admin command faults: wrong register values, failing admin commands.

use super::injector::{FaultState, Injector};
use super::model::Fault;
use super::queues::FaultyQueues;
use crate::control::control_override::{ControlOverride, Response};
use crate::control::{Executed, Outcome, RegisterImage};
use crate::notice::Condition;
use crate::worker::queue_override::QueueOverride;
use shadowbell_spec::Sqe;
use shadowbell_spec::regs::{self, Cc, Csts};
use shadowbell_spec::status::Status;
use std::sync::Arc;

/// Control plane override that injects register and admin command faults.
#[derive(Debug)]
pub(super) struct FaultyControl {
    state: Arc<FaultState>,
    removed: bool,
    nssro: bool,
    /// Forced value of CSTS.RDY.
    ready: Option<bool>,
}

impl FaultyControl {
    pub(super) fn new(injector: &Arc<Injector>) -> Self {
        let state = Arc::new(FaultState::new(injector));
        Self { state, removed: false, nssro: false, ready: None }
    }

    /// Replaces the fault rules.
    pub(super) fn arm(&self, injector: Arc<Injector>) {
        self.state.arm(injector);
    }

    /// Handles a write of CC by the host.
    fn write_cc(&mut self, old: Cc, new: Cc) {
        let fault = match (old.en(), new.en()) {
            (false, true) => Fault::NeverReady,
            (true, false) => Fault::NeverDisabled,
            _ => return,
        };
        let happens = self.state.injector().ready(fault);
        self.ready = happens.then_some(fault == Fault::NeverDisabled);
    }
}

impl ControlOverride for FaultyControl {
    fn read(&self, image: &mut RegisterImage) {
        if self.removed {
            return image.fill(0xff);
        }
        let at = regs::CSTS as usize;
        let Some(bytes) = image.get_mut(at..at + 4) else { return };
        let Ok(csts) = <[u8; 4]>::try_from(&*bytes) else { return };
        let mut csts = Csts::from_bits(u32::from_le_bytes(csts));
        csts.set_nssro(self.nssro);
        if let Some(ready) = self.ready {
            csts.set_rdy(ready);
        }
        bytes.copy_from_slice(&csts.into_bits().to_le_bytes());
    }

    fn write(&mut self, offset: u64, value: u32, cc: Cc) -> bool {
        match offset {
            _ if self.removed => return true,
            regs::CSTS => self.nssro &= !Csts::from_bits(value).nssro(),
            regs::CC => self.write_cc(cc, Cc::from_bits(value)),
            _ => {}
        }
        false
    }

    fn admin(&mut self, sqe: &Sqe) -> Option<Executed> {
        match self.state.injector().admin(sqe.opcode)? {
            Fault::Refuse(_) => Some(Err(Status::INTERNAL)),
            _ => Some(Ok(Outcome::Unplaced)),
        }
    }

    fn queues(&self) -> Box<dyn QueueOverride> {
        Box::new(FaultyQueues::new(Arc::clone(&self.state)))
    }

    fn condition(&mut self, condition: Condition, ready: bool) -> Response {
        match condition {
            Condition::Fatal if ready => {
                self.state.set_dead(true);
                Response::Fail("a fault was injected")
            }
            Condition::SubsystemReset if ready => {
                self.nssro = true;
                Response::Reset
            }
            Condition::Removed => {
                self.state.set_dead(true);
                self.removed = true;
                Response::Nothing
            }
            Condition::Fatal | Condition::SubsystemReset => Response::Nothing,
        }
    }

    fn function_reset(&mut self) {
        self.ready = None;
    }

    fn reset_ended(&mut self) {
        // A reset ends the fatal state.
        self.state.set_dead(self.removed);
    }
}
