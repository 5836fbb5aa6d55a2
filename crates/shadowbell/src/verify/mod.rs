//! `verify`: whether a controller keeps what it is given, under a load of everything at once.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | `expected_data` | what every block has to hold |
//! | `job` | a queue pair that is kept full of commands, and what they came to |
//!
//! # What is verified
//!
//! Each job has a queue pair and its own part of the namespace, and keeps `--iodepth` commands in
//! flight: reads, writes, flushes, and what the controller has of Write Zeroes, Dataset Management
//! (where deallocated blocks read as zeroes) and Compare, of one block up to `--max-bs` bytes, at
//! any block. No two that are in flight name the same block, so what a block has to hold is known:
//! every read is compared with the last write that completed, byte by byte, in the end of all
//! blocks once more. Every command must complete, and complete once.
//!
//! A command that the driver could not bring to its end (see `shadowbell_driver::recovery`) or that
//! ended with an error is submitted again `--retries` times, before anything else happens to its
//! blocks. One that fails for good is reported, and so is what recovery has done meanwhile.
//!
//! # What it does not do
//!
//! Cut the power: what a flush has made durable is read back from the controller that still has it.

mod expected_data;
mod job;

use crate::queue_options::{CompletionMode, DoorbellMode, attach_options, doorbells_name};
use crate::session::Session;
use crate::target::{self, Target};
use crate::{exit, parse, signals, units};
use anyhow::{Context, anyhow};
use expected_data::{DESCRIBED, ExpectedData, Kind, Shape};
use job::{Job, JobLimits, JobResult};
use serde_json::{Value, json};
use shadowbell_driver::{AttachOptions, QueueStats, Recovery, RecoveryStats, Timeouts};
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The most blocks that a run keeps the expected content of: 4 bytes each.
const MOST_BLOCKS: u64 = 1 << 28;
/// Used if nothing is said: enough not to fit a cache, and little enough to be written often.
const USUAL_SIZE: u64 = 256 << 20;

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
    /// End with one line of JSON, for machines
    #[arg(long)]
    pub json: bool,
}

impl Args {
    fn attach_options(&self) -> AttachOptions {
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

    fn limits(&self) -> JobLimits {
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

/// A job's part of the namespace.
struct Part {
    first_block: u64,
    shape: Shape,
}

/// What each job gets.
fn parts(args: &Args, session: &Session) -> anyhow::Result<Vec<Part>> {
    let (namespace, controller) = (session.namespace()?, &session.controller);
    let (size, jobs) = (u64::from(namespace.block_size()), u64::from(args.numjobs));
    if namespace.is_read_only() {
        return Err(anyhow!("{} is read-only", session.target()));
    }
    if controller.queue_pairs() < args.numjobs {
        let granted = controller.queue_pairs();
        return Err(anyhow!("the controller grants {granted} queue pairs: no more --numjobs"));
    }
    if controller.queue_depth() <= u32::from(args.iodepth) {
        let holds = controller.queue_depth() - 1;
        return Err(anyhow!("the queues of the controller hold {holds}: no more --iodepth"));
    }
    let (bytes, most) = (namespace.bytes(), namespace.max_transfer_bytes());
    if !args.max_bs.is_multiple_of(size) || args.max_bs > most {
        let bs = args.max_bs;
        return Err(anyhow!("--max-bs is a multiple of {size}, at most {most}, and not {bs}"));
    }
    if !args.offset.is_multiple_of(size) {
        return Err(anyhow!("--offset is a multiple of the block size of {size} bytes"));
    }
    let rest = bytes.checked_sub(args.offset).filter(|rest| *rest != 0);
    let rest =
        rest.ok_or_else(|| anyhow!("--offset {} is past the end at {bytes}", args.offset))?;
    let used = args.size.unwrap_or(rest.min(USUAL_SIZE));
    if used > rest {
        return Err(anyhow!("--size {used} reaches past the end: {rest} bytes are left"));
    }
    let blocks = used / size / jobs;
    let longest = args.max_bs / size;
    if blocks < longest * 2 {
        return Err(anyhow!(
            "each job needs room for two commands of --max-bs {}, and has {} bytes",
            args.max_bs,
            blocks * size
        ));
    }
    if blocks * jobs > MOST_BLOCKS {
        return Err(anyhow!("account is kept of {MOST_BLOCKS} blocks at most: a smaller --size"));
    }
    let has = namespace.optional_commands();
    let deallocated = namespace.identity().dlfeat;
    let shape = |start| Shape {
        start,
        blocks,
        block_size: namespace.block_size(),
        most: u32::try_from(longest).unwrap_or(u32::MAX),
        percent_read: args.rwmixread,
        write_zeroes: has.write_zeroes(),
        // 1: they read as zeroes.
        deallocate: has.dataset_management() && deallocated.drb() == 1,
        compare: has.compare(),
        seed: args.seed,
    };
    Ok((0..jobs)
        .map(|job| Part {
            first_block: args.offset / size + job * blocks,
            shape: shape(args.offset + job * blocks * size),
        })
        .collect())
}

/// Runs the verb.
///
/// # Errors
/// With exit status [`exit::BAD_INPUT`] what the target or the controller does not have room for,
/// and the driver's.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    // The first signal ends the run, and reads back what was written.
    let stop = signals::stop_flag()?;
    let mut session = Session::attach(&args.target, &args.attach_options())?;
    for line in session.banner() {
        tracing::info!("{line}");
    }
    let report = verify(&mut session, args, &stop)?;
    for line in report.described() {
        tracing::error!("{line}");
    }
    let out = &mut io::stdout().lock();
    if args.json {
        writeln!(out, "{}", json!({ "rows": [report.json(args)] }))?;
    } else {
        report.print(out)?;
    }
    let VerifyReport { outcome, found, .. } = report;
    outcome.with_context(|| args.target.to_string())?;
    session.detach()?;
    let fine = found.bad == 0 && found.failed == 0;
    Ok(ExitCode::from(if fine { exit::FINE } else { exit::FAILED }))
}

/// Verifies the namespace of `session` as `args` say, until `stop` at most.
///
/// # Errors
/// With exit status [`exit::BAD_INPUT`] what the controller does not have room for, and the
/// driver's as long as nothing was submitted.
pub fn verify(
    session: &mut Session,
    args: &Args,
    stop: &AtomicBool,
) -> anyhow::Result<VerifyReport> {
    let parts = parts(args, session).map_err(exit::bad_input)?;
    let jobs = jobs(args, session, parts)?;
    let began = Instant::now();
    let enough = || {
        stop.load(Ordering::Relaxed)
            || (args.number_ios.is_none() && began.elapsed() >= args.runtime)
    };
    let (found, outcome) = work(jobs, &enough)?;
    Ok(VerifyReport {
        seconds: began.elapsed().as_secs_f64(),
        recovery: session.controller.recovery_stats(),
        doorbells: doorbells_name(session.controller.doorbells()),
        device: session.device(),
        found,
        outcome,
    })
}

fn jobs(args: &Args, session: &mut Session, parts: Vec<Part>) -> anyhow::Result<Vec<Job>> {
    let mut jobs = Vec::new();
    for Part { first_block, shape } in parts {
        let queue = session.controller.take_queue_pair().context("no queue pair is left")?;
        let bytes = usize::try_from(args.max_bs).context("--max-bs")?;
        let pool = session.controller.buffers(args.iodepth.into(), bytes)?;
        let namespace = session.namespace()?.clone();
        let expected = ExpectedData::new(shape);
        jobs.push(Job::new(queue, namespace, first_block, expected, pool, args.limits()));
    }
    Ok(jobs)
}

/// Runs every job on a thread of its own. One that has failed ends the others as well.
fn work(
    jobs: Vec<Job>,
    enough: &(dyn Fn() -> bool + Sync),
) -> anyhow::Result<(JobResult, anyhow::Result<()>)> {
    let failed = AtomicBool::new(false);
    thread::scope(|scope| {
        let mut handles = Vec::new();
        for (index, job) in jobs.into_iter().enumerate() {
            let failed = &failed;
            let run = move || {
                let (found, outcome) = job.run(&|| enough() || failed.load(Ordering::Relaxed));
                failed.fetch_or(outcome.is_err(), Ordering::Relaxed);
                (found, outcome)
            };
            let builder = thread::Builder::new().name(format!("job{index}"));
            match builder.spawn_scoped(scope, run) {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    failed.store(true, Ordering::Relaxed);
                    return Err(error).context("no thread for a job");
                }
            }
        }
        let (mut sum, mut outcome) = (JobResult::default(), Ok(()));
        for handle in handles {
            match handle.join() {
                Ok((found, ended)) => {
                    add(&mut sum, found);
                    outcome = outcome.and(ended);
                }
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok((sum, outcome))
    })
}

fn add(sum: &mut JobResult, found: JobResult) {
    for (sum, count) in sum.commands.iter_mut().zip(found.commands) {
        *sum += count;
    }
    sum.retried += found.retried;
    sum.failed += found.failed;
    sum.checked += found.checked;
    sum.bad += found.bad;
    sum.described.extend(found.described);
    sum.described.truncate(DESCRIBED);
    sum.slowest = sum.slowest.max(found.slowest);
    let QueueStats { sq_doorbell_mmio_writes, cq_doorbell_mmio_writes, .. } = found.queue;
    sum.queue.sq_doorbell_mmio_writes += sq_doorbell_mmio_writes;
    sum.queue.cq_doorbell_mmio_writes += cq_doorbell_mmio_writes;
    sum.queue.unknown_completions += found.queue.unknown_completions;
}

/// What a run came to.
pub struct VerifyReport {
    seconds: f64,
    recovery: RecoveryStats,
    doorbells: &'static str,
    device: String,
    found: JobResult,
    /// Why it ended early, if it did.
    outcome: anyhow::Result<()>,
}

impl VerifyReport {
    /// What was wrong, in words: some of it, if there was a lot.
    #[must_use]
    pub fn described(&self) -> &[String] {
        &self.found.described
    }

    /// Blocks that did not hold what they had to.
    #[must_use]
    pub fn bad_blocks(&self) -> u64 {
        self.found.bad
    }

    /// What recovery did, by name.
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
            ("given_up", r.given_up),
            ("repeated", r.repeated),
            ("ended", r.ended),
        ]
    }

    fn total(&self) -> u64 {
        self.found.commands.iter().sum()
    }

    /// For machines: names that only ever grow.
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

    fn print(&self, out: &mut impl Write) -> io::Result<()> {
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
            writeln!(out, "  errors: {} retried, {} for good", found.retried, found.failed)?;
        }
        writeln!(out, "  verify: {} blocks checked, {} bad", found.checked, found.bad)
    }
}
