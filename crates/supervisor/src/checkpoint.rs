//! Checkpoint of a server process: items that the supervisor stores for the next server process,
//! each with a key, a body and descriptors; and their packet format.
//!
//! A server process changes items in transactions, which are applied atomically with their last
//! packet. A packet consists of pieces, and its descriptors belong to the pieces in order. A body
//! that is too long for a packet is stored in a memfd, which is the first descriptor of its item.
//! The supervisor reads keys and lengths, but never a body.

use crate::protocol::{MAX_FDS, MAX_PACKET};
use rustix::fs::{MemfdFlags, memfd_create};
use shadowbell_process::deferred_close;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Key of the item that marks a complete checkpoint, sent last. Without it, the other items are
/// unusable.
pub const COMPLETE: &str = "served";

/// Prefix of the keys of disks.
pub const DISK: &str = "disk/";

/// Length in bytes of the longest body that is sent inside a packet.
const MAX_BODY: usize = MAX_PACKET - 1024;
/// Length in bytes of the longest key.
const MAX_KEY: usize = 256;

/// Maximum memory for the items of a checkpoint, in bytes.
const MAX_BYTES: usize = 64 << 20;
/// Estimated memory of an item without its body, in bytes.
const ITEM: usize = 512;
/// Estimated memory of a descriptor, in bytes.
const DESCRIPTOR: usize = 64;

/// Flag: the packet begins a transaction; an unfinished one is discarded.
const FIRST: u8 = 1;
/// Flag: the packet ends a transaction.
const LAST: u8 = 2;

/// Kind of piece: item with its body in the piece.
const PUT: u8 = b'p';
/// Kind of piece: item with its body in the first descriptor.
const PUT_MEMORY: u8 = b'm';
/// Kind of piece: further descriptors of the previous item, if they do not fit into one packet.
const MORE: u8 = b'a';
/// Kind of piece: key of an item to remove.
const DELETE: u8 = b'd';

/// Change of an item.
pub enum Change<'a> {
    /// Adds an item, or replaces the one with this key.
    Put {
        /// Key of the item.
        key: &'a str,
        /// Body of the item.
        body: &'a [u8],
        /// Descriptors of the item.
        fds: &'a [BorrowedFd<'a>],
    },
    /// Removes the item with this key, if there is one.
    Delete {
        /// Key of the item.
        key: &'a str,
    },
}

/// Stored item.
#[derive(Debug)]
pub struct Item {
    /// Body of the item.
    pub body: Body,
    /// Descriptors of the item.
    pub fds: Vec<OwnedFd>,
}

/// Body of an item.
#[derive(Debug)]
pub enum Body {
    /// Body in memory of this process.
    Here(Vec<u8>),
    /// Body in a memfd.
    There(OwnedFd),
}

impl Default for Body {
    fn default() -> Self {
        Self::Here(Vec::new())
    }
}

impl Item {
    /// Returns the body and duplicates of the descriptors.
    ///
    /// # Errors
    /// The descriptor limit is reached, or the memfd cannot be read.
    pub fn copy(&self) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let body = match &self.body {
            Body::Here(body) => body.clone(),
            Body::There(memory) => content_of(memory.try_clone()?)?,
        };
        let fds = self.fds.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?;
        Ok((body, fds))
    }

    /// Returns the body and the descriptors.
    ///
    /// # Errors
    /// The memfd cannot be read.
    pub fn read(mut self) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
        let body = match std::mem::take(&mut self.body) {
            Body::Here(body) => body,
            Body::There(memory) => content_of(memory)?,
        };
        Ok((body, std::mem::take(&mut self.fds)))
    }
}

/// Closes the descriptors on another thread, because closing a file that a client sent may block.
impl Drop for Item {
    fn drop(&mut self) {
        deferred_close::close(self.fds.drain(..));
        if let Body::There(memory) = std::mem::take(&mut self.body) {
            deferred_close::close([memory]);
        }
    }
}

/// Packet of a transaction with its descriptors.
pub struct Packet<'a> {
    /// Bytes of the packet.
    pub bytes: Vec<u8>,
    /// Descriptors of the packet.
    pub fds: Vec<BorrowedFd<'a>>,
}

/// Encodes a transaction as packets. `memory` receives the memfds of long bodies.
///
/// # Errors
/// A memfd cannot be created, or a key is too long.
pub fn packets<'a>(
    changes: &'a [Change<'a>],
    memory: &'a mut Vec<Option<OwnedFd>>,
) -> io::Result<Vec<Packet<'a>>> {
    for change in changes {
        memory.push(match change {
            Change::Put { body, .. } if body.len() > MAX_BODY => Some(memory_of(body)?),
            _ => None,
        });
    }
    let mut writer = Writer::default();
    for (change, memory) in changes.iter().zip(&*memory) {
        match (change, memory) {
            (Change::Put { key, body, fds }, None) => {
                writer.put(PUT, key, body, fds.iter().copied())?;
            }
            (Change::Put { key, fds, .. }, Some(memory)) => {
                let fds = [memory.as_fd()].into_iter().chain(fds.iter().copied());
                writer.put(PUT_MEMORY, key, &[], fds)?;
            }
            (Change::Delete { key }, _) => writer.put(DELETE, key, &[], std::iter::empty())?,
        }
    }
    Ok(writer.finish())
}

/// Returns the content of a memfd.
///
/// # Errors
/// A system call fails.
pub(crate) fn content_of(memory: OwnedFd) -> io::Result<Vec<u8>> {
    let file = File::from(memory);
    let mut content = vec![0; usize::try_from(file.metadata()?.len()).unwrap_or(0)];
    file.read_exact_at(&mut content, 0)?;
    Ok(content)
}

/// Returns a memfd with these bytes.
///
/// # Errors
/// A system call fails.
pub fn memory_of(body: &[u8]) -> io::Result<OwnedFd> {
    let memory = memfd_create("shadowbell-item", MemfdFlags::CLOEXEC)?;
    let mut file = File::from(memory);
    file.write_all(body)?;
    Ok(file.into())
}

/// Writer of packets.
#[derive(Default)]
struct Writer<'a>(Vec<Packet<'a>>);

impl<'a> Writer<'a> {
    fn put(
        &mut self,
        kind: u8,
        key: &str,
        body: &[u8],
        fds: impl Iterator<Item = BorrowedFd<'a>>,
    ) -> io::Result<()> {
        if key.len() > MAX_KEY || body.len() > MAX_BODY {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut fds = fds.peekable();
        let mut piece = Piece { kind, key, body, fds: 0 };
        loop {
            let need = PIECE + piece.key.len() + piece.body.len();
            let packet = self.packet(need, fds.peek().is_some());
            let room = MAX_FDS - packet.fds.len();
            let before = packet.fds.len();
            packet.fds.extend(fds.by_ref().take(room));
            piece.fds = packet.fds.len() - before;
            piece.encode(&mut packet.bytes);
            if fds.peek().is_none() {
                return Ok(());
            }
            piece = Piece { kind: MORE, key: "", body: &[], fds: 0 };
        }
    }

    /// Returns the last packet, or a new one if the last packet is too full: it needs room for
    /// `bytes` more bytes and, if `fds` is true, for one more descriptor.
    fn packet(&mut self, bytes: usize, fds: bool) -> &mut Packet<'a> {
        let has_room = self.0.last().is_some_and(|last| {
            last.bytes.len() + bytes < MAX_PACKET && (!fds || last.fds.len() < MAX_FDS)
        });
        if !has_room {
            let flags = if self.0.is_empty() { FIRST } else { 0 };
            self.0.push(Packet { bytes: vec![flags], fds: Vec::new() });
        }
        let last = self.0.len() - 1;
        &mut self.0[last]
    }

    fn finish(mut self) -> Vec<Packet<'a>> {
        let last = self.packet(0, false);
        last.bytes[0] |= LAST;
        self.0
    }
}

/// Bytes of a piece's header: kind, number of descriptors, lengths of key and body.
const PIECE: usize = 1 + 2 + 2 + 4;

/// Error of a received packet.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unreadable {
    /// Malformed packet.
    #[error("malformed packet")]
    Form,
    /// Missing descriptors: the limit of open files (RLIMIT_NOFILE) was reached.
    #[error("descriptors are missing: raise this process's limit of open files (ulimit -n)")]
    Descriptors,
    /// The items need too much memory.
    #[error("it needs more than {} MiB of memory", MAX_BYTES >> 20)]
    Memory,
}

/// Checkpoint, and the changes of an unfinished transaction.
#[derive(Clone, Debug, Default)]
pub struct Checkpoint {
    /// Items by their keys.
    pub all: BTreeMap<String, Arc<Item>>,
    /// Changes of the unfinished transaction; `None` removes an item.
    pub staged: Vec<(String, Option<Arc<Item>>)>,
    /// True if the last packet did not end its transaction.
    pub is_open: bool,
    /// Estimated memory of `all` and `staged`, in bytes. The value is too high: it still includes
    /// items that were replaced or removed since the memory was last counted.
    pub bytes: usize,
}

impl Checkpoint {
    /// Adds a packet of a transaction. The last packet applies the transaction. Returns true for
    /// the last packet.
    ///
    /// # Errors
    /// [`Unreadable`]: the checkpoint is no longer complete.
    pub fn take(&mut self, bytes: &[u8], mut fds: Vec<OwnedFd>) -> Result<bool, Unreadable> {
        let outcome = self.take_pieces(bytes, &mut fds);
        deferred_close::close(fds);
        outcome
    }

    fn take_pieces(&mut self, bytes: &[u8], fds: &mut Vec<OwnedFd>) -> Result<bool, Unreadable> {
        let (flags, mut rest) = bytes.split_first().ok_or(Unreadable::Form)?;
        if flags & FIRST != 0 {
            self.staged.clear();
        } else if !self.is_open {
            // The first packet of the transaction is missing.
            return Err(Unreadable::Form);
        }
        self.is_open = flags & LAST == 0;
        self.bytes += bytes.len() + fds.len() * DESCRIPTOR;
        while !rest.is_empty() {
            self.bytes += ITEM;
            let (piece, after) = Piece::first_of(rest).ok_or(Unreadable::Form)?;
            rest = after;
            if fds.len() < piece.fds {
                return Err(Unreadable::Descriptors);
            }
            self.stage(&piece, fds)?;
        }
        if !fds.is_empty() {
            return Err(Unreadable::Form);
        }
        if self.bytes > 2 * MAX_BYTES {
            // `bytes` still includes replaced and removed items, so the memory is counted again.
            // Counting takes time, so it is done at most once per `MAX_BYTES` received.
            self.bytes = self.memory();
            if self.bytes > MAX_BYTES {
                return Err(Unreadable::Memory);
            }
        }
        let is_last = flags & LAST != 0;
        if is_last {
            for (key, item) in self.staged.drain(..) {
                match item {
                    Some(item) => drop(self.all.insert(key, item)),
                    None => drop(self.all.remove(&key)),
                }
            }
        }
        Ok(is_last)
    }

    /// Counts the estimated memory of the items and of the unfinished transaction, in bytes.
    pub(crate) fn memory(&self) -> usize {
        let staged = self.staged.iter().filter_map(|(_, item)| item.as_ref());
        let size = |item: &Arc<Item>| {
            let body = match &item.body {
                Body::Here(body) => body.len(),
                Body::There(_) => DESCRIPTOR,
            };
            ITEM + body + item.fds.len() * DESCRIPTOR
        };
        self.staged.len() * ITEM + staged.chain(self.all.values()).map(size).sum::<usize>()
    }

    fn stage(&mut self, piece: &Piece<'_>, fds: &mut Vec<OwnedFd>) -> Result<(), Unreadable> {
        let key = || piece.key.to_owned();
        match piece.kind {
            PUT => {
                let fds = fds.drain(..piece.fds).collect();
                let item = Item { body: Body::Here(piece.body.to_vec()), fds };
                self.staged.push((key(), Some(Arc::new(item))));
            }
            PUT_MEMORY => {
                let mut fds = fds.drain(..piece.fds);
                let memory = fds.next().ok_or(Unreadable::Form)?;
                let item = Item { body: Body::There(memory), fds: fds.collect() };
                self.staged.push((key(), Some(Arc::new(item))));
            }
            MORE => {
                let item = self.staged.last_mut().and_then(|(_, item)| item.as_mut());
                let item = item.and_then(Arc::get_mut).ok_or(Unreadable::Form)?;
                item.fds.extend(fds.drain(..piece.fds));
            }
            DELETE => self.staged.push((key(), None)),
            _ => return Err(Unreadable::Form),
        }
        Ok(())
    }

    /// Returns whether the packet begins a transaction, and whether it ends one. If both are true,
    /// the packet is a complete transaction, and applying it twice has the same effect as once.
    pub fn begins_and_ends(bytes: &[u8]) -> (bool, bool) {
        let flags = bytes.first().copied().unwrap_or_default();
        (flags & FIRST != 0, flags & LAST != 0)
    }

    /// Descriptors of the disks' items.
    pub fn disk_fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let disks = self.all.range(DISK.to_owned()..).take_while(|(key, _)| key.starts_with(DISK));
        disks.flat_map(|(_, item)| item.fds.iter().map(AsFd::as_fd))
    }

    /// True if there is an item with this key.
    pub fn contains(&self, key: &str) -> bool {
        self.all.contains_key(key)
    }

    /// Keys with the prefix `begin`.
    pub fn keys(&self, begin: &str) -> Vec<String> {
        let keys = self.all.range(begin.to_owned()..).map(|(key, _)| key);
        keys.take_while(|key| key.starts_with(begin)).cloned().collect()
    }

    /// Removes and returns the item with this key.
    pub fn remove(&mut self, key: &str) -> Option<Item> {
        Arc::into_inner(self.all.remove(key)?)
    }

    /// Returns a transaction that sends all items to another process, as parts of one packet each.
    pub fn parts(&self) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        for (key, item) in &self.all {
            let count = item.fds.len() + usize::from(matches!(item.body, Body::There(_)));
            let mut at = 0;
            loop {
                let end = (at + MAX_FDS).min(count);
                let begins = at == 0;
                parts.push(Part {
                    key: if begins { key.clone() } else { String::new() },
                    item: Some(Arc::clone(item)),
                    fds: at..end,
                    flags: if parts.is_empty() { FIRST } else { 0 },
                });
                at = end;
                if at == count {
                    break;
                }
            }
        }
        let flags = if parts.is_empty() { FIRST | LAST } else { LAST };
        parts.push(Part { key: String::new(), item: None, fds: 0..0, flags });
        parts
    }
}

/// Content of one packet of `Checkpoint::parts`: an item with its first descriptors, more
/// descriptors of the previous item, or nothing except the end of the transaction.
pub struct Part {
    key: String,
    item: Option<Arc<Item>>,
    fds: Range<usize>,
    flags: u8,
}

impl Part {
    /// Encodes the part as a packet.
    pub fn packet(&self) -> Packet<'_> {
        let mut bytes = vec![self.flags];
        let Some(item) = &self.item else { return Packet { bytes, fds: Vec::new() } };
        let (kind, body): (_, &[u8]) = match &item.body {
            _ if self.fds.start > 0 => (MORE, &[]),
            Body::Here(body) => (PUT, body),
            Body::There(_) => (PUT_MEMORY, &[]),
        };
        // The memfd of a long body precedes the other descriptors.
        let memory = match &item.body {
            Body::There(memory) => Some(memory),
            Body::Here(_) => None,
        };
        let all = memory.into_iter().chain(&item.fds).map(AsFd::as_fd);
        let fds: Vec<_> = all.skip(self.fds.start).take(self.fds.len()).collect();
        Piece { kind, key: &self.key, body, fds: fds.len() }.encode(&mut bytes);
        Packet { bytes, fds }
    }
}

struct Piece<'a> {
    kind: u8,
    key: &'a str,
    body: &'a [u8],
    fds: usize,
}

impl<'a> Piece<'a> {
    fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.push(self.kind);
        bytes.extend((self.fds as u16).to_le_bytes());
        bytes.extend((self.key.len() as u16).to_le_bytes());
        bytes.extend((self.body.len() as u32).to_le_bytes());
        bytes.extend(self.key.as_bytes());
        bytes.extend(self.body);
    }

    /// Decodes the first piece of `bytes`. Returns it and the rest.
    fn first_of(bytes: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let (head, rest) = bytes.split_first_chunk::<PIECE>()?;
        let [kind, f0, f1, k0, k1, b0, b1, b2, b3] = *head;
        let fds = usize::from(u16::from_le_bytes([f0, f1]));
        let (key, rest) = rest.split_at_checked(usize::from(u16::from_le_bytes([k0, k1])))?;
        let body_len = u32::from_le_bytes([b0, b1, b2, b3]) as usize;
        let (body, rest) = rest.split_at_checked(body_len)?;
        Some((Self { kind, key: std::str::from_utf8(key).ok()?, body, fds }, rest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    fn pipes(count: usize) -> Vec<OwnedFd> {
        let pipe = || {
            let (read, mut write) = io::pipe().unwrap();
            write.write_all(b"x").unwrap();
            OwnedFd::from(read)
        };
        (0..count).map(|_| pipe()).collect()
    }

    /// Encodes `changes` as packets and applies the packets to `items`. Returns the number of
    /// packets.
    fn change(items: &mut Checkpoint, changes: &[Change<'_>]) -> usize {
        let mut memory = Vec::new();
        let packets = packets(changes, &mut memory).unwrap();
        let count = packets.len();
        for (nth, packet) in packets.into_iter().enumerate() {
            assert!(packet.bytes.len() < MAX_PACKET && packet.fds.len() <= MAX_FDS);
            let fds = packet.fds.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
            assert_eq!(items.take(&packet.bytes, fds), Ok(nth + 1 == count));
        }
        count
    }

    fn read(items: &mut Checkpoint, key: &str) -> (Vec<u8>, Vec<OwnedFd>) {
        items.remove(key).unwrap().read().unwrap()
    }

    #[test]
    fn items_of_every_size_arrive_and_go_on() {
        shadowbell_process::descriptor_limit::raise();
        let mut items = Checkpoint::default();
        let (many, few) = (pipes(3 * MAX_FDS + 1), pipes(2));
        let many: Vec<_> = many.iter().map(AsFd::as_fd).collect();
        let few: Vec<_> = few.iter().map(AsFd::as_fd).collect();
        let long = vec![7; 100_000];
        let sent = change(
            &mut items,
            &[
                Change::Put { key: "a", body: b"short", fds: &few },
                Change::Put { key: "b", body: &long, fds: &many },
                Change::Put { key: "c", body: b"", fds: &[] },
                Change::Put { key: "d", body: &long[..MAX_BODY], fds: &[] },
                Change::Put { key: "e", body: b"gone", fds: &few },
                Change::Delete { key: "e" },
            ],
        );
        assert_eq!(sent, 4, "all those descriptors need as many packets");
        // Simulates two transfers: all items go to a second process, which changes one item, and
        // then to a third process.
        for _ in 0..2 {
            let mut next = Checkpoint::default();
            let parts = items.parts();
            for (nth, part) in parts.iter().enumerate() {
                let packet = part.packet();
                let fds = packet.fds.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect();
                assert_eq!(next.take(&packet.bytes, fds), Ok(nth + 1 == parts.len()));
            }
            drop(parts);
            items = next;
            change(&mut items, &[Change::Put { key: "c", body: b"new", fds: &few[..1] }]);
        }
        assert!(!items.contains("e"));
        let (body, fds) = read(&mut items, "b");
        assert_eq!((body.len(), fds.len()), (long.len(), many.len()));
        for fd in fds {
            assert_eq!(File::from(fd).read(&mut [0; 1]).unwrap(), 1, "each is another one");
        }
        assert_eq!(read(&mut items, "a").0, b"short");
        let (body, fds) = read(&mut items, "c");
        assert_eq!((&body[..], fds.len()), (&b"new"[..], 1));
        assert_eq!(read(&mut items, "d").0.len(), MAX_BODY);
        assert!(items.remove("d").is_none());
    }

    #[test]
    fn transactions_are_atomic() {
        let mut items = Checkpoint::default();
        let fds = pipes(MAX_FDS + 1);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        change(&mut items, &[Change::Put { key: "a", body: b"old", fds: &[] }]);
        let changes = [
            Change::Put { key: "a", body: b"new", fds: &[] },
            Change::Put { key: "b", body: b"new", fds: &fds },
        ];
        let mut memory = Vec::new();
        let packets = packets(&changes, &mut memory).unwrap();
        assert_eq!(packets.len(), 2);
        let own = |packet: &Packet<'_>| {
            packet.fds.iter().map(|fd| fd.try_clone_to_owned().unwrap()).collect()
        };
        assert_eq!(items.take(&packets[0].bytes, own(&packets[0])), Ok(false));
        assert!(!items.contains("b"));
        // A new transaction begins before the last packet of the previous transaction. The changes
        // of the previous transaction are discarded.
        change(&mut items, &[Change::Put { key: "c", body: b"", fds: &[] }]);
        assert!(!items.contains("b") && items.contains("c"));
        assert_eq!(read(&mut items, "a").0, b"old");
        let late = &packets[1];
        assert_eq!(items.take(&late.bytes, own(late)), Err(Unreadable::Form));
    }

    #[test]
    fn replaced_items_close_their_descriptors() {
        let mut items = Checkpoint::default();
        let (mut read, write) = io::pipe().unwrap();
        change(&mut items, &[Change::Put { key: "a", body: b"", fds: &[write.as_fd()] }]);
        drop(write);
        change(&mut items, &[Change::Put { key: "a", body: b"", fds: &[] }]);
        assert_eq!(read.read(&mut [0; 1]).unwrap(), 0, "the other end is open in no process");
    }

    #[test]
    fn invalid_transactions_are_refused() {
        let mut items = Checkpoint::default();
        let fds = || pipes(1);
        for (bytes, fds, why) in [
            (&b""[..], vec![], Unreadable::Form),
            (b"\x03p\x01\0\0\0\0\0\0\0", vec![], Unreadable::Descriptors),
            (b"\x03p\0\0\0\0\0\0\0\0", fds(), Unreadable::Form),
            (b"\x03p\0\0\0\0\0\0\0", vec![], Unreadable::Form),
            (b"\x03p\0\0\xff\xff\0\0\0\0", vec![], Unreadable::Form),
            (b"\x03p\0\0\0\0\xff\xff\xff\xff", vec![], Unreadable::Form),
            (b"\x03a\x01\0\0\0\0\0\0\0", fds(), Unreadable::Form),
            (b"\x03m\0\0\0\0\0\0\0\0", vec![], Unreadable::Form),
            (b"\x03?\0\0\0\0\0\0\0\0", vec![], Unreadable::Form),
            (b"\x03d\0\0\x01\0\0\0\0\0\xff", vec![], Unreadable::Form),
        ] {
            assert_eq!(items.take(bytes, fds), Err(why), "{bytes:?}");
        }
    }
}
