//! Routes: the mapping of a request's method and path to an operation.

use hyper::{Method, Uri};
use percent_encoding::percent_decode_str;
use shadowbell_control_api::api::{Code, Problem};

/// Socket by which a request arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Via {
    /// Control socket.
    Socket,
    /// TCP socket, which serves only the metrics.
    Tcp,
}

/// Requested operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Status,
    Controllers,
    Controller(String),
    Identify { id: String, cns: u8, nsid: u32 },
    LogPage { id: String, lid: u8 },
    AddController(String),
    RemoveController { id: String, force: bool },
    AttachNamespace { id: String, nsid: u32 },
    DetachNamespace { id: String, nsid: u32 },
    Disks,
    Disk(String),
    AddDisk(String),
    ChangeDisk(String),
    RemoveDisk(String),
    SetAna { id: String, group: u32 },
    Apply,
    Configuration,
    LimitGroups,
    SetLimitGroup(String),
    Namespaces,
    Stats,
    Snapshot,
    LogLevel,
    SetLogLevel,
    Upgrade,
    Trace,
    SetTrace,
    TraceRecords,
    Measure,
    SetMeasure,
    Shutdown,
    Document,
    Metrics,
}

/// A request without a route.
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

/// Returns the operation of a method and a path.
///
/// # Errors
/// The path does not exist, or does not support the method.
pub(super) fn route(via: Via, method: &Method, uri: &Uri) -> Result<Route, Refused> {
    let path = uri.path();
    let missing = || Problem::new(Code::NotFound, format!("there is no path {path}")).into();
    let parts: Option<Vec<String>> = path.trim_start_matches('/').split('/').map(decode).collect();
    let Some(parts) = parts else { return Err(missing()) };
    let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
    if via == Via::Tcp && parts != ["metrics"] {
        return Err(missing());
    }
    let of = |allowed: &'static str, route: Option<Route>| {
        route.ok_or_else(|| Refused {
            problem: Problem::new(
                Code::MethodNotAllowed,
                format!("{path} has no {method}; it has {allowed}"),
            ),
            allow: Some(allowed),
        })
    };
    let get = |route| of("GET", (method == Method::GET).then_some(route));
    let post = |route| of("POST", (method == Method::POST).then_some(route));
    match parts[..] {
        ["metrics"] => get(Route::Metrics),
        ["v1", "status"] => get(Route::Status),
        ["v1", "controllers"] => get(Route::Controllers),
        ["v1", "controllers", id] => {
            let id = id.to_owned();
            let route = match *method {
                Method::GET => Some(Route::Controller(id)),
                Method::PUT => Some(Route::AddController(id)),
                Method::DELETE => {
                    Some(Route::RemoveController { id, force: uri.query() == Some("force=true") })
                }
                _ => None,
            };
            of("DELETE, GET, PUT", route)
        }
        ["v1", "apply"] => post(Route::Apply),
        ["v1", "limit-groups"] => get(Route::LimitGroups),
        ["v1", "limit-groups", name] => {
            let route = Route::SetLimitGroup(name.to_owned());
            of("PUT", (method == Method::PUT).then_some(route))
        }
        ["v1", "config"] => get(Route::Configuration),
        ["v1", "controllers", id, "namespaces", nsid] => {
            let (id, Ok(nsid)) = (id.to_owned(), nsid.parse()) else { return Err(missing()) };
            let route = match *method {
                Method::PUT => Some(Route::AttachNamespace { id, nsid }),
                Method::DELETE => Some(Route::DetachNamespace { id, nsid }),
                _ => None,
            };
            of("DELETE, PUT", route)
        }
        ["v1", "controllers", id, "ana", group] => {
            let Ok(group) = group.parse() else { return Err(missing()) };
            let route = Route::SetAna { id: id.to_owned(), group };
            of("PUT", (method == Method::PUT).then_some(route))
        }
        ["v1", "controllers", id, "identify", cns, nsid] => {
            let (Ok(cns), Ok(nsid)) = (cns.parse(), nsid.parse()) else { return Err(missing()) };
            get(Route::Identify { id: id.to_owned(), cns, nsid })
        }
        ["v1", "controllers", id, "log-page", lid] => {
            let Ok(lid) = lid.parse() else { return Err(missing()) };
            get(Route::LogPage { id: id.to_owned(), lid })
        }
        ["v1", "disks"] => get(Route::Disks),
        ["v1", "disks", id] => {
            let id = id.to_owned();
            let route = match *method {
                Method::GET => Some(Route::Disk(id)),
                Method::PUT => Some(Route::AddDisk(id)),
                Method::PATCH => Some(Route::ChangeDisk(id)),
                Method::DELETE => Some(Route::RemoveDisk(id)),
                _ => None,
            };
            of("DELETE, GET, PATCH, PUT", route)
        }
        ["v1", "namespaces"] => get(Route::Namespaces),
        ["v1", "stats"] => get(Route::Stats),
        ["v1", "snapshot"] => get(Route::Snapshot),
        ["v1", "measure"] => {
            let route = match *method {
                Method::GET => Some(Route::Measure),
                Method::PUT => Some(Route::SetMeasure),
                _ => None,
            };
            of("GET, PUT", route)
        }
        ["v1", "log-level"] => of(
            "GET, PUT",
            match *method {
                Method::GET => Some(Route::LogLevel),
                Method::PUT => Some(Route::SetLogLevel),
                _ => None,
            },
        ),
        ["v1", "trace"] => of(
            "GET, PUT",
            match *method {
                Method::GET => Some(Route::Trace),
                Method::PUT => Some(Route::SetTrace),
                _ => None,
            },
        ),
        ["v1", "trace", "records"] => get(Route::TraceRecords),
        ["v1", "upgrade"] => post(Route::Upgrade),
        ["v1", "shutdown"] => post(Route::Shutdown),
        ["v1", "openapi.json"] => get(Route::Document),
        _ => Err(missing()),
    }
}

/// Decodes a path component. `None` if it is not UTF-8.
fn decode(part: &str) -> Option<String> {
    percent_decode_str(part).decode_utf8().ok().map(|text| text.into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(via: Via, method: Method, path: &str) -> Result<Route, Refused> {
        route(via, &method, &path.parse().unwrap())
    }

    #[test]
    fn a_request_is_what_it_says() {
        let controller = ask(Via::Socket, Method::GET, "/v1/controllers/%2Frun%2Fvm%200.sock");
        assert_eq!(controller, Ok(Route::Controller("/run/vm 0.sock".into())));
        assert_eq!(ask(Via::Tcp, Method::GET, "/metrics?x=1"), Ok(Route::Metrics));
        let refused = ask(Via::Socket, Method::DELETE, "/v1/log-level").unwrap_err();
        assert_eq!((refused.problem.status(), refused.allow), (405, Some("GET, PUT")));
        for path in ["/", "/v1", "/v1/status/x", "/v2/status", "/v1/controllers/%ff", "/v1/%2Fx"] {
            let refused = ask(Via::Socket, Method::GET, path).unwrap_err();
            assert_eq!(refused.problem.status(), 404, "{path}");
        }
        // TCP serves only the metrics.
        for path in ["/v1/status", "/v1/openapi.json", "/"] {
            assert_eq!(ask(Via::Tcp, Method::GET, path).unwrap_err().problem.status(), 404);
        }
        assert_eq!(ask(Via::Tcp, Method::POST, "/metrics").unwrap_err().problem.status(), 405);
    }
}
