//! What the service manager keeps for a keeper that is killed (systemd's fd store).
//!
//! A service manager keeps descriptors, under names, and gives them back to the next process of the
//! service. It is not told of every change: what it keeps are the two ends of a socket, and all that
//! the keeper has lies in there as packets, with the descriptors. They outlive whoever has put them
//! there: they are the system's until somebody reads them. So nothing but these two counts against
//! the service manager's limit (`FileDescriptorStoreMax=`), a change costs a packet or two, and each
//! packet is there as a whole or not at all.
//!
//! # What is in there
//!
//! A [record](super::record) of all that the keeper is, and the changes of workers' items since
//! then. Now and then another record is put behind them, and what is before that is taken out. A
//! record counts when all of it is there. Whoever reads goes by the last one that does, and by the
//! changes behind it.
//!
//! * What a worker says is looked at, put there, and only then taken out of the worker's socket. That
//!   socket is in the record, too. So what a worker has said is in one of the two. In both, if the
//!   keeper is killed in between: then it counts twice, which does no harm.
//! * A worker is in there before it is told anything.
//! * What a worker no longer needs is taken out a moment later: until then a client whose
//!   connection has ended may not see that.
//!
//! # When it is found
//!
//! The next keeper moves the packets to a new socket, one by one: it puts each there before it takes
//! it away. Whoever dies on the way leaves both sockets, and what is in the newer one comes first.
//! Then it ends the workers that it finds (it is not their parent: a pidfd names them), reads what
//! they have said last, and goes on as after the death of a worker.

use super::opener;
use super::record::{Arriving, Record};
use crate::keeper_link::{self, Packet, send_bytes};
use crate::notify;
use rustix::net::sockopt::set_socket_send_buffer_size;
use serde::{Deserialize, Serialize};
use shadowbell_memory::process::take_inherited;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// A change of items: the worker's number, and the packet that it has sent.
const CHANGE: u8 = b'I';
/// What the descriptors are called: this, a number, and the end that is written or read.
const NAME: &str = "shadowbell-keeper-";
/// Where a service manager puts the first descriptor.
const FIRST: i32 = 3;
/// What may be in there at a time, if the system lets it.
const ROOM: usize = 1 << 20;
/// So much of changes is behind a record before there is another one. The least that systems let be
/// in there (`net.core.wmem_default`) is three times as much.
const MOST_BEHIND: usize = 64 << 10;
/// What a packet takes beside its bytes, or more.
const PACKET: usize = 1 << 10;
/// How long what is of no use any more stays at most, unless a record takes long to write.
const STALE: Duration = Duration::from_millis(10);

/// Where it is kept what this keeper has.
pub(super) struct Journal {
    write: OwnedFd,
    read: OwnedFd,
    /// By which the service manager knows it.
    generation: u64,
    /// Of the next packet.
    number: u64,
    /// There has to be a record before anything else.
    is_wanted: bool,
    /// How often what workers may open had changed by the last record.
    opened: u64,
    /// Of changes behind the last record, in bytes.
    behind: usize,
    /// When there is to be another record, if something of the last one is of no use any more.
    due: Option<Instant>,
    /// What a record takes to write.
    took: Duration,
}

/// What was found.
pub(super) struct Found {
    pub(super) record: Arriving,
    /// Changes since then, of the worker with this process number.
    pub(super) changes: Vec<(u32, Packet)>,
}

/// Whether the service manager keeps descriptors of this process.
pub(super) fn is_wanted() -> bool {
    // systemd from 254 on says how many it takes; the units say so for earlier ones.
    let number = |name| std::env::var(name).ok()?.parse::<u32>().ok();
    std::env::var_os("NOTIFY_SOCKET").is_some() && number("FDSTORE").is_some_and(|most| most >= 4)
}

fn name(generation: u64, end: &str) -> String {
    format!("{NAME}{generation}-{end}")
}

/// The ends that the service manager has given to this process, the newest first, and all numbers
/// of which it has something.
fn given() -> (Vec<(u64, OwnedFd, OwnedFd)>, Vec<u64>) {
    let variable = |name| std::env::var(name).unwrap_or_default();
    let ours = std::process::id().to_string();
    if variable("LISTEN_PID") != ours {
        return Default::default();
    }
    let names = variable("LISTEN_FDNAMES");
    let mut ends: Vec<(u64, bool, OwnedFd)> = Vec::new();
    let mut generations = Vec::new();
    let count = variable("LISTEN_FDS").parse().unwrap_or(0);
    for (nth, name) in (0..count).zip(names.split(':')) {
        // Also what is nobody's here: workers are not to have it.
        let Some(fd) = take_inherited(FIRST + nth) else { continue };
        let named = name.strip_prefix(NAME).and_then(|rest| rest.split_once('-'));
        let Some((generation, end)) = named else { continue };
        let Ok(generation) = generation.parse() else { continue };
        generations.push(generation);
        ends.push((generation, end == "w", fd));
    }
    generations.sort_unstable_by(|one, other| other.cmp(one));
    generations.dedup();
    let mut take = |generation: u64, writes: bool| {
        let at = ends.iter().position(|(is, w, _)| (*is, *w) == (generation, writes))?;
        Some(ends.swap_remove(at).2)
    };
    let pair =
        |generation: &u64| Some((*generation, take(*generation, true)?, take(*generation, false)?));
    let pairs = generations.iter().filter_map(pair).collect();
    (pairs, generations)
}

impl Journal {
    /// A new one; and what is in those that the service manager has kept.
    ///
    /// # Errors
    /// The system's: the service manager keeps nothing.
    pub(super) fn begin() -> io::Result<(Self, Option<Found>)> {
        let (pairs, generations) = given();
        let newest = generations.first().copied().unwrap_or_default();
        let moved = Self::new(newest.saturating_add(1)).and_then(|mut journal| {
            match journal.take_over(&pairs) {
                Ok(found) => Ok((journal, found)),
                Err(error) => {
                    journal.end();
                    Err(error)
                }
            }
        });
        // If that has failed, nobody is to go on from there later.
        generations.into_iter().for_each(forget);
        moved
    }

    /// One that the service manager keeps.
    fn new(generation: u64) -> io::Result<Self> {
        let (write, read) = keeper_link::pair()?;
        // What the system lets it have.
        let _ = set_socket_send_buffer_size(&write, ROOM);
        for (end, fd) in [("w", &write), ("r", &read)] {
            let state = format!("FDSTORE=1\nFDNAME={}\nFDPOLL=0", name(generation, end));
            notify::keep(&state, fd.as_fd())?;
        }
        Ok(Self {
            write,
            read,
            generation,
            number: 1,
            is_wanted: false,
            opened: 0,
            behind: 0,
            due: None,
            took: Duration::ZERO,
        })
    }

    /// Moves what is in these to this one.
    fn take_over(&mut self, pairs: &[(u64, OwnedFd, OwnedFd)]) -> io::Result<Option<Found>> {
        let mut reader = Reader::default();
        for (_, _write, read) in pairs {
            while let Ok(Some(packet)) = keeper_link::peek(read) {
                if reader.is_new(&packet) {
                    let fds: Vec<_> = packet.fds.iter().map(AsFd::as_fd).collect();
                    self.put(packet.letter, &packet.body, &fds)?;
                    reader.take(packet);
                }
                keeper_link::drop_one(read);
            }
        }
        self.number = reader.number.saturating_add(1);
        Ok(reader.found())
    }

    /// The one that this process had with another program.
    pub(super) fn of_before(write: OwnedFd, read: OwnedFd, saved: &SavedJournal) -> Self {
        Self {
            write,
            read,
            generation: saved.generation,
            number: saved.number,
            is_wanted: true,
            opened: 0,
            behind: saved.behind,
            due: None,
            took: Duration::ZERO,
        }
    }

    /// How far it is.
    pub(super) fn save(&self) -> SavedJournal {
        SavedJournal { generation: self.generation, number: self.number, behind: self.behind }
    }

    /// Both ends: the one that is written, and the one that is read.
    pub(super) fn ends(&self) -> (BorrowedFd<'_>, BorrowedFd<'_>) {
        (self.write.as_fd(), self.read.as_fd())
    }

    /// When there is to be a record.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.due
    }

    /// Something that is in there is of no use any more.
    pub(super) fn is_stale(&mut self) {
        let wait = STALE.max(20 * self.took);
        self.due.get_or_insert_with(|| Instant::now() + wait);
    }

    /// A worker has changed its items.
    ///
    /// # Errors
    /// There is no room.
    pub(super) fn change(&mut self, worker: u32, packet: &Packet) -> io::Result<()> {
        let mut body = self.number.to_le_bytes().to_vec();
        body.extend(worker.to_le_bytes());
        body.extend(&packet.body);
        let fds: Vec<_> = packet.fds.iter().map(AsFd::as_fd).collect();
        self.put(CHANGE, &body, &fds)?;
        self.number = self.number.saturating_add(1);
        self.behind += PACKET + body.len();
        self.is_stale();
        Ok(())
    }

    /// There has to be a record before anything else.
    pub(super) fn wants_record(&mut self) {
        self.is_wanted = true;
    }

    /// Whether there has to be one.
    pub(super) fn needs_record(&self) -> bool {
        self.is_wanted || self.behind > MOST_BEHIND || self.opened != opener::changes()
    }

    /// Puts a record there, and takes out what is before it. `opened`: how often what workers may
    /// open had changed before it was written.
    ///
    /// # Errors
    /// There is no room.
    pub(super) fn record(&mut self, record: &Record<'_>, opened: u64) -> io::Result<()> {
        let began = Instant::now();
        let first = self.number;
        record.send(&self.write, &mut self.number)?;
        while keeper_link::peek_number(&self.read).is_some_and(|number| number < first) {
            keeper_link::drop_one(&self.read);
        }
        (self.opened, self.is_wanted, self.behind, self.due) = (opened, false, 0, None);
        self.took = began.elapsed();
        Ok(())
    }

    fn put(&self, letter: u8, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        send_bytes(&self.write, letter, body, fds, true)
    }

    /// The service ends: the service manager keeps nothing.
    pub(super) fn end(self) {
        forget(self.generation);
        // It may have been told in vain.
        while keeper_link::peek_number(&self.read).is_some() {
            keeper_link::drop_one(&self.read);
        }
    }
}

fn forget(generation: u64) {
    for end in ["w", "r"] {
        notify::tell(&format!("FDSTOREREMOVE=1\nFDNAME={}", name(generation, end)));
    }
}

/// How far a journal is, for the same process with another program.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct SavedJournal {
    generation: u64,
    number: u64,
    behind: usize,
}

/// Reads what is in a journal.
#[derive(Default)]
struct Reader {
    /// Of the last packet.
    number: u64,
    arriving: Option<Arriving>,
    record: Option<Arriving>,
    changes: Vec<(u32, Packet)>,
}

impl Reader {
    /// Whether this packet was not there before.
    fn is_new(&self, packet: &Packet) -> bool {
        number_of(&packet.body).is_some_and(|number| number > self.number)
    }

    fn take(&mut self, mut packet: Packet) {
        let Some(number) = number_of(&packet.body) else { return };
        self.number = number;
        if Arriving::is_of(&packet) {
            self.arriving = Arriving::take(self.arriving.take(), packet);
            if let Some(record) = self.arriving.take_if(|record| record.is_complete()) {
                self.record = Some(record);
                self.changes.clear();
            }
            return;
        }
        // A record that did not come to its end counts for nothing.
        self.arriving = None;
        if let Some(worker) = packet.body.get(8..12).and_then(<[u8]>::first_chunk) {
            let worker = u32::from_le_bytes(*worker);
            packet.body.drain(..12);
            self.changes.push((worker, packet));
        }
    }

    fn found(self) -> Option<Found> {
        Some(Found { record: self.record?, changes: self.changes })
    }
}

fn number_of(body: &[u8]) -> Option<u64> {
    body.first_chunk().map(|number| u64::from_le_bytes(*number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_state::Parcel;
    use std::io::pipe;

    fn journal() -> Journal {
        let (write, read) = keeper_link::pair().unwrap();
        Journal::of_before(write, read, &SavedJournal { generation: 1, number: 1, behind: 0 })
    }

    /// A record that says so, with so many descriptors.
    fn record(says: u32, fds: &[OwnedFd]) -> Record<'_> {
        let mut parcel = Parcel::new();
        parcel.add("says", true, &says).unwrap();
        Record {
            bytes: parcel.encode(fds.len()).unwrap(),
            fds: fds.iter().map(AsFd::as_fd).collect(),
        }
    }

    fn change(text: &str) -> Packet {
        Packet { letter: b'I', body: text.into(), fds: vec![pipe().unwrap().0.into()] }
    }

    /// What the next one finds, if it is killed after each packet that it moves but the last one,
    /// and so is the one after it.
    fn found(journal: Journal) -> Option<(u32, Vec<String>)> {
        let (mut pairs, mut count) = (vec![(1, journal.write, journal.read)], 0);
        loop {
            let mut next = self::journal();
            let moved =
                pairs.iter().find_map(|(_, _, read)| keeper_link::peek(read).ok().flatten());
            // It has moved one and is killed: with it taken away, or not.
            if let Some(packet) = moved.filter(|_| count < 3) {
                let fds: Vec<_> = packet.fds.iter().map(AsFd::as_fd).collect();
                next.put(packet.letter, &packet.body, &fds).unwrap();
                if count % 2 == 0 {
                    let holds = |pair: &&(u64, OwnedFd, OwnedFd)| {
                        keeper_link::peek_number(&pair.2).is_some()
                    };
                    keeper_link::drop_one(&pairs.iter().find(holds).unwrap().2);
                }
                count += 1;
                pairs.insert(0, (2, next.write, next.read));
                continue;
            }
            let found = next.take_over(&pairs).unwrap()?;
            assert!(pairs.iter().all(|(_, _, read)| keeper_link::peek_number(read).is_none()));
            let says = found.record.read().unwrap().take("says").unwrap().unwrap();
            let texts = found.changes.into_iter().map(|(pid, packet)| {
                assert_eq!((pid, packet.fds.len()), (7, 1));
                packet.text()
            });
            return Some((says, texts.collect()));
        }
    }

    #[test]
    fn the_last_record_that_is_whole_counts_and_what_is_behind_it() {
        crate::descriptor_limit::raise();
        let fds: Vec<OwnedFd> = (0..300).map(|_| pipe().unwrap().0.into()).collect();
        assert_eq!(found(journal()), None);
        let mut one = journal();
        one.record(&record(1, &fds), 0).unwrap();
        one.change(7, &change("a")).unwrap();
        one.record(&record(2, &fds[..3]), 0).unwrap();
        one.change(7, &change("b")).unwrap();
        one.change(7, &change("c")).unwrap();
        assert_eq!(found(one), Some((2, vec!["b".into(), "c".into()])));
        // Killed while it puts a record there.
        let mut one = journal();
        one.record(&record(1, &[]), 0).unwrap();
        one.change(7, &change("a")).unwrap();
        let body = [one.number.to_le_bytes().to_vec(), 300_u32.to_le_bytes().to_vec()].concat();
        let memory = record(2, &fds).memory().unwrap();
        one.put(b'D', &body, &[memory.as_fd()]).unwrap();
        one.number += 1;
        assert_eq!(found_with(&mut one), Some((1, vec!["a".into()])));
        // It goes on from there.
        one.change(7, &change("b")).unwrap();
        assert_eq!(found(one), Some((1, vec!["a".into(), "b".into()])));
        // Killed while it takes one out: some of its descriptors are left.
        let mut one = journal();
        record(1, &fds).send(&one.write, &mut one.number).unwrap();
        one.change(7, &change("a")).unwrap();
        record(2, &fds).send(&one.write, &mut one.number).unwrap();
        keeper_link::drop_one(&one.read);
        assert_eq!(found(one), Some((2, vec![])));
    }

    /// The same, and it stays.
    fn found_with(journal: &mut Journal) -> Option<(u32, Vec<String>)> {
        let copy = self::journal();
        let mut packets = Vec::new();
        while let Ok(Some(packet)) = keeper_link::receive(&journal.read, true) {
            packets.push(packet);
        }
        for packet in &packets {
            let fds: Vec<_> = packet.fds.iter().map(AsFd::as_fd).collect();
            copy.put(packet.letter, &packet.body, &fds).unwrap();
            journal.put(packet.letter, &packet.body, &fds).unwrap();
        }
        found(copy)
    }

    #[test]
    fn what_is_of_no_use_is_taken_out() {
        let (mut pipe_read, pipe_write) = pipe().unwrap();
        let fds = [OwnedFd::from(pipe_write)];
        let mut one = journal();
        one.record(&record(1, &fds), 0).unwrap();
        drop(fds);
        assert!(one.deadline().is_none());
        one.change(7, &change("a")).unwrap();
        assert!(one.deadline().is_some(), "a record is due");
        one.record(&record(2, &[]), 0).unwrap();
        assert!(one.deadline().is_none());
        assert_eq!(io::Read::read(&mut pipe_read, &mut [0]).unwrap(), 0, "nobody has it any more");
        // A lot of changes want one at once.
        let long = "x".repeat(16_000);
        while !one.needs_record() {
            one.change(7, &change(&long)).unwrap();
        }
        one.record(&record(3, &[]), 0).unwrap();
        assert_eq!(found(one), Some((3, vec![])));
    }
}
