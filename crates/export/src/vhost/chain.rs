//! virtio-blk request that is read from the queue's descriptors. Its data stays in the guest's
//! memory.

use super::request::{HEADER, Job, MAX_PIECES, Rules, SEGMENT, Status, understand};
use super::split_ring::{DESCRIPTOR, Descriptor, SplitRing};
use ::shadowbell_memory::View;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// Piece of the guest's memory: address and length.
pub(super) type Piece = (u64, usize);

/// Memory of a request: the pieces that the device reads, and those that it writes.
#[derive(Debug, Default)]
pub(super) struct Chain {
    pub(super) read: Vec<Piece>,
    pub(super) write: Vec<Piece>,
}

/// Validated request. After the validation, the chain contains only the data of the request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) job: Job,
    /// Address of the status byte.
    pub(super) status: u64,
}

/// Reason for the refusal of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bad {
    /// The request is answered with this status, which is written to this address.
    Status(Status, u64),
    /// The request has no writable byte for a status.
    NoRoom,
}

impl Chain {
    /// Number of memory pieces, counted up to one more than [`MAX_PIECES`].
    pub(super) fn pieces(&self) -> usize {
        (self.read.len() + self.write.len()).min(MAX_PIECES + 1)
    }

    /// Reads the descriptors from `head`. An invalid descriptor ends the chain.
    #[inline]
    pub(super) fn read(&mut self, ring: &SplitRing, view: &View, head: u16) {
        self.read.clear();
        self.write.clear();
        let (mut index, mut count, mut table) = (head, ring.size(), None);
        let mut left = count;
        while index < count && left > 0 {
            left -= 1;
            let found = match table {
                None => ring.descriptor(index),
                Some(at) => indirect(view, at, index),
            };
            let Some(descriptor) = found else { return };
            if descriptor.flags & INDIRECT != 0 {
                let entries = descriptor.len as usize / DESCRIPTOR;
                // A nested or too long indirect descriptor table ends the chain.
                let Ok(entries) = u16::try_from(entries) else { return };
                if table.is_some() {
                    return;
                }
                (table, index, count, left) = (Some(descriptor.address), 0, entries, entries);
                continue;
            }
            let piece = (descriptor.address, descriptor.len as usize);
            if descriptor.flags & WRITE != 0 {
                self.write.push(piece);
            } else {
                self.read.push(piece);
            }
            if descriptor.flags & NEXT == 0 {
                return;
            }
            index = descriptor.next;
        }
    }

    /// Decodes the request, and removes its header and its status byte from the chain.
    #[inline]
    pub(super) fn parse(&mut self, view: &View, rules: &Rules) -> Result<Request, Bad> {
        let is_too_long = self.pieces() > MAX_PIECES;
        let status = take_last(&mut self.write);
        if is_too_long {
            // The memory of the long list is released. Otherwise each slot could keep a list of
            // this length.
            *self = Self::default();
        }
        let status = status.ok_or(Bad::NoRoom)?;
        let bad = Bad::Status(Status::IoError, status);
        if is_too_long {
            return Err(bad);
        }
        let mut header = [0; HEADER];
        take_first(&mut self.read, view, &mut header).ok_or(bad)?;
        let (given, room) = (total(&self.read), total(&self.write));
        let segment = || {
            let mut segment = [0; SEGMENT];
            take_first(&mut self.read, view, &mut segment).map(|()| segment)
        };
        let understood = understand(header, (given, room), rules, segment);
        let job = understood.map_err(|reply| Bad::Status(reply, status))?;
        Ok(Request { job, status })
    }
}

fn indirect(view: &View, table: u64, index: u16) -> Option<Descriptor> {
    let at = table.checked_add((DESCRIPTOR * usize::from(index)) as u64)?;
    let mut bytes = [0; DESCRIPTOR];
    view.read(at, &mut bytes).ok()?;
    let (address, rest) = bytes.split_at(DESCRIPTOR / 2);
    let word = |half: &[u8]| half.try_into().map(u64::from_ne_bytes).ok();
    Some(Descriptor::of([word(address)?, word(rest)?]))
}

fn total(pieces: &[Piece]) -> usize {
    pieces.iter().map(|(_, len)| len).sum()
}

/// Removes the last byte and returns its address.
#[inline]
fn take_last(pieces: &mut Vec<Piece>) -> Option<u64> {
    loop {
        let (at, len) = pieces.last_mut()?;
        if let Some(rest) = len.checked_sub(1) {
            *len = rest;
            let last = at.checked_add(rest as u64);
            if rest == 0 {
                pieces.pop();
            }
            return last;
        }
        pieces.pop();
    }
}

/// Fills `into` with bytes from the start of the pieces, and removes these bytes from the pieces.
#[inline]
fn take_first(pieces: &mut Vec<Piece>, view: &View, into: &mut [u8]) -> Option<()> {
    let (mut done, mut whole) = (0, 0);
    while done < into.len() {
        let (at, len) = pieces.get_mut(whole)?;
        let now = (*len).min(into.len() - done);
        view.read(*at, into.get_mut(done..done + now)?).ok()?;
        done += now;
        if now == *len {
            whole += 1;
        } else {
            (*at, *len) = (at.checked_add(now as u64)?, *len - now);
        }
    }
    pieces.drain(..whole);
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_is_the_last_writable_byte_of_the_chain() {
        for (pieces, last, rest) in [
            (vec![(100, 512), (700, 1)], Some(700), vec![(100, 512)]),
            (vec![(100, 513), (700, 0)], Some(612), vec![(100, 512)]),
            (vec![(5, 0)], None, vec![]),
            (vec![(u64::MAX, 2)], None, vec![(u64::MAX, 1)]),
        ] {
            let mut pieces = pieces;
            assert_eq!(take_last(&mut pieces), last);
            assert_eq!(pieces, rest);
        }
    }
}
