//! The counters while they count, for `shadowbell top`: a socket that answers each line, whatever it
//! says, with one line of JSON, a [`Snapshot`].
//!
//! Who asks sets the pace, so that nothing here ticks, and nothing is counted for it: the workers are
//! asked for what they have counted anyway, by a message that they answer between two passes. They are
//! asked at most once in [`FRESH`], however many ask. A client that does not take its answer is hung up
//! on; it has kept others who ask waiting for [`PATIENCE`], and no guest. Only the user that the server
//! runs as, and root, are answered.

use super::service::{ServedController, Service};
use crate::exit::bad_input;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SocketFlags, accept_with, recv, sockopt};
use serde::{Deserialize, Serialize};
use shadowbell_controller::{Controller, Stats};
use shadowbell_memory::EventFd;
use shadowbell_vfio_user::Listener;
use shadowbell_vfio_user::server::BindError;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tracing::{debug, warn};

/// The form of what is told, for whoever reads it later.
pub const VERSION: u32 = 1;
/// How long an answer is good for another one who asks.
const FRESH: Duration = Duration::from_millis(50);
/// How long one who asked may take to read the answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Who may be connected at once; who comes then is hung up on.
const CLIENTS: usize = 8;
/// How long to wait when the system has no descriptor for a client.
const SHORTAGE: Duration = Duration::from_millis(100);

/// All controllers at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// [`VERSION`].
    pub version: u32,
    /// When: nanoseconds since the server began.
    pub at_ns: u64,
    /// In the order in which they were asked for.
    pub controllers: Vec<Row>,
}

/// A controller's counters, of its I/O queues: since the server began, over resets and guests.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Row {
    /// The path of its socket.
    pub socket: String,
    /// I/O submission queues that its guest has now.
    pub queues: usize,
    /// The workers that serve them.
    pub workers: Vec<usize>,
    /// Whether all of them leave it out until it rings.
    pub parked: bool,
    /// Commands fetched.
    pub commands: u64,
    /// Bytes that were read.
    pub bytes_read: u64,
    /// Bytes that were written or copied.
    pub bytes_written: u64,
    /// New doorbell values that were found, however they came.
    pub updates: u64,
    /// Doorbell writes that trapped, and doorbells rung by a descriptor.
    pub rings: u64,
    /// Interrupts raised.
    pub interrupts: u64,
    /// Commands that ended in an error.
    pub errors: u64,
}

impl Row {
    fn of(socket: &str, stats: &Stats) -> Self {
        let (sq, cq) = stats.io_queues();
        let trapped = sq.doorbell.mmio_writes.saturating_add(cq.doorbell.mmio_writes);
        let mut workers: Vec<usize> = stats.workers.iter().map(|sleep| sleep.worker).collect();
        workers.sort_unstable();
        Self {
            socket: socket.to_owned(),
            queues: stats.submission_queues.iter().filter(|queue| queue.qid != 0).count(),
            parked: !workers.is_empty() && stats.workers.iter().all(|sleep| sleep.parked),
            workers,
            commands: sq.commands,
            bytes_read: stats.io.bytes_read,
            bytes_written: stats.io.bytes_written.saturating_add(stats.io.bytes_copied),
            updates: sq.doorbell.found_new.saturating_add(cq.doorbell.found_new),
            rings: trapped.saturating_add(stats.doorbell_events),
            interrupts: cq.interrupts,
            errors: stats.io.errors,
        }
    }
}

/// Listens where `top` may ask.
///
/// # Errors
/// The path can not be had, in a sentence.
pub(super) fn listen(path: &Path) -> anyhow::Result<Listener> {
    let listener = Listener::bind(path).map_err(|error| match error {
        BindError::System { .. } => anyhow::Error::from(error),
        _ => bad_input(error),
    });
    listener.map_err(|error| error.context("--stats-socket"))
}

/// The thread that answers; dropping this ends it.
pub(super) struct Live(EventFd, Option<JoinHandle<()>>);

impl Live {
    /// Answers whoever comes to `socket` from here on.
    ///
    /// # Errors
    /// The system has no more threads or descriptors.
    pub(super) fn start(socket: Listener, service: &Service) -> io::Result<Self> {
        let stop = EventFd::new()?;
        let named = |served: &ServedController| (served.name.clone(), served.controller.clone());
        let controllers = service.controllers().iter().map(named).collect();
        let mut desk =
            Desk { controllers, began: Instant::now(), answer: None, clients: Vec::new() };
        let until = stop.try_clone()?;
        let thread = std::thread::Builder::new().name("sb-stats".into());
        let thread = thread.spawn(move || desk.serve(&socket, &until))?;
        Ok(Self(stop, Some(thread)))
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.0.signal();
        if let Some(thread) = self.1.take() {
            let _ = thread.join();
        }
    }
}

struct Desk {
    controllers: Vec<(String, Controller)>,
    began: Instant,
    /// The last answer, and since when it is one.
    answer: Option<(Instant, Vec<u8>)>,
    clients: Vec<UnixStream>,
}

impl Desk {
    fn serve(&mut self, socket: &Listener, until: &EventFd) {
        loop {
            let (ended, new, mut ready) = {
                let fds = [until.as_fd(), socket.as_fd()];
                let fds = fds.into_iter().chain(self.clients.iter().map(AsFd::as_fd));
                let mut fds: Vec<_> =
                    fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
                match poll(&mut fds, None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(errno) => return warn!("the counters can not be asked for: {errno}"),
                }
                let mut ready = fds.iter().map(|fd| !fd.revents().is_empty());
                let mut next = || ready.next().unwrap_or_default();
                (next(), next(), ready.collect::<Vec<bool>>().into_iter())
            };
            if ended {
                return;
            }
            for mut client in std::mem::take(&mut self.clients) {
                if !ready.next().unwrap_or_default() || self.attend(&mut client) {
                    self.clients.push(client);
                }
            }
            if new {
                self.admit(socket);
            }
        }
    }

    fn admit(&mut self, socket: &Listener) {
        let stream = match accept_with(socket, SocketFlags::CLOEXEC) {
            Ok(stream) => stream,
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::NOBUFS) => {
                return std::thread::sleep(SHORTAGE);
            }
            Err(_) => return,
        };
        if !is_ours(&stream) {
            return warn!("another user has asked for the counters, and is not answered");
        }
        let stream = UnixStream::from(stream);
        if self.clients.len() < CLIENTS && stream.set_write_timeout(Some(PATIENCE)).is_ok() {
            self.clients.push(stream);
        } else {
            debug!("one too many has asked for the counters");
        }
    }

    /// Answers one that has something to say; whether it stays.
    fn attend(&mut self, client: &mut UnixStream) -> bool {
        let mut said = [0; 4096];
        match recv(&*client, &mut said[..], RecvFlags::DONTWAIT) {
            Ok((0, _)) => false,
            Ok((len, _)) if !said[..len].contains(&b'\n') => true,
            Ok(_) => client.write_all(self.answer()).is_ok(),
            Err(errno) => matches!(errno, Errno::AGAIN | Errno::INTR),
        }
    }

    fn answer(&mut self) -> &[u8] {
        if self.answer.as_ref().is_none_or(|(since, _)| since.elapsed() >= FRESH) {
            let at_ns = u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            let row =
                |(name, controller): &(String, Controller)| Row::of(name, &controller.stats());
            let controllers = self.controllers.iter().map(row).collect();
            let snapshot = Snapshot { version: VERSION, at_ns, controllers };
            // Numbers and strings: it can not fail.
            let mut line = serde_json::to_vec(&snapshot).unwrap_or_default();
            line.push(b'\n');
            self.answer = Some((Instant::now(), line));
        }
        self.answer.as_ref().map_or(&[], |(_, line)| line)
    }
}

/// Whether it is our own user, or root, at the other end.
fn is_ours(stream: &OwnedFd) -> bool {
    let peer = sockopt::socket_peercred(stream).map(|peer| peer.uid);
    peer.is_ok_and(|uid| uid.is_root() || uid == rustix::process::geteuid())
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_controller::stats::{CqStats, DoorbellCounts, SleepStats, SqStats};

    #[test]
    fn a_row_is_of_all_io_queues_and_parked_only_by_all_workers() {
        let doorbell = |found_new, mmio_writes| DoorbellCounts {
            found_new,
            mmio_writes,
            ..Default::default()
        };
        let sq =
            |qid| SqStats { qid, commands: 10, doorbell: doorbell(5, 1), ..Default::default() };
        let worker = |worker, parked| SleepStats { worker, parked, ..Default::default() };
        let mut stats = Stats {
            submission_queues: vec![sq(0), sq(1), sq(2)],
            completion_queues: vec![CqStats { qid: 1, interrupts: 3, ..Default::default() }],
            retired_sq: sq(0),
            doorbell_events: 4,
            workers: vec![worker(1, true), worker(0, false)],
            ..Stats::default()
        };
        let row = Row::of("a", &stats);
        assert_eq!((row.queues, row.commands, row.updates, row.rings), (2, 30, 15, 7));
        assert_eq!((row.interrupts, row.parked, &row.workers[..]), (3, false, &[0, 1][..]));
        stats.workers = vec![worker(1, true)];
        assert!(Row::of("a", &stats).parked);
        stats.workers.clear();
        assert!(!Row::of("a", &stats).parked, "there is nobody who could");
    }
}
