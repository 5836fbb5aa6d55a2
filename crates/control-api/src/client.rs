//! HTTP client of a server's control socket.

use super::api::{Code, Problem};
use anyhow::{Context, anyhow};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode, header};
use hyper_util::rt::TokioIo;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use serde::Serialize;
use serde::de::DeserializeOwned;
use shadowbell_process::exit;
use std::error::Error as _;
use std::io::{self, ErrorKind, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Longest answer that is accepted, in bytes: the statistics of the maximum number of controllers
/// are shorter.
const MAX_ANSWER: usize = 64 << 20;
/// Longest error body that is read, in bytes.
const MAX_PROBLEM: usize = 1 << 20;
/// Time limit of a request, retries included. It is long because the server may wait up to a second
/// for each of its I/O threads.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Retries of a GET whose connection was closed before any byte of the answer, and the pause before
/// each.
const MAX_RETRIES: u32 = 10;
const RETRY_DELAY: Duration = Duration::from_millis(20);
/// Bytes that are percent-encoded in a path segment (all but RFC 3986's unreserved ones).
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Callback that receives a piece of the body.
type OnPiece<'a> = dyn FnMut(&[u8]) -> io::Result<()> + 'a;

fn is_success(status: u16) -> bool {
    (200..300).contains(&status)
}

/// Error before any byte of the answer was received.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
struct NoResponse(hyper::Error);

/// True if the connection was closed before any byte of the answer.
fn has_no_response(error: &anyhow::Error) -> bool {
    error.downcast_ref::<NoResponse>().is_some_and(|NoResponse(error)| {
        let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
        let is_reset = cause.is_some_and(|cause| {
            matches!(cause.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
        });
        is_reset || error.is_canceled() || error.is_closed() || error.is_incomplete_message()
    })
}

/// Request path, with the query `force=true` if `force` is set.
pub fn forced(path: &str, force: bool) -> String {
    format!("{path}{}", if force { "?force=true" } else { "" })
}

/// Percent-encodes a segment of a path, such as the name of a controller.
pub fn part(text: &str) -> String {
    utf8_percent_encode(text, SEGMENT).to_string()
}

/// Client of one control socket. Each request makes a connection of its own.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
    /// Descriptor that is sent before each request.
    descriptor: Option<Arc<OwnedFd>>,
}

impl Client {
    /// Client for the control socket at `socket`. Does not connect yet.
    pub fn new(socket: &Path) -> Self {
        Self { socket: socket.to_owned(), descriptor: None }
    }

    /// Client whose requests pass a descriptor to the server.
    #[must_use]
    pub fn with_descriptor(&self, descriptor: OwnedFd) -> Self {
        Self { descriptor: Some(Arc::new(descriptor)), ..self.clone() }
    }

    /// Path of the control socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends a GET request for `path` and parses the JSON answer.
    ///
    /// # Errors
    /// The server is unreachable, or refuses the request; carries the matching exit status.
    pub fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        let text = self.text(&Method::GET, path, None)?;
        serde_json::from_str(&text).with_context(|| self.unexpected_response())
    }

    /// Sends a request with a JSON body and parses the JSON answer.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn send<T: DeserializeOwned>(
        &self,
        method: &Method,
        path: &str,
        body: &impl Serialize,
    ) -> anyhow::Result<T> {
        let body = serde_json::to_vec(body)?;
        let text = self.text(method, path, Some(body))?;
        // Some answers have no body (`T` is `()`).
        let text = if text.is_empty() { "null" } else { &text };
        serde_json::from_str(text).with_context(|| self.unexpected_response())
    }

    fn unexpected_response(&self) -> String {
        format!("{}: not the answer of a shadowbell server of this version", self.socket.display())
    }

    /// Sends a GET request for `path` and returns the body of the answer.
    ///
    /// # Errors
    /// As [`get`](Self::get).
    pub fn bytes(&self, path: &str) -> anyhow::Result<Vec<u8>> {
        self.answer(&Method::GET, path, None)
    }

    /// Streams the answer to a GET request into a file. Returns the number of bytes. The answer
    /// may be longer than `MAX_ANSWER`.
    ///
    /// # Errors
    /// As [`get`](Self::get), and errors of the file.
    pub fn save(&self, path: &str, file: &mut dyn Write) -> anyhow::Result<u64> {
        let mut written = 0;
        self.exchange(&Method::GET, path, None, &mut |piece| {
            written += piece.len() as u64;
            file.write_all(piece)
        })?;
        Ok(written)
    }

    fn text(&self, method: &Method, path: &str, body: Option<Vec<u8>>) -> anyhow::Result<String> {
        let body = self.answer(method, path, body)?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// Sends a request and returns the body of the answer.
    fn answer(
        &self,
        method: &Method,
        path: &str,
        body: Option<Vec<u8>>,
    ) -> anyhow::Result<Vec<u8>> {
        let mut answer = Vec::new();
        self.exchange(method, path, body, &mut |piece| {
            if answer.len() + piece.len() > MAX_ANSWER {
                return Err(io::Error::other("the answer exceeds the size limit"));
            }
            answer.extend_from_slice(piece);
            Ok(())
        })?;
        Ok(answer)
    }

    /// Sends a request and passes the body of the answer to `take`, piece by piece.
    fn exchange(
        &self,
        method: &Method,
        path: &str,
        body: Option<Vec<u8>>,
        take: &mut OnPiece<'_>,
    ) -> anyhow::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let answer = runtime.block_on(async {
            let answer = tokio::time::timeout(TIMEOUT, async {
                let mut tries = 0;
                loop {
                    let answer = self.request_once(method, path, body.clone(), take).await;
                    // A server process that dies or is replaced may not respond. Only a GET is
                    // repeated, which is safe in any case.
                    let is_unserved = match &answer {
                        Ok((status, _)) => *status == StatusCode::SERVICE_UNAVAILABLE,
                        Err(error) => has_no_response(error),
                    };
                    if !(is_unserved && method == Method::GET && tries < MAX_RETRIES) {
                        return answer;
                    }
                    tries += 1;
                    tokio::time::sleep(RETRY_DELAY).await;
                }
            });
            answer
                .await
                .unwrap_or_else(|_| Err(anyhow!("no answer within {} s", TIMEOUT.as_secs())))
        });
        let (status, body) = answer.with_context(|| self.socket.display().to_string())?;
        if is_success(status) {
            return Ok(());
        }
        let problem = serde_json::from_slice::<Problem>(&body)
            .map_err(|_| anyhow!("{} (HTTP status {status})", self.unexpected_response()))?;
        let error = anyhow!(problem.message);
        Err(match problem.code {
            Code::BadRequest | Code::MethodNotAllowed => exit::bad_input(error),
            Code::NotFound => exit::not_found(error),
            Code::Conflict => exit::conflict(error),
            Code::ClientAttached => exit::needs_force(error),
            Code::Failed | Code::Unavailable => error,
        })
    }

    async fn request_once(
        &self,
        method: &Method,
        path: &str,
        body: Option<Vec<u8>>,
        take: &mut OnPiece<'_>,
    ) -> anyhow::Result<(u16, Vec<u8>)> {
        let stream = tokio::net::UnixStream::connect(&self.socket).await.map_err(|error| {
            exit::not_found(match error.kind() {
                ErrorKind::NotFound => anyhow!("no such control socket"),
                ErrorKind::ConnectionRefused => anyhow!("no server listens on this socket"),
                _ => anyhow!(error),
            })
        })?;
        if let Some(descriptor) = &self.descriptor {
            send_descriptor(&stream, descriptor)?;
        }
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "localhost")
            .header(header::CONNECTION, "close")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(Bytes::from(body.unwrap_or_default())))?;
        let answer = async {
            let answer = sender.send_request(request).await.map_err(NoResponse)?;
            let status = answer.status().as_u16();
            let mut body = answer.into_body();
            if is_success(status) {
                while let Some(piece) = body.frame().await {
                    if let Some(piece) = piece?.data_ref() {
                        take(piece)?;
                    }
                }
                return Ok((status, Vec::new()));
            }
            let why = Limited::new(body, MAX_PROBLEM).collect().await;
            let why = why.map_err(|error| anyhow!(error))?.to_bytes();
            Ok((status, why.to_vec()))
        };
        // The same thread drives the connection and the request. Errors of the connection are
        // ignored, because the request reports them too.
        let connection = async {
            let _ = connection.await;
            std::future::pending::<()>().await;
        };
        let mut answer = std::pin::pin!(answer);
        let mut connection = std::pin::pin!(connection);
        std::future::poll_fn(|cx| {
            let _ = connection.as_mut().poll(cx);
            answer.as_mut().poll(cx)
        })
        .await
    }
}

/// Sends a descriptor with an empty line, which a server ignores before a request (RFC 9112, 2.2).
fn send_descriptor(stream: &impl AsFd, descriptor: &OwnedFd) -> io::Result<()> {
    let fds = [descriptor.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let line = [IoSlice::new(b"\r\n")];
    // The socket is new, so its buffer has room.
    rustix::net::sendmsg(stream, &line, &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixListener;

    #[test]
    fn a_get_without_a_response_is_retried_and_a_post_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.sock");
        let listener = UnixListener::bind(&path).unwrap();
        let server = std::thread::spawn(move || {
            for answer in ["", "", "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", ""] {
                let (mut stream, _) = listener.accept().unwrap();
                if answer.is_empty() {
                    continue;
                }
                let _ = stream.read(&mut [0; 4096]).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        let client = Client::new(&path);
        assert_eq!(client.bytes("/v1/status").unwrap(), b"{}");
        // The client does not repeat a POST, because the server may have executed it.
        client.send::<()>(&Method::POST, "/v1/upgrade", &()).unwrap_err();
        server.join().unwrap();
    }

    #[test]
    fn a_path_segment_has_no_slash() {
        assert_eq!(part("/run/vm 0.sock"), "%2Frun%2Fvm%200.sock");
    }

    #[test]
    fn a_socket_without_a_server_is_reported() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("x.sock");
        let client = Client::new(&path);
        let error = client.get::<Problem>("/v1/status").unwrap_err();
        assert!(format!("{error:#}").contains("no such control socket"), "{error:#}");
        assert_eq!(exit::status(&error), exit::NOT_FOUND);
        let listener = UnixListener::bind(&path).unwrap();
        let answers = ["HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "SSH-2.0-x\r\n", ""];
        let server = std::thread::spawn(move || {
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                let _ = stream.read(&mut [0; 4096]).unwrap();
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
        for answer in answers {
            let error = client.get::<Problem>("/v1/status").unwrap_err();
            // The client retries only if the server closes the connection without an answer. The
            // listener is closed by then, so the error of the retry is `NOT_FOUND`.
            let expected = if answer.is_empty() { exit::NOT_FOUND } else { exit::FAILED };
            assert_eq!(exit::status(&error), expected, "{answer}: {error:#}");
            assert!(error.to_string().contains("x.sock"), "{error:#}");
        }
        server.join().unwrap();
        let error = client.get::<Problem>("/v1/status").unwrap_err();
        assert!(format!("{error:#}").contains("no server listens on this socket"), "{error:#}");
    }
}
