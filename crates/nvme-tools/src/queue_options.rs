//! Doorbell and completion modes of the driver.

use clap::ValueEnum;
use shadowbell_driver::{AttachOptions, Doorbells, SpinPolicy};

/// Doorbell mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DoorbellMode {
    /// Best mode that the controller supports: shadow, else mapped, else mmio
    #[default]
    Auto,
    /// Shadow doorbells: a store in shared memory, and an MMIO write only if EventIdx requires it
    Shadow,
    /// MMIO write each time, which the server traps
    Mmio,
    /// Store into a page that the controller polls
    Mapped,
}

impl From<DoorbellMode> for Doorbells {
    fn from(mode: DoorbellMode) -> Self {
        match mode {
            DoorbellMode::Auto => Self::Auto,
            DoorbellMode::Shadow => Self::Shadow,
            DoorbellMode::Mmio => Self::Mmio,
            DoorbellMode::Mapped => Self::Mapped,
        }
    }
}

/// Name of a doorbell mode in reports.
#[must_use]
pub(crate) fn doorbells_name(doorbells: Doorbells) -> &'static str {
    match doorbells {
        Doorbells::Auto => "auto",
        Doorbells::Shadow => "shadow",
        Doorbells::Mmio => "mmio",
        Doorbells::Mapped => "mapped",
        _ => "other",
    }
}

/// Completion mode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum CompletionMode {
    /// Poll all the time, which uses a CPU per thread
    #[default]
    Poll,
    /// Sleep until the interrupt
    Interrupt,
    /// Poll for up to 100 us (`bench --poll-max`) while that is worthwhile, then sleep
    Adaptive,
}

impl CompletionMode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Interrupt => "interrupt",
            Self::Adaptive => "adaptive",
        }
    }
}

/// Options for attaching with `queue_pairs` queue pairs of `iodepth` commands in flight, and at
/// least `min_depth` entries.
#[must_use]
pub(crate) fn attach_options(
    queue_pairs: u16,
    iodepth: u32,
    min_depth: u32,
    doorbells: Doorbells,
    completion: CompletionMode,
) -> AttachOptions {
    AttachOptions {
        queue_pairs,
        // A queue of N entries holds N - 1 commands.
        queue_depth: (iodepth + 1).next_power_of_two().clamp(min_depth, 65_536),
        doorbells,
        interrupts: completion != CompletionMode::Poll,
        spin: match completion {
            CompletionMode::Interrupt => SpinPolicy::SLEEP,
            _ => SpinPolicy::default(),
        },
        ..AttachOptions::default()
    }
}
