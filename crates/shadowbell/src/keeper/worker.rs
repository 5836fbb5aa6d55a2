//! A worker, as its keeper has it.

use super::command_line::is_verb;
use super::journal::Journal;
use super::opener;
use super::places;
use super::process::Process;
use super::say::say;
use crate::items::{COMPLETE, Items, Part};
use crate::keeper_link::{self, AS_WORKER, Packet, to_keeper, to_worker};
use rustix::process::Signal;
use signal_hook::consts::SIGSYS;
use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// What a worker has left for the one that goes on for it.
#[derive(Default)]
pub(super) struct Left {
    pub(super) items: Items,
    /// It has died by a fault: what it had in hand may be the reason.
    pub(super) by_fault: bool,
}

/// A process that serves, or is to.
pub(super) struct Worker {
    pub(super) process: Process,
    /// Until it has closed its end.
    pub(super) link: Option<OwnedFd>,
    /// Its program.
    pub(super) program: PathBuf,
    /// Since when it serves.
    pub(super) serves_since: Option<Instant>,
    /// It answers when it is asked whether it is alive. One of an earlier release does not.
    pub(super) answers: bool,
    /// It can hand over, and take over, one controller after the other.
    pub(super) moves: bool,
    /// It can come to rest for good, so that another one goes on for it.
    pub(super) can_rest: bool,
    /// It goes on for another one, and says that what it has left itself counts.
    pub(super) has_taken: bool,
    /// Why it can not go on, as it says itself.
    pub(super) why: Option<String>,
    /// What it has left for the time after its death.
    pub(super) items: Items,
    /// That is of no use: something of it could not be kept.
    pub(super) is_broken: bool,
    /// It asks for images to be opened.
    pub(super) has_opener: bool,
    /// It asks for sockets and files.
    pub(super) has_places: bool,
    /// What it is still to be told of what another one has left.
    pub(super) parts: VecDeque<Part>,
    /// The next packet was looked at, and is to go.
    pub(super) is_seen: bool,
    /// A change of items has begun that comes in several packets, and a record says so. If the
    /// keeper is killed, such a change is lost if some of them were taken from the socket.
    pub(super) in_parts: bool,
}

impl Worker {
    /// Starts one by the arguments of this process, and tells it `how` it begins.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn start(program: &Path, arguments: &[OsString], how: &str) -> io::Result<Self> {
        let (ours, theirs) = keeper_link::pair()?;
        // A worker that does not read must not hold up its keeper.
        rustix::io::ioctl_fionbio(&ours, true)?;
        let mut command = Command::new(program);
        let mut words = arguments.iter();
        command.arg0(words.next().map_or(program.as_os_str(), OsString::as_os_str));
        let mut is_verb_there = false;
        for word in words {
            command.arg(word);
            if !is_verb_there && is_verb(word) {
                command.args([AS_WORKER, how]);
                // Releases before take the first for the keeper's own only with the second.
                if !arguments.iter().any(|word| word == "--keeper") {
                    command.arg("--keeper");
                }
                is_verb_there = true;
            }
        }
        // What a service manager has given to the keeper is not its worker's.
        for name in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
            command.env_remove(name);
        }
        let child = command.stdin(Stdio::from(theirs)).spawn()?;
        Ok(Self {
            process: child.into(),
            link: Some(ours),
            program: program.to_owned(),
            serves_since: None,
            answers: false,
            moves: false,
            can_rest: false,
            has_taken: false,
            why: None,
            items: Items::default(),
            is_broken: false,
            has_opener: false,
            has_places: false,
            parts: VecDeque::new(),
            is_seen: false,
            in_parts: false,
        })
    }

    /// Starts one that goes on with what another has `left`; it is to be [told](Self::pass_on).
    ///
    /// # Errors
    /// The system's.
    pub(super) fn start_to_recover(
        program: &Path,
        arguments: &[OsString],
        left: &Left,
    ) -> io::Result<Self> {
        let mut worker = Self::start(program, arguments, keeper_link::RECOVER)?;
        if left.by_fault {
            worker.say(to_worker::FAULT, "", None);
        }
        worker.parts = left.items.parts().into();
        // It changes what it changes.
        worker.items = left.items.clone();
        Ok(worker)
    }

    /// Tells it what there is room for of what another one has left.
    pub(super) fn pass_on(&mut self) {
        while let (Some(link), Some(part)) = (&self.link, self.parts.front()) {
            let packet = part.packet();
            match keeper_link::send_bytes(link, to_worker::ITEMS, &packet.bytes, &packet.fds, true)
            {
                Ok(()) => drop(self.parts.pop_front()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // Its end is seen elsewhere.
                Err(_) => self.parts.clear(),
            }
        }
    }

    /// Whether it waits for room to be told more.
    pub(super) fn has_more_to_hear(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Whether it has begun: who goes on after it goes on with what it has left, or not at all.
    pub(super) fn has_begun(&self) -> bool {
        self.has_taken || self.serves_since.is_some()
    }

    /// What it has left, if another one can go on with that. It has ended so, or was ended.
    pub(super) fn leaves(&mut self, ended: Option<ExitStatus>) -> Option<Left> {
        let items = std::mem::take(&mut self.items);
        let left = Left { items, by_fault: ended.is_some_and(is_fault) };
        Some(left).filter(|left| left.items.contains(COMPLETE))
    }

    /// What it has left together with another one, which goes on for a part of what this one had.
    pub(super) fn leaves_with(&mut self, older: Option<Left>) -> Option<Left> {
        let ended = self.process.ended();
        let (mut left, older) = (self.leaves(ended)?, older?);
        left.items.add_older(older.items);
        left.by_fault |= older.by_fault;
        Some(left)
    }

    /// It goes on for the one before, of which nothing counts any more.
    pub(super) fn takes(&mut self) {
        self.has_taken = true;
        drop(self.items.take_older());
    }

    /// Another one goes on: nothing is left for later.
    pub(super) fn leaves_nothing(&mut self) {
        self.items = Items::default();
    }

    /// How long it has served.
    pub(super) fn has_served(&self) -> Option<Duration> {
        self.serves_since.map(|since| since.elapsed())
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.pid().as_raw_pid().cast_unsigned()
    }

    /// Where it can be heard.
    pub(super) fn link(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().map(AsFd::as_fd)
    }

    /// Says something; in vain if it is dead.
    pub(super) fn say(&self, letter: u8, body: &str, fd: Option<BorrowedFd<'_>>) {
        if let Some(link) = &self.link {
            let _ = keeper_link::send(link, letter, body, fd);
        }
    }

    /// What it has said, if anything. What it wants kept is kept. With a journal each packet stays
    /// in the socket until the next call: by then it is in the journal, or there is a record of
    /// what it has brought about, as [`Journal::needs_record`] asks.
    pub(super) fn hear(&mut self, mut journal: Option<&mut Journal>) -> Option<Packet> {
        loop {
            let link = self.link.as_ref()?;
            if std::mem::take(&mut self.is_seen) {
                keeper_link::drop_one(link);
            }
            let heard = match journal {
                Some(_) => keeper_link::peek(link),
                None => keeper_link::receive(link, true),
            };
            let mut packet = match heard {
                Ok(Some(packet)) => packet,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return None,
                Ok(None) | Err(_) => {
                    self.link = None;
                    return None;
                }
            };
            self.is_seen = journal.is_some();
            match packet.letter {
                to_keeper::ITEMS => {}
                to_keeper::PLACES => {
                    // The same.
                    if !std::mem::replace(&mut self.has_places, true) {
                        packet.fd().into_iter().for_each(places::start);
                    }
                    continue;
                }
                to_keeper::OPENER => {
                    // Once: what it may have is named before it is in its sandbox.
                    if !std::mem::replace(&mut self.has_opener, true) {
                        packet.fd().into_iter().for_each(opener::start);
                    }
                    continue;
                }
                _ => return Some(packet),
            }
            if let Some(journal) = &mut journal {
                let (begins, ends) = Items::begins_and_ends(&packet.body);
                if !self.items.is_open() {
                    if !begins && !self.in_parts {
                        // The end of a change that there is a record of.
                        continue;
                    }
                    if !ends && !std::mem::replace(&mut self.in_parts, true) {
                        journal.wants_record();
                    }
                    if journal.needs_record() {
                        // And then this once more.
                        self.is_seen = false;
                        packet.letter = 0;
                        return Some(packet);
                    }
                }
                // In parts it is not put there: all of it is in the next record.
                if begins && ends && journal.change(self.pid(), &packet).is_err() {
                    journal.wants_record();
                }
            }
            self.keep(&packet.body, std::mem::take(&mut packet.fds));
            if let Some(journal) = journal.as_mut().filter(|_| !self.items.is_open()) {
                if std::mem::take(&mut self.in_parts) {
                    journal.wants_record();
                }
                if journal.needs_record() {
                    return Some(packet);
                }
            }
        }
    }

    /// Keeps what belongs to a change of items.
    pub(super) fn keep(&mut self, bytes: &[u8], fds: Vec<OwnedFd>) {
        if self.is_broken {
            return;
        }
        if let Err(error) = self.items.take(bytes, fds) {
            self.is_broken = true;
            self.items = Items::default();
            say(&format!(
                "error: if process {} dies, its clients lose their controllers, because what \
                 the next one needs can not be kept: {error}",
                self.pid()
            ));
        }
    }

    /// How it has ended, if it has.
    pub(super) fn ended(&mut self) -> Option<ExitStatus> {
        self.process.ended()
    }

    /// Ends it as a fault would, so that what it has in hand is looked at as the reason.
    pub(super) fn abort(&self) {
        // Its end is seen elsewhere.
        self.process.signal(Signal::ABORT);
        // One that somebody has stopped does not come to it before it goes on.
        self.process.signal(Signal::CONT);
    }

    /// Ends it at once, and waits until it has.
    pub(super) fn kill(&mut self) {
        self.process.kill();
    }
}

/// How a process ended, for a sentence.
pub(super) fn how(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(SIGSYS), _) => {
            "was ended for a system call that its sandbox forbids (signal 31)".to_owned()
        }
        (Some(signal), _) => format!("was ended by signal {signal}"),
        (None, code) => format!("ended with exit status {}", code.unwrap_or_default()),
    }
}

/// Whether a process has ended itself by a signal: by a panic or an access to no memory.
fn is_fault(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    status.signal().is_some() && !is_killed(status)
}

/// Whether a process was ended from outside: by who may, or for want of memory.
pub(super) fn is_killed(status: ExitStatus) -> bool {
    use std::os::unix::process::ExitStatusExt;
    status.signal() == Some(signal_hook::consts::SIGKILL)
}

#[cfg(test)]
mod tests {
    use super::super::journal::SavedJournal;
    use super::super::record::Record;
    use super::*;
    use crate::items::{Change, packets};
    use shadowbell_state::Parcel;

    fn worker(link: &OwnedFd, items: Items, in_parts: bool) -> Worker {
        Worker {
            process: Process::of_another(rustix::process::getpid(), None),
            link: Some(link.try_clone().unwrap()),
            program: PathBuf::new(),
            serves_since: None,
            answers: true,
            moves: false,
            can_rest: false,
            has_taken: false,
            why: None,
            items,
            is_broken: false,
            has_opener: false,
            has_places: false,
            parts: VecDeque::new(),
            is_seen: false,
            in_parts,
        }
    }

    fn record(journal: &mut Journal) {
        let bytes = Parcel::new().encode(0).unwrap();
        journal.record(&Record { bytes, fds: Vec::new() }, opener::changes()).unwrap();
    }

    /// A change in three packets, and a keeper that is killed at each step of it.
    #[test]
    fn a_change_in_parts_counts_once_or_is_known_to_be_lost() {
        crate::descriptor_limit::raise();
        let all: Vec<OwnedFd> = (0..600).map(|_| io::pipe().unwrap().0.into()).collect();
        let fds: Vec<_> = all.iter().map(AsFd::as_fd).collect();
        let changes = [Change::Put { key: "port/0", body: b"new", fds: &fds }];
        // How many steps it takes before it is killed.
        for steps in 0..4 {
            let (ours, theirs) = keeper_link::pair().unwrap();
            let mut memory = Vec::new();
            for packet in packets(&changes, &mut memory).unwrap() {
                let (bytes, fds) = (&packet.bytes, &packet.fds);
                keeper_link::send_bytes(&theirs, to_keeper::ITEMS, bytes, fds, true).unwrap();
            }
            let (write, read) = keeper_link::pair().unwrap();
            let mut journal = Journal::of_before(write, read, &SavedJournal::default());
            record(&mut journal);
            let mut before = worker(&ours, Items::default(), false);
            match steps {
                // It was not looked at.
                0 => {}
                // A record says that it begins.
                1 => assert_eq!(before.hear(Some(&mut journal)).unwrap().letter, 0),
                // Some of it was taken.
                2 => {
                    assert_eq!(before.hear(Some(&mut journal)).unwrap().letter, 0);
                    keeper_link::drop_one(&ours);
                }
                // All of it was, and there is a record, and its end is in the socket still.
                _ => {
                    assert_eq!(before.hear(Some(&mut journal)).unwrap().letter, 0);
                    record(&mut journal);
                    let last = before.hear(Some(&mut journal)).unwrap();
                    assert!(last.letter == to_keeper::ITEMS && journal.needs_record());
                    assert!(before.items.contains("port/0") && !before.in_parts);
                }
            }
            let mut after = worker(&ours, std::mem::take(&mut before.items), before.in_parts);
            for _ in 0..3 {
                if after.hear(Some(&mut journal)).is_none() {
                    break;
                }
                record(&mut journal);
            }
            assert_eq!(after.is_broken, steps == 2, "{steps}");
            if steps != 2 {
                let (body, its) = after.items.remove("port/0").unwrap().read().unwrap();
                assert_eq!((&body[..], its.len()), (&b"new"[..], 600), "{steps}");
            }
        }
    }
}
