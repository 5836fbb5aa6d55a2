//! Namespace requests: list, attach and detach.

use super::lookup::{find, problem, uuid};
use super::state::{ServerState, namespaces_of};
use shadowbell_config::controller_config::DiskConfig;
use shadowbell_control_api::api::{Code, Namespace, NamespaceSpec, Problem};

/// Attach a disk to a controller, as a namespace
///
/// The guest is notified, and may use the namespace at once. The request is idempotent: if the
/// same namespace exists already, nothing changes (200).
#[utoipa::path(put, path = "/v1/controllers/{id}/namespaces/{nsid}",
    operation_id = "attach_namespace", tag = "namespaces",
    params(
        ("id" = String, Path, description = "The controller's `id`"),
        ("nsid" = u32, Path, description = "NSID of the namespace, from 1")
    ),
    request_body = NamespaceSpec,
    responses(
        (status = 200, description = "The namespace exists already", body = Namespace),
        (status = 201, description = "The namespace was attached", body = Namespace),
        (status = 400, description = "The namespace cannot be served", body = Problem),
        (status = 404, description = "No such controller", body = Problem),
        (status = 409, description = "Another namespace has that NSID", body = Problem)
    ))]
pub(super) fn attach_namespace(
    state: &ServerState,
    id: &str,
    nsid: u32,
    wanted: &NamespaceSpec,
) -> Result<(bool, Namespace), Problem> {
    let wrong = |why: String| Problem::new(Code::BadRequest, why);
    let uuid = wanted.uuid.as_deref().map(uuid).transpose().map_err(wrong)?;
    let disk = DiskConfig::with(wanted.disk.clone(), uuid, Some(nsid));
    let disk = DiskConfig { share: wanted.share, ..disk };
    let is_new = state.changes.add_namespace(id, nsid, disk).map_err(problem)?;
    Ok((is_new, namespace(state, id, nsid)?))
}

/// Detach a namespace from its controller
///
/// The guest is notified. Commands in flight end with an error, and written data is flushed. A disk
/// with an id of its own stays open; another one is closed.
#[utoipa::path(delete, path = "/v1/controllers/{id}/namespaces/{nsid}",
    operation_id = "detach_namespace", tag = "namespaces",
    params(
        ("id" = String, Path, description = "The controller's `id`"),
        ("nsid" = u32, Path, description = "NSID of the namespace"),
        ("force" = Option<bool>, Query, description = "Detach the namespace although a client is connected")
    ),
    responses(
        (status = 204, description = "The namespace was detached"),
        (status = 404, description = "No such controller or namespace", body = Problem),
        (status = 409, description = "The namespace is the only one of the controller, or a client is \
            connected (`client-attached`)",
            body = Problem)
    ))]
pub(super) fn detach_namespace(
    state: &ServerState,
    id: &str,
    nsid: u32,
    force: bool,
) -> Result<(), Problem> {
    state.changes.remove_namespace(id, nsid, force).map_err(problem)
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
