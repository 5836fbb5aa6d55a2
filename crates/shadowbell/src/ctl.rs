//! `shadowbell ctl`: queries and changes a running server over its control socket.

use crate::ctl_ana::{AnaArgs, ana};
use crate::ctl_disk::{
    DiskVerb, Switch, canonical_id, disk, disk_path, disks, is_disk, limits_text,
};
use crate::ctl_explain::{explain, server_of};
use crate::ctl_export::{ExportVerb, export};
use crate::ctl_paths::controller_path;
use crate::ctl_plan::plan_lines;
use crate::ctl_trace::{TraceVerb, trace};
use crate::grant::{NamedFiles, files_to_allow, grant, supervisor_of};
use crate::ls;
use crate::text_diff::difference;
use anyhow::{Context, anyhow};
use bytesize::ByteSize;
use clap::Subcommand;
use hyper::Method;
use shadowbell_config::config_file::{parse as parse_config, write::with_allowed};
use shadowbell_config::controller_config::OfferedDoorbells;
use shadowbell_config::disk_spec;
use shadowbell_config::limits::DiskLimits;
use shadowbell_config::parse;
use shadowbell_control_api::api::{
    Apply, Configuration, Controller, ControllerSpec, ControllerState, Disk, DiskChange, DiskSpec,
    LimitGroup, LimitSpec, LogLevel, Measure, Namespace, NamespaceSpec, Plan, Status, Upgrade,
};
use shadowbell_control_api::client::{Client, forced, part};
use shadowbell_control_api::discovery;
use shadowbell_process::atomic_file::replace;
use shadowbell_process::exit::{self, bad_input, needs_force};
use shadowbell_process::logging::COMMON;
use shadowbell_process::output::{Output, show};
use shadowbell_process::table::Table;
use shadowbell_process::units::count;
use shadowbell_supervisor::client::program;
use std::borrow::Cow;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Query and change a running server
///
/// By default, the control socket of a server is /run/shadowbell/NAME/control.sock; the environment
/// variable SHADOWBELL_RUN_DIR, of the server and of `ctl`, names another directory than
/// /run/shadowbell. It accepts connections of root and of the user that the server runs as.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = exit::help(AFTER_HELP))]
pub(crate) struct Args {
    /// Server: its name, its process ID, its control socket, or the socket of a controller
    /// [default: the only running server]
    #[arg(short, long, global = true, value_name = "SERVER", help_heading = COMMON)]
    server: Option<String>,
    #[command(flatten)]
    named: NamedFiles,
    #[command(flatten)]
    output: Output,
    #[command(subcommand)]
    what: Verb,
}

const AFTER_HELP: &str = "\
For programs, the same functions are available over HTTP (docs/reference/http-api.md, docs/openapi.json):

  curl --unix-socket /run/shadowbell/vm0/control.sock http://localhost/v1/status";

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
        /// Apply it even if clients lose controllers, namespaces, exports or writes
        #[arg(long)]
        force: bool,
    },
    /// Write the current configuration to a file, for `serve --config`
    ///
    /// Files that qcow2 images name are permitted by `[paths] allow` if --backing or --data-file
    /// names them; the others are listed.
    SaveConfig {
        /// File to create or replace; `-` for standard output
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Replace a file with other content; without this option, the difference is shown
        #[arg(long)]
        force: bool,
    },
    /// Explain what the guest of a controller waits for, in three sentences with figures
    ///
    /// Shares of one second by cause: disk (the storage), limit (rate limits), queue full (the
    /// guest takes no completions, or a quota is reached), processor (the I/O thread), memory (the
    /// host swaps); or nothing, if the guest sends no commands. The command takes one second, and
    /// costs the guest nothing.
    Explain {
        /// Controller: its id or socket [default: the only controller]
        controller: Option<String>,
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
    /// Show or change the rate limits of a disk; without a disk, show those of all disks
    ///
    /// Limits that are not given stay; the value `none` removes one. Requests beyond a limit wait.
    Limit(LimitArgs),
    /// List, add or change limit groups: rate limits that several disks share
    #[command(subcommand)]
    LimitGroup(LimitGroupVerb),
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
    Shutdown {
        /// Stop it even if it has clients, which lose their disks
        #[arg(long)]
        force: bool,
    },
}

#[derive(Clone, Debug, Subcommand)]
enum NamespaceVerb {
    /// List the namespaces, as `ctl namespaces`
    #[command(alias = "list")]
    Ls,
    /// Attach a disk to a controller
    Attach {
        #[command(flatten)]
        which: NamespaceArg,
        /// Disk: id of a disk that has no controller, or a disk as for `serve`
        disk: String,
        /// UUID [default: generated once for the path, and stored in the state directory]
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
        /// Detach it even if the controller has a client
        #[arg(long)]
        force: bool,
    },
}

#[derive(Clone, Debug, clap::Args)]
struct LimitArgs {
    /// Disk: its id, which is CONTROLLER/NSID unless the configuration gives one; CONTROLLER alone
    /// shows all disks of a controller
    disk: Option<String>,
    #[command(flatten)]
    rates: RateArgs,
    /// Limit group whose limits the disk shares as well, or `none`
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Change them even if clients of an export have to connect again for it: for the first limit
    /// of a disk, and for another group
    #[arg(long)]
    force: bool,
}

#[derive(Clone, Debug, Subcommand)]
enum LimitGroupVerb {
    /// List the limit groups
    Ls,
    /// Add a limit group; no effect if an equal one exists
    Add {
        /// Name of the group
        name: String,
        #[command(flatten)]
        rates: RateArgs,
    },
    /// Change the limits of a limit group; limits that are not given stay
    Set {
        /// Name of the group
        name: String,
        #[command(flatten)]
        rates: RateArgs,
    },
}

#[derive(Clone, Debug, clap::Args)]
struct RateArgs {
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
}

impl RateArgs {
    /// Limits to change: with `--none`, also those that are not given.
    fn spec(&self) -> LimitSpec {
        let spec = LimitSpec {
            iops: self.iops.clone(),
            read_iops: self.read_iops.clone(),
            write_iops: self.write_iops.clone(),
            bandwidth: self.bandwidth.clone(),
            read_bandwidth: self.read_bandwidth.clone(),
            write_bandwidth: self.write_bandwidth.clone(),
            group: None,
        };
        if self.none { spec.or_none() } else { spec }
    }
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
    /// List the controllers, as `ctl controllers`
    #[command(alias = "list")]
    Ls,
    /// Add a controller; no effect if an equal one exists
    Add {
        /// Id of the controller
        id: String,
        /// Disks, one per namespace: ids of disks that have no controller, or disks as for `serve`
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

/// Show the state of a server
///
/// Without SERVER, it shows the only server, or lists all.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StatusArgs {
    /// Server: its name, its process ID, its control socket, or the socket of a controller
    server: Option<String>,
    #[command(flatten)]
    output: Output,
}

/// Runs `shadowbell status`.
///
/// # Errors
/// The server is not found.
pub(crate) fn status(args: &StatusArgs) -> anyhow::Result<ExitCode> {
    let StatusArgs { server, output } = args.clone();
    if server.is_none() && discovery::running(&discovery::directory()?).len() != 1 {
        return ls::run(&ls::Args::all(output));
    }
    run(&Args { server, named: NamedFiles::default(), output, what: Verb::Status })
}

/// Explain why a guest is slow or hangs, in three sentences with figures
///
/// Also available as `shadowbell ctl explain`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ExplainArgs {
    /// Controller: its id or socket [default: the only controller]
    controller: Option<String>,
    /// Server: its name, its process ID, its control socket, or the socket of a controller
    /// [default: the server that has the controller]
    #[arg(short, long, value_name = "SERVER")]
    server: Option<String>,
    #[command(flatten)]
    output: Output,
}

/// Runs `shadowbell explain`.
///
/// # Errors
/// The server or the controller is not found.
pub(crate) fn explain_controller(args: &ExplainArgs) -> anyhow::Result<ExitCode> {
    let ExplainArgs { controller, server, output } = args.clone();
    run(&Args { server, named: NamedFiles::default(), output, what: Verb::Explain { controller } })
}

/// Stop a server, as SIGTERM does
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct StopArgs {
    /// Server: its name, its process ID, its control socket, or the socket of a controller
    /// [default: the only running server]
    server: Option<String>,
    /// Stop it even if it has clients, which lose their disks
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    output: Output,
}

/// Runs `shadowbell stop`.
///
/// # Errors
/// The server is not found, or has clients.
pub(crate) fn stop(args: &StopArgs) -> anyhow::Result<ExitCode> {
    let StopArgs { server, force, output } = args.clone();
    run(&Args { server, named: NamedFiles::default(), output, what: Verb::Shutdown { force } })
}

/// Runs the verb.
///
/// # Errors
/// The server is not found, or refuses the request.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let server = args.server.as_deref();
    let client = match &args.what {
        Verb::Explain { controller } => server_of(server, controller.as_deref())?,
        _ => discovery::server(server)?,
    };
    let (json, named) = (args.output.is_json(), &args.named);
    let has_disks = matches!(
        args.what,
        Verb::Controller(_)
            | Verb::Apply { .. }
            | Verb::Namespace(_)
            | Verb::Disk(_)
            | Verb::SaveConfig { .. }
    );
    if !has_disks && !named.is_empty() {
        return Err(bad_input(anyhow!(
            "--backing and --data-file belong to verbs that open disks, and to save-config"
        )));
    }
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
        Verb::Controller(change) => change_controllers(&client, change, named, json),
        Verb::Apply { file, dry_run, force } => apply(&client, file, *dry_run, *force, named, json),
        Verb::Explain { controller } => explain(&client, controller.as_deref(), json),
        Verb::Namespaces => {
            show(&client.get::<Vec<Namespace>>("/v1/namespaces")?, json, namespaces)
        }
        Verb::Namespace(verb) => change_namespace(&client, verb, named, json),
        Verb::Export(verb) => export(&client, verb, json),
        Verb::Disk(verb) => disk(&client, verb, named, json),
        Verb::Limit(args) => limit(&client, args, json),
        Verb::LimitGroup(verb) => limit_group(&client, verb, json),
        Verb::SaveConfig { file, force } => save_config(&client, file, *force, named, json),
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
        Verb::Shutdown { force } => {
            let path = forced("/v1/shutdown", *force);
            let status: Status = client.send(&Method::POST, &path, &())?;
            show(&status, json, |out, status| {
                writeln!(out, "{} (process {}) is shutting down", status.name, status.pid)
            })
        }
    }?;
    Ok(ExitCode::SUCCESS)
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
    if status.stalled != 0 {
        writeln!(out, "stalled      {} disks, see `shadowbell ctl disk ls`", status.stalled)?;
    }
    if status.stopped != 0 {
        writeln!(out, "stopped      {} disks, see `shadowbell ctl disk ls`", status.stopped)?;
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
    write!(out, "{table}")?;
    for controller in all {
        if let Some(why) = &controller.waits_for {
            writeln!(out, "{} waits for its disks: {why}", controller.id)?;
        }
    }
    Ok(())
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

fn change_controllers(
    client: &Client,
    change: &ControllerVerb,
    named: &NamedFiles,
    json: bool,
) -> anyhow::Result<()> {
    match change {
        ControllerVerb::Ls => {
            show(&client.get::<Vec<Controller>>("/v1/controllers")?, json, controllers)
        }
        ControllerVerb::Remove { id, force } => {
            client.send::<()>(&Method::DELETE, &forced(&controller_path(id), *force), &())
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
            let known: Vec<Disk> = client.get("/v1/disks")?;
            let is_id = |id: &str| known.iter().any(|disk| disk.id == id);
            let disks = disks.iter().map(|disk| match is_id(disk) {
                true => disk.clone(),
                false => disk_spec::with_absolute_paths(disk),
            });
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
            let disks = spec.disks.iter().map(|disk| &disk.disk[..]);
            grant(client, disks, [Path::new(&spec.socket)].into_iter(), named)?;
            let path = format!("/v1/controllers/{}", part(id));
            let added: Controller = client.send(&Method::PUT, &path, &spec)?;
            show(&vec![added], json, controllers)
        }
    }
}

fn change_namespace(
    client: &Client,
    verb: &NamespaceVerb,
    named: &NamedFiles,
    json: bool,
) -> anyhow::Result<()> {
    let path = |which: &NamespaceArg| {
        format!("{}/namespaces/{}", controller_path(&which.controller), which.nsid)
    };
    let now = match verb {
        NamespaceVerb::Ls => {
            let all: Vec<Namespace> = client.get("/v1/namespaces")?;
            return show(&all, json, namespaces);
        }
        NamespaceVerb::Attach { which, disk, uuid, read_only, share } => {
            let disk = match is_disk(client, disk)? {
                true => disk.clone(),
                false => disk_spec::with_absolute_paths(disk),
            };
            let disk = match read_only {
                true => disk_spec::with_option(&disk, "read-only", "on"),
                false => disk,
            };
            grant(client, [&disk[..]].into_iter(), std::iter::empty(), named)?;
            let spec = NamespaceSpec { disk, uuid: uuid.clone(), share: *share };
            client.send(&Method::PUT, &path(which), &spec)
        }
        NamespaceVerb::Detach { which, force } => {
            return client.send::<()>(&Method::DELETE, &forced(&path(which), *force), &());
        }
    };
    show(&vec![now?], json, namespaces)
}

fn limit(client: &Client, args: &LimitArgs, json: bool) -> anyhow::Result<()> {
    let limits = args.rates.spec();
    let limits = LimitSpec { group: args.group.clone().or(limits.group), ..limits };
    let is_change = limits != LimitSpec::default();
    let Some(id) = &args.disk else {
        if is_change {
            return Err(bad_input(anyhow!(
                "no disk was named for the limits: give the id of a disk (`shadowbell ctl disk ls`)"
            )));
        }
        return show(&client.get::<Vec<Disk>>("/v1/disks")?, json, disks);
    };
    let now = match is_change {
        true => {
            let change = DiskChange { limits: Some(limits), ..DiskChange::default() };
            vec![client.send::<Disk>(
                &Method::PATCH,
                &forced(&disk_path(id), args.force),
                &change,
            )?]
        }
        false => match is_disk(client, &canonical_id(id))? {
            true => vec![client.get(&disk_path(id))?],
            false => disks_of(client, id)?,
        },
    };
    show(&now, json, disks)
}

/// Disks of the controller `id`; if there is no such controller, the disk `id`.
fn disks_of(client: &Client, id: &str) -> anyhow::Result<Vec<Disk>> {
    let Ok(controller) = client.get::<Controller>(&controller_path(id)) else {
        return Ok(vec![client.get(&disk_path(id))?]);
    };
    let mut all: Vec<Disk> = client.get("/v1/disks")?;
    all.retain(|disk| disk.namespaces.iter().any(|user| user.controller == controller.id));
    Ok(all)
}

fn limit_group(client: &Client, verb: &LimitGroupVerb, json: bool) -> anyhow::Result<()> {
    let path = |name: &str| format!("/v1/limit-groups/{}", part(name));
    let groups: Vec<LimitGroup> = match verb {
        LimitGroupVerb::Ls => client.get("/v1/limit-groups")?,
        LimitGroupVerb::Add { name, rates } => {
            let limits = LimitSpec::of(
                &LimitSpec::changed(&rates.spec(), &DiskLimits::default())
                    .map_err(|why| bad_input(anyhow!(why)))?,
            );
            vec![client.send(&Method::PUT, &path(name), &limits)?]
        }
        LimitGroupVerb::Set { name, rates } => {
            let limits = LimitSpec { group: None, ..rates.spec() };
            vec![client.send(&Method::PATCH, &path(name), &limits)?]
        }
    };
    show(&groups, json, |out, groups| {
        let mut table = Table::new(["Group", "Limits"]);
        for group in groups {
            table.line([group.name.clone(), limits_text(Some(&group.limits))]);
        }
        write!(out, "{table}")
    })
}

/// First line of the files of `save-config`.
const SAVED: &str = "# Written by `shadowbell ctl save-config`, which replaces this file.";

/// Writes the configuration to a file. The server process may be compromised, and a supervisor
/// grants what its configuration file names, so the difference to an existing file is shown, also
/// when it is written: the server may give another text than in an earlier call.
fn save_config(
    client: &Client,
    file: &Path,
    force: bool,
    named: &NamedFiles,
    json: bool,
) -> anyhow::Result<()> {
    let mut answer: Configuration = client.get("/v1/config")?;
    // The next server gets no grants of `ctl`, so the file has to permit the files that qcow2
    // images name. The server process could have written these names, so the caller repeats them.
    let wanted = parse_config(&answer.toml, "").map_or(Vec::new(), |now| files_to_allow(&now));
    let (allowed, others): (Vec<_>, Vec<_>) =
        wanted.into_iter().partition(|path| named.contains(path));
    for path in others {
        let path = path.display();
        tracing::warn!(
            "a qcow2 image names {path}, which the saved file does not permit: if its disk needs \
             this file, repeat the command with --backing or --data-file {path}"
        );
    }
    if !allowed.is_empty() {
        answer.toml = with_allowed(&answer.toml, allowed)?;
    }
    if file == Path::new("-") {
        return show(&answer, json, |out, answer| write!(out, "{}", answer.toml));
    }
    // The caller names a link in order to change the file behind it.
    let file = &*file.canonicalize().map_or(Cow::Borrowed(file), Cow::Owned);
    if file.exists() && !file.is_file() {
        let name = file.display();
        return Err(bad_input(anyhow!("{name}: no regular file; `-` is standard output")));
    }
    let before = match std::fs::read(file) {
        Ok(before) => before,
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        Err(error) => {
            return Err(bad_input(error)).with_context(|| file.display().to_string());
        }
    };
    let text = format!("{SAVED}\n\n{}", answer.toml);
    let changes = (!before.is_empty() && before != text.as_bytes())
        .then(|| difference(&String::from_utf8_lossy(&before), &text));
    if let Some(changes) = changes.as_ref().filter(|_| !force) {
        return Err(needs_force(anyhow!(
            "nothing was changed: {} has other lines, which would be lost; name another file, or \
             repeat this with --force and check the difference that it shows:\n{changes}",
            file.display(),
        )));
    }
    replace(file, |new| Ok(new.write_all(text.as_bytes())?))?;
    show(&answer, json, |out, _| {
        writeln!(out, "configuration written to {}", file.display())?;
        changes.iter().try_for_each(|changes| {
            writeln!(out, "check each change before the next start:\n{changes}")
        })
    })
}

fn apply(
    client: &Client,
    file: &Path,
    dry_run: bool,
    force: bool,
    named: &NamedFiles,
    json: bool,
) -> anyhow::Result<()> {
    let name = file.display().to_string();
    let toml = std::fs::read_to_string(file);
    let toml = toml.with_context(|| name.clone()).map_err(bad_input)?;
    // An invalid file is sent as well: the server reports its errors.
    if let Ok(config) = parse_config(&toml, &name) {
        // A plan without its steps opens the images, too, but creates no socket.
        let sockets = config.sockets().filter(|_| !dry_run);
        grant(client, config.disk_specs(), sockets, named)?;
    }
    let wanted = Apply { toml, file: name, dry_run, force };
    let plan: Plan = client.send(&Method::POST, "/v1/apply", &wanted)?;
    show(&plan, json, plan_lines)
}

fn upgrade(client: &Client, binary: Option<&Path>, waits: bool, json: bool) -> anyhow::Result<()> {
    let binary = binary.map(|path| program("--binary", path)).transpose()?;
    let status: Status = client.get("/v1/status")?;
    if waits && let Some(supervisor) = supervisor_of(client)? {
        // The supervisor responds when the new process serves. The old process ends before that.
        let outcome = supervisor.upgrade(binary.as_deref());
        let said = outcome.with_context(|| format!("cannot upgrade {}", status.name))?;
        let now: Status = client.get("/v1/status")?;
        return show(&now, json, |out, _| writeln!(out, "{said}"));
    }
    let binary = binary.map(|path| path.to_string_lossy().into_owned());
    let status: Status = client.send(&Method::POST, "/v1/upgrade", &Upgrade { binary })?;
    show(&status, json, |out, status| writeln!(out, "requested an upgrade of {}", status.name))
}
