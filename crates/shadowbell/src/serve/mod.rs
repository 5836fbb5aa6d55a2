//! `shadowbell serve`: controllers for virtual machines, behind vfio-user sockets.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | [`options`] | what may be asked for, on the command line and in a file |
//! | [`crate::config`] | reads the file |
//! | `service` | what runs: workers, a reactor, controllers; from start to stop |
//! | `announce` | tells a person what guests do |
//! | `paste` | the arguments to give to QEMU and Cloud Hypervisor |
//! | [`statistics`] | the counters, as JSON |
//! | [`live`] | the same for `top`, while it runs |
//!
//! Threads: the workers, one reactor for all sockets, one that talks to the person (so that a
//! terminal that blocks can not hold up a guest), one that answers `top` if it may ask, and the main
//! thread, which waits for signals.
//! None of them ticks.

mod announce;
#[cfg(feature = "faults")]
pub mod faults;
pub mod live;
pub mod options;
mod paste;
mod service;
pub mod statistics;

pub use options::{Args, ServerPlan};

use crate::exit;
use announce::Announcer;
use service::Service;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGXFSZ};
use signal_hook::iterator::Signals;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::{debug, error, info};

/// Serves until a signal ends it.
///
/// # Errors
/// What was asked for can not be served; or the service came to an end by itself.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    #[cfg(feature = "faults")]
    let faults = args.faults.clone();
    let plan = args.plan()?;
    raise_descriptor_limit();
    // Before there is anything that a signal would leave behind.
    let ends: Vec<_> =
        [SIGINT, SIGTERM, SIGHUP].into_iter().filter(|s| !crate::nohup::is_ignored(*s)).collect();
    let mut signals = Signals::new(ends.iter().chain(&[SIGUSR1]))?;
    let ending = Arc::new(AtomicBool::new(false));
    for signal in ends {
        // The second one does not wait for anything.
        let status = i32::from(exit::FAILED);
        signal_hook::flag::register_conditional_shutdown(signal, status, Arc::clone(&ending))?;
        signal_hook::flag::register(signal, Arc::clone(&ending))?;
    }
    // A limit on the size of files (`ulimit -f`) is a full disk to the guest, no reason to end.
    signal_hook::flag::register(SIGXFSZ, Arc::default())?;
    let handle = signals.handle();
    let asked = plan.stats_socket.as_deref().map(live::listen).transpose()?;
    let mut service = Service::start(&plan, move || handle.close())?;
    #[cfg(feature = "faults")]
    let wrongs = faults.begin(&service);
    let announcer = Announcer::start(&mut service)?;
    let live = asked.map(|socket| live::Live::start(socket, &service)).transpose()?;
    paste::show(&plan);

    for signal in signals.forever() {
        match signal {
            SIGUSR1 => report(&plan, &service),
            _ => {
                debug!(signal, "ending");
                ending.store(true, Ordering::Relaxed);
                break;
            }
        }
    }
    drop(live);
    let outcome = service.stop();
    drop(announcer);
    report(&plan, &service);
    #[cfg(feature = "faults")]
    wrongs.report();
    let is_kept = service.flush();
    outcome?;
    info!("ended");
    Ok(if is_kept { ExitCode::SUCCESS } else { ExitCode::from(exit::FAILED) })
}

/// Writes the counters where they were asked for, or else tells of them.
fn report(plan: &ServerPlan, service: &Service) {
    let report = statistics::Report::of(service.controllers());
    match &plan.stats_json {
        Some(path) => match statistics::write(path, &report) {
            Ok(()) => debug!("statistics are in {}", path.display()),
            Err(error) => error!("statistics can not be written to {}: {error}", path.display()),
        },
        None => info!("{report}"),
    }
}

/// A guest with many queues has a descriptor for each interrupt, and there may be many guests.
/// Nothing here uses `select`, which is what the low limit is for.
pub(crate) fn raise_descriptor_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current != maximum
        && let Err(errno) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
    {
        debug!("the limit of open files stays at {current:?}: {errno}");
    }
}
