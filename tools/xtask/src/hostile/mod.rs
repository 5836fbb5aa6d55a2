//! `cargo xtask hostile`: attacks on a server, each beside a neighbour that is honest.
//!
//! For each attack a server is started with one worker and default options. Its first controller
//! is the victim's: reads of 4 KiB, one at a time, a thousand a second, each rung by a message and
//! checked for what it brings. Its others are the attackers', who speak to their sockets with a
//! client of our own (`peer`) that sends whatever it is told to.
//!
//! Some attacks are on `shadowbell export`: there the victim is an NBD client, and the attackers
//! are others, or a VM on vhost-user-blk.
//!
//! # What is noise
//!
//! Two processors have to do for the server's worker and its reactor, for the victim and for the
//! attackers. So that the figures are the server's:
//!
//! * The server's threads and the victim's have the highest priority that there is without a
//!   real-time class, the attackers' a lower one. A flood is sent in batches, with pauses.
//! * The victim polls for a completion for 60 us and then looks every 20 us (some 75 with the
//!   system's slack). Its own wakeups are not in the figures, but for those.
//! * Each attack has the victim alone measured just before, on the same server.
//! * A read is judged by what it took apart from the time for which the victim, and the threads
//!   that serve it, were ready to run and had no processor (`served`, by the kernel's account of each
//!   thread, before and after each read). On two processors the kernel lets a thread wait for 3 to 4
//!   ms while two others run. The attack `burn` shows that: it does nothing but compute. What
//!   a clock shows is in the table all the same, and so is which bound is kept only by that.
//! * `cpu wait` is for how long all threads of the server together were ready to run during the
//!   attack and had no processor. An attack that keeps two of its threads busy on two processors
//!   makes some of that; a machine at work makes the rest.
//! * An attack that fails is made again, twice at most, and the table says how often it was made.
//!   A server that can be held up is held up each time; a machine that was busy is busy once. If
//!   the victim alone was held up already, by half of what is allowed, that does not count as one
//!   of these, three times at most.

pub(crate) mod attack;
pub(crate) mod attacks;
mod round;
pub(crate) mod server;
mod verdict;
pub(crate) mod victim;
pub(crate) mod watch;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use shadowbell_bench::workspace;

use crate::report::Report;
pub(crate) use attacks::fuse::daemon as fuse_daemon;

use attack::Attack;
use round::{Times, round};
use verdict::Strictness;

/// How long an attack of the short suite takes, in seconds.
const SHORT: f64 = 0.5;
/// How often an attack is made before it has failed.
const TRIES: u32 = 3;
/// How often an attack is made again because the victim alone was held up already.
const VOIDS: u32 = 3;

pub(crate) const EXAMPLES: &str = "\
Examples:
  cargo xtask hostile                           every attack for two seconds
  cargo xtask hostile --list                    what there is
  cargo xtask hostile smart-log big-reads --seconds 10";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Which attacks; all of them when none is named.
    attacks: Vec<String>,
    /// How long each takes.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Make each attack once, whatever comes of it.
    #[arg(long)]
    once: bool,
    /// Only one attack for each way to do harm, for half a second each: less than a minute in all.
    /// What takes long fails only at 20 times its bound, as in the test command.
    #[arg(long, conflicts_with_all = ["attacks", "seconds"])]
    short: bool,
    /// Name the attacks, and end.
    #[arg(long)]
    list: bool,
    /// End with one line of JSON: {"rows": [...]}.
    #[arg(long)]
    json: bool,
    /// A shadowbell program that is built already, instead of building one.
    #[arg(long, value_name = "PATH")]
    shadowbell: Option<PathBuf>,
}

pub(crate) fn run(report: &mut Report, arguments: Arguments) -> Result<()> {
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

/// One attack for each way to do harm, as the test command makes them.
pub(crate) fn test(report: &mut Report, binary: &Path) {
    short(report, binary, TRIES);
}

fn short(report: &mut Report, binary: &Path, tries: u32) {
    let chosen: Vec<Attack> = attacks::all().into_iter().filter(|attack| attack.is_short).collect();
    make(report, binary, &chosen, SHORT, tries, Strictness::Tested);
}

/// Makes these attacks, and prints a table of what came of them.
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
        alone: seconds / 4,
        attacked: seconds,
        // The length of a load.
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
