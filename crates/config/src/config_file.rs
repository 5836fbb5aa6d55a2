//! Configuration file of `shadowbell serve --config`, with many controllers for one process.
//!
//! A file is accepted or refused as a whole. All errors that can be found are reported together,
//! each with its line number.

use crate::controller_config::{
    ControllerConfig, DiskConfig, OfferedDoorbells, check_max_transfer, check_model, check_serial,
    nsids,
};
use crate::cpu_list;
use crate::disk_spec;
use crate::export_config::{ExportConfig, Mounted};
use crate::limits::{self, DiskLimits, Group};
use crate::pool::PoolSpec;
use crate::server_config::duplicate_disk_at;
use crate::server_config::{
    MAX_POLL_US, MAX_WORKERS, NamedDisk, Poll, ServerConfig, SocketConfig, TRACE_RECORDS,
    WorkerChoice, pool_options,
};
use crate::socket_access::{self, SocketAccess};
use crate::socket_path::{self, SocketPath};
use crate::uuid_text::{invalid_uuid_text, parse_uuid};
use anyhow::anyhow;
use serde::{Deserialize, Serialize};
use shadowbell_controller::config::MAX_NAMESPACES;
use shadowbell_disk_layers::Limits;
use shadowbell_process::error_text::without_rust_terms;
use shadowbell_process::exit::bad_input;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use toml::Spanned;
use utoipa::ToSchema;

/// Maximum size of the file. It has room for more controllers than a process can serve, with one
/// line each.
const MAX_BYTES: u64 = 1 << 20;

/// Configuration file, as read and as written. The comments of the fields are the text of
/// shadowbell.toml(5).
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    /// Name of the server, for `shadowbell ctl --server`. Default: the name of the file.
    #[schema(value_type = Option<String>)]
    name: Option<Spanned<String>>,
    /// Path of the control socket. Default: `/run/shadowbell/NAME/control.sock`, or below
    /// `$XDG_RUNTIME_DIR` for a user other than root.
    #[schema(value_type = Option<String>)]
    control_socket: Option<PathBuf>,
    /// Directory of the UUIDs that are generated for disks. Default: `/var/lib/shadowbell`, or
    /// `$XDG_STATE_HOME/shadowbell` for a user other than root.
    #[schema(value_type = Option<String>)]
    state_dir: Option<PathBuf>,
    /// Mode of the controllers' sockets, as in `"0660"`. Default: set by the umask.
    #[schema(value_type = Option<String>)]
    socket_mode: Option<Spanned<String>>,
    /// Group of the controllers' sockets, a name or a number. Default: that of the process.
    #[schema(value_type = Option<String>)]
    socket_group: Option<Spanned<String>>,
    /// Address and port of the metrics, which have no access control: `"127.0.0.1:9477"`. Default:
    /// none.
    #[schema(value_type = Option<String>)]
    metrics: Option<SocketAddr>,
    /// Host names by which clients may address the metrics, besides IP addresses and localhost.
    /// Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    metrics_hosts: Vec<String>,
    /// File in which every decision about a doorbell is recorded, for `shadowbell trace`. Default:
    /// none.
    #[schema(value_type = Option<String>)]
    trace: Option<Spanned<PathBuf>>,
    /// Number of trace records per I/O thread, 1024 to 16777216. Default: 262144.
    #[schema(value_type = Option<u32>)]
    trace_records: Option<Spanned<u32>>,
    /// True to measure latency by namespace, for metrics and `shadowbell top`. Default: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    measure: bool,
    /// Number of I/O threads. Default: one for every two CPUs, or the number of CPUs in `pin`.
    #[schema(value_type = Option<u16>)]
    workers: Option<Spanned<u16>>,
    /// CPUs to which the I/O threads are pinned, in order. Default: none.
    #[schema(value_type = Option<Vec<u32>>)]
    pin: Option<Spanned<Vec<usize>>>,
    /// Polling of an idle I/O thread: `"adaptive"` before it sleeps, `"always"`, or `"never"`.
    /// Default: `"adaptive"`, or `"always"` if a controller has mapped doorbells.
    #[schema(value_type = Option<String>)]
    poll: Option<Spanned<Poll>>,
    /// Maximum polling time of an idle I/O thread in microseconds. Default: 100.
    #[schema(value_type = Option<u32>)]
    poll_max_us: Option<Spanned<u32>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(ignore)]
    limit_group: Vec<Spanned<GroupTable>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(ignore)]
    subsystem: Vec<Spanned<SubsystemTable>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(ignore)]
    disk: Vec<Spanned<NamedDiskTable>>,
    #[schema(ignore)]
    controller: Option<Vec<Spanned<ControllerTable>>>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(ignore)]
    export: Vec<Spanned<ExportConfig>>,
    #[schema(ignore)]
    paths: Option<PathsTable>,
}

/// Table `[paths]`.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct PathsTable {
    /// Directories in which management requests may open images and create sockets, if the server
    /// has a sandbox.
    #[schema(value_type = Vec<String>)]
    allow: Vec<Spanned<PathBuf>>,
}

/// Table `[[limit-group]]`: name and limits of a limit group. The keys of the limits are those of
/// disk options; a rate is a number or a string.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
struct GroupTable {
    /// Name of the group, for the option `limit-group` of disks.
    name: String,
    #[serde(flatten)]
    #[schema(ignore)]
    limits: BTreeMap<String, Rate>,
}

/// Rate of a limit group.
#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged, expecting = "a limit is a number or a string")]
enum Rate {
    Number(u64),
    Text(String),
}

/// Table `[[controller]]`.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ControllerTable {
    /// Id of the controller, for `shadowbell ctl` and metrics. Default: the path of the socket.
    #[schema(value_type = Option<String>)]
    id: Option<Spanned<String>>,
    /// Path of the vfio-user socket; for SPDK a directory.
    #[schema(value_type = String)]
    socket: Spanned<PathBuf>,
    /// Serial number, 1 to 20 characters. Default: derived from the path of the socket.
    #[schema(value_type = Option<String>)]
    serial: Option<Spanned<String>>,
    /// Model number, 1 to 40 characters. Default: `"Shadowbell NVMe Controller"`.
    #[schema(value_type = Option<String>)]
    model: Option<Spanned<String>>,
    /// Doorbell mechanism that the controller offers: `"shadow"`, `"mmio"` or `"mapped"`. Default:
    /// `"shadow"`.
    #[serde(default)]
    #[schema(value_type = String)]
    doorbells: OfferedDoorbells,
    /// Maximum number of I/O queue pairs, 1 to 64. Default: 64.
    #[schema(value_type = Option<u16>)]
    queues: Option<Spanned<u16>>,
    /// Maximum queue size in entries, 2 to 4096. Default: 4096.
    #[schema(value_type = Option<u32>)]
    queue_entries: Option<Spanned<u32>>,
    /// Maximum transfer size of a command, a power of two from `"1MiB"` to `"16MiB"`. Default:
    /// `"1MiB"`.
    #[schema(value_type = Option<String>)]
    max_transfer: Option<Spanned<String>>,
    /// True to refuse writes, whatever the disks allow. Default: false.
    #[serde(default)]
    read_only: bool,
    /// I/O thread: `"own"` for a thread that serves no other controller, or the number of a thread,
    /// from 0. Default: a shared thread.
    #[schema(value_type = Option<String>)]
    worker: Option<Spanned<WorkerChoice>>,
    /// Pool in which the guest creates namespaces, instead of `disks`: `"DIR?capacity=SIZE"`.
    /// Default: none.
    #[schema(value_type = Option<String>)]
    pool: Option<Spanned<String>>,
    /// Name of the `[[subsystem]]` of the controller. Default: none.
    #[schema(value_type = Option<String>)]
    subsystem: Option<Spanned<String>>,
    /// ANA state of the subsystem's ANA groups for this controller, or a list with a state for
    /// each: `"optimized"`, `"non-optimized"`, `"inaccessible"`, `"persistent-loss"`, `"change"`.
    /// Default: `"optimized"`.
    #[schema(value_type = Option<String>)]
    ana: Option<Spanned<AnaStates>>,
    /// Disks, one per namespace. Each is a string, a disk with options as in shadowbell-disks(7) or
    /// the `id` of a `[[disk]]`, or a table.
    #[schema(value_type = Option<Vec<String>>)]
    disks: Option<Spanned<Vec<Spanned<DiskEntry>>>>,
}

/// A disk: a string, or a table.
#[derive(Debug, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "a disk is a string, or a table of `disk`, `uuid`, `nsid` and `share`"
)]
enum DiskEntry {
    Plain(String),
    Table(DiskTable),
}

/// Element of `disks`.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct DiskTable {
    /// Disk with options, or the `id` of a `[[disk]]`.
    disk: String,
    /// Namespace identifier, larger than that of the disk before. Default: the next one, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    nsid: Option<u32>,
    /// UUID that guests see. Default: generated once, see `state-dir`.
    #[serde(skip_serializing_if = "Option::is_none")]
    uuid: Option<String>,
    /// True to permit an export to write to the disk, too. Default: false.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    share: bool,
}

/// Reads the configuration file at `path`. Does not open disks and sockets.
///
/// # Errors
/// All errors of the file, one per line, with line numbers.
pub fn read(path: &Path) -> anyhow::Result<ServerConfig> {
    parse(&read_text(path)?, &path.display().to_string()).map_err(|why| bad_input(anyhow!(why)))
}

/// Reads the text of the configuration file at `path`.
///
/// # Errors
/// The file cannot be read, or is no regular file of a plausible size.
pub fn read_text(path: &Path) -> anyhow::Result<String> {
    let name = path.display();
    let refuse = |why: fmt::Arguments<'_>| bad_input(anyhow!("{name}: {why}"));
    let unreadable = |error| refuse(format_args!("cannot read the configuration: {error}"));
    let metadata = fs::metadata(path).map_err(unreadable)?;
    if !metadata.is_file() {
        return Err(refuse(format_args!("not a regular file; give the path of a TOML file")));
    }
    if metadata.len() > MAX_BYTES {
        return Err(refuse(format_args!(
            "it has {} bytes, but a configuration has at most {MAX_BYTES}",
            metadata.len()
        )));
    }
    fs::read_to_string(path).map_err(unreadable)
}

/// Parses `text`, the content of the file `name`.
pub fn parse(text: &str, name: &str) -> Result<ServerConfig, String> {
    parse_with(text, name, None)
}

/// Item of a configuration file that is checked against the disk kinds and the machine.
#[derive(Clone, Copy, Debug)]
pub enum Item<'a> {
    /// Specification of a disk.
    Disk(&'a str),
    /// Path of a controller's socket.
    Socket(&'a Path),
    /// Directory in which management requests may open files.
    Allowed(&'a Path),
    /// Path of the doorbell trace.
    Trace(&'a Path),
    /// Export of a disk.
    Export(&'a ExportConfig),
}

/// Function that checks an item. The error is a sentence.
pub type ItemCheck<'a> = &'a dyn Fn(Item<'_>) -> Result<(), String>;

/// Validates the configuration file at `path` without opening disks and sockets. `check_item`
/// checks what the types of this crate do not.
///
/// # Errors
/// All errors of the file, one per line, with line numbers.
pub fn check(path: &Path, check_item: ItemCheck<'_>) -> anyhow::Result<ServerConfig> {
    let (text, name) = (read_text(path)?, path.display().to_string());
    parse_with(&text, &name, Some(check_item)).map_err(|why| bad_input(anyhow!(why)))
}

fn parse_with(
    text: &str,
    name: &str,
    check_item: Option<ItemCheck<'_>>,
) -> Result<ServerConfig, String> {
    let file: File = toml::from_str(text).map_err(|error| {
        let line = error.span().map_or(1, |span| line_of(text, span.start));
        format!("{name}:{line}: {}", without_rust_terms(error.message()))
    })?;
    let (groups, disks, errors) = Default::default();
    let mut check = Check { text, name, check_item, groups, disks, errors };
    let config = check.file(file);
    if check.errors.is_empty() {
        return Ok(config);
    }
    check.errors.sort_by_key(|(line, _)| *line);
    let lines: Vec<_> =
        check.errors.iter().map(|(line, why)| format!("{name}:{line}: {why}")).collect();
    Err(lines.join("\n"))
}

fn line_of(text: &str, offset: usize) -> usize {
    text.as_bytes().iter().take(offset).filter(|byte| **byte == b'\n').count() + 1
}

/// Validates a file and collects its errors.
struct Check<'a> {
    text: &'a str,
    name: &'a str,
    /// Further checks, in addition to those of every file that is served.
    check_item: Option<ItemCheck<'a>>,
    /// Names of the limit groups.
    groups: HashSet<String>,
    /// Named disks.
    disks: Vec<NamedDisk>,
    errors: Vec<(usize, String)>,
}

impl Check<'_> {
    fn line<T>(&self, value: &Spanned<T>) -> usize {
        line_of(self.text, value.span().start)
    }

    fn refuse<T>(&mut self, value: &Spanned<T>, why: impl Into<String>) {
        let line = self.line(value);
        self.errors.push((line, why.into()));
    }

    /// Refuses `what` of a controller in `line` if another controller has the same, in line
    /// `first`.
    fn refuse_second(&mut self, line: usize, first: Option<usize>, what: fmt::Arguments<'_>) {
        if let Some(first) = first {
            let why = "is that of another controller too";
            let why = format!("{what} {why} (line {first}): give each its own");
            self.errors.push((line, why));
        }
    }

    /// Line of a key in the table of an array (`[[disk]]`). Line of the table if it does not
    /// contain the key.
    fn line_in<T>(&self, table: &Spanned<T>, key: &str) -> usize {
        let first = self.line(table);
        let mut lines = (1..).zip(self.text.lines()).skip(first - 1);
        if !lines.next().is_some_and(|(_, line)| line.trim_start().starts_with("[[")) {
            return first;
        }
        let is_key = |line: &str| {
            let rest = line.trim_start().strip_prefix(key);
            rest.is_some_and(|rest| rest.trim_start().starts_with('='))
        };
        let mut inside = lines.take_while(|(_, line)| !line.trim_start().starts_with('['));
        inside.find(|(_, line)| is_key(line)).map_or(first, |(number, _)| number)
    }

    /// Reports an error of a key in the table of an array.
    fn refuse_key<T>(&mut self, table: &Spanned<T>, key: &str, why: impl Into<String>) {
        let line = self.line_in(table, key);
        self.errors.push((line, why.into()));
    }

    fn check_item(&mut self, line: usize, item: Item<'_>) {
        if let Some(Err(why)) = self.check_item.map(|check| check(item)) {
            self.errors.push((line, why));
        }
    }

    /// Returns the number if it is in the range. Otherwise reports an error.
    fn number<T: Copy + PartialOrd + fmt::Display>(
        &mut self,
        what: &str,
        value: Option<Spanned<T>>,
        range: std::ops::RangeInclusive<T>,
    ) -> Option<T> {
        let value = value?;
        let number = *value.get_ref();
        if !range.contains(&number) {
            let (from, to) = (range.start(), range.end());
            self.refuse(&value, format!("`{what}` is {from} to {to}, not {number}"));
        }
        Some(number)
    }

    fn file(&mut self, file: File) -> ServerConfig {
        // A file without controllers is refused: an empty, truncated or unrelated file must not
        // remove all controllers.
        if file.controller.is_none() {
            let why = "it has no controller: begin one with `[[controller]]`; or write `controller \
                       = []`, and add controllers later by `shadowbell ctl controller add`";
            self.errors.push((1, why.into()));
        }
        let tables = file.controller.unwrap_or_default();
        let workers_line = file.workers.as_ref().map(|value| self.line(value));
        let poll_line = file.poll_max_us.as_ref().map(|value| self.line(value));
        let pin_line = file.pin.as_ref().map(|value| self.line(value));
        let workers = self.number("workers", file.workers, 1..=MAX_WORKERS);
        let poll_max = self.number("poll-max-us", file.poll_max_us, 1..=MAX_POLL_US);
        let records = self.number("trace-records", file.trace_records, 1024..=1 << 24);
        let pin = file.pin.map_or_else(Vec::new, |pin| {
            if let Err(why) = cpu_list::check(pin.get_ref()) {
                self.refuse(&pin, why);
            }
            pin.into_inner()
        });
        let is_polling_open = file.poll.is_none() && poll_max.is_none();
        let poll = file.poll.map(Spanned::into_inner);
        let pool = pool_options(workers, pin, poll, poll_max).unwrap_or_else(|why| {
            let line = poll_line.or(pin_line).or(workers_line).unwrap_or(1);
            self.errors.push((line, why));
            shadowbell_controller::PoolOptions::default()
        });
        let mode = file.socket_mode.and_then(|text| {
            let mode = socket_access::parse_mode(text.get_ref());
            mode.map_err(|why| self.refuse(&text, format!("`socket-mode`: {why}"))).ok()
        });
        let group = file.socket_group.map(|text| {
            if let Err(why) = socket_access::parse_group(text.get_ref()) {
                self.refuse(&text, format!("`socket-group`: {why}"));
            }
            text.into_inner()
        });
        let groups: Vec<_> = file.limit_group.iter().map(|table| self.group(table)).collect();
        for (table, group) in file.limit_group.iter().zip(&groups) {
            if !self.groups.insert(group.name.clone()) {
                let why = format!("the limit group `{}` is defined twice", group.name);
                self.refuse_key(table, "name", why);
            }
        }
        file.disk.iter().for_each(|table| self.named_disk(table));
        let name = file.name.map(|name| {
            if let Err(why) = socket_path::check_name(name.get_ref()) {
                self.refuse(&name, format!("`name`: {why}"));
            }
            name.into_inner()
        });
        let mut shared = Subsystems::new(file.subsystem, |table, key, why| {
            self.refuse_key(table, key, why);
        });
        let mut controllers = Vec::with_capacity(tables.len());
        let mut sockets: HashMap<PathBuf, usize> = HashMap::new();
        let mut serials: HashMap<String, usize> = HashMap::new();
        let mut ids: HashMap<String, usize> = HashMap::new();
        let mut disk_lines = Vec::with_capacity(tables.len());
        for table in tables {
            let origin = Some(format!("{}:{}", self.name, self.line(&table)));
            let table = table.into_inner();
            let socket = table.socket.get_ref().clone();
            if socket.as_os_str().is_empty() {
                self.refuse(&table.socket, "the path of the socket is empty");
            } else {
                let line = self.line(&table.socket);
                self.check_item(line, Item::Socket(&socket));
            }
            let disks = table.disks.as_ref().map(|disks| self.line(disks));
            disk_lines.push(disks.unwrap_or_else(|| self.line(&table.socket)));
            let serial = table.serial.as_ref().map(|serial| (self.line(serial), serial.get_ref()));
            if let Some((line, serial)) = serial {
                let first = serials.insert(serial.clone(), line);
                self.refuse_second(line, first, format_args!("the serial number {serial:?}"));
            }
            let worker = table.worker.as_ref().map(|worker| *worker.get_ref());
            if let (Some(value), Some(WorkerChoice::Shared(number))) = (&table.worker, worker)
                && number >= pool.workers
            {
                let there_are = match pool.workers {
                    0 => "the number of I/O threads depends on the machine: set `workers`".into(),
                    count => format!("there are {count}, from 0"),
                };
                self.refuse(value, format!("`worker` is {number}, and {there_are}"));
            }
            let line = self.line(&table.socket);
            let id = table.id.as_ref().map(|id| {
                if let Err(why) = check_id(id.get_ref()) {
                    self.refuse(id, why);
                }
                id.get_ref().clone()
            });
            let place =
                table.subsystem.as_ref().map(|name| (self.line(name), name.get_ref().clone()));
            let ana = table.ana.as_ref().map(|ana| (self.line(ana), ana.get_ref().clone()));
            let mut controller = self.controller(table);
            if let (None, Some((line, _))) = (&place, &ana) {
                let why = "`ana` is only for a controller with a `subsystem`: leave it out";
                self.errors.push((*line, why.to_owned()));
            }
            if let Some((line, _)) = &place
                && controller.pool.is_some()
            {
                let why = "a pool belongs to one controller: leave out `pool` or `subsystem`";
                self.errors.push((*line, why.to_owned()));
            }
            if let Some((line, name)) = place {
                match shared.membership(&name, &controller, ana.map(|(_, ana)| ana)) {
                    Ok(place) => controller.subsystem = Some(place),
                    Err(why) => self.errors.push((line, why)),
                }
            }
            let served = SocketConfig { id, socket, controller, worker, origin };
            // Ids must be unique. Controllers without an id are identified by their sockets, which
            // are compared below.
            if let Some(id) = &served.id {
                let first = ids.insert(id.clone(), line);
                self.refuse_second(line, first, format_args!("the id `{id}`"));
            }
            let first = sockets.insert(served.absolute_socket(), line);
            let socket = served.socket.display();
            self.refuse_second(line, first, format_args!("the socket {socket}"));
            controllers.push(served);
        }
        if self.check_item.is_some()
            && let Some((nth, why)) = duplicate_disk_at(&controllers)
        {
            self.errors.push((disk_lines.get(nth).copied().unwrap_or(1), why));
        }
        for path in file.paths.iter().flat_map(|paths| &paths.allow) {
            let line = self.line(path);
            self.check_item(line, Item::Allowed(path.get_ref()));
        }
        if let Some(path) = &file.trace {
            let line = self.line(path);
            self.check_item(line, Item::Trace(path.get_ref()));
        }
        self.check_references(&controllers, |served| {
            sockets.get(&served.absolute_socket()).copied()
        });
        let allow = file.paths.map(|paths| paths.allow).unwrap_or_default();
        ServerConfig {
            disks: self.disks.clone(),
            exports: self.exports(file.export, &controllers),
            controllers,
            pool,
            trace: file.trace.map(|path| (path.into_inner(), records.unwrap_or(TRACE_RECORDS))),
            measure: file.measure,
            control: SocketPath { name, path: file.control_socket },
            default_name: String::new(),
            state_dir: file.state_dir,
            metrics: file.metrics,
            metrics_hosts: file.metrics_hosts,
            groups,
            socket_access: SocketAccess { mode, group },
            allow: allow.into_iter().map(Spanned::into_inner).collect(),
            polls_for_mapped: false,
        }
        .with_default_polling(is_polling_open)
    }

    fn group(&mut self, table: &Spanned<GroupTable>) -> Group {
        let GroupTable { name, limits: texts } = table.get_ref();
        if let Err(why) = limits::check_name(name) {
            self.refuse_key(table, "name", why);
        }
        let mut limits = Limits::default();
        for (key, rate) in texts {
            let text = match rate {
                Rate::Number(number) => &number.to_string(),
                Rate::Text(text) => text,
            };
            match limits.set(key, text) {
                Ok(true) => {}
                Ok(false) => {
                    self.refuse_key(table, key, format!("a limit group has no `{key}`"));
                }
                Err(why) => self.refuse_key(table, key, why),
            }
        }
        Group { name: name.clone(), limits }
    }

    fn controller(&mut self, table: ControllerTable) -> ControllerConfig {
        let line = table.disks.as_ref().map(|disks| self.line(disks));
        let line = line.unwrap_or_else(|| self.line(&table.socket));
        let entries = table.disks.map(Spanned::into_inner).unwrap_or_default();
        if entries.is_empty() && table.pool.is_none() {
            self.errors.push((line, "a controller has one disk at least, or a `pool`".to_owned()));
        }
        let mut disks: Vec<DiskConfig> = Vec::new();
        for entry in entries {
            let line = self.line(&entry);
            let disk = self.disk(entry);
            if let Some(id) = &disk.id
                && disks.iter().any(|other| other.id == disk.id)
            {
                let why = format!("the controller has the disk `{id}` twice: name it once");
                self.errors.push((line, why));
                continue;
            }
            disks.push(disk);
        }
        let pool = table.pool.and_then(|text| {
            let pool = text.get_ref().parse::<PoolSpec>();
            pool.map_err(|why| self.refuse(&text, format!("`pool`: {why}"))).ok()
        });
        if let Err(why) = check_nsids(&disks) {
            self.errors.push((line, why));
        }
        let max_transfer = table.max_transfer.and_then(|value| {
            let size = shadowbell_disk::parse_size(value.get_ref());
            let size = size.and_then(|size| check_max_transfer(size).map(|()| size));
            size.map_err(|why| self.refuse(&value, format!("`max-transfer`: {why}"))).ok()
        });
        let texts = [
            table.serial.as_ref().map(|text| (text, check_serial(text.get_ref()))),
            table.model.as_ref().map(|text| (text, check_model(text.get_ref()))),
        ];
        for (text, outcome) in texts.into_iter().flatten() {
            if let Err(why) = outcome {
                self.refuse(text, why);
            }
        }
        ControllerConfig {
            disks,
            serial: table.serial.map(Spanned::into_inner),
            model: table.model.map(Spanned::into_inner),
            queues: self.number("queues", table.queues, 1..=64),
            queue_entries: self.number("queue-entries", table.queue_entries, 2..=4096),
            max_transfer,
            doorbells: table.doorbells,
            read_only: table.read_only,
            pool,
            subsystem: None,
        }
    }

    fn disk(&mut self, entry: Spanned<DiskEntry>) -> DiskConfig {
        let DiskTable { disk, uuid, nsid, share } = match entry.get_ref() {
            DiskEntry::Plain(disk) => {
                DiskTable { disk: disk.clone(), uuid: None, nsid: None, share: false }
            }
            DiskEntry::Table(table) => table.clone(),
        };
        let uuid = uuid.and_then(|text| {
            let uuid = parse_uuid(&text);
            if uuid.is_none() {
                self.refuse(&entry, invalid_uuid_text(&text));
            }
            uuid
        });
        let named = self.disks.iter().find(|named| named.id == disk).cloned();
        if let Some(NamedDisk { id, spec, .. }) = named {
            return DiskConfig { id: Some(id), share, ..DiskConfig::with(spec, uuid, nsid) };
        }
        let line = self.line(&entry);
        self.check_disk([line, line], &disk);
        DiskConfig { share, ..DiskConfig::with(disk, uuid, nsid) }
    }

    /// Validates the specification of a disk. `lines`: lines of the disk and of its limits.
    fn check_disk(&mut self, lines: [usize; 2], spec: &str) {
        let [line, limits_line] = lines;
        self.check_item(line, Item::Disk(spec));
        // An unknown limit group is refused. Otherwise a misspelt name would create a group without
        // limits.
        let (_, limits) = DiskLimits::split(spec).unwrap_or_default();
        if let Some(group) = limits.group.filter(|group| !self.groups.contains(group)) {
            let why = format!(
                "there is no `[[limit-group]]` `{group}` for this disk: add one of this name, or \
                 correct the name"
            );
            self.errors.push((limits_line, why));
        }
    }

    fn named_disk(&mut self, table: &Spanned<NamedDiskTable>) {
        let id = table.get_ref().id.clone();
        if let Err(why) = check_id(&id) {
            self.refuse_key(table, "id", why);
        }
        if self.disks.iter().any(|other| other.id == id) {
            let why = format!("the id `{id}` is that of another disk too: give each its own");
            self.refuse_key(table, "id", why);
        }
        match table.get_ref().spec() {
            Ok(spec) => {
                let lines = [self.line_in(table, "source"), self.line_in(table, "limits")];
                self.check_disk(lines, &spec);
                let origin = Some(format!("{}:{}", self.name, self.line(table)));
                self.disks.push(NamedDisk { id, spec, origin });
            }
            Err((key, why)) => self.refuse_key(table, key, why),
        }
    }

    fn exports(
        &mut self,
        tables: Vec<Spanned<ExportConfig>>,
        controllers: &[SocketConfig],
    ) -> Vec<ExportConfig> {
        let of_controllers = controllers.iter().flat_map(|served| {
            nsids(&served.controller.disks).map(|nsid| format!("{}/{nsid}", served.id()))
        });
        let named = self.disks.iter().map(|disk| disk.id.clone());
        let disks: HashSet<_> = named.chain(of_controllers).collect();
        let mut ids = HashSet::new();
        // Writer of each disk: the text that names the writer, and whether the writer permits
        // another one.
        let mut writers: HashMap<String, (String, bool)> = HashMap::new();
        for served in controllers.iter().filter(|served| !served.controller.read_only) {
            let disks = &served.controller.disks;
            let writable = nsids(disks).zip(disks);
            for (nsid, disk) in writable.filter(|(_, disk)| !disk_spec::is_read_only(&disk.disk)) {
                let id = disk.id.clone().unwrap_or_else(|| format!("{}/{nsid}", served.id()));
                let writer = format!("namespace {nsid} of {}", served.id());
                writers.entry(id).or_insert((writer, disk.share));
            }
        }
        for table in &tables {
            let ExportConfig { id, disk, read_only, share, .. } = table.get_ref();
            let spec = self.disks.iter().find(|known| known.id == *disk).map(|known| &known.spec);
            if !*read_only && !spec.is_some_and(|spec| disk_spec::is_read_only(spec)) {
                let own = (format!("the export {id}"), *share);
                match writers.get(disk).filter(|(_, shared)| !(*shared && *share)) {
                    Some((writer, _)) => {
                        let why = format!(
                            "the disk `{disk}` is written by {writer}: give one of them `read-only`, \
                             or set `share` for both, if the programs that write can share a disk"
                        );
                        self.refuse_key(table, "disk", why);
                    }
                    None => drop(writers.entry(disk.clone()).or_insert(own)),
                }
            }
            if let Err(why) = check_id(id) {
                self.refuse_key(table, "id", why);
            }
            if !ids.insert(id.clone()) {
                let why = format!("the id `{id}` is that of another export too: give each its own");
                self.refuse_key(table, "id", why);
            }
            if !disks.contains(disk) {
                let why = format!(
                    "there is no disk `{disk}`: give the `id` of a `[[disk]]`, or CONTROLLER/NSID"
                );
                self.refuse_key(table, "disk", why);
            }
            match table.get_ref().protocol() {
                Ok(_) => {
                    let line = self.line_in(table, "tls-certificates");
                    self.check_item(line, Item::Export(table.get_ref()));
                }
                Err(why) => self.refuse(table, why),
            }
            if table.get_ref().ublk.is_some() {
                self.refuse_key(
                    table,
                    "ublk",
                    "a ublk device is created by `shadowbell export --ublk`",
                );
            }
            if table.get_ref().mounted != Mounted::default() || table.get_ref().owner.is_some() {
                let is_owner = table.get_ref().owner.is_some();
                let key = if is_owner { "owner" } else { "mounted" };
                self.refuse_key(table, key, "`mounted` and `owner` are no keys of a configuration");
            }
            if table.get_ref().fuse.is_some() {
                let why = "a FUSE file is mounted by `shadowbell ctl export add --fuse`, which passes \
                           it to the running server: leave this export out";
                self.refuse_key(table, "fuse", why);
            }
        }
        tables.into_iter().map(Spanned::into_inner).collect()
    }

    /// Refuses a named disk that two controllers use, unless both are in the same subsystem.
    fn check_references(
        &mut self,
        controllers: &[SocketConfig],
        line: impl Fn(&SocketConfig) -> Option<usize>,
    ) {
        let mut seen: HashMap<&str, Option<&str>> = HashMap::new();
        for served in controllers {
            let subsystem = served.controller.subsystem.as_ref().map(|place| &place.name[..]);
            for id in served.controller.disks.iter().filter_map(|disk| disk.id.as_deref()) {
                let Some(before) = seen.insert(id, subsystem) else { continue };
                if before.is_none() || before != subsystem {
                    let why = format!(
                        "the disk `{id}` is that of another controller too: give each its own, or \
                         make them controllers of one `[[subsystem]]`"
                    );
                    self.errors.push((line(served).unwrap_or(1), why));
                }
            }
        }
    }
}

/// Checks an id, which must fit into a path component of the HTTP API.
pub fn check_id(id: &str) -> Result<(), String> {
    let fits = (1..=100).contains(&id.len());
    let is_fine = |b: u8| b.is_ascii_alphanumeric() || b"-_.:".contains(&b);
    match fits && id.bytes().all(is_fine) {
        true => Ok(()),
        false => {
            Err(format!("`{id}` is no id: it has 1 to 100 letters, digits, `-`, `_`, `.`, `:`"))
        }
    }
}

/// Checks that the NSIDs are valid and ascend in the order of the disks.
pub fn check_nsids(disks: &[DiskConfig]) -> Result<(), String> {
    let all: Vec<_> = nsids(disks).collect();
    let fits = |nsid: &u32| (1..=MAX_NAMESPACES as u32).contains(nsid);
    match all.iter().all(fits) && all.is_sorted_by(|a, b| a < b) {
        true => Ok(()),
        false => Err(format!(
            "the `nsid` of each disk is 1 to {MAX_NAMESPACES}, and larger than that of the disk \
             before; these are {all:?}"
        )),
    }
}

mod disks;
pub mod reference;
mod shared;
pub mod write;
use disks::NamedDiskTable;
use shared::{AnaStates, SubsystemTable, Subsystems};

#[cfg(test)]
mod tests;
