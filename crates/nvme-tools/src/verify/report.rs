//! Results of `verify` as text and JSON.

use super::args::Args;
use super::expected_data::Kind;
use super::job::JobResult;
use serde_json::{Value, json};
use shadowbell_driver::RecoveryStats;
use shadowbell_process::units;
use std::io::{self, Write};

/// Results of a run.
pub struct VerifyReport {
    pub(super) seconds: f64,
    pub(super) recovery: RecoveryStats,
    pub(super) doorbells: &'static str,
    pub(super) device: String,
    pub(super) found: JobResult,
    /// True if a signal ended the load early.
    pub(super) interrupted: bool,
    /// Error that ended the run early.
    pub(super) outcome: anyhow::Result<()>,
}

impl VerifyReport {
    /// Descriptions of bad blocks and failed commands, only of the first few.
    #[must_use]
    pub fn described(&self) -> &[String] {
        &self.found.described
    }

    /// Number of blocks with wrong content.
    #[must_use]
    pub fn bad_blocks(&self) -> u64 {
        self.found.bad
    }

    /// Counters of the driver's recovery, by name.
    fn recovery(&self) -> [(&'static str, u64); 11] {
        let r = &self.recovery;
        [
            ("late", r.late),
            ("aborts", r.aborts),
            ("queues_recreated", r.queues_recreated),
            ("queues_restored", r.queues_restored),
            ("resets", r.resets),
            ("reset_tries", r.reset_tries),
            ("fatal", r.fatal),
            ("removed", r.removed),
            ("failed", r.failed),
            ("repeated", r.repeated),
            ("ended", r.ended),
        ]
    }

    fn total(&self) -> u64 {
        self.found.commands.iter().sum()
    }

    /// Results as JSON. Later versions only add names.
    #[must_use]
    pub fn json(&self, args: &Args) -> Value {
        let found = &self.found;
        let by_kind: serde_json::Map<_, _> = Kind::ALL
            .iter()
            .zip(found.commands)
            .map(|(k, n)| (k.name().into(), n.into()))
            .collect();
        let recovery: serde_json::Map<_, _> =
            self.recovery().into_iter().map(|(name, n)| (name.into(), n.into())).collect();
        json!({
            "table": "verify",
            "device": self.device,
            "doorbells": self.doorbells,
            "iodepth": args.iodepth,
            "numjobs": args.numjobs,
            "seconds": self.seconds,
            "interrupted": self.interrupted,
            "commands": self.total(),
            "by_kind": by_kind,
            "verified_blocks": found.checked,
            "verify_errors": found.bad,
            "retried": found.retried,
            "failed": found.failed,
            "slowest_ns": u64::try_from(found.slowest.as_nanos()).unwrap_or(u64::MAX),
            "doorbell_mmio_writes": found.queue.doorbell_mmio_writes(),
            "unknown_completions": found.queue.unknown_completions,
            "recovery": recovery,
        })
    }

    /// Prints the report as text.
    ///
    /// # Errors
    /// `out` cannot be written.
    pub fn print(&self, out: &mut impl Write) -> io::Result<()> {
        let found = &self.found;
        let total = self.total();
        writeln!(
            out,
            "{total} commands in {:.2} s, the slowest took {}; {} doorbell MMIO writes",
            self.seconds,
            units::nanoseconds(found.slowest.as_nanos() as f64),
            found.queue.doorbell_mmio_writes()
        )?;
        let kinds = Kind::ALL.iter().zip(found.commands).filter(|(_, count)| *count != 0);
        let kinds: Vec<_> = kinds.map(|(kind, count)| format!("{} {count}", kind.name())).collect();
        writeln!(out, "  {}", kinds.join(", "))?;
        let steps: Vec<_> = self
            .recovery()
            .into_iter()
            .filter(|(_, count)| *count != 0)
            .map(|(name, count)| format!("{} {count}", name.replace('_', " ")))
            .collect();
        if !steps.is_empty() {
            writeln!(out, "  recovery: {}", steps.join(", "))?;
        }
        if found.retried + found.failed != 0 {
            writeln!(out, "  errors: {} retried, {} failed", found.retried, found.failed)?;
        }
        if self.interrupted {
            writeln!(out, "  interrupted: only the writes until then were verified")?;
        }
        writeln!(out, "  verify: {} blocks checked, {} bad", found.checked, found.bad)
    }
}
