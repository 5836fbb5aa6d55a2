//! Latency measurement requests: state, on and off.

use super::view::View;
use crate::control::api::Measure;
use tracing::info;

/// Whether commands are measured
#[utoipa::path(get, path = "/v1/measure", operation_id = "measure", tag = "server",
    responses((status = 200, description = "Whether they are", body = Measure)))]
pub(super) fn measure(view: &View) -> Measure {
    Measure { on: view.tracer.measures() }
}

/// Measure commands from now on, or do so no more
///
/// How many there are and how long they take, by namespace: `/metrics` and the snapshot have it. What
/// was measured stays. It costs each command a little, and nothing while it is off.
#[utoipa::path(put, path = "/v1/measure", operation_id = "set_measure", tag = "server",
    request_body = Measure,
    responses((status = 200, description = "It is so", body = Measure)))]
pub(super) fn set_measure(view: &View, wanted: &Measure) -> Measure {
    if view.tracer.measure(wanted.on) {
        info!("commands are {} measured", if wanted.on { "now" } else { "no longer" });
    }
    measure(view)
}
