//! The command line of the benchmarks: runs the suites and shows what they found.

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

/// What may follow `bench`.
#[derive(clap::Args)]
pub struct Arguments {
    /// Which suites; all of them when none is named.
    #[arg(value_enum)]
    suites: Vec<Suite>,
    /// How often everything is measured before the median is taken.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// How long one measurement takes, in milliseconds.
    #[arg(long, default_value_t = 1000, value_name = "MS")]
    #[arg(value_parser = clap::value_parser!(u64).range(10..=3_600_000))]
    time: u64,
    /// See that everything works: one short round of a few conditions. The figures mean nothing.
    #[arg(long, conflicts_with_all = ["rounds", "time"])]
    quick: bool,
    /// The processors of the controller and of the driver.
    #[arg(long, value_delimiter = ',', default_values_t = [0, 1], value_name = "CPU,CPU")]
    cpus: Vec<usize>,
    /// Where the image of the suite `file` is made: on the file system that is to be measured.
    #[arg(long, value_name = "PATH", default_value_os_t = output_directory())]
    directory: PathBuf,
    /// A shadowbell program that is built already, instead of building one.
    #[arg(long, value_name = "PATH")]
    shadowbell: Option<PathBuf>,
    /// A built tree of SPDK for the suite `spdk`, and for vhost-user-blk in `exports`: configured
    /// `--with-vfio-user`, made.
    #[arg(long, value_name = "DIR")]
    spdk: Option<PathBuf>,
    /// Fail if the suite `instructions` finds more than tools/bench/instructions.json allows.
    #[arg(long, conflicts_with = "record")]
    check: bool,
    /// Keep what the suite `instructions` finds in tools/bench/instructions.json.
    #[arg(long)]
    record: bool,
    /// End with one line of JSON: {"rows": [...]}.
    #[arg(long)]
    json: bool,
}

/// What follows the options in the help.
pub const EXAMPLES: &str = "\
Examples:
  cargo xtask bench                            everything; takes about half an hour
  cargo xtask bench wire null --json           IOPS next to the wire limit; the last line is JSON
  cargo xtask bench instructions --check       what a change may not make worse
  cargo xtask bench spdk --spdk ~/spdk         shadowbell and SPDK, each with each
  cargo xtask bench --quick                    whether everything works, in a minute

Leave the machine alone meanwhile.";

/// The suites, by their names on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Suite {
    /// The most entries that two processors of this machine can pass to each other.
    Wire,
    /// Null disk, polling: IOPS, latency, and what an I/O costs, next to the wire limit.
    Null,
    /// Memory disk: bandwidth next to memcpy's.
    Mem,
    /// A file, next to fio with io_uring.
    File,
    /// Exports of memory by NBD (plain and by TLS), FUSE and, with --spdk, vhost-user-blk: ours
    /// next to nbdkit's, qemu-nbd's, qemu-storage-daemon's and SPDK's.
    Exports,
    /// An NBD server's export as a disk next to fio, and qcow2 next to raw and to QEMU's export.
    Disks,
    /// Sequential readers of a disk and of files on it, through FUSE and a loop device (S4).
    Readers,
    /// Sleeping sides, and a paced load: polling, adaptive and sleeping.
    Sleep,
    /// Many queue pairs, many controllers.
    Growth,
    /// What `/metrics` of many controllers takes, and whether a paced load on one of them notices.
    Scrape,
    /// Instructions per I/O of each side, by callgrind: the same in every run.
    Instructions,
    /// SPDK's client and target next to this driver and controller, each with each; needs --spdk
    /// and huge pages, which it sets aside if it may.
    Spdk,
}

/// Runs the suites and shows what they found.
pub fn run(arguments: Arguments) -> Result<()> {
    if !arguments.quick {
        workspace::run_optimised()?;
    }
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
        // Whoever asks for all gets what there is.
        None if arguments.suites.contains(&Suite::Spdk) => {
            bail!("no tree of SPDK: {}", spdk::HOW_TO_BUILD)
        }
        None => None,
    };
    let needs_program = suites.iter().any(|s| !matches!(s, Suite::Wire | Suite::Instructions));
    let binary = match arguments.shadowbell {
        Some(path) => path.canonicalize().with_context(|| path.display().to_string())?,
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
        // The others may be of use all the same.
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

/// What a disk `rbd:` reaches next to fio, on the image `rbd/NAME` of the cluster whose
/// configuration this is; with a shadowbell program that is built already, or one that is built for
/// this.
pub fn rbd(program: Option<&Path>, conf: &Path, name: &str, rounds: u32) -> Result<Table> {
    let binary = match program {
        Some(path) => path.canonicalize().with_context(|| path.display().to_string())?,
        None => workspace::build_shadowbell()?,
    };
    let settings = Settings {
        binary,
        cpus: [0, 1],
        // Ceph's servers work on the same processors.
        pinned: false,
        rounds,
        // What a cache takes up at the beginning is not what a disk can do.
        time: Duration::from_secs(3),
        ramp: Duration::from_secs(2),
        quick: false,
        directory: output_directory(),
    };
    crate::suites::rbd::table(&settings, conf, name)
}

/// An error if an I/O costs a side more instructions than is recorded: what is measured of speed
/// and is the same on every machine.
pub fn check_instructions() -> Result<()> {
    instructions::run(true, Recorded::Check)?.iter().for_each(|table| print!("{table}"));
    Ok(())
}

/// An error if twice as much of what a host chooses a number of takes much more than twice the
/// work.
pub fn check_doubling() -> Result<()> {
    instructions::check_doubling()
}

/// Where the suites make their files.
fn output_directory() -> PathBuf {
    workspace::root().join("target/bench")
}

/// Says what the hypervisor took away meanwhile, if that was worth mentioning.
fn stolen_since(before: Option<(u64, u64)>) -> String {
    let (Some(before), Some(now)) = (before, machine::stolen()) else { return String::new() };
    let all = now.1.saturating_sub(before.1).max(1) as f64;
    let share = now.0.saturating_sub(before.0) as f64 / all * 100.0;
    if share < 0.5 { String::new() } else { format!(", {share:.1} % of it stolen by the host") }
}
