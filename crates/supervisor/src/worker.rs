//! Server process as seen by the supervisor: its handle, its messages and its checkpoint.

use super::broker::{self, Kind, Owner};
use super::command_line::is_verb;
use super::fd_store::FdStore;
use super::grants::{GRANTS, Permitted};
use super::log::log_line;
use super::process::Process;
use crate::checkpoint::{COMPLETE, Checkpoint, Part, memory_of};
use crate::protocol::{self, AS_WORKER, Packet, to_supervisor, to_worker};
use rustix::net::{Shutdown, shutdown};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use shadowbell_process::deferred_close;
use signal_hook::consts::SIGSYS;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

/// Maximum number of messages from a server process, and of checkpoint parts to it, in a turn of
/// the main loop.
pub(super) const MESSAGES: usize = 64;
/// Maximum number of packets with checkpoint changes that one call of [`Worker::receive`] handles.
const MAX_AT_ONCE: usize = 16;

/// Maximum number of messages to a server process that wait until its checkpoint is sent
/// completely.
const MAX_LATER: usize = 64;

/// Checkpoint of a dead server process.
pub(super) struct Left {
    pub(super) items: Checkpoint,
    pub(super) death: Death,
}

/// Circumstances of the death of the process that wrote a checkpoint, and of the processes that
/// were started to recover from it.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Death {
    /// True if the process that wrote the checkpoint died by a fault, which a command in flight may
    /// have caused.
    pub(super) by_fault: bool,
    /// True if the process that wrote the checkpoint had quiesced, so that none of its I/O is in
    /// flight.
    pub(super) is_quiesced: bool,
    /// True if the last dead process ended by a fault. This is the process that wrote the
    /// checkpoint, or the last one that was started to recover from it.
    #[serde(default)]
    pub(super) last_by_fault: bool,
}

/// A server process.
pub(super) struct Worker {
    pub(super) process: Process,
    /// Owner of the process's brokers.
    owner: Owner,
    /// Socket to the process; `None` after the process has closed its end.
    pub(super) link: Option<OwnedFd>,
    /// Program that the process runs.
    pub(super) program: PathBuf,
    /// Time at which the process reported that it serves.
    pub(super) serves_since: Option<Instant>,
    /// True if the process has reported that it has recovered, so that only its own checkpoint is
    /// valid.
    pub(super) has_taken: bool,
    /// True if the process has reported that it could not recover a client, or that a client still
    /// waits for its disks.
    pub(super) warned: bool,
    /// Reason that the process reported for a failure.
    pub(super) why: Option<String>,
    /// Checkpoint that the process has sent so far.
    pub(super) items: Checkpoint,
    /// True if the checkpoint is unusable, because a change could not be stored.
    pub(super) is_broken: bool,
    /// True if the checkpoint has changed since images were released.
    pub(super) has_changed: bool,
    /// Packets of the previous process's checkpoint that are still to be sent to this process.
    pub(super) parts: VecDeque<Part>,
    /// Messages that are sent to the process after `parts`.
    pub(super) later: RefCell<VecDeque<Packet>>,
    /// True if the next packet in the socket was handled and is to be removed.
    pub(super) is_seen: bool,
    /// True if the first packet of a checkpoint change of several packets was received, and the
    /// last one was not. Snapshots contain this flag. So if the supervisor is killed after it has
    /// removed only some of the packets from the socket, the next supervisor detects that the
    /// change is lost.
    pub(super) in_parts: bool,
}

impl Worker {
    /// Starts a server process with the arguments of this process. `how`: value of [`AS_WORKER`].
    /// `permitted`: for an upgrade, configuration that replaces the configuration in the grants.
    ///
    /// # Errors
    /// The program cannot be started.
    pub(super) fn start(
        program: &Path,
        arguments: &[OsString],
        how: &str,
        permitted: Option<&Permitted>,
    ) -> io::Result<Self> {
        let (ours, theirs) = protocol::pair()?;
        // A server process that does not read its socket must not block the supervisor.
        rustix::io::ioctl_fionbio(&ours, true)?;
        let mut command = Command::new(program);
        let mut words = arguments.iter();
        command.arg0(words.next().map_or(program.as_os_str(), OsString::as_os_str));
        let mut is_verb_there = false;
        for word in words {
            command.arg(word);
            if !is_verb_there && is_verb(word) {
                command.args([AS_WORKER, how]);
                is_verb_there = true;
            }
        }
        // Socket activation variables are for the supervisor only.
        for name in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
            command.env_remove(name);
        }
        let owner = Owner::new();
        let brokers = [broker::start(Kind::Images, owner)?, broker::start(Kind::Paths, owner)?];
        let config = match permitted {
            Some(permitted) => permitted.config.clone(),
            None => GRANTS.lock().facts.config.clone(),
        };
        let config = config.map(|text| memory_of(text.as_bytes())).transpose()?;
        let fds: Vec<_> = brokers.iter().chain(&config).map(AsFd::as_fd).collect();
        protocol::send_bytes(&ours, to_worker::BEGIN, &[], &fds, true)?;
        let child = command.stdin(Stdio::from(theirs)).spawn()?;
        let mut worker = Self::new(child.into(), Some(ours), program);
        worker.owner = owner;
        Ok(worker)
    }

    /// Creates the state of a server process that has sent nothing.
    pub(super) fn new(process: Process, link: Option<OwnedFd>, program: &Path) -> Self {
        Self {
            process,
            owner: Owner::default(),
            link,
            program: program.to_owned(),
            serves_since: None,
            has_taken: false,
            warned: false,
            why: None,
            items: Checkpoint::default(),
            is_broken: false,
            has_changed: false,
            parts: VecDeque::new(),
            later: RefCell::default(),
            is_seen: false,
            in_parts: false,
        }
    }

    /// Lets the process recover from the checkpoint `left`, which [`forward`](Self::forward) sends
    /// to it.
    ///
    /// `deaths`: number of consecutive deaths, for [`to_worker::DEATHS`].
    pub(super) fn recovers_from(&mut self, left: &Left, deaths: usize) {
        let Death { by_fault, is_quiesced, last_by_fault } = left.death;
        let all = [
            (to_worker::FAULT, by_fault),
            (to_worker::QUIESCED, is_quiesced),
            (to_worker::LAST_BY_FAULT, last_by_fault),
        ];
        let said = all.iter().filter(|(_, is_so)| *is_so);
        said.for_each(|(code, _)| self.send(*code, "", None));
        self.send(to_worker::DEATHS, &deaths.to_string(), None);
        self.send_checkpoint(&left.items);
        // Until the process has recovered, checkpoint changes that it sends are applied to a copy
        // of the old checkpoint.
        self.items = left.items.clone();
    }

    /// Queues a checkpoint, which [`forward`](Self::forward) sends.
    pub(super) fn send_checkpoint(&mut self, items: &Checkpoint) {
        self.parts = items.parts().into();
    }

    /// Copies the process's checkpoint if it is complete.
    pub(super) fn copy_of_checkpoint(&self) -> Option<Checkpoint> {
        let is_usable = !self.is_broken && self.items.contains(COMPLETE);
        is_usable.then(|| self.items.clone())
    }

    /// Sends parts of the old checkpoint, at most [`MESSAGES`] of them, and then messages, until
    /// the socket is full.
    pub(super) fn forward(&mut self) {
        let Some(link) = &self.link else { return };
        // Returns false if the socket is full. Other errors mean that the process has exited, which
        // `reap_children` handles.
        let is_sent = |code, bytes: &[u8], fds: &[BorrowedFd<'_>]| {
            let sent = protocol::send_bytes(link, code, bytes, fds, true);
            !sent.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
        };
        for _ in 0..MESSAGES {
            let Some(part) = self.parts.front() else { break };
            let packet = part.packet();
            if !is_sent(to_worker::CHECKPOINT, &packet.bytes, &packet.fds) {
                return;
            }
            self.parts.pop_front();
        }
        if !self.parts.is_empty() {
            return;
        }
        let later = self.later.get_mut();
        while let Some(message) = later.front() {
            let fds: Vec<_> = message.fds.iter().map(AsFd::as_fd).collect();
            if !is_sent(message.code, &message.body, &fds) {
                return;
            }
            later.pop_front();
        }
    }

    /// Returns true if the process has recovered or serves, so that the previous process's
    /// checkpoint is obsolete.
    pub(super) fn has_recovered(&self) -> bool {
        self.has_taken || self.serves_since.is_some()
    }

    /// Takes the checkpoint if it is complete. `ended`: exit status of the process, or `None` if it
    /// was killed for an upgrade.
    pub(super) fn take_checkpoint(&mut self, ended: Option<ExitStatus>) -> Option<Left> {
        let items = std::mem::take(&mut self.items);
        let by_fault = ended.is_some_and(is_fault);
        let death = Death { by_fault, last_by_fault: by_fault, is_quiesced: false };
        items.contains(COMPLETE).then_some(Left { items, death })
    }

    /// Returns the exit status if the process has ended, and all of its messages were received.
    pub(super) fn ended(&mut self) -> Option<ExitStatus> {
        let status = self.process.ended()?;
        let Some(link) = &self.link else { return Some(status) };
        // If another process holds the other end, it cannot send further messages, so the queue
        // ends.
        let _ = shutdown(link, Shutdown::Read);
        None
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.pid().as_raw_pid().cast_unsigned()
    }

    /// Socket from which the process's messages are read.
    pub(super) fn link(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().map(AsFd::as_fd)
    }

    /// Sends a message, after the checkpoint that is being sent. Does nothing if the connection is
    /// closed. A process whose socket is full, because it reads no messages, is killed.
    pub(super) fn send(&self, code: u8, body: &str, fd: Option<BorrowedFd<'_>>) {
        let Some(link) = &self.link else { return };
        let mut later = self.later.borrow_mut();
        if self.parts.is_empty() && later.is_empty() {
            let sent = protocol::send_bytes(link, code, body.as_bytes(), fd.as_slice(), true);
            if sent.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
                self.process.signal(Signal::KILL);
            }
            return;
        }
        let fd = fd.and_then(|fd| fd.try_clone_to_owned().ok());
        later.push_back(Packet { code, body: body.into(), fds: fd.into_iter().collect() });
        if later.len() > MAX_LATER {
            self.process.signal(Signal::KILL);
        }
    }

    /// True if a checkpoint or messages wait for room in the socket.
    pub(super) fn has_unsent(&self) -> bool {
        !self.parts.is_empty() || !self.later.borrow().is_empty()
    }

    /// Returns the next message. Before that message it handles up to [`MAX_AT_ONCE`] packets with
    /// checkpoint changes. If there are more of them, it returns a packet with type 0, and the
    /// caller has to call again.
    ///
    /// If there is an fd store, each packet stays in the socket until the next call. By then the
    /// packet is in the store, or its effect is in a snapshot, which the caller writes if
    /// [`FdStore::needs_snapshot`] is true.
    pub(super) fn receive(&mut self, mut fd_store: Option<&mut FdStore>) -> Option<Packet> {
        for _ in 0..MAX_AT_ONCE {
            let link = self.link.as_ref()?;
            if std::mem::take(&mut self.is_seen) {
                protocol::drop_one(link);
            }
            let heard = match fd_store {
                Some(_) => protocol::peek(link),
                None => protocol::receive(link, true),
            };
            let mut packet = match heard {
                Ok(Some(packet)) => packet,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Ok(None) | Err(_) => {
                    deferred_close::close(self.link.take());
                    // The store still contains the link, so the process does not notice the close.
                    fd_store.into_iter().for_each(FdStore::is_stale);
                    return None;
                }
            };
            self.is_seen = fd_store.is_some();
            match packet.code {
                to_supervisor::CHECKPOINT => self.has_changed = true,
                code => {
                    if code == to_supervisor::FAILED && self.why.is_none() {
                        self.why = Some(packet.text());
                        fd_store.into_iter().for_each(|fd_store| fd_store.is_wanted = true);
                    }
                    let has_fd = matches!(code, to_supervisor::UPGRADE | to_supervisor::FORGET);
                    let used = usize::from(has_fd);
                    let unused = packet.fds.drain(used.min(packet.fds.len())..);
                    deferred_close::close(unused);
                    return Some(packet);
                }
            }
            if let Some(fd_store) = &mut fd_store {
                let (begins, ends) = Checkpoint::begins_and_ends(&packet.body);
                if !self.items.is_open {
                    if !begins && !self.in_parts {
                        // This is the rest of a change whose first packets another supervisor has
                        // received. Its snapshot contains the whole change.
                        continue;
                    }
                    if !ends && !std::mem::replace(&mut self.in_parts, true) {
                        fd_store.is_wanted = true;
                    }
                    if fd_store.needs_snapshot() {
                        // The packet is read again after the snapshot.
                        self.is_seen = false;
                        deferred_close::close(packet.fds);
                        return Some(Packet { code: 0, body: Vec::new(), fds: Vec::new() });
                    }
                }
                // A change of several packets is not stored by itself, because the next snapshot
                // contains it.
                if begins && ends && fd_store.change(self.pid(), &packet).is_err() {
                    fd_store.is_wanted = true;
                }
            }
            self.keep(&packet.body, std::mem::take(&mut packet.fds));
            if let Some(fd_store) = fd_store.as_mut().filter(|_| !self.items.is_open) {
                if std::mem::take(&mut self.in_parts) {
                    fd_store.is_wanted = true;
                }
                if fd_store.needs_snapshot() {
                    return Some(packet);
                }
            }
        }
        // The caller tries again, because the socket may have more packets.
        Some(Packet { code: 0, body: Vec::new(), fds: Vec::new() })
    }

    /// Applies a packet of a checkpoint change.
    pub(super) fn keep(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) {
        if self.is_broken {
            return deferred_close::close(fds);
        }
        if let Err(error) = self.items.take(bytes, fds) {
            self.is_broken = true;
            self.items = Checkpoint::default();
            log_line(&format!(
                "error: the clients will lose their controllers if process {} crashes: its \
                 checkpoint cannot be stored: {error}",
                self.pid()
            ));
        }
    }

    /// Ends the process with SIGABRT. The death then counts as a fault of the process, which a
    /// command in flight may have caused.
    pub(super) fn abort(&self) {
        // The exit of the process is handled by `reap_children`.
        self.process.signal(Signal::ABORT);
        // A stopped process receives SIGABRT only after SIGCONT.
        self.process.signal(Signal::CONT);
    }

    /// Kills the process. `reap_children` handles its exit, which may take long.
    pub(super) fn kill(&self) {
        self.process.signal(Signal::KILL);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // The process may have queued descriptors that are slow to close.
        deferred_close::close(self.link.take());
        self.owner.ended();
    }
}

/// Describes an exit status as the predicate of a sentence, such as "was ended by signal 6".
pub(super) fn how(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(SIGSYS), _) => {
            "was killed for a system call that its sandbox forbids (signal 31)".to_owned()
        }
        (Some(signal), _) => format!("was ended by signal {signal}"),
        (None, code) => format!("ended with exit status {}", code.unwrap_or_default()),
    }
}

/// Returns true if the process ended by a fault of its own, such as a panic or SIGSEGV.
pub(super) fn is_fault(status: ExitStatus) -> bool {
    status.signal().is_some() && !is_killed(status)
}

/// Returns true if the process was killed from outside: by a user, or for lack of memory.
pub(super) fn is_killed(status: ExitStatus) -> bool {
    status.signal() == Some(signal_hook::consts::SIGKILL)
}

#[cfg(test)]
mod tests {
    use super::super::fd_store::SavedFdStore;
    use super::super::snapshot::Snapshot;
    use super::*;
    use crate::checkpoint::{Change, packets};
    use shadowbell_state::Parcel;

    fn worker(link: &OwnedFd, items: Checkpoint, in_parts: bool) -> Worker {
        let process = Process::from_saved(rustix::process::getpid(), None, false);
        let mut worker = Worker::new(process, Some(link.try_clone().unwrap()), Path::new(""));
        (worker.items, worker.in_parts) = (items, in_parts);
        worker
    }

    fn record(fd_store: &mut FdStore) {
        let bytes = Parcel::new().encode(0).unwrap();
        fd_store
            .append_snapshot(&Snapshot { bytes, fds: Vec::new() }, GRANTS.lock().changes)
            .unwrap();
    }

    #[test]
    fn a_process_that_reads_no_message_is_killed() {
        let (ours, _theirs) = protocol::pair().unwrap();
        let mut worker = worker(&ours, Checkpoint::default(), false);
        worker.process = Command::new("sleep").arg("3600").spawn().unwrap().into();
        let status = loop {
            worker.send(to_worker::REPORT, "", None);
            if let Some(status) = worker.process.ended() {
                break status;
            }
        };
        assert!(is_killed(status), "{status}");
    }

    #[test]
    fn a_message_follows_the_checkpoint_that_is_being_sent() {
        let (ours, theirs) = protocol::pair().unwrap();
        let mut items = Checkpoint::default();
        for number in 0..400 {
            let key = format!("item/{number}");
            let changes = [Change::Put { key: &key, body: &[7; 4096], fds: &[] }];
            let mut memory = Vec::new();
            for packet in packets(&changes, &mut memory).unwrap() {
                items.take(&packet.bytes, Vec::new()).unwrap();
            }
        }
        let mut worker = worker(&ours, Checkpoint::default(), false);
        worker.process = Command::new("sleep").arg("3600").spawn().unwrap().into();
        worker.send_checkpoint(&items);
        worker.forward();
        assert!(worker.has_unsent(), "the socket is full");
        worker.send(to_worker::END, "", None);
        loop {
            worker.forward();
            let packet = protocol::receive(&theirs, true).unwrap().unwrap();
            if packet.code == to_worker::END {
                break;
            }
            assert_eq!(packet.code, to_worker::CHECKPOINT);
        }
        assert!(!worker.has_unsent() && worker.process.ended().is_none());
        worker.kill();
    }

    /// Tests a kill of the supervisor at each step of a checkpoint change of three packets.
    #[test]
    fn a_change_in_parts_counts_once_or_is_known_to_be_lost() {
        shadowbell_process::descriptor_limit::raise();
        let all: Vec<OwnedFd> = (0..600).map(|_| io::pipe().unwrap().0.into()).collect();
        let fds: Vec<_> = all.iter().map(AsFd::as_fd).collect();
        let changes = [Change::Put { key: "port/0", body: b"new", fds: &fds }];
        // Number of steps before the kill.
        for steps in 0..4 {
            let (ours, theirs) = protocol::pair().unwrap();
            let mut memory = Vec::new();
            for packet in packets(&changes, &mut memory).unwrap() {
                let (bytes, fds) = (&packet.bytes, &packet.fds);
                protocol::send_bytes(&theirs, to_supervisor::CHECKPOINT, bytes, fds, true).unwrap();
            }
            let (write, read) = protocol::pair().unwrap();
            let mut fd_store = FdStore::from_saved(write, read, SavedFdStore::default());
            record(&mut fd_store);
            let mut before = worker(&ours, Checkpoint::default(), false);
            match steps {
                // Killed before a packet was read.
                0 => {}
                // Killed after a snapshot recorded that the change has begun.
                1 => assert_eq!(before.receive(Some(&mut fd_store)).unwrap().code, 0),
                // Killed after some packets were removed from the socket.
                2 => {
                    assert_eq!(before.receive(Some(&mut fd_store)).unwrap().code, 0);
                    protocol::drop_one(&ours);
                }
                // Killed after a snapshot with the change, while its last packet is still in the
                // socket.
                _ => {
                    assert_eq!(before.receive(Some(&mut fd_store)).unwrap().code, 0);
                    record(&mut fd_store);
                    let last = before.receive(Some(&mut fd_store)).unwrap();
                    assert!(last.code == to_supervisor::CHECKPOINT && fd_store.needs_snapshot());
                    assert!(before.items.contains("port/0") && !before.in_parts);
                }
            }
            let mut after = worker(&ours, std::mem::take(&mut before.items), before.in_parts);
            for _ in 0..3 {
                if after.receive(Some(&mut fd_store)).is_none() {
                    break;
                }
                record(&mut fd_store);
            }
            assert_eq!(after.is_broken, steps == 2, "{steps}");
            if steps != 2 {
                let (body, its) = after.items.remove("port/0").unwrap().read().unwrap();
                assert_eq!((&body[..], its.len()), (&b"new"[..], 600), "{steps}");
            }
        }
    }
}
