//! `shadowbell serve`: controllers for virtual machines, behind vfio-user sockets.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | `asides` | what answers beside the guests |
//! | `apply` | has a running server be what a configuration says |
//! | `plan` | what that takes |
//! | `pool_orders` | what guests want done with their pools |
//! | `changes` | controllers that come and go while it runs |
//! | `namespaces` | their namespaces, which come, go and change |
//! | `control` | the control socket and the metrics |
//! | `registry` | the controllers that are served |
//! | `args` | the command line |
//! | `config_file` | the file of `--config` |
//! | `server_config` | what both of them come to |
//! | `making` | what a controller and its socket are made of |
//! | `socket_access` | who may connect to the sockets of controllers |
//! | `server` | what runs: workers, a reactor, controllers; from start to stop |
//! | `flush` | a disk's flush, waited for |
//! | `event` | what happens to the controllers, on its way to the log |
//! | `event_log` | logs what guests do |
//! | `launch_hint` | the arguments to give to QEMU and Cloud Hypervisor |
//! | `stats_file` | the counters, as a file of JSON |
//! | `stats_socket` | the counters for `top`, while the server runs |
//! | `reactor_thread` | the thread that serves the sockets, and takes a rest |
//! | `by_recovery` | a server that gives way to another process as if it had died |
//! | `hand_over`, `take_over` | a server and its successor in another process |
//! | `move_out`, `move_in` | the same, one controller after the other |
//! | `arriving` | what comes to a successor |
//! | `transfer` | what these two say to each other |
//! | `keeping`, `store` | what a keeper holds, so that another process goes on after this one's death |
//! | `recover` | that other process |
//! | `places` | what a keeper makes for this process: sockets, and files that are written |
//! | `phases` | how long each part of its beginning took |
//! | `pulse` | whether all threads still answer, for a service manager that wants to know |
//! | `sizes` | namespaces that follow the sizes of their disks |
//! | `sandbox` | what the process gives up before it reads anything of a guest's |
//! | `worker_link` | what is said to a keeper, if there is one |
//! | `faults` | `--faults`, in a build with that feature |
//!
//! Threads: the workers, one reactor for all sockets, one that makes log lines of what happens, one
//! that writes the log (so that a terminal that blocks can not hold up a guest, see
//! `crate::log_thread`), one that answers `top` if it may ask, one that has the control socket, one
//! that hears of disks with new sizes, and the main thread, which waits for signals. None of them
//! has a timer while nobody asks.

mod ana;
mod apply;
mod args;
mod arriving;
mod asides;
mod by_recovery;
mod changes;
mod config_file;
mod control;
mod event;
mod event_log;
#[cfg(feature = "faults")]
mod faults;
mod flush;
mod hand_over;
mod keeper_watch;
mod keeping;
mod launch_hint;
mod making;
mod move_in;
mod move_out;
mod namespaces;
mod phases;
mod places;
mod plan;
mod pool_orders;
mod pulse;
mod reactor_thread;
mod recover;
mod registry;
mod sandbox;
mod server;
mod server_config;
mod sizes;
pub(crate) mod socket_access;
mod stats_file;
mod stats_socket;
mod store;
mod take_over;
mod tracer;
mod transfer;
mod worker_link;

pub(crate) use args::Args;
pub(crate) use config_file::read as read_config_file;

use crate::disk_spec::{self, DiskSpecError};
use crate::keeper_link::{Packet, to_keeper, to_worker};
use crate::signals::{EndSignals, Wake};
use crate::{descriptor_limit, exit, limits, logging, notify, pool, subsystems};
use anyhow::anyhow;
use apply::Reload;
use asides::{Answering, Asides, Powers};
use bytesize::ByteSize;
use event_log::EventLog;
use keeper_watch::KeeperWatch;
use keeping::Keeping;
use phases::Phases;
use pulse::Pulse;
use server::Server;
use server_config::ServerConfig;
use signal_hook::consts::{SIGHUP, SIGUSR1};
use sizes::SizeWatch;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;
use tracing::{debug, error, info, warn};
use worker_link::{Role, WorkerLink};

/// Serves until a signal ends it.
///
/// # Errors
/// What was asked for can not be served; or the service came to an end by itself.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(file) = &args.check {
        return check(file);
    }
    let Some(role) = args.as_worker else { return serve(args, None) };
    let link = WorkerLink::take()?;
    let outcome = serve(args, Some((role, &link)));
    if let Err(error) = &outcome {
        link.say(to_keeper::FAILED, &exit::line(error));
    }
    outcome
}

/// Reads a configuration file, and says whether it makes sense.
fn check(file: &Path) -> anyhow::Result<ExitCode> {
    let config = config_file::read(file)?;
    for served in &config.controllers {
        for disk in &served.controller.disks {
            let known = disk_spec::check(&disk.disk).map_err(DiskSpecError::into_error);
            making::with_origin(served, known)?;
        }
    }
    let count = config.controllers.len();
    println!("{}: {count} controller{}", file.display(), if count == 1 { "" } else { "s" });
    Ok(ExitCode::SUCCESS)
}

fn serve(args: Args, keeper: Option<(Role, &WorkerLink)>) -> anyhow::Result<ExitCode> {
    #[cfg(feature = "faults")]
    let faults = args.faults.clone();
    let mut phases = Phases::begin();
    let given = args.clone();
    let asked = args.sandbox();
    let mut config = args.config()?;
    let reload = Reload::of(&given, &config);
    // Those of a process that goes on for another are locked when that one has let go of them.
    let is_first = keeper.is_none_or(|(role, _)| role == Role::Start);
    pool::open_all(
        config.controllers.iter().filter_map(|one| one.controller.pool.as_ref()),
        is_first,
    )?;
    config.add_attached()?;
    // As many as the system says now: it is not asked in the sandbox.
    config.pool.workers = config.pool.count();
    descriptor_limit::raise();
    limits::set_groups(&config.groups);
    if config.polls_for_mapped {
        info!(
            "the workers poll, which takes a processor each: a client that maps its doorbells can \
             not wake them; `--poll adaptive` has them sleep, and look once a millisecond"
        );
    }
    socket_access::set(&config.socket_access);
    warn_of_memory(&config);
    // Before there is anything that a signal would leave behind.
    let mut signals =
        EndSignals::catch(if reload.is_some() { &[SIGUSR1, SIGHUP] } else { &[SIGUSR1] })?;
    let handle = signals.handle();
    let ended = move || handle.close();
    let link = keeper.map(|(_, link)| link);
    // Before any disk is opened.
    let keeping = link.map(Keeping::new).transpose()?;
    let keeper_pid = link.and_then(|_| rustix::process::getppid());
    let keeper_pid = keeper_pid.map(|pid| pid.as_raw_pid().cast_unsigned());
    phases.ended("configuration");
    // The files are not to be had in the sandbox.
    let places =
        config.controllers.iter().filter_map(|served| served.controller.subsystem.as_ref());
    subsystems::open(places).map_err(exit::bad_input)?;
    // Before there is another thread, and before anything is read that comes from outside.
    let contained = sandbox::enter(&asked, &config, link)?;
    logging::begin();
    phases.ended("sandbox");
    let (mut server, asides) = match (keeper, &keeping) {
        (Some((Role::Successor, link)), Some(keeping)) => {
            match take_over::take_over(&config, link, keeping, ended)? {
                Some(taken) => taken,
                // The other process goes on, and knows why.
                None => return Ok(ExitCode::from(exit::FAILED)),
            }
        }
        (Some((Role::Recover, link)), Some(keeping)) => {
            match recover::recover(&config, link, keeping, ended, &mut phases)? {
                // The guests need them less than anything else.
                Some(server) => (server, Asides::listen_again(&config, keeper_pid)),
                // It is to end.
                None => return Ok(ExitCode::from(exit::FAILED)),
            }
        }
        _ => {
            // A disk may be somewhere else, and what answers for it may say nothing.
            let _watch = link.map(KeeperWatch::start).transpose()?;
            let asides = Asides::listen(&config, keeper_pid)?;
            let keep = keeping.as_ref().map(|keeping| {
                |controllers: &[_], reactor: &mut _, ports: &[_]| {
                    keeping.begin(controllers, reactor, ports, false);
                    keeping.complete();
                }
            });
            (Server::start(&config, keep, ended)?, asides)
        }
    };
    #[cfg(feature = "faults")]
    let injected = faults.begin(&server);
    let event_log = EventLog::start(&mut server)?;
    if let Some(keeping) = &keeping {
        server.changes().keep_with(keeping.kept());
    }
    pool_orders::begin(&server)?;
    let _sizes = SizeWatch::start(&server)?;
    let handle = signals.handle();
    let powers = Powers {
        keeper_pid,
        end: Arc::new(move || handle.close()),
        serves_since: Instant::now(),
        upgrade_error: Arc::default(),
        asks: link.filter(|_| contained.is_some()).map(WorkerLink::asker).transpose()?,
    };
    let mut answering = Some(asides.start(&server, &config, &powers)?);
    match keeper {
        Some((Role::Successor, link)) => link.say(to_keeper::SERVING, &server.registry().summary()),
        Some((role, link)) => {
            if role == Role::Start {
                launch_hint::show(&config);
            }
            let sockets = config.controllers.iter().map(|served| served.socket.as_path());
            link.serves(sockets, &server.registry().summary());
            if role == Role::Recover {
                phases.ended("control socket and statistics");
                debug!("it took: {phases}");
            }
        }
        None => {
            launch_hint::show(&config);
            notify::tell(&notify::ready(&server.registry().summary()));
        }
    }
    #[cfg(feature = "faults")]
    faults.attempt();
    let mut watchdog = Pulse::wanted(link);
    let is_left = loop {
        match wait(&mut signals, link, &mut watchdog, &server, &config, reload.as_ref())? {
            End::Asked => break false,
            End::Left => break true,
            End::Successor(link, packet) => {
                if hand_over(&mut server, &mut answering, &config, &powers, link, packet)? {
                    return Ok(ExitCode::SUCCESS);
                }
            }
        }
    };
    if link.is_none() {
        notify::tell(notify::STOPPING);
    }
    // They remove their files.
    drop(answering.map(Answering::rest));
    let outcome = server.stop();
    drop(event_log);
    report(&config, &server);
    #[cfg(feature = "faults")]
    injected.report();
    let is_kept = server.flush();
    outcome?;
    info!("ended");
    Ok(if is_kept && !is_left { ExitCode::SUCCESS } else { ExitCode::from(exit::FAILED) })
}

/// Says so if the disks in memory can not all be filled.
fn warn_of_memory(config: &ServerConfig) {
    let disks = config.controllers.iter().flat_map(|served| &served.controller.disks);
    let sizes = disks.filter_map(|disk| disk_spec::memory_of(&disk.disk));
    let wanted = sizes.fold(0, u64::saturating_add);
    let info = rustix::system::sysinfo();
    let there = info.totalram.saturating_mul(u64::from(info.mem_unit).max(1));
    if wanted > there {
        let text = |bytes| ByteSize(bytes).display().iec();
        warn!(
            "the disks in memory have {} together, and the machine has {} of memory: guests that \
             fill them have the system run out of it, and end whatever it chooses",
            text(wanted),
            text(there)
        );
    }
}

/// What ends the wait.
enum End<'a> {
    /// A signal, the keeper, or the end of the service.
    Asked,
    /// The keeper is gone.
    Left,
    /// There is another process to hand over to.
    Successor(&'a WorkerLink, Packet),
}

fn wait<'a>(
    signals: &mut EndSignals,
    link: Option<&'a WorkerLink>,
    pulse: &mut Pulse,
    server: &Server,
    config: &ServerConfig,
    reload: Option<&Arc<Reload>>,
) -> io::Result<End<'a>> {
    let reload = |done: Box<dyn FnOnce(&str) + Send>| {
        if let Some(reload) = reload {
            reload.start(server.changes(), done);
        }
    };
    loop {
        match signals.wait_beside(link.map(AsFd::as_fd), pulse.next())? {
            Wake::End => return Ok(End::Asked),
            Wake::Time => pulse.look(server),
            // A keeper has the same signal, if all processes of the service have, and says so.
            Wake::Signal(SIGHUP) if link.is_some() => {}
            Wake::Signal(SIGHUP) => {
                notify::tell(&notify::reloading());
                reload(Box::new(|outcome| notify::tell(&notify::ready(outcome))));
            }
            Wake::Signal(_) => report(config, server),
            Wake::Readable => {
                let Some(link) = link else { continue };
                let Some(packet) = link.hear() else {
                    error!("the keeper has ended, and so this ends too: start it again");
                    return Ok(End::Left);
                };
                match packet.letter {
                    to_worker::END => return Ok(End::Asked),
                    to_worker::REPORT => report(config, server),
                    to_worker::READ => {
                        let link = link.clone();
                        reload(Box::new(move |outcome| link.say(to_keeper::READ, outcome)));
                    }
                    to_worker::VISIT => link.visit(server),
                    to_worker::HAND_OVER | to_worker::MOVE | to_worker::REPLACE => {
                        return Ok(End::Successor(link, packet));
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Hands over to the process that the keeper names. Whether that goes on; if not, this one does.
fn hand_over(
    server: &mut Server,
    answering: &mut Option<Answering>,
    config: &ServerConfig,
    powers: &Powers,
    link: &WorkerLink,
    packet: Packet,
) -> anyhow::Result<bool> {
    let versions = packet.text();
    let is_asked = packet.letter != to_worker::HAND_OVER;
    let may_rest = packet.letter == to_worker::REPLACE && by_recovery::is_needed(server);
    let Some(fd) = packet.fd() else { return Ok(false) };
    let transfer = UnixStream::from(fd);
    let Some(resting) = answering.take().map(Answering::rest) else { return Ok(false) };
    let changes = Arc::clone(server.changes());
    let outcome = match changes.pause() {
        // Both processes may die on the way, and have to be held for that.
        Some(_paused) if may_rest && can_move(server) => {
            by_recovery::rest_for_good(server, &transfer, &versions, link)
        }
        Some(_paused) if may_rest => by_recovery::is_possible(server),
        Some(_paused) if is_asked && can_move(server) => {
            move_out::move_out(server, &resting, &transfer, &versions, link)
        }
        Some(_paused) => hand_over::hand_over(server, &resting, &transfer, &versions, link),
        None => Err(anyhow!("a controller is being added or taken away; try again")),
    };
    let Err(why) = outcome else {
        resting.leave();
        return Ok(true);
    };
    // Before the new one sees that there is nothing to come, and ends.
    link.say(to_keeper::GOES_ON, &exit::line(&why));
    drop(transfer);
    *answering = Some(resting.start(server, config, powers)?);
    Ok(false)
}

/// Whether controllers can be handed over one by one.
fn can_move(server: &Server) -> bool {
    server.registry().count() != 0 && server.changes().kept().is_some_and(|kept| kept.holds_all())
}

/// Writes the counters where they were asked for, or else logs them.
fn report(config: &ServerConfig, server: &Server) {
    let report = stats_file::Report::of(&server.controllers());
    match &config.stats_json {
        Some(path) => match stats_file::write(path, &report) {
            Ok(()) => debug!("statistics are in {}", path.display()),
            Err(error) => error!("statistics can not be written to {}: {error}", path.display()),
        },
        None => info!("{report}"),
    }
}
