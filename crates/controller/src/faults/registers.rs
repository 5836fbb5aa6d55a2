//! Registers that say what is not so.

use super::Fault;
use crate::control::{Control, Deferred};
use crate::controller::Inner;
use shadowbell_spec::regs::{self, Cc, Csts};

/// What of the registers is not as it should be.
#[derive(Debug, Default)]
pub(crate) struct Overlay {
    removed: bool,
    nssro: bool,
    /// CSTS.RDY reads so, whatever it is.
    ready: Option<bool>,
}

impl Overlay {
    /// Whether the device is not there any more.
    pub(crate) fn is_removed(&self) -> bool {
        self.removed
    }

    /// What is read instead of `image`, the registers from offset 0 on.
    pub(crate) fn apply(&self, image: &mut [u8]) {
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

    /// The host writes CSTS.
    pub(crate) fn write_csts(&mut self, value: u32) {
        self.nssro &= !Csts::from_bits(value).nssro();
    }

    /// The host writes CC.
    pub(crate) fn write_cc(&mut self, inner: &Inner, old: Cc, new: Cc) {
        let fault = match (old.en(), new.en()) {
            (false, true) => Fault::NeverReady,
            (true, false) => Fault::NeverDisabled,
            _ => return,
        };
        let happens = inner.shared.faults.armed().is_some_and(|injector| injector.ready(fault));
        self.ready = happens.then_some(fault == Fault::NeverDisabled);
    }

    /// The function was reset from outside.
    pub(crate) fn function_reset(&mut self) {
        self.ready = None;
    }
}

impl Control {
    /// A fault of the whole controller, that a worker met.
    pub(crate) fn suffer(&mut self, inner: &Inner, fault: Fault, deferred: &mut Deferred) {
        match fault {
            Fault::Fatal if self.is_ready() => {
                inner.shared.faults.set_dead(true);
                self.fail("a fault was injected", deferred);
            }
            Fault::SubsystemReset if self.is_ready() => {
                self.overlay.nssro = true;
                self.begin_reset(inner, true, deferred);
            }
            Fault::Removal => {
                inner.shared.faults.set_dead(true);
                self.overlay.removed = true;
            }
            _ => {}
        }
    }

    /// A reset is over: nothing is fatal any more.
    pub(crate) fn recover(&mut self, inner: &Inner) {
        inner.shared.faults.set_dead(self.overlay.is_removed());
    }
}
