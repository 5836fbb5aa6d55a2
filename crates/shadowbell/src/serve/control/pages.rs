//! Out-of-band Identify and Get Log Page requests.

use super::requested::find;
use super::view::View;
use crate::control::api::{Code, Problem};
use shadowbell_controller::OutOfBandCommand;

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
pub(super) fn identify(view: &View, id: &str, cns: u8, nsid: u32) -> Result<Vec<u8>, Problem> {
    inquire(view, id, OutOfBandCommand::Identify { cns, nsid })
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
pub(super) fn log_page(view: &View, id: &str, lid: u8) -> Result<Vec<u8>, Problem> {
    inquire(view, id, OutOfBandCommand::LogPage(lid))
}

pub(super) fn inquire(
    view: &View,
    id: &str,
    inquiry: OutOfBandCommand,
) -> Result<Vec<u8>, Problem> {
    let outcome = find(view, id)?.controller.out_of_band(inquiry);
    outcome
        .map_err(|status| Problem::new(Code::BadRequest, format!("the controller says: {status}")))
}
