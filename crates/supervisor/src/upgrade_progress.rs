//! Progress of an upgrade and of the recovery that follows, and the report of its result.

use super::grants::Permitted;
use super::log::log_line;
use super::worker::Worker;
use crate::protocol::{self, answer};
use rustix::net::sockopt::{socket_domain, socket_peercred, socket_type};
use rustix::net::{AddressFamily, SocketType, getpeername};
use serde::{Deserialize, Serialize};
use shadowbell_process::deferred_close;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Time limit for each step of an upgrade before the old process quiesces.
pub(super) const STEP: Duration = Duration::from_secs(10);

/// Progress of an upgrade until the old process has quiesced.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Step {
    /// The next process parses the command line and starts its threads.
    Starting,
    /// The next process checks the old process's checkpoint.
    Checking,
    /// The old process quiesces.
    Quiescing,
    /// Some clients of the old process did not quiesce, so it was killed. The next process
    /// recovers, as after a crash, when the old one has exited.
    Ending,
}

/// An upgrade whose old process has not quiesced yet.
pub(super) struct Upgrade {
    pub(super) new: Worker,
    pub(super) step: Step,
    pub(super) began: Instant,
    pub(super) until: Instant,
    /// Requester of the upgrade, which receives the result.
    pub(super) asker: Option<OwnedFd>,
    /// Reason why the new process ended, if it has ended.
    pub(super) why: Option<String>,
    /// Warnings for the requester about clients that the upgrade affects, a sentence each.
    pub(super) warnings: Vec<String>,
    /// True if only a check is requested, after which the old process continues.
    pub(super) is_check: bool,
    /// Permissions and configuration that take effect when the old process has ended.
    pub(super) permitted: Option<Permitted>,
}

impl Upgrade {
    /// Creates an upgrade in its first step, without a requester.
    pub(super) fn new(new: Worker, permitted: Option<Permitted>) -> Self {
        let (step, began, why, warnings) = (Step::Starting, Instant::now(), None, Vec::new());
        let until = began + STEP;
        let (asker, is_check) = (None, false);
        Self { new, step, began, until, asker, why, warnings, is_check, permitted }
    }
}

/// Pending recovery by the next process after the old one has quiesced.
pub(super) struct Replacement {
    /// Program of the new process.
    pub(super) program: PathBuf,
    /// Requester of the upgrade, which receives the result.
    pub(super) asker: Option<OwnedFd>,
    /// Time of the request.
    pub(super) began: Instant,
    /// Time limit for the recovery.
    pub(super) until: Instant,
    /// Warnings for the requester about clients that the upgrade affects, a sentence each.
    pub(super) warnings: Vec<String>,
}

/// Maximum number of warnings of an upgrade.
const MAX_WARNINGS: usize = 1000;

/// Adds the lines of `lines` as warnings, without duplicates.
pub(super) fn add_warnings(warnings: &mut Vec<String>, lines: &str) {
    for line in lines.lines() {
        if warnings.len() < MAX_WARNINGS && !warnings.iter().any(|known| known == line) {
            warnings.push(line.to_owned());
        }
    }
}

/// Sends an upgrade's result to its requester. A failure is logged as well.
pub(super) fn send_outcome(asker: Option<OwnedFd>, outcome: Result<&str, &str>) {
    let (code, text) = match outcome {
        Ok(text) => (answer::YES, text),
        Err(why) => {
            log_line(&format!("warning: no upgrade: {why}"));
            (answer::NO, why)
        }
    };
    if let Some(asker) = asker {
        answer_to(asker, code, text);
    }
}

/// Socket of a requester that a server process has passed. `None` unless it is an end of a pair
/// that this supervisor or its server process has created: other sockets could lead to a program
/// that trusts the supervisor's user.
pub(super) fn requester(socket: Option<OwnedFd>, worker: Option<u32>) -> Option<OwnedFd> {
    let socket = socket?;
    let is_packet = socket_domain(&socket) == Ok(AddressFamily::UNIX)
        && socket_type(&socket) == Ok(SocketType::SEQPACKET);
    // Only a connected socket has the credentials of a peer.
    let peer = (is_packet && getpeername(&socket).is_ok()).then(|| socket_peercred(&socket).ok());
    let pid = peer.flatten().map(|peer| peer.pid.as_raw_pid().cast_unsigned());
    let is_pair = pid == Some(std::process::id()) || (pid.is_some() && pid == worker);
    if is_pair {
        return Some(socket);
    }
    deferred_close::close([socket]);
    None
}

/// Answers a requester without waiting, so that a requester that does not read cannot block the
/// supervisor.
pub(super) fn answer_to(asker: OwnedFd, code: u8, text: &str) {
    let body = text.as_bytes();
    let body = body.get(..protocol::MAX_PACKET - 1).unwrap_or(body);
    let _ = protocol::send_bytes(&asker, code, body, &[], true);
    deferred_close::close([asker]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    #[test]
    fn an_upgrade_is_answered_only_on_a_packet_socket_of_a_pair() {
        let (pair, _other) = protocol::pair().unwrap();
        assert!(requester(Some(pair), None).is_some());
        assert!(requester(None, None).is_none());
        let (pipe, _end) = std::io::pipe().unwrap();
        let (stream, _end) = UnixStream::pair().unwrap();
        let (datagram, _end) = UnixDatagram::pair().unwrap();
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let unconnected = rustix::net::socket(family, kind, None).unwrap();
        let others = [pipe.into(), stream.into(), datagram.into(), tcp.into(), unconnected];
        for other in others {
            assert!(requester(Some(other), None).is_none());
        }
    }
}
