//! Configuration of `serve`, from the command line or a configuration file.

use crate::controller_config::{ControllerConfig, DiskConfig, OfferedDoorbells, nsids};
use crate::disk_spec;
use crate::disk_uuids;
use crate::export_config::ExportConfig;
use crate::limits::Group;
use crate::pool_disks;
use crate::socket_access::SocketAccess;
use crate::socket_path::SocketPath;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use shadowbell_controller::{Polling, PoolOptions};
use shadowbell_process::process_env;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Maximum number of I/O threads.
pub const MAX_WORKERS: u16 = shadowbell_controller::MAX_WORKERS as u16;
/// Upper limit of `poll-max`, the polling time of an idle I/O thread, in microseconds. After a
/// second without work, the cost of a wake-up does not matter.
pub const MAX_POLL_US: u32 = 1_000_000;
/// Default number of trace records per I/O thread. They occupy 8 MiB.
pub const TRACE_RECORDS: u32 = 1 << 18;

/// Validated configuration. Disks and sockets are not opened yet.
#[derive(Debug, Default)]
pub struct ServerConfig {
    /// Named disks.
    pub disks: Vec<NamedDisk>,
    /// Controllers.
    pub controllers: Vec<SocketConfig>,
    /// Exports.
    pub exports: Vec<ExportConfig>,
    /// Options of the I/O threads.
    pub pool: PoolOptions,
    /// File of the doorbell trace, and the number of records per I/O thread.
    pub trace: Option<(PathBuf, u32)>,
    /// True if latency is measured by namespace.
    pub measure: bool,
    /// Name and path of the control socket.
    pub control: SocketPath,
    /// Name of the server if no name is configured.
    pub default_name: String,
    /// Directory of the disks' UUIDs. `None` for the default.
    pub state_dir: Option<PathBuf>,
    /// TCP address of the metrics.
    pub metrics: Option<SocketAddr>,
    /// Host names by which clients may address the metrics, besides IP addresses and localhost.
    pub metrics_hosts: Vec<String>,
    /// Limit groups.
    pub groups: Vec<Group>,
    /// Mode and group of the controllers' sockets.
    pub socket_access: SocketAccess,
    /// Directories below which images may be opened and sockets created on request.
    pub allow: Vec<PathBuf>,
    /// True if I/O threads always poll because of mapped doorbells. False if a polling option was
    /// given.
    pub polls_for_mapped: bool,
}

/// A named disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedDisk {
    /// Id of the disk, by which management requests, controllers and exports refer to it.
    pub id: String,
    /// Specification, with options and limits.
    pub spec: String,
    /// Place in the configuration file (`vms.toml:12`).
    pub origin: Option<String>,
}

/// A controller and its socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SocketConfig {
    /// Id of the controller in management requests. The default is the path of its socket.
    #[serde(default)]
    pub id: Option<String>,
    /// Path of the socket as configured.
    pub socket: PathBuf,
    /// Properties of the controller.
    pub controller: ControllerConfig,
    /// I/O thread that serves the controller. `None` for any.
    pub worker: Option<WorkerChoice>,
    /// Place in the configuration file (`vms.toml:12`).
    pub origin: Option<String>,
}

impl SocketConfig {
    /// Id in requests: the configured one, or the absolute path of the socket.
    #[must_use]
    pub fn id(&self) -> String {
        self.id.clone().unwrap_or_else(|| self.canonical_socket())
    }

    /// Absolute path of the socket. If a directory is configured, it is the path of the socket
    /// `cntrl` in that directory.
    #[must_use]
    pub fn canonical_socket(&self) -> String {
        canonical_path(&self.absolute_socket()).to_string_lossy().into_owned()
    }

    /// Returns true if both are the same controller at the same socket.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.canonical_socket() == other.canonical_socket()
            && self.controller.is_same(&other.controller)
            && self.worker == other.worker
    }

    /// Resources that no other controller can use: the socket and the disks.
    #[must_use]
    pub fn exclusive_resources(&self) -> Vec<String> {
        let disks = self.controller.disks.iter().map(DiskConfig::exclusive_resources);
        disks.chain([self.canonical_socket()]).collect()
    }

    /// Resource of a namespace that no other namespace can use: its disk.
    #[must_use]
    pub fn exclusive_resource_of(&self, nsid: u32) -> Option<String> {
        let disks = &self.controller.disks;
        let at = nsids(disks).position(|other| other == nsid)?;
        disks.get(at).map(DiskConfig::exclusive_resources)
    }

    /// Absolute path of the configured socket. The path identifies the controller.
    #[must_use]
    pub fn absolute_socket(&self) -> PathBuf {
        let path = process_env::absolute(&self.socket);
        // Symbolic links in the path of an existing directory are resolved.
        match (path.parent().map(Path::canonicalize), path.file_name()) {
            (Some(Ok(directory)), Some(name)) => directory.join(name),
            _ => path,
        }
    }
}

/// Canonical path of a socket.
pub fn canonical_path(path: &Path) -> PathBuf {
    let with_absolute_paths = process_env::absolute(path);
    let path = std::fs::canonicalize(with_absolute_paths).unwrap_or_else(|_| path.to_owned());
    // If the path is a directory, the socket is `cntrl` in it, as in SPDK.
    if path.is_dir() { path.join("cntrl") } else { path }
}

/// Choice of the I/O thread for a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "`worker` is the number of a worker, from 0, or \"own\"")]
pub enum WorkerChoice {
    /// The I/O thread with this number.
    Shared(usize),
    /// A thread that serves no other controller.
    Own(Own),
}

/// The keyword for a thread that serves no other controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Own {
    /// `"own"`.
    Own,
}

/// Polling of an idle I/O thread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Poll {
    /// Poll before sleeping, for a time that grows while that pays off and shrinks otherwise
    #[default]
    Adaptive,
    /// Poll without sleeping: one CPU per I/O thread
    Always,
    /// Sleep at once
    Never,
}

/// Validates and combines the options of the I/O threads.
///
/// # Errors
/// The options contradict each other.
pub fn pool_options(
    workers: Option<u16>,
    pin: Vec<usize>,
    poll: Option<Poll>,
    poll_max_us: Option<u32>,
) -> Result<PoolOptions, String> {
    let workers = match workers {
        None => pin.len(),
        Some(workers) if pin.len() > usize::from(workers) => {
            return Err(format!(
                "{} CPUs to pin to are too many for {workers} I/O threads: name at most one for \
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
            return Err("a maximum polling time is for adaptive polling only: leave it out".into());
        }
    };
    Ok(PoolOptions { workers, polling, pin })
}

impl ServerConfig {
    /// Directory in which the UUIDs of disks are stored. `None` if they are not stored.
    #[must_use]
    pub fn state_directory(&self) -> Option<PathBuf> {
        self.state_dir.clone().or_else(disk_uuids::default_directory)
    }

    /// Specifications of all disks, including the named disks.
    pub fn disk_specs(&self) -> impl Iterator<Item = &str> {
        let of_controllers = self.controllers.iter().flat_map(|served| &served.controller.disks);
        let named = self.disks.iter().map(|disk| &disk.spec[..]);
        named.chain(of_controllers.map(|disk| &disk.disk[..]))
    }

    /// Paths of the sockets of controllers and exports.
    pub fn sockets(&self) -> impl Iterator<Item = &Path> {
        let controllers = self.controllers.iter().map(|served| served.socket.as_path());
        controllers.chain(self.exports.iter().filter_map(ExportConfig::socket))
    }

    /// Paths of the images of all disks. The second value is true if the image is only read,
    /// because of an option of the disk or because the controller is read-only.
    pub fn images(&self) -> impl Iterator<Item = (PathBuf, bool)> {
        let named = self.disks.iter().filter_map(|disk| disk_spec::image(&disk.spec));
        let of_controllers = self.controllers.iter().flat_map(|served| {
            let ControllerConfig { disks, read_only, .. } = &served.controller;
            let images = disks.iter().filter_map(|disk| disk_spec::image(&disk.disk));
            images.map(|(path, is_read_only)| (path, *read_only || is_read_only))
        });
        named.chain(of_controllers)
    }

    /// TCP addresses on which the server listens, for metrics and for exports.
    pub fn tcp(&self) -> impl Iterator<Item = SocketAddr> {
        self.metrics.into_iter().chain(self.exports.iter().filter_map(ExportConfig::tcp))
    }

    /// Named disks to which no controller refers.
    pub fn unattached(&self) -> impl Iterator<Item = &NamedDisk> {
        let of_controllers = || self.controllers.iter().flat_map(|served| &served.controller.disks);
        self.disks.iter().filter(move |disk| {
            of_controllers().all(|attached| attached.id.as_ref() != Some(&disk.id))
        })
    }

    /// Adds the attached namespaces of pools.
    ///
    /// # Errors
    /// A pool is missing, or one of its namespaces has the NSID of a disk.
    pub fn add_attached(&mut self) -> anyhow::Result<()> {
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

    /// Selects constant polling if a controller has mapped doorbells and no polling option was
    /// given (`is_open`). A write to a mapped doorbell wakes no thread.
    #[must_use]
    pub fn with_default_polling(mut self, is_open: bool) -> Self {
        let is_mapped = |one: &SocketConfig| one.controller.doorbells == OfferedDoorbells::Mapped;
        self.polls_for_mapped = is_open && self.controllers.iter().any(is_mapped);
        if self.polls_for_mapped {
            self.pool.polling = Polling::Always;
        }
        self
    }
}

/// Returns an error text if two controllers use the same writable file or device. Without this
/// check, the lock of the file would fail with a message about another program.
#[must_use]
pub fn duplicate_disk(controllers: &[SocketConfig]) -> Option<String> {
    duplicate_disk_at(controllers).map(|(_, why)| why)
}

/// Index of the controller with the second use, in addition to the result of [`duplicate_disk`].
pub(crate) fn duplicate_disk_at(controllers: &[SocketConfig]) -> Option<(usize, String)> {
    let mut seen: HashMap<PathBuf, (&str, String, bool, Option<&str>)> = HashMap::new();
    for (nth, served) in controllers.iter().enumerate() {
        for disk in &served.controller.disks {
            let name = disk.disk.split('?').next().unwrap_or_default();
            let Some((path, is_read_only)) = disk_spec::image(&disk.disk) else { continue };
            // A missing image, which has no canonical path, may be created later.
            let path = process_env::absolute(&path);
            let path = path.canonicalize().unwrap_or(path);
            let reads = served.controller.read_only || is_read_only;
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
            let why = format!(
                "{name}{also}: it is named as a disk {of}: name it once, or everywhere with \
                 `read-only=on`"
            );
            return Some((nth, why));
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
