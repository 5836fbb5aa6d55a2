//! `demo`: measures the benefit of shadow doorbells on this machine.
//!
//! A second process serves a disk in memory and a null disk over a vfio-user socket, as it would
//! for a virtual machine. This process attaches the driver. Each row of a table is measured twice
//! with equal parameters: with plain MMIO doorbells, which the server has to trap, and with shadow
//! doorbells.
//!
//! Driver and server count the doorbell writes independently. If the counts do not agree, one of
//! the results is wrong, so the demonstration reports an error and fails.

mod cpu_split;
mod published;
mod server;

use crate::load::{LoadConfig, Outcome, Workload, interval, measure};
use crate::page::{self, Measured};
use crate::queue_options::CompletionMode;
use crate::report::{self, Row};
use crate::session::Session;
use anyhow::bail;
use cpu_split::CpuSplit;
use indicatif::ProgressBar;
use server::Server;
use shadowbell_config::parse;
use shadowbell_config::target::Target;
use shadowbell_driver::Doorbells;
use shadowbell_process::output::Output;
use shadowbell_process::table::Table;
use shadowbell_process::{exit, units};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use std::io::{self, IsTerminal, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Show the benefit of shadow doorbells on this machine, in half a minute
///
/// Serves two disks from a second process, attaches the driver, and measures with and without
/// shadow doorbells. Requires no installation and leaves no files behind.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub(crate) output: Output,
    /// Duration of each of the twelve measurements, 10ms to 60s
    #[arg(long, default_value = "1500ms", value_name = "TIME", value_parser = runtime)]
    pub runtime: Duration,
    /// Write an HTML report with diagrams of each measurement over time
    #[arg(long, value_name = "OUT.html")]
    pub report: Option<PathBuf>,
}

fn runtime(text: &str) -> Result<Duration, String> {
    let time = parse::time(text)?;
    let is_fine = (Duration::from_millis(10)..=Duration::from_secs(60)).contains(&time);
    is_fine
        .then_some(time)
        .ok_or_else(|| "it is 10ms to 60s; a number without a unit counts seconds".to_owned())
}

/// Disks of the server: namespace 1 is in memory, namespace 2 is a null disk.
const DISKS: [&str; 2] = ["mem:64MiB", "null:1TiB"];
/// Size of the disk in memory, and of each I/O that fills it, in bytes.
const MEMORY: u64 = 64 << 20;
const FILL: u32 = 1 << 20;

/// Tables: name, namespace, number of jobs, and for each row the I/Os in flight per job.
const TABLES: [(&str, u32, u16, &[u32]); 3] =
    [("S0", 1, 1, &[32]), ("S1", 2, 4, &[32]), ("S3", 1, 1, &[1, 2, 4, 8])];

/// Title and introduction of the HTML report.
const TITLE: &str = "shadowbell demo: the benefit of shadow doorbells";
const LEAD: &str = "4 KiB random reads over a vfio-user socket. S0: a disk in memory, 32 in flight. \
                    S1: a null disk, 4 jobs. S3: a disk in memory, few in flight. Each is measured \
                    with trapped doorbells and with shadow doorbells; all other parameters are \
                    equal.";

/// Runs the verb.
///
/// # Errors
/// The server or the driver fails.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    page::check(args.report.as_deref())?;
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // A signal ends the measurement; the server ends when `Server` is dropped.
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    let cpus = CpuSplit::divide()?;
    let mut demo = Demo {
        server: cpus.for_server(|| Server::start(&DISKS, &[]))?,
        cpus,
        runtime: args.runtime,
        records_timeline: args.report.is_some(),
        stop,
    };
    let out = &mut io::stdout().lock();
    if !args.output.is_json() {
        demo.print_introduction(out)?;
    }
    demo.fill()?;
    let mut rows = Vec::new();
    let mut timelines = Vec::new();
    for (table, nsid, jobs, depths) in TABLES {
        let first = rows.len();
        for depth in depths {
            for doorbells in [Doorbells::Mmio, Doorbells::Shadow] {
                let Measured { row, timeline } =
                    demo.measure(table, nsid, jobs, *depth, doorbells)?;
                rows.push(row);
                timelines.push(timeline);
            }
        }
        if !args.output.is_json() {
            print(out, table, rows.get(first..).unwrap_or_default())?;
        }
    }
    let disagree = rows.iter().filter(|row| !counts_agree(row)).count();
    let merged = rows.iter().map(merged_signals).sum();
    if args.output.is_json() {
        report::write_json(out, &rows)?;
    } else {
        print_conclusion(out, disagree, merged)?;
    }
    if let Some(path) = &args.report {
        let measured = |(row, timeline): (&Row, _)| Measured { row: row.clone(), timeline };
        let measured: Vec<_> = rows.iter().zip(timelines).map(measured).collect();
        let (pairs, _) = measured.as_chunks::<2>();
        page::write(path, TITLE, LEAD, &page::overview(pairs)?)?;
    }
    if disagree != 0 {
        tracing::error!(
            "the driver and the controller count different doorbell writes in {disagree} \
             measurements"
        );
    }
    Ok(ExitCode::from(if disagree == 0 { exit::SUCCESS } else { exit::FAILED }))
}

/// Number of doorbell writes that the driver counts and the controller does not. With shadow
/// doorbells, a doorbell write signals an eventfd. Several signals are merged to one if the
/// controller has not read the eventfd in between (`shadowbell_memory::Signals`). This happens more
/// often on a busy machine.
fn merged_signals(row: &Row) -> u64 {
    let counts = row.driver_mmio_writes.zip(row.controller_mmio_writes);
    counts.map_or(0, |(driver, controller)| driver.saturating_sub(controller))
}

/// True if driver and controller count the same doorbell writes, apart from merged signals.
fn counts_agree(row: &Row) -> bool {
    let (driver, controller) = (row.driver_mmio_writes, row.controller_mmio_writes);
    if row.doorbells != "shadow" {
        return driver == controller;
    }
    let few = driver.unwrap_or(0) / 2 + 2;
    controller <= driver && merged_signals(row) <= few
}

struct Demo {
    server: Server,
    cpus: CpuSplit,
    runtime: Duration,
    /// True if time lines are recorded, for a report.
    records_timeline: bool,
    stop: Arc<AtomicBool>,
}

impl Demo {
    fn print_introduction(&self, out: &mut impl Write) -> io::Result<()> {
        let list = |cpus: &[usize]| {
            let cpus: Vec<_> = cpus.iter().map(ToString::to_string).collect();
            cpus.join(",")
        };
        writeln!(
            out,
            "A controller behind {}, in process {}, serves",
            self.server.socket().display(),
            self.server.id()
        )?;
        writeln!(
            out,
            "a disk in memory and a null disk. The driver in this process attaches anew for each"
        )?;
        writeln!(
            out,
            "measurement: first with doorbell writes by MMIO, which cross the socket (\"trapped\"),"
        )?;
        writeln!(out, "then with shadow doorbells. It rings the doorbell for every I/O.")?;
        if self.cpus.have_separate_cpus() {
            writeln!(
                out,
                "CPUs: {} for the driver, which polls; {} for the controller, which polls while\n\
                 there is work and sleeps otherwise.",
                list(&self.cpus.driver),
                list(&self.cpus.server)
            )?;
        } else {
            writeln!(
                out,
                "Driver and controller share one CPU: the driver sleeps until the interrupt, and\n\
                 the results are those of a busy machine."
            )?;
        }
        let threads = self.cpus.driver_threads(4);
        if threads < 4 {
            writeln!(
                out,
                "There are not enough CPUs for a thread for each of the 4 jobs of S1: {threads}\n\
                 {} their 4 queue pairs in turn.",
                if threads == 1 { "thread drives" } else { "threads drive" }
            )?;
        }
        writeln!(out)
    }

    /// Writes the whole disk in memory once. Unwritten memory is backed by one shared zero page,
    /// so reading it would not measure memory reads.
    fn fill(&self) -> anyhow::Result<()> {
        let config = LoadConfig {
            rw: Workload::Write,
            bs: FILL,
            iodepth: 4,
            number_ios: Some(MEMORY / u64::from(FILL)),
            completion: CompletionMode::Adaptive,
            ..LoadConfig::default()
        };
        let target = Target::VfioUser { socket: self.server.socket(), nsid: 1 };
        let mut session = Session::attach(&target, &config.attach_options())?;
        measure(&mut session, &config, &mut |_| ControlFlow::Continue(()))?;
        session.detach()
    }

    fn measure(
        &mut self,
        table: &str,
        nsid: u32,
        jobs: u16,
        iodepth: u32,
        doorbells: Doorbells,
    ) -> anyhow::Result<Measured> {
        let polls = self.cpus.have_separate_cpus();
        let config = LoadConfig {
            rw: Workload::RandRead,
            iodepth,
            // One I/O per doorbell write, as in `docs/performance.md`.
            iodepth_batch: Some(1),
            numjobs: jobs,
            // A thread that sleeps until an interrupt can serve only one queue.
            threads: if polls { self.cpus.driver_threads(jobs) } else { jobs },
            runtime: self.runtime,
            ramp_time: self.runtime / 8,
            doorbells,
            completion: if polls { CompletionMode::Poll } else { CompletionMode::Interrupt },
            pin: self.cpus.driver.clone(),
            timeline: self.records_timeline.then(|| interval(self.runtime, jobs)),
            ..LoadConfig::default()
        };
        let before = self.server.doorbell_writes()?;
        let target = Target::VfioUser { socket: self.server.socket(), nsid };
        let mut session = Session::attach(&target, &config.attach_options())?;
        let bar = if io::stderr().is_terminal() {
            ProgressBar::new_spinner()
        } else {
            ProgressBar::hidden()
        };
        let outcome = measure(&mut session, &config, &mut |tick| {
            let iops = units::count(tick.iops);
            bar.set_message(format!("{table}, iodepth {iodepth}: {iops} IOPS"));
            bar.tick();
            if self.stop.load(Ordering::Relaxed) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        bar.finish_and_clear();
        let Outcome { mut row, timeline, .. } = outcome?;
        session.detach()?;
        if self.stop.load(Ordering::Relaxed) {
            bail!("ended by a signal");
        }
        // The server has counted all doorbell writes: they precede the detach on the same socket.
        row.controller_mmio_writes = Some(self.server.doorbell_writes()?.saturating_sub(before));
        row.table = table.to_owned();
        Ok(Measured { row, timeline })
    }
}

/// Prints a table from pairs of rows: without shadow doorbells, and with.
fn print(out: &mut impl Write, name: &str, rows: &[Row]) -> io::Result<()> {
    let (what, whose) = published::title(name);
    writeln!(out, "{name}: {what}")?;
    let mut table = Table::new([
        "iodepth",
        "IOPS: trapped",
        "shadow",
        "gain",
        "MMIO/IO: trapped",
        "shadow",
        "p50: trapped",
        "shadow",
    ]);
    let gain = |without: f64, with: f64| format!("{:.1}x", with / without);
    for pair in rows.chunks_exact(2) {
        let [without, with] = pair else { continue };
        let p50 = |row: &Row| {
            row.latency_ns.map_or_else(|| "-".to_owned(), |l| units::nanoseconds(l.p50 as f64))
        };
        table.line([
            format!("{}, measured", without.iodepth),
            units::count(without.iops),
            units::count(with.iops),
            gain(without.iops, with.iops),
            units::per_io(without.mmio_per_io),
            units::per_io(with.mmio_per_io),
            p50(without),
            p50(with),
        ]);
        if let Some(figures) = published::figures_for(name, without.iodepth) {
            let [trapped, shadow] = figures.iops;
            let mmio = figures.mmio_per_io.map(|mmio| mmio.map(units::per_io));
            let [mmio_trapped, mmio_shadow] =
                mmio.unwrap_or_else(|| ["-".to_owned(), "-".to_owned()]);
            table.line([
                "  published".to_owned(),
                units::count(trapped),
                units::count(shadow),
                gain(trapped, shadow),
                mmio_trapped,
                mmio_shadow,
                "-".to_owned(),
                "-".to_owned(),
            ]);
        }
    }
    writeln!(out, "{table}published: {whose}\n")?;
    out.flush()
}

fn print_conclusion(out: &mut impl Write, disagree: usize, merged: u64) -> io::Result<()> {
    if disagree == 0 && merged == 0 {
        writeln!(
            out,
            "The driver and the controller count the same doorbell writes in every measurement."
        )?;
    } else if disagree == 0 {
        writeln!(
            out,
            "The driver and the controller count the same doorbell writes, apart from {merged} \
             signals that were merged."
        )?;
    }
    writeln!(out, "Next steps:")?;
    writeln!(
        out,
        "  shadowbell serve disk.img --socket /run/vm0.sock      a disk for a virtual machine"
    )?;
    writeln!(
        out,
        "  shadowbell bench vfio-user:/run/vm0.sock --rw randrw  your own measurement (it writes)"
    )
}
