//! `cargo xtask soak`: what takes minutes, and ends by itself.

mod attackers;
mod clients;
mod honest;
mod kept;
pub(crate) mod kill;
mod load;
mod neighbours;
mod pattern;
mod phases;
mod places;
mod qcow2;
mod random;
mod tally;
mod times;
mod upgrade;

use anyhow::Result;

use crate::report::Report;

pub(crate) const EXAMPLES: &str = "\
Examples:
  cargo xtask soak neighbours                   400 controllers for ten minutes
  cargo xtask soak neighbours --minutes 0.5 --controllers 40
  cargo xtask soak kill                         10,000 kills
  cargo xtask soak kill --kills 200 --seed 7
  cargo xtask soak qcow2 --operations 1000000
  cargo xtask soak upgrade --previous /usr/bin/shadowbell";

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(clap::Subcommand)]
enum What {
    /// Controllers of one server: one in eight is attacked without end, the others verify what they
    /// wrote.
    ///
    /// Fails if a command of an honest one fails or takes 30 s, if a block is not what was written,
    /// if the server does not answer at the end or grows without bound, or if SIGTERM, under
    /// attack, does not end it within 5 s.
    Neighbours(neighbours::Arguments),
    /// The process that serves is killed at random moments, while clients with 128 commands under
    /// way each verify what they wrote.
    ///
    /// Fails if a write that was acknowledged is lost, if an older one comes over it, if a command
    /// fails or has no completion within 30 s, or if an interrupt is lost. How long nothing
    /// completed is printed, and not judged.
    Kill(kill::Arguments),
    /// A process that does random operations on a qcow2 image is killed at random moments.
    ///
    /// Fails if what was flushed is not there (or what was answered, where the disk is kept for the
    /// next process), if `qemu-img check` finds a corruption once the image was opened again, or if
    /// `qemu-img compare` finds a difference.
    Qcow2(qcow2::Arguments),
    /// The process that serves is replaced again and again by another one, while clients with 32
    /// commands under way each verify what they wrote.
    ///
    /// Fails as `kill` does, or if an upgrade fails for another reason than that the disks did not
    /// come to rest in time, or that the other program does not read the state.
    Upgrade(upgrade::Arguments),
}

pub(crate) fn run(report: &mut Report, arguments: Arguments) -> Result<()> {
    match arguments.what {
        What::Neighbours(arguments) => neighbours::run(report, &arguments),
        What::Kill(arguments) => kill::run(report, &arguments),
        What::Qcow2(arguments) => qcow2::run(report, &arguments),
        What::Upgrade(arguments) => upgrade::run(report, &arguments),
    }
}
