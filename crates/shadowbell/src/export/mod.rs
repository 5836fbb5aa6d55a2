//! `shadowbell export`: a disk for other programs, by NBD, FUSE, vhost-user-blk and ublk.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | `args` | the command line |
//! | `exported_disk` | the disk and its exports |
//! | `launch_hint` | the commands by which others use what is exported |
//!
//! The protocols are in the crate `shadowbell-export`, byte ranges in `shadowbell-block`.

mod args;
mod exported_disk;
mod launch_hint;

pub(crate) use args::Args;

use crate::signals::EndSignals;
use exported_disk::ExportedDisk;
use std::process::ExitCode;
use tracing::info;

/// Exports until a signal ends it, or somebody else removes the file or the device, and there is no
/// other way to the disk.
///
/// # Errors
/// With exit status [`BAD_INPUT`](crate::exit::BAD_INPUT) what can not be exported like that; the
/// driver's; and at the end, that something could not be made durable.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    // Before there is anything that a signal would leave behind.
    let mut signals = EndSignals::catch(&[])?;
    let handle = signals.handle();
    let disk = ExportedDisk::start(args, move || handle.close())?;
    launch_hint::show(&disk);
    signals.wait()?;
    disk.stop()?;
    info!("ended");
    Ok(ExitCode::SUCCESS)
}
