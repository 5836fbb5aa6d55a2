//! A correct guest, over a disk that delays and fails requests as a program says, and a model of
//! each command's result.
//!
//! After each turn of the I/O thread this body checks that
//!
//! * a completion belongs to an outstanding command, so each command completes at most once; its
//!   phase tag, submission queue and head are valid; valid commands succeed and invalid ones fail;
//! * no completion is posted to a full queue;
//! * in the guest's memory only the data of reads in flight, free entries of completion queues, and
//!   EventIdx of existing queues have changed;
//! * a read returns the disk's contents, and the disk receives the data of a write or a copy;
//! * earlier commands have no effect after a reset, the deletion of their queue, or an unmap;
//! * every command completes when the disk delays no request.

mod data;
mod host;

use crate::command::PAGE;
use crate::limits::Limits;
use crate::source::Source;
use crate::test_disk::{self, BLOCK, BLOCKS};
use data::{MAX_DATA, Pointer};
use host::{Command, Expect, Host, Kind, QUEUES};
use shadowbell_spec::Sqe;
use shadowbell_spec::nvm::{CopyRange, DsmRange};
use zerocopy::IntoBytes;

const ACTIONS: usize = 160;

/// Runs the program that `input` encodes.
pub fn run(input: &[u8]) {
    let mut source = Source::new(input);
    let limits = Limits::begin();
    let mut host = Host::new(&mut source);
    host.enable();
    if !source.rarely(4) {
        let shadow = source.bool();
        if shadow && source.bool() {
            host.configure_shadow(&mut source);
        }
        create(&mut host, &mut source, 1, 1);
        if shadow {
            host.configure_shadow(&mut source);
        }
    }
    for _ in 0..ACTIONS {
        if source.is_empty() {
            break;
        }
        act(&mut host, &mut source);
        if !source.rarely(4) {
            host.turn();
        }
        host.step(&limits);
    }
    host.quiesce();
    host.reset(0);
    host.step(&limits);
}

fn act(host: &mut Host, source: &mut Source<'_>) {
    match source.below(24) {
        0..=9 => {
            let live: Vec<u16> = host.live_sqs().collect();
            if live.is_empty() {
                return create(host, source, 1, 1);
            }
            let qid = source.of(&live);
            for _ in 0..1 + source.below(3) {
                submit_io(host, source, qid);
            }
            host.ring_sq(qid);
        }
        10 | 11 => {
            for cq in 0..=QUEUES {
                let most = source.below(8);
                host.consume(cq, most);
            }
        }
        12 => {
            let mut state = host.test_disk.state();
            (state.defer, state.cancellable) = (source.bool(), source.bool());
        }
        13 | 14 => {
            let mut state = host.test_disk.state();
            for _ in 0..1 + source.below(4) {
                let n = source.below(state.deferred().max(1));
                state.end(n);
            }
        }
        15 => {
            let error = test_disk::error(source);
            host.test_disk.state().fail.push_back(error);
            host.trouble = true;
        }
        16 => {
            let qid = 1 + source.below(usize::from(QUEUES)) as u16;
            let cq = if source.rarely(3) { 1 } else { qid };
            create(host, source, qid, cq);
        }
        17 => {
            let qid = 1 + source.below(usize::from(QUEUES)) as u16;
            host.delete(qid, source.rarely(3));
        }
        18 => host.configure_shadow(source),
        19 => submit_admin(host, source),
        20 => host.unmap_data(),
        21 => host.unmap_queues(),
        22 => host.reset(source.below(3)),
        _ => host.quiesce(),
    }
}

/// Creates a queue pair, or another submission queue for an existing completion queue.
fn create(host: &mut Host, source: &mut Source<'_>, qid: u16, cq: u16) {
    let entries = |source: &mut Source<'_>| source.of(&[4u32, 2, 3, 8, 16, 64]);
    let (of_cq, of_sq) = (entries(source), entries(source));
    let interrupts = source.bool();
    host.create(qid, cq, of_cq, of_sq, interrupts);
}

/// Submits an I/O command, if the queue has a free entry.
fn submit_io(host: &mut Host, source: &mut Source<'_>, qid: u16) {
    let Some(slot) = host.slot(qid) else { return };
    let at = host::slot_at(slot);
    let opcode = source.of(&[0x02u8, 0x02, 0x01, 0x01, 0x05, 0x00, 0x08, 0x09, 0x0c, 0x19, 0x7f]);
    let nsid = source.of(&[1, 1, 1, 1, 1, 1, 2, 0, u32::MAX]);
    let mut sqe = Sqe::new(opcode, host.next_cid(), nsid);
    let mut wrong = nsid != 1 && (nsid != u32::MAX || opcode != 0x00);
    let blocks = 1 + source.below(MAX_DATA / BLOCK as usize) as u64;
    let slba = match source.below(8) {
        0..=5 => source.below((BLOCKS - blocks + 1) as usize) as u64,
        6 => BLOCKS - blocks,
        _ => source.of(&[BLOCKS - blocks + 1, BLOCKS, u64::MAX, u64::MAX - blocks]),
    };
    let outside = slba.checked_add(blocks).is_none_or(|end| end > BLOCKS);
    let (offset, len) = (slba.wrapping_mul(BLOCK), (blocks * BLOCK) as usize);
    (sqe.cdw10, sqe.cdw11, sqe.cdw12) = (slba as u32, (slba >> 32) as u32, blocks as u32 - 1);
    let mut pointer = Pointer::default();
    let mut expect = Expect::Success;
    let kind = match opcode {
        0x02 => {
            wrong |= outside;
            pointer = Pointer::new(source, &mut sqe, at, len);
            Kind::Read { offset, len: len as u64 }
        }
        0x01 | 0x05 => {
            wrong |= outside;
            sqe.cdw12 |= u32::from(source.rarely(4)) << 30;
            pointer = Pointer::new(source, &mut sqe, at, len);
            let same = opcode == 0x05 && source.bool() && !outside;
            let data = if same {
                test_disk::contents(offset, len as u64)
            } else {
                // The data differ from the data of other commands, and from the disk's contents:
                // these contain no zeroes.
                let mut data = source.pattern(len);
                data[0] = 0;
                data[1..3].copy_from_slice(&sqe.cid.to_le_bytes());
                data
            };
            if opcode == 0x05 && !same {
                expect = Expect::Failure;
            }
            let mut rest = &data[..];
            for (at, len) in &pointer.pieces {
                let (piece, others) = rest.split_at(*len);
                host.poke(*at, piece);
                rest = others;
            }
            if opcode == 0x01 { Kind::Write { offset, data, put: 0 } } else { Kind::Other }
        }
        0x00 => Kind::Other,
        0x08 | 0x0c => {
            wrong |= outside;
            Kind::Other
        }
        0x09 => {
            let (count, bad) = (1 + source.below(8), source.rarely(6));
            let range = |n| DsmRange {
                attributes: 0,
                blocks: if bad && n == count - 1 { BLOCKS as u32 + 1 } else { blocks as u32 },
                slba: BLOCKS - blocks - u64::from(n as u32).min(BLOCKS - blocks),
            };
            let ranges: Vec<u8> = (0..count).flat_map(|n| range(n).as_bytes().to_vec()).collect();
            wrong |= bad;
            (sqe.cdw10, sqe.cdw11, sqe.cdw12) = (count as u32 - 1, source.of(&[4, 4, 0]), 0);
            pointer = Pointer::new(source, &mut sqe, at, ranges.len());
            host.poke_pieces(&pointer.pieces, &ranges);
            Kind::Other
        }
        0x19 => {
            let count = 1 + source.below(4);
            let (mut ranges, mut data) = (Vec::new(), Vec::new());
            for _ in 0..count {
                let nlb0 = source.below(8) as u16;
                let slba = source.below((BLOCKS - 8) as usize) as u64;
                let range = CopyRange { slba, nlb0, ..zero_range() };
                ranges.extend(range.as_bytes());
                data.extend(test_disk::contents(slba * BLOCK, (u64::from(nlb0) + 1) * BLOCK));
            }
            let to = source.below((BLOCKS - 32) as usize) as u64;
            (sqe.cdw10, sqe.cdw11, sqe.cdw12) = (to as u32, 0, count as u32 - 1);
            pointer = Pointer::new(source, &mut sqe, at, ranges.len());
            host.poke_pieces(&pointer.pieces, &ranges);
            Kind::Copy { offset: to * BLOCK, data }
        }
        _ => {
            wrong = true;
            Kind::Other
        }
    };
    if wrong || pointer.wrong {
        // An invalid command must not change memory or the disk.
        expect = Expect::Failure;
        pointer.pieces.clear();
    }
    for (at, bytes) in &pointer.lists {
        host.poke(*at, bytes);
    }
    let writes = if opcode == 0x02 { pointer.pieces } else { Vec::new() };
    host.store_command(qid, &sqe, Command { slot: Some(slot), writes, kind, expect });
}

fn zero_range() -> CopyRange {
    CopyRange {
        snsid: 0,
        reserved4: 0,
        slba: 0,
        nlb0: 0,
        reserved18: [0; 4],
        sopt: 0,
        reftag: 0,
        apptag: 0,
        apptag_mask: 0,
    }
}

/// Submits an admin command that changes no queue.
fn submit_admin(host: &mut Host, source: &mut Source<'_>) {
    let Some(slot) = host.slot(0) else { return };
    let at = host::slot_at(slot);
    let opcode = source.of(&[0x06u8, 0x02, 0x0a, 0x09, 0x08, 0x0c, 0x18, 0x80]);
    let mut sqe = Sqe::new(opcode, host.next_cid(), source.of(&[0, 1, u32::MAX]));
    let mut pointer = Pointer::default();
    let mut kind = Kind::Other;
    match opcode {
        0x06 => {
            sqe.cdw10 = source.below(32) as u32;
            pointer = Pointer::prps(source, &mut sqe, at, PAGE as usize);
        }
        0x02 => {
            let dwords = 1 + source.below(MAX_DATA / 4) as u32;
            sqe.cdw10 = source.of(&[1, 2, 3, 4, 5, 0, 0x0d]) | (dwords - 1) << 16;
            sqe.cdw12 = source.of(&[0, 4, 64, 512, 3, 1 << 20]);
            pointer = Pointer::prps(source, &mut sqe, at, dwords as usize * 4);
        }
        0x09 => {
            // Set Features with features that change no queue: interrupt coalescing, the write
            // cache, asynchronous events, the timestamp and others.
            sqe.cdw10 = source.of(&[8, 9, 6, 11, 14, 4, 2]);
            sqe.cdw11 = u32::from(source.u16());
            pointer = Pointer::prps(source, &mut sqe, at, 8);
            pointer.pieces.clear();
        }
        0x0a => {
            sqe.cdw10 = source.of(&[8, 9, 6, 11, 7, 14, 4, 2]);
            sqe.cdw10 |= (source.below(5) as u32) << 8;
            pointer = Pointer::prps(source, &mut sqe, at, 8);
        }
        0x08 => {
            let live: Vec<u16> = host.live_sqs().collect();
            if let Some(qid) = live.first() {
                sqe.cdw10 = u32::from(*qid) | u32::from(host.oldest(*qid)) << 16;
            }
            // After an abort, any command in flight may fail.
            host.trouble = true;
        }
        0x0c => kind = Kind::Event,
        _ => {}
    }
    for (at, bytes) in &pointer.lists {
        host.poke(*at, bytes);
    }
    let command = Command { slot: Some(slot), writes: pointer.pieces, kind, expect: Expect::Any };
    host.store_command(0, &sqe, command);
    host.ring_sq(0);
}
