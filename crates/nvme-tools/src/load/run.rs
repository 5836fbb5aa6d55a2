//! Execution of a run: starts the jobs' threads and sums up their results.

use super::config::{LoadConfig, MetadataMode, Slice};
use super::host_metadata::{self, HostMetadata};
use super::io_source::{CheckSummary, Checked, IoSource, Unchecked};
use super::job::{Directions, Job};
use super::job_thread::{self, MeasureOptions, ThreadReport};
use super::pattern::Pattern;
use super::phase::{Phase, Progress};
use super::schedule::{OnTick, Threads, run_schedule};
use super::server_cpu::ServerCpu;
use super::timeline::Timeline;
use crate::latency::{Latency, histogram};
use crate::queue_options::{CompletionMode, doorbells_name};
use crate::report::Row;
use crate::session::Session;
use anyhow::{Context, anyhow, bail};
use hdrhistogram::Histogram;
use shadowbell_driver::{Controller, Namespace};
use shadowbell_process::exit;
use std::thread;
use std::time::Duration;

/// Results of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Results as a row; the caller sets the name of the table.
    pub row: Row,
    /// Descriptions of blocks with wrong content, only of the first few.
    pub bad_blocks: Vec<String>,
    /// Time line, if requested.
    pub timeline: Timeline,
    /// Separate results of reads and writes.
    pub directions: Directions<Direction>,
    /// Resource usage of the job threads.
    pub usage: Usage,
}

/// Results of all reads of a run, or of all writes.
#[derive(Clone, Debug, Default)]
pub struct Direction {
    /// I/Os completed during the measurement.
    pub commands: u64,
    /// I/Os per second.
    pub iops: f64,
    /// Latencies in nanoseconds; `None` if there were no such I/Os.
    pub latencies: Option<Histogram<u64>>,
}

/// Resource usage of the job threads during the measurement.
#[derive(Clone, Copy, Debug, Default)]
pub struct Usage {
    /// CPU time in user space, in percent of the threads' run time.
    pub user_percent: f64,
    /// CPU time in the kernel, in percent of the threads' run time.
    pub system_percent: f64,
    /// Context switches.
    pub switches: u64,
}

/// Runs `config` on the namespace of `session`. `on_tick` is called periodically and may end the
/// run early.
///
/// # Errors
/// With exit status `exit::BAD_INPUT` if the run does not fit the namespace; errors of the driver;
/// a failed I/O. Wrong content is not an error but counted in the row.
pub fn measure(
    session: &mut Session,
    config: &LoadConfig,
    on_tick: &mut OnTick<'_>,
) -> anyhow::Result<Outcome> {
    let slice = check(session, config).map_err(exit::bad_input)?;
    let only_reads = config.rw.percent_read(config.rwmixread) == 100;
    let namespace = namespace(session, config)?.clone();
    let block_size = namespace.block_size();
    let pattern = |job: u16| {
        let percent = config.rw.percent_read(config.rwmixread);
        let seed = config.seed.wrapping_add(u64::from(job) << 32);
        Pattern::new(slice.ios, config.rw.is_random(), percent, seed)
    };
    if config.verify {
        let start = |job| slice.of_job(job) * u64::from(block_size);
        let source = |job| {
            let start = start(job);
            Checked::new(pattern(job), slice.ios, config.bs, start, only_reads, config.seed)
        };
        run_with(session, config, slice, source, on_tick)
    } else {
        run_with(session, config, slice, |job| Unchecked::new(pattern(job)), on_tick)
    }
}

/// Namespace of the session, if this run can read and write it.
fn namespace<'a>(session: &'a Session, config: &LoadConfig) -> anyhow::Result<&'a Namespace> {
    match config.metadata {
        MetadataMode::Pract => session.namespace(),
        MetadataMode::Host => session.namespace_with_metadata(),
    }
}

/// Runs with the source that the metadata mode requires.
fn run_with<L: IoSource>(
    session: &mut Session,
    config: &LoadConfig,
    slice: Slice,
    source: impl Fn(u16) -> L,
    on_tick: &mut OnTick<'_>,
) -> anyhow::Result<Outcome> {
    match config.metadata {
        MetadataMode::Pract => run(session, config, slice, |job| Ok(source(job)), on_tick),
        MetadataMode::Host => {
            let namespace = namespace(session, config)?.clone();
            let source = |job| HostMetadata::new(source(job), &namespace, config.bs);
            run(session, config, slice, source, on_tick)
        }
    }
}

/// Checks that controller and namespace support the run.
fn check(session: &Session, config: &LoadConfig) -> anyhow::Result<Slice> {
    let namespace = namespace(session, config)?;
    let slice = config.slice(namespace.bytes(), namespace.block_size())?;
    let max = namespace.max_transfer_bytes();
    if config.metadata == MetadataMode::Host {
        host_metadata::bytes(namespace, config.bs)?;
    } else if u64::from(config.bs) > max {
        return Err(anyhow!("--bs {} exceeds the maximum transfer size of {max} bytes", config.bs));
    }
    if config.rw.percent_read(config.rwmixread) != 100 && namespace.is_read_only() {
        return Err(anyhow!(
            "{} is read-only, and --rw {} writes",
            session.target(),
            config.rw.name()
        ));
    }
    let granted = session.controller.queue_pairs();
    if granted < config.numjobs {
        return Err(anyhow!("the controller grants {granted} queue pairs; reduce --numjobs"));
    }
    let depth = session.controller.queue_depth();
    if depth <= config.iodepth {
        return Err(anyhow!(
            "the controller's queues hold {} commands; reduce --iodepth",
            depth - 1
        ));
    }
    Ok(slice)
}

fn run<L: IoSource>(
    session: &mut Session,
    config: &LoadConfig,
    slice: Slice,
    source: impl Fn(u16) -> anyhow::Result<L>,
    on_tick: &mut OnTick<'_>,
) -> anyhow::Result<Outcome> {
    let namespace = namespace(session, config)?.clone();
    let blocks = slice.blocks_per_io;
    let (bytes, templates) = match config.metadata {
        MetadataMode::Pract => {
            let (read, write) = (namespace.read(0, blocks)?, namespace.write(0, blocks)?);
            (config.bs as usize, Directions { read, write })
        }
        // Host mode builds a command with metadata for each I/O, and does not use the templates.
        MetadataMode::Host => {
            let none = namespace.flush();
            let bytes = host_metadata::bytes(&namespace, config.bs)?;
            (bytes, Directions { read: none, write: none })
        }
    };
    let mut threads: Vec<Vec<Job<L>>> = (0..config.threads).map(|_| Vec::new()).collect();
    for index in 0..config.numjobs {
        let queue =
            session.controller.take_queue_pair().ok_or_else(|| anyhow!("no queue pair is left"))?;
        let pool = session.controller.buffers(config.iodepth as usize, bytes)?;
        let buffers = std::iter::from_fn(|| pool.take()).take(config.iodepth as usize).collect();
        let job = Job::new(queue, templates, source(index)?, buffers, config, slice, index)?;
        if let Some(jobs) = threads.get_mut(usize::from(index % config.threads)) {
            jobs.push(job);
        }
    }
    let mut server = config.server_pid.map(ServerCpu::new).transpose().map_err(exit::bad_input)?;
    let reports = spawn(&mut threads, config, &session.controller, on_tick, &mut server)?;
    drop(threads);
    summarise(session, config, reports, server.as_ref().and_then(ServerCpu::share))
}

/// Runs each element of `threads` on its own thread, with the schedule on the calling thread.
fn spawn<L: IoSource>(
    threads: &mut [Vec<Job<L>>],
    config: &LoadConfig,
    controller: &Controller,
    on_tick: &mut OnTick<'_>,
    server: &mut Option<ServerCpu>,
) -> anyhow::Result<Vec<ThreadReport>> {
    let phase = &Phase::ramp(config.stall_timeout());
    let progress: Vec<Progress> = threads.iter().map(|_| Progress::default()).collect();
    let measuring = MeasureOptions {
        sleeps: config.completion != CompletionMode::Poll,
        choose_sample: config.latency_sample.is_none(),
        timeline: config.timeline.is_some(),
    };
    thread::scope(|scope| {
        let mut handles = Vec::new();
        for (index, (jobs, progress)) in threads.iter_mut().zip(&progress).enumerate() {
            let cpu = config.pin.get(index % config.pin.len().max(1)).copied();
            let work = move || {
                cpu.map_or(Ok(()), job_thread::pin)?;
                job_thread::run(jobs, measuring, phase, progress)
            };
            let name = format!("job{index}");
            match thread::Builder::new().name(name).spawn_scoped(scope, work) {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    phase.stop();
                    return Err(error).context("starting a thread for a job");
                }
            }
        }
        let view = Threads {
            config,
            phase,
            ended: &|| handles.iter().filter(|handle| handle.is_finished()).count(),
            commands: &|| progress.iter().map(Progress::get).sum(),
            check_alive: &|| check_alive(controller),
        };
        let gone = run_schedule(&view, on_tick, server);
        let mut reports = Vec::new();
        let mut failure = gone.err();
        for handle in handles {
            match handle.join() {
                Ok(Ok(report)) => reports.push(report),
                Ok(Err(error)) => failure = failure.or(Some(error)),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        failure.map_or(Ok(reports), Err)
    })
}

/// Returns an error if the controller is unreachable or has failed.
fn check_alive(controller: &Controller) -> anyhow::Result<()> {
    let registers = controller.registers()?;
    if registers.csts.cfs() || !registers.csts.rdy() {
        bail!("{} has failed (CSTS {:#x})", controller.name(), registers.csts.into_bits());
    }
    Ok(())
}

/// Sums up the results. `server_share` is the CPU usage of the server process (1: one CPU).
fn summarise(
    session: &Session,
    config: &LoadConfig,
    reports: Vec<ThreadReport>,
    server_share: Option<f64>,
) -> anyhow::Result<Outcome> {
    let mut latencies = histogram()?;
    let mut checks: Option<CheckSummary> = None;
    let (mut iops, mut seconds, mut cpu) = (0.0, 0f64, Duration::ZERO);
    let (mut writes, mut mixed) = (0, None::<Directions<Histogram<u64>>>);
    let (mut thread_seconds, mut user, mut system) = (0.0, 0.0, 0.0);
    let mut switches = 0;
    let (mut commands, mut mmio, mut interrupts, mut all_mmio) = (0, 0, 0, 0);
    let mut queues = Vec::new();
    for report in reports {
        let ThreadReport { begin, end, mmio_writes, samples, .. } = report;
        let (of_job, found) = (report.latencies, report.checks);
        queues.extend(samples);
        let time = (end.at - begin.at).as_secs_f64();
        let count = end.commands - begin.commands;
        iops += if time > 0.0 { count as f64 / time } else { 0.0 };
        seconds = seconds.max(time);
        thread_seconds += time;
        let used = end.usage.processor.saturating_sub(begin.usage.processor).as_secs_f64();
        let in_user = end.usage.user.saturating_sub(begin.usage.user).as_secs_f64();
        user += in_user;
        system += (used - in_user).max(0.0);
        switches += end.usage.switches.saturating_sub(begin.usage.switches);
        writes += end.mixed_writes - begin.mixed_writes;
        match (&mut mixed, report.mixed) {
            (Some(sum), Some(of_thread)) => sum.add(&of_thread)?,
            (None, of_thread) => mixed = of_thread,
            (Some(_), None) => {}
        }
        let paced = end.paced.saturating_sub(begin.paced);
        cpu += end.cpu.saturating_sub(begin.cpu).saturating_sub(paced);
        commands += count;
        mmio += end.mmio_writes - begin.mmio_writes;
        interrupts += end.interrupts - begin.interrupts;
        all_mmio += mmio_writes;
        latencies.add(&of_job).context("adding up the latencies")?;
        if let Some(found) = found {
            checks.get_or_insert_default().add(found);
        }
    }
    let each = |total: f64| if commands == 0 { 0.0 } else { total / commands as f64 };
    let row = Row {
        device: session.device(),
        doorbells: doorbells_name(session.controller.doorbells()).to_owned(),
        completion: config.completion.name().to_owned(),
        rw: config.rw.name().to_owned(),
        bs: config.bs,
        iodepth: config.iodepth,
        numjobs: config.numjobs.into(),
        threads: config.threads.into(),
        iodepth_batch: config.iodepth_batch,
        iops,
        bandwidth_bytes: iops * f64::from(config.bs),
        latency_ns: Latency::of(&latencies),
        commands,
        doorbell_mmio_writes: mmio,
        mmio_per_io: each(mmio as f64),
        driver_mmio_writes: Some(all_mmio),
        interrupts_per_io: each(interrupts as f64),
        cpu_ns_per_io: each(cpu.as_nanos() as f64),
        cpu_percent: if seconds > 0.0 { cpu.as_secs_f64() / seconds * 100.0 } else { 0.0 },
        controller_cpu_ns_per_io: server_share.filter(|_| iops > 0.0).map(|s| s / iops * 1e9),
        controller_cpu_percent: server_share.map(|share| share * 100.0),
        rate_iops: config.rate_iops,
        verified_blocks: checks.as_ref().map(|v| v.checked),
        verify_errors: checks.as_ref().map(|v| v.bad),
        seconds,
        ..Row::default()
    };
    let directions = split_directions(config, commands, writes, iops, mixed, &latencies);
    let percent =
        |part: f64| if thread_seconds > 0.0 { part / thread_seconds * 100.0 } else { 0.0 };
    let usage = Usage { user_percent: percent(user), system_percent: percent(system), switches };
    let described = checks.map(|v| v.described).unwrap_or_default();
    let bad_blocks = described.iter().map(ToString::to_string).collect();
    Ok(Outcome { row, bad_blocks, timeline: Timeline::of(queues)?, directions, usage })
}

/// Separates the results of reads and writes. Without a mixed workload, all results are of one
/// direction.
fn split_directions(
    config: &LoadConfig,
    commands: u64,
    mixed_writes: u64,
    iops: f64,
    mixed: Option<Directions<Histogram<u64>>>,
    all: &Histogram<u64>,
) -> Directions<Direction> {
    let part = |part: u64, latencies| Direction {
        commands: part,
        iops: if commands == 0 { 0.0 } else { iops * (part as f64 / commands as f64) },
        latencies,
    };
    let whole = part(commands, Some(all.clone()));
    match mixed {
        Some(Directions { read, write }) => Directions {
            read: part(commands - mixed_writes.min(commands), Some(read)),
            write: part(mixed_writes, Some(write)),
        },
        None if config.rw.writes() && config.rw.percent_read(config.rwmixread) == 0 => {
            Directions { read: Direction::default(), write: whole }
        }
        None => Directions { read: whole, write: Direction::default() },
    }
}
