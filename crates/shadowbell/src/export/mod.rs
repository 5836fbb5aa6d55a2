//! `shadowbell export`: a disk for other programs, by NBD, FUSE, vhost-user-blk and ublk.
//!
//! # Architecture
//!
//! | module | contents |
//! |---|---|
//! | `args` | the command line |
//! | `exported_disk` | the disk and its exports |
//! | `launch_hint` | example commands for clients of the export |
//!
//! The protocols are in the crate `shadowbell-export`, byte ranges in `shadowbell-block`.

mod args;
mod exported_disk;
mod launch_hint;

pub(crate) use args::Args;

use exported_disk::ExportedDisk;
use shadowbell_process::signals::EndSignals;
use std::process::ExitCode;
use tracing::info;

/// Exports a disk until a signal arrives, or until all exports have ended because other programs
/// removed the file or the device.
///
/// # Errors
/// With exit status [`BAD_INPUT`] if the target cannot be exported in this way. The driver's
/// errors. At the end, an error if data could not be made durable.
///
/// [`BAD_INPUT`]: shadowbell_process::exit::BAD_INPUT
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    // Caught before the exports create files or devices, which a default action would leave behind.
    let mut signals = EndSignals::catch(&[])?;
    let handle = signals.handle();
    let disk = ExportedDisk::start(args, move || handle.close())?;
    launch_hint::show(&disk);
    signals.wait()?;
    disk.stop()?;
    info!("ended");
    Ok(ExitCode::SUCCESS)
}
