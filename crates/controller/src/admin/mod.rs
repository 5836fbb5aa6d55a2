//! Admin commands: decoding, checks and data structures, independent of the control plane. This
//! file has the shared parts: limits, the CPU time budget, and out-of-band commands.

pub(crate) mod events;
pub(crate) mod features;
pub(crate) mod identify;
pub(crate) mod logs;
pub(crate) mod namespace_management;
pub(crate) mod persistent_events;
pub(crate) mod sanitize;
pub(crate) mod self_test;
pub(crate) mod telemetry;

use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{GetLogPage, Identify};
use shadowbell_spec::log::{ErrorLogEntry, SmartHealth, lid};
use std::time::{Duration, Instant};

/// Maximum number of concurrent Abort commands: ACL of Identify Controller plus 1, because ACL is
/// 0's based.
pub(crate) const ABORT_LIMIT: u32 = 4;
/// Maximum number of outstanding Asynchronous Event Requests: AERL of Identify Controller plus 1,
/// because AERL is 0's based.
pub(crate) const MAX_EVENT_REQUESTS: usize = 4;
/// Number of entries of the Error Information log page: ELPE + 1 of Identify Controller.
pub(crate) const ERROR_LOG_ENTRIES: usize = 64;
/// Maximum duration of an extended self-test in minutes: EDSTT of Identify Controller.
pub(crate) const EXTENDED_MINUTES: u16 = 30;
/// Maximum size of the Persistent Event log page in units of 64 KiB: PELS of Identify Controller.
pub(crate) const PELS: u32 = 1;
/// Composite temperature of the emulated controller in kelvins.
pub(crate) const TEMPERATURE: u16 = 300;
/// Warning threshold of the composite temperature in kelvins: WCTEMP of Identify Controller.
pub(crate) const WARNING_TEMPERATURE: u16 = 343;
/// Critical threshold of the composite temperature in kelvins: CCTEMP of Identify Controller.
pub(crate) const CRITICAL_TEMPERATURE: u16 = 358;
/// Firmware revision: the version of this program, truncated to the field.
pub(crate) const FIRMWARE_REVISION: [u8; 8] = firmware_revision();

/// Pads or truncates the version to an ASCII field.
const fn firmware_revision() -> [u8; 8] {
    let version = env!("CARGO_PKG_VERSION").as_bytes();
    let mut field = [b' '; 8];
    let mut at = 0;
    while at < version.len() && at < field.len() {
        field[at] = version[at];
        at += 1;
    }
    field
}

/// Divisor of the CPU time that a controller's admin commands may use in the long term: a fifth of
/// one CPU.
const CPU_SHARE_DIVISOR: u32 = 5;
/// CPU time of a full budget. After an idle time, commands can use this much without delay.
const BURST: Duration = Duration::from_millis(50);
/// CPU time that must be available again before a controller with an exhausted budget resumes.
const REFILL: Duration = Duration::from_millis(2);
/// Minimum interval between log messages about an exhausted budget.
const REPORT_INTERVAL: Duration = Duration::from_secs(60);

/// CPU time budget of a controller's admin commands. It refills at the rate of
/// [`CPU_SHARE_DIVISOR`], up to [`BURST`]. A host in normal operation does not exhaust it. If the
/// budget is exhausted, commands are delayed and do not fail.
#[derive(Debug)]
pub(crate) struct Budget {
    /// Time when the budget is full again. The CPU time that the budget lacks is the time until
    /// then, divided by `CPU_SHARE_DIVISOR`.
    full_at: Option<Instant>,
    /// Time before which no command is executed.
    resume_at: Option<Instant>,
    reported_at: Option<Instant>,
}

impl Budget {
    pub(crate) const fn new() -> Self {
        Self { full_at: None, resume_at: None, reported_at: None }
    }

    /// Charges CPU time. Returns true if the budget is exhausted and the caller should log this; at
    /// most once per [`REPORT_INTERVAL`].
    pub(crate) fn spend(&mut self, used: Duration, now: Instant) -> bool {
        let full_at = self.full_at.map_or(now, |at| at.max(now)) + used * CPU_SHARE_DIVISOR;
        self.full_at = Some(full_at);
        let missing = full_at.saturating_duration_since(now);
        if missing <= BURST * CPU_SHARE_DIVISOR {
            return false;
        }
        self.resume_at =
            Some(now + (missing - BURST * CPU_SHARE_DIVISOR) + REFILL * CPU_SHARE_DIVISOR);
        let is_new =
            self.reported_at.is_none_or(|at| now.saturating_duration_since(at) >= REPORT_INTERVAL);
        if is_new {
            self.reported_at = Some(now);
        }
        is_new
    }

    /// Time when command execution resumes; `None` if commands need not wait at `now`.
    pub(crate) fn wait_until(&self, now: Instant) -> Option<Instant> {
        self.resume_at.filter(|at| *at > now)
    }
}

/// Out-of-band admin command: Identify or Get Log Page of a caller other than the host, for
/// [`Controller::out_of_band`](crate::Controller::out_of_band).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutOfBandCommand {
    /// Identify data structure of 4096 bytes.
    Identify {
        /// CNS value; see [`shadowbell_spec::identify::cns`].
        cns: u8,
        /// NSID, for structures of a namespace.
        nsid: u32,
    },
    /// Log page of at most 4096 bytes; see [`shadowbell_spec::log::lid`]. It is read with Retain
    /// Asynchronous Event, so neither events nor lists of changes are cleared.
    LogPage(u8),
}

impl OutOfBandCommand {
    /// Equivalent admin command.
    pub(crate) fn sqe(self) -> Sqe {
        match self {
            Self::Identify { cns, nsid } => {
                Sqe::identify(nsid, Identify { cns, ..Identify::default() }, 0)
            }
            Self::LogPage(lid) => {
                let bytes = match lid {
                    lid::ERROR_INFORMATION => 64 * size_of::<ErrorLogEntry>(),
                    lid::SMART_HEALTH => size_of::<SmartHealth>(),
                    _ => 4096,
                };
                let numd0 = u32::try_from(bytes / 4).map_or(0, |dwords| dwords - 1);
                let fields = GetLogPage { lid, rae: true, numd0, ..GetLogPage::default() };
                Sqe::get_log_page(0, fields, 0)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_gets_a_fifth_of_a_cpu_and_normal_load_is_not_limited() {
        let (mut budget, start) = (Budget::new(), Instant::now());
        let turn = Duration::from_micros(100);
        let (mut now, mut used, mut reported_at) = (start, Duration::ZERO, 0);
        while now - start < Duration::from_secs(130) {
            if let Some(until) = budget.wait_until(now) {
                now = until;
            }
            now += turn;
            used += turn;
            reported_at += u32::from(budget.spend(turn, now));
        }
        let fifth = (now - start) / CPU_SHARE_DIVISOR;
        assert!(used >= fifth && used <= fifth + BURST + turn, "{used:?}");
        assert_eq!(reported_at, 3, "once a minute");

        // A booting guest: a thousand commands of 20 us within half a second.
        let mut budget = Budget::new();
        for n in 0..1000 {
            let now = start + Duration::from_micros(n * 500);
            assert_eq!(budget.wait_until(now), None);
            assert!(!budget.spend(Duration::from_micros(20), now));
        }
    }
}
