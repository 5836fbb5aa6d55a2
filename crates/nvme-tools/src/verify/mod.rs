//! `verify`: checks the data integrity of a controller under a mixed load.
//!
//! # Architecture
//!
//! | module | contents |
//! |---|---|
//! | `args` | command line |
//! | `expected_data` | expected content of every block |
//! | `job` | queue pair that is kept full of commands, and their results |
//! | `report` | results of a run as text and JSON |
//!
//! # Verification
//!
//! Each job has a queue pair and its own part of the namespace, and keeps `--iodepth` commands in
//! flight: reads, writes, flushes, and if the controller supports them Write Zeroes, Dataset
//! Management (if deallocated blocks read as zeroes) and Compare, of one block up to `--max-bs`
//! bytes, at any block. Commands in flight never overlap, so the expected content of each block is
//! known: every read is compared byte by byte with the last completed write, and at the end all
//! blocks are read once more. Every command must complete exactly once.
//!
//! A command that the driver could not complete (see `shadowbell_driver::recovery`) or that ended
//! with an error is submitted again up to `--retries` times, before any other command on its
//! blocks. Commands that fail finally, and the actions of recovery, are reported.
//!
//! # Limitations
//!
//! Power loss is not tested: flushed data is read back from the controller that received it.

mod args;
mod expected_data;
mod job;
mod report;

pub use args::Args;

use crate::queue_options::doorbells_name;
use crate::session::Session;
use anyhow::{Context, anyhow};
use expected_data::{ExpectedData, Shape};
use job::{Job, JobResult};
use report::VerifyReport;
use serde_json::json;
use shadowbell_process::{exit, signals};
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Instant;

/// Largest number of blocks whose expected content is stored, at 4 bytes each.
const MAX_BLOCKS: u64 = 1 << 28;
/// Default of `--size`: larger than a cache, and small enough that blocks are written often.
const DEFAULT_SIZE: u64 = 256 << 20;

/// Part of the namespace that belongs to a job.
struct Part {
    first_block: u64,
    shape: Shape,
}

/// Divides the namespace among the jobs.
fn parts(args: &Args, session: &Session) -> anyhow::Result<Vec<Part>> {
    let (namespace, controller) = (session.namespace()?, &session.controller);
    let (size, jobs) = (u64::from(namespace.block_size()), u64::from(args.numjobs));
    if namespace.is_read_only() {
        return Err(anyhow!("{} is read-only", session.target()));
    }
    if controller.queue_pairs() < args.numjobs {
        let granted = controller.queue_pairs();
        return Err(anyhow!("the controller grants {granted} queue pairs; reduce --numjobs"));
    }
    if controller.queue_depth() <= u32::from(args.iodepth) {
        let holds = controller.queue_depth() - 1;
        return Err(anyhow!("the controller's queues hold {holds} commands; reduce --iodepth"));
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
    let used = args.size.unwrap_or(rest.min(DEFAULT_SIZE));
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
    if blocks * jobs > MAX_BLOCKS {
        return Err(anyhow!("at most {MAX_BLOCKS} blocks can be verified; reduce --size"));
    }
    let has = namespace.optional_commands();
    let deallocated = namespace.identity().dlfeat;
    let shape = |start| Shape {
        start,
        blocks,
        block_size: namespace.block_size(),
        max_blocks: u32::try_from(longest).unwrap_or(u32::MAX),
        percent_read: args.rwmixread,
        write_zeroes: has.write_zeroes(),
        // DRB 1: deallocated blocks read as zeroes.
        deallocate: has.dataset_management() && deallocated.drb() == 1,
        compare: namespace.compares(),
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
/// With exit status [`exit::BAD_INPUT`] if target or controller do not fit the options; errors of
/// the driver.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    // The first signal ends the load; the verification pass still runs.
    let stop = signals::stop_flag()?;
    args.overwrite.check(&args.target)?;
    let mut session = Session::attach(&args.target, &args.attach_options())?;
    for line in session.banner() {
        tracing::info!("{line}");
    }
    let report = verify(&mut session, args, &stop)?;
    for line in report.described() {
        tracing::error!("{line}");
    }
    let out = &mut io::stdout().lock();
    if args.output.is_json() {
        writeln!(out, "{}", json!({ "rows": [report.json(args)] }))?;
    } else {
        report.print(out)?;
    }
    let VerifyReport { outcome, found, .. } = report;
    outcome.with_context(|| args.target.to_string())?;
    session.detach()?;
    let fine = found.bad == 0 && found.failed == 0;
    Ok(ExitCode::from(if fine { exit::SUCCESS } else { exit::FAILED }))
}

/// Verifies the namespace of `session` with the options `args`. `stop` ends the load early.
///
/// # Errors
/// With exit status `exit::BAD_INPUT` if the controller does not fit the options; errors of the
/// driver before the first command. Later errors are in the report.
pub fn verify(
    session: &mut Session,
    args: &Args,
    stop: &AtomicBool,
) -> anyhow::Result<VerifyReport> {
    let parts = parts(args, session).map_err(exit::bad_input)?;
    let jobs = jobs(args, session, parts)?;
    let began = Instant::now();
    let is_done = || {
        stop.load(Ordering::Relaxed)
            || (args.number_ios.is_none() && began.elapsed() >= args.runtime)
    };
    let (found, outcome) = work(jobs, &is_done)?;
    Ok(VerifyReport {
        seconds: began.elapsed().as_secs_f64(),
        interrupted: stop.load(Ordering::Relaxed),
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

/// Runs each job on its own thread. The failure of a job ends the others.
fn work(
    jobs: Vec<Job>,
    is_done: &(dyn Fn() -> bool + Sync),
) -> anyhow::Result<(JobResult, anyhow::Result<()>)> {
    let failed = AtomicBool::new(false);
    thread::scope(|scope| {
        let mut handles = Vec::new();
        for (index, job) in jobs.into_iter().enumerate() {
            let failed = &failed;
            let run = move || {
                let (found, outcome) = job.run(&|| is_done() || failed.load(Ordering::Relaxed));
                failed.fetch_or(outcome.is_err(), Ordering::Relaxed);
                (found, outcome)
            };
            let builder = thread::Builder::new().name(format!("job{index}"));
            match builder.spawn_scoped(scope, run) {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    failed.store(true, Ordering::Relaxed);
                    return Err(error).context("starting a thread for a job");
                }
            }
        }
        let (mut sum, mut outcome) = (JobResult::default(), Ok(()));
        for handle in handles {
            match handle.join() {
                Ok((found, ended)) => {
                    sum.add(found);
                    outcome = outcome.and(ended);
                }
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok((sum, outcome))
    })
}
