//! `shadowbell ctl`: looks at a running server and changes it, by its control socket.

use crate::control::api::{
    Apply, Configuration, Controller, ControllerSpec, ControllerState, DiskSpec, LimitGroup,
    LimitSpec, LogLevel, Measure, Namespace, NamespaceChange, NamespaceSpec, Plan, Size, Status,
    Upgrade,
};
use crate::control::client::{Client, part};
use crate::control::find;
use crate::controller_config::OfferedDoorbells;
use crate::ctl_ana::{AnaArgs, ana};
use crate::ctl_plan::plan_lines;
use crate::ctl_trace::{TraceVerb, trace};
use crate::disk_spec;
use crate::exit::bad_input;
use crate::grant::{disks_of, grant};
use crate::logging::COMMON;
use crate::output::{Output, show};
use crate::parse;
use crate::replace::replace;
use crate::supervisor::client::{SupervisorClient, program};
use crate::table::Table;
use crate::units::count;
use anyhow::{Context, anyhow};
use bytesize::ByteSize;
use clap::Subcommand;
use hyper::Method;
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Look at a running server and change it
///
/// A server has a control socket, at /run/shadowbell/NAME/control.sock if it was told nothing else.
/// It answers the user that the server runs as, and root.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// The server: its name, the path of its control socket, or the path of a socket at which it
    /// serves [default: the only one that runs]
    #[arg(short, long, global = true, value_name = "NAME|PATH", help_heading = COMMON)]
    server: Option<String>,
    #[command(flatten)]
    output: Output,
    #[command(subcommand)]
    what: What,
}

const AFTER_HELP: &str = "\
The same over HTTP, for programs: docs/control.md and docs/openapi.json.

  curl --unix-socket /run/shadowbell/vm0/control.sock http://localhost/v1/status

Exit status:
  0  what was asked for was done
  1  it went wrong while it was done
  2  it can not be done as asked
  3  there is no such server, controller or namespace
  4  it is not possible as the server is now";

#[derive(Clone, Debug, Subcommand)]
enum What {
    /// Show what the server is, and how much it has to do
    Status,
    /// List the controllers
    #[command(alias = "ls")]
    Controllers {
        /// Only the controller with this id, or at this socket
        id: Option<String>,
    },
    /// Serve another controller, or one no more
    #[command(subcommand)]
    Controller(Change),
    /// Have the controllers be those of a configuration file: what is missing comes, what is too
    /// much goes, what differs in its namespaces or limits alone changes under its guest, what is
    /// the same stays untouched
    Apply {
        /// The file, as `serve --config` takes it; relative paths in it are the server's
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Say what would be done and what is otherwise then, and do nothing
        #[arg(long)]
        dry_run: bool,
        /// Take controllers and namespaces away though they have clients
        #[arg(long)]
        force: bool,
    },
    /// Write the configuration file that comes to what is served now, for `serve --config`
    SaveConfig {
        /// The file, which is replaced; `-` for standard output
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// List the namespaces
    Namespaces,
    /// Add, remove or change a namespace, while its guest goes on. A command again changes nothing
    #[command(subcommand)]
    Namespace(NamespaceVerb),
    /// Limit how much a namespace takes in a second, or a group of namespaces, or show the groups.
    /// What is not given is not limited; requests that come too early wait
    Limit(LimitArgs),
    /// Show which controllers of a subsystem are good ways to which groups of namespaces
    /// (Asymmetric Namespace Access), or change what a group is for one of them. What is under way
    /// ends first
    Ana(AnaArgs),
    /// Show all counters, as `serve --stats-json` writes them
    Stats,
    /// Record every decision about a doorbell, for `shadowbell trace`, or show whether that is so
    Trace {
        #[command(subcommand)]
        verb: Option<TraceVerb>,
    },
    /// Measure how long commands take, by namespace, for `top` and metrics, or show whether that is
    /// so. It costs each command a little
    Measure {
        /// From now on, or no more
        #[arg(value_enum)]
        switch: Option<Switch>,
    },
    /// Show what is logged, or change it
    LogLevel {
        /// error, warn, info, debug, trace; or a list, info,shadowbell_vfio_user=debug
        filter: Option<String>,
    },
    /// Have the server go on in a new process, as `shadowbell upgrade` does
    Upgrade {
        /// The program of the new process [default: what is now at the path of the running one]
        #[arg(long, value_name = "PATH")]
        binary: Option<PathBuf>,
        /// Do not wait until the new process serves
        #[arg(long)]
        no_wait: bool,
    },
    /// End the server, as SIGTERM does
    Shutdown,
}

#[derive(Clone, Debug, Subcommand)]
enum NamespaceVerb {
    /// Add a namespace to a controller
    Add {
        #[command(flatten)]
        which: Which,
        /// Its disk, as `serve` takes it
        disk: String,
        /// Its UUID [default: made from the names]
        #[arg(long)]
        uuid: Option<String>,
        /// Take no writes
        #[arg(long)]
        read_only: bool,
    },
    /// Remove a namespace; what was written to it is flushed
    Remove {
        #[command(flatten)]
        which: Which,
    },
    /// Have a namespace be as large as its file is now, or of this size
    Resize {
        #[command(flatten)]
        which: Which,
        /// The size, as in 16GiB; a file has to have as many bytes
        #[arg(value_parser = parse::size)]
        size: Option<u64>,
    },
    /// Put another disk in the place of a namespace's
    Replace {
        #[command(flatten)]
        which: Which,
        /// The new disk, with blocks of the same length
        disk: String,
    },
    /// Have a namespace take no writes, or take them
    ReadOnly {
        #[command(flatten)]
        which: Which,
        /// Whether it is read-only
        #[arg(value_enum)]
        switch: Switch,
    },
}

#[derive(Clone, Debug, clap::Args)]
struct LimitArgs {
    /// The controller: its id, or its socket
    #[arg(requires = "nsid", conflicts_with = "of_group")]
    controller: Option<String>,
    /// The number of the namespace
    #[arg(value_parser = clap::value_parser!(u32).range(1..=256))]
    nsid: Option<u32>,
    /// Not of one namespace, but of all that are in this group together
    #[arg(long, value_name = "NAME")]
    of_group: Option<String>,
    /// Reads and writes a second; and after a colon how many may come at once: 1000:5000
    #[arg(long, value_name = "N[:BURST]")]
    iops: Option<String>,
    /// Reads a second
    #[arg(long, value_name = "N[:BURST]")]
    read_iops: Option<String>,
    /// Writes a second
    #[arg(long, value_name = "N[:BURST]")]
    write_iops: Option<String>,
    /// Bytes a second, read and written: 100MiB:1GiB
    #[arg(long, value_name = "SIZE[:BURST]")]
    bandwidth: Option<String>,
    /// Bytes a second that are read
    #[arg(long, value_name = "SIZE[:BURST]")]
    read_bandwidth: Option<String>,
    /// Bytes a second that are written
    #[arg(long, value_name = "SIZE[:BURST]")]
    write_bandwidth: Option<String>,
    /// Have the namespace be in this group, too
    #[arg(long, value_name = "NAME", conflicts_with = "of_group")]
    group: Option<String>,
}

/// Which namespace.
#[derive(Clone, Debug, clap::Args)]
struct Which {
    /// The controller: its id, or its socket
    controller: String,
    /// The number of the namespace
    #[arg(value_parser = clap::value_parser!(u32).range(1..=256))]
    nsid: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Switch {
    On,
    Off,
}

#[derive(Clone, Debug, Subcommand)]
enum Change {
    /// Serve another controller. The same command again changes nothing
    Add {
        /// What it is to be called
        id: String,
        /// A namespace each, as `serve` takes them
        #[arg(value_name = "DISK", required = true)]
        disks: Vec<String>,
        /// Where it is to listen
        #[arg(long, value_name = "PATH")]
        socket: PathBuf,
        /// Serial number
        #[arg(long, value_name = "TEXT")]
        serial: Option<String>,
        /// Model number
        #[arg(long, value_name = "TEXT")]
        model: Option<String>,
        /// Most I/O queue pairs
        #[arg(long, value_name = "N")]
        queues: Option<u16>,
        /// Most entries of a queue
        #[arg(long, value_name = "N")]
        queue_entries: Option<u32>,
        /// The largest transfer of one command
        #[arg(long, value_name = "SIZE", value_parser = parse::size)]
        max_transfer: Option<u64>,
        /// How doorbells come to the controller
        #[arg(long, value_enum, value_name = "HOW", default_value_t)]
        doorbells: OfferedDoorbells,
        /// Take no writes
        #[arg(long)]
        read_only: bool,
        /// A worker's number, or `own` for a thread that serves no other controller
        #[arg(long, value_name = "WORKER")]
        worker: Option<String>,
    },
    /// Serve a controller no more
    Remove {
        /// The controller: its id, or its socket
        id: String,
        /// Take it away though it has a client
        #[arg(long)]
        force: bool,
    },
}

/// Runs the verb.
///
/// # Errors
/// There is no such server, or why it refuses.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let client = find::server(args.server.as_deref())?;
    let json = args.output.is_json();
    match &args.what {
        What::Status => show(&client.get::<Status>("/v1/status")?, json, |out, status| {
            status_lines(out, status)
        }),
        What::Controllers { id: None } => {
            show(&client.get::<Vec<Controller>>("/v1/controllers")?, json, controllers)
        }
        What::Controllers { id: Some(id) } => {
            let found: Controller = client.get(&controller_path(id))?;
            show(&vec![found], json, controllers)
        }
        What::Controller(change) => change_controllers(&client, change, json),
        What::Apply { file, dry_run, force } => apply(&client, file, *dry_run, *force, json),
        What::Namespaces => {
            show(&client.get::<Vec<Namespace>>("/v1/namespaces")?, json, namespaces)
        }
        What::Namespace(verb) => change_namespace(&client, verb, json),
        What::Limit(args) => limit(&client, args, json),
        What::SaveConfig { file } => save_config(&client, file, json),
        What::Ana(args) => ana(&client, args, controller_path, json),
        What::Stats => stats(&client, json),
        What::Trace { verb } => trace(&client, verb.as_ref(), json),
        What::Measure { switch } => {
            let now: Measure = match switch.map(|switch| Measure { on: switch == Switch::On }) {
                None => client.get("/v1/measure")?,
                Some(wanted) => client.send(&Method::PUT, "/v1/measure", &wanted)?,
            };
            show(&now, json, |out, now| writeln!(out, "{}", if now.on { "on" } else { "off" }))
        }
        What::LogLevel { filter: None } => {
            show(&client.get::<LogLevel>("/v1/log-level")?, json, log_level)
        }
        What::LogLevel { filter: Some(filter) } => {
            let wanted = LogLevel { filter: filter.clone() };
            let now: LogLevel = client.send(&Method::PUT, "/v1/log-level", &wanted)?;
            show(&now, json, log_level)
        }
        What::Upgrade { binary, no_wait } => upgrade(&client, binary.as_deref(), !no_wait, json),
        What::Shutdown => {
            let status: Status = client.send(&Method::POST, "/v1/shutdown", &())?;
            show(&status, json, |out, status| {
                writeln!(out, "{} (process {}) ends", status.name, status.pid)
            })
        }
    }?;
    Ok(ExitCode::SUCCESS)
}

/// The path of a controller's requests. A socket that is there is known by its path from the root.
fn controller_path(id: &str) -> String {
    let socket = Path::new(id);
    let is_socket = std::fs::metadata(socket).is_ok_and(|about| about.file_type().is_socket());
    let id = match is_socket {
        true => crate::supervisor::protocol::known_path(socket).to_string_lossy().into_owned(),
        false => id.to_owned(),
    };
    format!("/v1/controllers/{}", part(&id))
}

fn status_lines(out: &mut dyn Write, status: &Status) -> io::Result<()> {
    let supervisor = status.keeper_pid.map_or("none".to_owned(), |pid| format!("process {pid}"));
    writeln!(out, "server       {} (shadowbell {})", status.name, status.version)?;
    writeln!(out, "process      {}", status.pid)?;
    writeln!(out, "supervisor   {supervisor}")?;
    writeln!(out, "serves for   {} s", status.uptime_seconds as u64)?;
    writeln!(out, "workers      {}", status.workers)?;
    writeln!(
        out,
        "controllers  {}, of which {} have a client",
        status.controllers, status.clients
    )?;
    writeln!(out, "log          {}", status.log_filter)?;
    if let Some(why) = &status.upgrade_error {
        writeln!(out, "no upgrade   {why}")?;
    }
    Ok(())
}

fn controllers(out: &mut dyn Write, all: &Vec<Controller>) -> io::Result<()> {
    let mut table = Table::new(["Controller", "Serial", "Client", "State", "Namespaces", "Bytes"]);
    for controller in all {
        let bytes = controller.namespaces.iter().map(|namespace| namespace.bytes).sum();
        let state = match controller.state {
            ControllerState::Disabled => "disabled",
            ControllerState::Ready => "ready",
            ControllerState::ShutDown => "shut down",
            ControllerState::Failed => "failed",
        };
        table.line([
            controller.id.clone(),
            controller.serial.clone(),
            if controller.client { "yes" } else { "no" }.to_owned(),
            state.to_owned(),
            controller.namespaces.len().to_string(),
            ByteSize(bytes).display().iec().to_string(),
        ]);
    }
    write!(out, "{table}")
}

fn namespaces(out: &mut dyn Write, all: &Vec<Namespace>) -> io::Result<()> {
    let headings = ["Controller", "Namespace", "Disk", "Size", "Block", "Writes", "Limits", "UUID"];
    let mut table = Table::new(headings);
    for namespace in all {
        table.line([
            namespace.controller.clone(),
            namespace.nsid.to_string(),
            namespace.disk.clone(),
            ByteSize(namespace.bytes).display().iec().to_string(),
            namespace.block_size.to_string(),
            if namespace.read_only { "no" } else { "yes" }.to_owned(),
            limits_text(namespace.limits.as_ref()),
            namespace.uuid.clone(),
        ]);
    }
    write!(out, "{table}")
}

fn log_level(out: &mut dyn Write, level: &LogLevel) -> io::Result<()> {
    writeln!(out, "{}", level.filter)
}

fn stats(client: &Client, json: bool) -> anyhow::Result<()> {
    let stats: serde_json::Value = client.get("/v1/stats")?;
    show(&stats, json, |out, stats| {
        let mut table =
            Table::new(["Controller", "Commands", "Read", "Written", "Errors", "Rings"]);
        for controller in stats["controllers"].as_array().into_iter().flatten() {
            let number = |of: &serde_json::Value| of.as_u64().unwrap_or(0);
            let io = &controller["io"];
            let sum = |list: &str, of: fn(&serde_json::Value) -> u64| -> u64 {
                let queues = controller[list].as_array().into_iter().flatten();
                queues.filter(|queue| queue["qid"] != 0).map(of).sum()
            };
            let rings =
                |queue: &serde_json::Value| queue["doorbell"]["mmio_writes"].as_u64().unwrap_or(0);
            let commands =
                sum("submission_queues", |queue| queue["commands"].as_u64().unwrap_or(0))
                    + number(&controller["retired_sq"]["commands"]);
            let rings = sum("submission_queues", rings)
                + sum("completion_queues", rings)
                + rings(&controller["retired_sq"])
                + rings(&controller["retired_cq"])
                + number(&controller["doorbell_events"]);
            table.line([
                controller["socket"].as_str().unwrap_or_default().to_owned(),
                count(commands as f64),
                ByteSize(number(&io["bytes_read"])).display().iec().to_string(),
                ByteSize(number(&io["bytes_written"])).display().iec().to_string(),
                number(&io["errors"]).to_string(),
                count(rings as f64),
            ]);
        }
        write!(out, "{table}")
    })
}

fn change_controllers(client: &Client, change: &Change, json: bool) -> anyhow::Result<()> {
    match change {
        Change::Remove { id, force } => {
            let query = if *force { "?force=true" } else { "" };
            let path = format!("{}{query}", controller_path(id));
            client.send::<()>(&Method::DELETE, &path, &())
        }
        Change::Add {
            id,
            disks,
            socket,
            serial,
            model,
            queues,
            queue_entries,
            max_transfer,
            doorbells,
            read_only,
            worker,
        } => {
            let disks = disks.iter().map(|disk| disk_spec::from_root(disk));
            let spec = ControllerSpec {
                socket: std::path::absolute(socket)?.to_string_lossy().into_owned(),
                disks: disks.map(|disk| DiskSpec { disk, uuid: None, nsid: None }).collect(),
                serial: serial.clone(),
                model: model.clone(),
                queues: *queues,
                queue_entries: *queue_entries,
                max_transfer: *max_transfer,
                doorbells: *doorbells,
                read_only: *read_only,
                worker: worker.clone(),
            };
            grant(client, spec.disks.iter().map(|disk| &disk.disk[..]));
            let path = format!("/v1/controllers/{}", part(id));
            let added: Controller = client.send(&Method::PUT, &path, &spec)?;
            show(&vec![added], json, controllers)
        }
    }
}

fn change_namespace(client: &Client, verb: &NamespaceVerb, json: bool) -> anyhow::Result<()> {
    let path =
        |which: &Which| format!("{}/namespaces/{}", controller_path(&which.controller), which.nsid);
    let changed = |which: &Which, change: NamespaceChange| {
        client.send::<Namespace>(&Method::PATCH, &path(which), &change)
    };
    let now = match verb {
        NamespaceVerb::Add { which, disk, uuid, read_only } => {
            let disk = disk_spec::from_root(disk);
            let disk = match read_only {
                true => disk_spec::with_option(&disk, "read-only", "on"),
                false => disk,
            };
            grant(client, std::iter::once(&disk[..]));
            let spec = NamespaceSpec { disk, uuid: uuid.clone() };
            client.send(&Method::PUT, &path(which), &spec)
        }
        NamespaceVerb::Remove { which } => {
            return client.send::<()>(&Method::DELETE, &path(which), &());
        }
        NamespaceVerb::Resize { which, size } => {
            let size = Some(size.map_or(Size::Whole, Size::Bytes));
            changed(which, NamespaceChange { size, ..NamespaceChange::default() })
        }
        NamespaceVerb::Replace { which, disk } => {
            let disk = disk_spec::from_root(disk);
            grant(client, std::iter::once(&disk[..]));
            let disk = Some(disk);
            changed(which, NamespaceChange { disk, ..NamespaceChange::default() })
        }
        NamespaceVerb::ReadOnly { which, switch } => {
            let read_only = Some(*switch == Switch::On);
            changed(which, NamespaceChange { read_only, ..NamespaceChange::default() })
        }
    };
    show(&vec![now?], json, namespaces)
}

fn limit(client: &Client, args: &LimitArgs, json: bool) -> anyhow::Result<()> {
    let limits = LimitSpec {
        iops: args.iops.clone(),
        read_iops: args.read_iops.clone(),
        write_iops: args.write_iops.clone(),
        bandwidth: args.bandwidth.clone(),
        read_bandwidth: args.read_bandwidth.clone(),
        write_bandwidth: args.write_bandwidth.clone(),
        group: args.group.clone(),
    };
    if let (Some(controller), Some(nsid)) = (&args.controller, args.nsid) {
        let path = format!("{}/namespaces/{nsid}", controller_path(controller));
        let change = NamespaceChange { limits: Some(limits), ..NamespaceChange::default() };
        let now: Namespace = client.send(&Method::PATCH, &path, &change)?;
        return show(&vec![now], json, namespaces);
    }
    let groups: Vec<LimitGroup> = match &args.of_group {
        Some(name) => {
            let path = format!("/v1/limit-groups/{}", part(name));
            vec![client.send(&Method::PUT, &path, &limits)?]
        }
        None if limits != LimitSpec::default() => {
            return Err(bad_input(anyhow!(
                "whose limits are these? Name a controller and a namespace, or a group by \
                 `--of-group`"
            )));
        }
        None => client.get("/v1/limit-groups")?,
    };
    show(&groups, json, |out, groups| {
        let mut table = Table::new(["Group", "Limits"]);
        for group in groups {
            table.line([group.name.clone(), limits_text(Some(&group.limits))]);
        }
        write!(out, "{table}")
    })
}

fn limits_text(spec: Option<&LimitSpec>) -> String {
    spec.and_then(|spec| spec.parse().ok()).unwrap_or_default().to_string()
}

fn save_config(client: &Client, file: &Path, json: bool) -> anyhow::Result<()> {
    let answer: Configuration = client.get("/v1/config")?;
    if file == Path::new("-") {
        return show(&answer, json, |out, answer| write!(out, "{}", answer.toml));
    }
    replace(file, |new| Ok(new.write_all(answer.toml.as_bytes())?))?;
    show(&answer, json, |out, _| writeln!(out, "{} has what is served", file.display()))
}

fn apply(
    client: &Client,
    file: &Path,
    dry_run: bool,
    force: bool,
    json: bool,
) -> anyhow::Result<()> {
    let name = file.display().to_string();
    let toml = std::fs::read_to_string(file);
    let toml = toml.with_context(|| name.clone()).map_err(bad_input)?;
    if !dry_run {
        grant(client, disks_of(&toml).iter().map(|disk| &disk[..]));
    }
    let wanted = Apply { toml, file: name, dry_run, force };
    let plan: Plan = client.send(&Method::POST, "/v1/apply", &wanted)?;
    show(&plan, json, plan_lines)
}

fn upgrade(
    client: &Client,
    binary: Option<&Path>,
    is_waited_for: bool,
    json: bool,
) -> anyhow::Result<()> {
    let binary = binary.map(|path| program("--binary", path)).transpose()?;
    let status: Status = client.get("/v1/status")?;
    if let (true, Some(pid)) = (is_waited_for, status.keeper_pid) {
        // Its answer comes when the new process serves, and the server's own would not.
        let supervisor = SupervisorClient::find(Path::new(&pid.to_string()))?;
        let outcome = supervisor.upgrade(binary.as_deref());
        let said = outcome.with_context(|| format!("{} is not upgraded", status.name))?;
        let now: Status = client.get("/v1/status")?;
        return show(&now, json, |out, _| writeln!(out, "{said}"));
    }
    let binary = binary.map(|path| path.to_string_lossy().into_owned());
    let status: Status = client.send(&Method::POST, "/v1/upgrade", &Upgrade { binary })?;
    show(&status, json, |out, status| {
        writeln!(out, "{} was asked to go on in a new process", status.name)
    })
}
