//! `shadowbell export`: a disk on the user-space driver, for everyone who can not use the driver.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | `service` | what runs: the controller, the disk on it and the ways to it; from start to stop |
//! | `paste` | the commands by which others use what is exported |
//! | `signals` | what ends it |
//!
//! The protocols are in the crate `export`, and what makes bytes of blocks in the crate `block`.

mod paste;
mod service;
mod signals;

use crate::target::{self, Target};
use ::export::nbd;
use clap::ArgGroup;
use service::Service;
use signals::Ending;
use std::path::PathBuf;
use std::process::ExitCode;
use tracing::info;

/// Export a disk: to QEMU and other tools (NBD), as a file (FUSE), to a VM (vhost-user-blk)
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
#[command(group = ArgGroup::new("way").required(true).multiple(true))]
pub struct Args {
    /// What to export
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// Serve it by NBD: unix:/run/disk.sock, tcp:127.0.0.1:10809; can be given more than once
    #[arg(long, value_name = "unix:PATH|tcp:ADDRESS", group = "way")]
    pub nbd: Vec<nbd::Address>,
    /// Mount it over FILE as a file, which is made for that if it is not there; for a loop device
    #[arg(long, value_name = "FILE", group = "way")]
    pub fuse: Option<PathBuf>,
    /// Offer it to a VM as a virtio disk, behind this socket
    #[arg(long, value_name = "PATH", group = "way")]
    pub vhost_user_blk: Option<PathBuf>,
    /// Refuse everything that changes the disk
    #[arg(long)]
    pub read_only: bool,
    /// The export's name, and the disk's serial number in a VM
    #[arg(long, default_value = "", value_name = "NAME", hide_default_value = true)]
    pub name: String,
    /// How many of the controller's queue pairs to use [default: one per processor, up to 4]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub queues: Option<u16>,
    /// For how many microseconds to look for completions, at most, before sleeping [default: 50, or
    /// 0 with up to two processors]
    #[arg(long, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub poll_max: Option<u32>,
    /// How many seconds a command may take until it has failed
    #[arg(long, default_value_t = 30, value_name = "SECONDS",
        value_parser = clap::value_parser!(u16).range(1..=3600))]
    pub timeout: u16,
}

/// Exports until a signal ends it, or somebody unmounts the file and there is no other way to the
/// disk.
///
/// # Errors
/// With exit status [`BAD_INPUT`](crate::exit::BAD_INPUT) what can not be exported like that; the
/// driver's; and at the end, that something could not be made durable.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    // Before there is anything that a signal would leave behind.
    let ending = Ending::on_signals()?;
    let handle = ending.handle();
    let service = Service::start(args, move || handle.close())?;
    paste::show(&service);
    ending.wait();
    service.stop()?;
    info!("ended");
    Ok(ExitCode::SUCCESS)
}
