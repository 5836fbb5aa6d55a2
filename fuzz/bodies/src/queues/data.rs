//! Data pointers of a host: PRPs and SGLs of every valid shape, and some invalid ones.

use crate::command::{PAGE, descriptor};
use crate::source::Source;
use shadowbell_spec::Sqe;

/// Number of pages of a slot, the memory for one command: two pages for PRP or SGL lists, and the
/// others for data.
pub(super) const SLOT_PAGES: u64 = 2 + DATA_PAGES;
const DATA_PAGES: u64 = 4;
/// Maximum number of bytes of a command's data: one page less than a slot has for data, so that the
/// data may start at any offset in the first page.
pub(super) const MAX_DATA: usize = ((DATA_PAGES - 1) * PAGE) as usize;

/// Data pointer of a command.
#[derive(Default)]
pub(super) struct Pointer {
    /// Pieces of the guest's memory to which the data pointer refers, in the order of the data:
    /// address and length. For an invalid pointer, the pieces that it had before it was made
    /// invalid.
    pub(super) pieces: Vec<(u64, usize)>,
    /// True if the pointer is invalid, so the command must fail.
    pub(super) wrong: bool,
    /// Address and contents of the lists that the pointer needs in memory.
    pub(super) lists: Vec<(u64, Vec<u8>)>,
}

impl Pointer {
    /// Creates a pointer to `len` bytes in the slot at `slot`, and stores it in `sqe`.
    pub(super) fn new(source: &mut Source<'_>, sqe: &mut Sqe, slot: u64, len: usize) -> Self {
        assert!(len <= MAX_DATA);
        if sqe.opcode != 0 && sqe.flags == 0 && source.rarely(3) {
            Self::sgl(source, sqe, slot, len)
        } else {
            Self::prps(source, sqe, slot, len)
        }
    }

    /// Creates a pointer as `new` does, for commands that do not support SGLs.
    pub(super) fn prps(source: &mut Source<'_>, sqe: &mut Sqe, slot: u64, len: usize) -> Self {
        let mut pointer = Self::default();
        let (lists, data) = (slot, slot + 2 * PAGE);
        // The pages are in random order.
        let mut pages: Vec<u64> = (0..DATA_PAGES).map(|n| data + n * PAGE).collect();
        for n in 0..pages.len() {
            let with = source.below(pages.len());
            pages.swap(n, with);
        }
        let flaw = if source.rarely(10) { 1 + source.below(4) } else { 0 };
        let offset = if source.bool() { u64::from(source.u16()) & 0xffc } else { 0 };
        let first = len.min((PAGE - offset) as usize);
        pointer.pieces.push((pages[0] + offset, first));
        let mut prp1 = pages[0] + offset;
        let (mut rest, mut left) = (Vec::new(), len - first);
        for page in &pages[1..] {
            if left > 0 {
                rest.push(*page);
                pointer.pieces.push((*page, left.min(PAGE as usize)));
                left = left.saturating_sub(PAGE as usize);
            }
        }
        if flaw == 1 {
            prp1 |= 1 + u64::from(source.u8() % 3);
            pointer.wrong = true;
        }
        if flaw == 2 && !rest.is_empty() {
            let at = source.below(rest.len());
            rest[at] |= 1 + u64::from(source.u16() % 0xfff);
            pointer.wrong = true;
        }
        if flaw == 3 && !rest.is_empty() {
            let at = source.below(rest.len());
            rest[at] = source.of(&[0, 1 << 40, u64::MAX - 4095]);
            pointer.wrong = true;
        }
        let prp2 = match rest[..] {
            [] => source.of(&[0, 0, u64::MAX]),
            [page] => page,
            _ => {
                // A PRP list in one page, or a list that continues in another page.
                let before = source.below(rest.len() + 1).min(511);
                let at = if before == 0 {
                    lists + u64::from(source.u8()) * 8
                } else {
                    lists + PAGE - 8 * before as u64
                };
                let in_page = ((lists + PAGE - at) / 8) as usize;
                if rest.len() <= in_page {
                    pointer.lists.push((at, bytes_of(&rest)));
                } else {
                    // Only the first list may start inside a page.
                    let next = lists + PAGE;
                    let (here, there) = rest.split_at(in_page - 1);
                    pointer.lists.push((at, bytes_of(&[here, &[next]].concat())));
                    pointer.lists.push((next, bytes_of(there)));
                }
                if flaw == 4 {
                    pointer.wrong = true;
                    at | (1 + u64::from(source.u8() % 7))
                } else {
                    at
                }
            }
        };
        *sqe = sqe.with_prps(prp1, prp2);
        pointer
    }

    fn sgl(source: &mut Source<'_>, sqe: &mut Sqe, slot: u64, len: usize) -> Self {
        let mut pointer = Self::default();
        let (lists, data) = (slot, slot + 2 * PAGE);
        let flaw = if source.rarely(10) { 1 + source.below(4) } else { 0 };
        let (mut at, mut left) = (data + u64::from(source.u8()), len);
        let wanted = 1 + source.below(6);
        while left > 0 {
            let last = pointer.pieces.len() + 1 >= wanted;
            let take = if last { left } else { 1 + source.below(left) };
            pointer.pieces.push((at, take));
            left -= take;
            at += take as u64 + u64::from(source.u8() & 0x7f);
        }
        let mut list: Vec<_> = pointer.pieces.iter().map(|(at, len)| (*at, *len, 0x00)).collect();
        match flaw {
            // The last descriptor is too short by a byte.
            1 => list.last_mut().expect("a piece").1 -= 1,
            // An unsupported descriptor type: transport, keyed, offset, vendor.
            2 => {
                let at = source.below(list.len());
                list[at].2 = source.of(&[0x50, 0x40, 0x01, 0xf0]);
            }
            3 => {
                let at = source.below(list.len());
                list[at].0 = source.of(&[1 << 40, u64::MAX - 8]);
            }
            _ => {}
        }
        pointer.wrong = flaw != 0 && flaw != 4;
        if flaw == 0 && source.rarely(4) {
            // A descriptor beyond the length of the data. The controller must not access it.
            list.push((data + DATA_PAGES * PAGE - 64, 64, 0x00));
        }
        if flaw == 0 && source.rarely(4) {
            // A bit bucket descriptor. In a write, it describes no data, so it may be anywhere. In
            // a read, it would discard data, so it is behind the last data block.
            let reads = sqe.opcode == 0x02;
            let at = if reads { list.len() } else { source.below(list.len() + 1) };
            list.insert(at, (u64::MAX, usize::from(source.u16()), 0x10));
        }
        let bytes = |list: &[(u64, usize, u8)]| -> Vec<u8> {
            let all = list.iter();
            all.flat_map(|(at, len, kind)| descriptor(*at, *len as u32, *kind).to_dptr()).collect()
        };
        let inline = list.len() == 1 && source.bool();
        sqe.flags = 0x40;
        sqe.dptr = if inline {
            bytes(&list).try_into().expect("one descriptor")
        } else if list.len() > 1 && source.bool() {
            // The SGL is in two segments.
            let (here, there) = list.split_at(1 + source.below(list.len() - 1));
            let next = (lists + PAGE, there.len() * 16, 0x30);
            pointer.lists.push((lists + 256, bytes(&[here, &[next]].concat())));
            pointer.lists.push((next.0, bytes(there)));
            descriptor(lists + 256, (here.len() as u32 + 1) * 16, 0x20).to_dptr()
        } else {
            pointer.lists.push((lists + 16, bytes(&list)));
            let mut len = list.len() as u32 * 16;
            if flaw == 4 {
                pointer.wrong = true;
                len += 1 + u32::from(source.u8() % 15);
            }
            descriptor(lists + 16, len, 0x30).to_dptr()
        };
        pointer
    }
}

fn bytes_of(entries: &[u64]) -> Vec<u8> {
    entries.iter().flat_map(|entry| entry.to_le_bytes()).collect()
}
