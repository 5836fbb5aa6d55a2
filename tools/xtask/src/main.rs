//! `cargo xtask`: every chore has one name.
#![forbid(unsafe_code)]

mod ceph;
mod chores;
mod crates;
mod deb;
mod fuzz;
mod guest_shell;
mod hostile;
mod peer;
mod processes;
mod report;
mod run_alone;
mod soak;
mod step;
mod structure;
mod suites;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};
use report::Report;
use shadowbell_bench as bench;
use shadowbell_bench::workspace::run_optimised;
use shadowbell_guest::Kernel;
use suites::{ControllerKind, Setup, Suite};

/// Every chore of the Shadowbell workspace has one name.
///
/// On Debian 12 and later, as root, what is missing is installed (mmdebstrap) or fetched once and
/// kept under target/guest (QEMU, the guest's programs and kernels); otherwise one line says what
/// to install.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Everything that must pass: format, structure, lints, docs, packages, tests, loom models, and
    /// the guest suites.
    ///
    /// All steps run, whatever fails; the last line counts what passed and what failed. Speeds are
    /// printed and not judged: what else the machine does would decide.
    Test {
        /// Leave the guest out: what needs neither root nor Debian packages.
        #[arg(long)]
        no_guest: bool,
    },
    /// Starts a Ceph cluster on this machine, and runs the tests of `rbd:` disks on it.
    ///
    /// As root on Debian, what is missing of Ceph is installed. The cluster is in memory, and gone
    /// afterwards.
    Ceph(ceph::Arguments),
    /// The models of the shadow doorbell protocol, explored by loom.
    Loom,
    /// Builds the book of `docs/` into target/book: open index.html there.
    ///
    /// Its links and commands are looked after by the tests of the crate shadowbell.
    Book,
    /// Packages every crate that is published, and builds each from its package alone.
    ///
    /// What is not committed yet is packaged as well; nothing is uploaded. `cargo xtask test`
    /// packages without building.
    Crates,
    /// Checks the licences, sources and duplicates of all dependencies, and known vulnerabilities.
    ///
    /// cargo-deny is installed if it is missing. Vulnerabilities need the RustSec database: without
    /// a network they are left out, with a message.
    Deny,
    /// Builds a Debian package: the program, units of systemd, manual pages, completions.
    ///
    /// With --test, as root on Debian, what is missing is installed (mmdebstrap, systemd-container,
    /// lintian), and a Debian is fetched once and kept under target/debian.
    #[command(after_help = deb::EXAMPLES)]
    Package(deb::Arguments),
    /// Boots a Linux guest under QEMU and works a disk under test in it.
    ///
    /// Logs of the last run are kept in target/guest/logs.
    #[command(after_help = GUEST_EXAMPLES)]
    Guest(GuestArguments),
    /// How fast it is, next to what this machine could do at best.
    ///
    /// What is compared is measured in turns, and a figure is the median of several rounds. As root
    /// on Debian, fio, strace and valgrind are installed if they are missing; otherwise what needs
    /// them is left out, with a word.
    #[command(after_help = bench::EXAMPLES)]
    Bench(bench::Arguments),
    /// Looks for inputs that break what untrusted peers can reach: libFuzzer with the address
    /// sanitizer.
    ///
    /// Needs nightly Rust; cargo-fuzz is installed if it is missing. Ends by itself, with an exit
    /// status that is not 0 if something was found, and says where the input is. What was learnt is
    /// kept in fuzz/corpus for the next run.
    #[command(after_help = fuzz::EXAMPLES)]
    Fuzz(fuzz::Arguments),
    /// Attacks a server as a hostile guest or VMM would, beside a neighbour that is honest.
    ///
    /// Fails if the neighbour is held up, if the server grows or logs without bound, or does not
    /// end in time.
    #[command(after_help = hostile::EXAMPLES)]
    Hostile(hostile::Arguments),
    /// What takes minutes: many controllers of one server, honest and hostile, that verify.
    #[command(after_help = soak::EXAMPLES)]
    Soak(soak::Arguments),
    /// Runs a test program, and fails if it leaves a process behind.
    #[command(hide = true)]
    RunAlone {
        /// Seconds that its descendants have to end after the program: a server process notices the
        /// death of its supervisor by itself.
        #[arg(long, default_value_t = 120, value_name = "SECONDS")]
        grace: u64,
        /// The program and its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
        command: Vec<OsString>,
    },
    /// A file system of one file, for an attack.
    #[command(hide = true)]
    FuseDaemon { friend: u32 },
    /// Whether files and crates import one way only: no cycle in a crate, no crate that looks up.
    ///
    /// A file imports another when it names what that one defines, in code that is not for tests.
    /// What is re-exported counts for the file that defines it.
    #[command(after_help = structure::EXAMPLES)]
    Structure(structure::Arguments),
    /// Runs commands in a guest with a fresh disk, for a look by hand.
    Shell {
        /// The guest's kernel.
        #[arg(long, default_value_t = Kernel::V7_2)]
        kernel: Kernel,
        /// The controller.
        #[arg(long, value_enum, default_value_t = ControllerKind::Shadowbell)]
        device: ControllerKind,
        /// A shadowbell program that is built already, instead of building one.
        #[arg(long, value_name = "PATH")]
        shadowbell: Option<PathBuf>,
        /// Shell commands, one argument each; the lines of standard input when there are none.
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
    /// Which suites; all of them when none is named.
    #[arg(value_enum)]
    suites: Vec<Suite>,
    /// The guest's kernel.
    #[arg(long, value_enum, default_value_t = Kernels::All)]
    kernel: Kernels,
    /// The controller under test. With shadowbell's, s3 measures QEMU's own beside it.
    #[arg(long, value_enum, default_value_t = ControllerKind::Shadowbell)]
    device: ControllerKind,
    /// A shadowbell program that is built already, instead of building one.
    #[arg(long, value_name = "PATH")]
    shadowbell: Option<PathBuf>,
    /// How often a speed is measured before the median is taken; once is a short look, for which s4
    /// measures one of its two controllers.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=99))]
    rounds: u8,
    /// How often the server is upgraded, or killed, at least (suites `upgrade` and `kill`).
    #[arg(long, default_value_t = 100)]
    events: u32,
    /// Cloud Hypervisor's program (suite `cloud-hypervisor`, which is left out without).
    #[arg(long, value_name = "PATH")]
    cloud_hypervisor: Option<PathBuf>,
    /// End with one line of JSON: {"rows": [...]}.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kernels {
    /// Debian 12's.
    #[value(name = "6.1")]
    V6_1,
    /// Debian 13's, from backports.
    #[value(name = "7.2")]
    V7_2,
    /// One after the other.
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
        Verb::Test { no_guest } => chores::test(&mut report, !no_guest),
        Verb::Loom => chores::loom(&mut report),
        Verb::Ceph(arguments) => ceph::run(&mut report, &arguments),
        Verb::Book => chores::book(&mut report),
        Verb::Crates => crates::run(&mut report, true),
        Verb::Deny => chores::deny(&mut report),
        Verb::Package(arguments) => deb::run(&mut report, &arguments),
        Verb::Guest(arguments) => guest_suites(&mut report, arguments),
        Verb::Bench(arguments) => bench::run(arguments),
        Verb::Fuzz(arguments) => fuzz::run(&mut report, &arguments),
        Verb::Hostile(arguments) => {
            run_optimised().and_then(|()| hostile::run(&mut report, arguments))
        }
        Verb::Soak(arguments) => run_optimised().and_then(|()| soak::run(&mut report, arguments)),
        Verb::RunAlone { grace, command } => {
            match run_alone::run(&command, Duration::from_secs(grace)) {
                Ok(code) => return code,
                Err(error) => Err(error),
            }
        }
        Verb::FuseDaemon { friend } => hostile::fuse_daemon(friend),
        Verb::Structure(arguments) => structure::run(&arguments),
        Verb::Shell { kernel, device, shadowbell, commands } => {
            Setup::new(device, shadowbell, &[kernel])
                .and_then(|setup| guest_shell::run(&setup, kernel, commands))
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
    fn the_command_line_is_sound() {
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
