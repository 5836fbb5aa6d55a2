//! Command line of `serve`.

use super::server_config::{
    MAX_POLL_US, MAX_WORKERS, Poll, ServerConfig, SocketConfig, TRACE_RECORDS, pool_options,
};
use super::socket_access::{self, SocketAccess};
use super::worker_link::Role;
use super::{config_file, sandbox, stats_file};
use crate::control::place::{self, Place};
use crate::controller_config::{ControllerConfig, DiskConfig, OfferedDoorbells};
use crate::cpu_list::{self, CpuList};
use crate::exit::bad_input;
use crate::parse;
use crate::pool::PoolSpec;
use anyhow::{Context, anyhow};
use shadowbell_controller::PoolOptions;
use shadowbell_controller::trace::TraceFile;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

/// Serve disks as an NVMe controller to a virtual machine, over a vfio-user socket
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// A namespace each: disk.img, /dev/sdb, /dev/ng0n1, disk.qcow2, mem:1GiB, null:1TiB, an export
    /// of an NBD server, nbd://host/export, nbd+unix:///export?socket=PATH, an image of Ceph's,
    /// rbd:pool/image, or a namespace of another controller, nvme://0000:01:00.0/1,
    /// vfio-user:/run/ssd.sock/1; options as in `disk.img?block-size=4096&read-only=on`
    #[arg(value_name = "DISK", required_unless_present_any = ["config", "check", "namespaces"])]
    disks: Vec<String>,

    /// Where to listen; a directory for SPDK (the socket is `cntrl` in there)
    #[arg(long, value_name = "PATH", required_unless_present_any = ["config", "check"])]
    socket: Option<PathBuf>,

    /// Serve many controllers, as a TOML file describes them; see below
    #[arg(long, value_name = "FILE", conflicts_with_all = ["disks", "socket", "controller", "pool"])]
    config: Option<PathBuf>,

    /// Check such a file, as far as that is possible without opening what it names, and serve
    /// nothing
    #[arg(long, value_name = "FILE", conflicts_with_all = ["disks", "socket", "config", "controller", "pool"])]
    pub(super) check: Option<PathBuf>,

    /// Let the guest make namespaces, format and sanitize them: files in this directory, which have
    /// so much together at most, as in `/srv/pool?capacity=1TiB`
    #[arg(long = "pool", id = "namespaces", value_name = "DIR?capacity=SIZE", conflicts_with_all = ["config", "check"])]
    namespaces: Option<PoolSpec>,

    #[command(flatten)]
    controller: ControllerArgs,

    #[command(flatten)]
    pool: PoolArgs,

    /// Record every decision about a doorbell in this file, for `shadowbell trace`
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// How many records to keep of each worker; older ones give way
    #[arg(long, value_name = "N", requires = "trace", value_parser = clap::value_parser!(u32).range(1024..=1 << 24))]
    trace_records: Option<u32>,

    /// Measure how long commands take, by namespace, for `/metrics` and `shadowbell top`
    #[arg(long)]
    measure: bool,

    /// Write counters to this file, at the end and on SIGUSR1
    #[arg(long, value_name = "FILE")]
    stats_json: Option<PathBuf>,

    /// Let `shadowbell top` of the same user look at the counters, over a socket here
    #[arg(long, value_name = "PATH")]
    stats_socket: Option<PathBuf>,

    /// Where the control socket is, for `shadowbell ctl` [default:
    /// /run/shadowbell/NAME/control.sock, or below $XDG_RUNTIME_DIR for a user who is not root]
    #[arg(long, value_name = "PATH")]
    control_socket: Option<PathBuf>,

    /// What the server is called [default: the name of the configuration file, or of the socket]
    #[arg(long, value_name = "NAME", value_parser = place::check_name)]
    name: Option<String>,

    /// The mode of the sockets at which controllers are served, as in 0660 [default: what the umask
    /// leaves]
    #[arg(long, value_name = "MODE", value_parser = socket_access::parse_mode)]
    socket_mode: Option<u32>,

    /// Their group, a name or a number [default: that of the process]
    #[arg(long, value_name = "GROUP", value_parser = existing_group)]
    socket_group: Option<String>,

    /// Show metrics at http://ADDR:PORT/metrics, to whoever can reach it
    #[arg(long, value_name = "ADDR:PORT")]
    metrics: Option<SocketAddr>,

    /// Serve in the process that is started, without a keeper: it can not be replaced while it
    /// serves (`shadowbell upgrade`), and its death ends the disks of its guests
    #[arg(long, conflicts_with = "keeper")]
    no_keeper: bool,

    /// Have a keeper: as it is anyway
    #[arg(long, hide = true)]
    keeper: bool,

    /// Give up what the process that serves does not need, before it reads anything of a guest's:
    /// system calls, files other than those it is handed, new privileges. With auto as far as the
    /// system and the disks let it; without a keeper not files
    #[arg(long, value_enum, value_name = "WHEN", default_value_t)]
    sandbox: sandbox::Mode,

    /// Have the process that serves be this user's, a name or UID:GID; the keeper stays root's
    #[arg(long, value_name = "USER", value_parser = sandbox::parse_user)]
    user: Option<sandbox::User>,

    /// Let a server in a sandbox open all images below this directory, and make sockets there, when
    /// the control socket asks for it
    #[arg(long, value_name = "DIRECTORY")]
    allow: Vec<PathBuf>,

    /// How a keeper starts it
    #[arg(long, value_enum, hide = true, conflicts_with = "no_keeper")]
    pub(super) as_worker: Option<Role>,

    #[cfg(feature = "faults")]
    #[command(flatten)]
    pub(super) faults: super::faults::FaultArgs,
}

const AFTER_HELP: &str = "\
SIGINT, SIGTERM and SIGHUP end the service; a second one does not wait for the guests. With \
--config, SIGHUP has the file read again, as `shadowbell ctl apply` does: controllers come, go and \
change, a bad file is refused as a whole, and so is one that takes a controller from a client. \
One of them that whoever starts it has set to be ignored stays so, as SIGINT is in a script's \
`shadowbell serve ... &`, and SIGHUP under nohup: SIGTERM is what ends it then. \
SIGUSR1 writes the counters.

The process that was started is a keeper, which starts the one that serves. These are signals to \
the keeper. `shadowbell upgrade` or SIGUSR2 to it replace the process that serves, and then the \
keeper, by the program that is now at its path; guests keep their controllers. If the process that \
serves dies, another one goes on with its guests. A disk `mem:` is shared memory. With --no-keeper \
all of that is not so, and one process does everything. Under systemd: Type=notify, ExecReload=kill -HUP $MAINPID, and WatchdogSec=60 has a process that hangs give way to \
another. With Restart=on-failure, FileDescriptorStoreMax=16 and Environment=FDSTORE=16 guests keep \
their controllers when the keeper is killed.

The process that serves is in a sandbox, and the log says at the start what that holds for; unless \
there is no keeper also for files: images are opened by the keeper. Disks nbd:, rbd:, nvme:// and vfio-user: \
have none.

Options of a disk, as in `disk.img?direct=on&iops=1000`:

  read-only=on|off        refuse writes; with off, fail if the file can not be written
  block-size=512|4096     bytes of a block
  uuid=UUID               by which guests know it, wherever it is [default: made of serial and path]
  direct=on|off|auto      of a file: bypass the page cache
  aio=io_uring|threads    of a file: how it is read and written [default: io_uring if there is one]
  format=raw|qcow2        of a file: what is in it, instead of by its first bytes
  allow-backing=on        of a qcow2 image: it may name another file, of which it is the difference
  socket=PATH             of nbd+unix:///EXPORT: where the server is
  connections=N           of nbd: how many, if the server allows several [default: 4]
  replay=SIZE|off         of nbd: how much is kept until it is flushed, to be written again to a
                          server that was restarted [default: 64MiB]
  tls-certificates=DIR    of nbds://HOST/EXPORT, nbds+unix: an NBD server by TLS: ca-cert.pem, and
                          client-cert.pem with client-key.pem if it wants to know its clients
  tls-hostname=NAME       of nbds: what the server's certificate is for [default: HOST, localhost]
  settle=SECONDS          of nbd: how long its server may go on with writes of a process that has
                          died; the next one, under a keeper, waits for that
  conf=FILE, id=USER,     of rbd:POOL/IMAGE[@SNAPSHOT]: the cluster's configuration, the user
  namespace=NAME          [default: admin], the namespace in the pool
  read-zeroes=on          of null: reads give zeroes
  zero-copy=off           of nvme:// and vfio-user: go through memory of this process
  iops=N[:BURST], read-iops=, write-iops=, bandwidth=SIZE[:BURST], read-bandwidth=,
  write-bandwidth=        a second takes no more; what comes too early waits
  limit-group=NAME        share the limits of this group, too

A configuration file:

  trace = \"/var/tmp/shadowbell.trace\"        # all of these lines may be left out
  measure = true                             # commands by namespace, for `/metrics` and `top`
  stats-json = \"/run/shadowbell.json\"
  stats-socket = \"/run/shadowbell.stats\"    # for `shadowbell top`
  name = \"vms\"                               # for `shadowbell ctl --server vms`
  control-socket = \"/run/vms.control\"        # another place for it
  socket-mode = \"0660\"                      # of the sockets of controllers
  socket-group = \"kvm\"
  metrics = \"127.0.0.1:9477\"
  workers = 2                                # threads that do the I/O
  pin = [2, 3]                               # processors to pin them to
  poll = \"adaptive\"                          # or \"always\", \"never\"
  poll-max-us = 100

  [[limit-group]]                            # disks with `limit-group=db` share it
  name = \"db\"
  write-bandwidth = \"500MiB\"

  [[controller]]
  id = \"vm0\"                                # for `shadowbell ctl`; without it, the socket
  socket = \"/run/vm0.sock\"
  disks = [\"vm0.img\", { disk = \"mem:1GiB\", uuid = \"0190163d-8694-739b-aea5-966c26f8ad91\" }]

  [[controller]]
  socket = \"/run/vm1.sock\"
  disks = [\"/dev/vg/vm1\", { disk = \"vm1.img?iops=5000&limit-group=db\", nsid = 7 }]
  serial = \"VM1\"
  model = \"Shadowbell NVMe Controller\"
  doorbells = \"shadow\"                       # or \"mmio\", \"mapped\"
  queues = 16
  queue-entries = 1024
  max-transfer = \"1MiB\"
  read-only = false
  pool = \"/srv/vm1?capacity=1TiB\"             # namespaces that the guest makes
  worker = \"own\"                            # a thread for it alone; or a worker's number, from 0

A file with `controller = []` serves none at first; `shadowbell ctl controller add` does.

Guests of one process share its workers, which give each its part of their time. Whoever sells \
virtual machines to strangers starts a process for each of them: then they share nothing here.

Exit status:
  0  ended by a signal
  1  it can not go on, or a disk may have lost what it was given
  2  it can not be served as asked: the command line, the file, a disk or a path";

/// Properties of a controller.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(id = "controller", multiple = true)]
pub(super) struct ControllerArgs {
    /// How doorbells come to the controller
    #[arg(long, value_enum, value_name = "HOW", default_value_t, hide_default_value = false)]
    doorbells: OfferedDoorbells,

    /// The same as `--doorbells mmio`
    #[arg(long, conflicts_with = "doorbells")]
    no_shadow_doorbells: bool,

    /// Most I/O queue pairs of the guest, 1 to 64 [default: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: Option<u16>,

    /// Most entries of a queue, 2 to 4096 [default: 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=4096))]
    queue_entries: Option<u32>,

    /// The largest transfer of one command, a power of two from 1MiB to 16MiB [default: 1MiB]
    #[arg(long, value_name = "SIZE", value_parser = parse::size)]
    max_transfer: Option<u64>,

    /// Serial number, at most 20 characters [default: made from the path of the socket]
    #[arg(long, value_name = "TEXT")]
    serial: Option<String>,

    /// Model number, at most 40 characters
    #[arg(long, value_name = "TEXT")]
    model: Option<String>,

    /// Take no writes, whatever the disks allow
    #[arg(long)]
    read_only: bool,
}

/// I/O threads.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(id = "pool", multiple = true)]
pub(super) struct PoolArgs {
    /// Threads that do the I/O [default: one for every two processors, or as many as --pin names]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_WORKERS)))]
    workers: Option<u16>,

    /// Pin the workers to these processors, in order: 2,3 or 4-7
    #[arg(long, value_name = "CPUS", value_parser = cpu_list::parse)]
    pin: Option<CpuList>,

    /// When a worker without work sleeps: after a time that adapts, never, or at once
    #[arg(long, value_enum, value_name = "WHEN")]
    poll: Option<Poll>,

    /// The longest that a worker polls before it sleeps, in microseconds [default: 100]
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_POLL_US)))]
    poll_max: Option<u32>,
}

impl Args {
    /// Returns true if a configuration file was given.
    pub(super) fn has_file(&self) -> bool {
        self.config.is_some()
    }

    /// Options of the sandbox.
    pub(super) fn sandbox(&self) -> sandbox::Asked {
        let (mode, user, allow) = (self.sandbox, self.user.clone(), self.allow.clone());
        sandbox::Asked { mode, user, allow, config: self.config.clone() }
    }

    /// Configuration from the command line and the file.
    ///
    /// # Errors
    /// The file is invalid, or the options contradict each other.
    pub(crate) fn config(self) -> anyhow::Result<ServerConfig> {
        let trace = self.trace.map(|path| (path, self.trace_records.unwrap_or(TRACE_RECORDS)));
        let names = self.config.as_deref().or(self.socket.as_deref());
        let default_name = names.map(place::name_from).unwrap_or_default();
        let is_polling_open = self.pool.poll.is_none() && self.pool.poll_max.is_none();
        let mut config = match self.config {
            Some(path) => config_file::read(&path)?,
            None => ServerConfig {
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
                trace: None,
                measure: false,
                stats_json: None,
                stats_socket: None,
                control: Place::default(),
                default_name: String::new(),
                metrics: None,
                groups: Vec::new(),
                socket_access: SocketAccess::default(),
                polls_for_mapped: false,
            }
            .settled(is_polling_open),
        };
        config.trace = trace.or(config.trace);
        config.measure |= self.measure;
        config.stats_json = self.stats_json.or(config.stats_json);
        config.stats_socket = self.stats_socket.or(config.stats_socket);
        config.default_name = default_name;
        config.metrics = self.metrics.or(config.metrics);
        let SocketAccess { mode, group } = config.socket_access;
        config.socket_access =
            SocketAccess { mode: self.socket_mode.or(mode), group: self.socket_group.or(group) };
        let Place { name, path } = config.control;
        config.control = Place { name: self.name.or(name), path: self.control_socket.or(path) };
        if let Some(path) = &config.stats_json {
            let checked = check_output(path).and_then(|()| stats_file::check(path));
            checked.context("--stats-json").map_err(bad_input)?;
        }
        if let Some((path, _)) = &config.trace {
            let checked = check_output(path).and_then(|()| Ok(TraceFile::check(path)?));
            checked.context("--trace").map_err(bad_input)?;
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

/// Checks that a file can be created at `path`, as far as possible without creating it.
fn check_output(path: &Path) -> anyhow::Result<()> {
    if path == Path::new("-") {
        return Err(anyhow!("standard output is no place for it; a file of that name is `./-`"));
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
