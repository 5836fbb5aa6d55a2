//! HTTP connections and their limits.
//!
//! Over TCP there is no access control. A web browser must not read the metrics on behalf of a web
//! page, so a request must address this machine ([`names_us`]). If there are too many TCP
//! connections, an idle one is closed for a new one.
//!
//! hyper implements the protocol; this module sets the limits. A client of the control socket runs
//! as our user or as root, but may still be slow or faulty. All clients of a socket together may
//! have [`CLIENTS`] connections. A client has the time [`HEAD`] to send the head of a request, the
//! same time for the body, and [`CONNECTION`] until it has read all responses. Then the connection
//! is closed. Further clients wait in the listen queue.
//!
//! At an upgrade, the next process gets the connections from which nothing was read yet. Requests
//! in execution have the time [`LEAVE`] to end; requests that take longer are answered by 503
//! Service Unavailable. So each request is answered.

use super::handlers::{Answer, Body, Request as HandlerRequest};
use super::routes::{self, Via};
use super::seats::{Seat, Seats};
use super::socket_io::{ClientDescriptor, ClientSocket, ReceivedDescriptor};
use super::state::ServerState;
use http_body_util::{BodyExt, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{
    ALLOW, CONNECTION as CONNECTION_HEADER, CONTENT_TYPE, HOST, HeaderValue, RETRY_AFTER,
};
use hyper::http::request::Parts;
use hyper::http::uri::Authority;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
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
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::sync::{oneshot, watch};
use tokio::time::{sleep, timeout};
use tracing::{debug, warn};

/// Maximum number of connections, for each of the two sockets.
const CLIENTS: usize = 16;
/// Time limit for the head of a request, counted from the end of the previous request, and for the
/// body.
const HEAD: Duration = Duration::from_secs(10);
/// Maximum duration of a connection.
const CONNECTION: Duration = Duration::from_secs(60);
/// Maximum size of a request's head, in bytes.
const HEAD_BYTES: usize = 16 << 10;
/// Maximum size of a request's body, in bytes. The largest is a configuration file as a JSON
/// string.
const BODY_BYTES: usize = 2 << 20;
/// Time limit at an upgrade for requests in execution, and then for sending the responses to those
/// that take longer.
const LEAVE: Duration = Duration::from_millis(50);
/// Value of Retry-After in the response 503: seconds until the next process can execute the
/// request.
const RETRY_SECONDS: HeaderValue = HeaderValue::from_static("1");
/// Delay before the next accept after a lack of descriptors or memory.
const RETRY_ACCEPT: Duration = Duration::from_millis(100);

/// Listening socket, with accepted connections of which nothing was read.
pub(super) struct Source {
    pub(super) listener: OwnedFd,
    pub(super) clients: Vec<OwnedFd>,
}

/// Phase of the service at the control socket, in order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    Serving,
    /// No further connection or request is accepted.
    Leaving,
    /// Requests in execution are answered by 503.
    Late,
}

/// Connections of which nothing was read, for the next process.
type Untouched = Arc<Mutex<Vec<OwnedFd>>>;

/// Serves until `stop` is dropped or signalled. Returns the connections of each socket of which
/// nothing was read.
///
/// # Errors
/// A socket cannot be registered with the runtime.
pub(super) async fn serve(
    sources: [Option<Source>; 2],
    state: Arc<ServerState>,
    stop: oneshot::Receiver<()>,
) -> io::Result<[Vec<OwnedFd>; 2]> {
    let (phase, phases) = watch::channel(Phase::Serving);
    let untouched: [Untouched; 2] = Default::default();
    for ((source, via), untouched) in
        sources.into_iter().zip([Via::Socket, Via::Tcp]).zip(&untouched)
    {
        let Some(Source { listener, clients }) = source else { continue };
        let socket = Listening::new(listener, via)?;
        // A client that cannot be registered with the runtime loses its connection. Other clients
        // are not affected.
        let clients = clients.into_iter().filter_map(|client| {
            let client = Listening::client(client, via);
            client.inspect_err(|error| warn!("a client of the control socket: {error}")).ok()
        });
        let clients = clients.collect();
        let (state, phases) = (Arc::clone(&state), phases.clone());
        tokio::spawn(accept(socket, clients, via, state, (phases, Arc::clone(untouched))));
    }
    drop(phases);
    let _ = stop.await;
    for next in [Phase::Leaving, Phase::Late] {
        phase.send_replace(next);
        if timeout(LEAVE, phase.closed()).await.is_ok() {
            break;
        }
    }
    Ok(untouched.map(|untouched| std::mem::take(&mut *untouched.lock())))
}

/// Returns the result of `work`, or `None` if `phase` begins before `work` ends.
async fn until<T>(
    phase: Phase,
    phases: &mut watch::Receiver<Phase>,
    work: impl Future<Output = T>,
) -> Option<T> {
    let (mut work, mut begun) = (pin!(work), pin!(phases.wait_for(|now| *now >= phase)));
    poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(result) => Poll::Ready(Some(result)),
        Poll::Pending => begun.as_mut().poll(context).map(|_| None),
    })
    .await
}

/// A listening socket.
enum Listening {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listening {
    fn new(listener: OwnedFd, via: Via) -> io::Result<Self> {
        Ok(match via {
            Via::Socket => Self::Unix(UnixListener::from_std(listener.into())?),
            Via::Tcp => Self::Tcp(TcpListener::from_std(listener.into())?),
        })
    }

    fn client(client: OwnedFd, via: Via) -> io::Result<ClientSocket> {
        Ok(match via {
            Via::Socket => UnixStream::from_std(client.into())?.into(),
            Via::Tcp => TcpStream::from_std(client.into())?.into(),
        })
    }

    async fn accept(&self) -> io::Result<ClientSocket> {
        match self {
            Self::Unix(socket) => socket.accept().await.map(|(stream, _)| stream.into()),
            Self::Tcp(socket) => socket.accept().await.map(|(stream, _)| stream.into()),
        }
    }
}

async fn accept(
    socket: Listening,
    clients: Vec<ClientSocket>,
    via: Via,
    state: Arc<ServerState>,
    (mut phases, untouched): (watch::Receiver<Phase>, Untouched),
) {
    let seats = Arc::new(Seats::new(CLIENTS));
    let mut clients = clients.into_iter();
    loop {
        let accepted = match clients.next() {
            Some(client) => Ok(client),
            None => match until(Phase::Leaving, &mut phases, socket.accept()).await {
                Some(accepted) => accepted,
                None => return,
            },
        };
        match accepted {
            Ok(stream) if via == Via::Socket && !is_ours(&stream) => {
                warn!("refused a client of another user at the control socket");
            }
            Ok(stream) => {
                let descriptor = stream.descriptor();
                let seat = match until(Phase::Leaving, &mut phases, seats.take(&stream)).await {
                    Some(seat) => seat,
                    None => {
                        hand_over(&descriptor, &untouched);
                        continue;
                    }
                };
                let of_end = (phases.clone(), Arc::clone(&untouched));
                let client = connection(stream, via, Arc::clone(&seat), &state, of_end);
                let seats = Arc::clone(&seats);
                tokio::spawn(async move {
                    let (mut client, mut evicted) = (pin!(client), pin!(seat.evicted()));
                    poll_fn(|context| match client.as_mut().poll(context) {
                        // Clients of the control socket are not evicted, because they run as our
                        // user or as root.
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

/// Keeps a connection of which nothing was read for the next process.
fn hand_over(client: &ClientDescriptor, untouched: &Untouched) {
    match client.duplicate() {
        Ok(descriptor) => untouched.lock().push(descriptor),
        Err(error) => debug!("a client of the control socket has to connect again: {error}"),
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

/// Serves one client until it disconnects or the service ends.
fn connection(
    stream: ClientSocket,
    via: Via,
    seat: Arc<Seat>,
    state: &Arc<ServerState>,
    (mut phases, untouched): (watch::Receiver<Phase>, Untouched),
) -> impl Future<Output = ()> + Send + use<> {
    let state = Arc::clone(state);
    let (received, descriptor) = (stream.received(), stream.descriptor());
    let of_requests = phases.clone();
    let service = service_fn(move |request| {
        let (busy, state, received) = (seat.busy(), Arc::clone(&state), Arc::clone(&received));
        let mut phases = of_requests.clone();
        async move {
            let execution = respond(request, via, state, received);
            let mut response = match until(Phase::Late, &mut phases, execution).await {
                Some(response) => response,
                None => unavailable(),
            };
            if *phases.borrow() >= Phase::Leaving {
                let close = HeaderValue::from_static("close");
                response.headers_mut().insert(CONNECTION_HEADER, close);
            }
            drop(busy);
            Ok::<_, Infallible>(response)
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let served = async move {
        let mut connection = pin!(connection);
        if let Some(ended) = until(Phase::Leaving, &mut phases, connection.as_mut()).await {
            return ended;
        }
        if descriptor.is_untouched() {
            hand_over(&descriptor, &untouched);
            return Ok(());
        }
        connection.as_mut().graceful_shutdown();
        connection.await
    };
    async move {
        match timeout(CONNECTION, served).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => debug!("a client of the control socket: {error}"),
            Err(_) => debug!("a client of the control socket has stayed for too long"),
        }
    }
}

/// Response to a request that does not end in time before the next process takes over.
fn unavailable() -> Response<Body> {
    let why = "the server process is being replaced, and the request has not ended yet; repeat it";
    let mut response = response(Answer::problem(&Problem::new(Code::Unavailable, why)));
    response.headers_mut().insert(RETRY_AFTER, RETRY_SECONDS);
    response
}

async fn respond(
    request: Request<Incoming>,
    via: Via,
    state: Arc<ServerState>,
    received: ReceivedDescriptor,
) -> Response<Body> {
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
            // A handler may wait for I/O threads or for system calls, so it runs on a thread that
            // may block.
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
    match outcome {
        Ok(answer) => response(answer),
        Err(refused) => {
            let mut response = response(Answer::problem(&refused.problem));
            if let Some(allowed) = refused.allow {
                response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
            }
            response
        }
    }
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
