//! Lookup of controllers by id, and conversion of errors to problems.

use super::state::ServerState;
use crate::registry::ServedController;
use shadowbell_config::uuid_text::parse_uuid;
use shadowbell_control_api::api::{Code, Problem};
use shadowbell_process::exit;
use std::sync::Arc;

pub(super) fn find(state: &ServerState, id: &str) -> Result<Arc<ServedController>, Problem> {
    state.controllers.find_by_any(id).ok_or_else(|| {
        let why = format!("there is no controller `{id}`; `shadowbell ctl controllers` lists them");
        Problem::new(Code::NotFound, why)
    })
}

/// Converts an error of a change to a problem.
pub(super) fn problem(error: anyhow::Error) -> Problem {
    let code = match exit::status(&error) {
        exit::BAD_INPUT => Code::BadRequest,
        exit::NOT_FOUND => Code::NotFound,
        exit::CONFLICT if exit::is_forceable(&error) => Code::ClientAttached,
        exit::CONFLICT => Code::Conflict,
        _ => Code::Failed,
    };
    Problem::new(code, exit::line(&error))
}

pub(super) fn uuid(text: &str) -> Result<[u8; 16], String> {
    parse_uuid(text).ok_or_else(|| format!("`{text}` is no UUID"))
}
