//! HTTP connections and their limits.
//!
//! Over TCP there is no access control. A web browser must not read the metrics on behalf of a web
//! page, so the request must address this machine: see [`names_us`]. A client that keeps an idle
//! connection open makes room for a new one.
//!
//! hyper implements the protocol; this module sets the limits. A client of the control socket
//! runs as our user or as root, but may still be slow or faulty. All clients together have
//! [`CLIENTS`] connections. A client has [`HEAD`] to send the head of a request, the same time
//! for the body, and [`CONNECTION`] until it has read all responses. After that the connection is
//! closed. Further clients wait in the listen queue.

use super::handlers::{Answer, Body, Request as HandlerRequest};
use super::routes::{self, Via};
use super::seats::{Seat, Seats};
use super::socket_io::{ClientSocket, ReceivedDescriptor};
use super::state::ServerState;
use http_body_util::{BodyExt, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HOST, HeaderValue};
use hyper::http::request::Parts;
use hyper::http::uri::Authority;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use rustix::io::Errno;
use shadowbell_control_api::api::{Code, Problem};
use shadowbell_supervisor::protocol::is_ours;
use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::oneshot;
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

/// Maximum number of connections, for each of the two sockets.
const CLIENTS: usize = 16;
/// Time limit for the head of a request, counted from the end of the last one, and for the body.
const HEAD: Duration = Duration::from_secs(10);
/// Maximum duration of a connection.
const CONNECTION: Duration = Duration::from_secs(60);
/// Maximum size of a request's head.
const HEAD_BYTES: usize = 16 << 10;
/// Maximum size of a body: a configuration file as a JSON string.
const BODY_BYTES: usize = 2 << 20;
/// Time limit for requests in flight before a handover to another process.
const LEAVE: Duration = Duration::from_millis(50);
/// Delay before the next accept if the system has no descriptor for a client.
const RETRY_ACCEPT: Duration = Duration::from_millis(100);

/// Serves until `stop` is dropped or signalled.
///
/// # Errors
/// A socket cannot be registered with the runtime.
pub(super) async fn serve(
    control: Option<OwnedFd>,
    metrics: Option<OwnedFd>,
    state: Arc<ServerState>,
    stop: oneshot::Receiver<()>,
) -> io::Result<()> {
    let graceful = Arc::new(GracefulShutdown::new());
    let mut tasks = Vec::new();
    if let Some(socket) = control {
        let (state, graceful) = (Arc::clone(&state), Arc::clone(&graceful));
        let socket = Listening::Unix(UnixListener::from_std(socket.into())?);
        tasks.push(tokio::spawn(accept(socket, Via::Socket, state, graceful)));
    }
    if let Some(socket) = metrics {
        let graceful = Arc::clone(&graceful);
        let socket = Listening::Tcp(TcpListener::from_std(socket.into())?);
        tasks.push(tokio::spawn(accept(socket, Via::Tcp, state, graceful)));
    }
    let _ = stop.await;
    for task in tasks {
        task.abort();
        let _ = task.await;
    }
    if let Some(graceful) = Arc::into_inner(graceful) {
        let _ = timeout(LEAVE, graceful.shutdown()).await;
    }
    Ok(())
}

/// A listening socket.
enum Listening {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listening {
    async fn accept(&self) -> io::Result<ClientSocket> {
        match self {
            Self::Unix(socket) => socket.accept().await.map(|(stream, _)| stream.into()),
            Self::Tcp(socket) => socket.accept().await.map(|(stream, _)| stream.into()),
        }
    }
}

async fn accept(
    socket: Listening,
    via: Via,
    state: Arc<ServerState>,
    graceful: Arc<GracefulShutdown>,
) {
    let seats = Arc::new(Seats::new(CLIENTS));
    loop {
        match socket.accept().await {
            Ok(stream) if via == Via::Socket && !is_ours(&stream) => {
                warn!("refused a client of another user at the control socket");
            }
            Ok(stream) => {
                let seat = seats.take(&stream).await;
                let client = connection(stream, via, Arc::clone(&seat), &state, &graceful);
                let seats = Arc::clone(&seats);
                tokio::spawn(async move {
                    let (mut client, mut evicted) = (pin!(client), pin!(seat.evicted()));
                    poll_fn(|context| match client.as_mut().poll(context) {
                        // Clients of the control socket run as our user or as root.
                        Poll::Pending if via == Via::Tcp => evicted.as_mut().poll(context),
                        outcome => outcome,
                    })
                    .await;
                    seats.release(&seat);
                });
            }
            Err(error) => not_accepted(&error).await,
        }
    }
}

/// Handles an error of `accept`: the client has disconnected, or the system lacks resources.
async fn not_accepted(error: &io::Error) {
    let full = [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOBUFS];
    if full.iter().any(|errno| error.raw_os_error() == Some(errno.raw_os_error())) {
        debug!("a client of the control socket has to wait: {error}");
        sleep(RETRY_ACCEPT).await;
    }
}

/// Serves one client until it disconnects.
fn connection(
    stream: ClientSocket,
    via: Via,
    seat: Arc<Seat>,
    state: &Arc<ServerState>,
    graceful: &GracefulShutdown,
) -> impl Future<Output = ()> + Send + use<> {
    let state = Arc::clone(state);
    let received = stream.received();
    let service = service_fn(move |request| {
        let (busy, state, received) = (seat.busy(), Arc::clone(&state), Arc::clone(&received));
        async move {
            let response = respond(request, via, state, received).await;
            drop(busy);
            response
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let watched = graceful.watch(connection);
    async move {
        match timeout(CONNECTION, watched).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!("a client of the control socket: {error}"),
            Err(_) => debug!("a client of the control socket has stayed for too long"),
        }
    }
}

async fn respond(
    request: Request<Incoming>,
    via: Via,
    state: Arc<ServerState>,
    received: ReceivedDescriptor,
) -> Result<Response<Body>, Infallible> {
    let (head, body) = request.into_parts();
    let outcome = match routes::route(via, &head.method, &head.uri) {
        _ if via == Via::Tcp && !names_us(&head, state.settings.metrics_hosts()) => {
            let why = "the Host of the request is no IP address, not localhost and no name of \
                       `--metrics-host`";
            Err(Problem::new(Code::BadRequest, why).into())
        }
        Err(refused) => Err(refused),
        Ok((handler, parameters)) => match read(body).await {
            Err(problem) => Err(problem.into()),
            // A handler may wait for I/O threads or for the system.
            Ok(body) => {
                let work = tokio::task::spawn_blocking(move || {
                    let (state, parameters, body) = (&state, &parameters, &body);
                    handler(&HandlerRequest { state, parameters, body, received: &received })
                });
                let failed = || Problem::new(Code::Failed, "the server has failed at this request");
                work.await.unwrap_or_else(|_| Err(failed())).map_err(Into::into)
            }
        },
    };
    Ok(match outcome {
        Ok(answer) => response(answer),
        Err(refused) => {
            let mut response = response(Answer::problem(&refused.problem));
            if let Some(allowed) = refused.allow {
                response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
            }
            response
        }
    })
}

/// True if the request addresses this machine by an IP address, as localhost, or by one of `names`.
///
/// A browser sends the name of the web page's own server, even after the page's owner has changed
/// the name's address to one of this machine (DNS rebinding).
fn names_us(head: &Parts, names: &[String]) -> bool {
    let mut hosts = head.headers.get_all(HOST).iter();
    let host = match (hosts.next(), hosts.next()) {
        (Some(host), None) => host.to_str().ok().and_then(|host| host.parse::<Authority>().ok()),
        _ => None,
    };
    let is_us = |authority: &Authority| {
        let host = authority.host();
        let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
        let same = |name: &String| name.eq_ignore_ascii_case(host);
        address.unwrap_or(host).parse::<IpAddr>().is_ok()
            || host.eq_ignore_ascii_case("localhost")
            || names.iter().any(same)
    };
    host.as_ref().is_some_and(is_us) && head.uri.authority().is_none_or(is_us)
}

fn response(answer: Answer) -> Response<Body> {
    let mut response = Response::new(answer.body);
    *response.status_mut() =
        StatusCode::from_u16(answer.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let kind = HeaderValue::from_static(answer.content_type);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}

/// Reads the body of a request.
async fn read(body: Incoming) -> Result<Bytes, Problem> {
    let bad = |why: String| Problem::new(Code::BadRequest, why);
    match timeout(HEAD, Limited::new(body, BODY_BYTES).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) => Err(bad(format!(
            "cannot read the request's body: {error}; it has {BODY_BYTES} bytes at most"
        ))),
        Err(_) => Err(bad(format!("the request's body did not come within {} s", HEAD.as_secs()))),
    }
}
