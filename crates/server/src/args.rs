//! Command line of `serve`.

use super::sandbox;
use super::worker_link::Role;
use anyhow::{Context, anyhow};
use shadowbell_config::config_file;
use shadowbell_config::controller_config::{ControllerConfig, DiskConfig, OfferedDoorbells};
use shadowbell_config::cpu_list::{self, CpuList};
use shadowbell_config::export_config::ExportConfig;
use shadowbell_config::parse;
use shadowbell_config::pool::PoolSpec;
use shadowbell_config::server_config::{
    MAX_POLL_US, MAX_WORKERS, NamedDisk, Poll, ServerConfig, SocketConfig, TRACE_RECORDS,
    pool_options,
};
use shadowbell_config::socket_access::{self, SocketAccess};
use shadowbell_config::socket_path::{self, SocketPath};
use shadowbell_controller::PoolOptions;
use shadowbell_controller::trace::TraceFile;
use shadowbell_process::exit::{self, bad_input};
use shadowbell_storage::disk_reference::{self, OptionReference};
use shadowbell_supervisor::DEFAULT_STOP_TIMEOUT;
use shadowbell_supervisor::permissions::Permissions;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Serve disks as an NVMe controller to a virtual machine, over a vfio-user socket
#[derive(Clone, Debug, Default, clap::Args)]
#[command(after_help = after_help())]
pub struct Args {
    /// Disks, one per namespace: disk.img, /dev/sdb, /dev/ng0n1, disk.qcow2, mem:1GiB, null:1TiB,
    /// an NBD export, nbd://host/export, nbd+unix:///export?socket=PATH, a Ceph RBD image,
    /// rbd:pool/image, or a namespace of another controller, nvme://0000:01:00.0/1,
    /// vfio-user:/run/ssd.sock/1; options as in `disk.img?block-size=4096&read-only=on`
    #[arg(value_name = "DISK", required_unless_present_any = ["config", "check", "namespaces"])]
    disks: Vec<String>,

    /// Path of the vfio-user socket; for SPDK a directory (the socket is `cntrl` in it)
    #[arg(long, value_name = "PATH", required_unless_present_any = ["config", "check"])]
    socket: Option<PathBuf>,

    /// Serve the controllers of a TOML configuration file; see below
    #[arg(long, value_name = "FILE", conflicts_with_all = ["disks", "socket", "controller", "pool"])]
    config: Option<PathBuf>,

    /// Check a configuration file without opening disks and sockets, and serve nothing, as
    /// `shadowbell config check` does
    #[arg(long, value_name = "FILE", conflicts_with_all = ["disks", "socket", "config", "controller", "pool"])]
    pub(super) check: Option<PathBuf>,

    /// Let the guest create, format and sanitize namespaces: files in this directory, with a
    /// total capacity, as in `/srv/pool?capacity=1TiB`
    #[arg(long = "pool", id = "namespaces", value_name = "DIR?capacity=SIZE", conflicts_with_all = ["config", "check"])]
    namespaces: Option<PoolSpec>,

    #[command(flatten)]
    controller: ControllerArgs,

    #[command(flatten)]
    pool: PoolArgs,

    /// Record every doorbell decision in this file, for `shadowbell trace`
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// Number of trace records per I/O thread; newer records overwrite older ones
    #[arg(long, value_name = "N", requires = "trace", value_parser = clap::value_parser!(u32).range(1024..=1 << 24))]
    trace_records: Option<u32>,

    /// Measure command latency by namespace, for `/metrics` and `shadowbell top`
    #[arg(long)]
    measure: bool,

    /// Name of the server [default: the name of the configuration file, or of the socket]
    #[arg(long, value_name = "NAME", value_parser = socket_path::check_name)]
    name: Option<String>,

    #[command(flatten)]
    pub(super) service: ServiceArgs,

    /// Disk and exports of `shadowbell export`, instead of controllers.
    #[arg(skip)]
    pub(super) exported: Option<Exported>,
}

/// Options of the verbs that serve: `serve` and `export`.
#[derive(Clone, Debug, Default, clap::Args)]
pub(super) struct ServiceArgs {
    /// Path of the control socket, for `shadowbell ctl` [default:
    /// /run/shadowbell/NAME/control.sock, or below $XDG_RUNTIME_DIR for a user other than root]
    #[arg(long, value_name = "PATH")]
    control_socket: Option<PathBuf>,

    /// Directory of the UUIDs that are generated for disks without `uuid` [default:
    /// /var/lib/shadowbell, or $XDG_STATE_HOME/shadowbell for a user other than root]
    #[arg(long, value_name = "DIRECTORY")]
    state_dir: Option<PathBuf>,

    /// Mode of the controllers' sockets, as in 0660 [default: set by the umask]
    #[arg(long, value_name = "MODE", value_parser = socket_access::parse_mode)]
    socket_mode: Option<u32>,

    /// Group of the controllers' sockets, a name or a number [default: that of the process]
    #[arg(long, value_name = "GROUP", value_parser = existing_group)]
    socket_group: Option<String>,

    /// Serve metrics at http://ADDR:PORT/metrics, without access control
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<SocketAddr>,

    /// Host name by which clients may address the metrics, besides IP addresses and localhost
    #[arg(long, value_name = "NAME")]
    metrics_host: Vec<String>,

    /// Serve in the started process itself, without a supervisor: no `shadowbell upgrade`, and a
    /// crash ends the disks of all guests
    #[arg(long, conflicts_with = "supervisor")]
    no_supervisor: bool,

    /// Run a supervisor (the default)
    #[arg(long, hide = true)]
    supervisor: bool,

    /// Drop privileges before the server process reads guest data: system calls, access to other
    /// files, new privileges. With auto as far as the system and the disks permit; file access
    /// only with a supervisor
    #[arg(long, value_enum, value_name = "WHEN", default_value_t)]
    sandbox: sandbox::Mode,

    /// Run the server process as this user, a name or UID:GID; the supervisor stays root
    #[arg(long, value_name = "USER", value_parser = sandbox::parse_user)]
    user: Option<sandbox::User>,

    /// Permit a sandboxed server to open images and to create sockets below this directory, when
    /// the control socket requests that
    #[arg(long, value_name = "DIRECTORY")]
    allow: Vec<PathBuf>,

    /// End within this time after SIGTERM, even if the storage has not answered all requests. The
    /// log then lists them, and the exit status is 5. Not counted: the wait until mounted files
    /// (FUSE) and block devices (ublk) are unused, as long as their storage answers
    #[arg(long, value_name = "TIME", default_value_t = DEFAULT_STOP_TIMEOUT)]
    #[arg(value_parser = parse::seconds(1..=86400))]
    pub(super) stop_timeout: u64,

    /// Time after which a disk whose storage does not answer a request is `stalled`: in the log,
    /// `top`, `ctl disk ls` and metrics
    #[arg(long, value_name = "TIME", default_value_t = 5)]
    #[arg(value_parser = parse::seconds(1..=86400))]
    pub(super) stalled_after: u64,

    /// Start mode, set by the supervisor
    #[arg(long, value_enum, hide = true, conflicts_with = "no_supervisor")]
    pub(super) as_worker: Option<Role>,

    #[cfg(feature = "faults")]
    #[command(flatten)]
    pub(super) faults: super::faults::FaultArgs,
}

/// Id of the disk of `export`.
pub(super) const DISK: &str = "disk";

/// Disk and exports of the command line.
#[derive(Clone, Debug)]
pub(super) struct Exported {
    /// Path from which the default name of the server is derived.
    pub(super) named: PathBuf,
    /// Specification of the disk.
    pub(super) disk: String,
    /// Target of `export`, as written on the command line.
    pub(super) target: String,
    pub(super) exports: Vec<ExportConfig>,
}

impl Exported {
    /// Configuration of the server.
    pub(super) fn config(self) -> ServerConfig {
        ServerConfig {
            disks: vec![NamedDisk { id: DISK.to_owned(), spec: self.disk, origin: None }],
            exports: self.exports,
            // One I/O thread is enough, because there is no controller.
            pool: PoolOptions { workers: 1, ..PoolOptions::default() },
            ..ServerConfig::default()
        }
    }
}

const AFTER_HELP: &str = "\
SIGINT, SIGTERM and SIGHUP end the service; a second one does not wait for the guests, and storage \
that hangs is waited for until --stop-timeout. With \
--config, SIGHUP reloads the file, as `shadowbell ctl apply` does: controllers are added, removed \
and changed; an invalid file is refused as a whole, and so is one that takes a controller from a \
client. Signals that were ignored at start-up stay ignored, as SIGINT in a script's \
`shadowbell serve ... &` and SIGHUP under nohup; SIGTERM always ends the service. \
SIGUSR1 writes the statistics.

The started process is a supervisor, which starts the server process. The signals are for the \
supervisor. `shadowbell upgrade`, or SIGUSR2 to the supervisor, replaces the server process, and \
then the supervisor, by the program that is now at its path; guests keep their controllers. If the \
server process crashes, another one recovers its guests. A disk `mem:` is shared memory. With \
--no-supervisor, one process does everything, without upgrade and recovery. Under systemd: \
Type=notify, ExecReload=kill -HUP $MAINPID, and WatchdogSec=60 to replace a server process that \
hangs. With Restart=on-failure, FileDescriptorStoreMax=16 and Environment=FDSTORE=16 guests keep \
their controllers when the supervisor is killed.

The server process runs in a sandbox, which the log describes at the start. With a supervisor, \
which opens the images and connects to NBD servers, file access is restricted too. With disks \
rbd:, nvme://, vfio-user:, and nbd: with TLS or a host name, there is no sandbox.";

const FILE_HELP: &str = "\
A configuration file:

  trace = \"/var/tmp/shadowbell.trace\"        # all of these lines are optional
  measure = true                             # command latency, for `/metrics` and `top`
  name = \"vms\"                               # for `shadowbell ctl --server vms`
  control-socket = \"/run/vms.control\"        # path of the control socket
  socket-mode = \"0660\"                      # of the controllers' sockets
  socket-group = \"kvm\"
  metrics = \"127.0.0.1:9477\"
  state-dir = \"/var/lib/shadowbell\"          # UUIDs that were generated for disks
  metrics-hosts = [\"node1.example\"]          # names in URLs, besides IP addresses and localhost
  workers = 2                                # number of I/O threads
  pin = [2, 3]                               # CPUs to pin them to
  poll = \"adaptive\"                          # or \"always\", \"never\"
  poll-max-us = 100

  [paths]
  allow = [\"/srv/images\"]                  # images and sockets that requests may add below it

  [[limit-group]]                            # shared by disks with `limit-group=db`
  name = \"db\"
  write-bandwidth = \"500MiB\"

  [[controller]]
  id = \"vm0\"                                # for `shadowbell ctl` [default: the socket]
  socket = \"/run/shadowbell/vm0.sock\"
  disks = [\"vm0.img\", { disk = \"mem:1GiB\", uuid = \"0190163d-8694-739b-aea5-966c26f8ad91\" }]

  [[controller]]
  socket = \"/run/shadowbell/vm1.sock\"
  disks = [\"/dev/vg/vm1\", { disk = \"vm1.img?iops=5000&limit-group=db\", nsid = 7 }]
  serial = \"VM1\"
  model = \"Shadowbell NVMe Controller\"
  doorbells = \"shadow\"                       # or \"mmio\", \"mapped\"
  queues = 16
  queue-entries = 1024
  max-transfer = \"1MiB\"
  read-only = false
  pool = \"/srv/vm1?capacity=1TiB\"             # for namespaces that the guest creates
  worker = \"own\"                            # its own I/O thread; or the number of one, from 0

A file with `controller = []` serves none at first; `shadowbell ctl controller add` adds some.

Guests of one server share its I/O threads in fair shares. If your tenants do not trust each \
other, run one server per tenant: then they share nothing here.";

/// Columns of the names of disk options in the help.
const OPTION_WIDTH: usize = 26;
/// Columns of the help.
const HELP_WIDTH: usize = 98;

/// Notes of the help: signals, processes, options of disks, configuration file, exit statuses.
fn after_help() -> String {
    let options = disk_reference::all_options().into_iter().map(|(option, kinds)| {
        let OptionReference { name, value, text } = option;
        let of =
            if kinds.is_empty() { String::new() } else { format!("of {}: ", kinds.join(", ")) };
        option_lines(&format!("{name}={value}"), &format!("{of}{text}"))
    });
    exit::help(&format!(
        "{AFTER_HELP}\n\nA DISK is [SCHEME:]NAME[?OPTION=VALUE[&OPTION=VALUE]...], as in \
         `disk.img?direct=on&iops=1000`; see shadowbell-disks(7).\n\nOptions of a disk:\n\n{}\n{FILE_HELP}",
        options.collect::<String>()
    ))
}

/// Lines of an option of a disk in the help.
fn option_lines(name: &str, text: &str) -> String {
    let mut lines = format!("  {name:<OPTION_WIDTH$}");
    if name.len() >= OPTION_WIDTH {
        lines += &format!("\n  {:OPTION_WIDTH$}", "");
    }
    let mut column = OPTION_WIDTH;
    for word in text.split(' ') {
        if column + 1 + word.len() > HELP_WIDTH {
            lines += &format!("\n  {:OPTION_WIDTH$}", "");
            column = OPTION_WIDTH;
        } else if column != OPTION_WIDTH {
            lines.push(' ');
            column += 1;
        }
        lines += word;
        column += word.len();
    }
    lines.push('\n');
    lines
}

/// Properties of a controller.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(id = "controller", multiple = true)]
pub(super) struct ControllerArgs {
    /// Doorbell mechanism that the controller offers
    #[arg(long, value_enum, value_name = "HOW", default_value_t, hide_default_value = false)]
    doorbells: OfferedDoorbells,

    /// Alias of `--doorbells mmio`
    #[arg(long, conflicts_with = "doorbells")]
    no_shadow_doorbells: bool,

    /// Maximum number of I/O queue pairs, 1 to 64 [default: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: Option<u16>,

    /// Maximum queue size in entries, 2 to 4096 [default: 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=4096))]
    queue_entries: Option<u32>,

    /// Maximum transfer size of a command, a power of two from 1MiB to 16MiB [default: 1MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    max_transfer: Option<u64>,

    /// Serial number, at most 20 characters [default: derived from the path of the socket]
    #[arg(long, value_name = "TEXT")]
    serial: Option<String>,

    /// Model number, at most 40 characters
    #[arg(long, value_name = "TEXT")]
    model: Option<String>,

    /// Refuse writes, whatever the disks allow
    #[arg(long)]
    read_only: bool,
}

/// I/O threads.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(id = "pool", multiple = true)]
pub(super) struct PoolArgs {
    /// Number of I/O threads [default: one for every two CPUs, or the number of CPUs in --pin]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_WORKERS)))]
    workers: Option<u16>,

    /// Pin the I/O threads to these CPUs, in order: 2,3 or 4-7
    #[arg(long, value_name = "CPUS", value_parser = cpu_list::parse)]
    pin: Option<CpuList>,

    /// Polling of an idle I/O thread: adaptive before it sleeps, always, or never
    #[arg(long, value_enum, value_name = "WHEN")]
    poll: Option<Poll>,

    /// Maximum polling time of an idle I/O thread in microseconds [default: 100]
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_POLL_US)))]
    poll_max: Option<u32>,
}

impl Args {
    /// Creates the command line of a server that only has exports.
    pub(super) fn of_exports(service: ServiceArgs, exported: Exported) -> Self {
        Self { service, exported: Some(exported), ..Self::default() }
    }

    /// Returns true if a configuration file was given.
    pub(super) fn has_file(&self) -> bool {
        self.config.is_some()
    }

    /// Permissions of the server process. `text`: the content of the configuration file.
    ///
    /// # Errors
    /// As for [`config`](Self::config).
    pub fn permissions(&self, text: Option<&str>) -> anyhow::Result<Permissions> {
        if self.has_file() && text.is_none() {
            return Err(anyhow!("the configuration file was not read"));
        }
        let config = self.clone().config(text)?;
        let mut permissions = sandbox::permissions(self.service.user.as_ref(), &config)?;
        // UUIDs of the disks of `shadowbell export` are not stored.
        if self.exported.is_some() {
            permissions.state_directory = None;
        }
        Ok(permissions)
    }

    /// Options of the sandbox.
    pub(super) fn sandbox(&self) -> sandbox::SandboxOptions {
        sandbox::SandboxOptions { mode: self.service.sandbox, user: self.service.user.clone() }
    }

    /// Configuration from the command line and the file. `text`: the content of the file, if it
    /// was read already.
    ///
    /// # Errors
    /// The file is invalid, or the options contradict each other.
    pub fn config(self, text: Option<&str>) -> anyhow::Result<ServerConfig> {
        let trace = self.trace.map(|path| (path, self.trace_records.unwrap_or(TRACE_RECORDS)));
        let names = self.config.as_deref().or(self.socket.as_deref());
        let names = names.or_else(|| self.exported.as_ref().map(|exported| &*exported.named));
        let default_name = names.map(socket_path::name_from).unwrap_or_default();
        let is_polling_open = self.pool.poll.is_none() && self.pool.poll_max.is_none();
        let mut config = match (self.config, self.exported) {
            (_, Some(exported)) => exported.config(),
            (Some(path), None) => match text {
                Some(text) => config_file::parse(text, &path.display().to_string())
                    .map_err(|why| bad_input(anyhow!(why)))?,
                None => config_file::read(&path)?,
            },
            (None, None) => ServerConfig {
                controllers: vec![SocketConfig {
                    id: None,
                    socket: self.socket.unwrap_or_default(),
                    controller: ControllerConfig {
                        pool: self.namespaces,
                        ..self.controller.config(self.disks)
                    },
                    worker: None,
                    origin: None,
                }],
                pool: self.pool.options()?,
                ..ServerConfig::default()
            }
            .with_default_polling(is_polling_open),
        };
        config.trace = trace.or(config.trace);
        config.measure |= self.measure;
        config.default_name = default_name;
        let service = self.service;
        config.allow.extend(service.allow);
        config.state_dir = service.state_dir.or(config.state_dir);
        config.metrics = service.metrics.or(config.metrics);
        config.metrics_hosts.extend(service.metrics_host);
        let SocketAccess { mode, group } = config.socket_access;
        config.socket_access = SocketAccess {
            mode: service.socket_mode.or(mode),
            group: service.socket_group.or(group),
        };
        let SocketPath { name, path } = config.control;
        config.control =
            SocketPath { name: self.name.or(name), path: service.control_socket.or(path) };
        if let Some((path, _)) = &config.trace {
            check_trace(path)?;
        }
        Ok(config)
    }
}

impl ControllerArgs {
    /// Configuration of a controller with these disks.
    #[must_use]
    fn config(self, disks: Vec<String>) -> ControllerConfig {
        ControllerConfig {
            disks: disks.into_iter().map(DiskConfig::of).collect(),
            serial: self.serial,
            model: self.model,
            queues: self.queues,
            queue_entries: self.queue_entries,
            max_transfer: self.max_transfer,
            doorbells: if self.no_shadow_doorbells {
                OfferedDoorbells::Mmio
            } else {
                self.doorbells
            },
            read_only: self.read_only,
            pool: None,
            subsystem: None,
        }
    }
}

impl PoolArgs {
    fn options(self) -> anyhow::Result<PoolOptions> {
        let pin = self.pin.map_or_else(Vec::new, |CpuList(list)| list);
        pool_options(self.workers, pin, self.poll, self.poll_max)
            .map_err(|why| bad_input(anyhow!(why)))
    }
}

fn existing_group(text: &str) -> Result<String, String> {
    socket_access::parse_group(text).map(|_| text.to_owned())
}

/// Checks the path of the doorbell trace.
pub(super) fn check_trace(path: &Path) -> anyhow::Result<()> {
    let checked = check_output(path).and_then(|()| Ok(TraceFile::check(path)?));
    checked.context("--trace").map_err(bad_input)
}

/// Checks that a file can be created at `path`, as far as possible without creating it.
fn check_output(path: &Path) -> anyhow::Result<()> {
    if path == Path::new("-") {
        return Err(anyhow!("standard output cannot be used; for a file of that name, give `./-`"));
    }
    if path.is_dir() {
        return Err(anyhow!("{} is a directory; give the path of a file", path.display()));
    }
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if path.file_name().is_none() || !directory.is_dir() {
        return Err(anyhow!(
            "{} is in no directory: create {} first, or choose another path",
            path.display(),
            directory.display()
        ));
    }
    Ok(())
}
