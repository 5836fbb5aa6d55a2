//! The command line of `verify`.

use super::job::JobLimits;
use crate::output::Output;
use crate::overwrite::Overwrite;
use crate::parse;
use crate::queue_options::{CompletionMode, DoorbellMode, attach_options};
use crate::target::{self, Target};
use shadowbell_driver::{AttachOptions, Recovery, Timeouts};
use std::time::Duration;

/// Verify that a controller keeps what it is given: everything at once, every byte checked
///
/// Overwrites the target. Ends with status 1 if a block did not hold what it had to, or a command
/// was lost or failed.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct Args {
    /// What to verify
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// How long: 10, 500ms, 2m
    #[arg(long, default_value = "10", value_parser = parse::time, value_name = "TIME")]
    pub runtime: Duration,
    /// End each job after so many commands, instead of after a time
    #[arg(long, alias = "number_ios", conflicts_with = "runtime", value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub number_ios: Option<u64>,
    /// Commands that each job keeps in flight
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    pub iodepth: u16,
    /// Jobs: each has a thread, a queue pair and its own part of the target
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub numjobs: u16,
    /// Bytes of the longest command; the shortest is one block
    #[arg(long, default_value = "64k", value_parser = parse::size, value_name = "BYTES")]
    pub max_bs: u64,
    /// The percentage of reads and compares
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub rwmixread: u8,
    /// Use so much of the target [default: 256 MiB, or what there is]
    #[arg(long, value_parser = parse::size, value_name = "BYTES")]
    pub size: Option<u64>,
    /// Where to begin
    #[arg(long, default_value = "0", value_parser = parse::offset, value_name = "BYTES")]
    pub offset: u64,
    #[command(flatten)]
    pub(crate) overwrite: Overwrite,
    /// How to ring: `auto` takes the best that the controller has
    #[arg(long, value_enum, default_value_t = DoorbellMode::Auto)]
    pub doorbells: DoorbellMode,
    /// How to find completions
    #[arg(long, value_enum, default_value_t = CompletionMode::Adaptive)]
    pub completion: CompletionMode,
    /// A command that is not completed after this time is aborted; then its queue is created again,
    /// then the controller is reset
    #[arg(long, default_value = "30", value_parser = parse::time, value_name = "TIME")]
    pub timeout: Duration,
    /// The same for an administrative command
    #[arg(long, default_value = "10", value_parser = parse::time, value_name = "TIME")]
    pub admin_timeout: Duration,
    /// How often the driver submits a command again that recovery took back
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub repeats: u8,
    /// How often a command that ended with an error is submitted again
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub retries: u32,
    /// Seed of everything that is random
    #[arg(long, alias = "randseed", default_value_t = 0x5eed)]
    pub seed: u64,
    /// Sentences, or JSON.
    #[command(flatten)]
    pub output: Output,
}

impl Args {
    pub(super) fn attach_options(&self) -> AttachOptions {
        let iodepth = self.iodepth.into();
        AttachOptions {
            max_transfer_bytes: self.max_bs.clamp(1 << 20, u64::from(u32::MAX)),
            timeouts: Timeouts {
                io: self.timeout,
                admin: self.admin_timeout,
                ..Timeouts::default()
            },
            recovery: Recovery { repeats: self.repeats, ..Recovery::default() },
            ..attach_options(self.numjobs, iodepth, 64, self.doorbells.into(), self.completion)
        }
    }

    pub(super) fn limits(&self) -> JobLimits {
        JobLimits {
            depth: self.iodepth.into(),
            commands: self.number_ios,
            retries: self.retries,
            // Recovery ends what it can not save, and takes its time: this is for what it does not
            // see.
            stall_timeout: (self.timeout + self.admin_timeout)
                .saturating_mul(8 * (u32::from(self.repeats) + 1))
                .max(Duration::from_secs(60)),
        }
    }
}
