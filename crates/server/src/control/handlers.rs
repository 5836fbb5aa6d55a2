//! Request handlers and the OpenAPI document.
//!
//! The table of [`routes!`] has a row for each operation. Handlers may block, so they run on
//! threads of their own.

use super::ana;
use super::controllers;
use super::disks;
use super::explain;
use super::exports;
use super::identify;
use super::latency;
use super::limit_groups;
use super::lookup::problem;
use super::metrics;
use super::namespaces;
use super::parameters::Parameters;
use super::server;
use super::socket_io::ReceivedDescriptor;
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

/// Creates a complete response body.
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
        // Serialization cannot fail, because the values have only numbers and strings.
        let mut body = serde_json::to_vec(body).unwrap_or_default();
        body.push(b'\n');
        Self { status, content_type: JSON, body: whole(body) }
    }

    pub(super) fn problem(problem: &Problem) -> Self {
        Self::json(problem.status(), problem)
    }
}

/// A request to a handler.
pub(super) struct Request<'a> {
    pub(super) state: &'a ServerState,
    pub(super) parameters: &'a Parameters,
    pub(super) body: &'a [u8],
    /// Descriptor that came with the request.
    pub(super) received: &'a ReceivedDescriptor,
}

impl Request<'_> {
    /// Deserializes the body.
    fn body<T: DeserializeOwned>(&self) -> Result<T, Problem> {
        serde_json::from_slice(self.body)
            .map_err(|error| Problem::new(Code::BadRequest, format!("the request's body: {error}")))
    }

    /// True if the request has `force=true`, so that connected clients may lose something.
    fn is_forced(&self) -> bool {
        self.parameters.has_query("force=true")
    }

    fn id(&self) -> &str {
        self.parameters.text("id")
    }
}

/// Function that carries out a request. The error is the problem that the response reports.
pub(super) type Handler = fn(&Request<'_>) -> Result<Answer, Problem>;

/// Defines the OpenAPI document and the handlers of its operations. Method and path are those in
/// the attribute of the function.
macro_rules! routes {
    ($($module:ident::$operation:ident: $handler:expr;)*) => {
        /// OpenAPI document of the requests and responses.
        #[derive(OpenApi)]
        #[openapi(
            info(
                title = "shadowbell serve",
                description = "The control socket of a running server. HTTP/1.1 over a Unix socket, \
                               by default /run/shadowbell/NAME/control.sock. The only clients are \
                               the user that the server runs as, and root.",
                license(name = "MIT OR Apache-2.0", identifier = "MIT OR Apache-2.0")
            ),
            paths($($module::$operation),*),
            components(schemas(Problem))
        )]
        struct Document;

        /// Handlers by operation.
        pub(super) const HANDLERS: &[(&str, Handler)] =
            &[$((stringify!($operation), $handler)),*];
    };
}

routes! {
    server::status: |r| ok(server::status(r.state));
    controllers::controllers: |r| ok(controllers::controllers(r.state));
    controllers::controller: |r| ok(controllers::controller(r.state, r.id())?);
    controllers::add_controller: |r| {
        created(controllers::add_controller(r.state, r.id(), &r.body()?)?)
    };
    controllers::remove_controller: |r| {
        removed(controllers::remove_controller(r.state, r.id(), r.is_forced())?)
    };
    explain::explain: |r| ok(explain::explain(r.state, r.id())?);
    namespaces::attach_namespace: |r| {
        created(namespaces::attach_namespace(r.state, r.id(), r.parameters.number("nsid")?, &r.body()?)?)
    };
    namespaces::detach_namespace: |r| {
        let nsid = r.parameters.number("nsid")?;
        removed(namespaces::detach_namespace(r.state, r.id(), nsid, r.is_forced())?)
    };
    disks::disks: |r| ok(disks::disks(r.state));
    disks::disk: |r| ok(disks::disk(r.state, r.id())?);
    disks::add_disk: |r| created(disks::add_disk(r.state, r.id(), &r.body()?)?);
    disks::change_disk: |r| {
        ok(disks::change_disk(r.state, r.id(), r.body()?, r.is_forced())?)
    };
    disks::resume_disk: |r| ok(disks::resume_disk(r.state, r.id())?);
    disks::remove_disk: |r| removed(disks::remove_disk(r.state, r.id())?);
    exports::exports: |r| ok(exports::exports(r.state));
    exports::export: |r| ok(exports::export(r.state, r.id())?);
    exports::add_export: |r| {
        let device = r.received.lock().take_fuse_device().map_err(problem)?;
        created(exports::add_export(r.state, r.id(), r.body()?, device)?)
    };
    exports::remove_export: |r| {
        removed(exports::remove_export(r.state, r.id(), r.is_forced())?)
    };
    ana::set_ana: |r| ok(ana::set_ana(r.state, r.id(), r.parameters.number("group")?, &r.body()?)?);
    server::apply: |r| ok(server::apply(r.state, &r.body()?)?);
    server::configuration: |r| ok(server::configuration(r.state));
    limit_groups::limit_groups: |_| ok(limit_groups::limit_groups());
    limit_groups::add_limit_group: |r| {
        created(limit_groups::add_limit_group(r.state, r.parameters.text("name"), &r.body()?)?)
    };
    limit_groups::change_limit_group: |r| {
        ok(limit_groups::change_limit_group(r.state, r.parameters.text("name"), &r.body()?)?)
    };
    identify::identify: |r| {
        let (cns, nsid) = (r.parameters.number("cns")?, r.parameters.number("nsid")?);
        bytes(identify::identify(r.state, r.id(), cns, nsid)?)
    };
    identify::log_page: |r| {
        bytes(identify::log_page(r.state, r.id(), r.parameters.number("lid")?)?)
    };
    namespaces::namespaces: |r| ok(namespaces::namespaces(r.state));
    server::stats: |r| ok(server::stats(r.state));
    server::snapshot: |r| ok(server::snapshot(r.state));
    server::log_level: |_| ok(server::log_level());
    server::set_log_level: |r| ok(server::set_log_level(&r.body()?)?);
    trace::trace: |r| ok(trace::trace(r.state));
    trace::set_trace: |r| ok(trace::set_trace(r.state, &r.body()?)?);
    latency::measure: |r| ok(latency::measure(r.state));
    latency::set_measure: |r| ok(latency::set_measure(r.state, &r.body()?));
    trace::trace_records: |r| Ok(trace::trace_records(r.state)?.into());
    server::upgrade: |r| {
        let wanted = if r.body.is_empty() { Upgrade::default() } else { r.body()? };
        Ok(Answer::json(202, &server::upgrade(r.state, wanted)?))
    };
    server::shutdown: |r| Ok(Answer::json(202, &server::shutdown(r.state, r.is_forced())?));
    server::metrics: |r| {
        let body = whole(server::metrics(r.state).into_bytes());
        Ok(Answer { status: 200, content_type: metrics::CONTENT_TYPE, body })
    };
}

/// The OpenAPI document.
pub(super) fn openapi() -> utoipa::openapi::OpenApi {
    Document::openapi()
}

/// The OpenAPI document as JSON.
fn document() -> String {
    let mut text = openapi().to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// Handler that returns the OpenAPI document itself.
pub(super) fn answer_document(_: &Request<'_>) -> Result<Answer, Problem> {
    Ok(Answer { status: 200, content_type: JSON, body: whole(document().into_bytes()) })
}

fn ok(body: impl Serialize) -> Result<Answer, Problem> {
    Ok(Answer::json(200, &body))
}

/// Response to a request that adds an object: 201 if the object is new, 200 if it existed already.
fn created((is_new, body): (bool, impl Serialize)) -> Result<Answer, Problem> {
    Ok(Answer::json(if is_new { 201 } else { 200 }, &body))
}

fn removed((): ()) -> Result<Answer, Problem> {
    Ok(Answer { status: 204, content_type: JSON, body: whole(Vec::new()) })
}

fn bytes(body: Vec<u8>) -> Result<Answer, Problem> {
    Ok(Answer { status: 200, content_type: OCTETS, body: whole(body) })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares the file with the document. With the environment variable BLESS=1, updates the
    /// file.
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
    fn the_document_has_the_types() {
        let document: serde_json::Value = serde_json::from_str(&document()).unwrap();
        for name in ["Status", "Controller", "Namespace", "Problem", "LogLevel", "Snapshot", "Row"]
        {
            assert!(document["components"]["schemas"][name].is_object(), "{name}");
        }
    }
}
