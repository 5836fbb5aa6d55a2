//! `cargo xtask`: command line of all chores.
#![forbid(unsafe_code)]

mod ceph;
mod chores;
mod crates;
mod deb;
mod fuzz;
mod structure;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};
use shadowbell_bench as bench;
use shadowbell_bench::workspace::run_optimised;
use shadowbell_guest::Kernel;
use shadowbell_guest_suites::{ControllerKind, Setup, Suite, shell};
use shadowbell_harness::{Report, run_alone};
use shadowbell_hostile as hostile;
use shadowbell_soak as soak;

/// Chores of the Shadowbell workspace: tests, benchmarks, packages.
///
/// As root on Debian 12 and later, missing packages are installed (mmdebstrap), and QEMU, the
/// guest's programs and kernels are downloaded once to target/guest. Otherwise one line lists
/// what to install.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Run all checks: format, structure, lints, docs, packages, tests, loom models, and the
    /// guest suites.
    ///
    /// All steps run, also after a failure; the last line has the numbers of passed and failed
    /// checks. Speeds are printed and not checked, because they depend on other load of the
    /// machine.
    Test {
        /// Skip the guest suites, and with them all steps that need root or Debian packages.
        #[arg(long)]
        no_guest: bool,
        /// Run only the test programs, this often, beside one busy loop for each CPU. No test may
        /// fail: a test waits for an event and never for a time.
        #[arg(long, value_name = "ROUNDS", conflicts_with = "no_guest")]
        busy: Option<u32>,
    },
    /// Test `rbd:` disks on a Ceph cluster that is started on this machine.
    ///
    /// As root on Debian, missing packages of Ceph are installed. The cluster keeps its objects
    /// in memory and is removed afterwards.
    Ceph(ceph::Arguments),
    /// Explore the models of the shadow doorbell protocol with loom.
    Loom,
    /// Build the book of `docs/` into target/book (index.html).
    ///
    /// The tests of the crate shadowbell check its links and commands.
    Book,
    /// Package every published crate, and build each from its package alone.
    ///
    /// Uncommitted changes are packaged as well; nothing is uploaded. `cargo xtask test` packages
    /// without building.
    Crates,
    /// Check all dependencies for licences, sources, duplicates and known vulnerabilities.
    ///
    /// cargo-deny is installed if it is missing. Vulnerabilities need the RustSec database:
    /// without a network this check is skipped, with a message.
    Deny,
    /// Build a Debian package: the program, systemd units, manual pages, completions.
    ///
    /// With --test, as root on Debian, missing packages are installed (mmdebstrap,
    /// systemd-container, lintian), and a Debian root is downloaded once to target/debian.
    #[command(after_help = deb::EXAMPLES)]
    Package(deb::Arguments),
    /// Test the page of libvirt: start, stop and restart a domain of a real libvirtd.
    ///
    /// As root on Debian; a Debian root with libvirt and QEMU is downloaded once to target/debian,
    /// and booted by systemd. The guest runs under TCG.
    Libvirt(deb::libvirt::Arguments),
    /// Run suites in a Linux guest under QEMU, on a disk under test.
    ///
    /// Logs of the last run are in target/guest/logs.
    #[command(after_help = GUEST_EXAMPLES)]
    Guest(GuestArguments),
    /// Measure performance, next to the limits of this machine and to other programs.
    ///
    /// Contestants are measured in turns, and a figure is the median of several rounds. As root
    /// on Debian, fio, strace and valgrind are installed if they are missing; otherwise
    /// measurements that need them are skipped, with a message.
    #[command(after_help = bench::EXAMPLES)]
    Bench(bench::Arguments),
    /// Fuzz the interfaces that untrusted peers can reach, with libFuzzer and the address
    /// sanitizer.
    ///
    /// Needs nightly Rust; cargo-fuzz is installed if it is missing. The run ends by itself. If
    /// an input fails, the exit status is not 0, and the path of the input is printed. A run
    /// starts from fuzz/corpus, adds programs with new coverage, and minimises it.
    #[command(after_help = fuzz::EXAMPLES)]
    Fuzz(fuzz::Arguments),
    /// Attack a server as a hostile guest or VMM would, beside an honest neighbour.
    ///
    /// Fails if the neighbour is delayed, if the server's memory or log grows without bound, or
    /// if the server does not end in time.
    #[command(after_help = hostile::EXAMPLES)]
    Hostile(hostile::Arguments),
    /// Attack a supervisor as its server process would under an attacker's control.
    ///
    /// Fails if a file, socket or process outside of the grants changes, or if the shutdown does
    /// not begin within 100 ms of SIGTERM.
    Campaign {
        /// Number of messages of each kind
        #[arg(long, default_value_t = 1_000_000, value_name = "N")]
        messages: u64,
        /// Attacks; the default is all of them
        attacks: Vec<String>,
    },
    /// Run stress tests of minutes: many controllers, honest and hostile, with verified data.
    #[command(after_help = soak::EXAMPLES)]
    Soak(soak::Arguments),
    /// Run a test program, and fail if it leaves a process behind.
    #[command(hide = true)]
    RunAlone {
        /// Seconds that descendants have to end after the program: a server process ends by
        /// itself some time after the death of its supervisor.
        #[arg(long, default_value_t = 120, value_name = "SECONDS")]
        grace: u64,
        /// Program and arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<OsString>,
    },
    /// Run a part of `test` without a chore of its own.
    #[command(hide = true)]
    Part {
        part: chores::Part,
        /// Path of the program that is built for tests
        program: PathBuf,
    },
    /// FUSE daemon of one file, for an attack.
    #[command(hide = true)]
    FuseDaemon { friend: u32 },
    /// Check that imports between files and between crates have no cycle and follow the layers.
    ///
    /// A file imports another when it uses a name that the other one defines, in code that is not
    /// only for tests. A re-export counts for the file with the definition.
    #[command(after_help = structure::EXAMPLES)]
    Structure(structure::Arguments),
    /// Run shell commands in a guest with a new disk.
    Shell {
        /// Kernel of the guest
        #[arg(long, default_value_t = Kernel::V7_2)]
        kernel: Kernel,
        /// Controller of the disk
        #[arg(long, value_enum, default_value_t = ControllerKind::Shadowbell)]
        device: ControllerKind,
        /// Path of a built shadowbell program; without it, one is built
        #[arg(long, value_name = "PATH")]
        shadowbell: Option<PathBuf>,
        /// Shell commands, one argument each; the default is the lines of standard input
        commands: Vec<String>,
    },
}

const GUEST_EXAMPLES: &str = "\
Examples:
  cargo xtask guest                             all suites, both kernels
  cargo xtask guest smoke --kernel 7.2          one suite, one kernel
  cargo xtask guest doorbells --json            doorbell writes per I/O; the last line is JSON
  cargo xtask guest recover --kernel 7.2        the driver, and controllers that do wrong
  cargo xtask guest fs --device qemu-nvme       the same checks on QEMU's own controller";

#[derive(clap::Args)]
struct GuestArguments {
    /// Suites to run; the default is all of them
    #[arg(value_enum)]
    suites: Vec<Suite>,
    /// Kernel of the guest
    #[arg(long, value_enum, default_value_t = Kernels::All)]
    kernel: Kernels,
    /// Controller under test. With shadowbell's, `doorbells` measures QEMU's as well
    #[arg(long, value_enum, default_value_t = ControllerKind::Shadowbell)]
    device: ControllerKind,
    /// Path of a built shadowbell program; without it, one is built
    #[arg(long, value_name = "PATH")]
    shadowbell: Option<PathBuf>,
    /// Number of rounds of a speed measurement, of which the median counts. With one round,
    /// `readers` measures only one of its two controllers; with none, only counts are measured
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(0..=99))]
    rounds: u8,
    /// Minimum number of upgrades or kills (suites `upgrade` and `kill`)
    #[arg(long, default_value_t = 100)]
    events: u32,
    /// Path of Cloud Hypervisor (suite `cloud-hypervisor`, which is skipped without it)
    #[arg(long, value_name = "PATH")]
    cloud_hypervisor: Option<PathBuf>,
    /// Print one line of JSON at the end: {"rows": [...]}
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kernels {
    /// Kernel of Debian 12
    #[value(name = "6.1")]
    V6_1,
    /// Kernel of Debian 13's backports
    #[value(name = "7.2")]
    V7_2,
    /// Both kernels, one after the other
    All,
}

impl Kernels {
    fn list(self) -> Vec<Kernel> {
        match self {
            Self::V6_1 => vec![Kernel::V6_1],
            Self::V7_2 => vec![Kernel::V7_2],
            Self::All => Kernel::ALL.to_vec(),
        }
    }
}

fn main() -> ExitCode {
    let mut report = Report::default();
    let result = match Arguments::parse().verb {
        Verb::Test { busy: Some(rounds), .. } => chores::test_busy(&mut report, rounds),
        Verb::Test { no_guest, .. } => chores::test(&mut report, !no_guest),
        Verb::Loom => chores::loom(&mut report),
        Verb::Ceph(arguments) => ceph::run(&mut report, &arguments),
        Verb::Book => chores::book(&mut report),
        Verb::Crates => crates::run(&mut report, true),
        Verb::Deny => chores::deny(&mut report),
        Verb::Package(arguments) => deb::run(&mut report, &arguments),
        Verb::Libvirt(arguments) => deb::libvirt::run(&mut report, &arguments),
        Verb::Guest(arguments) => guest_suites(&mut report, arguments),
        Verb::Bench(arguments) => bench::run(arguments),
        Verb::Fuzz(arguments) => fuzz::run(&mut report, &arguments),
        Verb::Hostile(arguments) => {
            run_optimised().and_then(|()| hostile::run(&mut report, arguments))
        }
        Verb::Campaign { messages, attacks } => chores::campaign(&mut report, messages, &attacks),
        Verb::Soak(arguments) => run_optimised().and_then(|()| soak::run(&mut report, arguments)),
        Verb::RunAlone { grace, command } => {
            match run_alone::run(&command, Duration::from_secs(grace)) {
                Ok(code) => return code,
                Err(error) => Err(error),
            }
        }
        Verb::Part { part, program } => part.run(&mut report, &program),
        Verb::FuseDaemon { friend } => hostile::fuse_daemon(friend),
        Verb::Structure(arguments) => structure::run(&arguments),
        Verb::Shell { kernel, device, shadowbell, commands } => {
            Setup::new(device, shadowbell, &[kernel])
                .and_then(|setup| shell::run(&setup, kernel, commands))
        }
    };
    if let Err(error) = result {
        eprintln!("error: {error:#}");
        return ExitCode::FAILURE;
    }
    if report.failed() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn guest_suites(report: &mut Report, arguments: GuestArguments) -> Result<()> {
    let suites = match arguments.suites.as_slice() {
        [] => Suite::value_variants().to_vec(),
        named => named.to_vec(),
    };
    let kernels = arguments.kernel.list();
    let mut setup = Setup::new(arguments.device, arguments.shadowbell, &kernels)?;
    setup.rounds = arguments.rounds.into();
    setup.events = arguments.events;
    setup.cloud_hypervisor = arguments.cloud_hypervisor;
    for kernel in kernels {
        for &suite in &suites {
            suite.run(&setup, report, kernel);
        }
    }
    report.summary();
    if arguments.json {
        println!("{}", report.json());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }

    #[test]
    fn the_commands_of_the_contributors_page_are_accepted() {
        use clap::CommandFactory;
        let page = bench::workspace::root().join("CONTRIBUTING.md");
        let page = std::fs::read_to_string(page).unwrap();
        let commands = page.split('`').chain(page.lines()).map(str::trim_start);
        let mut found = 0;
        for command in commands.filter_map(|text| text.strip_prefix("cargo xtask ")) {
            let words = command.split('#').next().unwrap_or_default().split_whitespace();
            let words: Vec<_> = words.filter(|word| *word != "--help").collect();
            let mut parser = Arguments::command().no_binary_name(true);
            let parsed = parser.try_get_matches_from_mut(&words);
            assert!(words.is_empty() || parsed.is_ok(), "cargo xtask {command}: {parsed:?}");
            found += 1;
        }
        assert!(found >= 5, "{found}");
    }
}
