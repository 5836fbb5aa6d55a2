//! A run: jobs on their threads, and what they came to.

use super::args::{CompletionMode, Plan, Slice, doorbells_name};
use super::conduct::{Stage, Watch, conduct};
use super::job::{self, JobReport, Phase, Progress};
use super::lane::{Lane, histogram};
use super::load::{Checked, Load, Plain, Verdict};
use super::pattern::Pattern;
use super::server::ServerMeter;
use crate::exit;
use crate::report::{Latency, Row};
use crate::target::Session;
use anyhow::{Context, anyhow, bail};
use hdrhistogram::Histogram;
use shadowbell_driver::Controller;
use std::thread;
use std::time::Duration;

/// What a run came to.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The figures; whoever prints them says what table they belong to.
    pub row: Row,
    /// Sentences about blocks that did not hold what they had to: a few, if there are many.
    pub bad_blocks: Vec<String>,
}

/// Runs `plan` on the namespace of `session`, and calls `watch` now and then, which may end it early.
///
/// # Errors
/// With exit status [`exit::BAD_INPUT`] if the plan does not fit the namespace; the driver's; or an
/// I/O that failed. Content that is not right is none, but in the row.
pub fn measure(
    session: &mut Session,
    plan: &Plan,
    watch: &mut Watch<'_>,
) -> anyhow::Result<Outcome> {
    let slice = check(session, plan).map_err(exit::bad_input)?;
    let only_reads = plan.rw.percent_read(plan.rwmixread) == 100;
    let block_size = session.namespace()?.block_size();
    let pattern = |job: u16| {
        let percent = plan.rw.percent_read(plan.rwmixread);
        let seed = plan.seed.wrapping_add(u64::from(job) << 32);
        Pattern::new(slice.ios, plan.rw.is_random(), percent, seed)
    };
    if plan.verify {
        let start = |job| slice.of_job(job) * u64::from(block_size);
        let load = |job| {
            let start = start(job);
            Checked::new(pattern(job), slice.ios, plan.bs, start, only_reads, plan.seed)
        };
        run(session, plan, slice, load, watch)
    } else {
        run(session, plan, slice, |job| Plain::new(pattern(job)), watch)
    }
}

/// Whether the controller and the namespace can do it.
fn check(session: &Session, plan: &Plan) -> anyhow::Result<Slice> {
    let namespace = session.namespace()?;
    let slice = plan.slice(namespace.bytes(), namespace.block_size())?;
    let max = namespace.max_transfer_bytes();
    if u64::from(plan.bs) > max {
        return Err(anyhow!("--bs {} is more than one command moves: {max} bytes", plan.bs));
    }
    if plan.rw.percent_read(plan.rwmixread) != 100 && namespace.is_read_only() {
        return Err(anyhow!(
            "{} is read-only, and --rw {} writes",
            session.target(),
            plan.rw.name()
        ));
    }
    let granted = session.controller.queue_pairs();
    if granted < plan.numjobs {
        return Err(anyhow!("the controller grants {granted} queue pairs: no more --numjobs"));
    }
    let depth = session.controller.queue_depth();
    if depth <= plan.iodepth {
        return Err(anyhow!("the queues of the controller hold {}: no more --iodepth", depth - 1));
    }
    Ok(slice)
}

fn run<L: Load>(
    session: &mut Session,
    plan: &Plan,
    slice: Slice,
    load: impl Fn(u16) -> L,
    watch: &mut Watch<'_>,
) -> anyhow::Result<Outcome> {
    let mut threads: Vec<Vec<Lane<L>>> = (0..plan.threads).map(|_| Vec::new()).collect();
    for job in 0..plan.numjobs {
        let queue =
            session.controller.take_queue_pair().ok_or_else(|| anyhow!("no queue pair is left"))?;
        let pool = session.controller.buffers(plan.iodepth as usize, plan.bs as usize)?;
        let buffers = std::iter::from_fn(|| pool.take()).take(plan.iodepth as usize).collect();
        let nsid = session.namespace()?.nsid();
        let lane = Lane::new(queue, nsid, load(job), buffers, plan, slice, job)?;
        if let Some(lanes) = threads.get_mut(usize::from(job % plan.threads)) {
            lanes.push(lane);
        }
    }
    let mut server = plan.server_pid.map(ServerMeter::new).transpose().map_err(exit::bad_input)?;
    let reports = spawn(&mut threads, plan, &session.controller, watch, &mut server)?;
    drop(threads);
    summarise(session, plan, reports, server.as_ref().and_then(ServerMeter::share))
}

/// Runs each part of `threads` on a thread of its own and tells them when to measure and to stop.
fn spawn<L: Load>(
    threads: &mut [Vec<Lane<L>>],
    plan: &Plan,
    controller: &Controller,
    watch: &mut Watch<'_>,
    server: &mut Option<ServerMeter>,
) -> anyhow::Result<Vec<JobReport>> {
    let phase = &Phase::ramp(plan.patience());
    let progress: Vec<Progress> = threads.iter().map(|_| Progress::default()).collect();
    let sleeps = plan.completion != CompletionMode::Poll;
    let choose_sample = plan.latency_sample.is_none();
    thread::scope(|scope| {
        let mut handles = Vec::new();
        for (index, (lanes, progress)) in threads.iter_mut().zip(&progress).enumerate() {
            let cpu = plan.pin.get(index % plan.pin.len().max(1)).copied();
            let work = move || {
                cpu.map_or(Ok(()), job::pin)?;
                job::run(lanes, sleeps, choose_sample, phase, progress)
            };
            let name = format!("job{index}");
            match thread::Builder::new().name(name).spawn_scoped(scope, work) {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    phase.stop();
                    return Err(error).context("no thread for a job");
                }
            }
        }
        let stage = Stage {
            plan,
            phase,
            ended: &|| handles.iter().filter(|handle| handle.is_finished()).count(),
            commands: &|| progress.iter().map(Progress::get).sum(),
            is_alive: &|| is_alive(controller),
        };
        let gone = conduct(&stage, watch, server);
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

/// Whether the controller still answers, and works.
fn is_alive(controller: &Controller) -> anyhow::Result<()> {
    let registers = controller.registers()?;
    if registers.csts.cfs() || !registers.csts.rdy() {
        bail!("{} has failed (CSTS {:#x})", controller.name(), registers.csts.into_bits());
    }
    Ok(())
}

/// `server_share` is how much of a processor the other end used.
fn summarise(
    session: &Session,
    plan: &Plan,
    reports: Vec<JobReport>,
    server_share: Option<f64>,
) -> anyhow::Result<Outcome> {
    let mut latencies = histogram()?;
    let mut verdict: Option<Verdict> = None;
    let (mut iops, mut seconds, mut cpu) = (0.0, 0f64, Duration::ZERO);
    let (mut commands, mut mmio, mut interrupts, mut all_mmio) = (0, 0, 0, 0);
    for JobReport { begin, end, latencies: of_job, mmio_writes, verdict: found } in reports {
        let time = (end.at - begin.at).as_secs_f64();
        let count = end.commands - begin.commands;
        iops += if time > 0.0 { count as f64 / time } else { 0.0 };
        seconds = seconds.max(time);
        let paced = end.paced.saturating_sub(begin.paced);
        cpu += end.cpu.saturating_sub(begin.cpu).saturating_sub(paced);
        commands += count;
        mmio += end.mmio_writes - begin.mmio_writes;
        interrupts += end.interrupts - begin.interrupts;
        all_mmio += mmio_writes;
        latencies.add(&of_job).context("adding up the latencies")?;
        if let Some(found) = found {
            verdict.get_or_insert_default().add(found);
        }
    }
    let each = |total: f64| if commands == 0 { 0.0 } else { total / commands as f64 };
    let row = Row {
        device: session.device(),
        doorbells: doorbells_name(session.controller.doorbells()).to_owned(),
        completion: plan.completion.name().to_owned(),
        rw: plan.rw.name().to_owned(),
        bs: plan.bs,
        iodepth: plan.iodepth,
        numjobs: plan.numjobs.into(),
        threads: plan.threads.into(),
        iodepth_batch: plan.iodepth_batch,
        iops,
        bandwidth_bytes: iops * f64::from(plan.bs),
        latency_ns: percentiles(&latencies),
        commands,
        doorbell_mmio_writes: mmio,
        mmio_per_io: each(mmio as f64),
        driver_mmio_writes: Some(all_mmio),
        interrupts_per_io: each(interrupts as f64),
        cpu_ns_per_io: each(cpu.as_nanos() as f64),
        cpu_percent: if seconds > 0.0 { cpu.as_secs_f64() / seconds * 100.0 } else { 0.0 },
        controller_cpu_ns_per_io: server_share.filter(|_| iops > 0.0).map(|s| s / iops * 1e9),
        controller_cpu_percent: server_share.map(|share| share * 100.0),
        rate_iops: plan.rate_iops,
        verified_blocks: verdict.as_ref().map(|v| v.checked),
        verify_errors: verdict.as_ref().map(|v| v.bad),
        seconds,
        ..Row::default()
    };
    let described = verdict.map(|v| v.described).unwrap_or_default();
    Ok(Outcome { row, bad_blocks: described.iter().map(ToString::to_string).collect() })
}

pub(super) fn percentiles(latencies: &Histogram<u64>) -> Option<Latency> {
    (!latencies.is_empty()).then(|| Latency {
        mean: latencies.mean(),
        p50: latencies.value_at_quantile(0.5),
        p99: latencies.value_at_quantile(0.99),
        p999: latencies.value_at_quantile(0.999),
        max: latencies.max(),
        samples: latencies.len(),
    })
}
