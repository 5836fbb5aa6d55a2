//! `shadowbell serve`: controllers for virtual machines, behind vfio-user sockets.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | `args` | the command line |
//! | `config_file` | the file of `--config` |
//! | `server_config` | what both of them come to |
//! | `server` | what runs: workers, a reactor, controllers; from start to stop |
//! | `flush` | a disk's flush, waited for |
//! | `event` | what happens to the controllers, on its way to the log |
//! | `event_log` | logs what guests do |
//! | `launch_hint` | the arguments to give to QEMU and Cloud Hypervisor |
//! | `stats_file` | the counters, as a file of JSON |
//! | `stats_socket` | the counters for `top`, while the server runs |
//! | `worker_link` | what is said to a keeper, if there is one |
//! | `faults` | `--faults`, in a build with that feature |
//!
//! Threads: the workers, one reactor for all sockets, one that makes log lines of what happens, one
//! that writes the log (so that a terminal that blocks can not hold up a guest, see
//! `crate::log_thread`), one that answers `top` if it may ask, and the main thread, which waits for
//! signals. None of them has a timer.

mod args;
mod config_file;
mod event;
mod event_log;
#[cfg(feature = "faults")]
mod faults;
mod flush;
mod launch_hint;
mod server;
mod server_config;
mod stats_file;
mod stats_socket;
mod worker_link;

pub(crate) use args::Args;
pub(crate) use config_file::read as read_config_file;

use crate::keeper_link::{to_keeper, to_worker};
use crate::signals::{EndSignals, Wake};
use crate::{descriptor_limit, exit, notify};
use event_log::EventLog;
use server::Server;
use server_config::ServerConfig;
use signal_hook::consts::SIGUSR1;
use stats_socket::StatsSocket;
use std::io;
use std::os::fd::AsFd;
use std::process::ExitCode;
use tracing::{debug, error, info};
use worker_link::{Role, WorkerLink};

/// Serves until a signal ends it.
///
/// # Errors
/// What was asked for can not be served; or the service came to an end by itself.
pub(crate) fn run(args: Args) -> anyhow::Result<ExitCode> {
    let Some(role) = args.as_worker else { return serve(args, None) };
    let link = WorkerLink::take()?;
    let outcome = serve(args, Some((role, &link)));
    if let Err(error) = &outcome {
        link.say(to_keeper::FAILED, &exit::line(error));
    }
    outcome
}

fn serve(args: Args, keeper: Option<(Role, &WorkerLink)>) -> anyhow::Result<ExitCode> {
    #[cfg(feature = "faults")]
    let faults = args.faults.clone();
    let config = args.config()?;
    descriptor_limit::raise();
    // Before there is anything that a signal would leave behind.
    let mut signals = EndSignals::catch(&[SIGUSR1])?;
    let handle = signals.handle();
    let stats_listener = config.stats_socket.as_deref().map(stats_socket::listen).transpose()?;
    let mut server = Server::start(&config, move || handle.close())?;
    #[cfg(feature = "faults")]
    let injected = faults.begin(&server);
    let event_log = EventLog::start(&mut server)?;
    let stats_socket =
        stats_listener.map(|listener| StatsSocket::start(listener, &server)).transpose()?;
    launch_hint::show(&config);
    let link = keeper.map(|(_, link)| link);
    match link {
        Some(link) => link.serves(config.controllers.iter().map(|served| served.socket.as_path())),
        None => notify::tell(notify::READY),
    }

    let is_left = wait(&mut signals, link, || report(&config, &server))?;
    if link.is_none() {
        notify::tell(notify::STOPPING);
    }
    drop(stats_socket);
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

/// Waits for the end. Whether it is because the keeper is gone.
fn wait(
    signals: &mut EndSignals,
    link: Option<&WorkerLink>,
    report: impl Fn(),
) -> io::Result<bool> {
    loop {
        match signals.wait_beside(link.map(AsFd::as_fd))? {
            Wake::End => return Ok(false),
            Wake::Signal(_) => report(),
            Wake::Readable => match link.and_then(WorkerLink::hear).map(|packet| packet.letter) {
                None => {
                    error!("the keeper has ended, and so this ends too: start it again");
                    return Ok(true);
                }
                Some(to_worker::END) => return Ok(false),
                Some(to_worker::REPORT) => report(),
                Some(to_worker::HAND_OVER) => {
                    if let Some(link) = link {
                        link.say(to_keeper::GOES_ON, "not in this release");
                    }
                }
                Some(_) => {}
            },
        }
    }
}

/// Writes the counters where they were asked for, or else logs them.
fn report(config: &ServerConfig, server: &Server) {
    let report = stats_file::Report::of(server.controllers());
    match &config.stats_json {
        Some(path) => match stats_file::write(path, &report) {
            Ok(()) => debug!("statistics are in {}", path.display()),
            Err(error) => error!("statistics can not be written to {}: {error}", path.display()),
        },
        None => info!("{report}"),
    }
}
