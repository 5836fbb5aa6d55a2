//! `cargo xtask soak`: stress tests that run for minutes and then end.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "the suites are no interface for other projects")]

mod attackers;
mod clients;
mod counters;
mod front_ends;
mod honest;
pub mod kill;
mod load;
mod neighbours;
mod pattern;
mod phases;
mod qcow2;
mod slots;
mod supervised;
mod times;
mod upgrade;
pub mod wakeups;

use anyhow::Result;

use shadowbell_harness::Report;

/// Examples for the help text of the command line.
pub const EXAMPLES: &str = "\
Examples:
  cargo xtask soak neighbours                   400 controllers for ten minutes
  cargo xtask soak neighbours --minutes 0.5 --controllers 40
  cargo xtask soak kill                         10,000 kills
  cargo xtask soak kill --kills 200 --seed 7
  cargo xtask soak front-ends                   1,000 kills of each front end
  cargo xtask soak qcow2 --operations 1000000
  cargo xtask soak upgrade --previous /usr/bin/shadowbell
  cargo xtask soak wakeups --minutes 60";

#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Attack one in eight of many controllers without pause, while the other guests verify their
    /// data.
    ///
    /// Fails if a command of an honest guest fails or takes 30 s, if data are wrong, if the server
    /// does not answer at the end or its memory grows without bound, or if SIGTERM during an attack
    /// does not end the server within 5 s.
    Neighbours(neighbours::Arguments),
    /// Kill the server process at random moments, while clients with 128 commands in flight each
    /// verify their data.
    ///
    /// Fails if an acknowledged write is lost or overwritten by an older one, if a command fails
    /// or has no completion within 30 s, or if an interrupt is lost. The time without a
    /// completion is printed and not checked.
    Kill(kill::Arguments),
    /// Kill the server process of each front end: vfio-user, NBD, vhost-user-blk and FUSE, with the
    /// disk types in rotation.
    ///
    /// Fails if an acknowledged write is lost, if a request fails, or if an image is damaged. FUSE
    /// takes root.
    FrontEnds(front_ends::Arguments),
    /// Kill a process that executes random operations on a qcow2 image, at random moments.
    ///
    /// Fails if flushed data are lost (or acknowledged data, where the disk is recovered by the
    /// next process), if `qemu-img check` finds a corruption after the image was opened again, or
    /// if `qemu-img compare` finds a difference.
    Qcow2(qcow2::Arguments),
    /// Restart the server for upgrade repeatedly, while clients with 32 commands in flight each
    /// verify their data.
    ///
    /// Fails as `kill` does, or if an upgrade fails, except if the other program does not support
    /// the state's version.
    Upgrade(upgrade::Arguments),
    /// Export one disk in two ways, to clients with one request in flight each, while VMs kick
    /// random chains and disconnect.
    ///
    /// Fails if a request takes more than 100 ms, except if this machine delayed a control thread
    /// by most of that time. A request whose wakeup is lost takes 30 s.
    Wakeups(wakeups::Arguments),
}

pub fn run(report: &mut Report, arguments: Arguments) -> Result<()> {
    match arguments.what {
        What::Neighbours(arguments) => neighbours::run(report, &arguments),
        What::Kill(arguments) => kill::run(report, &arguments),
        What::FrontEnds(arguments) => front_ends::run(report, &arguments),
        What::Qcow2(arguments) => qcow2::run(report, &arguments),
        What::Upgrade(arguments) => upgrade::run(report, &arguments),
        What::Wakeups(arguments) => wakeups::run(report, &arguments),
    }
}
