//! `cargo xtask hostile`: attacks on a server, each beside an honest neighbour.
//!
//! For each attack a server is started with one I/O thread and default options. Its first
//! controller is the victim's: reads of 4 KiB, one at a time, a thousand per second, each with a
//! doorbell message and verified data. The other controllers are the attackers', who use a
//! vfio-user client of this crate (`peer`) that sends arbitrary messages.
//!
//! In some attacks the server is `shadowbell export`: the victim is an NBD client, and the
//! attackers are other clients, or a VM on vhost-user-blk.
//!
//! Attacks that replace the server process, or exceed a number of bytes, messages or threads, are
//! evaluated by counts (`Kind::Counted`): the victim's reads continue, and the attack compares what
//! it counts with the bound.
//!
//! # Noise
//!
//! Two CPUs have to suffice for the server's I/O thread and reactor, the victim and the
//! attackers. The following keeps the load of the attackers out of the figures:
//!
//! * The threads of the server and the victim have the highest priority below the real-time
//!   classes, those of the attackers a lower one. Floods are sent in batches, with pauses.
//! * The victim polls for a completion for 60 us, and then every 20 us (about 75 us with the
//!   system's timer slack), so its own wakeups are not in the figures of fast reads.
//! * Before each attack, the victim is measured alone on the same server.
//! * Bounds apply to the latency of a read minus the time for which the victim, and the threads
//!   that serve it, were runnable without a CPU (`served`, from the schedstat of each thread before
//!   and after each read). On two CPUs the kernel lets a thread wait for 3 to 4 ms while two others
//!   run; the attack `burn`, which only computes, shows that. The table also has the unadjusted
//!   latency, and marks rows in which only the adjusted latency is within the bound.
//! * `cpu wait` is the time for which all threads of the server were runnable without a CPU
//!   during the attack. An attack that keeps two threads of the server busy on two CPUs causes some
//!   of it, other load of the machine the rest.
//! * A failed attack is repeated, twice at most, and the table has the number of attempts. A
//!   vulnerable server fails each time, but a busy machine does not. If the victim was delayed
//!   before the attack, by half of a bound, the attempt does not count, three times at most.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "the suites are no interface for other projects")]

pub mod attack;
pub mod attacks;
pub mod peer;
pub mod random;
mod round;
pub mod server;
mod verdict;
pub mod victim;
pub mod watch;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use shadowbell_bench::workspace;

pub use attacks::fuse::daemon as fuse_daemon;
pub use attacks::isolation::storage_server;
use shadowbell_harness::Report;

use attack::Attack;
use round::{Times, round};
use verdict::Strictness;

/// Duration of an attack of the short suite, in seconds.
const SHORT: f64 = 0.5;
/// Number of attempts after which an attack has failed.
const TRIES: u32 = 3;
/// Maximum number of attempts that do not count, because the victim was delayed before the attack.
const VOIDS: u32 = 3;

/// Examples for the help text of the command line.
pub const EXAMPLES: &str = "\
Examples:
  cargo xtask hostile                           every attack for two seconds
  cargo xtask hostile --list                    what there is
  cargo xtask hostile smart-log big-reads --seconds 10";

#[derive(clap::Args)]
pub struct Arguments {
    /// Attacks to make; the default is all of them
    attacks: Vec<String>,
    /// Duration of each attack
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Make each attack only once, also after a failure
    #[arg(long)]
    once: bool,
    /// Make one attack for each type of harm, for half a second each: less than a minute in all.
    /// Times fail only at 20 times their bound, as in `cargo xtask test`
    #[arg(long, conflicts_with_all = ["attacks", "seconds"])]
    short: bool,
    /// List the attacks
    #[arg(long)]
    list: bool,
    /// Print one line of JSON at the end: {"rows": [...]}
    #[arg(long)]
    json: bool,
    /// Path of a built shadowbell program; without it, one is built
    #[arg(long, value_name = "PATH")]
    shadowbell: Option<PathBuf>,
}

pub fn run(report: &mut Report, arguments: Arguments) -> Result<()> {
    let all = attacks::all();
    if arguments.list {
        let width = all.iter().map(|attack| attack.name.len()).max().unwrap_or(0);
        all.iter().for_each(|attack| println!("{:width$}  {}", attack.name, attack.about));
        return Ok(());
    }
    let known = |name: &String| all.iter().any(|attack| attack.name == name);
    if let Some(unknown) = arguments.attacks.iter().find(|name| !known(name)) {
        bail!("there is no attack {unknown}: cargo xtask hostile --list names them");
    }
    if !(0.1..=3600.0).contains(&arguments.seconds) {
        bail!("--seconds takes 0.1 to 3600");
    }
    let binary = match arguments.shadowbell {
        Some(path) => path.canonicalize()?,
        None => workspace::build_shadowbell()?,
    };
    let tries = if arguments.once { 1 } else { TRIES };
    if arguments.short {
        short(report, &binary, tries);
    } else {
        let names = &arguments.attacks;
        let wanted = |attack: &Attack| names.is_empty() || names.iter().any(|n| n == attack.name);
        let chosen: Vec<Attack> = all.into_iter().filter(wanted).collect();
        make(report, &binary, &chosen, arguments.seconds, tries, Strictness::Measured);
    }
    report.summary();
    if arguments.json {
        println!("{}", report.json());
    }
    Ok(())
}

/// Runs the short suite, as a step of `cargo xtask test`.
pub fn test(report: &mut Report, binary: &Path) {
    short(report, binary, TRIES);
}

fn short(report: &mut Report, binary: &Path, tries: u32) {
    let chosen: Vec<Attack> = attacks::all().into_iter().filter(|attack| attack.is_short).collect();
    make(report, binary, &chosen, SHORT, tries, Strictness::Tested);
}

/// Runs these attacks, and prints a table of the results.
fn make(
    report: &mut Report,
    binary: &Path,
    attacks: &[Attack],
    seconds: f64,
    tries: u32,
    strictness: Strictness,
) {
    report.begin("hostile");
    let seconds = Duration::from_secs_f64(seconds);
    let times = Times {
        baseline: seconds / 4,
        attacked: seconds,
        // Time for which the second attack runs before SIGTERM. It is the duration of a load and
        // not a limit.
        before_end: seconds.min(Duration::from_millis(150)),
    };
    let mut table = verdict::table();
    let began = Instant::now();
    for attack in attacks {
        report.check(attack.name, |_| {
            let (mut number, mut voids) = (1, 0);
            loop {
                let outcome = round(binary, attack, times)?;
                let failures = verdict::failures(&outcome, strictness);
                verdict::add(&mut table, attack, &outcome, number, (&failures, strictness));
                if failures.is_empty() {
                    return Ok(());
                }
                if verdict::is_void(&outcome, strictness) && voids < VOIDS {
                    voids += 1;
                } else if number < tries {
                    number += 1;
                } else {
                    bail!("{}", failures.join("; "));
                }
            }
        });
    }
    table.notes.push(format!(
        "{} attacks in {:.0} s. What failed was made up to {tries} times.",
        attacks.len(),
        began.elapsed().as_secs_f64()
    ));
    report.table(table);
}
