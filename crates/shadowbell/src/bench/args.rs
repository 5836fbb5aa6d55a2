//! What may follow `bench`, under the names that fio has for it, and what it comes to.

use crate::exit;
use crate::serve::options::check_processors;
use crate::target::{self, Target};
use anyhow::{anyhow, bail};
use clap::ValueEnum;
use shadowbell_driver::{AttachOptions, Doorbells, SpinPolicy, Timeouts};
use std::time::Duration;

/// The most blocks that a run with `--verify` keeps account of: 4 bytes each.
const MAX_VERIFIED: u64 = 1 << 28;

/// Measure what a controller can do, under fio's names
///
/// Options are fio's where fio has them. Writing workloads overwrite the target.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct Args {
    /// What to measure
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// What to do
    #[arg(long, value_enum, default_value_t = Workload::RandRead)]
    pub rw: Workload,
    /// Bytes in each I/O: 4k, 1m
    #[arg(long, default_value = "4k", value_parser = parse_bytes, value_name = "BYTES")]
    pub bs: u64,
    /// I/Os that each job keeps in flight
    #[arg(long, default_value_t = 32)]
    pub iodepth: u32,
    /// Ring for so many I/Os at once, at most; 0 for as many as there are
    /// [default: at once while the queue is short, for several while it is long]
    #[arg(long, alias = "iodepth_batch", value_name = "N")]
    pub iodepth_batch: Option<u32>,
    /// Jobs: each has a queue pair and its own part of the target
    #[arg(long, default_value_t = 1)]
    pub numjobs: u16,
    /// Threads to spread the jobs over [default: one for each job]
    #[arg(long)]
    pub threads: Option<u16>,
    /// How long to measure: 10, 500ms, 2m
    #[arg(long, default_value = "10", value_parser = parse_time, value_name = "TIME")]
    pub runtime: Duration,
    /// How long to run before measuring
    #[arg(long, alias = "ramp_time", default_value = "200ms", value_parser = parse_time)]
    #[arg(value_name = "TIME")]
    pub ramp_time: Duration,
    /// End each job after so many I/Os, instead of after a time; measures from the first
    #[arg(long, alias = "number_ios", conflicts_with_all = ["runtime", "ramp_time"])]
    #[arg(value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub number_ios: Option<u64>,
    /// Start so many I/Os a second in each job, at even distances, and take latency from when each
    /// was due: what waits for a place in the queue counts as late
    #[arg(long, alias = "rate_iops", value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub rate_iops: Option<u64>,
    /// Of a mixed workload, the percentage that reads
    #[arg(long, default_value_t = 70, value_parser = clap::value_parser!(u8).range(0..=100))]
    #[arg(value_name = "PERCENT")]
    pub rwmixread: u8,
    /// Use so much of the target [default: all from the offset on]
    #[arg(long, value_parser = parse_bytes, value_name = "BYTES")]
    pub size: Option<u64>,
    /// Where to begin
    #[arg(long, default_value = "0", value_parser = parse_offset, value_name = "BYTES")]
    pub offset: u64,
    /// Check the content: what is written carries checksums, its place and a sequence number, and
    /// is read back at the end. A workload that only reads checks what an earlier one with the
    /// same --bs and --seed has written
    #[arg(long, value_enum, default_value_t = Verify::Off, value_name = "METHOD")]
    pub verify: Verify,
    /// How to ring: `auto` takes the best that the controller has
    #[arg(long, value_enum, default_value_t = DoorbellMode::Auto)]
    pub doorbells: DoorbellMode,
    /// How to find completions
    #[arg(long, value_enum, default_value_t = CompletionMode::Poll)]
    pub completion: CompletionMode,
    /// A command that is not completed after this time is aborted; then its queue is created again,
    /// then the controller is reset
    #[arg(long, default_value = "30", value_parser = parse_time, value_name = "TIME")]
    pub timeout: Duration,
    /// Processors to run the threads on: 0,2
    #[arg(long, value_delimiter = ',', value_name = "CPU", value_parser = processor)]
    pub pin: Vec<usize>,
    /// Take the latency of one I/O in so many [default: as many as about 20000 a second and thread]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub latency_sample: Option<u32>,
    /// Account for the processor time of this process too: the one that serves the TARGET
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub server_pid: Option<u32>,
    /// Seed of everything that is random
    #[arg(long, alias = "randseed", default_value_t = 0x5eed)]
    pub seed: u64,
    /// End with one line of JSON, for machines
    #[arg(long)]
    pub json: bool,
}

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

/// How content is checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Verify {
    /// It is not
    #[default]
    Off,
    /// With a CRC-32C in every 512 bytes
    #[value(alias = "on")]
    Crc32c,
}

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
    /// By looking for up to 100 us as long as that pays, then sleeping
    Adaptive,
}

impl CompletionMode {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Interrupt => "interrupt",
            Self::Adaptive => "adaptive",
        }
    }
}

/// A size in bytes: binary units, as fio has them.
pub(crate) fn parse_bytes(text: &str) -> Result<u64, String> {
    shadowbell_backend::parse_size(text)
}

pub(crate) fn parse_offset(text: &str) -> Result<u64, String> {
    if text.bytes().all(|b| b == b'0') && !text.is_empty() { Ok(0) } else { parse_bytes(text) }
}

/// A processor of this process.
fn processor(text: &str) -> Result<usize, String> {
    let cpu = text.trim().parse();
    let cpu = cpu.map_err(|_| format!("`{text}` is no processor; write for example 0,2"))?;
    check_processors(&[cpu]).map(|()| cpu)
}

/// A time: seconds, or with a unit.
pub(crate) fn parse_time(text: &str) -> Result<Duration, String> {
    let bad = || format!("`{text}` is no time; write for example `10`, `500ms` or `2m`");
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let value = text.strip_suffix(unit).unwrap_or(text);
    let factor = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "" | "s" => 1.0,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(bad()),
    };
    let seconds = value.parse::<f64>().map_err(|_| bad())? * factor;
    Duration::try_from_secs_f64(seconds).map_err(|_| bad())
}

/// A run, checked as far as it can be without the controller.
#[derive(Clone, Debug)]
pub struct Plan {
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
    /// How to ring.
    pub doorbells: Doorbells,
    /// How to find completions.
    pub completion: CompletionMode,
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
}

impl Default for Plan {
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
            doorbells: Doorbells::Auto,
            completion: CompletionMode::Poll,
            timeout: Timeouts::default().io,
            pin: Vec::new(),
            latency_sample: None,
            server_pid: None,
            seed: 0x5eed,
        }
    }
}

impl Args {
    /// What was asked for.
    ///
    /// # Errors
    /// With exit status [`exit::BAD_INPUT`], for options that contradict each other.
    pub fn plan(&self) -> anyhow::Result<Plan> {
        self.check().map_err(exit::bad_input)
    }

    fn check(&self) -> anyhow::Result<Plan> {
        if self.iodepth == 0 || self.iodepth > 65_535 {
            bail!("--iodepth is 1 to 65535, not {}", self.iodepth);
        }
        if self.numjobs == 0 {
            bail!("--numjobs is at least 1");
        }
        let threads = self.threads.unwrap_or(self.numjobs);
        if threads == 0 || threads > self.numjobs {
            bail!("--threads is 1 to --numjobs ({}), not {threads}", self.numjobs);
        }
        if threads < self.numjobs && self.completion != CompletionMode::Poll {
            bail!(
                "a thread that has several jobs can not sleep on one of them: with --completion \
                 {} leave --threads out",
                self.completion.name()
            );
        }
        let bs = u32::try_from(self.bs).map_err(|_| anyhow!("--bs is below 4 GiB"))?;
        if self.number_ios.is_none() && self.runtime.is_zero() {
            bail!("--runtime is more than nothing");
        }
        Ok(Plan {
            rw: self.rw,
            rwmixread: self.rwmixread,
            bs,
            iodepth: self.iodepth,
            iodepth_batch: self.iodepth_batch,
            numjobs: self.numjobs,
            threads,
            runtime: self.runtime,
            ramp_time: if self.number_ios.is_some() { Duration::ZERO } else { self.ramp_time },
            number_ios: self.number_ios,
            rate_iops: self.rate_iops,
            size: self.size,
            offset: self.offset,
            verify: self.verify != Verify::Off,
            doorbells: self.doorbells.into(),
            completion: self.completion,
            timeout: self.timeout,
            pin: self.pin.clone(),
            latency_sample: self.latency_sample,
            server_pid: self.server_pid,
            seed: self.seed,
        })
    }
}

impl Plan {
    /// How to attach for this run.
    #[must_use]
    pub fn attach_options(&self) -> AttachOptions {
        AttachOptions {
            queue_pairs: self.numjobs,
            // One entry of a ring stays empty.
            queue_depth: (self.iodepth + 1).next_power_of_two().clamp(128, 65_536),
            doorbells: self.doorbells,
            interrupts: self.completion != CompletionMode::Poll,
            spin: match self.completion {
                CompletionMode::Interrupt => SpinPolicy::SLEEP,
                _ => SpinPolicy::default(),
            },
            max_transfer_bytes: u64::from(self.bs).max(1 << 20),
            timeouts: Timeouts { io: self.timeout, ..Timeouts::default() },
            ..AttachOptions::default()
        }
    }

    /// How long a device may complete nothing: recovery ends what it can not save, and takes its time.
    pub(super) fn patience(&self) -> Duration {
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
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn plan(options: &str) -> Result<Plan, String> {
        let words = ["bench", "mem:1MiB"].into_iter().chain(options.split_whitespace());
        let line = Line::try_parse_from(words).map_err(|e| e.to_string())?;
        line.args.plan().map_err(|e| {
            assert_eq!(exit::status(&e), exit::BAD_INPUT);
            e.to_string()
        })
    }

    #[test]
    fn the_options_are_fios() {
        let plan = plan(
            "--rw=randrw --bs=8k --iodepth=4 --numjobs=3 --runtime=500ms --ramp_time=1 \
             --rwmixread=30 --size=1m --offset 64k --iodepth_batch 2 --verify=crc32c --seed 7 \
             --doorbells mmio --completion interrupt --pin 0,0 --rate_iops 5000 --server-pid 7",
        )
        .unwrap();
        assert_eq!((plan.rate_iops, plan.server_pid), (Some(5000), Some(7)));
        assert_eq!((plan.rw, plan.bs, plan.iodepth), (Workload::RandRw, 8192, 4));
        assert_eq!((plan.numjobs, plan.threads, plan.iodepth_batch), (3, 3, Some(2)));
        assert_eq!((plan.runtime.as_millis(), plan.ramp_time.as_secs()), (500, 1));
        assert_eq!((plan.rwmixread, plan.size, plan.offset), (30, Some(1 << 20), 64 << 10));
        assert!(plan.verify && plan.seed == 7 && plan.pin == [0, 0]);
        assert_eq!(plan.doorbells, Doorbells::Mmio);
        let options = plan.attach_options();
        assert!(options.interrupts && options.spin == SpinPolicy::SLEEP);
        assert_eq!((options.queue_pairs, options.queue_depth), (3, 128));
        for (text, rw) in [("read", Workload::Read), ("readwrite", Workload::Rw)] {
            assert_eq!(super::tests::plan(&format!("--rw {text}")).unwrap().rw, rw);
        }
        assert!(super::tests::plan("--verify on").unwrap().verify);
        assert!(!super::tests::plan("").unwrap().verify);
    }

    #[test]
    fn a_count_of_ios_takes_the_place_of_times() {
        let plan = plan("--number_ios 1000").unwrap();
        assert_eq!((plan.number_ios, plan.ramp_time), (Some(1000), Duration::ZERO));
    }

    #[test]
    fn nonsense_is_refused_with_the_reason() {
        for (options, words) in [
            ("--iodepth 0", "--iodepth is 1 to 65535"),
            ("--iodepth 70000", "--iodepth is 1 to 65535"),
            ("--numjobs 0", "--numjobs is at least 1"),
            ("--threads 2", "--threads is 1 to --numjobs (1)"),
            ("--numjobs 2 --threads 1 --completion interrupt", "can not sleep"),
            ("--bs 8g", "--bs is below 4 GiB"),
            ("--bs 0", "size is zero"),
            ("--bs lots", "no size"),
            ("--runtime 0", "more than nothing"),
            ("--runtime 5x", "no time"),
            ("--runtime -5", "-5"),
            ("--rwmixread 101", "101"),
            ("--rw append", "append"),
            ("--number-ios 5 --runtime 3", "cannot be used with"),
            ("--number-ios 0", "0"),
            ("--rate-iops 0", "0"),
        ] {
            let error = plan(options).unwrap_err();
            assert!(error.contains(words), "{options}: {error}");
        }
    }

    #[test]
    fn times_have_units() {
        for (text, millis) in [("10", 10_000), ("1.5", 1500), ("20ms", 20), ("2m", 120_000)] {
            assert_eq!(parse_time(text).unwrap().as_millis(), millis, "{text}");
        }
        for text in ["", "s", "1e3", "1..2", "ms"] {
            assert!(parse_time(text).is_err(), "{text}");
        }
    }

    #[test]
    fn jobs_share_the_target() {
        let plan = |numjobs, size, offset| Plan { numjobs, size, offset, ..Plan::default() };
        let slice = plan(2, None, 8192).slice(1 << 20, 512).unwrap();
        assert_eq!(slice, Slice { ios: 127, blocks_per_io: 8, first_block: 16 });
        assert_eq!((slice.of_job(0), slice.of_job(1)), (16, 16 + 127 * 8));
        let slice = plan(1, Some(8192), 0).slice(1 << 20, 4096).unwrap();
        assert_eq!((slice.ios, slice.blocks_per_io), (2, 1));
        for (plan, bytes, block_size, words) in [
            (plan(1, None, 2 << 20), 1 << 20, 512, "past the end"),
            (plan(1, Some(2 << 20), 0), 1 << 20, 512, "reaches past the end"),
            (plan(1, None, 100), 1 << 20, 512, "--offset is a multiple"),
            (plan(4, None, 0), 12_288, 512, "no room for 4 jobs"),
            (Plan { bs: 512, ..Plan::default() }, 1 << 20, 4096, "--bs is a multiple"),
            (Plan { verify: true, ..Plan::default() }, 65_536, 512, "larger --size"),
            (Plan { verify: true, ..Plan::default() }, 4 << 40, 512, "smaller --size"),
        ] {
            let error = plan.slice(bytes, block_size).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
