//! ANA state requests.

use super::lookup::{find, problem};
use super::state::ServerState;
use crate::registry::ServedController;
use shadowbell_control_api::api::{AnaGroup, AnaStateChange, Code, Problem};

/// Change the ANA state of a group for a controller of a subsystem
///
/// The guest is notified, and new commands get the status of the new state. Commands in flight
/// end normally; the response is sent after the last of them. If the group is in that state
/// already, nothing changes.
#[utoipa::path(put, path = "/v1/controllers/{id}/ana/{group}", operation_id = "set_ana",
    tag = "namespaces",
    params(
        ("id" = String, Path, description = "The controller's `id`"),
        ("group" = u32, Path, description = "ANA group identifier, from 1")
    ),
    request_body = AnaStateChange,
    responses(
        (status = 200, description = "The group is in that state", body = AnaGroup),
        (status = 404, description = "No such controller or group", body = Problem),
        (status = 409, description = "The controller belongs to no subsystem", body = Problem)
    ))]
pub(super) fn set_ana(
    state: &ServerState,
    id: &str,
    group: u32,
    wanted: &AnaStateChange,
) -> Result<AnaGroup, Problem> {
    state.changes.set_ana(id, group, wanted.state).map_err(problem)?;
    let served = find(state, id)?;
    let group = groups(&served).find(|its| its.group == group);
    // A group without a namespace does not exist for the guest.
    group.ok_or_else(|| Problem::new(Code::NotFound, "the group has no namespace"))
}

/// ANA groups of a controller that have namespaces.
pub(super) fn groups(served: &ServedController) -> impl Iterator<Item = AnaGroup> {
    let groups = served.controller.ana_groups().into_iter();
    groups.map(|group| AnaGroup {
        group: group.id,
        state: group.state.unwrap_or_default().into(),
        namespaces: group.nsids,
    })
}
