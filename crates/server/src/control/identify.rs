//! Out-of-band Identify and Get Log Page requests.

use super::lookup::find;
use super::state::ServerState;
use shadowbell_control_api::api::{Code, Problem};
use shadowbell_controller::OutOfBandCommand;

/// Read an Identify structure, as the guest sees it
///
/// Works with and without a connected guest, and changes nothing.
#[utoipa::path(get, path = "/v1/controllers/{id}/identify/{cns}/{nsid}", operation_id = "identify",
    tag = "controllers",
    params(
        ("id" = String, Path, description = "The controller's `id`"),
        ("cns" = u8, Path, description = "CNS of the structure: 1 is Identify Controller, 0 is \
                                          Identify Namespace"),
        ("nsid" = u32, Path, description = "NSID, or 0")
    ),
    responses(
        (status = 200, description = "The structure, 4096 bytes as NVMe defines them",
            body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 400, description = "The controller returned an error status", body = Problem),
        (status = 404, description = "No such controller", body = Problem)
    ))]
pub(super) fn identify(
    state: &ServerState,
    id: &str,
    cns: u8,
    nsid: u32,
) -> Result<Vec<u8>, Problem> {
    inquire(state, id, OutOfBandCommand::Identify { cns, nsid })
}

/// Read a log page, as the guest sees it
///
/// Works with and without a connected guest, and changes nothing: the guest's asynchronous events
/// are kept.
#[utoipa::path(get, path = "/v1/controllers/{id}/log-page/{lid}", operation_id = "log_page",
    tag = "controllers",
    params(
        ("id" = String, Path, description = "The controller's `id`"),
        ("lid" = u8, Path, description = "Log page identifier: 1 is Error Information, 2 is SMART / \
                                          Health Information")
    ),
    responses(
        (status = 200, description = "The page, at most 4096 bytes as NVMe defines them",
            body = Vec<u8>, content_type = "application/octet-stream"),
        (status = 400, description = "The controller returned an error status", body = Problem),
        (status = 404, description = "No such controller", body = Problem)
    ))]
pub(super) fn log_page(state: &ServerState, id: &str, lid: u8) -> Result<Vec<u8>, Problem> {
    inquire(state, id, OutOfBandCommand::LogPage(lid))
}

pub(super) fn inquire(
    state: &ServerState,
    id: &str,
    inquiry: OutOfBandCommand,
) -> Result<Vec<u8>, Problem> {
    let outcome = find(state, id)?.controller.out_of_band(inquiry);
    outcome.map_err(|status| {
        Problem::new(Code::BadRequest, format!("the controller returned: {status}"))
    })
}
