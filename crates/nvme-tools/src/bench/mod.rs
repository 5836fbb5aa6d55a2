//! `bench`: measures a controller from the driver's side, with [`crate::load`].

mod args;
mod fio_json;

pub use args::Args;

use crate::load::{Outcome, measure};
use crate::page::{self, Measured};
use crate::report::{self, Row};
use crate::session::Session;
use indicatif::{ProgressBar, ProgressStyle};
use shadowbell_process::output::Shape;
use shadowbell_process::{exit, signals, units};
use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::process::ExitCode;
use std::sync::atomic::Ordering;

/// Runs the verb.
///
/// # Errors
/// See [`measure`].
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let config = args.load_config()?;
    page::check(args.report.as_deref())?;
    // The first signal ends the run; the results so far are reported.
    let stop = signals::stop_flag()?;
    if config.rw.writes() {
        args.overwrite.check(&args.target)?;
    }
    let mut session = Session::attach(&args.target, &config.attach_options())?;
    for line in session.banner() {
        tracing::info!("{line}");
    }
    let bar = progress(io::stderr().is_terminal());
    let outcome = measure(&mut session, &config, &mut |tick| {
        bar.set_position((tick.done * 1000.0) as u64);
        bar.set_message(format!("{} IOPS", units::count(tick.iops)));
        if stop.load(Ordering::Relaxed) {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    });
    bar.finish_and_clear();
    let Outcome { mut row, bad_blocks, timeline, directions, usage } = outcome?;
    row.table = "bench".to_owned();
    let session_name = session.target().to_string();
    session.detach()?;
    for bad in &bad_blocks {
        tracing::error!("{bad}");
    }
    let out = &mut io::stdout().lock();
    match args.output.shape() {
        Shape::Rows => report::write_json(out, std::slice::from_ref(&row))?,
        Shape::Fio => fio_json::write(out, &session_name, &row, &directions, usage)?,
        Shape::Normal => print(out, &row)?,
    }
    if let Some(path) = &args.report {
        let lead = format!("{} behind {}, {}", row.device, session_name, setup(&row));
        let title = format!("shadowbell bench: {} of {}", row.rw, units::bytes(row.bs.into()));
        let measured = Measured { row: row.clone(), timeline };
        page::write(path, &title, &lead, &page::measurement(&measured)?)?;
    }
    let failed = row.verify_errors.is_some_and(|errors| errors != 0);
    Ok(ExitCode::from(if failed { exit::FAILED } else { exit::SUCCESS }))
}

fn progress(shown: bool) -> ProgressBar {
    let bar = if shown { ProgressBar::new(1000) } else { ProgressBar::hidden() };
    // The template is constant and valid; an error would leave the default style.
    if let Ok(style) = ProgressStyle::with_template("{wide_bar} {percent:>3}% {msg:>14}") {
        bar.set_style(style);
    }
    bar
}

/// Summary of the measurement's parameters.
fn setup(row: &Row) -> String {
    let plural = |count: u32| if count == 1 { "" } else { "s" };
    format!(
        "iodepth {}, {} job{} on {} thread{}, {} doorbells, {}",
        row.iodepth,
        row.numjobs,
        plural(row.numjobs),
        row.threads,
        plural(row.threads),
        row.doorbells,
        match row.completion.as_str() {
            "poll" => "polling",
            "interrupt" => "interrupts",
            _ => "polling, then interrupts",
        },
    )
}

fn print(out: &mut impl Write, row: &Row) -> io::Result<()> {
    writeln!(out, "{} of {} bytes, {}", row.rw, row.bs, setup(row))?;
    writeln!(
        out,
        "  IOPS={} ({:.0}), BW={}, {} I/Os in {:.2} s",
        units::count(row.iops).replace(' ', ""),
        row.iops,
        units::bandwidth(row.bandwidth_bytes),
        row.commands,
        row.seconds,
    )?;
    if let Some(latency) = &row.latency_ns {
        let ns = |value: u64| units::nanoseconds(value as f64);
        writeln!(
            out,
            "  latency: mean {}, p50 {}, p99 {}, p99.9 {}, max {} ({} samples)",
            units::nanoseconds(latency.mean),
            ns(latency.p50),
            ns(latency.p99),
            ns(latency.p999),
            ns(latency.max),
            latency.samples,
        )?;
    }
    writeln!(
        out,
        "  per I/O: {} doorbell MMIO writes ({} in total), {} interrupts, {} of CPU time",
        units::per_io(row.mmio_per_io),
        row.doorbell_mmio_writes,
        units::per_io(row.interrupts_per_io),
        units::nanoseconds(row.cpu_ns_per_io),
    )?;
    if let (Some(time), Some(percent)) = (row.controller_cpu_ns_per_io, row.controller_cpu_percent)
    {
        let time = units::nanoseconds(time);
        writeln!(out, "  server: {time} of CPU time per I/O, {percent:.1} %")?;
    }
    if let (Some(checked), Some(errors)) = (row.verified_blocks, row.verify_errors) {
        writeln!(out, "  verify: {checked} blocks checked, {errors} bad")?;
    }
    Ok(())
}
