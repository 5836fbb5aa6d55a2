//! Types of requests and answers on the control socket. Their doc comments are the descriptions in
//! `docs/openapi.json`.

use serde::{Deserialize, Serialize};
use shadowbell_config::ana_state::AnaStateName;
use shadowbell_config::doorbell_mode::OfferedDoorbells;
use shadowbell_config::limits::{self, DiskLimits};
use shadowbell_disk_layers::Limits;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// State of a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Name of the server, as in `shadowbell ctl --server NAME`.
    pub name: String,
    /// Version of the program.
    pub version: String,
    /// Process ID of the server process.
    pub pid: u32,
    /// Process ID of the supervisor; absent with `serve --no-supervisor`.
    pub supervisor_pid: Option<u32>,
    /// Seconds since this server process began to serve. An upgrade starts a new process.
    pub uptime_seconds: f64,
    /// Number of I/O threads.
    pub workers: usize,
    /// Number of controllers.
    pub controllers: usize,
    /// Number of controllers with a client.
    pub clients: usize,
    /// Number of controllers that wait for their disks after a restart of the server process.
    #[serde(default)]
    pub waiting: usize,
    /// Number of cancelled writes that the storage has not answered, of all disks.
    #[serde(default)]
    pub stalled_writes: u64,
    /// Number of stalled disks.
    #[serde(default)]
    pub stalled: usize,
    /// Number of disks that are stopped by an error of their storage.
    #[serde(default)]
    pub stopped: usize,
    /// Number of files that further controllers, disks and exports may open, beyond those that
    /// clients may still need; absent without a limit.
    #[serde(default)]
    pub open_files_left: Option<u64>,
    /// Log filter.
    pub log_filter: String,
    /// Reason why the last upgrade requested over this interface failed, if it did.
    pub upgrade_error: Option<String>,
}

/// Controller and its socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Controller {
    /// Identifier in requests: `id` in the configuration, otherwise the absolute path of the
    /// socket.
    pub id: String,
    /// Absolute path of the socket.
    pub socket: String,
    /// Serial number.
    pub serial: String,
    /// Model number.
    pub model: String,
    /// True if a client is connected.
    pub client: bool,
    /// State of the controller registers.
    pub state: ControllerState,
    /// Reason why a controller in the state `waiting` waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
    /// Maximum number of I/O queue pairs.
    pub max_queues: u16,
    /// Namespaces of the controller.
    pub namespaces: Vec<Namespace>,
    /// ANA groups and their states, if the controller belongs to a subsystem.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ana: Vec<AnaGroup>,
}

/// ANA group (Asymmetric Namespace Access) of a subsystem, with its state for one controller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AnaGroup {
    /// ANA group identifier, from 1.
    pub group: u32,
    /// ANA state of the group for this controller.
    pub state: AnaStateName,
    /// Namespace identifiers of the group.
    pub namespaces: Vec<u32>,
}

/// Change of the ANA state of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AnaStateChange {
    /// New ANA state.
    pub state: AnaStateName,
}

/// State of a controller, from its registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ControllerState {
    /// Not enabled (CC.EN is 0).
    Disabled,
    /// Enabled and ready (CSTS.RDY is 1).
    Ready,
    /// Shut down by its guest.
    ShutDown,
    /// Fatal error (CSTS.CFS is 1), until the guest resets the controller.
    Failed,
    /// Not served yet after a restart of the server process: it waits for its disks, and its
    /// guest with it.
    Waiting,
}

/// Namespace of a controller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Namespace {
    /// `id` of the controller.
    pub controller: String,
    /// Namespace identifier, from 1.
    pub nsid: u32,
    /// `id` of the disk.
    pub disk_id: String,
    /// File, device or URI of the disk.
    pub disk: String,
    /// Capacity in bytes.
    pub bytes: u64,
    /// Block size in bytes.
    pub block_size: u32,
    /// True if writes are refused.
    pub read_only: bool,
    /// UUID of the namespace.
    pub uuid: String,
    /// Rate limits, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitSpec>,
    /// Counters of the disk, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counters: BTreeMap<String, u64>,
}

/// Log filter of the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LogLevel {
    /// Level (`error`, `warn`, `info`, `debug`, `trace`), or several with targets, as in
    /// `info,shadowbell_vfio_user=debug`. Upgrades keep the filter; a restart does not.
    #[schema(example = "debug")]
    pub filter: String,
}

/// Measurement of command counts and latencies per namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Measure {
    /// True if the measurement is on.
    pub on: bool,
}

/// State of the doorbell trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Trace {
    /// True if doorbells are being recorded.
    pub on: bool,
    /// Capacity of the current or last recording, in records per I/O thread. Newer records replace
    /// older ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records: Option<u32>,
    /// Size of the recording as a file, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// Start or stop of the doorbell trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TraceChange {
    /// True to start the recording, false to stop it.
    pub on: bool,
    /// Capacity in records of 32 bytes per I/O thread, from 1024 to 16777216, and at most 256 MiB
    /// for all I/O threads. The default is 262144.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records: Option<u32>,
}

/// Restart for upgrade.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Upgrade {
    /// Absolute path of the new program. The default is the path of the running program, where a
    /// newer version may be installed.
    #[serde(default)]
    pub binary: Option<String>,
}

/// Error response: reason why a request was not executed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Kind of error, for programs.
    pub code: Code,
    /// Explanation, for users.
    pub message: String,
}

/// Kind of error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// Malformed (400) or too long (413) request.
    BadRequest,
    /// No such object (404).
    NotFound,
    /// Method not supported by this object (405).
    MethodNotAllowed,
    /// Not possible in the current state of the server (409).
    Conflict,
    /// Connected clients would lose something; the same request with `force` succeeds (409).
    ClientAttached,
    /// Failed during execution (500).
    Failed,
    /// The server process is being replaced; repeat the request (503).
    Unavailable,
}

impl Problem {
    /// Error response with this code and explanation.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// HTTP status code of the response, except 413 for an overlong request.
    pub fn status(&self) -> u16 {
        match self.code {
            Code::BadRequest => 400,
            Code::NotFound => 404,
            Code::MethodNotAllowed => 405,
            Code::Conflict | Code::ClientAttached => 409,
            Code::Failed => 500,
            Code::Unavailable => 503,
        }
    }
}

/// Controller to add. The server opens the files that it names, so paths are absolute.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ControllerSpec {
    /// Absolute path of the socket to create.
    #[schema(example = "/run/shadowbell/vm0.sock")]
    pub socket: String,
    /// Disks in the order of the namespaces: ids of disks without a controller, or disks in the
    /// syntax of `serve`.
    #[schema(example = json!([{"disk": "/srv/vm0.img"}]))]
    pub disks: Vec<DiskSpec>,
    /// Serial number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Model number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Maximum number of I/O queue pairs, 1 to 64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// Maximum queue size in entries, 2 to 4096.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_entries: Option<u32>,
    /// Maximum transfer size of a command in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_transfer: Option<u64>,
    /// Doorbell mechanism: `shadow`, `mmio` or `mapped`.
    #[serde(default)]
    #[schema(value_type = String, example = "shadow")]
    pub doorbells: OfferedDoorbells,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// Number of the I/O thread, or `own` for a thread that serves no other controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "own")]
    pub worker: Option<String>,
}

/// Disk of a controller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskSpec {
    /// Disk, in the syntax of `serve`.
    pub disk: String,
    /// UUID of the namespace. The default is derived from the disk's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Namespace identifier, larger than that of the previous disk. The default is the next one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nsid: Option<u32>,
}

/// Namespace to attach.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NamespaceSpec {
    /// `id` of a disk without a controller; or a disk in the syntax of `serve` (paths are
    /// absolute), which then has the id `CONTROLLER/NSID`.
    #[schema(example = "data")]
    pub disk: String,
    /// UUID of the namespace. The default is derived from the disk's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// Permit another writer of the disk, if that one permits it too.
    #[serde(default)]
    pub share: bool,
}

/// Disk of the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Disk {
    /// Identifier in requests: `id` in the configuration, otherwise `CONTROLLER/NSID`.
    pub id: String,
    /// File, device or URI.
    pub source: String,
    /// Capacity in bytes.
    pub bytes: u64,
    /// Block size in bytes.
    pub block_size: u32,
    /// True if writes are refused.
    pub read_only: bool,
    /// Rate limits, if there are any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitSpec>,
    /// Namespaces that store their data on the disk. Several only in a subsystem.
    pub namespaces: Vec<DiskUser>,
    /// Number of cancelled writes that the storage has not answered. Later commands that overlap
    /// them wait.
    #[serde(default)]
    pub stalled_writes: u64,
    /// Number of requests of controllers that the storage has not answered, cancelled writes
    /// included. It is up to one second old, and 0 without a supervisor.
    #[serde(default)]
    pub in_flight: u64,
    /// Age of the oldest of these requests in milliseconds, right to a second.
    #[serde(default)]
    pub oldest_ms: u64,
    /// True if the file of the disk was deleted: its data is lost when the disk is closed.
    #[serde(default)]
    pub deleted: bool,
    /// True if the storage has not answered that request for the time `--stalled-after`.
    #[serde(default)]
    pub stalled: bool,
    /// Error of the storage that stopped the disk, if the disk is stopped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stopped: Option<String>,
    /// Number of held requests of a stopped disk.
    #[serde(default)]
    pub held: u64,
    /// Policy for requests that fail because of the storage: `stop` or `stop-on-full`; absent if they
    /// are reported to the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_error: Option<String>,
    /// `id` of each export of the disk.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exports: Vec<String>,
    /// Counters of the disk, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counters: BTreeMap<String, u64>,
}

/// Namespace that stores its data on a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskUser {
    /// `id` of the controller.
    pub controller: String,
    /// Namespace identifier.
    pub nsid: u32,
}

/// Export of a disk, by NBD, vhost-user-blk, FUSE or ublk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Export {
    /// Identifier in requests.
    pub id: String,
    /// `id` of the disk.
    pub disk: String,
    /// Listen address for NBD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "unix:/run/shadowbell/data.sock")]
    pub nbd: Option<String>,
    /// Path of the socket for vhost-user-blk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user_blk: Option<String>,
    /// Path of the FUSE file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuse: Option<String>,
    /// Path of the ublk block device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ublk: Option<String>,
    /// Name of the export for NBD clients, or serial number of the virtio disk.
    pub name: String,
    /// True if clients without TLS are refused.
    pub tls: bool,
    /// True if writes are refused.
    pub read_only: bool,
    /// True if another writer is permitted.
    pub share: bool,
    /// Requests to the disk since the export began in this process.
    pub requests: u64,
    /// Bytes read by these requests.
    pub bytes_read: u64,
    /// Bytes written by these requests.
    pub bytes_written: u64,
    /// Open queues of the disk: one for each NBD client or virtio queue.
    pub queues: usize,
    /// Number of requests that failed because of the disk.
    pub failures: u64,
}

/// Export to add: one of `nbd`, `vhost_user_blk` and `fuse`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportSpec {
    /// `id` of the disk.
    pub disk: String,
    /// Listen address for NBD: `unix:PATH` with an absolute path, or `tcp:ADDRESS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(example = "unix:/run/shadowbell/data.sock")]
    pub nbd: Option<String>,
    /// Absolute path of the socket for vhost-user-blk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vhost_user_blk: Option<String>,
    /// Absolute path of a FUSE file that the client has mounted. The client passes the descriptor of
    /// `/dev/fuse` by SCM_RIGHTS with an empty line (CR LF) before the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fuse: Option<String>,
    /// User ID of the FUSE file's owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group ID of the FUSE file's owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// Number of virtio queues. The default is one per processor, up to four.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// Name of the export for NBD clients, or serial number of the virtio disk.
    #[serde(default)]
    pub name: String,
    /// Absolute path of a directory with certificates. If it is set, clients without TLS are
    /// refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_certificates: Option<String>,
    /// Accept clients without a certificate.
    #[serde(default)]
    pub tls_any_client: bool,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// Permit another writer of the disk, if that one permits it too.
    #[serde(default)]
    pub share: bool,
}

/// Disk to add.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskSource {
    /// Disk, in the syntax of `serve`; paths are absolute.
    #[schema(example = "/srv/data.img?iops=5000")]
    pub source: String,
}

/// Change of a disk: exactly one of the fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskChange {
    /// New size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
    /// New source with the same block size, in the syntax of `serve`. A guest gets a Namespace
    /// Attribute Changed event and sees the same UUID. It has to discard cached data of the old
    /// source itself. Rate limits and read-only stay, unless the new source names them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// True to refuse writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
    /// New rate limits. A limit that is not given stays; `none` removes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitSpec>,
}

/// Text that removes a limit.
const NONE: &str = "none";

/// Rate limits, each `RATE` or `RATE:BURST`, in requests or bytes per second: `1000`, `1000:5000`,
/// `100MiB:1GiB`. In a change of limits, `none` removes the limit.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitSpec {
    /// Reads and writes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<String>,
    /// Reads per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<String>,
    /// Writes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<String>,
    /// Bytes read and written per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<String>,
    /// Bytes read per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bandwidth: Option<String>,
    /// Bytes written per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_bandwidth: Option<String>,
    /// Limit group to share, which has to exist; not allowed in the limits of a group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

impl LimitSpec {
    /// Texts of the limits in the order of [`Limits::NAMES`], and the limit group at the end.
    fn texts(&mut self) -> [&mut Option<String>; Limits::NAMES.len() + 1] {
        let Self { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, group } =
            self;
        [iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, group]
    }

    /// Converts to the limits of a disk.
    ///
    /// # Errors
    /// A sentence about the first invalid limit.
    pub fn parse(&self) -> Result<DiskLimits, String> {
        let mut limits = DiskLimits::default();
        if let Some(group) = &self.group {
            limits::check_name(group)?;
            limits.group = Some(group.clone());
        }
        for (name, text) in Limits::NAMES.iter().zip(self.clone().texts()) {
            if let Some(text) = text {
                limits.own.set(name, text)?;
            }
        }
        Ok(limits)
    }

    /// Change like this one, which also removes all limits that are not given.
    #[must_use]
    pub fn or_none(mut self) -> Self {
        for text in self.texts() {
            text.get_or_insert_with(|| NONE.to_owned());
        }
        self
    }

    /// Applies this change to the limits of a disk: limits that are not given stay, and `none`
    /// removes one.
    ///
    /// # Errors
    /// A sentence about the first invalid limit.
    pub fn changed(&self, before: &DiskLimits) -> Result<DiskLimits, String> {
        let (mut after, mut wanted) = (Self::of(before), self.clone());
        for (now, wanted) in after.texts().into_iter().zip(wanted.texts()) {
            if let Some(text) = wanted.take() {
                *now = Some(text).filter(|text| text != NONE);
            }
        }
        after.parse()
    }

    /// Converts from the limits of a disk.
    pub fn of(limits: &DiskLimits) -> Self {
        let text = |name| {
            let mut texts = limits.own.texts();
            texts.find(|(other, _)| *other == name).map(|(_, text)| text)
        };
        let [iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth] =
            Limits::NAMES.map(text);
        let group = limits.group.clone();
        Self { iops, read_iops, write_iops, bandwidth, read_bandwidth, write_bandwidth, group }
    }
}

/// Limit group: rate limits that several disks share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LimitGroup {
    /// Name of the group, as in the disk option `limit-group=NAME`.
    pub name: String,
    /// Rate limits for all disks of the group together.
    pub limits: LimitSpec,
}

/// Size of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Size {
    /// Current size of the file.
    Whole,
    /// Size in bytes. A file is made larger if necessary.
    Bytes(u64),
    /// Number of bytes to add to the current size.
    Grow(u64),
}

/// Current configuration of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Configuration {
    /// Configuration file for `serve --config` that describes the current configuration.
    pub toml: String,
}

/// Configuration to apply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Apply {
    /// Configuration file, in the syntax of `serve --config`.
    pub toml: String,
    /// File name for error messages.
    #[serde(default = "default_file")]
    pub file: String,
    /// Return the plan without applying it.
    #[serde(default)]
    pub dry_run: bool,
    /// Apply even if connected clients lose controllers, namespaces or exports.
    #[serde(default)]
    pub force: bool,
}

fn default_file() -> String {
    "configuration".to_owned()
}

/// Steps that change a server to a new configuration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Plan {
    /// True if the steps were executed.
    pub applied: bool,
    /// Controllers to add, by id.
    pub add: Vec<String>,
    /// Controllers to remove.
    pub remove: Vec<String>,
    /// Controllers to remove and add again with other properties.
    pub replace: Vec<String>,
    /// Controllers whose namespaces or limits change, while their clients stay connected.
    #[serde(default)]
    pub change: Vec<String>,
    /// Number of controllers without changes.
    pub unchanged: usize,
    /// Controllers with a client that would lose the controller or one of its namespaces: the plan
    /// needs `force`.
    pub busy: Vec<String>,
    /// Losses of connected clients of controllers and exports, one sentence each: the plan needs
    /// `force` if there are any.
    #[serde(default)]
    pub losses: Vec<String>,
    /// Changes of controllers that exist before and after, and of limit groups.
    #[serde(default)]
    pub differences: Vec<Difference>,
    /// Keys of server-wide settings that differ. They take effect at the next upgrade or restart.
    #[serde(default)]
    pub later: Vec<String>,
}

/// Changed setting of a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Difference {
    /// Id of the controller, for a setting of a controller.
    pub controller: Option<String>,
    /// Name of the setting: `namespace 2`, `serial`, `limit group db`.
    pub what: String,
    /// Old value, if there is one.
    pub from: Option<String>,
    /// New value, if there is one.
    pub to: Option<String>,
}
