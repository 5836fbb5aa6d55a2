//! Controller registers: capabilities, enabling, disabling and shutdown.

use crate::error::AttachError;
use crate::options::Timeouts;
use crate::queue::QueueLayout;
use crate::transport::{Transport, TransportError};
use shadowbell_spec::regs::{self, Aqa, Cap, Cc, Crto, Csts, Vs};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Unit of CAP.TO and CRTO. Base 2.1, 3.1.4.1.
const READY_UNIT: Duration = Duration::from_millis(500);

/// Largest memory page size in bytes that is used without an explicit option. The reason for a
/// limit: the smallest page size of a controller can be 128 MiB, and every queue takes at least two
/// pages.
const LARGEST_PAGE: u64 = 1 << 20;

/// Capability and status registers of a controller. See [`Admin::registers`].
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

/// Register access to a controller, with its capabilities and time limits.
pub(crate) struct Device {
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) cap: Cap,
    pub(crate) vs: Vs,
    /// Memory page size in use (CC.MPS), in bytes.
    pub(crate) page: u64,
    pub(crate) timeouts: Timeouts,
    ready_limit: Duration,
}

/// Failure of a controller to reach a state.
pub(crate) enum StateError {
    Timeout { waited: Duration, csts: Csts },
    Fatal,
    Absent,
    Transport(TransportError),
}

impl Device {
    /// Reads the capabilities, and chooses a memory page size.
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
                 two; set `page_size` to accept that"
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

    /// The reason why no further completion can arrive, according to the registers: the device was
    /// removed, or reports a fatal status. `None` if the device is healthy.
    pub(crate) fn broken(&self) -> Option<String> {
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

    /// Waits until CSTS satisfies `is_reached`.
    fn wait(
        &self,
        limit: Duration,
        stop_if_fatal: bool,
        is_reached: impl Fn(Csts) -> bool,
    ) -> Result<(), StateError> {
        let began = Instant::now();
        let mut pause = Duration::from_micros(20);
        loop {
            // The clock is read before CSTS. If this thread was not scheduled for a long time, CSTS
            // is still read once before the timeout is reported.
            let waited = began.elapsed();
            let csts = self.csts().map_err(StateError::Transport)?;
            if csts.into_bits() == u32::MAX {
                return Err(StateError::Absent);
            }
            if is_reached(csts) {
                return Ok(());
            }
            if stop_if_fatal && csts.cfs() {
                return Err(StateError::Fatal);
            }
            if waited >= limit {
                return Err(StateError::Timeout { waited, csts });
            }
            std::thread::sleep(pause.min(limit - waited));
            pause = (pause * 2).min(Duration::from_millis(10));
        }
    }

    /// Converts the failure of the attach step `step` into an error.
    pub(crate) fn attach_error(&self, step: &'static str, error: StateError) -> AttachError {
        let device = self.name().to_owned();
        match error {
            StateError::Timeout { waited, csts } => {
                AttachError::NotReady { device, step, waited, csts: csts.into_bits() }
            }
            StateError::Fatal => AttachError::Fatal { device, step },
            StateError::Absent => AttachError::Absent { device },
            StateError::Transport(error) => AttachError::Transport(error),
        }
    }

    /// Disables the controller and waits until CSTS.RDY is clear. Afterwards the controller
    /// accesses no memory. Base 2.1, 3.5.1 "Memory-based Controller Initialization".
    pub(crate) fn disable(&self) -> Result<(), StateError> {
        let cc = self.cc().map_err(StateError::Transport)?;
        if cc.into_bits() == u32::MAX {
            return Err(StateError::Absent);
        }
        if cc.en() {
            // CC.EN must not be cleared before CSTS.RDY is set, so wait for CSTS.RDY first. A fatal
            // status or a timeout means that CSTS.RDY will never be set.
            match self.wait(self.ready_limit, true, |csts| csts.rdy()) {
                Ok(()) | Err(StateError::Fatal | StateError::Timeout { .. }) => {}
                Err(error) => return Err(error),
            }
            self.set_cc(cc.with_en(false).with_shn(regs::SHN_NONE))?;
        }
        self.wait(self.ready_limit, false, |csts| !csts.rdy())
    }

    /// Enables the controller with these admin queues. The controller must be disabled.
    pub(crate) fn enable(&self, queues: QueueLayout) -> Result<(), StateError> {
        let aqa = Aqa::new().with_asqs(queues.sq_size0()).with_acqs(queues.cq_size0());
        let failed = StateError::Transport;
        self.transport.write32(regs::AQA, aqa.into_bits()).map_err(failed)?;
        self.transport.write64(regs::ASQ, queues.sq_iova).map_err(failed)?;
        self.transport.write64(regs::ACQ, queues.cq_iova).map_err(failed)?;
        let cc = Cc::new()
            .with_en(true)
            .with_css(regs::CC_CSS_NVM)
            .with_mps((self.page.trailing_zeros() - 12) as u8)
            .with_iosqes(shadowbell_spec::Sqe::SIZE.trailing_zeros() as u8)
            .with_iocqes(shadowbell_spec::Cqe::SIZE.trailing_zeros() as u8);
        self.set_cc(cc)?;
        self.wait(self.ready_limit, true, |csts| csts.rdy())?;
        // NSSRO of an earlier subsystem reset is cleared by writing 1 (Base 2.1, 3.1.4.6).
        // Afterwards NSSRO indicates a new subsystem reset.
        if self.csts().map_err(StateError::Transport)?.nssro() {
            let nssro = Csts::new().with_nssro(true);
            self.transport.write32(regs::CSTS, nssro.into_bits()).map_err(StateError::Transport)?;
        }
        Ok(())
    }

    /// Requests a normal shutdown (CC.SHN) and waits until it is complete. Base 2.1, 3.6.1
    /// "Memory-based Controller Shutdown".
    pub(crate) fn shut_down(&self, limit: Duration) -> Result<(), StateError> {
        let cc = self.cc().map_err(StateError::Transport)?;
        if cc.into_bits() == u32::MAX {
            return Err(StateError::Absent);
        }
        self.set_cc(cc.with_shn(regs::SHN_NORMAL))?;
        self.wait(limit, true, |csts| csts.shst() == regs::SHST_COMPLETE)
    }

    fn set_cc(&self, cc: Cc) -> Result<(), StateError> {
        self.transport.write32(regs::CC, cc.into_bits()).map_err(StateError::Transport)
    }
}

impl std::fmt::Display for StateError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Timeout { waited, csts } => {
                write!(f, "not done after {waited:?}, CSTS {:#010x}", csts.into_bits())
            }
            Self::Fatal => f.write_str("it reports a fatal status (CSTS.CFS)"),
            Self::Absent => f.write_str("it was removed (its registers read as all ones)"),
            Self::Transport(error) => write!(f, "{error}"),
        }
    }
}
