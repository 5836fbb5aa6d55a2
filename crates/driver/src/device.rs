//! The controller's registers: what it can do, and turning it on and off.

use crate::error::AttachError;
use crate::options::Timeouts;
use crate::transport::{Transport, TransportError};
use shadowbell_spec::regs::{self, Aqa, Cap, Cc, Crto, Csts, Vs};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// CAP.TO and CRTO count in these. Base 2.1, 3.1.4.1.
const READY_UNIT: Duration = Duration::from_millis(500);

/// The largest memory page that is used unasked, in bytes. Every queue takes two at least, and a
/// controller can claim that it knows none below 128 MiB.
const LARGEST_PAGE: u64 = 1 << 20;

/// The registers that say what a controller is and how it does. See [`Admin::registers`].
///
/// [`Admin::registers`]: crate::Admin::registers
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Registers {
    /// Controller Capabilities.
    pub cap: Cap,
    /// Version.
    pub vs: Vs,
    /// Controller Configuration.
    pub cc: Cc,
    /// Controller Status.
    pub csts: Csts,
}

/// A controller, seen through its registers.
pub(crate) struct Device {
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) cap: Cap,
    pub(crate) vs: Vs,
    /// The memory page size in use, CC.MPS.
    pub(crate) page: u64,
    pub(crate) timeouts: Timeouts,
    ready_limit: Duration,
}

/// Why a controller did not arrive in a state.
pub(crate) enum NotThere {
    Late { waited: Duration, csts: Csts },
    Fatal,
    Absent,
    Transport(TransportError),
}

/// An administrative queue for [`Device::enable`]: addresses, and sizes in entries.
#[derive(Clone, Copy)]
pub(crate) struct AdminQueues {
    pub(crate) asq: u64,
    pub(crate) acq: u64,
    pub(crate) sq_entries: u16,
    pub(crate) cq_entries: u16,
}

impl Device {
    /// Looks at the capabilities, and chooses a page size.
    pub(crate) fn probe(
        transport: Arc<dyn Transport>,
        page_size: Option<u32>,
        timeouts: Timeouts,
    ) -> Result<Self, AttachError> {
        let device = || transport.name().to_owned();
        let cap = transport.read64(regs::CAP)?;
        let vs = transport.read32(regs::VS)?;
        if cap == u64::MAX || vs == u32::MAX {
            return Err(AttachError::Absent { device: device() });
        }
        let cap = Cap::from_bits(cap);
        let unsupported = |what: String| AttachError::Unsupported { device: device(), what };
        if cap.css() & regs::CAP_CSS_NVM == 0 {
            return Err(unsupported("does not support the NVM command set (CAP.CSS)".into()));
        }
        let min = 1u64 << (12 + u32::from(cap.mpsmin()));
        let max = 1u64 << (12 + u32::from(cap.mpsmax()));
        let page = page_size.map_or(min, u64::from);
        if page < min || page > max {
            return Err(unsupported(format!(
                "supports memory pages of {min} to {max} bytes and not of {page} (CAP.MPSMIN)"
            )));
        }
        if page_size.is_none() && page > LARGEST_PAGE {
            return Err(unsupported(format!(
                "supports no memory pages below {page} bytes (CAP.MPSMIN), of which every queue takes \
                 two; set `page_size` if that is meant so"
            )));
        }
        if cap.mqes() == 0 {
            return Err(unsupported("supports queues of one entry only (CAP.MQES)".into()));
        }
        let mut ready_limit = READY_UNIT * u32::from(cap.to()).max(1);
        if cap.crwms() {
            let crto = Crto::from_bits(transport.read32(regs::CRTO)?);
            ready_limit = ready_limit.max(READY_UNIT * u32::from(crto.crwmt()));
        }
        let ready_limit = timeouts.ready.unwrap_or(ready_limit);
        Ok(Self { transport, cap, vs: Vs::from_bits(vs), page, timeouts, ready_limit })
    }

    pub(crate) fn name(&self) -> &str {
        self.transport.name()
    }

    pub(crate) fn csts(&self) -> Result<Csts, TransportError> {
        Ok(Csts::from_bits(self.transport.read32(regs::CSTS)?))
    }

    fn cc(&self) -> Result<Cc, TransportError> {
        Ok(Cc::from_bits(self.transport.read32(regs::CC)?))
    }

    pub(crate) fn registers(&self) -> Result<Registers, TransportError> {
        Ok(Registers { cap: self.cap, vs: self.vs, cc: self.cc()?, csts: self.csts()? })
    }

    /// What is wrong with the controller that no completion will tell, if anything is.
    pub(crate) fn ailment(&self) -> Option<String> {
        match self.csts() {
            Err(error) => Some(error.to_string()),
            Ok(csts) if csts.into_bits() == u32::MAX => {
                Some(format!("{} was removed (its registers read as all ones)", self.name()))
            }
            Ok(csts) if csts.cfs() => {
                Some(format!("{} reports a fatal status (CSTS.CFS)", self.name()))
            }
            Ok(_) => None,
        }
    }

    /// Waits until `there` says so of CSTS.
    fn wait(
        &self,
        limit: Duration,
        fatal_matters: bool,
        there: impl Fn(Csts) -> bool,
    ) -> Result<(), NotThere> {
        let began = Instant::now();
        let mut pause = Duration::from_micros(20);
        loop {
            // The clock first: if this thread was not run for long, the controller still gets a
            // last look.
            let waited = began.elapsed();
            let csts = self.csts().map_err(NotThere::Transport)?;
            if csts.into_bits() == u32::MAX {
                return Err(NotThere::Absent);
            }
            if there(csts) {
                return Ok(());
            }
            if fatal_matters && csts.cfs() {
                return Err(NotThere::Fatal);
            }
            if waited >= limit {
                return Err(NotThere::Late { waited, csts });
            }
            std::thread::sleep(pause.min(limit - waited));
            pause = (pause * 2).min(Duration::from_millis(10));
        }
    }

    /// Says in the terms of an attach why `step` did not work.
    pub(crate) fn attach_error(&self, step: &'static str, not: NotThere) -> AttachError {
        let device = self.name().to_owned();
        match not {
            NotThere::Late { waited, csts } => {
                AttachError::NotReady { device, step, waited, csts: csts.into_bits() }
            }
            NotThere::Fatal => AttachError::Fatal { device, step },
            NotThere::Absent => AttachError::Absent { device },
            NotThere::Transport(error) => AttachError::Transport(error),
        }
    }

    /// Disables the controller, and waits until it is: it touches no memory any more. Base 2.1,
    /// 3.5.1 "Memory-based Controller Initialization".
    pub(crate) fn disable(&self) -> Result<(), NotThere> {
        let cc = self.cc().map_err(NotThere::Transport)?;
        if cc.into_bits() == u32::MAX {
            return Err(NotThere::Absent);
        }
        if cc.en() {
            // CC.EN is not to be cleared while the controller is still getting ready, unless it
            // never will.
            match self.wait(self.ready_limit, true, |csts| csts.rdy()) {
                Ok(()) | Err(NotThere::Fatal | NotThere::Late { .. }) => {}
                Err(error) => return Err(error),
            }
            self.set_cc(cc.with_en(false).with_shn(regs::SHN_NONE))?;
        }
        self.wait(self.ready_limit, false, |csts| !csts.rdy())
    }

    /// Enables the controller with these admin queues. It must be disabled.
    pub(crate) fn enable(&self, queues: AdminQueues) -> Result<(), NotThere> {
        let aqa = Aqa::new()
            .with_asqs(queues.sq_entries.saturating_sub(1))
            .with_acqs(queues.cq_entries.saturating_sub(1));
        let failed = NotThere::Transport;
        self.transport.write32(regs::AQA, aqa.into_bits()).map_err(failed)?;
        self.transport.write64(regs::ASQ, queues.asq).map_err(failed)?;
        self.transport.write64(regs::ACQ, queues.acq).map_err(failed)?;
        let cc = Cc::new()
            .with_en(true)
            .with_css(regs::CC_CSS_NVM)
            .with_mps((self.page.trailing_zeros() - 12) as u8)
            .with_iosqes(shadowbell_spec::Sqe::SIZE.trailing_zeros() as u8)
            .with_iocqes(shadowbell_spec::Cqe::SIZE.trailing_zeros() as u8);
        self.set_cc(cc)?;
        self.wait(self.ready_limit, true, |csts| csts.rdy())?;
        // What was reset before is no news: NSSRO is cleared by writing it (Base 2.1, 3.1.4.6).
        if self.csts().map_err(NotThere::Transport)?.nssro() {
            let nssro = Csts::new().with_nssro(true);
            self.transport.write32(regs::CSTS, nssro.into_bits()).map_err(NotThere::Transport)?;
        }
        Ok(())
    }

    /// Tells the controller to get ready for power off (CC.SHN), and waits until it is. Base 2.1,
    /// 3.6.1 "Memory-based Controller Shutdown".
    pub(crate) fn shut_down(&self, limit: Duration) -> Result<(), NotThere> {
        let cc = self.cc().map_err(NotThere::Transport)?;
        if cc.into_bits() == u32::MAX {
            return Err(NotThere::Absent);
        }
        self.set_cc(cc.with_shn(regs::SHN_NORMAL))?;
        self.wait(limit, true, |csts| csts.shst() == regs::SHST_COMPLETE)
    }

    fn set_cc(&self, cc: Cc) -> Result<(), NotThere> {
        self.transport.write32(regs::CC, cc.into_bits()).map_err(NotThere::Transport)
    }
}

impl std::fmt::Display for NotThere {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Late { waited, csts } => {
                write!(f, "not done after {waited:?}, CSTS {:#010x}", csts.into_bits())
            }
            Self::Fatal => f.write_str("it reports a fatal status (CSTS.CFS)"),
            Self::Absent => f.write_str("it was removed (its registers read as all ones)"),
            Self::Transport(error) => write!(f, "{error}"),
        }
    }
}
