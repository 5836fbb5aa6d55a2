//! `shadowbell ctl`: queries and changes a running server over its control socket.

use crate::ctl_ana::{AnaArgs, ana};
use crate::ctl_disk::{DiskVerb, Switch, disk, disk_path, disks, is_disk, limits_text};
use crate::ctl_export::{ExportVerb, export};
use crate::ctl_plan::plan_lines;
use crate::ctl_trace::{TraceVerb, trace};
use crate::grant::grant;
use anyhow::{Context, anyhow};
use bytesize::ByteSize;
use clap::Subcommand;
use hyper::Method;
use shadowbell_config::config_file::parse as parse_config;
use shadowbell_config::controller_config::OfferedDoorbells;
use shadowbell_config::disk_spec;
use shadowbell_config::parse;
use shadowbell_control_api::api::{
    Apply, Configuration, Controller, ControllerSpec, ControllerState, Disk, DiskChange, DiskSpec,
    LimitGroup, LimitSpec, LogLevel, Measure, Namespace, NamespaceSpec, Plan, Status, Upgrade,
};
use shadowbell_control_api::client::{Client, part};
use shadowbell_control_api::discovery;
use shadowbell_process::atomic_file::replace;
use shadowbell_process::exit::{bad_input, not_found};
use shadowbell_process::logging::COMMON;
use shadowbell_process::output::{Output, show};
use shadowbell_process::table::Table;
use shadowbell_process::units::count;
use shadowbell_supervisor::client::{SupervisorClient, program};
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Query and change a running server
///
/// By default, the control socket of a server is /run/shadowbell/NAME/control.sock. It accepts
/// connections of root and of the user that the server runs as.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Args {
    /// Server: its name, the path of its control socket, or the path of a controller's socket
    /// [default: the only running server]
    #[arg(short, long, global = true, value_name = "NAME|PATH", help_heading = COMMON)]
    server: Option<String>,
    #[command(flatten)]
    output: Output,
    #[command(subcommand)]
    what: Verb,
}

const AFTER_HELP: &str = "\
For programs, the same functions are available over HTTP (docs/reference/http-api.md, docs/openapi.json):

  curl --unix-socket /run/shadowbell/vm0/control.sock http://localhost/v1/status

Exit status:
  0  success
  1  failure during execution
  2  unusable input: the command line, or a file, disk or path that it names
  3  no such server, controller or namespace
  4  not possible in the current state of the server";

#[derive(Clone, Debug, Subcommand)]
enum Verb {
    /// Show the state of the server
    Status,
    /// List the controllers
    #[command(alias = "ls")]
    Controllers {
        /// Only the controller with this id or socket
        id: Option<String>,
    },
    /// Add or remove a controller
    #[command(subcommand)]
    Controller(ControllerVerb),
    /// Apply a configuration file: add, remove and change controllers
    ///
    /// Controllers that differ only in their namespaces or limits are changed while their guests
    /// stay connected. Equal controllers are not touched.
    Apply {
        /// Configuration file, as for `serve --config`; relative paths in it start at the working
        /// directory of the server
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Show the changes without applying them
        #[arg(long)]
        dry_run: bool,
        /// Remove controllers and namespaces even if they have clients
        #[arg(long)]
        force: bool,
    },
    /// Write the current configuration to a file, for `serve --config`
    SaveConfig {
        /// File to create or replace; `-` for standard output
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
    /// List the namespaces
    Namespaces,
    /// Attach a disk to a controller as a namespace, or detach a namespace, while the guest runs
    #[command(subcommand)]
    Namespace(NamespaceVerb),
    /// List, add, remove or change disks
    #[command(subcommand)]
    Disk(DiskVerb),
    /// List, add or remove exports of disks (NBD, vhost-user-blk, FUSE)
    #[command(subcommand)]
    Export(ExportVerb),
    /// Set rate limits of a disk or limit group, or show them
    ///
    /// New limits replace all of the old ones. Requests beyond a limit wait.
    Limit(LimitArgs),
    /// Show or change the ANA states of a subsystem (Asymmetric Namespace Access)
    ///
    /// After a change, the command waits for commands in flight to end.
    Ana(AnaArgs),
    /// Show statistics of all controllers; with --json, all of them
    Stats,
    /// Record every decision about a doorbell for `shadowbell trace`, or show the state of the
    /// recording
    Trace {
        #[command(subcommand)]
        verb: Option<TraceVerb>,
    },
    /// Measure command latency per namespace, for `top` and metrics, or show whether it is measured
    ///
    /// The measurement has a small cost per command.
    Measure {
        /// Start or stop the measurement
        #[arg(value_enum)]
        switch: Option<Switch>,
    },
    /// Show or change the log filter
    LogLevel {
        /// Level (error, warn, info, debug, trace) or list: info,shadowbell_vfio_user=debug
        filter: Option<String>,
    },
    /// Restart the server for an upgrade, as `shadowbell upgrade` does
    Upgrade {
        /// New program [default: the one that is now at the path of the running program]
        #[arg(long, value_name = "PATH")]
        binary: Option<PathBuf>,
        /// Do not wait until the new process serves
        #[arg(long)]
        no_wait: bool,
    },
    /// Stop the server, as SIGTERM does
    Shutdown,
}

#[derive(Clone, Debug, Subcommand)]
enum NamespaceVerb {
    /// Attach a disk to a controller
    Attach {
        #[command(flatten)]
        which: NamespaceArg,
        /// Disk: id of a disk that has no controller, or a disk as for `serve`
        disk: String,
        /// UUID [default: derived from the serial number and the disk's name]
        #[arg(long)]
        uuid: Option<String>,
        /// Refuse writes; for a disk with an id, use `ctl disk read-only`
        #[arg(long)]
        read_only: bool,
        /// Permit another writer of the disk, if that one permits it too
        #[arg(long)]
        share: bool,
    },
    /// Detach a namespace after a flush
    Detach {
        #[command(flatten)]
        which: NamespaceArg,
    },
}

#[derive(Clone, Debug, clap::Args)]
struct LimitArgs {
    /// Disk: its id, which is CONTROLLER/NSID unless the configuration gives one
    #[arg(conflicts_with = "of_group")]
    disk: Option<String>,
    /// Limit group, whose disks share the limits, instead of a disk
    #[arg(long, value_name = "NAME")]
    of_group: Option<String>,
    /// Remove all limits that are not given
    #[arg(long)]
    none: bool,
    /// Reads and writes per second, with an optional burst: 1000:5000
    #[arg(long, value_name = "N[:BURST]")]
    iops: Option<String>,
    /// Reads per second
    #[arg(long, value_name = "N[:BURST]")]
    read_iops: Option<String>,
    /// Writes per second
    #[arg(long, value_name = "N[:BURST]")]
    write_iops: Option<String>,
    /// Bytes read and written per second: 100MiB:1GiB
    #[arg(long, value_name = "SIZE[:BURST]")]
    bandwidth: Option<String>,
    /// Bytes read per second
    #[arg(long, value_name = "SIZE[:BURST]")]
    read_bandwidth: Option<String>,
    /// Bytes written per second
    #[arg(long, value_name = "SIZE[:BURST]")]
    write_bandwidth: Option<String>,
    /// Limit group whose limits the disk shares as well
    #[arg(long, value_name = "NAME", conflicts_with = "of_group")]
    group: Option<String>,
}

/// Controller and namespace.
#[derive(Clone, Debug, clap::Args)]
struct NamespaceArg {
    /// Controller: its id or socket
    controller: String,
    /// Namespace identifier
    #[arg(value_parser = clap::value_parser!(u32).range(1..=256))]
    nsid: u32,
}

#[derive(Clone, Debug, Subcommand)]
enum ControllerVerb {
    /// Add a controller; no effect if an equal one exists
    Add {
        /// Id of the controller
        id: String,
        /// Disks, one per namespace, as for `serve`
        #[arg(value_name = "DISK", required = true)]
        disks: Vec<String>,
        /// Path of the socket to create
        #[arg(long, value_name = "PATH")]
        socket: PathBuf,
        /// Serial number
        #[arg(long, value_name = "TEXT")]
        serial: Option<String>,
        /// Model number
        #[arg(long, value_name = "TEXT")]
        model: Option<String>,
        /// Maximum number of I/O queue pairs
        #[arg(long, value_name = "N")]
        queues: Option<u16>,
        /// Maximum queue size in entries
        #[arg(long, value_name = "N")]
        queue_entries: Option<u32>,
        /// Maximum transfer size of a command
        #[arg(long, value_name = "SIZE", value_parser = parse::size)]
        max_transfer: Option<u64>,
        /// Doorbell mechanism that the controller offers
        #[arg(long, value_enum, value_name = "HOW", default_value_t)]
        doorbells: OfferedDoorbells,
        /// Refuse writes
        #[arg(long)]
        read_only: bool,
        /// Number of an I/O thread (worker), or `own` for a thread that serves no other controller
        #[arg(long, value_name = "WORKER")]
        worker: Option<String>,
    },
    /// Remove a controller
    Remove {
        /// Controller: its id or socket
        id: String,
        /// Remove it even if it has a client
        #[arg(long)]
        force: bool,
    },
}

/// Runs the verb.
///
/// # Errors
/// The server is not found, or refuses the request.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let client = discovery::server(args.server.as_deref())?;
    let json = args.output.is_json();
    match &args.what {
        Verb::Status => show(&client.get::<Status>("/v1/status")?, json, |out, status| {
            status_lines(out, status)
        }),
        Verb::Controllers { id: None } => {
            show(&client.get::<Vec<Controller>>("/v1/controllers")?, json, controllers)
        }
        Verb::Controllers { id: Some(id) } => {
            let found: Controller = client.get(&controller_path(id))?;
            show(&vec![found], json, controllers)
        }
        Verb::Controller(change) => change_controllers(&client, change, json),
        Verb::Apply { file, dry_run, force } => apply(&client, file, *dry_run, *force, json),
        Verb::Namespaces => {
            show(&client.get::<Vec<Namespace>>("/v1/namespaces")?, json, namespaces)
        }
        Verb::Namespace(verb) => change_namespace(&client, verb, json),
        Verb::Export(verb) => export(&client, verb, json),
        Verb::Disk(verb) => disk(&client, verb, json),
        Verb::Limit(args) => limit(&client, args, json),
        Verb::SaveConfig { file } => save_config(&client, file, json),
        Verb::Ana(args) => ana(&client, args, controller_path, json),
        Verb::Stats => stats(&client, json),
        Verb::Trace { verb } => trace(&client, verb.as_ref(), json),
        Verb::Measure { switch } => {
            let now: Measure = match switch.map(|switch| Measure { on: switch == Switch::On }) {
                None => client.get("/v1/measure")?,
                Some(wanted) => client.send(&Method::PUT, "/v1/measure", &wanted)?,
            };
            show(&now, json, |out, now| writeln!(out, "{}", if now.on { "on" } else { "off" }))
        }
        Verb::LogLevel { filter: None } => {
            show(&client.get::<LogLevel>("/v1/log-level")?, json, log_level)
        }
        Verb::LogLevel { filter: Some(filter) } => {
            let wanted = LogLevel { filter: filter.clone() };
            let now: LogLevel = client.send(&Method::PUT, "/v1/log-level", &wanted)?;
            show(&now, json, log_level)
        }
        Verb::Upgrade { binary, no_wait } => upgrade(&client, binary.as_deref(), !no_wait, json),
        Verb::Shutdown => {
            let status: Status = client.send(&Method::POST, "/v1/shutdown", &())?;
            show(&status, json, |out, status| {
                writeln!(out, "{} (process {}) is shutting down", status.name, status.pid)
            })
        }
    }?;
    Ok(ExitCode::SUCCESS)
}

/// Request path of a controller. The path of an existing socket is made absolute, because the
/// server identifies sockets by absolute paths.
fn controller_path(id: &str) -> String {
    let socket = Path::new(id);
    let is_socket = std::fs::metadata(socket).is_ok_and(|about| about.file_type().is_socket());
    let id = match is_socket {
        true => {
            shadowbell_config::server_config::canonical_path(socket).to_string_lossy().into_owned()
        }
        false => id.to_owned(),
    };
    format!("/v1/controllers/{}", part(&id))
}

fn status_lines(out: &mut dyn Write, status: &Status) -> io::Result<()> {
    let supervisor =
        status.supervisor_pid.map_or("none".to_owned(), |pid| format!("process {pid}"));
    writeln!(out, "server       {} (shadowbell {})", status.name, status.version)?;
    writeln!(out, "process      {}", status.pid)?;
    writeln!(out, "supervisor   {supervisor}")?;
    writeln!(out, "uptime       {} s", status.uptime_seconds as u64)?;
    writeln!(out, "I/O threads  {}", status.workers)?;
    write!(out, "controllers  {}, {} with a client", status.controllers, status.clients)?;
    match status.waiting {
        0 => writeln!(out)?,
        waiting => writeln!(out, "; {waiting} more wait for their disks")?,
    }
    if status.stalled_writes != 0 {
        writeln!(out, "stalled      {} cancelled writes without an answer", status.stalled_writes)?;
    }
    if let Some(left) = status.open_files_left {
        writeln!(out, "open files   {left} left")?;
    }
    writeln!(out, "log          {}", status.log_filter)?;
    if let Some(why) = &status.upgrade_error {
        writeln!(out, "last upgrade failed: {why}")?;
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
            ControllerState::Waiting => "waiting",
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
    let headings =
        ["Controller", "Namespace", "Disk", "Source", "Size", "Block", "Writes", "Limits", "UUID"];
    let mut table = Table::new(headings);
    for namespace in all {
        table.line([
            namespace.controller.clone(),
            namespace.nsid.to_string(),
            namespace.disk_id.clone(),
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

fn change_controllers(client: &Client, change: &ControllerVerb, json: bool) -> anyhow::Result<()> {
    match change {
        ControllerVerb::Remove { id, force } => {
            let query = if *force { "?force=true" } else { "" };
            let path = format!("{}{query}", controller_path(id));
            client.send::<()>(&Method::DELETE, &path, &())
        }
        ControllerVerb::Add {
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
            let disks = disks.iter().map(|disk| disk_spec::with_absolute_paths(disk));
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
    let path = |which: &NamespaceArg| {
        format!("{}/namespaces/{}", controller_path(&which.controller), which.nsid)
    };
    let now = match verb {
        NamespaceVerb::Attach { which, disk, uuid, read_only, share } => {
            let disk = match is_disk(client, disk)? {
                true => disk.clone(),
                false => disk_spec::with_absolute_paths(disk),
            };
            let disk = match read_only {
                true => disk_spec::with_option(&disk, "read-only", "on"),
                false => disk,
            };
            grant(client, std::iter::once(&disk[..]));
            let spec = NamespaceSpec { disk, uuid: uuid.clone(), share: *share };
            client.send(&Method::PUT, &path(which), &spec)
        }
        NamespaceVerb::Detach { which } => {
            return client.send::<()>(&Method::DELETE, &path(which), &());
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
    let is_change = args.none || limits != LimitSpec::default();
    if let Some(id) = &args.disk {
        let path = disk_path(id);
        let now: Disk = match is_change {
            true => {
                let change = DiskChange { limits: Some(limits), ..DiskChange::default() };
                client.send(&Method::PATCH, &path, &change)?
            }
            false => client.get(&path)?,
        };
        return show(&vec![now], json, disks);
    }
    let groups: Vec<LimitGroup> = match &args.of_group {
        Some(name) if is_change => {
            let path = format!("/v1/limit-groups/{}", part(name));
            vec![client.send(&Method::PUT, &path, &limits)?]
        }
        Some(name) => {
            let all: Vec<LimitGroup> = client.get("/v1/limit-groups")?;
            let found = all.into_iter().find(|group| group.name == *name);
            vec![found.ok_or_else(|| not_found(anyhow!("there is no limit group `{name}`")))?]
        }
        None if is_change => {
            return Err(bad_input(anyhow!(
                "no disk was named for the limits: give the id of a disk, or a group by `--of-group`"
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

fn save_config(client: &Client, file: &Path, json: bool) -> anyhow::Result<()> {
    let answer: Configuration = client.get("/v1/config")?;
    if file == Path::new("-") {
        return show(&answer, json, |out, answer| write!(out, "{}", answer.toml));
    }
    replace(file, |new| Ok(new.write_all(answer.toml.as_bytes())?))?;
    show(&answer, json, |out, _| writeln!(out, "configuration written to {}", file.display()))
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
    // The server reports the errors of the file.
    if let (false, Ok(config)) = (dry_run, parse_config(&toml, &name)) {
        grant(client, config.disk_specs());
    }
    let wanted = Apply { toml, file: name, dry_run, force };
    let plan: Plan = client.send(&Method::POST, "/v1/apply", &wanted)?;
    show(&plan, json, plan_lines)
}

fn upgrade(client: &Client, binary: Option<&Path>, waits: bool, json: bool) -> anyhow::Result<()> {
    let binary = binary.map(|path| program("--binary", path)).transpose()?;
    let status: Status = client.get("/v1/status")?;
    if let (true, Some(pid)) = (waits, status.supervisor_pid) {
        // The supervisor responds when the new process serves. The old process ends before that.
        let supervisor = SupervisorClient::find_reported(pid, client.socket())?;
        let outcome = supervisor.upgrade(binary.as_deref());
        let said = outcome.with_context(|| format!("cannot upgrade {}", status.name))?;
        let now: Status = client.get("/v1/status")?;
        return show(&now, json, |out, _| writeln!(out, "{said}"));
    }
    let binary = binary.map(|path| path.to_string_lossy().into_owned());
    let status: Status = client.send(&Method::POST, "/v1/upgrade", &Upgrade { binary })?;
    show(&status, json, |out, status| writeln!(out, "requested an upgrade of {}", status.name))
}
