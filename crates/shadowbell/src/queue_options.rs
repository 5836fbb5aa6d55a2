//! How the queues of a measurement work: how doorbells are rung and completions found.

use clap::ValueEnum;
use shadowbell_driver::{AttachOptions, Doorbells, SpinPolicy};

/// How doorbells are rung.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum DoorbellMode {
    /// The best that the controller has: shadow, else mapped, else mmio
    #[default]
    Auto,
    /// Shadow doorbells: a store in shared memory, an MMIO write only if the controller asks
    Shadow,
    /// An MMIO write each time, which the other end traps
    Mmio,
    /// A store into a page that the controller polls
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

/// What reports call a way to ring.
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

/// How completions are found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum CompletionMode {
    /// By looking all the time: a processor for each thread
    #[default]
    Poll,
    /// By sleeping until the interrupt
    Interrupt,
    /// By looking for up to 100 us (`bench --poll-max`) as long as that pays, then sleeping
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

/// How to attach for `queue_pairs` queue pairs with `iodepth` commands in flight in each, and
/// `min_depth` entries at least.
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
        // One entry of a ring stays empty.
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
