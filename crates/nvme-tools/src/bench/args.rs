//! Command line of `bench`. Options have the names that fio uses.

use crate::load::{LoadConfig, MetadataMode, Workload, interval};
use crate::overwrite::Overwrite;
use crate::queue_options::{CompletionMode, DoorbellMode};
use anyhow::{anyhow, bail};
use clap::ValueEnum;
use shadowbell_config::cpu_list;
use shadowbell_config::parse;
use shadowbell_config::target::{self, Target};
use shadowbell_process::exit;
use shadowbell_process::output::BenchOutput;
use std::path::PathBuf;
use std::time::Duration;

/// Measure the performance of a controller (options as in fio)
///
/// Writing workloads overwrite the target.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct Args {
    /// Namespace to measure
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// Workload
    #[arg(long, value_enum, default_value_t = Workload::RandRead)]
    pub rw: Workload,
    /// Block size of an I/O: 4k, 1m
    #[arg(long, default_value = "4k", value_parser = parse::size, value_name = "BYTES")]
    pub bs: u64,
    /// I/Os in flight per job
    #[arg(long, default_value_t = 32)]
    pub iodepth: u32,
    /// Largest number of I/Os per doorbell write; 0 for no limit [default: one while the queue is
    /// short, several while it is long]
    #[arg(long, alias = "iodepth_batch", value_name = "N")]
    pub iodepth_batch: Option<u32>,
    /// Number of jobs; each has a queue pair and its own part of the target
    #[arg(long, default_value_t = 1)]
    pub numjobs: u16,
    /// Number of threads that the jobs share [default: one per job]
    #[arg(long)]
    pub threads: Option<u16>,
    /// Duration of the measurement: 10, 500ms, 2m
    #[arg(long, default_value = "10", value_parser = parse::time, value_name = "TIME")]
    pub runtime: Duration,
    /// Warm-up time before the measurement
    #[arg(long, alias = "ramp_time", default_value = "200ms", value_parser = parse::time)]
    #[arg(value_name = "TIME")]
    pub ramp_time: Duration,
    /// End each job after N I/Os instead of after a time; the measurement has no warm-up
    #[arg(long, alias = "number_ios", conflicts_with_all = ["runtime", "ramp_time"])]
    #[arg(value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub number_ios: Option<u64>,
    /// I/Os per second and job, started at equal intervals. Latency counts from the time at which
    /// an I/O was due, so waiting for a free queue entry counts
    #[arg(long, alias = "rate_iops", value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub rate_iops: Option<u64>,
    /// Percentage of reads in a mixed workload
    #[arg(long, default_value_t = 70, value_parser = clap::value_parser!(u8).range(0..=100))]
    #[arg(value_name = "PERCENT")]
    pub rwmixread: u8,
    /// Bytes of the target to use [default: all from the offset on]
    #[arg(long, value_parser = parse::size, value_name = "BYTES")]
    pub size: Option<u64>,
    /// Offset of the first byte to use
    #[arg(long, default_value = "0", value_parser = parse::offset, value_name = "BYTES")]
    pub offset: u64,
    /// Check the content: written blocks carry checksums, their offset and a sequence number, and
    /// are read back at the end. A read-only workload checks the blocks of an earlier writing
    /// workload with the same --bs and --seed
    #[arg(long, value_enum, default_value_t = Verify::Off, value_name = "METHOD")]
    pub verify: Verify,
    /// Side that generates and checks protection information, if the blocks have any
    #[arg(long, value_enum, default_value_t = MetadataMode::Pract)]
    pub metadata: MetadataMode,
    #[command(flatten)]
    pub(crate) overwrite: Overwrite,
    /// Doorbell mode of the driver; `auto` is the best that the controller supports
    #[arg(long, value_enum, default_value_t = DoorbellMode::Auto)]
    pub doorbells: DoorbellMode,
    /// Completion mode
    #[arg(long, value_enum, default_value_t = CompletionMode::Poll)]
    pub completion: CompletionMode,
    /// Longest time in microseconds for which `--completion adaptive` polls before it sleeps
    /// [default: 100]
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub poll_max: Option<u32>,
    /// Time limit of a command. On expiry, the command is aborted; if that fails, its queue is
    /// recreated; if that fails, the controller is reset
    #[arg(long, default_value = "30", value_parser = parse::time, value_name = "TIME")]
    pub timeout: Duration,
    /// CPUs to pin the threads to: 0,2
    #[arg(long, value_delimiter = ',', value_name = "CPU", value_parser = cpu_list::parse_one)]
    pub pin: Vec<usize>,
    /// Measure the latency of one I/O in N [default: about 20000 per second and thread]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub latency_sample: Option<u32>,
    /// Also report the CPU time of this process and its children: the `serve` process of TARGET
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub server_pid: Option<u32>,
    /// Seed of the random number generator
    #[arg(long, alias = "randseed", default_value_t = 0x5eed)]
    pub seed: u64,
    /// Output format.
    #[command(flatten)]
    pub output: BenchOutput,
    /// Write an HTML report with diagrams: I/Os and latencies over time, doorbells, queues
    #[arg(long, value_name = "OUT.html")]
    pub report: Option<PathBuf>,
}

/// Method of content verification.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Verify {
    /// No verification
    #[default]
    Off,
    /// CRC-32C in every 512 bytes
    #[value(alias = "on")]
    Crc32c,
}

impl Args {
    /// Load configuration that the options describe.
    ///
    /// # Errors
    /// With exit status [`exit::BAD_INPUT`], for options that contradict each other.
    pub fn load_config(&self) -> anyhow::Result<LoadConfig> {
        self.check().map_err(exit::bad_input)
    }

    fn check(&self) -> anyhow::Result<LoadConfig> {
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
                "a thread with several jobs cannot sleep until one of them completes: with \
                 --completion {}, leave out --threads",
                self.completion.name()
            );
        }
        if self.poll_max.is_some() && self.completion != CompletionMode::Adaptive {
            bail!("--poll-max is for --completion adaptive, not {}", self.completion.name());
        }
        let bs = u32::try_from(self.bs).map_err(|_| anyhow!("--bs is below 4 GiB"))?;
        if self.number_ios.is_none() && self.runtime.is_zero() {
            bail!("--runtime must be greater than zero");
        }
        Ok(LoadConfig {
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
            metadata: self.metadata,
            doorbells: self.doorbells.into(),
            completion: self.completion,
            poll_max: self.poll_max.map(|micros| Duration::from_micros(micros.into())),
            timeout: self.timeout,
            pin: self.pin.clone(),
            latency_sample: self.latency_sample,
            server_pid: self.server_pid,
            seed: self.seed,
            timeline: self.report.is_some().then(|| interval(self.runtime, self.numjobs)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use shadowbell_driver::{Doorbells, SpinPolicy};

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn config(options: &str) -> Result<LoadConfig, String> {
        let words = ["bench", "mem:1MiB"].into_iter().chain(options.split_whitespace());
        let line = Line::try_parse_from(words).map_err(|e| e.to_string())?;
        line.args.load_config().map_err(|e| {
            assert_eq!(exit::status(&e), exit::BAD_INPUT);
            e.to_string()
        })
    }

    #[test]
    fn options_of_fio_are_accepted() {
        let config = config(
            "--rw=randrw --bs=8k --iodepth=4 --numjobs=3 --runtime=500ms --ramp_time=1 \
             --rwmixread=30 --size=1m --offset 64k --iodepth_batch 2 --verify=crc32c --seed 7 \
             --doorbells mmio --completion interrupt --pin 0,0 --rate_iops 5000 --server-pid 7",
        )
        .unwrap();
        assert_eq!((config.rate_iops, config.server_pid), (Some(5000), Some(7)));
        assert_eq!((config.rw, config.bs, config.iodepth), (Workload::RandRw, 8192, 4));
        assert_eq!((config.numjobs, config.threads, config.iodepth_batch), (3, 3, Some(2)));
        assert_eq!((config.runtime.as_millis(), config.ramp_time.as_secs()), (500, 1));
        assert_eq!((config.rwmixread, config.size, config.offset), (30, Some(1 << 20), 64 << 10));
        assert!(config.verify && config.seed == 7 && config.pin == [0, 0]);
        assert_eq!(config.doorbells, Doorbells::Mmio);
        let options = config.attach_options();
        assert!(options.interrupts && options.spin == SpinPolicy::SLEEP);
        assert_eq!((options.queue_pairs, options.queue_depth), (3, 128));
        for (text, rw) in [("read", Workload::Read), ("readwrite", Workload::Rw)] {
            assert_eq!(super::tests::config(&format!("--rw {text}")).unwrap().rw, rw);
        }
        assert!(super::tests::config("--verify on").unwrap().verify);
        assert!(!super::tests::config("").unwrap().verify);
    }

    #[test]
    fn poll_max_limits_adaptive_polling() {
        let spin = |options: &str| config(options).unwrap().attach_options().spin;
        let usual = spin("--completion adaptive");
        assert_eq!(usual, SpinPolicy::default());
        let longer = spin("--completion adaptive --poll-max 300");
        assert_eq!(longer, SpinPolicy { max: Duration::from_micros(300), ..usual });
    }

    #[test]
    fn number_ios_replaces_the_durations() {
        let config = config("--number_ios 1000").unwrap();
        assert_eq!((config.number_ios, config.ramp_time), (Some(1000), Duration::ZERO));
    }

    #[test]
    fn invalid_options_are_refused_with_the_reason() {
        for (options, words) in [
            ("--iodepth 0", "--iodepth is 1 to 65535"),
            ("--iodepth 70000", "--iodepth is 1 to 65535"),
            ("--numjobs 0", "--numjobs is at least 1"),
            ("--threads 2", "--threads is 1 to --numjobs (1)"),
            ("--numjobs 2 --threads 1 --completion interrupt", "cannot sleep"),
            ("--completion interrupt --poll-max 300", "--poll-max is for --completion adaptive"),
            ("--bs 8g", "--bs is below 4 GiB"),
            ("--bs 0", "size is zero"),
            ("--bs lots", "no size"),
            ("--runtime 0", "greater than zero"),
            ("--runtime 5x", "no time"),
            ("--runtime -5", "-5"),
            ("--rwmixread 101", "101"),
            ("--rw append", "append"),
            ("--number-ios 5 --runtime 3", "cannot be used with"),
            ("--number-ios 0", "0"),
            ("--rate-iops 0", "0"),
        ] {
            let error = config(options).unwrap_err();
            assert!(error.contains(words), "{options}: {error}");
        }
    }
}
