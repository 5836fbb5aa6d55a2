//! Namespace requests: list, add, remove and change.

use super::lookup::{find, problem, uuid};
use super::state::{ServerState, namespaces_of};
use shadowbell_config::controller_config::DiskConfig;
use shadowbell_control_api::api::{Code, Namespace, NamespaceChange, NamespaceSpec, Problem, Size};

/// Add a namespace to a controller
///
/// The guest is notified, and may use the namespace at once. The request is idempotent: if the
/// same namespace exists already, nothing changes (200).
#[utoipa::path(put, path = "/v1/controllers/{id}/namespaces/{nsid}",
    operation_id = "add_namespace", tag = "namespaces",
    params(
        ("id" = String, Path, description = "The controller's `id`"),
        ("nsid" = u32, Path, description = "NSID of the namespace, from 1")
    ),
    request_body = NamespaceSpec,
    responses(
        (status = 200, description = "The namespace exists already", body = Namespace),
        (status = 201, description = "The namespace was added", body = Namespace),
        (status = 400, description = "The namespace cannot be served", body = Problem),
        (status = 404, description = "No such controller", body = Problem),
        (status = 409, description = "Another namespace has that NSID", body = Problem)
    ))]
pub(super) fn add_namespace(
    state: &ServerState,
    id: &str,
    nsid: u32,
    wanted: &NamespaceSpec,
) -> Result<(bool, Namespace), Problem> {
    let wrong = |why: String| Problem::new(Code::BadRequest, why);
    let uuid = wanted.uuid.as_deref().map(uuid).transpose().map_err(wrong)?;
    let disk = DiskConfig::with(wanted.disk.clone(), uuid, Some(nsid));
    let is_new = state.changes.add_namespace(id, nsid, &disk).map_err(problem)?;
    Ok((is_new, namespace(state, id, nsid)?))
}

/// Remove a namespace of a controller
///
/// The guest is notified. Commands in flight end with an error; written data is flushed, and the
/// disk is closed.
#[utoipa::path(delete, path = "/v1/controllers/{id}/namespaces/{nsid}",
    operation_id = "remove_namespace", tag = "namespaces",
    params(
        ("id" = String, Path, description = "The controller's `id`"),
        ("nsid" = u32, Path, description = "NSID of the namespace")
    ),
    responses(
        (status = 204, description = "The namespace was removed"),
        (status = 404, description = "No such controller or namespace", body = Problem),
        (status = 409, description = "The namespace is the only one of the controller", body = Problem)
    ))]
pub(super) fn remove_namespace(state: &ServerState, id: &str, nsid: u32) -> Result<(), Problem> {
    state.changes.remove_namespace(id, nsid).map_err(problem)
}

/// Change a namespace: its size, its disk, read-only, or its limits
///
/// The guest is notified. If the namespace has that property already, nothing changes.
#[utoipa::path(patch, path = "/v1/controllers/{id}/namespaces/{nsid}",
    operation_id = "change_namespace", tag = "namespaces",
    params(
        ("id" = String, Path, description = "The controller's `id`"),
        ("nsid" = u32, Path, description = "NSID of the namespace")
    ),
    request_body = NamespaceChange,
    responses(
        (status = 200, description = "The namespace after the change", body = Namespace),
        (status = 400, description = "Invalid change", body = Problem),
        (status = 404, description = "No such controller or namespace", body = Problem),
        (status = 409, description = "Change not possible in this state of the disk or the server",
            body = Problem)
    ))]
pub(super) fn change_namespace(
    state: &ServerState,
    id: &str,
    nsid: u32,
    wanted: &NamespaceChange,
) -> Result<Namespace, Problem> {
    use crate::namespaces::NamespaceChange as Change;
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
            let why = "give exactly one of `size`, `disk`, `read_only` and `limits`";
            return Err(Problem::new(Code::BadRequest, why));
        }
    };
    state.changes.change_namespace(id, nsid, &change).map_err(problem)?;
    namespace(state, id, nsid)
}

pub(super) fn namespace(state: &ServerState, id: &str, nsid: u32) -> Result<Namespace, Problem> {
    let served = find(state, id)?;
    let found = namespaces_of(&served).find(|namespace| namespace.nsid == nsid);
    found.ok_or_else(|| Problem::new(Code::NotFound, format!("there is no namespace {nsid}")))
}

/// List all namespaces of all controllers
#[utoipa::path(get, path = "/v1/namespaces", operation_id = "namespaces", tag = "controllers",
    responses((status = 200, description = "The namespaces", body = Vec<Namespace>)))]
pub(super) fn namespaces(state: &ServerState) -> Vec<Namespace> {
    state.controllers.all().iter().flat_map(|served| namespaces_of(served)).collect()
}
