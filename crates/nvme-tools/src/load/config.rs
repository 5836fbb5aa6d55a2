//! Parameters of a run.

use crate::queue_options::{CompletionMode, attach_options};
use anyhow::{anyhow, bail};
use clap::ValueEnum;
use shadowbell_driver::{AttachOptions, Doorbells, SpinPolicy, Timeouts};
use std::time::Duration;

/// Largest number of I/O-sized areas whose expected content `--verify` stores, at 4 bytes each.
const MAX_VERIFIED: u64 = 1 << 28;

/// Workload, under fio's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Workload {
    /// Sequential reads
    Read,
    /// Sequential writes
    Write,
    /// Random reads
    #[value(name = "randread")]
    RandRead,
    /// Random writes
    #[value(name = "randwrite")]
    RandWrite,
    /// Random reads and writes
    #[value(name = "randrw")]
    RandRw,
    /// Sequential reads and writes
    #[value(name = "rw", alias = "readwrite")]
    Rw,
}

impl Workload {
    /// Name in fio's syntax.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::RandRead => "randread",
            Self::RandWrite => "randwrite",
            Self::RandRw => "randrw",
            Self::Rw => "rw",
        }
    }

    pub(crate) fn writes(self) -> bool {
        !matches!(self, Self::Read | Self::RandRead)
    }

    pub(super) fn is_random(self) -> bool {
        matches!(self, Self::RandRead | Self::RandWrite | Self::RandRw)
    }

    /// Percentage of reads in this workload; `mixed` is the percentage for mixed workloads.
    pub(super) fn percent_read(self, mixed: u8) -> u8 {
        match self {
            Self::Read | Self::RandRead => 100,
            Self::Write | Self::RandWrite => 0,
            Self::Rw | Self::RandRw => mixed,
        }
    }
}

/// Side that generates and checks protection information.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum MetadataMode {
    /// Controller, which inserts, checks and strips it (PRACT)
    #[default]
    Pract,
    /// This program; the controller checks it as well
    Host,
}

/// Parameters of a run, validated as far as possible without a controller.
#[derive(Clone, Debug)]
pub struct LoadConfig {
    /// Workload.
    pub rw: Workload,
    /// Percentage of reads in a mixed workload.
    pub rwmixread: u8,
    /// Bytes per I/O.
    pub bs: u32,
    /// I/Os in flight per job.
    pub iodepth: u32,
    /// Largest number of I/Os per doorbell write; 0 for no limit; `None` leaves it to the driver.
    pub iodepth_batch: Option<u32>,
    /// Number of jobs.
    pub numjobs: u16,
    /// Number of threads. The jobs are distributed over the threads.
    pub threads: u16,
    /// Duration of the measurement.
    pub runtime: Duration,
    /// Warm-up time before the measurement.
    pub ramp_time: Duration,
    /// Number of I/Os after which a job ends; replaces `runtime`.
    pub number_ios: Option<u64>,
    /// I/Os per second and job, started at fixed times instead of by completions.
    pub rate_iops: Option<u64>,
    /// Bytes of the namespace to use; `None` for all after `offset`.
    pub size: Option<u64>,
    /// Offset of the first byte to use.
    pub offset: u64,
    /// True if the content is verified.
    pub verify: bool,
    /// Side that generates and checks protection information.
    pub metadata: MetadataMode,
    /// Doorbell mode of the driver.
    pub doorbells: Doorbells,
    /// Completion mode.
    pub completion: CompletionMode,
    /// Longest polling time of an adaptive wait; `None` for the driver's default.
    pub poll_max: Option<Duration>,
    /// Time limit of a command, after which the driver starts recovery.
    pub timeout: Duration,
    /// CPUs to pin the threads to.
    pub pin: Vec<usize>,
    /// Sampling interval of latencies: the latency of one in `latency_sample` I/Os is measured.
    /// With `None`, the interval depends on the rate.
    pub latency_sample: Option<u32>,
    /// Process whose CPU time is reported as the controller's.
    pub server_pid: Option<u32>,
    /// Seed of the random number generator.
    pub seed: u64,
    /// Length of the intervals of a time line; `None` records no time line.
    pub timeline: Option<Duration>,
}

impl Default for LoadConfig {
    /// 4 KiB random reads, 32 in flight, one polling job, for two seconds.
    fn default() -> Self {
        Self {
            rw: Workload::RandRead,
            rwmixread: 70,
            bs: 4096,
            iodepth: 32,
            iodepth_batch: None,
            numjobs: 1,
            threads: 1,
            runtime: Duration::from_secs(2),
            ramp_time: Duration::from_millis(200),
            number_ios: None,
            rate_iops: None,
            size: None,
            offset: 0,
            verify: false,
            metadata: MetadataMode::Pract,
            doorbells: Doorbells::Auto,
            completion: CompletionMode::Poll,
            poll_max: None,
            timeout: Timeouts::default().io,
            pin: Vec::new(),
            latency_sample: None,
            server_pid: None,
            seed: 0x5eed,
            timeline: None,
        }
    }
}

impl LoadConfig {
    /// Options for attaching the controller.
    #[must_use]
    pub fn attach_options(&self) -> AttachOptions {
        let iodepth = self.iodepth;
        let usual = attach_options(self.numjobs, iodepth, 128, self.doorbells, self.completion);
        let max = self.poll_max.unwrap_or(usual.spin.max);
        AttachOptions {
            max_transfer_bytes: u64::from(self.bs).max(1 << 20),
            timeouts: Timeouts { io: self.timeout, ..Timeouts::default() },
            spin: SpinPolicy { max, ..usual.spin },
            ..usual
        }
    }

    /// True if the workload both reads and writes.
    pub(super) fn is_mixed(&self) -> bool {
        !matches!(self.rw.percent_read(self.rwmixread), 0 | 100)
    }

    /// Time without any completion after which the run fails. Longer than the driver's recovery.
    pub(super) fn stall_timeout(&self) -> Duration {
        let Timeouts { io, admin, .. } = self.attach_options().timeouts;
        io.saturating_add(admin).saturating_mul(4).max(Duration::from_secs(30))
    }

    /// Divides the namespace's `bytes` bytes among the jobs: number of I/Os per job, and first
    /// block of the first job.
    pub(super) fn slice(&self, bytes: u64, block_size: u32) -> anyhow::Result<Slice> {
        let block = u64::from(block_size);
        let bs = u64::from(self.bs);
        if bs == 0 || !bs.is_multiple_of(block) {
            bail!("--bs is a multiple of the block size of {block_size} bytes, not {bs}");
        }
        if !self.offset.is_multiple_of(block) {
            bail!("--offset is a multiple of the block size of {block_size} bytes");
        }
        let rest = bytes
            .checked_sub(self.offset)
            .ok_or_else(|| anyhow!("--offset {} is past the end at {bytes}", self.offset))?;
        let size = self.size.unwrap_or(rest);
        if size > rest {
            bail!("--size {size} reaches past the end: {rest} bytes are left from the offset on");
        }
        let ios = size / bs / u64::from(self.numjobs);
        if ios == 0 {
            bail!("{size} bytes have no room for {} jobs with I/Os of {bs} bytes", self.numjobs);
        }
        if self.verify && ios < u64::from(self.iodepth) {
            // With fewer blocks than I/Os in flight, two writes of one block could be concurrent,
            // and its content would be unpredictable.
            bail!(
                "with --verify each job needs room for --iodepth ({}) I/Os of {bs} bytes, and has \
                 {ios}; give a larger --size or a smaller --iodepth",
                self.iodepth
            );
        }
        if self.verify && ios.saturating_mul(self.numjobs.into()) > MAX_VERIFIED {
            bail!(
                "--verify stores the expected content of at most {MAX_VERIFIED} I/Os of {bs} \
                 bytes; give a smaller --size"
            );
        }
        Ok(Slice { ios, blocks_per_io: self.bs / block_size, first_block: self.offset / block })
    }
}

/// Division of the namespace into equal shares, one per job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slice {
    /// Number of I/Os that fit into a share.
    pub(super) ios: u64,
    /// Logical blocks per I/O.
    pub(super) blocks_per_io: u32,
    /// First block of the first job's share; the other shares follow without gaps.
    pub(super) first_block: u64,
}

impl Slice {
    /// First block of the share of `job`.
    pub(super) fn of_job(&self, job: u16) -> u64 {
        self.first_block + u64::from(job) * self.ios * u64::from(self.blocks_per_io)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jobs_share_the_target() {
        let config =
            |numjobs, size, offset| LoadConfig { numjobs, size, offset, ..LoadConfig::default() };
        let slice = config(2, None, 8192).slice(1 << 20, 512).unwrap();
        assert_eq!(slice, Slice { ios: 127, blocks_per_io: 8, first_block: 16 });
        assert_eq!((slice.of_job(0), slice.of_job(1)), (16, 16 + 127 * 8));
        let slice = config(1, Some(8192), 0).slice(1 << 20, 4096).unwrap();
        assert_eq!((slice.ios, slice.blocks_per_io), (2, 1));
        for (config, bytes, block_size, words) in [
            (config(1, None, 2 << 20), 1 << 20, 512, "past the end"),
            (config(1, Some(2 << 20), 0), 1 << 20, 512, "reaches past the end"),
            (config(1, None, 100), 1 << 20, 512, "--offset is a multiple"),
            (config(4, None, 0), 12_288, 512, "no room for 4 jobs"),
            (LoadConfig { bs: 512, ..LoadConfig::default() }, 1 << 20, 4096, "--bs is a multiple"),
            (LoadConfig { verify: true, ..LoadConfig::default() }, 65_536, 512, "larger --size"),
            (LoadConfig { verify: true, ..LoadConfig::default() }, 4 << 40, 512, "smaller --size"),
        ] {
            let error = config.slice(bytes, block_size).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
