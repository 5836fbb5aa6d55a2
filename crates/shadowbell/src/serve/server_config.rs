//! What `serve` is asked for, whoever asked: the command line or a configuration file.

use super::socket_access::SocketAccess;
use crate::control::place::Place;
use crate::controller_config::{ControllerConfig, DiskConfig, OfferedDoorbells, nsids};
use crate::keeper_link::known_path;
use crate::limits::Group;
use crate::pool_disks;
use crate::self_as_is;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use shadowbell_controller::{Polling, PoolOptions};
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Workers that a process may have.
pub(super) const MAX_WORKERS: u16 = shadowbell_controller::MAX_WORKERS as u16;
/// The longest that a worker polls for nothing, in microseconds: after a second it does not matter
/// any more what a wakeup costs.
pub(super) const MAX_POLL_US: u32 = 1_000_000;
/// Trace records of each worker if nothing is said: 8 MiB.
pub(super) const TRACE_RECORDS: u32 = 1 << 18;

/// What is to be served, checked as far as that is possible without opening anything.
#[derive(Debug)]
pub(crate) struct ServerConfig {
    /// The controllers.
    pub controllers: Vec<SocketConfig>,
    /// Their workers.
    pub pool: PoolOptions,
    /// Where to record doorbells, and how many records of each worker.
    pub trace: Option<(PathBuf, u32)>,
    /// Whether commands are measured, by namespace.
    pub measure: bool,
    /// Where to write counters.
    pub stats_json: Option<PathBuf>,
    /// Where `top` may ask for them.
    pub stats_socket: Option<PathBuf>,
    /// Where it can be controlled.
    pub control: Place,
    /// What it is called if it is given no name.
    pub default_name: String,
    /// Where metrics are, by TCP.
    pub metrics: Option<SocketAddr>,
    /// Limits that several disks share.
    pub groups: Vec<Group>,
    /// Who may connect to the sockets of controllers.
    pub socket_access: SocketAccess,
    /// The workers poll because doorbells are mapped, and nobody has asked for it.
    pub polls_for_mapped: bool,
}

/// A controller and its socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SocketConfig {
    /// What requests call it, if not by its socket.
    #[serde(default)]
    pub id: Option<String>,
    /// Where it listens, as it was written.
    pub socket: PathBuf,
    /// What it is.
    pub controller: ControllerConfig,
    /// Who serves it, if not any worker.
    pub worker: Option<WorkerChoice>,
    /// Where it was asked for, if that helps (`vms.toml:12`).
    pub origin: Option<String>,
}

impl SocketConfig {
    /// What requests call it: the path of its socket from the root, if nothing else was said.
    #[must_use]
    pub(crate) fn id(&self) -> String {
        self.id.clone().unwrap_or_else(|| self.known_socket())
    }

    /// The path of its socket from the root, as it is known.
    #[must_use]
    pub(crate) fn known_socket(&self) -> String {
        known_path(&self.absolute_socket()).to_string_lossy().into_owned()
    }

    /// Whether both are the same controller at the same socket.
    #[must_use]
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.known_socket() == other.known_socket()
            && self.controller.is_same(&other.controller)
            && self.worker == other.worker
    }

    /// What it takes for itself: a socket, and disks.
    #[must_use]
    pub(crate) fn takes(&self) -> Vec<String> {
        let disks = self.controller.disks.iter().map(DiskConfig::takes);
        disks.chain([self.known_socket()]).collect()
    }

    /// What it takes for the namespace of this number.
    #[must_use]
    pub(crate) fn takes_for(&self, nsid: u32) -> Option<String> {
        let disks = &self.controller.disks;
        let at = nsids(disks).position(|other| other == nsid)?;
        disks.get(at).map(DiskConfig::takes)
    }

    /// The path of the socket from the root: it names the controller for good.
    #[must_use]
    pub(crate) fn absolute_socket(&self) -> PathBuf {
        let path = self_as_is::absolute(&self.socket);
        // Without the symbolic links of the directory, if there is one.
        match (path.parent().map(Path::canonicalize), path.file_name()) {
            (Some(Ok(directory)), Some(name)) => directory.join(name),
            _ => path,
        }
    }
}

/// Who serves a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "`worker` is the number of a worker, from 0, or \"own\"")]
pub(crate) enum WorkerChoice {
    /// The worker of this number.
    Shared(usize),
    /// A thread that serves no other controller.
    Own(Own),
}

/// The word for a thread that serves no other controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Own {
    /// `"own"`.
    Own,
}

/// When a worker without work sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Poll {
    /// After polling for a time that grows while that pays, and shrinks while it does not
    #[default]
    Adaptive,
    /// Never: a processor per worker
    Always,
    /// At once
    Never,
}

/// The options of the pool, whoever gave them.
///
/// # Errors
/// A sentence about options that contradict each other.
pub(super) fn pool_options(
    workers: Option<u16>,
    pin: Vec<usize>,
    poll: Option<Poll>,
    poll_max_us: Option<u32>,
) -> Result<PoolOptions, String> {
    let workers = match workers {
        None => pin.len(),
        Some(workers) if pin.len() > usize::from(workers) => {
            return Err(format!(
                "{} processors to pin to are too many for {workers} workers: name at most one for \
                 each",
                pin.len()
            ));
        }
        Some(workers) => workers.into(),
    };
    let polling = match (poll.unwrap_or_default(), poll_max_us) {
        (Poll::Adaptive, None) => Polling::default(),
        (Poll::Adaptive, Some(us)) => Polling::Adaptive(Duration::from_micros(us.into())),
        (Poll::Always, None) => Polling::Always,
        (Poll::Never, None) => Polling::Never,
        (Poll::Always | Poll::Never, Some(_)) => {
            return Err(
                "a longest time to poll makes sense with adaptive polling only: leave it out"
                    .into(),
            );
        }
    };
    Ok(PoolOptions { workers, polling, pin })
}

impl ServerConfig {
    /// Adds the namespaces of pools that are attached.
    ///
    /// # Errors
    /// A pool is not there, or a namespace of it has the number of another disk.
    pub(super) fn add_attached(&mut self) -> anyhow::Result<()> {
        for served in &mut self.controllers {
            if let Some(spec) = &served.controller.pool {
                let disks = pool_disks::with_attached(spec, &served.controller.disks);
                served.controller.disks = match &served.origin {
                    Some(origin) => disks.with_context(|| origin.clone())?,
                    None => disks?,
                };
            }
        }
        Ok(())
    }

    /// Has the workers poll if that was left open and a client is to map its doorbells: nothing
    /// wakes a worker when one is written. `is_open`: nothing was said of polling.
    #[must_use]
    pub(super) fn settled(mut self, is_open: bool) -> Self {
        let is_mapped = |one: &SocketConfig| one.controller.doorbells == OfferedDoorbells::Mapped;
        self.polls_for_mapped = is_open && self.controllers.iter().any(is_mapped);
        if self.polls_for_mapped {
            self.pool.polling = Polling::Always;
        }
        self
    }
}

/// Why a file or device of these controllers can not be served, which is asked for more than once
/// and is to be written. Its lock would say that another program has it.
#[must_use]
pub(super) fn disk_asked_for_twice(controllers: &[SocketConfig]) -> Option<String> {
    let mut seen: HashMap<PathBuf, (&str, String, bool, Option<&str>)> = HashMap::new();
    for served in controllers {
        for disk in &served.controller.disks {
            let (name, options) = disk.disk.split_once('?').unwrap_or((&disk.disk, ""));
            let path = self_as_is::absolute(Path::new(name)).canonicalize();
            let Ok(path) = path else { continue };
            let is_asked = |option| ["read-only=on", "read-only=true"].contains(&option);
            let reads = served.controller.read_only || options.split('&').any(is_asked);
            let socket = || served.socket.display().to_string();
            let place = served.origin.clone().unwrap_or_else(socket);
            let shared = served.controller.subsystem.as_ref().map(|place| &place.name[..]);
            let before = seen.insert(path, (name, place.clone(), reads, shared));
            let Some((before, other, others_read, its)) = before else { continue };
            let is_shared = shared.is_some() && shared == its && other != place;
            if reads && others_read || is_shared {
                continue;
            }
            let of = match other == place {
                true => format!("twice of {place}"),
                false => format!("of {other} and of {place}"),
            };
            let also = if before == name { String::new() } else { format!(" ({before})") };
            return Some(format!(
                "{name}{also}: it is asked for as a disk {of}: name it once, or everywhere with \
                 `read-only=on`"
            ));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictions_are_refused() {
        assert!(pool_options(Some(1), vec![0, 1], None, None).unwrap_err().contains("too many"));
        assert_eq!(pool_options(None, vec![0, 1], None, None).unwrap().workers, 2);
        for poll in [Poll::Always, Poll::Never] {
            assert!(
                pool_options(None, vec![], Some(poll), Some(5)).unwrap_err().contains("adaptive")
            );
        }
        let adaptive = pool_options(None, vec![], None, Some(5)).unwrap();
        assert_eq!(adaptive.polling, Polling::Adaptive(Duration::from_micros(5)));
    }
}
