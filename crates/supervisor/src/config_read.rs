//! Reads of the configuration file, on separate threads because its file system may hang.

use super::command_line;
use super::grants::Permitted;
use crate::permissions::Permit;
use shadowbell_config::config_file;
use shadowbell_process::signals::start_thread;
use std::ffi::OsString;
use std::io::{PipeReader, pipe};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Time limit for a read of the configuration file.
const READS: Duration = Duration::from_secs(10);
/// Maximum number of reads of the configuration file at once.
pub(super) const MAX_READS: usize = 4;
/// Error text of a read that exceeds its time limit.
pub(super) const HUNG: &str =
    "the configuration file cannot be read: its file system does not answer";

/// Text of the configuration file, and its permissions unless it is invalid.
pub(super) type Config = (Option<String>, anyhow::Result<Permitted>);

/// Purpose of a read of the configuration file.
pub(super) enum Purpose {
    /// Reload of the configuration by the server process. `is_outdated`: the reload was requested
    /// again after the read had begun, and the file may have changed in between.
    Reload { is_outdated: bool },
    /// Upgrade that a client of the supervisor requests, or only a check of an upgrade.
    Upgrade { program: Option<PathBuf>, asker: Option<OwnedFd>, is_check: bool },
}

/// Configuration file that another thread reads, because its file system may hang.
pub(super) struct ConfigRead {
    pub(super) result: Receiver<anyhow::Result<Config>>,
    /// Pipe whose other end is closed when the result is available.
    pub(super) ready: PipeReader,
    pub(super) until: Instant,
    /// Purpose of the read. `None` if the result is not used any more.
    pub(super) purpose: Option<Purpose>,
}

impl ConfigRead {
    /// Starts a thread that reads the configuration file.
    ///
    /// # Errors
    /// A system call fails.
    pub(super) fn begin(arguments: &[OsString], permit: Permit) -> anyhow::Result<Self> {
        let ((sender, result), (ready, end)) = (channel(), pipe()?);
        let arguments = arguments.to_vec();
        start_thread("sb-config", 2 << 20, move || {
            let _ = sender.send(read_config(&arguments, permit));
            drop(end);
        })?;
        Ok(Self { result, ready, until: Instant::now() + READS, purpose: None })
    }

    /// Deadline of the read. `None` if its result is not used any more.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.purpose.as_ref().map(|_| self.until)
    }
}

/// Reads the configuration file of a command line, if it names one.
///
/// # Errors
/// The file cannot be read.
pub(super) fn read_config(arguments: &[OsString], permit: Permit) -> anyhow::Result<Config> {
    let file = command_line::config_file(arguments);
    let config = file.as_ref().map(|file| config_file::read_text(file)).transpose()?;
    let permissions = permit(arguments, config.as_deref());
    let text = config.clone();
    Ok((text, permissions.map(|permissions| Permitted { permissions, config })))
}
