//! Limit group requests: limits that several namespaces share.

use super::lookup::problem;
use super::state::ServerState;
use shadowbell_config::limits::{self, DiskLimits};
use shadowbell_control_api::api::{Code, LimitGroup, LimitSpec, Problem};

/// List the limit groups
#[utoipa::path(get, path = "/v1/limit-groups", operation_id = "limit_groups", tag = "namespaces",
    responses((status = 200, description = "The limit groups", body = Vec<LimitGroup>)))]
pub(super) fn limit_groups() -> Vec<LimitGroup> {
    limits::groups().iter().map(limit_group).collect()
}

pub(super) fn limit_group(group: &limits::Group) -> LimitGroup {
    let own = DiskLimits { own: group.limits, group: None };
    LimitGroup { name: group.name.clone(), limits: LimitSpec::of(&own) }
}

/// Create a limit group
///
/// The request is idempotent: if the group exists with the same limits, nothing changes (200).
#[utoipa::path(put, path = "/v1/limit-groups/{name}", operation_id = "add_limit_group",
    tag = "namespaces",
    params(("name" = String, Path, description = "Name of the limit group")),
    request_body = LimitSpec,
    responses(
        (status = 200, description = "The group exists already", body = LimitGroup),
        (status = 201, description = "The group was created", body = LimitGroup),
        (status = 400, description = "Invalid name or limits", body = Problem),
        (status = 409, description = "The group has other limits", body = Problem)
    ))]
pub(super) fn add_limit_group(
    state: &ServerState,
    name: &str,
    wanted: &LimitSpec,
) -> Result<(bool, LimitGroup), Problem> {
    let limits = own(wanted)?.parse().map_err(|why| Problem::new(Code::BadRequest, why))?.own;
    let is_new = state.changes.add_limit_group(name, limits).map_err(problem)?;
    Ok((is_new, limit_group(&limits::Group { name: name.to_owned(), limits })))
}

/// Change the limits of a limit group
///
/// A limit that is not given stays; `none` removes it.
#[utoipa::path(patch, path = "/v1/limit-groups/{name}", operation_id = "change_limit_group",
    tag = "namespaces",
    params(("name" = String, Path, description = "Name of the limit group")),
    request_body = LimitSpec,
    responses(
        (status = 200, description = "The limits of the group", body = LimitGroup),
        (status = 400, description = "Invalid limits", body = Problem),
        (status = 404, description = "No such group", body = Problem)
    ))]
pub(super) fn change_limit_group(
    state: &ServerState,
    name: &str,
    wanted: &LimitSpec,
) -> Result<LimitGroup, Problem> {
    let limits = state.changes.change_limit_group(name, own(wanted)?).map_err(problem)?;
    Ok(limit_group(&limits::Group { name: name.to_owned(), limits }))
}

/// Returns the limits of a new group. Refuses limits that name another group.
fn own(wanted: &LimitSpec) -> Result<&LimitSpec, Problem> {
    match wanted.group {
        None => Ok(wanted),
        Some(_) => Err(Problem::new(Code::BadRequest, "a limit group cannot be in another one")),
    }
}
