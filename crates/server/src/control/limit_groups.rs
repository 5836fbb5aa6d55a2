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

/// Change the limits of a limit group
///
/// All limits are replaced: limits that are left out are removed. A group is created if it does
/// not exist.
#[utoipa::path(put, path = "/v1/limit-groups/{name}", operation_id = "set_limit_group",
    tag = "namespaces",
    params(("name" = String, Path, description = "Name of the limit group")),
    request_body = LimitSpec,
    responses(
        (status = 200, description = "The limits of the group", body = LimitGroup),
        (status = 400, description = "Invalid limits", body = Problem)
    ))]
pub(super) fn set_limit_group(
    state: &ServerState,
    name: &str,
    wanted: &LimitSpec,
) -> Result<LimitGroup, Problem> {
    let wrong = |why: String| Problem::new(Code::BadRequest, why);
    let limits = wanted.parse().map_err(wrong)?;
    if limits.group.is_some() {
        return Err(wrong("a limit group cannot be in another one".to_owned()));
    }
    state.changes.limit_group(name, limits.own).map_err(problem)?;
    Ok(limit_group(&limits::Group { name: name.to_owned(), limits: limits.own }))
}
