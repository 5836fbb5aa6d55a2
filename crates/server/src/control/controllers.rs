//! Controller requests: list, add and remove.

use super::ana;
use super::lookup::{find, problem, uuid};
use super::state::{ServerState, namespaces_of};
use crate::registry::{ServedController, WaitingController};
use shadowbell_config::config_file::{self};
use shadowbell_config::controller_config::{ControllerConfig, DiskConfig};
use shadowbell_config::server_config::{Own, SocketConfig, WorkerChoice};
use shadowbell_control_api::api::{Code, Controller, ControllerSpec, ControllerState, Problem};
use shadowbell_spec::regs;
use std::path::PathBuf;

/// List all controllers, in the order of the configuration
#[utoipa::path(get, path = "/v1/controllers", operation_id = "controllers", tag = "controllers",
    responses((status = 200, description = "The controllers", body = Vec<Controller>)))]
pub(super) fn controllers(state: &ServerState) -> Vec<Controller> {
    let waiting = state.controllers.waiting();
    let served = state.controllers.all();
    waiting.iter().map(describe_waiting).chain(served.iter().map(|one| describe(one))).collect()
}

/// Describe a controller
#[utoipa::path(get, path = "/v1/controllers/{id}", operation_id = "controller",
    tag = "controllers",
    params(("id" = String, Path, description = "The controller's `id`")),
    responses(
        (status = 200, description = "The controller", body = Controller),
        (status = 404, description = "No such controller", body = Problem)
    ))]
pub(super) fn controller(state: &ServerState, id: &str) -> Result<Controller, Problem> {
    let waiting = state.controllers.waiting();
    let is_it = |one: &&WaitingController| {
        one.requested.id() == id || one.requested.canonical_socket() == id
    };
    match waiting.iter().find(is_it) {
        Some(waiting) => Ok(describe_waiting(waiting)),
        None => find(state, id).map(|served| describe(&served)),
    }
}

/// Add a controller
///
/// The request is idempotent: if the same controller exists already, nothing changes (200).
#[utoipa::path(put, path = "/v1/controllers/{id}", operation_id = "add_controller",
    tag = "controllers",
    params(("id" = String, Path, description = "`id` of the controller")),
    request_body = ControllerSpec,
    responses(
        (status = 200, description = "The controller exists already", body = Controller),
        (status = 201, description = "The controller was added", body = Controller),
        (status = 400, description = "The controller cannot be served", body = Problem),
        (status = 409, description = "Another controller has that id", body = Problem)
    ))]
pub(super) fn add_controller(
    state: &ServerState,
    id: &str,
    wanted: &ControllerSpec,
) -> Result<(bool, Controller), Problem> {
    let wrong = |why: String| Problem::new(Code::BadRequest, why);
    let requested = requested(id, wanted).map_err(wrong)?;
    let is_new = state.changes.add(requested).map_err(problem)?;
    Ok((is_new, controller(state, id)?))
}

/// Remove a controller
///
/// Its socket is removed; its disks are flushed and closed.
#[utoipa::path(delete, path = "/v1/controllers/{id}", operation_id = "remove_controller",
    tag = "controllers",
    params(
        ("id" = String, Path, description = "The controller's `id`"),
        ("force" = Option<bool>, Query, description = "Remove the controller although a client is connected")
    ),
    responses(
        (status = 204, description = "The controller was removed"),
        (status = 404, description = "No such controller", body = Problem),
        (status = 409, description = "A client is connected (`client-attached`)", body = Problem)
    ))]
pub(super) fn remove_controller(state: &ServerState, id: &str, force: bool) -> Result<(), Problem> {
    state.changes.remove(id, force).map_err(problem)
}

/// Converts a controller from a request to a configuration.
pub(super) fn requested(id: &str, spec: &ControllerSpec) -> Result<SocketConfig, String> {
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
    let mut requested =
        SocketConfig { id: None, socket, controller, worker: worker.transpose()?, origin: None };
    // Without an explicit id, the socket's path is the id.
    if requested.id() != id {
        config_file::check_id(id)?;
        requested.id = Some(id.to_owned());
    }
    Ok(requested)
}

fn describe_waiting(waiting: &WaitingController) -> Controller {
    let WaitingController { requested, why, .. } = waiting;
    Controller {
        id: requested.id(),
        socket: requested.canonical_socket(),
        serial: requested.controller.serial.clone().unwrap_or_default(),
        model: requested.controller.model.clone().unwrap_or_default(),
        client: true,
        state: ControllerState::Waiting,
        waits_for: Some(why.clone()),
        max_queues: requested.controller.queues.unwrap_or_default(),
        namespaces: Vec::new(),
        ana: Vec::new(),
    }
}

pub(super) fn describe(served: &ServedController) -> Controller {
    let config = served.controller.config();
    Controller {
        id: served.id.clone(),
        socket: served.socket.clone(),
        serial: config.serial.clone(),
        model: config.model.clone(),
        client: served.has_client(),
        state: state(&served.controller),
        waits_for: None,
        max_queues: config.io_queues,
        namespaces: namespaces_of(served).collect(),
        ana: ana::groups(served).collect(),
    }
}

pub(super) fn state(controller: &shadowbell_controller::Controller) -> ControllerState {
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
