//! Writes a configuration file from the state of a running server.

use super::disks::WrittenDisk;
use crate::ana_state::AnaWord;
use crate::controller_config::{ControllerConfig, DiskConfig, OfferedDoorbells, nsids};
use crate::disk_spec;
use crate::export_config::ExportConfig;
use crate::limits::{self, Group};
use crate::pool::PoolSpec;
use crate::pool_disks;
use crate::server_config::{NamedDisk, Own, ServerConfig, SocketConfig, WorkerChoice};
use crate::socket_access::SocketAccess;
use crate::uuid_text::uuid_text;
use serde::Serialize;
use shadowbell_controller::{Polling, PoolOptions};
use shadowbell_process::process_env::absolute;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Server-wide settings of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    pool: PoolOptions,
    trace: Option<(PathBuf, u32)>,
    measure: bool,
    control_socket: Option<PathBuf>,
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
            metrics: config.metrics,
            metrics_hosts: config.metrics_hosts.clone(),
            access: config.socket_access.clone(),
            allow: config.allow.clone(),
        }
    }

    /// True if a reload of these settings needs no restart. Further allowed directories take
    /// effect at once.
    pub fn are_in_effect(&self, now: &Self) -> bool {
        Self { allow: now.allow.clone(), ..self.clone() } == *now
    }

    /// Returns true if a file with these settings contradicts the current settings `now`. A setting
    /// that the file leaves out contradicts nothing, because the command line may have set it.
    pub fn contradicts(&self, now: &Self) -> bool {
        fn differs<T: PartialEq>(said: Option<&T>, now: Option<&T>) -> bool {
            said.is_some() && said != now
        }
        let (pool, pool_now) = (&self.pool, &now.pool);
        (pool.workers != 0 && pool.workers != pool_now.workers)
            || (pool.polling != Polling::default() && pool.polling != pool_now.polling)
            || (!pool.pin.is_empty() && pool.pin != pool_now.pin)
            || differs(self.trace.as_ref(), now.trace.as_ref())
            || (self.measure && !now.measure)
            || differs(self.control_socket.as_ref(), now.control_socket.as_ref())
            || differs(self.metrics.as_ref(), now.metrics.as_ref())
            || (!self.metrics_hosts.is_empty() && self.metrics_hosts != now.metrics_hosts)
            || differs(self.access.mode.as_ref(), now.access.mode.as_ref())
            || differs(self.access.group.as_ref(), now.access.group.as_ref())
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

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct File {
    name: String,
    control_socket: Option<PathBuf>,
    socket_mode: Option<String>,
    socket_group: Option<String>,
    metrics: Option<SocketAddr>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    metrics_hosts: Vec<String>,
    trace: Option<PathBuf>,
    trace_records: Option<u32>,
    measure: Option<bool>,
    workers: Option<usize>,
    pin: Vec<usize>,
    poll: Option<&'static str>,
    poll_max_us: Option<u64>,
    limit_group: Vec<BTreeMap<&'static str, String>>,
    subsystem: Vec<Subsystem>,
    disk: Vec<WrittenDisk>,
    controller: Vec<Controller>,
    export: Vec<ExportConfig>,
    #[serde(skip_serializing_if = "Option::is_none")]
    paths: Option<Paths>,
}

#[derive(Serialize)]
struct Paths {
    allow: Vec<PathBuf>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Subsystem {
    name: String,
    state: PathBuf,
    serial: Option<String>,
    ana_groups: Option<Vec<Vec<u32>>>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct Controller {
    id: Option<String>,
    socket: PathBuf,
    serial: Option<String>,
    model: Option<String>,
    doorbells: OfferedDoorbells,
    queues: Option<u16>,
    queue_entries: Option<u32>,
    max_transfer: Option<String>,
    read_only: bool,
    worker: Option<Worker>,
    pool: Option<String>,
    subsystem: Option<String>,
    ana: Option<Vec<AnaWord>>,
    disks: Vec<Disk>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Worker {
    Shared(usize),
    Own(&'static str),
}

#[derive(Serialize)]
#[serde(untagged)]
enum Disk {
    Plain(String),
    Table {
        disk: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        nsid: Option<u32>,
        #[serde(skip_serializing_if = "Option::is_none")]
        uuid: Option<String>,
        #[serde(skip_serializing_if = "std::ops::Not::not")]
        share: bool,
    },
}

/// Writes a configuration file with which a server called `name` serves these controllers.
pub fn write(
    settings: &Settings,
    name: &str,
    disks: &[NamedDisk],
    controllers: &[Arc<SocketConfig>],
    exports: &[ExportConfig],
) -> String {
    let Settings { pool, trace, control_socket, .. } = settings;
    let Settings { measure, metrics, metrics_hosts, access, allow, .. } = settings;
    let (poll, poll_max_us) = match pool.polling {
        Polling::Always => (Some("always"), None),
        Polling::Never => (Some("never"), None),
        adaptive if adaptive == Polling::default() => (None, None),
        Polling::Adaptive(most) => (None, Some(micros(most))),
    };
    let file = File {
        name: name.to_owned(),
        control_socket: control_socket.as_deref().map(absolute),
        socket_mode: access.mode.map(|mode| format!("{mode:04o}")),
        socket_group: access.group.clone(),
        metrics: *metrics,
        metrics_hosts: metrics_hosts.clone(),
        trace: trace.as_ref().map(|(path, _)| absolute(path)),
        trace_records: trace.as_ref().map(|(_, records)| *records),
        measure: measure.then_some(true),
        workers: (pool.workers != 0).then_some(pool.workers),
        pin: pool.pin.clone(),
        poll,
        poll_max_us,
        limit_group: limits::groups().into_iter().map(group).collect(),
        subsystem: subsystems(controllers),
        disk: disks.iter().map(WrittenDisk::of).collect(),
        controller: controllers.iter().map(|asked| controller(asked)).collect(),
        // A FUSE file is mounted by `ctl`, not by a server with a configuration file.
        export: exports
            .iter()
            .filter(|export| export.fuse.is_none() && export.ublk.is_none())
            .map(ExportConfig::with_absolute_paths)
            .collect(),
        paths: (!allow.is_empty())
            .then(|| Paths { allow: allow.iter().map(|path| absolute(path)).collect() }),
    };
    // Serialization cannot fail, because the file contains only numbers and texts.
    toml::to_string(&file).unwrap_or_default()
}

fn group(group: Group) -> BTreeMap<&'static str, String> {
    group.limits.texts().chain([("name", group.name)]).collect()
}

/// Subsystems of the controllers, each one once, in the order of the controllers.
fn subsystems(controllers: &[Arc<SocketConfig>]) -> Vec<Subsystem> {
    let mut all: Vec<Subsystem> = Vec::new();
    for place in controllers.iter().filter_map(|asked| asked.controller.subsystem.as_ref()) {
        if all.iter().all(|other| other.name != place.name) {
            let (name, serial) = (place.name.clone(), place.serial.clone());
            let groups = Some(place.ana.nsids.clone()).filter(|groups| !groups.is_empty());
            let state = absolute(&place.state);
            all.push(Subsystem { name, state, serial, ana_groups: groups });
        }
    }
    all
}

fn controller(asked: &SocketConfig) -> Controller {
    let config = asked.controller.clone();
    let disks = disks(&configured_disks(&config));
    let ControllerConfig { serial, model, queues, queue_entries, doorbells, read_only, .. } =
        config;
    Controller {
        id: asked.id.clone(),
        socket: absolute(&asked.socket),
        serial,
        model,
        doorbells,
        queues,
        queue_entries,
        max_transfer: config.max_transfer.map(|bytes| bytes.to_string()),
        read_only,
        worker: asked.worker.map(|worker| match worker {
            WorkerChoice::Shared(number) => Worker::Shared(number),
            WorkerChoice::Own(Own::Own) => Worker::Own("own"),
        }),
        ana: config
            .subsystem
            .as_ref()
            .map(|place| place.ana.states.clone())
            .filter(|states| !states.is_empty()),
        subsystem: config.subsystem.map(|place| place.name),
        disks,
        pool: config.pool.as_ref().map(PoolSpec::to_string),
    }
}

/// Disks of a controller, without the namespaces of its pool, which the index of the pool lists.
fn configured_disks(config: &ControllerConfig) -> Vec<DiskConfig> {
    let is_of_pool = |disk: &&DiskConfig| {
        config.pool.as_ref().is_some_and(|spec| pool_disks::belongs_to(spec, disk))
    };
    config.disks.iter().filter(|disk| !is_of_pool(disk)).cloned().collect()
}

fn disks(all: &[DiskConfig]) -> Vec<Disk> {
    let mut before = 0;
    let numbered = nsids(all).zip(all).map(|(nsid, config)| {
        let next = std::mem::replace(&mut before, nsid) + 1;
        let nsid = (nsid != next).then_some(nsid);
        let disk =
            config.id.clone().unwrap_or_else(|| disk_spec::with_absolute_paths(&config.disk));
        let uuid = config.uuid.as_ref().map(uuid_text);
        match (nsid, uuid, config.share) {
            (None, None, false) => Disk::Plain(disk),
            (nsid, uuid, share) => Disk::Table { disk, nsid, uuid, share },
        }
    });
    numbered.collect()
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
