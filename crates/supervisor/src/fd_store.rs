//! State of the supervisor in systemd's fd store. If the supervisor is killed, the next supervisor
//! continues from this state.
//!
//! A service manager stores descriptors under names and passes them to the next process of the
//! service. Storing each change there would cost a message per change, so the fd store holds only
//! the two ends of one socket pair. The supervisor's state is queued in this socket as packets
//! with their descriptors. The packets outlive the process that sent them: the kernel keeps them
//! until they are received. Consequences: only two descriptors count against
//! `FileDescriptorStoreMax=`, a change costs one or two packets, and each packet is stored
//! entirely or not at all.
//!
//! # Contents
//!
//! A [snapshot](super::snapshot) of the supervisor, and the changes of the server processes'
//! checkpoints since then. From time to time another snapshot is appended, and the packets before
//! it are removed. A snapshot is valid once all its packets are queued. A reader uses the last
//! valid snapshot and the changes after it.
//!
//! * A message of a server process is peeked at, queued in the store, and only then removed from
//!   the server process's socket, which is part of the snapshot. So each message is in the store or
//!   in that socket. If the supervisor is killed between the two steps, the message is in both
//!   places and is applied twice. The result is the same as once.
//! * A server process is in the store before the supervisor sends it anything.
//! * Descriptors that a server process has released stay in the store for a moment ([`STALE`]).
//!   Until the next snapshot, a client whose connection the server process has closed may not
//!   notice the close, because the store still has a descriptor of the connection.
//!
//! # Recovery
//!
//! The next supervisor moves the packets to a new socket, one by one: it queues each packet in the
//! new socket before it removes the packet from the old one. If that supervisor dies meanwhile,
//! both sockets remain, and the next supervisor reads the packets of the newer one first. When all
//! packets are moved, the supervisor kills the server processes in the snapshot (by pidfd, since it
//! is not their parent), reads their last messages, and continues as after the death of a server
//! process.

use super::grants::GRANTS;
use super::snapshot::{PartialSnapshot, Snapshot};
use crate::protocol::{self, Packet, send_bytes};
use rustix::net::sockopt::set_socket_send_buffer_size;
use serde::{Deserialize, Serialize};
use shadowbell_memory::process::take_inherited;
use shadowbell_process::notify;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

/// Packet type of a checkpoint change: the process id, and the packet that the process sent.
const CHANGE: u8 = b'I';
/// Prefix of the descriptors' names. A generation number and the end (`w` or `r`) follow.
const NAME: &str = "shadowbell-supervisor-";
/// First descriptor number that a service manager passes (`SD_LISTEN_FDS_START`).
const FIRST: i32 = 3;
/// Requested size of the socket's send buffer, in bytes. The kernel limits it
/// (`net.core.wmem_max`).
const ROOM: usize = 1 << 20;
/// Bytes of changes after a snapshot that trigger the next snapshot. The value is a third of the
/// smallest default buffer (`net.core.wmem_default`), so that the changes fit.
const MAX_BEHIND: usize = 64 << 10;
/// Upper estimate of a packet's overhead in the socket buffer, in bytes.
const PACKET: usize = 1 << 10;
/// Minimum time from the release of descriptors by a server process until a snapshot removes them
/// from the store. If snapshots take long to write, the time is longer.
const STALE: Duration = Duration::from_millis(10);

/// Socket pair in the fd store, with this supervisor's state.
pub(super) struct FdStore {
    pub(super) write: OwnedFd,
    pub(super) read: OwnedFd,
    pub(super) counters: SavedFdStore,
    /// True if a snapshot must be written before the next change.
    pub(super) is_wanted: bool,
    /// Value of [`Grants::changes`](super::grants::Grants) at the last snapshot, by which
    /// later changes of the grants are detected.
    opened: u64,
    /// Time of the next snapshot, if the store contains descriptors that a server process has
    /// released.
    pub(super) due: Option<Instant>,
    /// Duration of the last snapshot's write.
    took: Duration,
}

/// State of a dead supervisor in the fd store.
pub(super) struct Found {
    pub(super) record: PartialSnapshot,
    /// Changes since the snapshot, each with the process id of its server process.
    pub(super) changes: Vec<(u32, Packet)>,
}

/// Returns true if the service manager stores descriptors of this process.
pub(super) fn is_wanted() -> bool {
    // systemd sets FDSTORE to the limit as of version 254. With earlier versions, the unit file has
    // to set it.
    let number = |name| std::env::var(name).ok()?.parse::<u32>().ok();
    std::env::var_os("NOTIFY_SOCKET").is_some() && number("FDSTORE").is_some_and(|most| most >= 4)
}

fn name(generation: u64, end: &str) -> String {
    format!("{NAME}{generation}-{end}")
}

/// Returns the socket pairs that the service manager passed to this process, the newest first. Also
/// returns all generation numbers found, including those of pairs with a missing end.
fn passed_pairs() -> (Vec<(u64, OwnedFd, OwnedFd)>, Vec<u64>) {
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
        // Foreign descriptors are taken too, so that no server process inherits them.
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

impl FdStore {
    /// Creates a store and moves the content of the stores that the service manager passed into
    /// it.
    ///
    /// # Errors
    /// A system call fails. The service manager then stores nothing.
    pub(super) fn begin() -> io::Result<(Self, Option<Found>)> {
        let (pairs, generations) = passed_pairs();
        let newest = generations.first().copied().unwrap_or_default();
        let moved = Self::new(newest.saturating_add(1)).and_then(|mut fd_store| {
            match fd_store.import(&pairs) {
                Ok(found) => Ok((fd_store, found)),
                Err(error) => {
                    fd_store.end();
                    Err(error)
                }
            }
        });
        // The old stores are removed even after an error, because a later supervisor must not
        // continue from outdated content.
        generations.into_iter().for_each(forget);
        moved
    }

    /// Creates a socket pair and passes both ends to the service manager.
    fn new(generation: u64) -> io::Result<Self> {
        let (write, read) = protocol::pair()?;
        // An error leaves the default size.
        let _ = set_socket_send_buffer_size(&write, ROOM);
        for (end, fd) in [("w", &write), ("r", &read)] {
            let state = format!("FDSTORE=1\nFDNAME={}\nFDPOLL=0", name(generation, end));
            notify::store_fd(&state, fd.as_fd())?;
        }
        let counters = SavedFdStore { generation, number: 1, unsaved: 0 };
        Ok(Self::from_saved(write, read, counters))
    }

    /// Moves the packets of older stores to this one and returns their content.
    fn import(&mut self, pairs: &[(u64, OwnedFd, OwnedFd)]) -> io::Result<Option<Found>> {
        let mut reader = Reader::default();
        for (_, _write, read) in pairs {
            while let Ok(Some(packet)) = protocol::peek(read) {
                if reader.is_new(&packet) {
                    let fds: Vec<_> = packet.fds.iter().map(AsFd::as_fd).collect();
                    send_bytes(&self.write, packet.code, &packet.body, &fds, true)?;
                    reader.take(packet);
                }
                protocol::drop_one(read);
            }
        }
        self.counters.number = reader.number.saturating_add(1);
        let Reader { record, changes, .. } = reader;
        Ok(record.map(|record| Found { record, changes }))
    }

    /// Restores the store that this process had before exec.
    pub(super) fn from_saved(write: OwnedFd, read: OwnedFd, counters: SavedFdStore) -> Self {
        let (is_wanted, opened, due, took) = (true, 0, None, Duration::ZERO);
        Self { write, read, counters, is_wanted, opened, due, took }
    }

    /// Schedules a snapshot, because a server process has released descriptors that the store still
    /// contains.
    pub(super) fn is_stale(&mut self) {
        let wait = STALE.max(20 * self.took);
        self.due.get_or_insert_with(|| Instant::now() + wait);
    }

    /// Stores a checkpoint change of a server process.
    ///
    /// # Errors
    /// The socket buffer is full.
    pub(super) fn change(&mut self, worker: u32, packet: &Packet) -> io::Result<()> {
        let mut body = self.counters.number.to_le_bytes().to_vec();
        body.extend(worker.to_le_bytes());
        body.extend(&packet.body);
        let fds: Vec<_> = packet.fds.iter().map(AsFd::as_fd).collect();
        send_bytes(&self.write, CHANGE, &body, &fds, true)?;
        self.counters.number = self.counters.number.saturating_add(1);
        self.counters.unsaved += PACKET + body.len();
        self.is_stale();
        Ok(())
    }

    /// Returns true if a snapshot must be written now.
    pub(super) fn needs_snapshot(&self) -> bool {
        self.is_wanted || self.counters.unsaved > MAX_BEHIND || self.opened != GRANTS.lock().changes
    }

    /// Appends a snapshot and removes the packets before it. `opened`: value of
    /// [`Grants::changes`](super::grants::Grants) before the snapshot was made.
    ///
    /// # Errors
    /// The socket buffer is full.
    pub(super) fn append_snapshot(&mut self, record: &Snapshot<'_>, opened: u64) -> io::Result<()> {
        let began = Instant::now();
        let first = self.counters.number;
        record.send(&self.write, &mut self.counters.number)?;
        while protocol::peek_number(&self.read).is_some_and(|number| number < first) {
            protocol::drop_one(&self.read);
        }
        (self.opened, self.is_wanted, self.due) = (opened, false, None);
        self.counters.unsaved = 0;
        self.took = began.elapsed();
        Ok(())
    }

    /// Removes this store from the service manager, when the service ends.
    pub(super) fn end(self) {
        forget(self.counters.generation);
        // The service manager may not act on the message, so the socket is emptied as well.
        while protocol::peek_number(&self.read).is_some() {
            protocol::drop_one(&self.read);
        }
    }
}

fn forget(generation: u64) {
    for end in ["w", "r"] {
        notify::send(&format!("FDSTOREREMOVE=1\nFDNAME={}", name(generation, end)));
    }
}

/// Counters of a store, also serialized for exec.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct SavedFdStore {
    /// Number in the descriptors' names, which increases with each store.
    generation: u64,
    /// Sequence number of the next packet.
    number: u64,
    /// Bytes of changes since the last snapshot.
    unsaved: usize,
}

/// Parser of a store's packets.
#[derive(Default)]
struct Reader {
    /// Sequence number of the last packet.
    number: u64,
    arriving: Option<PartialSnapshot>,
    record: Option<PartialSnapshot>,
    changes: Vec<(u32, Packet)>,
}

impl Reader {
    /// Returns true if no newer socket contained this packet, which was read before.
    fn is_new(&self, packet: &Packet) -> bool {
        number_of(&packet.body).is_some_and(|number| number > self.number)
    }

    fn take(&mut self, mut packet: Packet) {
        let Some(number) = number_of(&packet.body) else { return };
        self.number = number;
        if PartialSnapshot::is_of(&packet) {
            self.arriving = PartialSnapshot::take(self.arriving.take(), packet);
            if let Some(record) = self.arriving.take_if(|record| record.is_complete()) {
                self.record = Some(record);
                self.changes.clear();
            }
            return;
        }
        // An incomplete snapshot is discarded.
        self.arriving = None;
        if let Some(worker) = packet.body.get(8..12).and_then(<[u8]>::first_chunk) {
            let worker = u32::from_le_bytes(*worker);
            packet.body.drain(..12);
            self.changes.push((worker, packet));
        }
    }
}

fn number_of(body: &[u8]) -> Option<u64> {
    body.first_chunk().map(|number| u64::from_le_bytes(*number))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::memory_of;
    use shadowbell_state::Parcel;
    use std::io::pipe;

    fn fd_store() -> FdStore {
        let (write, read) = protocol::pair().unwrap();
        FdStore::from_saved(write, read, SavedFdStore { generation: 1, number: 1, unsaved: 0 })
    }

    /// Creates a snapshot with the number `says`, which identifies it, and the descriptors `fds`.
    fn record(says: u32, fds: &[OwnedFd]) -> Snapshot<'_> {
        let mut parcel = Parcel::new();
        parcel.add("says", true, &says).unwrap();
        Snapshot {
            bytes: parcel.encode(fds.len()).unwrap(),
            fds: fds.iter().map(AsFd::as_fd).collect(),
        }
    }

    fn change(text: &str) -> Packet {
        Packet { code: b'I', body: text.into(), fds: vec![pipe().unwrap().0.into()] }
    }

    /// Returns the snapshot's number and the changes that a supervisor finds after up to three
    /// others were killed. Each of them had queued one packet in a new socket. The first and the
    /// third had also removed the packet from the old socket, the second had not.
    fn found(fd_store: FdStore) -> Option<(u32, Vec<String>)> {
        let (mut pairs, mut count) = (vec![(1, fd_store.write, fd_store.read)], 0);
        loop {
            let mut next = self::fd_store();
            let moved = pairs.iter().find_map(|(_, _, read)| protocol::peek(read).ok().flatten());
            // A packet is copied to the new socket. If `count` is odd, the supervisor is killed
            // before it removes the packet from the old socket.
            if let Some(packet) = moved.filter(|_| count < 3) {
                let fds: Vec<_> = packet.fds.iter().map(AsFd::as_fd).collect();
                send_bytes(&next.write, packet.code, &packet.body, &fds, true).unwrap();
                if count % 2 == 0 {
                    let holds =
                        |pair: &&(u64, OwnedFd, OwnedFd)| protocol::peek_number(&pair.2).is_some();
                    protocol::drop_one(&pairs.iter().find(holds).unwrap().2);
                }
                count += 1;
                pairs.insert(0, (2, next.write, next.read));
                continue;
            }
            let found = next.import(&pairs).unwrap()?;
            assert!(pairs.iter().all(|(_, _, read)| protocol::peek_number(read).is_none()));
            let says = found.record.read().unwrap().take("says").unwrap().unwrap();
            let texts = found.changes.into_iter().map(|(pid, packet)| {
                assert_eq!((pid, packet.fds.len()), (7, 1));
                packet.text()
            });
            return Some((says, texts.collect()));
        }
    }

    #[test]
    fn the_last_complete_snapshot_and_its_changes_are_restored() {
        shadowbell_process::descriptor_limit::raise();
        let fds: Vec<OwnedFd> = (0..300).map(|_| pipe().unwrap().0.into()).collect();
        assert_eq!(found(fd_store()), None);
        let mut one = fd_store();
        one.append_snapshot(&record(1, &fds), 0).unwrap();
        one.change(7, &change("a")).unwrap();
        one.append_snapshot(&record(2, &fds[..3]), 0).unwrap();
        one.change(7, &change("b")).unwrap();
        one.change(7, &change("c")).unwrap();
        assert_eq!(found(one), Some((2, vec!["b".into(), "c".into()])));
        // The supervisor was killed while it wrote a snapshot.
        let mut one = fd_store();
        one.append_snapshot(&record(1, &[]), 0).unwrap();
        one.change(7, &change("a")).unwrap();
        let body =
            [one.counters.number.to_le_bytes().to_vec(), 300_u32.to_le_bytes().to_vec()].concat();
        let memory = memory_of(&record(2, &fds).bytes).unwrap();
        send_bytes(&one.write, b'D', &body, &[memory.as_fd()], true).unwrap();
        one.counters.number += 1;
        assert_eq!(found_with(&mut one), Some((1, vec!["a".into()])));
        // The store accepts further changes after it was read.
        one.change(7, &change("b")).unwrap();
        assert_eq!(found(one), Some((1, vec!["a".into(), "b".into()])));
        // The supervisor was killed while it removed an old snapshot: some packets with its
        // descriptors remain.
        let mut one = fd_store();
        record(1, &fds).send(&one.write, &mut one.counters.number).unwrap();
        one.change(7, &change("a")).unwrap();
        record(2, &fds).send(&one.write, &mut one.counters.number).unwrap();
        protocol::drop_one(&one.read);
        assert_eq!(found(one), Some((2, vec![])));
    }

    /// Returns the result of [`found`] for a copy of the store, whose content stays unchanged.
    fn found_with(fd_store: &mut FdStore) -> Option<(u32, Vec<String>)> {
        let copy = self::fd_store();
        let mut packets = Vec::new();
        while let Ok(Some(packet)) = protocol::receive(&fd_store.read, true) {
            packets.push(packet);
        }
        for packet in &packets {
            let fds: Vec<_> = packet.fds.iter().map(AsFd::as_fd).collect();
            send_bytes(&copy.write, packet.code, &packet.body, &fds, true).unwrap();
            send_bytes(&fd_store.write, packet.code, &packet.body, &fds, true).unwrap();
        }
        found(copy)
    }

    #[test]
    fn obsolete_records_are_removed() {
        let (mut pipe_read, pipe_write) = pipe().unwrap();
        let fds = [OwnedFd::from(pipe_write)];
        let mut one = fd_store();
        one.append_snapshot(&record(1, &fds), 0).unwrap();
        drop(fds);
        assert!(one.due.is_none());
        one.change(7, &change("a")).unwrap();
        assert!(one.due.is_some(), "a record is due");
        one.append_snapshot(&record(2, &[]), 0).unwrap();
        assert!(one.due.is_none());
        assert_eq!(io::Read::read(&mut pipe_read, &mut [0]).unwrap(), 0, "the last copy is closed");
        // A large amount of changes triggers a snapshot at once.
        let long = "x".repeat(16_000);
        while !one.needs_snapshot() {
            one.change(7, &change(&long)).unwrap();
        }
        one.append_snapshot(&record(3, &[]), 0).unwrap();
        assert_eq!(found(one), Some((3, vec![])));
    }
}
