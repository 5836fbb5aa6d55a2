//! `bench`: what a controller can do, measured from the driver's side.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | `args` | the options, fio's where fio has them, and the [`Plan`] that they come to |
//! | `run` | [`measure`]: gives the jobs to threads, and adds up |
//! | `conduct` | when they measure and when they stop |
//! | `job` | a thread's loop over its jobs |
//! | `lane` | a job: a queue pair that is kept full, and the latencies of its I/Os |
//! | `hold` | many controllers at once, for measuring what they cost when idle |
//! | `pace` | when the next I/O is due, for a load of so many a second |
//! | `server` | the processor time of the process at the other end |
//! | `load` | what a job does to the content of its blocks |
//! | `pattern` | where the next I/O goes |
//! | `content` | blocks that tell whether they are the right ones |
//!
//! # What is measured
//!
//! A job submits an I/O for every one that completes, so that `iodepth` are always in flight. It
//! rings as the driver thinks best, for each I/O while the queue is short and for several while it
//! is long; with `--iodepth-batch 1` for each at once, as Linux does. One thread drives a job, or
//! several if told so (`--threads`).
//!
//! Looking at the clock twice for every I/O would be a good part of what is measured, so latency is
//! taken of some I/Os only: with `--latency-sample` of one in so many, otherwise of as many as make
//! about 20000 a second and thread (of all, where there are fewer). A row tells how many were timed.
//!
//! With `--rate-iops` the load is an open loop: an I/O is due when its time has come, and its latency
//! counts from there, however late it could be submitted. All I/Os are timed then. A job that sleeps
//! for completions still waits awake for the time of an I/O when it is near and nothing is in
//! flight; that is no processor time of the driver's, and taken off.
//!
//! Doorbell writes are counted by the driver, where it writes the register. Interrupts are those
//! that woke a job. Processor time is that of the threads of the jobs, load generation included.
//!
//! # What it does not do
//!
//! fio's job files, mixed block sizes and trims.

mod args;
mod conduct;
pub(crate) mod content;
mod hold;
mod job;
mod lane;
mod load;
mod pace;
pub(crate) mod pattern;
mod run;
mod server;

pub use args::{Args, CompletionMode, DoorbellMode, Plan, Verify, Workload};
pub(crate) use args::{doorbells_name, parse_bytes, parse_offset, parse_time};
pub use conduct::{Tick, Watch};
pub use hold::{HoldArgs, hold};
pub use run::{Outcome, measure};

use crate::exit;
use crate::report::{self, Row};
use indicatif::{ProgressBar, ProgressStyle};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Runs the verb.
///
/// # Errors
/// See [`measure`].
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let plan = args.plan()?;
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // The first one ends the run, with the figures so far; the second one everything.
        let status = i32::from(exit::FAILED);
        flag::register_conditional_shutdown(signal, status, Arc::clone(&interrupted))?;
        flag::register(signal, Arc::clone(&interrupted))?;
    }
    let mut session = args.target.attach(&plan.attach_options())?;
    for line in session.banner() {
        tracing::info!("{line}");
    }
    let bar = progress(io::stderr().is_terminal());
    let outcome = measure(&mut session, &plan, &mut |tick| {
        bar.set_position((tick.done * 1000.0) as u64);
        bar.set_message(format!("{} IOPS", report::count(tick.iops)));
        if interrupted.load(Ordering::Relaxed) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    bar.finish_and_clear();
    let Outcome { mut row, bad_blocks } = outcome?;
    row.table = "bench".to_owned();
    session.detach()?;
    for bad in &bad_blocks {
        tracing::error!("{bad}");
    }
    let out = &mut io::stdout().lock();
    if args.json {
        report::write_json(out, std::slice::from_ref(&row))?;
    } else {
        print(out, &row)?;
    }
    let failed = row.verify_errors.is_some_and(|errors| errors != 0);
    Ok(ExitCode::from(if failed { exit::FAILED } else { exit::FINE }))
}

fn progress(shown: bool) -> ProgressBar {
    let bar = if shown { ProgressBar::new(1000) } else { ProgressBar::hidden() };
    // The template is constant; if it were wrong, the usual one would do.
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {percent:>3}% {msg:>14}") {
        bar.set_style(style);
    }
    bar
}

fn print(out: &mut impl Write, row: &Row) -> io::Result<()> {
    writeln!(
        out,
        "{} of {} bytes, iodepth {}, {} job{} on {} thread{}, {} doorbells, {}",
        row.rw,
        row.bs,
        row.iodepth,
        row.numjobs,
        if row.numjobs == 1 { "" } else { "s" },
        row.threads,
        if row.threads == 1 { "" } else { "s" },
        row.doorbells,
        match row.completion.as_str() {
            "poll" => "polling",
            "interrupt" => "interrupts",
            _ => "polling, then interrupts",
        },
    )?;
    writeln!(
        out,
        "  IOPS={} ({:.0}), BW={}, {} I/Os in {:.2} s",
        report::count(row.iops).replace(' ', ""),
        row.iops,
        report::bandwidth(row.bandwidth_bytes),
        row.commands,
        row.seconds,
    )?;
    if let Some(latency) = &row.latency_ns {
        let ns = |value: u64| report::nanoseconds(value as f64);
        writeln!(
            out,
            "  latency: mean {}, p50 {}, p99 {}, p99.9 {}, max {} ({} samples)",
            report::nanoseconds(latency.mean),
            ns(latency.p50),
            ns(latency.p99),
            ns(latency.p999),
            ns(latency.max),
            latency.samples,
        )?;
    }
    writeln!(
        out,
        "  for each I/O: {} doorbell MMIO writes ({} in all), {} interrupts, {} of processor time",
        report::per_io(row.mmio_per_io),
        row.doorbell_mmio_writes,
        report::per_io(row.interrupts_per_io),
        report::nanoseconds(row.cpu_ns_per_io),
    )?;
    if let (Some(time), Some(percent)) = (row.controller_cpu_ns_per_io, row.controller_cpu_percent)
    {
        let time = report::nanoseconds(time);
        writeln!(out, "  the server: {time} of processor time for each I/O, {percent:.1} %")?;
    }
    if let (Some(checked), Some(errors)) = (row.verified_blocks, row.verify_errors) {
        writeln!(out, "  verify: {checked} blocks checked, {errors} bad")?;
    }
    Ok(())
}
