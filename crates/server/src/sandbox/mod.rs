//! Sandbox of the server process (`serve --sandbox`): limits the damage if the process is
//! compromised.
//!
//! Guests, their VMMs and images are untrusted, and the server process reads their data. So before
//! the server process reads untrusted data, and while it has one thread, it drops privileges that
//! it does not need:
//!
//! | privilege | mechanism | module |
//! |---|---|---|
//! | user | `--user` | `user` |
//! | capabilities | `capset`, the bounding set | `capabilities` |
//! | gain of privileges | `PR_SET_NO_NEW_PRIVS` | |
//! | files, TCP, signals to others | Landlock; images by the supervisor | `files`, `open_broker` |
//! | system calls | seccomp filter; a forbidden call ends the process | `calls`, `filter` |
//! | io_uring | restricted instances, created before the filter closes | `rings` |
//! | core dumps, more descriptors, priorities | resource limits | `enter` |
//!
//! The command line and the configuration file are read before the sandbox is entered.

mod calls;
mod capabilities;
mod files;
mod filter;
mod open_broker;
mod options;
mod rings;
mod user;

#[cfg(test)]
mod tests;

pub(super) use files::permissions;
pub(super) use open_broker::uuid_of;
pub(super) use options::{Mode, SandboxOptions};
pub(super) use user::{User, parse_user};

use super::worker_link::WorkerLink;
use anyhow::{Context, anyhow};
use files::{Files, Held};
use filter::Needs;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use shadowbell_config::server_config::ServerConfig;
use shadowbell_config::socket_path;
use shadowbell_frontend::vfio_user::read_limits;
use shadowbell_memory::processors;
use shadowbell_process::exit::bad_input;
use shadowbell_process::process_env;
use shadowbell_storage::{disk_kinds, disk_open};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use tracing::{info, warn};

/// Proof that file access is restricted and the supervisor opens images. The value must live as
/// long as the process.
pub(super) struct Contained(#[expect(dead_code, reason = "it is kept")] Held);

/// Enters the sandbox. The process must have one thread.
///
/// # Errors
/// The sandbox is required (`--sandbox on`) and not possible, or the process cannot become the
/// requested user.
pub(super) fn enter(
    options: &SandboxOptions,
    config: &ServerConfig,
    link: Option<&WorkerLink>,
) -> anyhow::Result<Option<Contained>> {
    let mut is_on = match (options.mode, conflict(config)) {
        (Mode::Off, _) => false,
        (_, None) => true,
        (Mode::On, Some(why)) => {
            return Err(bad_input(anyhow!("--sandbox on: {why}; it needs `--sandbox off`")));
        }
        (Mode::Auto, Some(why)) => {
            warn!("sandbox off: {why}");
            false
        }
    };
    let mut files = None;
    if is_on {
        match files::prepare(config, link) {
            Ok(prepared) => files = Some(prepared),
            Err(why) if options.mode == Mode::On => {
                return Err(bad_input(anyhow!("--sandbox on: {why}")));
            }
            Err(why) if nbd_disk(config).is_some() => {
                let disk = nbd_disk(config).unwrap_or_default();
                warn!("sandbox off: {disk} connects to a server by itself, because {why}");
                is_on = false;
            }
            Err(why) if link.is_none() => info!("the sandbox does not restrict file access: {why}"),
            Err(why) => warn!("the sandbox does not restrict file access: {why}"),
        }
    }
    if let Some(user) = &options.user {
        user::become_user(user, config).context("--user")?;
    }
    if !is_on {
        return Ok(None);
    }
    disk_open::contain(files.is_some().then_some(open_broker::connect_to));
    store_unreadable_values();
    limit();
    close(options, config, files, link.is_some()).map(|files| files.map(Contained))
}

/// Drops privileges that the process does not need any more. With `files`, also the access to files
/// by path.
fn close(
    options: &SandboxOptions,
    config: &ServerConfig,
    files: Option<Files>,
    supervisor: bool,
) -> anyhow::Result<Option<Held>> {
    let by_itself = files.is_none();
    let tcp = config.tcp().next().is_some();
    let rings = rings::prepare(config.pool.count());
    let files = files.map(Files::restrict).transpose().context("Landlock")?;
    HOLDS_FOR_FILES.store(files.is_some(), Ordering::Relaxed);
    match capabilities::drop_all(by_itself, tcp) {
        Err(errno) if options.mode == Mode::On => {
            return Err(errno).context("--sandbox on: cannot drop capabilities");
        }
        Err(errno) => warn!("the sandbox does not drop capabilities: {errno}"),
        Ok(()) => {}
    }
    let needs = Needs { supervisor, tcp, by_itself, aio: rings.signals == 0 };
    let calls = match filter::install(needs) {
        Ok(()) => format!("{} system calls", calls::all(needs.by_itself).count()),
        Err(why) if options.mode == Mode::On => return Err(why.context("--sandbox on")),
        Err(why) => {
            warn!("the sandbox does not restrict system calls: {why:#}");
            "all system calls".to_owned()
        }
    };
    let held = files.as_ref().map(|files| format!("{} and ", files.held)).unwrap_or_default();
    let user = options.user.as_ref().map(|user| format!(", user {user}")).unwrap_or_default();
    info!("sandbox on: {calls} allowed; {held}privilege gain blocked{user}");
    Ok(files)
}

/// True if file access is restricted.
static HOLDS_FOR_FILES: AtomicBool = AtomicBool::new(false);

/// Adds a remedy to an error at a socket, if the sandbox may be the cause.
pub(super) fn explain(why: anyhow::Error) -> anyhow::Error {
    with_remedy(
        why,
        "the sandbox permits only sockets that were named at the start or added by `shadowbell \
         ctl`; restart `serve` with `--allow DIRECTORY` to permit others",
    )
}

/// Adds a remedy to an error at a TCP address, if the sandbox may be the cause.
pub(super) fn explain_tcp(why: anyhow::Error) -> anyhow::Error {
    with_remedy(
        why,
        "the sandbox permits only the TCP addresses that the server was started with; use \
         `--nbd unix:PATH`, or add the export to the configuration file and restart `serve`",
    )
}

/// Adds a remedy to an error, if the sandbox may be the cause.
fn with_remedy(why: anyhow::Error, remedy: &'static str) -> anyhow::Error {
    let mut causes = why.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    let is_denied = causes.any(|cause| cause.kind() == io::ErrorKind::PermissionDenied);
    if !is_denied || !HOLDS_FOR_FILES.load(Ordering::Relaxed) {
        return why;
    }
    why.context(remedy)
}

/// Reason why the configuration cannot be served in a sandbox.
fn conflict(config: &ServerConfig) -> Option<String> {
    if let Some(export) = config.exports.iter().find(|export| export.is_privileged()) {
        return Some(format!("the export `{}` needs privileges", export.id));
    }
    config
        .disk_specs()
        .find_map(|disk| Some(format!("{disk} {}", disk_kinds::sandbox_conflict(disk)?)))
}

/// First NBD disk of the configuration.
fn nbd_disk(config: &ServerConfig) -> Option<&str> {
    config.disk_specs().find(|disk| disk_kinds::nbd_peer(disk).is_some())
}

/// Caches system values that the sandbox makes unreadable.
fn store_unreadable_values() {
    socket_path::fix_directory();
    process_env::store_initial_state();
    processors::store_affinity();
    read_limits();
}

/// Sets resource limits that a server process never needs to exceed.
fn limit() {
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    // A core dump would write guests' memory to a file.
    let _ = setrlimit(Resource::Core, none);
    let _ = setrlimit(Resource::Msgqueue, none);
    let _ = setrlimit(Resource::Rtprio, none);
    let files = getrlimit(Resource::Nofile);
    let _ = setrlimit(Resource::Nofile, Rlimit { maximum: files.current, ..files });
}
