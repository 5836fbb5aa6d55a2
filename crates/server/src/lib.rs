//! `shadowbell serve`: NVMe controllers for virtual machines, over vfio-user sockets, and exports
//! of disks to other programs. `shadowbell export` is its short form for exports of one disk.
//!
//! # Architecture
//!
//! | module | contents |
//! |---|---|
//! | `endpoints` | management endpoint: the control socket |
//! | `reload` | reconfiguration of a running server from a configuration |
//! | `config_diff`, `disk_plan` | comparison of a configuration with what is served |
//! | `namespace_requests` | namespace management, Format and Sanitize of guests with a pool |
//! | `reconfigure` | addition and removal of controllers at run time |
//! | `namespaces` | addition, removal and change of namespaces at run time |
//! | `ana` | ANA state changes at run time |
//! | `disks` | disks by id |
//! | `open_disk` | open disks that no controller has |
//! | `open_files` | limit of open files |
//! | `exports`, `running_exports` | exports of disks by NBD, vhost-user-blk, FUSE and ublk |
//! | `control` | control socket and metrics |
//! | `registry` | served controllers |
//! | `args`, `export_args` | command lines of `serve` and `export` |
//! | `builder` | builds a controller and its socket from the configuration |
//! | `server` | I/O threads, reactor and controllers, from start to stop |
//! | `flush` | synchronous flush of a disk |
//! | `event` | queue of controller events for the log |
//! | `event_log` | log lines for events of guests |
//! | `launch_hint`, `export_hint` | commands for VMMs and for clients of exports |
//! | `stats_report` | statistics for the control socket and the log |
//! | `reactor_thread` | thread that serves the vfio-user sockets |
//! | `quiesce` | quiesce for an upgrade |
//! | `checkpoint_items` | keys of the checkpoint's items |
//! | `checkpointer`, `checkpoint_store` | checkpoint at the supervisor, for recovery |
//! | `recover`, `late_recovery` | recovery after the death of a server process |
//! | `recovery_job`, `fence_wait` | recovery of one controller, and its wait for the disks |
//! | `recovery_attempts` | number of deaths during the recovery of each item |
//! | `path_broker` | sockets and output files, created by the supervisor |
//! | `startup_timing` | start-up timing |
//! | `liveness` | liveness checks for a service manager |
//! | `resize_watch` | automatic resize of namespaces |
//! | `stall_watch`, `in_flight` | scanner of requests in flight, for stalled disks |
//! | `wait_sampler` | sampler of what commands wait for, while a reader is there |
//! | `stop_watch` | log messages about disks that are stopped by an error of their storage |
//! | `guard` | refusal of changes that take something from a client, without `force` |
//! | `sandbox` | restriction of the process before it reads guest data |
//! | `worker_link` | connection to the supervisor |
//! | `parent_watch` | end of this process after the death of its supervisor |
//! | `stop_limit` | time limit of the end of this process |
//! | `tracer` | doorbell trace and latency measurement |
//! | `faults` | `--faults`, in a build with that feature |
//!
//! Threads: the I/O threads; one reactor for all vfio-user sockets; one that formats log lines for
//! events; one that writes the log, so that a blocked terminal cannot block a guest (see
//! `shadowbell_process::logging`); one for the control socket; one that resizes disks whose storage
//! reports a new size; one that searches for stalled disks; one that samples what commands wait
//! for, while a reader is there; and the main thread, which waits for signals. Without clients no
//! thread wakes up by a timer, except the search for stalled disks, once a minute.
#![forbid(unsafe_code)]

mod ana;
mod args;
mod builder;
mod checkpoint_items;
mod checkpoint_store;
mod checkpointer;
mod config_diff;
mod control;
mod disk_plan;
mod disks;
mod endpoints;
mod event;
mod event_log;
mod export_args;
mod export_hint;
mod exports;
#[cfg(feature = "faults")]
mod faults;
mod fence_wait;
mod flush;
mod guard;
mod in_flight;
mod late_recovery;
mod launch_hint;
mod liveness;
mod namespace_requests;
mod namespaces;
mod open_disk;
mod open_files;
mod parent_watch;
mod path_broker;
mod quiesce;
mod reactor_thread;
mod reconfigure;
mod recover;
mod recovery_attempts;
mod recovery_job;
mod registry;
mod reload;
mod resize_watch;
mod running_exports;
mod sandbox;
mod server;
mod stall_watch;
mod startup_timing;
mod stats_report;
mod stop_limit;
mod stop_watch;
mod tracer;
mod wait_sampler;
mod worker_link;

pub use args::Args;
pub use export_args::ExportArgs;

use anyhow::anyhow;
use bytesize::ByteSize;
use checkpointer::Checkpointer;
use endpoints::{Endpoints, ProcessControl, RunningEndpoints};
use event_log::EventLog;
use liveness::Liveness;
use parent_watch::ParentWatch;
use recover::Recovery;
use reload::Reload;
use resize_watch::ResizeWatch;
use running_exports::OwnMounts;
use server::Server;
use shadowbell_config::config_file::{self, Item};
use shadowbell_config::disk_spec;
use shadowbell_config::disk_uuids;
use shadowbell_config::server_config::ServerConfig;
use shadowbell_config::{limits, pool, subsystems};
use shadowbell_config::{socket_access, socket_path};
use shadowbell_export::ublk;
use shadowbell_process::signals::{EndSignals, Wake, is_ignored};
use shadowbell_process::{descriptor_limit, exit, logging, notify};
use shadowbell_storage::disk_kinds;
use shadowbell_supervisor::protocol::{to_supervisor, to_worker};
use shadowbell_vfio_user::Listener;
use shadowbell_vfio_user::server::BindError;
use signal_hook::consts::{SIGHUP, SIGUSR1};
use stall_watch::StallWatch;
use startup_timing::Phases;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};
use stop_limit::StopLimit;
use tracing::{debug, error, info, warn};
use worker_link::{Role, WorkerLink, text_of};

/// Serves until a signal ends the service.
///
/// # Errors
/// The configuration cannot be served, or the service has failed.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(file) = &args.check {
        return check_config(file);
    }
    let Some(role) = args.service.as_worker else {
        return serve(args, None).map_err(exit::for_service);
    };
    let link = WorkerLink::take()?;
    let outcome = serve(args, Some((role, &link))).map_err(exit::for_service);
    if let Err(error) = &outcome {
        link.send(to_supervisor::FAILED, &exit::line(error));
    }
    outcome
}

/// Serves exports of one disk, until a signal ends the service, or all exports have ended.
///
/// # Errors
/// The disk cannot be exported, or the service has failed.
pub fn run_export(args: ExportArgs) -> anyhow::Result<ExitCode> {
    run(args.serve()?)
}

/// Validates a configuration file without opening disks and sockets, for `shadowbell config check`
/// and `serve --check`.
///
/// # Errors
/// All errors of the file, one per line, each with the line of the key.
pub fn check_config(file: &Path) -> anyhow::Result<ExitCode> {
    let config = config_file::check(file, &check_item)?;
    for (image, _) in config.images().filter(|(image, _)| !image.exists()) {
        eprintln!("warning: {}: there is no such file", image.display());
    }
    let count = config.controllers.len();
    println!("{}: {count} controller{}", file.display(), if count == 1 { "" } else { "s" });
    Ok(ExitCode::SUCCESS)
}

/// Checks an item of a configuration file, as the start of the service does later.
fn check_item(item: Item<'_>) -> Result<(), String> {
    let line = |error: anyhow::Error| exit::line(&error);
    match item {
        Item::Disk(spec) => disk_kinds::check(spec).map_err(|error| line(error.into_error())),
        Item::Socket(path) => match Listener::check_path(path) {
            // The server creates the directory of the control sockets.
            Err(BindError::NoDirectory { directory, .. })
                if socket_path::directory().as_ref() == Some(&directory) =>
            {
                Ok(())
            }
            outcome => outcome.map_err(|error| error.to_string()),
        },
        Item::Allowed(path) => check_allowed(path).map_err(line),
        Item::Trace(path) => args::check_trace(path).map_err(line),
        Item::Export(export) => {
            running_exports::read_certificates(std::slice::from_ref(export)).map_err(line)
        }
    }
}

/// Refuses a directory of `--allow` that does not exist.
fn check_allowed(path: &Path) -> anyhow::Result<()> {
    match path.exists() {
        true => Ok(()),
        false => Err(exit::unavailable(anyhow!(
            "--allow {}: there is no such directory; create it, or leave it out",
            path.display()
        ))),
    }
}

/// Opens the file in which the UUIDs of disks are stored. Without the file, the UUIDs are derived
/// from the disks' names.
fn open_disk_uuids(config: &ServerConfig) -> Option<disk_uuids::Store> {
    let directory = config.state_directory()?;
    let store = disk_uuids::Store::open(&directory);
    store.inspect_err(|error| disk_uuids::warn_of(&directory, error)).ok()
}

fn serve(args: Args, supervisor: Option<(Role, &WorkerLink)>) -> anyhow::Result<ExitCode> {
    #[cfg(feature = "faults")]
    let faults = args.service.faults.clone();
    let mut phases = Phases::begin();
    let given = args.clone();
    let stop_timeout = Duration::from_secs(args.service.stop_timeout);
    let stalled_after = Duration::from_secs(args.service.stalled_after);
    let sandbox_options = args.sandbox();
    let target = args.exported.as_ref().map(|exported| exported.target.clone());
    let ends_unused = target.is_some();
    let text = supervisor.map(|(_, link)| link.begin()).transpose()?.flatten();
    let mut config = args.config(text.as_deref())?;
    let reload = Reload::of(&given, &config);
    // Only the first process locks the pools here. A process that recovers locks them later, when
    // the old process has unlocked them.
    let is_first = supervisor.is_none_or(|(role, _)| role == Role::Start);
    pool::open_all(
        config.controllers.iter().filter_map(|one| one.controller.pool.as_ref()),
        is_first,
    )?;
    config.add_attached()?;
    if is_first {
        config.allow.iter().try_for_each(|path| check_allowed(path))?;
    }
    // The number of CPUs is read here, because the sandbox forbids the system call.
    config.pool.workers = config.pool.count();
    descriptor_limit::raise();
    limits::set_groups(&config.groups);
    if config.polls_for_mapped {
        info!(
            "the I/O threads poll and use a CPU each, because a mapped doorbell cannot wake them; \
             with `--poll adaptive` they sleep, and check once a millisecond"
        );
    }
    socket_access::set(&config.socket_access);
    warn_of_memory(&config);
    // Signals are caught before sockets exist, because an unhandled signal would leave socket files
    // behind.
    let mut signals =
        EndSignals::catch(if reload.is_some() { &[SIGUSR1, SIGHUP] } else { &[SIGUSR1] })?;
    if is_first && reload.is_some() && is_ignored(SIGHUP) {
        info!("SIGHUP is ignored, as by nohup; reload the configuration by `shadowbell ctl apply`");
    }
    let handle = signals.handle();
    let ended = move || handle.close();
    let link = supervisor.map(|(_, link)| link);
    if config.exports.iter().any(|export| export.ublk.is_some()) {
        ublk::mark_as_io_flusher();
    }
    // The fence is created before any disk is opened, so that it covers all I/O.
    let checkpointer = link.map(Checkpointer::new).transpose()?;
    let supervisor_pid = link.and_then(|_| rustix::process::getppid());
    let supervisor_pid = supervisor_pid.map(|pid| pid.as_raw_pid().cast_unsigned());
    phases.ended("configuration");
    // The files of subsystems and certificates are opened before the sandbox forbids it.
    let places =
        config.controllers.iter().filter_map(|served| served.controller.subsystem.as_ref());
    subsystems::open(places).map_err(exit::bad_input)?;
    let uuids = (!ends_unused).then(|| open_disk_uuids(&config)).flatten();
    running_exports::read_certificates(&config.exports)?;
    // The sandbox is entered before other threads are started and before any untrusted data is
    // read.
    let contained = sandbox::enter(&sandbox_options, &config, link)?;
    if let Some(uuids) = uuids {
        // The file may have UUIDs of other servers' disks, so a process that cannot open files does
        // not keep it open.
        match contained {
            Some(_) => uuids.use_by_supervisor(sandbox::uuid_of),
            None => uuids.use_here(),
        }
    }
    logging::start_thread();
    phases.ended("sandbox");
    let mut mounts = OwnMounts::default();
    let (mut server, endpoints, late) = match (supervisor, &checkpointer) {
        (Some((Role::Recover, link)), Some(checkpointer)) => {
            match recover::recover(&config, link, checkpointer, ended, &mut phases)? {
                // The endpoints are created when the controllers serve already, so that guests wait
                // less.
                Some(Recovery { server, endpoints, late }) => {
                    let listen = || Endpoints::listen_again(&config, supervisor_pid);
                    (server, endpoints.unwrap_or_else(listen), late)
                }
                // The supervisor has ended the service during the recovery.
                None => return Ok(ExitCode::from(exit::FAILED)),
            }
        }
        _ => {
            // The watch ends this process if the supervisor dies while the open of a remote disk
            // blocks.
            let _watch = link.map(|link| ParentWatch::start(link, Duration::ZERO)).transpose()?;
            let endpoints = Endpoints::listen(&config, supervisor_pid)?;
            let devices;
            (mounts, devices) = OwnMounts::new(&mut config.exports, &config.disks)?;
            let keep = checkpointer.as_ref().map(|checkpointer| {
                |server: &Server, reactor: &mut _, ports: &[_]| {
                    checkpointer.begin(&server.controllers(), reactor, ports, false);
                    for (id, device) in &devices {
                        checkpointer.put_fuse_device(id, device.as_fd());
                    }
                    checkpointer.put_others(
                        server.changes().unattached(),
                        server.changes().exports().wanted(),
                    );
                    checkpointer.complete();
                }
            });
            let server = Server::start(&config, keep, ended)?;
            server.changes().exports().devices().extend(devices);
            (server, endpoints, None)
        }
    };
    #[cfg(feature = "faults")]
    let injected = faults.begin(&server);
    let event_log = EventLog::start(&mut server)?;
    if let Some(checkpointer) = &checkpointer {
        server.changes().set_checkpoint(Arc::clone(checkpointer));
    }
    let is_first = supervisor.is_none_or(|(role, _)| role == Role::Start);
    if let Some(target) = target {
        let _ = server.changes().exports().target.set(target);
    }
    if ends_unused {
        let handle = signals.handle();
        server.changes().exports().end_when_unused(move || handle.close());
    }
    if !is_first {
        mounts = OwnMounts::recover(&server.changes().exports().wanted());
    }
    server.changes().start_exports(is_first)?;
    namespace_requests::begin(&server)?;
    let _resize_watch = ResizeWatch::start(&server)?;
    let stalls = StallWatch::start(&server, stalled_after)?;
    let handle = signals.handle();
    let process_control = ProcessControl {
        supervisor_pid,
        end: Arc::new(move || handle.close()),
        serves_since: Instant::now(),
        upgrade_error: Arc::default(),
        upgrade_requester: link
            .filter(|_| contained.is_some())
            .map(WorkerLink::upgrade_requester)
            .transpose()?,
    };
    let mut running_endpoints = Some(endpoints.start(&server, &config, &process_control)?);
    match supervisor {
        Some((role, link)) => {
            if role == Role::Start {
                launch_hint::show(&config);
                export_hint::show(server.changes().exports());
            }
            let sockets = config.controllers.iter().map(|served| served.socket.as_path());
            link.report_serving(sockets, &server.registry().summary());
            mounts.set_recoverable();
            if role == Role::Recover {
                phases.ended("control socket");
                debug!("it took: {phases}");
            }
        }
        None => {
            launch_hint::show(&config);
            export_hint::show(server.changes().exports());
            notify::send(&notify::ready(&server.registry().summary()));
        }
    }
    let late = late.map(|late| late.start(&server)).transpose()?;
    #[cfg(feature = "faults")]
    faults.attempt();
    let mut watchdog = Liveness::wanted(link);
    let supervisor_died = loop {
        match wait(&mut signals, link, &mut watchdog, &server, reload.as_ref())? {
            End::Requested => break false,
            End::SupervisorDied => break true,
            End::Quiesce(link) => {
                quiesce(&server, &mut running_endpoints, &config, &process_control, link)?
            }
        }
    };
    if link.is_none() {
        notify::send(notify::STOPPING);
    }
    // The stop limit and the parent watch bound the wait for an unresponsive disk, even if the
    // supervisor is dead and cannot kill this process.
    let limit = StopLimit::start(&server, stop_timeout)?;
    let _bounded = link.map(|link| ParentWatch::start(link, parent_watch::GRACE)).transpose()?;
    drop(late);
    // The endpoints and exports remove their socket files.
    drop(running_endpoints.map(RunningEndpoints::stop));
    drop(limit);
    // The stop limit does not count this wait while storage answers, because programs that use a
    // mounted file or a block device may still have data to write.
    let exports = server.changes().exports();
    let users = exports.local_blocks();
    let wait_for_users = !users.is_empty();
    if let Some(link) = link.filter(|_| wait_for_users) {
        link.send(to_supervisor::USED, "");
    }
    let limit = StopLimit::start_for_users(&server, users, stop_timeout, link)?;
    mounts.end(exports);
    exports.finish_files(contained.is_none());
    exports.stop_block_devices();
    drop(limit);
    if let Some(link) = link.filter(|_| wait_for_users) {
        link.send(to_supervisor::UNUSED, "");
    }
    let limit = StopLimit::start(&server, stop_timeout)?;
    exports.stop();
    drop(stalls);
    let outcome = server.stop();
    drop(event_log);
    report(&server);
    #[cfg(feature = "faults")]
    injected.report();
    let is_flushed = server.flush();
    drop(limit);
    outcome?;
    info!("ended");
    Ok(if is_flushed && !supervisor_died {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(exit::FAILED)
    })
}

/// Warns if the `mem:` disks together are larger than the memory of the machine.
fn warn_of_memory(config: &ServerConfig) {
    // The named disks that a controller uses are among the controllers' disks, so only the other
    // named disks are added.
    let attached = config.controllers.iter().flat_map(|served| &served.controller.disks);
    let unattached = config.unattached().map(|disk| &disk.spec);
    let disks = attached.map(|disk| &disk.disk).chain(unattached);
    let sizes = disks.filter_map(|disk| disk_spec::memory_of(disk));
    let wanted = sizes.fold(0, u64::saturating_add);
    let info = rustix::system::sysinfo();
    let available = info.totalram.saturating_mul(u64::from(info.mem_unit).max(1));
    if wanted > available {
        let text = |bytes| ByteSize(bytes).display().iec();
        warn!(
            "the disks in memory have {} together, but the machine has {} of memory: guests that \
             fill them cause the OOM killer to end processes",
            text(wanted),
            text(available)
        );
    }
}

/// Reason for the end of [`wait`].
enum End<'a> {
    /// A signal, a message of the supervisor, or a failure of the reactor.
    Requested,
    /// The supervisor has died.
    SupervisorDied,
    /// The next process of an upgrade is ready, and the supervisor requests that this process
    /// quiesces.
    Quiesce(&'a WorkerLink),
}

fn wait<'a>(
    signals: &mut EndSignals,
    link: Option<&'a WorkerLink>,
    liveness: &mut Liveness,
    server: &Server,
    reload: Option<&Arc<Reload>>,
) -> io::Result<End<'a>> {
    let reload = |text, done: Box<dyn FnOnce(&str) + Send>| {
        if let Some(reload) = reload {
            reload.start(server.changes(), text, done);
        }
    };
    loop {
        match signals.wait_or_readable(link.map(AsFd::as_fd), liveness.next())? {
            Wake::End => return Ok(End::Requested),
            Wake::Time => liveness.check(server),
            // With a supervisor, the signal is ignored: the supervisor receives it too, and sends
            // `READ`.
            Wake::Signal(SIGHUP) if link.is_some() => {}
            Wake::Signal(SIGHUP) => {
                notify::send(&notify::reloading());
                reload(Ok(None), Box::new(|outcome| notify::send(&notify::ready(outcome))));
            }
            Wake::Signal(_) => report(server),
            Wake::Readable => {
                let Some(link) = link else { continue };
                let Some(packet) = link.receive() else {
                    error!(
                        "the supervisor has ended, so this process ends too: start the server again"
                    );
                    return Ok(End::SupervisorDied);
                };
                match packet.code {
                    to_worker::END => return Ok(End::Requested),
                    to_worker::REPORT => report(server),
                    to_worker::READ => {
                        let link = link.clone();
                        let why = packet.text();
                        let text = packet.fd().map_or_else(|| Err(anyhow!(why)), text_of);
                        reload(
                            text.map(Some),
                            Box::new(move |outcome| link.send(to_supervisor::READ, outcome)),
                        );
                    }
                    to_worker::LIVENESS_CHECK => link.check_liveness(server),
                    to_worker::QUIESCE => return Ok(End::Quiesce(link)),
                    _ => {}
                }
            }
        }
    }
}

/// Quiesces for an upgrade, and then waits to be killed. Returns only if the checkpoint is
/// incomplete, so that the server serves again.
fn quiesce(
    server: &Server,
    running_endpoints: &mut Option<RunningEndpoints>,
    config: &ServerConfig,
    process_control: &ProcessControl,
    link: &WorkerLink,
) -> anyhow::Result<()> {
    let Some(stopped_endpoints) = running_endpoints.take().map(RunningEndpoints::stop) else {
        return Ok(());
    };
    let paused = server.changes().pause();
    let Err(why) = quiesce::quiesce(server, &stopped_endpoints, link, paused.is_none());
    link.send(to_supervisor::RESUMES, &exit::line(&why));
    *running_endpoints = Some(stopped_endpoints.start(server, config, process_control)?);
    Ok(())
}

/// Writes the statistics to the log.
fn report(server: &Server) {
    info!("{}", stats_report::Report::of(&server.controllers()));
}
