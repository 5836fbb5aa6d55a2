//! What a keeper is. What it does is in the modules beside this one.

use super::control::Control;
use super::deaths::Deaths;
use super::journal::Journal;
use super::renewal::Renewal;
use super::replacement::Replacement;
use super::rest::Rest;
use super::upgrade::Upgrade;
use super::watchdog::Watchdog;
use super::worker::{Left, Worker};
use crate::signals::Caught;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// How long a new worker may take until it can take over. Nobody waits for it meanwhile.
pub(super) const PREPARE: Duration = Duration::from_secs(10);
/// How long the old worker may take to hand over, or not. It has limits of its own, far shorter.
pub(super) const HAND_OVER: Duration = Duration::from_secs(10);
/// How long it may take until the first controller has gone, when they go one by one: before that
/// each of them comes to rest once.
pub(super) const REHEARSE: Duration = Duration::from_secs(60);
/// How long the two may take from one controller to the next, when these go one by one.
pub(super) const MOVE: Duration = Duration::from_secs(10);
/// How long the old worker may take to end once it has handed over, and the new one to serve. Then
/// it is ended.
pub(super) const LEAVE: Duration = Duration::from_secs(2);

/// How far it is that the configuration is read again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reading {
    /// A worker is to be told, when there is one that serves and stays.
    Wanted,
    /// This one was told.
    Told(u32),
}

/// A keeper.
pub(super) struct Keeper {
    pub(super) arguments: Vec<OsString>,
    /// The program of the next worker.
    pub(super) program: PathBuf,
    pub(super) signals: Caught,
    pub(super) ends: Vec<i32>,
    pub(super) others: Vec<i32>,
    pub(super) control: Option<Control>,
    pub(super) worker: Option<Worker>,
    pub(super) upgrade: Option<Upgrade>,
    /// It is about to become another program.
    pub(super) renewal: Option<Renewal>,
    /// A worker is to go on for one that was ended for it.
    pub(super) replacement: Option<Replacement>,
    /// They have handed over, and are about to end.
    pub(super) leaving: Vec<(Worker, Instant)>,
    pub(super) deaths: Deaths,
    /// When a worker has died, since which none has served.
    pub(super) died: Option<Instant>,
    /// What the last worker that has begun has left for the next one.
    pub(super) left: Option<Left>,
    /// Where the service manager keeps all that, if it does.
    pub(super) journal: Option<Journal>,
    /// When to start a worker, if there is none.
    pub(super) restart: Option<Instant>,
    /// Where the worker serves.
    pub(super) sockets: Vec<PathBuf>,
    /// A first worker has served.
    pub(super) is_ready: bool,
    /// The configuration is to be read again.
    pub(super) reading: Option<Reading>,
    /// Makes it small when there is nothing to do.
    pub(super) rest: Rest,
    /// The service manager wants to know whether all this is alive.
    pub(super) watchdog: Option<Watchdog>,
    /// Signals that are to end all this.
    pub(super) ended: u32,
    /// The exit status, once it is over.
    pub(super) over: Option<u8>,
}
