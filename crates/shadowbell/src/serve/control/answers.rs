//! What is answered, and what the document says of it.
//!
//! A function each, which may wait: they run on threads of their own.

use super::ana;
use super::lookup::{find, problem};
use super::measure;
use super::metrics;
use super::routes::Route;
use super::trace::{self, TraceBody};
use super::view::{View, namespaces_of};
use crate::control::api::{
    Apply, Code, Configuration, Controller, ControllerSpec, ControllerState, LimitGroup, LimitSpec,
    LogLevel, Namespace, NamespaceChange, NamespaceSpec, Plan, Problem, Size, Status, Upgrade,
};
use crate::controller_config::{ControllerConfig, DiskConfig};
use crate::keeper_query::{Keeper, program};
use crate::limits::{self, DiskLimits};
use crate::live_stats::{self, Row, Snapshot};
use crate::serve::apply::apply as apply_config;
use crate::serve::config_file::{self, Settings};
use crate::serve::registry::ServedController;
use crate::serve::server_config::{Own, SocketConfig, WorkerChoice};
use crate::serve::stats_file;
use crate::uuid_text::parse_uuid;
use crate::{exit, logging};
use http_body_util::{Either, Full};
use hyper::body::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use shadowbell_controller::Inquiry;
use shadowbell_spec::regs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tracing::info;
use utoipa::OpenApi;

/// What is answered: as a whole, or in pieces.
pub(super) type Body = Either<Full<Bytes>, TraceBody>;

/// An answer, whatever it is about.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) content_type: &'static str,
    pub(super) body: Body,
}

const JSON: &str = "application/json";
const OCTETS: &str = "application/octet-stream";

/// What is complete.
fn whole(body: Vec<u8>) -> Body {
    Body::Left(Full::new(body.into()))
}

impl From<TraceBody> for Answer {
    fn from(body: TraceBody) -> Self {
        Self { status: 200, content_type: OCTETS, body: Body::Right(body) }
    }
}

impl Answer {
    fn json(status: u16, body: &impl Serialize) -> Self {
        // Numbers and strings: it can not fail.
        let mut body = serde_json::to_vec(body).unwrap_or_default();
        body.push(b'\n');
        Self { status, content_type: JSON, body: whole(body) }
    }

    pub(super) fn problem(problem: &Problem) -> Self {
        Self::json(problem.status(), problem)
    }
}

/// The document of the requests and their answers.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "shadowbell serve",
        description = "The control socket of a running server. HTTP/1.1 over a Unix socket, by \
                       default /run/shadowbell/NAME/control.sock. The only clients are the user \
                       that the server runs as, and root.",
        license(name = "MIT OR Apache-2.0", identifier = "MIT OR Apache-2.0")
    ),
    paths(
        status,
        controllers,
        controller,
        add_controller,
        remove_controller,
        add_namespace,
        remove_namespace,
        change_namespace,
        ana::set_ana,
        apply,
        configuration,
        limit_groups,
        set_limit_group,
        identify,
        log_page,
        namespaces,
        stats,
        snapshot,
        log_level,
        set_log_level,
        trace::trace,
        trace::set_trace,
        measure::measure,
        measure::set_measure,
        trace::trace_records,
        upgrade,
        shutdown,
        metrics
    ),
    components(schemas(Problem))
)]
struct Document;

/// The document, as JSON.
pub(super) fn document() -> String {
    let mut text = Document::openapi().to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// Carries out a request.
///
/// # Errors
/// Why not.
pub(super) fn answer(view: &View, route: Route, body: &[u8]) -> Result<Answer, Problem> {
    Ok(match route {
        Route::Status => Answer::json(200, &status(view)),
        Route::Controllers => Answer::json(200, &controllers(view)),
        Route::Controller(id) => Answer::json(200, &controller(view, &id)?),
        Route::AddController(id) => {
            let (is_new, controller) = add_controller(view, &id, &parse(body)?)?;
            Answer::json(if is_new { 201 } else { 200 }, &controller)
        }
        Route::RemoveController { id, force } => {
            remove_controller(view, &id, force)?;
            Answer { status: 204, content_type: JSON, body: whole(Vec::new()) }
        }
        Route::AddNamespace { id, nsid } => {
            let (is_new, namespace) = add_namespace(view, &id, nsid, &parse(body)?)?;
            Answer::json(if is_new { 201 } else { 200 }, &namespace)
        }
        Route::RemoveNamespace { id, nsid } => {
            remove_namespace(view, &id, nsid)?;
            Answer { status: 204, content_type: JSON, body: whole(Vec::new()) }
        }
        Route::ChangeNamespace { id, nsid } => {
            Answer::json(200, &change_namespace(view, &id, nsid, &parse(body)?)?)
        }
        Route::SetAna { id, group } => {
            Answer::json(200, &ana::set_ana(view, &id, group, &parse(body)?)?)
        }
        Route::Apply => Answer::json(200, &apply(view, &parse(body)?)?),
        Route::LimitGroups => Answer::json(200, &limit_groups()),
        Route::SetLimitGroup(name) => {
            Answer::json(200, &set_limit_group(view, &name, &parse(body)?)?)
        }
        Route::Configuration => Answer::json(200, &configuration(view)),
        Route::Identify { id, cns, nsid } => bytes(identify(view, &id, cns, nsid)?),
        Route::LogPage { id, lid } => bytes(log_page(view, &id, lid)?),
        Route::Namespaces => Answer::json(200, &namespaces(view)),
        Route::Stats => Answer::json(200, &stats(view)),
        Route::Snapshot => Answer::json(200, &snapshot(view)),
        Route::LogLevel => Answer::json(200, &log_level()),
        Route::SetLogLevel => Answer::json(200, &set_log_level(&parse(body)?)?),
        Route::Trace => Answer::json(200, &trace::trace(view)),
        Route::Measure => Answer::json(200, &measure::measure(view)),
        Route::SetMeasure => Answer::json(200, &measure::set_measure(view, &parse(body)?)),
        Route::SetTrace => Answer::json(200, &trace::set_trace(view, &parse(body)?)?),
        Route::TraceRecords => trace::trace_records(view)?.into(),
        Route::Upgrade => {
            let wanted = if body.is_empty() { Upgrade::default() } else { parse(body)? };
            Answer::json(202, &upgrade(view, wanted)?)
        }
        Route::Shutdown => Answer::json(202, &shutdown(view)),
        Route::Document => {
            Answer { status: 200, content_type: JSON, body: whole(document().into_bytes()) }
        }
        Route::Metrics => {
            let body = whole(metrics(view).into_bytes());
            Answer { status: 200, content_type: metrics::CONTENT_TYPE, body }
        }
    })
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    serde_json::from_slice(body)
        .map_err(|error| Problem::new(Code::BadRequest, format!("the request's body: {error}")))
}

/// What the server is, and how much it has to do
#[utoipa::path(get, path = "/v1/status", operation_id = "status", tag = "server",
    responses((status = 200, description = "What it is", body = Status)))]
fn status(view: &View) -> Status {
    let served = view.controllers.all();
    Status {
        name: view.name.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
        keeper_pid: view.keeper_pid,
        uptime_seconds: view.serves_since.elapsed().as_secs_f64(),
        workers: view.workers,
        controllers: served.len(),
        clients: served.iter().filter(|served| served.has_client()).count(),
        log_filter: logging::filter(),
        upgrade_error: view.upgrade_error.lock().clone(),
    }
}

/// All controllers, in the order of the configuration
#[utoipa::path(get, path = "/v1/controllers", operation_id = "controllers", tag = "controllers",
    responses((status = 200, description = "All of them", body = Vec<Controller>)))]
fn controllers(view: &View) -> Vec<Controller> {
    view.controllers.all().iter().map(|served| describe(served)).collect()
}

/// One controller
#[utoipa::path(get, path = "/v1/controllers/{id}", operation_id = "controller",
    tag = "controllers",
    params(("id" = String, Path, description = "The controller's `id`")),
    responses(
        (status = 200, description = "It is there", body = Controller),
        (status = 404, description = "It is not", body = Problem)
    ))]
fn controller(view: &View, id: &str) -> Result<Controller, Problem> {
    find(view, id).map(|served| describe(&served))
}

/// Serve another controller
///
/// The same request again changes nothing (200), so it may be repeated.
#[utoipa::path(put, path = "/v1/controllers/{id}", operation_id = "add_controller",
    tag = "controllers",
    params(("id" = String, Path, description = "What it is to be called")),
    request_body = ControllerSpec,
    responses(
        (status = 200, description = "It is there already", body = Controller),
        (status = 201, description = "It is served", body = Controller),
        (status = 400, description = "There can be no such controller", body = Problem),
        (status = 409, description = "There is another of that id", body = Problem)
    ))]
fn add_controller(
    view: &View,
    id: &str,
    wanted: &ControllerSpec,
) -> Result<(bool, Controller), Problem> {
    let wrong = |why: String| Problem::new(Code::BadRequest, why);
    let asked = asked(id, wanted).map_err(wrong)?;
    let is_new = view.changes.add(asked).map_err(problem)?;
    Ok((is_new, controller(view, id)?))
}

/// Serve a controller no more
///
/// Its socket is removed, its disks are flushed and closed.
#[utoipa::path(delete, path = "/v1/controllers/{id}", operation_id = "remove_controller",
    tag = "controllers",
    params(
        ("id" = String, Path, description = "The controller's `id`"),
        ("force" = Option<bool>, Query, description = "Take it away from a client that has it")
    ),
    responses(
        (status = 204, description = "It is gone"),
        (status = 404, description = "There is none", body = Problem),
        (status = 409, description = "A client has it", body = Problem)
    ))]
fn remove_controller(view: &View, id: &str, force: bool) -> Result<(), Problem> {
    view.changes.remove(id, force).map_err(problem)
}

/// Have the controllers be those of a configuration file
///
/// Controllers that are the same stay untouched; those that differ in namespaces that come or go, in
/// limits, or in whether writes are taken, stay with their clients. The file is refused as a whole
/// if something is wrong with it. Of what is neither a controller nor a limit group (workers,
/// polling, sockets of the server) nothing changes before the server goes on in another process, or
/// is started again.
#[utoipa::path(post, path = "/v1/apply", operation_id = "apply", tag = "controllers",
    request_body = Apply,
    responses(
        (status = 200, description = "What was, or would be done", body = Plan),
        (status = 400, description = "Something is wrong with the file", body = Problem),
        (status = 409, description = "Clients have what would go", body = Problem)
    ))]
fn apply(view: &View, wanted: &Apply) -> Result<Plan, Problem> {
    let config = config_file::parse(&wanted.toml, &wanted.file);
    let mut config = config.map_err(|why| Problem::new(Code::BadRequest, why))?;
    config.add_attached().map_err(problem)?;
    let now = view.settings.with_measure(view.tracer.measures());
    let later = Settings::of(&config).say_otherwise(&now);
    let plan = apply_config(&view.changes, config, wanted.dry_run, wanted.force);
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
        differences: plan.differences,
        later,
    })
}

/// Add a namespace to a controller
///
/// The guest is told, and may use it at once. The same request again changes nothing (200), so it
/// may be repeated.
#[utoipa::path(put, path = "/v1/controllers/{id}/namespaces/{nsid}",
    operation_id = "add_namespace", tag = "namespaces",
    params(
        ("id" = String, Path, description = "The controller's `id`"),
        ("nsid" = u32, Path, description = "The number that it is to have, from 1")
    ),
    request_body = NamespaceSpec,
    responses(
        (status = 200, description = "It is there already", body = Namespace),
        (status = 201, description = "It is served", body = Namespace),
        (status = 400, description = "There can be no such namespace", body = Problem),
        (status = 404, description = "There is no such controller", body = Problem),
        (status = 409, description = "There is another of that number", body = Problem)
    ))]
fn add_namespace(
    view: &View,
    id: &str,
    nsid: u32,
    wanted: &NamespaceSpec,
) -> Result<(bool, Namespace), Problem> {
    let wrong = |why: String| Problem::new(Code::BadRequest, why);
    let uuid = wanted.uuid.as_deref().map(uuid).transpose().map_err(wrong)?;
    let disk = DiskConfig::with(wanted.disk.clone(), uuid, Some(nsid));
    let is_new = view.changes.add_namespace(id, nsid, &disk).map_err(problem)?;
    Ok((is_new, namespace(view, id, nsid)?))
}

/// Remove a namespace of a controller
///
/// The guest is told. Commands that are under way end with an error; what was written is flushed,
/// and the disk is closed.
#[utoipa::path(delete, path = "/v1/controllers/{id}/namespaces/{nsid}",
    operation_id = "remove_namespace", tag = "namespaces",
    params(
        ("id" = String, Path, description = "The controller's `id`"),
        ("nsid" = u32, Path, description = "Its number")
    ),
    responses(
        (status = 204, description = "It is gone"),
        (status = 404, description = "There is none", body = Problem),
        (status = 409, description = "It is the last one", body = Problem)
    ))]
fn remove_namespace(view: &View, id: &str, nsid: u32) -> Result<(), Problem> {
    view.changes.remove_namespace(id, nsid).map_err(problem)
}

/// Change a namespace: its size, its disk, whether it takes writes, or how many
///
/// The guest is told. If it is so already, nothing changes.
#[utoipa::path(patch, path = "/v1/controllers/{id}/namespaces/{nsid}",
    operation_id = "change_namespace", tag = "namespaces",
    params(
        ("id" = String, Path, description = "The controller's `id`"),
        ("nsid" = u32, Path, description = "Its number")
    ),
    request_body = NamespaceChange,
    responses(
        (status = 200, description = "It is so", body = Namespace),
        (status = 400, description = "It can not be that", body = Problem),
        (status = 404, description = "There is none", body = Problem),
        (status = 409, description = "Its disk, or the server, is not in a state for it",
            body = Problem)
    ))]
fn change_namespace(
    view: &View,
    id: &str,
    nsid: u32,
    wanted: &NamespaceChange,
) -> Result<Namespace, Problem> {
    use crate::serve::namespaces::NamespaceChange as Change;
    let change = match wanted.clone() {
        NamespaceChange { size: Some(Size::Whole), disk: None, read_only: None, limits: None } => {
            Change::Size(None)
        }
        NamespaceChange {
            size: Some(Size::Bytes(bytes)),
            disk: None,
            read_only: None,
            limits: None,
        } => Change::Size(Some(bytes)),
        NamespaceChange { size: None, disk: Some(disk), read_only: None, limits: None } => {
            Change::Disk(disk)
        }
        NamespaceChange { size: None, disk: None, read_only: Some(on), limits: None } => {
            Change::ReadOnly(on)
        }
        NamespaceChange { size: None, disk: None, read_only: None, limits: Some(limits) } => {
            Change::Limits(limits.parse().map_err(|why| Problem::new(Code::BadRequest, why))?)
        }
        _ => {
            let why = "one of `size`, `disk`, `read_only` and `limits` is to be given";
            return Err(Problem::new(Code::BadRequest, why));
        }
    };
    view.changes.change_namespace(id, nsid, &change).map_err(problem)?;
    namespace(view, id, nsid)
}

fn namespace(view: &View, id: &str, nsid: u32) -> Result<Namespace, Problem> {
    let served = find(view, id)?;
    let found = namespaces_of(&served).find(|namespace| namespace.nsid == nsid);
    found.ok_or_else(|| Problem::new(Code::NotFound, format!("there is no namespace {nsid}")))
}

/// A configuration file that comes to what is served now
///
/// Paths in it are from the root, and each namespace that has changed has its number and its UUID,
/// so it may be used anywhere.
#[utoipa::path(get, path = "/v1/config", operation_id = "configuration", tag = "server",
    responses((status = 200, description = "The file", body = Configuration)))]
fn configuration(view: &View) -> Configuration {
    let controllers: Vec<_> = view.controllers.all().iter().map(|one| one.asked()).collect();
    let settings = view.settings.with_measure(view.tracer.measures());
    Configuration { toml: config_file::write(&settings, &view.name, &controllers) }
}

/// All groups of disks that share limits
#[utoipa::path(get, path = "/v1/limit-groups", operation_id = "limit_groups", tag = "namespaces",
    responses((status = 200, description = "All of them", body = Vec<LimitGroup>)))]
fn limit_groups() -> Vec<LimitGroup> {
    limits::groups().iter().map(limit_group).collect()
}

fn limit_group(group: &limits::Group) -> LimitGroup {
    let own = DiskLimits { own: group.limits, group: None };
    LimitGroup { name: group.name.clone(), limits: LimitSpec::of(&own) }
}

/// Change what the disks of a group may take together
///
/// All of its limits: what is not given is not limited. A group is there as soon as it is named.
#[utoipa::path(put, path = "/v1/limit-groups/{name}", operation_id = "set_limit_group",
    tag = "namespaces",
    params(("name" = String, Path, description = "Its name")),
    request_body = LimitSpec,
    responses(
        (status = 200, description = "It is so", body = LimitGroup),
        (status = 400, description = "There can be no such limits", body = Problem)
    ))]
fn set_limit_group(view: &View, name: &str, wanted: &LimitSpec) -> Result<LimitGroup, Problem> {
    let wrong = |why: String| Problem::new(Code::BadRequest, why);
    let limits = wanted.parse().map_err(wrong)?;
    if limits.group.is_some() {
        return Err(wrong("a group is not in another one".to_owned()));
    }
    view.changes.limit_group(name, limits.own).map_err(problem)?;
    Ok(limit_group(&limits::Group { name: name.to_owned(), limits: limits.own }))
}

fn uuid(text: &str) -> Result<[u8; 16], String> {
    parse_uuid(text).ok_or_else(|| format!("`{text}` is no UUID"))
}

/// A controller as it was asked for by a request.
fn asked(id: &str, spec: &ControllerSpec) -> Result<SocketConfig, String> {
    let socket = PathBuf::from(&spec.socket);
    if !socket.is_absolute() {
        return Err(format!("`socket` is a path from the root, not `{}`", spec.socket));
    }
    if spec.disks.is_empty() {
        return Err("a controller has one disk at least".to_owned());
    }
    if spec.queues.is_some_and(|queues| !(1..=64).contains(&queues)) {
        return Err("`queues` is 1 to 64".to_owned());
    }
    if spec.queue_entries.is_some_and(|entries| !(2..=4096).contains(&entries)) {
        return Err("`queue_entries` is 2 to 4096".to_owned());
    }
    let disks = spec.disks.iter().map(|disk| {
        let uuid = disk.uuid.as_deref().map(uuid).transpose()?;
        Ok(DiskConfig::with(disk.disk.clone(), uuid, disk.nsid))
    });
    let worker = spec.worker.as_deref().map(|worker| match worker {
        "own" => Ok(WorkerChoice::Own(Own::Own)),
        number => number.parse().map(WorkerChoice::Shared).map_err(|_| {
            format!("`worker` is the number of a worker, from 0, or `own`, not `{number}`")
        }),
    });
    let controller = ControllerConfig {
        disks: disks.collect::<Result<_, String>>()?,
        serial: spec.serial.clone(),
        model: spec.model.clone(),
        queues: spec.queues,
        queue_entries: spec.queue_entries,
        max_transfer: spec.max_transfer,
        doorbells: spec.doorbells,
        read_only: spec.read_only,
        pool: None,
        subsystem: None,
    };
    config_file::check_nsids(&controller.disks)?;
    let mut asked =
        SocketConfig { id: None, socket, controller, worker: worker.transpose()?, origin: None };
    // A socket is an id without being given.
    if asked.id() != id {
        config_file::check_id(id)?;
        asked.id = Some(id.to_owned());
    }
    Ok(asked)
}

/// What Identify shows the guest
///
/// It is answered whether or not a guest has the controller, and changes nothing.
#[utoipa::path(get, path = "/v1/controllers/{id}/identify/{cns}/{nsid}", operation_id = "identify",
    tag = "controllers",
    params(
        ("id" = String, Path, description = "The controller's `id`"),
        ("cns" = u8, Path, description = "Which structure: 1 is Identify Controller, 0 is Identify \
                                          Namespace"),
        ("nsid" = u32, Path, description = "The number of a namespace, or 0")
    ),
    responses(
        (status = 200, description = "The structure, 4096 bytes as NVMe defines them",
            body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 400, description = "The guest would get an error", body = Problem),
        (status = 404, description = "There is no such controller", body = Problem)
    ))]
fn identify(view: &View, id: &str, cns: u8, nsid: u32) -> Result<Vec<u8>, Problem> {
    inquire(view, id, Inquiry::Identify { cns, nsid })
}

/// A log page, as the guest can read it
///
/// It is answered whether or not a guest has the controller, and changes nothing: the guest's events
/// stay.
#[utoipa::path(get, path = "/v1/controllers/{id}/log-page/{lid}", operation_id = "log_page",
    tag = "controllers",
    params(
        ("id" = String, Path, description = "The controller's `id`"),
        ("lid" = u8, Path, description = "Which page: 1 is Error Information, 2 is SMART / Health \
                                          Information")
    ),
    responses(
        (status = 200, description = "The page, at most 4096 bytes as NVMe defines them",
            body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 400, description = "The guest would get an error", body = Problem),
        (status = 404, description = "There is no such controller", body = Problem)
    ))]
fn log_page(view: &View, id: &str, lid: u8) -> Result<Vec<u8>, Problem> {
    inquire(view, id, Inquiry::LogPage(lid))
}

fn inquire(view: &View, id: &str, inquiry: Inquiry) -> Result<Vec<u8>, Problem> {
    let outcome = find(view, id)?.controller.inquire(inquiry);
    outcome
        .map_err(|status| Problem::new(Code::BadRequest, format!("the controller says: {status}")))
}

fn bytes(body: Vec<u8>) -> Answer {
    Answer { status: 200, content_type: OCTETS, body: whole(body) }
}

/// All namespaces of all controllers
#[utoipa::path(get, path = "/v1/namespaces", operation_id = "namespaces", tag = "controllers",
    responses((status = 200, description = "All of them", body = Vec<Namespace>)))]
fn namespaces(view: &View) -> Vec<Namespace> {
    view.controllers.all().iter().flat_map(|served| namespaces_of(served)).collect()
}

/// Every counter, as `serve --stats-json` writes them
///
/// Sums over the I/O queues of all controllers, and for each controller what its queues, its
/// workers and its disks have counted. They are read where they are counted.
#[utoipa::path(get, path = "/v1/stats", operation_id = "stats", tag = "server",
    responses((status = 200, description = "The counters", body = serde_json::Value)))]
fn stats(view: &View) -> stats_file::Report {
    stats_file::Report::of(&view.controllers.all())
}

/// What `shadowbell top` shows, of one moment
#[utoipa::path(get, path = "/v1/snapshot", operation_id = "snapshot", tag = "server",
    responses((status = 200, description = "A row for each controller", body = Snapshot)))]
fn snapshot(view: &View) -> Snapshot {
    let at_ns = u64::try_from(view.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let rows = view.controllers.all();
    let rows = rows.iter().map(|served| Row::of(&served.name, &served.controller));
    Snapshot { version: live_stats::VERSION, at_ns, controllers: rows.collect() }
}

/// All counters for Prometheus: OpenMetrics 1.0
///
/// Also at the address of `serve --metrics ADDR:PORT`, to whoever can reach it.
#[utoipa::path(get, path = "/metrics", operation_id = "metrics", tag = "server",
    responses((status = 200, description = "The metrics", body = String,
        content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8")))]
fn metrics(view: &View) -> String {
    metrics::text(view)
}

/// What is logged
#[utoipa::path(get, path = "/v1/log-level", operation_id = "log_level", tag = "server",
    responses((status = 200, description = "The filter", body = LogLevel)))]
fn log_level() -> LogLevel {
    LogLevel { filter: logging::filter() }
}

/// Change what is logged
#[utoipa::path(put, path = "/v1/log-level", operation_id = "set_log_level", tag = "server",
    request_body = LogLevel,
    responses(
        (status = 200, description = "It is logged from now on", body = LogLevel),
        (status = 400, description = "It is no filter", body = Problem)
    ))]
fn set_log_level(wanted: &LogLevel) -> Result<LogLevel, Problem> {
    logging::set_filter(&wanted.filter).map_err(|why| Problem::new(Code::BadRequest, why))?;
    info!("the log has {} from here on", wanted.filter);
    Ok(log_level())
}

/// Have another process go on
///
/// It is asked for, and may fail: then `upgrade_error` of the status says why. Once it is done, the
/// status has another `pid`. For a server with a keeper only.
#[utoipa::path(post, path = "/v1/upgrade", operation_id = "upgrade", tag = "server",
    request_body = Option<Upgrade>,
    responses(
        (status = 202, description = "The keeper was asked", body = Status),
        (status = 409, description = "There is no keeper; or a program is named, and the server is in a sandbox",
            body = Problem)
    ))]
fn upgrade(view: &View, wanted: Upgrade) -> Result<Status, Problem> {
    let pid = view.keeper_pid.ok_or_else(|| {
        let why = "the server has no keeper, which could replace it: start it with \
                   `shadowbell serve` without `--no-keeper`";
        Problem::new(Code::Conflict, why)
    })?;
    let failed = |error: anyhow::Error| Problem::new(Code::Failed, exit::line(&error));
    let binary = wanted.binary.map(PathBuf::from);
    let outcome: Box<dyn FnOnce() -> anyhow::Result<String> + Send> = match &view.asks {
        Some(_) if binary.is_some() => {
            let why = "a server in a sandbox names no program: `shadowbell upgrade --binary` does";
            return Err(Problem::new(Code::Conflict, why));
        }
        Some(asks) => {
            let keeper = asks.upgrade().map_err(|error| failed(error.into()))?;
            Box::new(move || keeper.outcome())
        }
        None => {
            let keeper = Keeper::find(Path::new(&pid.to_string())).map_err(failed)?;
            let binary = binary.as_deref().map(|path| program("`binary`", path)).transpose();
            let binary =
                binary.map_err(|error| Problem::new(Code::BadRequest, exit::line(&error)))?;
            Box::new(move || keeper.upgrade(binary.as_deref()))
        }
    };
    let last_error = Arc::clone(&view.upgrade_error);
    *last_error.lock() = None;
    // Its answer comes when this process has ended, or goes on.
    let wait = move || {
        if let Err(error) = outcome() {
            *last_error.lock() = Some(exit::line(&error));
        }
    };
    let thread = std::thread::Builder::new().name("sb-upgrade".into()).spawn(wait);
    thread.map_err(|error| Problem::new(Code::Failed, error.to_string()))?;
    Ok(status(view))
}

/// End the service, as SIGTERM does
#[utoipa::path(post, path = "/v1/shutdown", operation_id = "shutdown", tag = "server",
    responses((status = 202, description = "It ends", body = Status)))]
fn shutdown(view: &View) -> Status {
    info!("the control socket was asked to end the service");
    let status = status(view);
    (view.end)();
    status
}

fn describe(served: &ServedController) -> Controller {
    let config = served.controller.config();
    Controller {
        id: served.id.clone(),
        socket: served.socket.clone(),
        serial: config.serial.clone(),
        model: config.model.clone(),
        client: served.has_client(),
        state: state(&served.controller),
        max_queues: config.io_queues,
        namespaces: namespaces_of(served).collect(),
        ana: ana::groups(served).collect(),
    }
}

fn state(controller: &shadowbell_controller::Controller) -> ControllerState {
    let mut bytes = [0; 4];
    controller.read(regs::CSTS, &mut bytes);
    let csts = regs::Csts::from_bits(u32::from_le_bytes(bytes));
    match csts {
        _ if csts.cfs() => ControllerState::Failed,
        _ if csts.shst() != 0 => ControllerState::ShutDown,
        _ if csts.rdy() => ControllerState::Ready,
        _ => ControllerState::Disabled,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::control::routes::{Via, route};
    use hyper::Method;
    use std::collections::BTreeSet;

    /// `BLESS=1 cargo test -p shadowbell --lib document` writes it anew.
    #[test]
    fn the_document_in_docs_is_that_of_the_types() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
        let now = document();
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&path, &now).unwrap();
        }
        let kept = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(kept == now, "docs/openapi.json is out of date: run this test with BLESS=1");
    }

    #[test]
    fn what_the_document_says_is_there_and_says_why_it_is_refused() {
        let document: serde_json::Value = serde_json::from_str(&document()).unwrap();
        let paths = document["paths"].as_object().unwrap();
        for (path, methods) in paths {
            let uri = path.replace("{id}", "x").replace("{nsid}", "1").replace("{name}", "x");
            let uri = uri.replace("{group}", "1");
            let uri = uri.replace("{cns}", "1").replace("{lid}", "1").parse().unwrap();
            for method in methods.as_object().unwrap().keys() {
                let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
                route(Via::Socket, &method, &uri).unwrap();
            }
            let refused = route(Via::Socket, &Method::TRACE, &uri).unwrap_err();
            let said: BTreeSet<String> =
                refused.allow.unwrap().split(", ").map(str::to_lowercase).collect();
            let documented: BTreeSet<String> =
                methods.as_object().unwrap().keys().cloned().collect();
            assert_eq!(said, documented, "{path}");
        }
        for name in ["Status", "Controller", "Namespace", "Problem", "LogLevel", "Snapshot", "Row"]
        {
            assert!(document["components"]["schemas"][name].is_object(), "{name}");
        }
    }
}
