//! Routes: the mapping of a request's method and path to a handler, by the OpenAPI document.

use super::handlers::{HANDLERS, Handler, answer_document, openapi};
use super::parameters::{Parameters, missing};
use hyper::{Method, Uri};
use percent_encoding::percent_decode_str;
use shadowbell_control_api::api::{Code, Problem};
use std::sync::LazyLock;

/// Socket by which a request arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Via {
    /// Control socket.
    Socket,
    /// TCP socket, which serves only the metrics.
    Tcp,
}

/// A path that the OpenAPI document describes, with the operations on it.
struct Entry {
    /// Components of the path. A component that is a parameter is in braces.
    template: Vec<String>,
    operations: Vec<(Method, Handler)>,
    /// Methods of the operations, for the response's Allow header.
    allow: String,
}

/// Table of the paths in the OpenAPI document, and of the path of the document itself.
static TABLE: LazyLock<Vec<Entry>> = LazyLock::new(|| {
    let own = ("/v1/openapi.json".to_owned(), vec![(Method::GET, answer_document as Handler)]);
    let paths = openapi().paths.paths.into_iter().map(|(path, item)| {
        let operations = [
            (Method::DELETE, item.delete),
            (Method::GET, item.get),
            (Method::PATCH, item.patch),
            (Method::POST, item.post),
            (Method::PUT, item.put),
        ];
        let operations = operations.into_iter().filter_map(|(method, operation)| {
            let id = operation?.operation_id?;
            HANDLERS.iter().find(|(name, _)| *name == id).map(|(_, handler)| (method, *handler))
        });
        (path, operations.collect())
    });
    let entries = paths.chain([own]).map(|(path, operations): (String, Vec<_>)| {
        let methods: Vec<_> = operations.iter().map(|(method, _)| method.as_str()).collect();
        let allow = methods.join(", ");
        let template = path.trim_start_matches('/').split('/').map(str::to_owned).collect();
        Entry { template, operations, allow }
    });
    entries.collect()
});

impl Entry {
    /// Returns the parameters of a path. `None` if the path does not match the template.
    fn parameters(&'static self, parts: &[String]) -> Option<Vec<(&'static str, String)>> {
        if parts.len() != self.template.len() {
            return None;
        }
        let mut parameters = Vec::new();
        for (part, template) in parts.iter().zip(&self.template) {
            let name = template.strip_prefix('{').and_then(|name| name.strip_suffix('}'));
            match name {
                Some(name) => parameters.push((name, part.clone())),
                None if part == template => {}
                None => return None,
            }
        }
        Some(parameters)
    }
}

/// Refusal of a request without a route.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) problem: Problem,
    /// Methods that the path supports.
    pub(super) allow: Option<&'static str>,
}

impl From<Problem> for Refused {
    fn from(problem: Problem) -> Self {
        Self { problem, allow: None }
    }
}

/// Returns the handler of a method and a path.
///
/// # Errors
/// The path does not exist, or does not support the method.
pub(super) fn route(
    via: Via,
    method: &Method,
    uri: &Uri,
) -> Result<(Handler, Parameters), Refused> {
    let path = uri.path();
    let parts: Option<Vec<String>> = path.trim_start_matches('/').split('/').map(decode).collect();
    let parts = parts.filter(|parts| via == Via::Socket || parts[..] == ["metrics"]);
    let found = parts
        .and_then(|parts| TABLE.iter().find_map(|entry| Some((entry, entry.parameters(&parts)?))));
    let (entry, values) = found.ok_or_else(|| missing(path))?;
    // HEAD is answered as GET; hyper sends no body then.
    let method = if method == Method::HEAD { Method::GET } else { method.clone() };
    let Some((_, handler)) = entry.operations.iter().find(|(known, _)| *known == method) else {
        let why = format!("{path} has no {method}; it has {}", entry.allow);
        let problem = Problem::new(Code::MethodNotAllowed, why);
        return Err(Refused { problem, allow: Some(&entry.allow) });
    };
    let (path, query) = (path.to_owned(), uri.query().map(str::to_owned));
    Ok((*handler, Parameters { path, values, query }))
}

/// Decodes a path component. `None` if it is not UTF-8.
fn decode(part: &str) -> Option<String> {
    percent_decode_str(part).decode_utf8().ok().map(|text| text.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request_of(via: Via, method: Method, path: &str) -> Result<(Handler, Parameters), Refused> {
        route(via, &method, &path.parse().unwrap())
    }

    #[test]
    fn requests_are_routed_by_method_and_path() {
        let path = "/v1/controllers/%2Frun%2Fvm%200.sock/namespaces/7x";
        let (_, parameters) = request_of(Via::Socket, Method::PUT, path).unwrap();
        assert_eq!(parameters.text("id"), "/run/vm 0.sock");
        assert_eq!(parameters.number::<u32>("nsid").unwrap_err().status(), 404);
        assert!(request_of(Via::Tcp, Method::GET, "/metrics?x=1").is_ok());
        assert!(request_of(Via::Tcp, Method::HEAD, "/metrics").is_ok());
        assert!(request_of(Via::Socket, Method::GET, "/v1/openapi.json").is_ok());
        let refused = request_of(Via::Socket, Method::DELETE, "/v1/log-level").unwrap_err();
        assert_eq!((refused.problem.status(), refused.allow), (405, Some("GET, PUT")));
        for path in ["/", "/v1", "/v1/status/x", "/v2/status", "/v1/controllers/%ff", "/v1/%2Fx"] {
            let refused = request_of(Via::Socket, Method::GET, path).unwrap_err();
            assert_eq!(refused.problem.status(), 404, "{path}");
        }
        // TCP serves only the metrics.
        for path in ["/v1/status", "/v1/openapi.json", "/"] {
            assert_eq!(request_of(Via::Tcp, Method::GET, path).unwrap_err().problem.status(), 404);
        }
        assert_eq!(
            request_of(Via::Tcp, Method::POST, "/metrics").unwrap_err().problem.status(),
            405
        );
    }

    #[test]
    fn each_operation_has_a_handler() {
        let operations: usize = TABLE.iter().map(|entry| entry.operations.len()).sum();
        assert_eq!(operations, HANDLERS.len() + 1);
    }
}
