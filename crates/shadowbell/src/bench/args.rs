//! The command line of `bench`, under the names that fio has for it.

use crate::load::{LoadConfig, MetadataMode, Workload, interval};
use crate::output::BenchOutput;
use crate::overwrite::Overwrite;
use crate::queue_options::{CompletionMode, DoorbellMode};
use crate::target::{self, Target};
use crate::{cpu_list, exit, parse};
use anyhow::{anyhow, bail};
use clap::ValueEnum;
use std::path::PathBuf;
use std::time::Duration;

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
    #[arg(long, default_value = "4k", value_parser = parse::size, value_name = "BYTES")]
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
    #[arg(long, default_value = "10", value_parser = parse::time, value_name = "TIME")]
    pub runtime: Duration,
    /// How long to run before measuring
    #[arg(long, alias = "ramp_time", default_value = "200ms", value_parser = parse::time)]
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
    #[arg(long, value_parser = parse::size, value_name = "BYTES")]
    pub size: Option<u64>,
    /// Where to begin
    #[arg(long, default_value = "0", value_parser = parse::offset, value_name = "BYTES")]
    pub offset: u64,
    /// Check the content: what is written carries checksums, its place and a sequence number, and
    /// is read back at the end. A workload that only reads checks what an earlier one with the
    /// same --bs and --seed has written
    #[arg(long, value_enum, default_value_t = Verify::Off, value_name = "METHOD")]
    pub verify: Verify,
    /// Who makes and checks the protection information of blocks that have it
    #[arg(long, value_enum, default_value_t = MetadataMode::Pract)]
    pub metadata: MetadataMode,
    #[command(flatten)]
    pub(crate) overwrite: Overwrite,
    /// How to ring: `auto` takes the best that the controller has
    #[arg(long, value_enum, default_value_t = DoorbellMode::Auto)]
    pub doorbells: DoorbellMode,
    /// How to find completions
    #[arg(long, value_enum, default_value_t = CompletionMode::Poll)]
    pub completion: CompletionMode,
    /// The longest that `--completion adaptive` looks before it sleeps, in microseconds [default:
    /// 100]
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub poll_max: Option<u32>,
    /// A command that is not completed after this time is aborted; then its queue is created again,
    /// then the controller is reset
    #[arg(long, default_value = "30", value_parser = parse::time, value_name = "TIME")]
    pub timeout: Duration,
    /// Processors to run the threads on: 0,2
    #[arg(long, value_delimiter = ',', value_name = "CPU", value_parser = cpu_list::parse_one)]
    pub pin: Vec<usize>,
    /// Take the latency of one I/O in so many [default: as many as about 20000 a second and thread]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub latency_sample: Option<u32>,
    /// Account for the processor time of this process and its children, too: the `serve` that has
    /// the TARGET
    #[arg(long, value_name = "PID", value_parser = clap::value_parser!(u32).range(1..))]
    pub server_pid: Option<u32>,
    /// Seed of everything that is random
    #[arg(long, alias = "randseed", default_value_t = 0x5eed)]
    pub seed: u64,
    /// Sentences, a row, or what fio would print.
    #[command(flatten)]
    pub output: BenchOutput,
    /// Write a page with diagrams to this file: I/Os and latencies over time, doorbells, queues
    #[arg(long, value_name = "OUT.html")]
    pub report: Option<PathBuf>,
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

impl Args {
    /// What was asked for.
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
                "a thread that has several jobs can not sleep on one of them: with --completion \
                 {} leave --threads out",
                self.completion.name()
            );
        }
        if self.poll_max.is_some() && self.completion != CompletionMode::Adaptive {
            bail!("--poll-max is for --completion adaptive, not {}", self.completion.name());
        }
        let bs = u32::try_from(self.bs).map_err(|_| anyhow!("--bs is below 4 GiB"))?;
        if self.number_ios.is_none() && self.runtime.is_zero() {
            bail!("--runtime is more than nothing");
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
    fn the_options_are_fios() {
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
    fn who_waits_adaptively_looks_for_as_long_as_was_said() {
        let spin = |options: &str| config(options).unwrap().attach_options().spin;
        let usual = spin("--completion adaptive");
        assert_eq!(usual, SpinPolicy::default());
        let longer = spin("--completion adaptive --poll-max 300");
        assert_eq!(longer, SpinPolicy { max: Duration::from_micros(300), ..usual });
    }

    #[test]
    fn a_count_of_ios_takes_the_place_of_times() {
        let config = config("--number_ios 1000").unwrap();
        assert_eq!((config.number_ios, config.ramp_time), (Some(1000), Duration::ZERO));
    }

    #[test]
    fn nonsense_is_refused_with_the_reason() {
        for (options, words) in [
            ("--iodepth 0", "--iodepth is 1 to 65535"),
            ("--iodepth 70000", "--iodepth is 1 to 65535"),
            ("--numjobs 0", "--numjobs is at least 1"),
            ("--threads 2", "--threads is 1 to --numjobs (1)"),
            ("--numjobs 2 --threads 1 --completion interrupt", "can not sleep"),
            ("--completion interrupt --poll-max 300", "--poll-max is for --completion adaptive"),
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
            let error = config(options).unwrap_err();
            assert!(error.contains(words), "{options}: {error}");
        }
    }
}
