//! Latency measurement requests: state, on and off.

use super::state::ServerState;
use shadowbell_control_api::api::Measure;
use tracing::info;

/// State of the latency measurement
#[utoipa::path(get, path = "/v1/measure", operation_id = "measure", tag = "server",
    responses((status = 200, description = "The state", body = Measure)))]
pub(super) fn measure(state: &ServerState) -> Measure {
    Measure { on: state.tracer.measures() }
}

/// Turn the latency measurement on or off
///
/// Number and latency of commands by namespace, for `/metrics` and the snapshot. Values that were
/// measured before are kept. The measurement has a small cost per command, and none while it is
/// off.
#[utoipa::path(put, path = "/v1/measure", operation_id = "set_measure", tag = "server",
    request_body = Measure,
    responses((status = 200, description = "The new state", body = Measure)))]
pub(super) fn set_measure(state: &ServerState, wanted: &Measure) -> Measure {
    if state.tracer.measure(wanted.on) {
        info!("commands are {} measured", if wanted.on { "now" } else { "no longer" });
    }
    measure(state)
}
