//! What a run does, and where.

use crate::queue_options::{CompletionMode, attach_options};
use anyhow::{anyhow, bail};
use clap::ValueEnum;
use shadowbell_driver::{AttachOptions, Doorbells, SpinPolicy, Timeouts};
use std::time::Duration;

/// The most blocks that a run with `--verify` keeps the expected content of: 4 bytes each.
const MAX_VERIFIED: u64 = 1 << 28;

/// A workload, in fio's words.
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
    /// As fio writes it.
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

    /// The percentage that reads, given that of a mixed workload.
    pub(super) fn percent_read(self, mixed: u8) -> u8 {
        match self {
            Self::Read | Self::RandRead => 100,
            Self::Write | Self::RandWrite => 0,
            Self::Rw | Self::RandRw => mixed,
        }
    }
}

/// Who makes and checks the protection information of blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum MetadataMode {
    /// The controller, which inserts, checks and strips it (PRACT)
    #[default]
    Pract,
    /// This program, and the controller checks it, too
    Host,
}

/// A run, checked as far as it can be without the controller.
#[derive(Clone, Debug)]
pub struct LoadConfig {
    /// What to do.
    pub rw: Workload,
    /// Of a mixed workload, the percentage that reads.
    pub rwmixread: u8,
    /// Bytes in each I/O.
    pub bs: u32,
    /// I/Os that each job keeps in flight.
    pub iodepth: u32,
    /// I/Os to ring for at once, at most; 0 for as many as there are.
    pub iodepth_batch: Option<u32>,
    /// Jobs.
    pub numjobs: u16,
    /// Threads that the jobs are spread over.
    pub threads: u16,
    /// How long to measure.
    pub runtime: Duration,
    /// How long to run before that.
    pub ramp_time: Duration,
    /// End each job after so many I/Os instead.
    pub number_ios: Option<u64>,
    /// Start so many I/Os a second in each job, whatever completes.
    pub rate_iops: Option<u64>,
    /// How much of the namespace to use, in bytes; `None` for all.
    pub size: Option<u64>,
    /// Where to begin, in bytes.
    pub offset: u64,
    /// Whether to check the content.
    pub verify: bool,
    /// Who makes and checks protection information.
    pub metadata: MetadataMode,
    /// How to ring.
    pub doorbells: Doorbells,
    /// How to find completions.
    pub completion: CompletionMode,
    /// The longest that a thread that waits adaptively looks before it sleeps, if not the default.
    pub poll_max: Option<Duration>,
    /// When recovery begins.
    pub timeout: Duration,
    /// Processors to run the threads on.
    pub pin: Vec<usize>,
    /// Take the latency of one I/O in so many; `None` to choose by the rate.
    pub latency_sample: Option<u32>,
    /// The process whose processor time is accounted for as the controller's.
    pub server_pid: Option<u32>,
    /// Seed of everything that is random.
    pub seed: u64,
    /// Keep what happens over time, in intervals of this length.
    pub timeline: Option<Duration>,
}

impl Default for LoadConfig {
    /// 4 KiB random reads, 32 in flight, one job, polling, for two seconds.
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
    /// How to attach for this run.
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

    /// Whether it reads and writes.
    pub(super) fn is_mixed(&self) -> bool {
        !matches!(self.rw.percent_read(self.rwmixread), 0 | 100)
    }

    /// How long a device may complete nothing. Longer than recovery takes.
    pub(super) fn stall_timeout(&self) -> Duration {
        let Timeouts { io, admin, .. } = self.attach_options().timeouts;
        io.saturating_add(admin).saturating_mul(4).max(Duration::from_secs(30))
    }

    /// The part of a namespace of `bytes` bytes, in blocks of `block_size`, that each job gets:
    /// how many I/Os fit into it, and at which block the first job's begins.
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
            // Two writes to a block at once leave there whatever they please.
            bail!(
                "with --verify each job needs room for --iodepth ({}) I/Os of {bs} bytes, and has \
                 {ios}; give a larger --size or a smaller --iodepth",
                self.iodepth
            );
        }
        if self.verify && ios.saturating_mul(self.numjobs.into()) > MAX_VERIFIED {
            bail!(
                "--verify keeps account of {MAX_VERIFIED} I/Os of {bs} bytes at most; give a \
                 smaller --size"
            );
        }
        Ok(Slice { ios, blocks_per_io: self.bs / block_size, first_block: self.offset / block })
    }
}

/// Each job's part of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slice {
    /// I/Os that fit into it.
    pub(super) ios: u64,
    /// Logical blocks in each.
    pub(super) blocks_per_io: u32,
    /// Where the first job's part begins; the others follow without a gap.
    pub(super) first_block: u64,
}

impl Slice {
    /// The block at which the part of job `job` begins.
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
