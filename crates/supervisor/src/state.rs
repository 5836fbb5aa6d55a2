//! State of the supervisor. The other modules of this folder implement its operations.

use super::config_read::ConfigRead;
use super::control::Control;
use super::fd_store::FdStore;
use super::pending_exec::PendingExec;
use super::restart_policy::RestartPolicy;
use super::trim_memory::TrimTimer;
use super::upgrade_progress::{Replacement, Upgrade};
use super::watchdog::Watchdog;
use super::worker::{Left, Worker};
use crate::permissions::Permit;
use serde::{Deserialize, Serialize};
use shadowbell_process::signals::Caught;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Instant;

/// Progress of a configuration reload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Reading {
    /// The request waits for a server process that serves while no upgrade runs.
    Wanted,
    /// The request was sent to the server process with this id.
    Told(u32),
}

/// The supervisor.
pub(super) struct Supervisor {
    pub(super) arguments: Vec<OsString>,
    /// Function that returns the permissions of a command line and a configuration file.
    pub(super) permit: Permit,
    /// Program of the next server process.
    pub(super) program: PathBuf,
    pub(super) signals: Caught,
    pub(super) ends: Vec<i32>,
    pub(super) others: Vec<i32>,
    pub(super) control: Option<Control>,
    pub(super) worker: Option<Worker>,
    pub(super) upgrade: Option<Upgrade>,
    /// Pending exec of a new program.
    pub(super) pending_exec: Option<PendingExec>,
    /// Pending recovery by the next process of an upgrade.
    pub(super) replacement: Option<Replacement>,
    /// Processes that were killed and have not exited yet. Their exit status is ignored.
    pub(super) leaving: Vec<Worker>,
    pub(super) deaths: RestartPolicy,
    /// Time of the first death since a server process last served.
    pub(super) died: Option<Instant>,
    /// Checkpoint of the last server process, for the next one.
    pub(super) left: Option<Left>,
    /// Copy of this state in the service manager's fd store. `None` without a store.
    pub(super) fd_store: Option<FdStore>,
    /// Time of the next start of a server process, if none runs.
    pub(super) restart: Option<Instant>,
    /// Sockets at which the server process serves.
    pub(super) sockets: Vec<PathBuf>,
    /// True if a server process has served, so that readiness was reported to the service manager.
    pub(super) is_ready: bool,
    /// Pending reload of the configuration.
    pub(super) reading: Option<Reading>,
    /// Reads of the configuration file that have begun and whose results are not handled yet.
    pub(super) config_reads: Vec<ConfigRead>,
    /// Time at which images of removed disks are released.
    pub(super) release: Option<Instant>,
    /// Timer that trims the memory of this process while it is idle.
    pub(super) trim_timer: TrimTimer,
    /// Watchdog of the service manager, if it is enabled.
    pub(super) watchdog: Option<Watchdog>,
    /// Number of signals to end the service received so far.
    pub(super) ended: u32,
    /// Time limit of the service's end, set by the first signal to end it: at this time, the
    /// service ends even if the server process has not ended.
    pub(super) end_limit: Option<Instant>,
    /// Exit status, once the service has ended.
    pub(super) exit_code: Option<u8>,
}
