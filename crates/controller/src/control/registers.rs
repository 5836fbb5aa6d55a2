//! Controller registers below the doorbells, the effects of writes, and the hook by which fault
//! injection changes the behavior of registers and admin commands.

use super::admin_port::Executed;
use crate::notice::Condition;
use crate::saved::SavedRegisters;
use crate::worker::queue_set::QueueOverride;
use shadowbell_spec::Sqe;
use shadowbell_spec::regs::{self, Aqa, Cap, Cc, Crto, Csts, Vs};
use std::any::Any;
use std::time::Duration;

/// CAP.TO and CRTO: maximum time until CSTS.RDY changes, in units of 500 ms. The value is large
/// because a reset waits for commands in flight on slow disks.
const READY_TIMEOUT: u8 = 60;
/// Maximum time of a reset: CAP.TO.
pub(super) const RESET_LIMIT: Duration = Duration::from_millis(500 * READY_TIMEOUT as u64);
/// CAP.MPSMAX: 2^(12 + 4), 64 KiB.
const MPS_MAX: u8 = 4;
/// Size of the register image in bytes. The space from its end to the doorbells reads as zero.
const IMAGE_BYTES: usize = 0x70;

/// Registers as bytes, from offset 0.
pub(crate) type RegisterImage = [u8; IMAGE_BYTES];

/// Effect of a register write beyond the register's new value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Effect {
    /// No effect.
    None,
    /// CC was written. Contains the value of CC before the write.
    Configuration(Cc),
    /// ACQ was written while the controller is enabled. The new value takes effect only if no admin
    /// command was fetched yet.
    AdminCompletionQueue(u64),
}

/// Registers that a host writes, and CSTS.
#[derive(Debug)]
pub(super) struct Registers {
    pub(super) cap: Cap,
    pub(super) cc: Cc,
    pub(super) csts: Csts,
    pub(super) aqa: Aqa,
    pub(super) asq: u64,
    pub(super) acq: u64,
    intms: u32,
}

impl Registers {
    /// Power-on values, for queues of at most `max_queue_entries` entries.
    pub(super) fn new(max_queue_entries: u32) -> Self {
        let cap = Cap::new()
            .with_mqes((max_queue_entries - 1) as u16)
            .with_cqr(true)
            .with_to(READY_TIMEOUT)
            .with_css(regs::CAP_CSS_NVM | regs::CAP_CSS_IO_COMMAND_SETS)
            .with_mpsmax(MPS_MAX)
            .with_crwms(true);
        Self {
            cap,
            cc: Cc::default(),
            csts: Csts::default(),
            aqa: Aqa::default(),
            asq: 0,
            acq: 0,
            intms: 0,
        }
    }

    /// Ends a Controller Level Reset. CC keeps the value that the host wrote, and AQA, ASQ and ACQ
    /// keep their values as well (Base 2.1, 3.7.2).
    pub(super) fn reset(&mut self) {
        self.csts = Csts::new();
        self.intms = 0;
    }

    /// Restores the power-on values.
    pub(super) fn power_on(&mut self) {
        *self = Self::new(u32::from(self.cap.mqes()) + 1);
    }

    /// CC.MPS in bytes.
    pub(super) fn page_size(&self) -> usize {
        1 << (12 + u32::from(self.cc.mps()))
    }

    pub(super) fn save(&self) -> SavedRegisters {
        SavedRegisters {
            cc: self.cc.into_bits(),
            csts: self.csts.into_bits(),
            aqa: self.aqa.into_bits(),
            asq: self.asq,
            acq: self.acq,
            intms: self.intms,
        }
    }

    /// Restores a snapshot. CAP is not restored, because it depends on the configuration.
    pub(super) fn restore(&mut self, saved: &SavedRegisters) {
        self.cc = Cc::from_bits(saved.cc);
        self.csts = Csts::from_bits(saved.csts);
        self.aqa = Aqa::from_bits(saved.aqa);
        (self.asq, self.acq, self.intms) = (saved.asq, saved.acq, saved.intms);
    }

    /// Register values that a host reads.
    pub(super) fn image(&self) -> RegisterImage {
        let mut image = [0u8; IMAGE_BYTES];
        let mut put = |at: u64, bytes: &[u8]| {
            image[at as usize..at as usize + bytes.len()].copy_from_slice(bytes);
        };
        put(regs::CAP, &self.cap.into_bits().to_le_bytes());
        put(regs::VS, &Vs::V2_0.into_bits().to_le_bytes());
        put(regs::INTMS, &self.intms.to_le_bytes());
        put(regs::INTMC, &self.intms.to_le_bytes());
        put(regs::CC, &self.cc.into_bits().to_le_bytes());
        put(regs::CSTS, &self.csts.into_bits().to_le_bytes());
        put(regs::AQA, &self.aqa.into_bits().to_le_bytes());
        put(regs::ASQ, &self.asq.to_le_bytes());
        put(regs::ACQ, &self.acq.to_le_bytes());
        let crto = Crto::new().with_crwmt(READY_TIMEOUT.into());
        put(regs::CRTO, &crto.into_bits().to_le_bytes());
        image
    }

    /// Writes four bytes at `offset`.
    pub(super) fn write(&mut self, offset: u64, value: u32) -> Effect {
        let low = |old: u64| old & !0xffff_ffff | u64::from(value);
        let high = |old: u64| old & 0xffff_ffff | u64::from(value) << 32;
        match offset {
            regs::INTMS => self.intms |= value,
            regs::INTMC => self.intms &= !value,
            regs::CC => {
                let (before, mut after) = (self.cc, Cc::from_bits(value));
                if before.en() && after.en() {
                    // Fields that may change only while EN is 0 (Base 2.1, 3.1.4.5) keep the
                    // values with which the controller was enabled.
                    after = after.with_mps(before.mps());
                    after = after.with_css(before.css()).with_ams(before.ams());
                }
                self.cc = after;
                return Effect::Configuration(before);
            }
            regs::ACQ if self.cc.en() => {
                return Effect::AdminCompletionQueue(low(self.acq) & !0xfff);
            }
            0x34 if self.cc.en() => return Effect::AdminCompletionQueue(high(self.acq)),
            // The admin queue cannot move while the controller is enabled.
            regs::AQA | regs::ASQ..=0x37 if self.cc.en() => {
                tracing::debug!(offset, "ignored a write while the controller is enabled");
            }
            regs::AQA => self.aqa = Aqa::from_bits(value & 0x0fff_0fff),
            regs::ASQ => self.asq = low(self.asq) & !0xfff,
            0x2c => self.asq = high(self.asq),
            regs::ACQ => self.acq = low(self.acq) & !0xfff,
            0x34 => self.acq = high(self.acq),
            _ => {}
        }
        Effect::None
    }

    /// Checks that the controller can be enabled with the current registers (Base 2.1,
    /// "Memory-based Controller Initialization").
    ///
    /// # Errors
    /// Description of the invalid value.
    pub(super) fn check_enable(&self) -> Result<(), &'static str> {
        let cc = self.cc;
        if cc.mps() > MPS_MAX {
            Err("CC.MPS is above CAP.MPSMAX")
        } else if !matches!(cc.css(), regs::CC_CSS_NVM | regs::CC_CSS_ALL) {
            // CSS 111b, the admin command set only, would require CAP.CSS bit 7.
            Err("CC.CSS selects a command set that is not supported")
        } else if cc.ams() != 0 {
            Err("CC.AMS selects an arbitration that is not supported")
        } else if self.aqa.asqs() == 0 || self.aqa.acqs() == 0 {
            Err("AQA asks for an admin queue of one entry")
        } else if !(self.asq | self.acq).is_multiple_of(self.page_size() as u64) {
            Err("ASQ or ACQ is not aligned to CC.MPS")
        } else {
            Ok(())
        }
    }
}

/// Reaction to a condition that affects the whole controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(not(feature = "faults"), expect(dead_code, reason = "for fault injection only"))]
pub(crate) enum Response {
    Nothing,
    /// Enter a fatal state (CSTS.CFS), for this reason.
    Fail(&'static str),
    /// Reset, and restore the registers' power-on values.
    Reset,
}

/// Override of a controller's behavior.
pub(crate) trait ControlOverride: Any + Send {
    /// Changes the register values that a host reads.
    fn read(&self, image: &mut RegisterImage);

    /// Handles a host's write of `value` to the register at `offset`; `cc` is CC before the write.
    /// Returns true if the write is ignored.
    fn write(&mut self, offset: u64, value: u32, cc: Cc) -> bool;

    /// Returns the result of an admin command, or `None` to execute it normally.
    fn admin(&mut self, sqe: &Sqe) -> Option<Executed>;

    /// Override of the controller's queues on an I/O thread.
    fn queues(&self) -> Box<dyn QueueOverride>;

    /// Handles a condition that an I/O thread detected. `ready` is true if the controller is ready.
    fn condition(&mut self, condition: Condition, ready: bool) -> Response;

    /// Handles a function level reset.
    fn function_reset(&mut self);

    /// Handles the end of a reset.
    fn reset_ended(&mut self);
}
