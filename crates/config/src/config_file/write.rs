//! Writes a configuration file from the state of a running server.

use super::disks::NamedDiskTable;
use super::shared::{AnaStates, SubsystemTable};
use super::{ControllerTable, DiskEntry, DiskTable, File, GroupTable, PathsTable, Rate};
use crate::controller_config::{ControllerConfig, DiskConfig, nsids};
use crate::disk_spec;
use crate::export_config::ExportConfig;
use crate::limits::{self, Group};
use crate::pool_disks;
use crate::server_config::{NamedDisk, Poll, ServerConfig, SocketConfig};
use crate::socket_access::SocketAccess;
use crate::uuid_text::uuid_text;
use shadowbell_controller::{Polling, PoolOptions};
use shadowbell_process::process_env::absolute;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use toml::Spanned;

/// Server-wide settings of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pool: PoolOptions,
    trace: Option<(PathBuf, u32)>,
    measure: bool,
    control_socket: Option<PathBuf>,
    state_dir: Option<PathBuf>,
    metrics: Option<SocketAddr>,
    metrics_hosts: Vec<String>,
    access: SocketAccess,
    allow: Vec<PathBuf>,
}

impl Settings {
    /// Settings of a configuration.
    pub fn of(config: &ServerConfig) -> Self {
        Self {
            pool: config.pool.clone(),
            trace: config.trace.clone(),
            measure: config.measure,
            control_socket: config.control.path.clone(),
            state_dir: config.state_dir.clone(),
            metrics: config.metrics,
            metrics_hosts: config.metrics_hosts.clone(),
            access: config.socket_access.clone(),
            allow: config.allow.clone(),
        }
    }

    /// True if a server with the current settings `now` can apply these settings without a restart.
    /// Only the allowed directories may differ.
    pub fn are_in_effect(&self, now: &Self) -> bool {
        Self { allow: now.allow.clone(), ..self.clone() } == *now
    }

    /// Keys in which a file with these settings contradicts the current settings `now`. A setting
    /// that the file leaves out contradicts nothing, because the command line may have set it.
    pub fn contradictions(&self, now: &Self) -> Vec<String> {
        fn differs<T: PartialEq>(said: Option<&T>, now: Option<&T>) -> bool {
            said.is_some() && said != now
        }
        let (pool, pool_now) = (&self.pool, &now.pool);
        let polling = pool.polling != Polling::default() && pool.polling != pool_now.polling;
        let hosts = !self.metrics_hosts.is_empty() && self.metrics_hosts != now.metrics_hosts;
        let socket = differs(self.control_socket.as_ref(), now.control_socket.as_ref());
        let keys = [
            ("workers", pool.workers != 0 && pool.workers != pool_now.workers),
            ("poll", polling),
            ("pin", !pool.pin.is_empty() && pool.pin != pool_now.pin),
            ("trace", differs(self.trace.as_ref(), now.trace.as_ref())),
            ("measure", self.measure && !now.measure),
            ("control-socket", socket),
            ("state-dir", differs(self.state_dir.as_ref(), now.state_dir.as_ref())),
            ("metrics", differs(self.metrics.as_ref(), now.metrics.as_ref())),
            ("metrics-hosts", hosts),
            ("socket-mode", differs(self.access.mode.as_ref(), now.access.mode.as_ref())),
            ("socket-group", differs(self.access.group.as_ref(), now.access.group.as_ref())),
        ];
        keys.into_iter().filter(|(_, differs)| *differs).map(|(key, _)| key.to_owned()).collect()
    }

    /// Host names by which clients may address the metrics, besides IP addresses and localhost.
    pub fn metrics_hosts(&self) -> &[String] {
        &self.metrics_hosts
    }

    /// Copy with latency measurement on or off.
    pub fn with_measure(&self, measure: bool) -> Self {
        Self { measure, ..self.clone() }
    }
}

/// Writes a configuration file with which a server called `name` serves these controllers.
pub fn write(
    settings: &Settings,
    name: &str,
    disks: &[NamedDisk],
    controllers: &[Arc<SocketConfig>],
    exports: &[ExportConfig],
) -> String {
    let Settings { pool, trace, control_socket, state_dir, .. } = settings;
    let Settings { measure, metrics, metrics_hosts, access, allow, .. } = settings;
    let (poll, poll_max_us) = match pool.polling {
        Polling::Always => (Some(Poll::Always), None),
        Polling::Never => (Some(Poll::Never), None),
        adaptive if adaptive == Polling::default() => (None, None),
        Polling::Adaptive(most) => (None, u32::try_from(most.as_micros()).ok()),
    };
    let file = File {
        name: Some(at(name.to_owned())),
        control_socket: control_socket.as_deref().map(absolute),
        state_dir: state_dir.as_deref().map(absolute),
        socket_mode: access.mode.map(|mode| at(format!("{mode:04o}"))),
        socket_group: access.group.clone().map(at),
        metrics: *metrics,
        metrics_hosts: metrics_hosts.clone(),
        trace: trace.as_ref().map(|(path, _)| at(absolute(path))),
        trace_records: trace.as_ref().map(|(_, records)| at(*records)),
        measure: *measure,
        workers: u16::try_from(pool.workers).ok().filter(|count| *count != 0).map(at),
        pin: (!pool.pin.is_empty()).then(|| at(pool.pin.clone())),
        poll: poll.map(at),
        poll_max_us: poll_max_us.map(at),
        limit_group: limits::groups().into_iter().map(group).map(at).collect(),
        subsystem: subsystems(controllers),
        disk: disks.iter().map(NamedDiskTable::of).map(at).collect(),
        controller: Some(controllers.iter().map(|requested| at(controller(requested))).collect()),
        // FUSE and ublk exports are left out, because a configuration file with them would be
        // refused: other commands create them.
        export: exports
            .iter()
            .filter(|export| export.fuse.is_none() && export.ublk.is_none())
            .map(|export| at(export.with_absolute_paths()))
            .collect(),
        paths: (!allow.is_empty())
            .then(|| PathsTable { allow: allow.iter().map(|path| at(absolute(path))).collect() }),
    };
    // Serialization cannot fail, because the file contains only numbers and texts.
    toml::to_string(&file).unwrap_or_default()
}

/// Adds paths to `[paths] allow` in the text of a configuration file.
///
/// # Errors
/// The text is no configuration file.
pub fn with_allowed(text: &str, paths: Vec<PathBuf>) -> Result<String, toml::de::Error> {
    let mut file: File = toml::from_str(text)?;
    let table = file.paths.get_or_insert_with(|| PathsTable { allow: Vec::new() });
    table.allow.extend(paths.into_iter().map(at));
    Ok(toml::to_string(&file).unwrap_or_default())
}

/// Value without a position in a file.
fn at<T>(value: T) -> Spanned<T> {
    Spanned::new(0..0, value)
}

fn group(Group { name, limits }: Group) -> GroupTable {
    let limits = limits.texts().map(|(key, text)| (key.to_owned(), Rate::Text(text)));
    GroupTable { name, limits: limits.collect() }
}

/// Subsystems of the controllers, each one once, in the order of the controllers.
fn subsystems(controllers: &[Arc<SocketConfig>]) -> Vec<Spanned<SubsystemTable>> {
    let mut all: Vec<Spanned<SubsystemTable>> = Vec::new();
    for place in controllers.iter().filter_map(|requested| requested.controller.subsystem.as_ref())
    {
        if all.iter().all(|other| other.get_ref().name != place.name) {
            all.push(at(SubsystemTable {
                name: place.name.clone(),
                state: absolute(&place.state),
                serial: place.serial.clone(),
                ana_groups: place.ana.nsids.clone(),
            }));
        }
    }
    all
}

fn controller(requested: &SocketConfig) -> ControllerTable {
    let config = requested.controller.clone();
    let disks = disks(&configured_disks(&config));
    let states = config.subsystem.as_ref().map(|place| place.ana.states.clone());
    ControllerTable {
        id: requested.id.clone().map(at),
        socket: at(absolute(&requested.socket)),
        serial: config.serial.map(at),
        model: config.model.map(at),
        doorbells: config.doorbells,
        queues: config.queues.map(at),
        queue_entries: config.queue_entries.map(at),
        max_transfer: config.max_transfer.map(|bytes| at(bytes.to_string())),
        read_only: config.read_only,
        worker: requested.worker.map(at),
        pool: config.pool.as_ref().map(|pool| at(pool.to_string())),
        ana: states.filter(|states| !states.is_empty()).map(|states| at(AnaStates::Each(states))),
        subsystem: config.subsystem.map(|place| at(place.name)),
        disks: Some(at(disks)),
    }
}

/// Disks of a controller, except the namespaces of its pool: the pool's index lists these.
fn configured_disks(config: &ControllerConfig) -> Vec<DiskConfig> {
    let is_of_pool = |disk: &&DiskConfig| {
        config.pool.as_ref().is_some_and(|spec| pool_disks::belongs_to(spec, disk))
    };
    config.disks.iter().filter(|disk| !is_of_pool(disk)).cloned().collect()
}

fn disks(all: &[DiskConfig]) -> Vec<Spanned<DiskEntry>> {
    let mut before = 0;
    let numbered = nsids(all).zip(all).map(|(nsid, config)| {
        let next = std::mem::replace(&mut before, nsid) + 1;
        let nsid = (nsid != next).then_some(nsid);
        let disk =
            config.id.clone().unwrap_or_else(|| disk_spec::with_absolute_paths(&config.disk));
        let uuid = config.uuid.as_ref().map(uuid_text);
        at(match (nsid, uuid, config.share) {
            (None, None, false) => DiskEntry::Plain(disk),
            (nsid, uuid, share) => DiskEntry::Table(DiskTable { disk, nsid, uuid, share }),
        })
    });
    numbered.collect()
}
