//! The requests and answers of the control socket. Their documentation is that of the document.

use crate::ana_word::AnaWord;
use crate::limits::{self, DiskLimits};
use crate::offered_doorbells::OfferedDoorbells;
use serde::{Deserialize, Serialize};
use shadowbell_backend::Limits;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// What a server is, and how much it has to do.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Status {
    /// The name of the server, by which `shadowbell ctl --server` finds it.
    pub name: String,
    /// The version of the program.
    pub version: String,
    /// The process that serves.
    pub pid: u32,
    /// Its supervisor, unless it has none (`serve --no-keeper`).
    pub keeper_pid: Option<u32>,
    /// Since this process serves. An upgrade begins it anew.
    pub uptime_seconds: f64,
    /// Threads that do the I/O.
    pub workers: usize,
    /// Controllers that are served.
    pub controllers: usize,
    /// How many of them have a client.
    pub clients: usize,
    /// What is logged.
    pub log_filter: String,
    /// Why the last upgrade that was asked for here has failed, if it has.
    pub upgrade_error: Option<String>,
}

/// A controller and its socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Controller {
    /// What it is called in requests: its `id` in the configuration, or else the path of its
    /// socket from the root.
    pub id: String,
    /// The path of the socket, from the root.
    pub socket: String,
    /// Serial number.
    pub serial: String,
    /// Model number.
    pub model: String,
    /// Whether a client is connected.
    pub client: bool,
    /// What its guest has made of it.
    pub state: ControllerState,
    /// Most I/O queue pairs.
    pub max_queues: u16,
    /// Its namespaces.
    pub namespaces: Vec<Namespace>,
    /// What the groups of its namespaces are for it, if it is one of a subsystem.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ana: Vec<AnaGroup>,
}

/// A group of namespaces that several controllers have, and what it is for one of these: Asymmetric
/// Namespace Access.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct AnaGroup {
    /// Its number, from 1.
    pub group: u32,
    /// Its state.
    pub state: AnaWord,
    /// The numbers of its namespaces.
    pub namespaces: Vec<u32>,
}

/// What a group is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AnaStateChange {
    /// Its state.
    pub state: AnaWord,
}

/// What the registers of a controller say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ControllerState {
    /// It is not enabled.
    Disabled,
    /// It is enabled and ready.
    Ready,
    /// It has been shut down by its guest.
    ShutDown,
    /// It can not go on until it is reset.
    Failed,
}

/// A disk that a guest sees.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Namespace {
    /// The controller's `id`.
    pub controller: String,
    /// Its number, from 1.
    pub nsid: u32,
    /// What it keeps its bytes in.
    pub disk: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// Bytes of a block.
    pub block_size: u32,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Its UUID.
    pub uuid: String,
    /// How much it takes in a second, if that is limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitSpec>,
    /// What the disk counts of how it works, by name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub counters: BTreeMap<String, u64>,
}

/// What is logged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LogLevel {
    /// A level (`error`, `warn`, `info`, `debug`, `trace`), or several of parts of the program, as
    /// in `info,shadowbell_vfio_user=debug`. It lasts until the server ends, upgrades included.
    #[schema(example = "debug")]
    pub filter: String,
}

/// Whether commands are measured: how many there are and how long they take, by namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Measure {
    /// Whether they are.
    pub on: bool,
}

/// What is recorded of doorbells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Trace {
    /// Whether it is recorded now.
    pub on: bool,
    /// How many records of each worker there is room for in what is recorded, or was recorded last;
    /// older ones give way.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records: Option<u32>,
    /// How long that is as a file, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// Whether doorbells are to be recorded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TraceChange {
    pub on: bool,
    /// Records of each worker, from 1024 to 16777216, of 32 bytes each; the whole has 256 MiB at
    /// most. Without it there are 262144.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub records: Option<u32>,
}

/// Which program goes on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Upgrade {
    /// The path of the program from the root; without it, what is now at the path of the running
    /// one.
    #[serde(default)]
    pub binary: Option<String>,
}

/// Why a request was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Problem {
    /// What kind of reason, for programs.
    pub code: Code,
    /// A sentence, for a person.
    pub message: String,
}

/// The kinds of reasons why a request is not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Code {
    /// It makes no sense (400), or is too long (413).
    BadRequest,
    /// There is no such thing (404).
    NotFound,
    /// There is such a thing, and this can not be done with it (405).
    MethodNotAllowed,
    /// It is not possible as the server is now (409).
    Conflict,
    /// It went wrong while it was done (500).
    Failed,
}

impl Problem {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// The status of the answer.
    pub(crate) fn status(&self) -> u16 {
        match self.code {
            Code::BadRequest => 400,
            Code::NotFound => 404,
            Code::MethodNotAllowed => 405,
            Code::Conflict => 409,
            Code::Failed => 500,
        }
    }
}

/// A controller to be served. The server opens what it names, by paths from the root.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ControllerSpec {
    /// Where it is to listen.
    #[schema(example = "/run/vm0.sock")]
    pub socket: String,
    /// Its disks, in the order of the namespaces, as `serve` takes them.
    #[schema(example = json!([{"disk": "/srv/vm0.img"}]))]
    pub disks: Vec<DiskSpec>,
    /// Serial number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Model number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Most I/O queue pairs, 1 to 64.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// Most entries of a queue, 2 to 4096.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_entries: Option<u32>,
    /// The largest transfer in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_transfer: Option<u64>,
    /// How doorbells come: `shadow`, `mmio` or `mapped`.
    #[serde(default)]
    #[schema(value_type = String, example = "shadow")]
    pub doorbells: OfferedDoorbells,
    /// Take no writes.
    #[serde(default)]
    pub read_only: bool,
    /// The number of a worker, or `own` for a thread that serves no other controller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "own")]
    pub worker: Option<String>,
}

/// A disk of a controller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiskSpec {
    /// The disk, as `serve` takes it.
    pub disk: String,
    /// Its UUID; without it, one that is made from the names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// The number of its namespace, larger than that of the disk before; without it, the next one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nsid: Option<u32>,
}

/// A namespace to be added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamespaceSpec {
    /// The disk, as `serve` takes it; a file by its path from the root.
    #[schema(example = "/srv/vm0-data.img")]
    pub disk: String,
    /// Its UUID; without it, one that is made from the names.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
}

/// What of a namespace is to be another: one of these.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamespaceChange {
    /// Its size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
    /// Its disk, which has blocks of the same length. The guest is told that something has changed,
    /// and sees the same UUID: what it remembers of the old disk's bytes is up to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Whether writes are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
    /// How much it takes in a second: all of its limits, so what is not given is not limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LimitSpec>,
}

/// Limits. Each is a number of requests a second, or a size a second, and after a colon how much may
/// come at once after a while with less: `1000`, `1000:5000`, `100MiB:1GiB`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LimitSpec {
    /// Reads and writes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<String>,
    /// Reads a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<String>,
    /// Writes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<String>,
    /// Bytes a second, read and written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<String>,
    /// Bytes a second that are read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bandwidth: Option<String>,
    /// Bytes a second that are written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_bandwidth: Option<String>,
    /// A group that shares limits; not of a group itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

impl LimitSpec {
    /// As limits of a disk.
    ///
    /// # Errors
    /// What is wrong with them, in a sentence.
    pub(crate) fn parse(&self) -> Result<DiskLimits, String> {
        let mut limits = DiskLimits::default();
        if let Some(group) = &self.group {
            limits::check_name(group)?;
            limits.group = Some(group.clone());
        }
        let texts = [
            &self.iops,
            &self.read_iops,
            &self.write_iops,
            &self.bandwidth,
            &self.read_bandwidth,
            &self.write_bandwidth,
        ];
        for (name, text) in Limits::NAMES.iter().zip(texts) {
            if let Some(text) = text {
                limits.own.set(name, text)?;
            }
        }
        Ok(limits)
    }

    /// The other way.
    pub(crate) fn of(limits: &DiskLimits) -> Self {
        let mut spec = Self { group: limits.group.clone(), ..Self::default() };
        for (name, text) in limits.own.texts() {
            let field = match name {
                "iops" => &mut spec.iops,
                "read-iops" => &mut spec.read_iops,
                "write-iops" => &mut spec.write_iops,
                "bandwidth" => &mut spec.bandwidth,
                "read-bandwidth" => &mut spec.read_bandwidth,
                _ => &mut spec.write_bandwidth,
            };
            *field = Some(text);
        }
        spec
    }
}

/// A group whose disks share limits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct LimitGroup {
    /// What disks call it (`limit-group=NAME`).
    pub name: String,
    /// What all of them together take in a second.
    pub limits: LimitSpec,
}

/// A size of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Size {
    /// As large as its file is now.
    Whole,
    /// So many bytes.
    Bytes(u64),
}

/// The configuration of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Configuration {
    /// A file as `serve --config` takes it, which comes to what is served now.
    pub toml: String,
}

/// A configuration that the server is to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct Apply {
    /// The configuration file, as `serve --config` takes it.
    pub toml: String,
    /// What it is called where something is wrong with it.
    #[serde(default = "default_file")]
    pub file: String,
    /// Say what would be done, and do nothing.
    #[serde(default)]
    pub dry_run: bool,
    /// Take controllers away though they have clients.
    #[serde(default)]
    pub force: bool,
}

fn default_file() -> String {
    "configuration".to_owned()
}

/// What makes a server serve what a configuration says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Plan {
    /// Whether it was done.
    pub applied: bool,
    /// Controllers that come, by id.
    pub add: Vec<String>,
    /// Controllers that go.
    pub remove: Vec<String>,
    /// Controllers that go and come back as others.
    pub replace: Vec<String>,
    /// Controllers that stay, and so do their clients, with other namespaces, or other limits of
    /// them.
    #[serde(default)]
    pub change: Vec<String>,
    /// Controllers that stay what they are.
    pub unchanged: usize,
    /// Those that have a client, which would lose the controller or a namespace of it.
    pub busy: Vec<String>,
    /// What is otherwise then of controllers that are there before and after, and of limit groups.
    #[serde(default)]
    pub differences: Vec<Difference>,
    /// Whether what is not of controllers and limit groups is otherwise in the file: that counts
    /// when the server goes on in another process, or is started again.
    #[serde(default)]
    pub later: bool,
}

/// What is otherwise after a plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Difference {
    /// The controller's id, if it is of one.
    pub controller: Option<String>,
    /// What: `namespace 2`, `serial`, `limit group db`.
    pub what: String,
    /// What it is before; nothing, if it is not there or not said.
    pub from: Option<String>,
    /// What it is after.
    pub to: Option<String>,
}
