//! Request handlers and the OpenAPI document.
//!
//! A handler is one function. Handlers may block, so they run on threads of their own.

use super::ana;
use super::controllers;
use super::disks;
use super::identify;
use super::latency;
use super::limit_groups;
use super::metrics;
use super::namespaces;
use super::routes::Route;
use super::server;
use super::state::ServerState;
use super::trace::{self, TraceBody};
use http_body_util::{Either, Full};
use hyper::body::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use shadowbell_control_api::api::{Code, Problem, Upgrade};
use utoipa::OpenApi;

/// Response body: complete, or streamed.
pub(super) type Body = Either<Full<Bytes>, TraceBody>;

/// A response.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: u16,
    pub(super) content_type: &'static str,
    pub(super) body: Body,
}

const JSON: &str = "application/json";
const OCTETS: &str = "application/octet-stream";

/// Complete response body.
fn whole(body: Vec<u8>) -> Body {
    Body::Left(Full::new(body.into()))
}

impl From<TraceBody> for Answer {
    fn from(body: TraceBody) -> Self {
        Self { status: 200, content_type: OCTETS, body: Body::Right(body) }
    }
}

impl Answer {
    fn json(status: u16, body: &impl Serialize) -> Self {
        // Numbers and strings only: serialization cannot fail.
        let mut body = serde_json::to_vec(body).unwrap_or_default();
        body.push(b'\n');
        Self { status, content_type: JSON, body: whole(body) }
    }

    pub(super) fn problem(problem: &Problem) -> Self {
        Self::json(problem.status(), problem)
    }
}

/// OpenAPI document of the requests and responses.
#[derive(OpenApi)]
#[openapi(
    info(
        title = "shadowbell serve",
        description = "The control socket of a running server. HTTP/1.1 over a Unix socket, by \
                       default /run/shadowbell/NAME/control.sock. The only clients are the user \
                       that the server runs as, and root.",
        license(name = "MIT OR Apache-2.0", identifier = "MIT OR Apache-2.0")
    ),
    paths(
        server::status,
        controllers::controllers,
        controllers::controller,
        controllers::add_controller,
        controllers::remove_controller,
        namespaces::attach_namespace,
        namespaces::detach_namespace,
        disks::disks,
        disks::disk,
        disks::add_disk,
        disks::change_disk,
        disks::remove_disk,
        ana::set_ana,
        server::apply,
        server::configuration,
        limit_groups::limit_groups,
        limit_groups::set_limit_group,
        identify::identify,
        identify::log_page,
        namespaces::namespaces,
        server::stats,
        server::snapshot,
        server::log_level,
        server::set_log_level,
        trace::trace,
        trace::set_trace,
        latency::measure,
        latency::set_measure,
        trace::trace_records,
        server::upgrade,
        server::shutdown,
        server::metrics
    ),
    components(schemas(Problem))
)]
struct Document;

/// The OpenAPI document as JSON.
pub(super) fn document() -> String {
    let mut text = Document::openapi().to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// Carries out a request.
///
/// # Errors
/// The problem that the response reports.
pub(super) fn answer(state: &ServerState, route: Route, body: &[u8]) -> Result<Answer, Problem> {
    Ok(match route {
        Route::Status => Answer::json(200, &server::status(state)),
        Route::Controllers => Answer::json(200, &controllers::controllers(state)),
        Route::Controller(id) => Answer::json(200, &controllers::controller(state, &id)?),
        Route::AddController(id) => {
            let (is_new, controller) = controllers::add_controller(state, &id, &parse(body)?)?;
            Answer::json(if is_new { 201 } else { 200 }, &controller)
        }
        Route::RemoveController { id, force } => {
            controllers::remove_controller(state, &id, force)?;
            Answer { status: 204, content_type: JSON, body: whole(Vec::new()) }
        }
        Route::AttachNamespace { id, nsid } => {
            let (is_new, namespace) =
                namespaces::attach_namespace(state, &id, nsid, &parse(body)?)?;
            Answer::json(if is_new { 201 } else { 200 }, &namespace)
        }
        Route::DetachNamespace { id, nsid } => {
            namespaces::detach_namespace(state, &id, nsid)?;
            Answer { status: 204, content_type: JSON, body: whole(Vec::new()) }
        }
        Route::Disks => Answer::json(200, &disks::disks(state)),
        Route::Disk(id) => Answer::json(200, &disks::disk(state, &id)?),
        Route::AddDisk(id) => {
            let (is_new, disk) = disks::add_disk(state, &id, &parse(body)?)?;
            Answer::json(if is_new { 201 } else { 200 }, &disk)
        }
        Route::ChangeDisk(id) => Answer::json(200, &disks::change_disk(state, &id, parse(body)?)?),
        Route::RemoveDisk(id) => {
            disks::remove_disk(state, &id)?;
            Answer { status: 204, content_type: JSON, body: whole(Vec::new()) }
        }
        Route::SetAna { id, group } => {
            Answer::json(200, &ana::set_ana(state, &id, group, &parse(body)?)?)
        }
        Route::Apply => Answer::json(200, &server::apply(state, &parse(body)?)?),
        Route::LimitGroups => Answer::json(200, &limit_groups::limit_groups()),
        Route::SetLimitGroup(name) => {
            Answer::json(200, &limit_groups::set_limit_group(state, &name, &parse(body)?)?)
        }
        Route::Configuration => Answer::json(200, &server::configuration(state)),
        Route::Identify { id, cns, nsid } => bytes(identify::identify(state, &id, cns, nsid)?),
        Route::LogPage { id, lid } => bytes(identify::log_page(state, &id, lid)?),
        Route::Namespaces => Answer::json(200, &namespaces::namespaces(state)),
        Route::Stats => Answer::json(200, &server::stats(state)),
        Route::Snapshot => Answer::json(200, &server::snapshot(state)),
        Route::LogLevel => Answer::json(200, &server::log_level()),
        Route::SetLogLevel => Answer::json(200, &server::set_log_level(&parse(body)?)?),
        Route::Trace => Answer::json(200, &trace::trace(state)),
        Route::Measure => Answer::json(200, &latency::measure(state)),
        Route::SetMeasure => Answer::json(200, &latency::set_measure(state, &parse(body)?)),
        Route::SetTrace => Answer::json(200, &trace::set_trace(state, &parse(body)?)?),
        Route::TraceRecords => trace::trace_records(state)?.into(),
        Route::Upgrade => {
            let wanted = if body.is_empty() { Upgrade::default() } else { parse(body)? };
            Answer::json(202, &server::upgrade(state, wanted)?)
        }
        Route::Shutdown => Answer::json(202, &server::shutdown(state)),
        Route::Document => {
            Answer { status: 200, content_type: JSON, body: whole(document().into_bytes()) }
        }
        Route::Metrics => {
            let body = whole(server::metrics(state).into_bytes());
            Answer { status: 200, content_type: metrics::CONTENT_TYPE, body }
        }
    })
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, Problem> {
    serde_json::from_slice(body)
        .map_err(|error| Problem::new(Code::BadRequest, format!("the request's body: {error}")))
}

fn bytes(body: Vec<u8>) -> Answer {
    Answer { status: 200, content_type: OCTETS, body: whole(body) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::routes::{Via, route};
    use hyper::Method;
    use std::collections::BTreeSet;

    /// `BLESS=1 cargo test -p shadowbell --lib document` updates the file.
    #[test]
    fn the_document_in_docs_is_that_of_the_types() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
        let now = document();
        if std::env::var_os("BLESS").is_some() {
            std::fs::write(&path, &now).unwrap();
        }
        let kept = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(kept == now, "docs/openapi.json is out of date: run this test with BLESS=1");
    }

    #[test]
    fn what_the_document_says_is_there_and_says_why_it_is_refused() {
        let document: serde_json::Value = serde_json::from_str(&document()).unwrap();
        let paths = document["paths"].as_object().unwrap();
        for (path, methods) in paths {
            let uri = path.replace("{id}", "x").replace("{nsid}", "1").replace("{name}", "x");
            let uri = uri.replace("{group}", "1");
            let uri = uri.replace("{cns}", "1").replace("{lid}", "1").parse().unwrap();
            for method in methods.as_object().unwrap().keys() {
                let method = Method::from_bytes(method.to_uppercase().as_bytes()).unwrap();
                route(Via::Socket, &method, &uri).unwrap();
            }
            let refused = route(Via::Socket, &Method::TRACE, &uri).unwrap_err();
            let said: BTreeSet<String> =
                refused.allow.unwrap().split(", ").map(str::to_lowercase).collect();
            let documented: BTreeSet<String> =
                methods.as_object().unwrap().keys().cloned().collect();
            assert_eq!(said, documented, "{path}");
        }
        for name in ["Status", "Controller", "Namespace", "Problem", "LogLevel", "Snapshot", "Row"]
        {
            assert!(document["components"]["schemas"][name].is_object(), "{name}");
        }
    }
}
