//! Server-wide requests: status, configuration, statistics, log level, upgrade and shutdown.

use super::exports;
use super::lookup::problem;
use super::metrics;
use super::state::ServerState;
use crate::guard::{self, Loss};
use crate::reload::apply as apply_config;
use crate::stats_report;
use shadowbell_config::config_file;
use shadowbell_config::config_file::write::{self, Settings};
use shadowbell_config::server_config::SocketConfig;
use shadowbell_control_api::api::{
    Apply, Code, Configuration, Disk, LogLevel, Plan, Problem, Status, Upgrade,
};
use shadowbell_control_api::live_stats::{Row, Snapshot};
use shadowbell_process::{exit, logging};
use shadowbell_supervisor::client::{SupervisorClient, program};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tracing::info;

/// Status of the server
#[utoipa::path(get, path = "/v1/status", operation_id = "status", tag = "server",
    responses((status = 200, description = "The status", body = Status)))]
pub(super) fn status(state: &ServerState) -> Status {
    let served = state.controllers.all();
    let disks = super::disks::disks(state);
    Status {
        name: state.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        supervisor_pid: state.supervisor_pid,
        uptime_seconds: state.serves_since.elapsed().as_secs_f64(),
        workers: state.workers,
        controllers: served.len(),
        clients: served.iter().filter(|served| served.has_client()).count(),
        waiting: state.controllers.waiting().len(),
        stalled_writes: disks.iter().map(|disk| disk.stalled_writes).sum(),
        stalled: disks.iter().filter(|disk| disk.stalled).count(),
        stopped: disks.iter().filter(|disk| disk.stopped.is_some()).count(),
        open_files_left: state.changes.files_left(),
        log_filter: logging::filter(),
        upgrade_error: state.upgrade_error.lock().clone(),
    }
}

/// Apply a configuration file to the controllers
///
/// Controllers whose configuration is the same are not touched. Controllers that differ only in
/// added or removed namespaces, in limits, or in read-only keep their clients. An invalid file is
/// refused as a whole. Server-wide settings (I/O threads, polling, sockets of the server) take
/// effect at the next upgrade or restart.
#[utoipa::path(post, path = "/v1/apply", operation_id = "apply", tag = "controllers",
    request_body = Apply,
    responses(
        (status = 200, description = "The changes that were made, or would be made", body = Plan),
        (status = 400, description = "The file is invalid", body = Problem),
        (status = 409, description = "Connected clients would lose controllers, namespaces or exports \
            (`client-attached`)",
            body = Problem)
    ))]
pub(super) fn apply(state: &ServerState, wanted: &Apply) -> Result<Plan, Problem> {
    let config = config_file::parse(&wanted.toml, &wanted.file);
    let mut config = config.map_err(|why| Problem::new(Code::BadRequest, why))?;
    config.add_attached().map_err(problem)?;
    let now = state.settings.with_measure(state.tracer.measures());
    let later = Settings::of(&config).contradictions(&now);
    let plan = apply_config(&state.changes, config, wanted.dry_run, wanted.force);
    let plan = plan.map_err(problem)?;
    let ids = |all: &[SocketConfig]| all.iter().map(SocketConfig::id).collect();
    Ok(Plan {
        applied: !wanted.dry_run,
        add: ids(&plan.add),
        remove: plan.remove,
        replace: ids(&plan.replace),
        change: plan.change.into_iter().map(|(id, _)| id).collect(),
        unchanged: plan.unchanged,
        busy: plan.busy,
        losses: plan.lost.iter().map(Loss::to_string).collect(),
        differences: plan.differences,
        later,
    })
}

/// Configuration file of the running server
///
/// Paths are absolute, and each namespace that was changed has its NSID and UUID, so the file can
/// be used in any directory.
#[utoipa::path(get, path = "/v1/config", operation_id = "configuration", tag = "server",
    responses((status = 200, description = "The file", body = Configuration)))]
pub(super) fn configuration(state: &ServerState) -> Configuration {
    let waiting = state.controllers.waiting().into_iter();
    let waiting = waiting.map(|one| (one.index, Arc::new(one.requested)));
    let served = state.controllers.all().into_iter().map(|one| (one.index, one.requested()));
    let controllers: BTreeMap<_, _> = waiting.chain(served).collect();
    let controllers: Vec<_> = controllers.into_values().collect();
    let settings = state.settings.with_measure(state.tracer.measures());
    Configuration {
        toml: write::write(
            &settings,
            &state.name,
            &state.changes.named_disks(),
            &controllers,
            &state.changes.exports().wanted(),
        ),
    }
}

/// Statistics of the server
///
/// Sums over the I/O queues of all controllers, and the counters of each controller's queues, I/O
/// threads and disks.
#[utoipa::path(get, path = "/v1/stats", operation_id = "stats", tag = "server",
    responses((status = 200, description = "The counters", body = serde_json::Value)))]
pub(super) fn stats(state: &ServerState) -> stats_report::Report {
    stats_report::Report::of(&state.controllers.all())
}

/// Snapshot of the values that `shadowbell top` shows
#[utoipa::path(get, path = "/v1/snapshot", operation_id = "snapshot", tag = "server",
    responses((status = 200, description = "A row for each controller and export", body = Snapshot)))]
pub(super) fn snapshot(state: &ServerState) -> Snapshot {
    let at_ns = u64::try_from(state.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let rows = state.controllers.all();
    let disks = super::disks::disks(state);
    let users = |is_it: fn(&Disk) -> bool| -> BTreeSet<&str> {
        let found = disks.iter().filter(|disk| is_it(disk));
        found.flat_map(|disk| &disk.namespaces).map(|user| &user.controller[..]).collect()
    };
    let (stalled, stopped) = (users(|disk| disk.stalled), users(|disk| disk.stopped.is_some()));
    let mut waits = state.waits.read(&state.changes);
    let rows = rows.iter().map(|served| Row {
        id: served.id.clone(),
        stalled: stalled.contains(&served.id[..]),
        stopped: stopped.contains(&served.id[..]),
        waits: waits.remove(&served.controller.number()).unwrap_or_default().waits,
        ..Row::of(&served.name, &served.controller)
    });
    let waiting = state.controllers.waiting();
    let waiting = waiting.iter().map(|one| Row {
        id: one.requested.id(),
        socket: one.requested.socket.display().to_string(),
        waiting: true,
        ..Row::default()
    });
    let controllers = rows.chain(waiting).collect();
    Snapshot { at_ns, controllers, exports: exports::exports(state) }
}

/// Metrics for Prometheus: OpenMetrics 1.0
///
/// Also served at the address of `serve --metrics ADDR:PORT`, without access control.
#[utoipa::path(get, path = "/metrics", operation_id = "metrics", tag = "server",
    responses((status = 200, description = "The metrics", body = String,
        content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8")))]
pub(super) fn metrics(state: &ServerState) -> String {
    metrics::text(state)
}

/// Log filter
#[utoipa::path(get, path = "/v1/log-level", operation_id = "log_level", tag = "server",
    responses((status = 200, description = "The filter", body = LogLevel)))]
pub(super) fn log_level() -> LogLevel {
    LogLevel { filter: logging::filter() }
}

/// Change the log filter
#[utoipa::path(put, path = "/v1/log-level", operation_id = "set_log_level", tag = "server",
    request_body = LogLevel,
    responses(
        (status = 200, description = "The new filter", body = LogLevel),
        (status = 400, description = "Invalid filter", body = Problem)
    ))]
pub(super) fn set_log_level(wanted: &LogLevel) -> Result<LogLevel, Problem> {
    logging::set_filter(&wanted.filter).map_err(|why| Problem::new(Code::BadRequest, why))?;
    info!("the log filter is {} from now on", wanted.filter);
    Ok(log_level())
}

/// Replace the server process
///
/// The upgrade is only started, and may fail: then `upgrade_error` of the status has the reason.
/// After the upgrade the status has another `pid`. Requires a supervisor.
#[utoipa::path(post, path = "/v1/upgrade", operation_id = "upgrade", tag = "server",
    request_body = Option<Upgrade>,
    responses(
        (status = 202, description = "The upgrade was started", body = Status),
        (status = 409, description = "The server has no supervisor; or a program is named, and the server is in a sandbox",
            body = Problem)
    ))]
pub(super) fn upgrade(state: &ServerState, wanted: Upgrade) -> Result<Status, Problem> {
    let pid = state.supervisor_pid.ok_or_else(|| {
        let why = "the server has no supervisor, which an upgrade needs: start it with `shadowbell \
                   serve` without `--no-supervisor`";
        Problem::new(Code::Conflict, why)
    })?;
    let failed = |error: anyhow::Error| Problem::new(Code::Failed, exit::line(&error));
    let binary = wanted.binary.map(PathBuf::from);
    let outcome: Box<dyn FnOnce() -> anyhow::Result<String> + Send> = match &state.upgrade_requester
    {
        Some(_) if binary.is_some() => {
            let why = "a server in a sandbox cannot choose a program: use `shadowbell upgrade \
                       --binary`";
            return Err(Problem::new(Code::Conflict, why));
        }
        Some(upgrade_requester) => {
            let supervisor = upgrade_requester.upgrade().map_err(|error| failed(error.into()))?;
            Box::new(move || supervisor.outcome())
        }
        None => {
            let supervisor = SupervisorClient::find(Path::new(&pid.to_string())).map_err(failed)?;
            let binary = binary.as_deref().map(|path| program("`binary`", path)).transpose();
            let binary =
                binary.map_err(|error| Problem::new(Code::BadRequest, exit::line(&error)))?;
            Box::new(move || supervisor.upgrade(binary.as_deref()))
        }
    };
    let last_error = Arc::clone(&state.upgrade_error);
    *last_error.lock() = None;
    // `outcome` waits until this process is replaced, or until the upgrade has failed.
    let wait = move || {
        if let Err(error) = outcome() {
            *last_error.lock() = Some(exit::line(&error));
        }
    };
    let thread = std::thread::Builder::new().name("sb-upgrade".into()).spawn(wait);
    thread.map_err(|error| Problem::new(Code::Failed, error.to_string()))?;
    Ok(status(state))
}

/// End the service, as SIGTERM does
#[utoipa::path(post, path = "/v1/shutdown", operation_id = "shutdown", tag = "server",
    params(("force" = Option<bool>, Query, description = "End the service although clients are connected")),
    responses(
        (status = 202, description = "The service ends", body = Status),
        (status = 409, description = "Clients are connected (`client-attached`)", body = Problem)
    ))]
pub(super) fn shutdown(state: &ServerState, force: bool) -> Result<Status, Problem> {
    let all = state.controllers.all();
    let lost = "would lose the controller".to_owned();
    let losses = all.iter().filter_map(|served| Loss::of_controller(served, lost.clone()));
    let exports = state.changes.exports();
    let exports = exports.map(|export| export.config.id.clone());
    let waiting = state.controllers.waiting();
    let losses = losses.chain(waiting.iter().map(Loss::of_waiting));
    let losses = losses.chain(exports.iter().filter_map(|id| state.changes.exports().loss(id)));
    guard::check(&losses.collect::<Vec<_>>(), force).map_err(problem)?;
    info!("shutdown was requested at the control socket");
    let status = status(state);
    (state.end)();
    Ok(status)
}
