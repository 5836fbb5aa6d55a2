//! Command line of the benchmarks.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use crate::settings::Settings;
use crate::suites::instructions::Recorded;
use crate::suites::{
    disks, exports, file, growth, instructions, mem, null, readers, scrape, sleep, spdk, wire,
};
use crate::table::{Table, json_line};
use crate::{machine, workspace};

/// Arguments of `bench`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Suites to run; the default is all of them
    #[arg(value_enum)]
    suites: Vec<Suite>,
    /// Number of rounds; figures are the medians of the rounds
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Duration of one measurement in milliseconds
    #[arg(long, default_value_t = 1000, value_name = "MS")]
    #[arg(value_parser = clap::value_parser!(u64).range(10..=3_600_000))]
    time: u64,
    /// Functional test: one short round of a few conditions. The figures have no meaning
    #[arg(long, conflicts_with_all = ["rounds", "time"])]
    quick: bool,
    /// CPUs of the controller and of the driver
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1], value_name = "CPU,CPU")]
    cpus: Vec<usize>,
    /// Directory of the image of the suite `file`, on the file system to measure
    #[arg(long, value_name = "PATH", default_value_os_t = output_directory())]
    directory: PathBuf,
    /// Path of a built shadowbell program; without it, one is built
    #[arg(long, value_name = "PATH")]
    shadowbell: Option<PathBuf>,
    /// Path of a built SPDK tree for the suite `spdk`, and for vhost-user-blk in `exports`:
    /// configured with `--with-vfio-user`
    #[arg(long, value_name = "DIR")]
    spdk: Option<PathBuf>,
    /// Fail if the suite `instructions` exceeds tools/bench/instructions.json
    #[arg(long, conflicts_with = "record")]
    check: bool,
    /// Record the result of the suite `instructions` in tools/bench/instructions.json
    #[arg(long)]
    record: bool,
    /// Print one line of JSON at the end: {"rows": [...]}
    #[arg(long)]
    json: bool,
}

/// Examples at the end of the help.
pub const EXAMPLES: &str = "\
Examples:
  cargo xtask bench                            everything; takes about half an hour
  cargo xtask bench wire null --json           IOPS next to the wire limit; the last line is JSON
  cargo xtask bench instructions --check       what a change may not make worse
  cargo xtask bench spdk --spdk ~/spdk         shadowbell and SPDK, each with each
  cargo xtask bench --quick                    whether everything works, in a minute

Leave the machine alone meanwhile.";

/// Suites, by their names on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// Maximum rate of queue entries between two CPUs of this machine
    Wire,
    /// Null disk, polling: IOPS, latency and CPU cost per I/O, next to the wire limit
    Null,
    /// Memory disk: bandwidth next to memcpy
    Mem,
    /// File-backed disk next to fio with io_uring
    File,
    /// Exports of memory by NBD (plain and TLS), FUSE and, with --spdk, vhost-user-blk:
    /// shadowbell next to nbdkit, qemu-nbd, qemu-storage-daemon and SPDK
    Exports,
    /// NBD disk next to fio on the same server, and qcow2 next to raw and to QEMU's export
    Disks,
    /// Sequential readers of a disk and of files on it, through FUSE and a loop device
    Readers,
    /// Polling, adaptive and sleeping sides, at full load and at a fixed rate
    Sleep,
    /// Many queue pairs, and many controllers
    Growth,
    /// Duration of `/metrics` with many controllers, and its effect on a load of one of them
    Scrape,
    /// Instructions per I/O of each side, by callgrind, identical in every run
    Instructions,
    /// SPDK's client and target next to this driver and controller, in all pairs; needs --spdk
    /// and huge pages, which are reserved if permitted
    Spdk,
}

/// Runs the suites and prints their tables.
pub fn run(arguments: Arguments) -> Result<()> {
    let suites = match arguments.suites.as_slice() {
        [] => Suite::value_variants().to_vec(),
        named => named.to_vec(),
    };
    if (arguments.check || arguments.record) && !suites.contains(&Suite::Instructions) {
        bail!("--check and --record are about the suite `instructions`");
    }
    let &[first, second] = arguments.cpus.as_slice() else { bail!("--cpus takes two processors") };
    if first == second {
        bail!("--cpus takes two processors: both sides on one would measure the scheduler");
    }
    let tree = match &arguments.spdk {
        Some(_) if !suites.iter().any(|suite| matches!(suite, Suite::Spdk | Suite::Exports)) => {
            bail!("--spdk is about the suites `spdk` and `exports`")
        }
        Some(directory) => Some(spdk::Tree::new(directory)?),
        // Without a built tree, the suite `spdk` is skipped. If the command line names it, that is
        // an error.
        None if arguments.suites.contains(&Suite::Spdk) => {
            bail!("no tree of SPDK: {}", spdk::HOW_TO_BUILD)
        }
        None => None,
    };
    let needs_program = suites.iter().any(|s| !matches!(s, Suite::Wire | Suite::Instructions));
    let given = match arguments.shadowbell {
        Some(path) => Some(path.canonicalize().with_context(|| path.display().to_string())?),
        None => None,
    };
    // All arguments must be checked before this point, because the following may build for minutes.
    if !arguments.quick {
        workspace::run_optimised()?;
    }
    let binary = match given {
        Some(path) => path,
        None if needs_program => workspace::build_shadowbell()?,
        None => PathBuf::new(),
    };
    let quick = arguments.quick;
    let settings = Settings {
        binary,
        cpus: [first, second],
        pinned: true,
        rounds: if quick { 1 } else { arguments.rounds },
        time: Duration::from_millis(if quick { 60 } else { arguments.time }),
        ramp: Duration::from_millis(if quick { 20 } else { 200 }),
        quick,
        directory: arguments.directory,
    };
    let recorded = match (arguments.check, arguments.record) {
        (true, _) => Recorded::Check,
        (_, true) => Recorded::Replace,
        _ => Recorded::Show,
    };
    let directory = &settings.directory;
    std::fs::create_dir_all(directory).with_context(|| directory.display().to_string())?;
    machine::describe(settings.cpus).iter().for_each(|line| println!("{line}"));
    if quick {
        println!("a quick run: the figures mean nothing");
    }
    let mut rows = Vec::new();
    let mut failures = Vec::new();
    for suite in suites {
        let began = (Instant::now(), machine::stolen());
        let name = suite.to_possible_value().map_or(String::new(), |v| v.get_name().to_owned());
        let tables = match suite {
            Suite::Wire => wire::run(&settings),
            Suite::Null => null::run(&settings),
            Suite::Mem => mem::run(&settings),
            Suite::File => file::run(&settings),
            Suite::Exports => exports::run(&settings, tree.as_ref()),
            Suite::Disks => disks::run(&settings),
            Suite::Readers => readers::run(&settings),
            Suite::Sleep => sleep::run(&settings),
            Suite::Growth => growth::run(&settings),
            Suite::Scrape => scrape::run(&settings),
            Suite::Instructions => instructions::run(quick, recorded),
            Suite::Spdk => spdk::run(&settings, tree.as_ref()),
        };
        // A failed suite does not end the run.
        match tables {
            Ok(tables) => {
                for table in tables {
                    print!("{table}");
                    rows.extend(table.json);
                }
            }
            Err(error) => {
                println!("\n{name}: {error:#}");
                failures.push(name.clone());
            }
        }
        println!("{name}: {:.0} s{}", began.0.elapsed().as_secs_f64(), stolen_since(began.1));
    }
    if arguments.json {
        println!("{}", json_line(&rows));
    }
    if !failures.is_empty() {
        bail!("failed: {}", failures.join(", "));
    }
    Ok(())
}

/// Measures an RBD disk next to fio, on the image `rbd/NAME` of the cluster with the
/// configuration `conf`. `program` is a built shadowbell program; without it, one is built.
pub fn rbd(program: Option<&Path>, conf: &Path, name: &str, rounds: u32) -> Result<Table> {
    let binary = match program {
        Some(path) => path.canonicalize().with_context(|| path.display().to_string())?,
        None => workspace::build_shadowbell()?,
    };
    let settings = Settings {
        binary,
        cpus: [0, 1],
        // The threads are not pinned, because Ceph's daemons need the same CPUs.
        pinned: false,
        rounds,
        // Each measurement takes longer than the caches need to fill.
        time: Duration::from_secs(3),
        ramp: Duration::from_secs(2),
        quick: false,
        directory: output_directory(),
    };
    crate::suites::rbd::table(&settings, conf, name)
}

/// Fails if an I/O needs more instructions than recorded. Instruction counts are the only speed
/// figure that is the same on every machine.
pub fn check_instructions() -> Result<()> {
    instructions::run(true, Recorded::Check)?.iter().for_each(|table| print!("{table}"));
    Ok(())
}

/// Fails if the work of an operation is not proportional: for twice as many objects, it must not
/// execute much more than twice the instructions.
pub fn check_doubling() -> Result<()> {
    instructions::check_doubling()
}

/// Directory for files of the suites.
fn output_directory() -> PathBuf {
    workspace::root().join("target/bench")
}

/// Description of the steal time during the run, if it was significant.
fn stolen_since(before: Option<(u64, u64)>) -> String {
    let (Some(before), Some(now)) = (before, machine::stolen()) else { return String::new() };
    let all = now.1.saturating_sub(before.1).max(1) as f64;
    let share = now.0.saturating_sub(before.0) as f64 / all * 100.0;
    if share < 0.5 { String::new() } else { format!(", {share:.1} % of it stolen by the host") }
}
