//! Command line of `verify`.

use super::job::JobLimits;
use crate::overwrite::Overwrite;
use crate::queue_options::{CompletionMode, DoorbellMode, attach_options};
use shadowbell_config::parse;
use shadowbell_config::target::{self, Target};
use shadowbell_driver::{AttachOptions, Recovery, Timeouts};
use shadowbell_process::output::Output;
use std::time::Duration;

/// Verify the data integrity of a controller: mixed commands, every byte checked
///
/// Overwrites the target. The exit status is 1 if a block has wrong content, or if a command was
/// lost or failed.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct Args {
    /// Namespace to verify
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// Duration: 10, 500ms, 2m
    #[arg(long, default_value = "10", value_parser = parse::time, value_name = "TIME")]
    pub runtime: Duration,
    /// End each job after N commands instead of after a time
    #[arg(long, alias = "number_ios", conflicts_with = "runtime", value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub number_ios: Option<u64>,
    /// Commands in flight per job
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    pub iodepth: u16,
    /// Number of jobs; each has a thread, a queue pair and its own part of the target
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    pub numjobs: u16,
    /// Size of the largest command; the smallest is one block
    #[arg(long, default_value = "64k", value_parser = parse::size, value_name = "BYTES")]
    pub max_bs: u64,
    /// Percentage of reads and compares
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u8).range(0..=100))]
    pub rwmixread: u8,
    /// Bytes of the target to use [default: 256 MiB, or all if it is smaller]
    #[arg(long, value_parser = parse::size, value_name = "BYTES")]
    pub size: Option<u64>,
    /// Offset of the first byte to use
    #[arg(long, default_value = "0", value_parser = parse::offset, value_name = "BYTES")]
    pub offset: u64,
    #[command(flatten)]
    pub(crate) overwrite: Overwrite,
    /// Doorbell mode of the driver; `auto` is the best that the controller supports
    #[arg(long, value_enum, default_value_t = DoorbellMode::Auto)]
    pub doorbells: DoorbellMode,
    /// Completion mode
    #[arg(long, value_enum, default_value_t = CompletionMode::Adaptive)]
    pub completion: CompletionMode,
    /// Time limit of a command. On expiry, the command is aborted; if that fails, its queue is
    /// recreated; if that fails, the controller is reset
    #[arg(long, default_value = "30", value_parser = parse::time, value_name = "TIME")]
    pub timeout: Duration,
    /// Time limit of an admin command
    #[arg(long, default_value = "10", value_parser = parse::time, value_name = "TIME")]
    pub admin_timeout: Duration,
    /// Number of times that the driver repeats a command after recovery
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub repeats: u8,
    /// Number of times that a failed command is submitted again
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub retries: u32,
    /// Seed of the random number generator
    #[arg(long, alias = "randseed", default_value_t = 0x5eed)]
    pub seed: u64,
    /// Output format.
    #[command(flatten)]
    pub(crate) output: Output,
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
            // Time limit in case that the driver's recovery fails. Recovery bounds the time of
            // every command, so this limit is much longer than recovery takes.
            stall_timeout: (self.timeout + self.admin_timeout)
                .saturating_mul(8 * (u32::from(self.repeats) + 1))
                .max(Duration::from_secs(60)),
        }
    }
}
