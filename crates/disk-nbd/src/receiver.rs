//! Parser of the server's replies: assigns results and data to subrequests. Any violation of the
//! protocol ends the connection.

use crate::subrequest::{Subrequest, Subrequests};
use shadowbell_nbd::reply::{BadReply, Chunk, Incoming};
use shadowbell_nbd::wire::{Reader, chunk};

/// Size of the input buffer in bytes. It receives everything except the data of long reads.
const INPUT: usize = 128 << 10;
/// Minimum length in bytes of data that are received directly into the buffer of their subrequest,
/// after their header was received into the input buffer. Shorter data are received into the input
/// buffer and then copied.
const MIN_DIRECT_READ: usize = 16 << 10;
/// Length in bytes of a reply header with the offset of a data chunk.
const HEAD: usize = 20 + 8;
/// Maximum number of bytes of extents that are used of a reply, at eight bytes per extent. The
/// range after them is requested again.
const EXTENTS: usize = 64 << 10;
/// Maximum payload in bytes of a chunk of extents. nbdkit sends at most a million extents, and QEMU
/// 128 K.
const MAX_EXTENTS: u32 = 4 + (8 << 20);
/// Maximum payload of an error chunk: its text has at most 4096 bytes.
const MAX_ERROR: u32 = 4096 + 64;
/// Maximum number of error chunks of one reply. A server may report an error for each part of a
/// request, so several chunks are valid. The limit prevents a reply that never ends.
const MAX_ERRORS: u16 = 256;

/// Violation of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Violation {
    #[error(transparent)]
    Magic(#[from] BadReply),
    #[error("it replies to an unknown request (cookie {0:#x})")]
    Cookie(u64),
    #[error(
        "it sends a chunk of type {kind:#x} with {len} bytes, which does not match its request"
    )]
    Chunk { kind: u16, len: u32 },
    #[error("it sends a reply type that was not negotiated")]
    Form,
    #[error("it sends more than {MAX_ERRORS} errors in one reply")]
    Errors,
    #[error("it sends data that were not requested, or twice")]
    Range,
    #[error("its reply to a read or block status request is incomplete")]
    Gap,
}

/// Position in the stream of replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// At a reply header.
    Head,
    /// At the start of a chunk's payload.
    Payload { slot: u32, chunk: Chunk },
    /// In the data of a read, at byte `at`. `left` bytes have not been received yet.
    Data { slot: u32, at: usize, left: usize, is_last: bool },
    /// In the extents of a block status reply. `left` bytes have not been received yet.
    Extents { slot: u32, left: usize, is_last: bool },
    /// In the text of an error. `left` bytes have not been received yet.
    Text { slot: u32, left: usize, is_last: bool },
}

/// Input buffer and parser state.
pub(crate) struct Receiver {
    input: Box<[u8]>,
    from: usize,
    to: usize,
    state: State,
    /// True if the data of the last reply were long. The next ones are then probably long too, so
    /// only a header is received at first.
    is_long: bool,
    structured: bool,
    /// Context id for block status.
    allocation: Option<u32>,
}

impl Receiver {
    pub(crate) fn new(structured: bool, allocation: Option<u32>) -> Self {
        let (input, state) = (vec![0; INPUT].into(), State::Head);
        Self { input, from: 0, to: 0, state, is_long: false, structured, allocation }
    }

    /// Two destinations for the next bytes from the socket: first the missing data of a subrequest
    /// (may be empty), then the input buffer.
    pub(crate) fn room<'a>(
        &'a mut self,
        parts: &'a mut Subrequests,
    ) -> (&'a mut [u8], &'a mut [u8]) {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        } else if self.from > 0 && self.to == self.input.len() {
            self.input.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        let end = if self.is_long { self.from + HEAD } else { self.input.len() };
        // The buffer may contain the beginning of a header. At least one more byte must fit, so
        // that the receiver makes progress.
        let end = end.max(self.to + 1).min(self.input.len());
        let rest = self.input.get_mut(self.to..end).unwrap_or_default();
        let first = match self.state {
            State::Data { slot, at, left, .. } if self.from == self.to => parts
                .get_mut(slot)
                .and_then(|part| part.data.get_mut(at..at + left))
                .unwrap_or_default(),
            _ => Default::default(),
        };
        (first, rest)
    }

    /// Records that `count` bytes were received into [`room`](Self::room). `first` is the size of
    /// the first destination.
    pub(crate) fn received(&mut self, count: usize, first: usize) {
        if let State::Data { at, left, .. } = &mut self.state {
            let direct = count.min(first);
            *at += direct;
            *left -= direct;
        }
        self.to += count.saturating_sub(first);
    }

    /// Parses all received bytes. Calls `done` for each subrequest that has ended, with its error
    /// number or 0.
    pub(crate) fn advance(
        &mut self,
        parts: &mut Subrequests,
        mut done: impl FnMut(Subrequest, u32),
    ) -> Result<(), Violation> {
        loop {
            let rest = self.input.get(self.from..self.to).unwrap_or_default();
            let next = match self.state {
                State::Head => {
                    let Some((reply, used)) = Incoming::decode(rest)? else { return Ok(()) };
                    self.from += used;
                    self.head(reply, parts)?
                }
                State::Payload { slot, chunk } => {
                    let needs = match chunk.kind {
                        chunk::NONE => 0,
                        chunk::OFFSET_DATA => 8,
                        chunk::OFFSET_HOLE => 12,
                        chunk::BLOCK_STATUS => 4,
                        _ => 6,
                    };
                    let Some(head) = rest.get(..needs) else { return Ok(()) };
                    let next = payload(slot, chunk, head, self.allocation, parts)?;
                    self.from += needs;
                    next
                }
                State::Data { slot, at, left, is_last } if left > 0 => {
                    let count = left.min(rest.len());
                    if count == 0 {
                        return Ok(());
                    }
                    let part = parts.get_mut(slot);
                    let into = part.and_then(|part| part.data.get_mut(at..at + count));
                    if let (Some(into), Some(from)) = (into, rest.get(..count)) {
                        into.copy_from_slice(from);
                    }
                    self.from += count;
                    State::Data { slot, at: at + count, left: left - count, is_last }
                }
                State::Extents { slot, left, is_last } if left > 0 => {
                    let count = left.min(rest.len());
                    if count == 0 {
                        return Ok(());
                    }
                    if let Some(part) = parts.get_mut(slot) {
                        let room = EXTENTS.saturating_sub(part.data.len());
                        part.data
                            .extend_from_slice(rest.get(..count.min(room)).unwrap_or_default());
                    }
                    self.from += count;
                    State::Extents { slot, left: left - count, is_last }
                }
                State::Text { slot, left, is_last } if left > 0 => {
                    let count = left.min(rest.len());
                    if count == 0 {
                        return Ok(());
                    }
                    self.from += count;
                    State::Text { slot, left: left - count, is_last }
                }
                State::Data { slot, is_last, .. }
                | State::Extents { slot, is_last, .. }
                | State::Text { slot, is_last, .. } => {
                    if is_last {
                        end(slot, parts, &mut done)?;
                    }
                    State::Head
                }
            };
            // A reply without data usually arrives together with similar replies, so it ends the
            // mode for long data. The end of a chunked reply does not change the mode.
            match (self.state, next) {
                (State::Head | State::Payload { .. }, State::Data { left, .. }) => {
                    self.is_long = left >= MIN_DIRECT_READ;
                }
                (State::Head, State::Text { .. }) => self.is_long = false,
                _ => {}
            }
            self.state = next;
        }
    }

    fn head(&self, reply: Incoming, parts: &mut Subrequests) -> Result<State, Violation> {
        let (Incoming::Simple { cookie, .. } | Incoming::Chunk(Chunk { cookie, .. })) = reply;
        let slot = parts.find(cookie).ok_or(Violation::Cookie(cookie))?;
        let part = parts.get_mut(slot).ok_or(Violation::Cookie(cookie))?;
        match reply {
            Incoming::Chunk(_) if !self.structured => Err(Violation::Form),
            Incoming::Chunk(chunk) => {
                let len = chunk.len;
                let fits = match chunk.kind {
                    chunk::NONE => len == 0 && chunk.flags & chunk::FLAG_DONE != 0,
                    // The payload is an offset of eight bytes, and at least one byte of data.
                    chunk::OFFSET_DATA => part.is_read() && len > 8 && len - 8 <= part.len,
                    chunk::OFFSET_HOLE => part.is_read() && len == 12,
                    // The payload is the context id, and at least one extent.
                    chunk::BLOCK_STATUS => {
                        part.is_question() && len % 8 == 4 && (12..=MAX_EXTENTS).contains(&len)
                    }
                    kind if kind & chunk::ERROR_BIT != 0 => (6..=MAX_ERROR).contains(&len),
                    _ => false,
                };
                if !fits {
                    return Err(Violation::Chunk { kind: chunk.kind, len });
                }
                Ok(State::Payload { slot, chunk })
            }
            Incoming::Simple { .. } if self.structured && part.is_read() => Err(Violation::Form),
            Incoming::Simple { error: 0, .. } if part.is_question() => Err(Violation::Form),
            Incoming::Simple { error: 0, .. } if part.is_read() => {
                if !part.covered.add(0, part.len) {
                    return Err(Violation::Range);
                }
                let left = part.len as usize;
                Ok(State::Data { slot, at: 0, left, is_last: true })
            }
            Incoming::Simple { error, .. } => {
                part.error = (error != 0).then_some(error);
                Ok(State::Text { slot, left: 0, is_last: true })
            }
        }
    }
}

/// Parses the start of a chunk's payload.
fn payload(
    slot: u32,
    chunk: Chunk,
    head: &[u8],
    allocation: Option<u32>,
    parts: &mut Subrequests,
) -> Result<State, Violation> {
    let wrong = Violation::Chunk { kind: chunk.kind, len: chunk.len };
    let is_last = chunk.flags & chunk::FLAG_DONE != 0;
    let part = parts.get_mut(slot).ok_or(wrong)?;
    let mut reader = Reader(head);
    let mut place = |len: u32| {
        let at = reader.u64()?.checked_sub(part.offset)?;
        let at = u32::try_from(at).ok()?;
        let fits = at.checked_add(len)? <= part.len && part.covered.add(at, len);
        fits.then_some(at as usize)
    };
    match chunk.kind {
        chunk::NONE => Ok(State::Text { slot, left: 0, is_last }),
        chunk::OFFSET_DATA => {
            let len = chunk.len.saturating_sub(8);
            let at = place(len).ok_or(Violation::Range)?;
            Ok(State::Data { slot, at, left: len as usize, is_last })
        }
        chunk::OFFSET_HOLE => {
            let len = head.get(8..).and_then(|rest| Reader(rest).u32()).ok_or(wrong)?;
            // Empty holes are refused, because a server could send them without end and the reply
            // would never be complete.
            let at = place(len).filter(|_| len != 0).ok_or(Violation::Range)?;
            let hole = part.data.get_mut(at..at + len as usize).ok_or(Violation::Range)?;
            hole.fill(0);
            Ok(State::Text { slot, left: 0, is_last })
        }
        chunk::BLOCK_STATUS => {
            // Only one metadata context was requested, so the reply may contain only one chunk of
            // extents.
            let is_it = part.data.is_empty() && reader.u32() == allocation;
            let left = chunk.len.saturating_sub(4) as usize;
            if is_it { Ok(State::Extents { slot, left, is_last }) } else { Err(wrong) }
        }
        _ => {
            let error = reader.u32().filter(|error| *error != 0).ok_or(wrong)?;
            part.error.get_or_insert(error);
            part.errors += 1;
            if part.errors > MAX_ERRORS {
                return Err(Violation::Errors);
            }
            Ok(State::Text { slot, left: chunk.len.saturating_sub(6) as usize, is_last })
        }
    }
}

fn end(
    slot: u32,
    parts: &mut Subrequests,
    done: &mut impl FnMut(Subrequest, u32),
) -> Result<(), Violation> {
    let part = parts.get(slot).ok_or(Violation::Gap)?;
    let error = part.error.unwrap_or(0);
    let is_whole = match part.is_question() {
        true => !part.data.is_empty(),
        false => !part.is_read() || part.covered.is_whole(part.len),
    };
    if error == 0 && !is_whole {
        return Err(Violation::Gap);
    }
    if let Some(part) = parts.remove(slot) {
        done(part, error);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use shadowbell_nbd::reply::Head;
    use shadowbell_nbd::wire::{NbdError, command};

    fn parts(command: u16, len: u32) -> (Subrequests, u64) {
        let mut parts = Subrequests::default();
        let data = vec![0xee; if command == command::READ { len as usize } else { 0 }];
        let slot = parts.insert(Subrequest::new(command, 0, 1000, len, data));
        parts.get_mut(slot).unwrap().is_sent = true;
        let cookie = parts.request(slot).unwrap().cookie;
        (parts, cookie)
    }

    /// Passes `bytes` to the receiver in parts of limited length, as reads from a socket do.
    fn feed(
        receiver: &mut Receiver,
        parts: &mut Subrequests,
        mut bytes: &[u8],
        piece: usize,
    ) -> Result<Vec<(Subrequest, u32)>, Violation> {
        let mut ended = Vec::new();
        while !bytes.is_empty() {
            let (first, rest) = receiver.room(parts);
            let first_len = first.len();
            let count = bytes.len().min(piece.max(1)).min(first_len + rest.len());
            let (now, later) = bytes.split_at(count);
            bytes = later;
            let (direct, buffered) = now.split_at(count.min(first_len));
            first[..direct.len()].copy_from_slice(direct);
            rest[..buffered.len()].copy_from_slice(buffered);
            receiver.received(count, first_len);
            receiver.advance(parts, |part, error| ended.push((part, error)))?;
        }
        Ok(ended)
    }

    #[test]
    fn reads_are_answered_in_both_forms_and_any_pieces() {
        for piece in [1, 7, 100, 1 << 20] {
            let (mut simple, cookie) = parts(command::READ, 3000);
            let mut bytes = Head::simple(cookie, Ok(())).bytes().to_vec();
            let data: Vec<u8> = (0..3000_u32).map(|at| at as u8).collect();
            bytes.extend(&data);
            let ended = feed(&mut Receiver::new(false, None), &mut simple, &bytes, piece).unwrap();
            assert_eq!((&ended[0].0.data, ended[0].1), (&data, 0));

            let (mut structured, cookie) = parts(command::READ, 3000);
            let mut bytes = Head::data(cookie, 1000 + 2000, 1000, false).bytes().to_vec();
            bytes.extend(&data[2000..]);
            // A hole in the middle, and a separate final chunk.
            let mut hole = Vec::new();
            hole.extend(0x668e_33ef_u32.to_be_bytes());
            hole.extend(0_u16.to_be_bytes());
            hole.extend(chunk::OFFSET_HOLE.to_be_bytes());
            hole.extend(cookie.to_be_bytes());
            hole.extend(12_u32.to_be_bytes());
            hole.extend(1500_u64.to_be_bytes());
            hole.extend(1500_u32.to_be_bytes());
            bytes.extend(hole);
            bytes.extend(Head::data(cookie, 1000, 500, false).bytes());
            bytes.extend(&data[..500]);
            bytes.extend(Head::done(cookie).bytes());
            let ended =
                feed(&mut Receiver::new(true, Some(1)), &mut structured, &bytes, piece).unwrap();
            let mut expected = data.clone();
            expected[500..2000].fill(0);
            assert!(ended[0].0.data == expected && ended[0].1 == 0);
        }
    }

    #[test]
    fn long_data_bypass_the_input_buffer() {
        for structured in [false, true] {
            let mut table = Subrequests::default();
            let mut bytes = Vec::new();
            let long = 4 * MIN_DIRECT_READ as u32;
            for _ in 0..8 {
                let slot = table.insert(Subrequest::new(
                    command::READ,
                    0,
                    0,
                    long,
                    vec![0; 4 * MIN_DIRECT_READ],
                ));
                table.get_mut(slot).unwrap().is_sent = true;
                let cookie = table.request(slot).unwrap().cookie;
                match structured {
                    true => bytes.extend(Head::data(cookie, 0, long, true).bytes()),
                    false => bytes.extend(Head::simple(cookie, Ok(())).bytes()),
                }
                bytes.extend(vec![7; 4 * MIN_DIRECT_READ]);
            }
            let slot = table.insert(Subrequest::new(command::WRITE, 0, 0, 512, vec![0; 512]));
            table.get_mut(slot).unwrap().is_sent = true;
            bytes.extend(Head::simple(table.request(slot).unwrap().cookie, Ok(())).bytes());
            let mut receiver = Receiver::new(structured, Some(1));
            let (mut copied, mut ended, mut rest) = (0, 0, &bytes[..]);
            while !rest.is_empty() {
                let (first, input) = receiver.room(&mut table);
                let (first_len, room) = (first.len(), first.len() + input.len());
                let (now, later) = rest.split_at(room.min(rest.len()));
                let (direct, buffered) = now.split_at(first_len.min(now.len()));
                first[..direct.len()].copy_from_slice(direct);
                input[..buffered.len()].copy_from_slice(buffered);
                copied += buffered.len();
                receiver.received(now.len(), first_len);
                let done = |part: Subrequest, error| {
                    assert!(
                        error == 0 && part.data.iter().all(|byte| *byte == 7 || part.len == 512)
                    );
                    ended += 1;
                };
                receiver.advance(&mut table, done).unwrap();
                rest = later;
            }
            // Only the first reply passes through the input buffer, because its length is not known
            // before. The data of the later ones are received directly into their subrequests.
            assert!(ended == 9 && copied <= INPUT + 8 * HEAD, "{copied}");
            // The whole input buffer is free again, so one system call can receive many short
            // replies.
            assert_eq!(receiver.room(&mut table).1.len(), INPUT);
        }
    }

    #[test]
    fn errors_end_a_request_and_not_the_connection() {
        let (mut table, cookie) = parts(command::WRITE, 512);
        let head = Head::simple(cookie, Err(NbdError::NoSpc));
        let ended = feed(&mut Receiver::new(true, Some(1)), &mut table, head.bytes(), 3).unwrap();
        assert_eq!(ended[0].1, 28);
        let (mut table, cookie) = parts(command::READ, 512);
        let head = Head::error(cookie, NbdError::Io, "a bad sector");
        let ended = feed(&mut Receiver::new(true, Some(1)), &mut table, head.bytes(), 5).unwrap();
        assert_eq!(ended[0].1, 5);
    }

    #[test]
    fn chunks_without_end_are_a_violation() {
        let error = |cookie: u64| {
            let mut chunk = 0x668e_33ef_u32.to_be_bytes().to_vec();
            chunk.extend([0; 2]);
            chunk.extend((chunk::ERROR_BIT | 1).to_be_bytes());
            chunk.extend(cookie.to_be_bytes());
            chunk.extend(6_u32.to_be_bytes());
            chunk.extend(5_u32.to_be_bytes());
            chunk.extend([0; 2]);
            chunk
        };
        let hole = |cookie: u64| {
            let mut chunk = 0x668e_33ef_u32.to_be_bytes().to_vec();
            chunk.extend([0; 2]);
            chunk.extend(chunk::OFFSET_HOLE.to_be_bytes());
            chunk.extend(cookie.to_be_bytes());
            chunk.extend(12_u32.to_be_bytes());
            chunk.extend(1000_u64.to_be_bytes());
            chunk.extend(0_u32.to_be_bytes());
            chunk
        };
        for command in [command::READ, command::WRITE] {
            let (mut table, cookie) = parts(command, 512);
            let mut receiver = Receiver::new(true, Some(1));
            let errors = error(cookie).repeat(MAX_ERRORS.into());
            assert_eq!(feed(&mut receiver, &mut table, &errors, 999).unwrap().len(), 0);
            let outcome = feed(&mut receiver, &mut table, &error(cookie), 999);
            assert_eq!(outcome.map(|ended| ended.len()), Err(Violation::Errors));
        }
        let (mut table, cookie) = parts(command::READ, 512);
        let outcome = feed(&mut Receiver::new(true, Some(1)), &mut table, &hole(cookie), 999);
        assert_eq!(outcome.map(|ended| ended.len()), Err(Violation::Range));
    }

    #[test]
    fn extents_are_stored_up_to_a_limit() {
        for (count, piece) in [(1, 3), (3, 1000), (EXTENTS / 8 + 100, 999)] {
            let (mut table, cookie) = parts(command::BLOCK_STATUS, 512);
            let mut bytes = Head::extents(cookie, 1, count as u32).bytes().to_vec();
            let extents: Vec<u8> = (0..count as u64).flat_map(u64::to_be_bytes).collect();
            bytes.extend(&extents);
            let ended = feed(&mut Receiver::new(true, Some(1)), &mut table, &bytes, piece).unwrap();
            assert!(ended[0].0.data == extents[..extents.len().min(EXTENTS)] && ended[0].1 == 0);
        }
        let refused = |bytes: &dyn Fn(u64) -> Vec<u8>| {
            let (mut table, cookie) = parts(command::BLOCK_STATUS, 512);
            feed(&mut Receiver::new(true, Some(1)), &mut table, &bytes(cookie), 7)
                .map(|ended| ended.len())
                .unwrap_err()
        };
        let extent = |c, context| [Head::extents(c, context, 1).bytes(), &[0; 8]].concat();
        assert!(matches!(refused(&|c| extent(c, 2)), Violation::Chunk { .. }));
        assert_eq!(refused(&|c| Head::done(c).bytes().to_vec()), Violation::Gap);
        assert_eq!(refused(&|c| Head::simple(c, Ok(())).bytes().to_vec()), Violation::Form);
        let (mut table, cookie) = parts(command::BLOCK_STATUS, 512);
        let error = Head::simple(cookie, Err(NbdError::Io));
        let ended = feed(&mut Receiver::new(true, Some(1)), &mut table, error.bytes(), 9).unwrap();
        assert_eq!(ended[0].1, 5);
    }

    #[test]
    fn protocol_violations_are_detected() {
        let read = |structured, bytes: &dyn Fn(u64) -> Vec<u8>| {
            let (mut table, cookie) = parts(command::READ, 512);
            feed(&mut Receiver::new(structured, Some(1)), &mut table, &bytes(cookie), 1 << 20)
                .map(|ended| ended.len())
                .unwrap_err()
        };
        let data = |cookie, offset, len: u32, last| {
            let mut bytes = Head::data(cookie, offset, len, last).bytes().to_vec();
            bytes.extend(vec![1; len as usize]);
            bytes
        };
        let cookie = |c: u64| Head::simple(c + (1 << 32), Ok(())).bytes().to_vec();
        assert!(matches!(read(false, &cookie), Violation::Cookie(_)));
        assert!(matches!(read(true, &|_| vec![9; 64]), Violation::Magic(_)));
        assert_eq!(read(true, &|c| Head::simple(c, Ok(())).bytes().to_vec()), Violation::Form);
        assert_eq!(read(false, &|c| data(c, 1000, 512, true)), Violation::Form);
        assert_eq!(read(true, &|c| data(c, 999, 100, true)), Violation::Range);
        assert_eq!(read(true, &|c| data(c, 1500, 100, true)), Violation::Range);
        assert_eq!(read(true, &|c| data(c, u64::MAX, 100, true)), Violation::Range);
        assert!(matches!(read(true, &|c| data(c, 1000, 513, true)), Violation::Chunk { .. }));
        let twice = |c| [data(c, 1000, 100, false), data(c, 1099, 100, false)].concat();
        assert_eq!(read(true, &twice), Violation::Range);
        assert_eq!(read(true, &|c| data(c, 1000, 511, true)), Violation::Gap);
        assert_eq!(read(true, &|c| Head::done(c).bytes().to_vec()), Violation::Gap);
        let extent = |c| [Head::extents(c, 1, 1).bytes(), &[0; 8]].concat();
        assert!(matches!(read(true, &extent), Violation::Chunk { .. }));
        // The server sends data in reply to a write.
        let (mut table, c) = parts(command::WRITE, 512);
        let outcome =
            feed(&mut Receiver::new(true, Some(1)), &mut table, &data(c, 1000, 512, true), 9);
        assert!(matches!(outcome, Err(Violation::Chunk { .. })));
    }

    proptest! {
        /// Arbitrary bytes of the server cause no panic, and no subrequest ends twice.
        #[test]
        fn any_bytes(
            structured: bool,
            chunks in prop::collection::vec(
                (0..4_u64, 0..5_u16, 0..3_u16, 0..600_u32, 900..1700_u64), 0..20),
            piece in 1..2000_usize,
        ) {
            let mut table = Subrequests::default();
            for _ in 0..3 {
                let slot = table.insert(Subrequest::new(command::READ, 0, 1000, 512, vec![0; 512]));
                table.get_mut(slot).unwrap().is_sent = true;
            }
            let mut bytes = Vec::new();
            for (cookie, kind, last, len, offset) in chunks {
                match kind {
                    0 => bytes.extend(Head::simple(cookie, Ok(())).bytes()),
                    1 => bytes.extend(Head::done(cookie).bytes()),
                    2 => bytes.extend(Head::error(cookie, NbdError::Io, "x").bytes()),
                    3 => bytes.extend(vec![0x67; len as usize]),
                    _ => {
                        bytes.extend(Head::data(cookie, offset, len, last == 1).bytes());
                        bytes.extend(vec![7; len as usize]);
                    }
                }
            }
            let mut receiver = Receiver::new(structured, Some(1));
            if let Ok(ended) = feed(&mut receiver, &mut table, &bytes, piece) {
                prop_assert!(ended.len() <= 3);
            }
        }
    }
}
