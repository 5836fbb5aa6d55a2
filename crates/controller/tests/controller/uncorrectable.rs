//! Write Uncorrectable: marked blocks.

use crate::common;
use common::{Host, Queue};
use shadowbell_controller::{Carrier, Controller, Polling, Pool, PoolOptions};
use shadowbell_spec::admin::{GetLbaStatus, GetLogPage, Identify};
use shadowbell_spec::identify::{IdentifyController, IdentifyNvmController};
use shadowbell_spec::lba_status::{
    LbaRange, LbaStatusDescriptor, LbaStatusElement, LbaStatusList, LbaStatusLog, atype,
};
use shadowbell_spec::log::lid;
use shadowbell_spec::nvm::{CopyFields, CopyRange, RwFields};
use shadowbell_spec::{Sqe, Status};
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));

/// Builds a command for blocks, without a data pointer.
fn blocks(opcode: u8, slba: u64, nlb0: u16) -> Sqe {
    RwFields { slba, nlb0, ..RwFields::default() }.encode(Sqe::new(opcode, 0, 1))
}

fn mark(slba: u64, nlb0: u16) -> Sqe {
    blocks(0x04, slba, nlb0)
}

fn code(host: &mut Host, queue: &mut Queue, sqe: Sqe) -> Status {
    host.run(queue, sqe).0.code()
}

/// Unrecoverable ranges that the controller reports: first block and number of blocks.
fn reported_ranges(host: &mut Host, action: u8) -> Vec<(u64, u32)> {
    let fields = GetLbaStatus { slba: 0, mndw0: 1023, atype: action, rl: 0 };
    let page = host.page(fields.encode(Sqe::new(0x86, 0, 1))).unwrap();
    let (list, rest) = LbaStatusList::read_from_prefix(&page).unwrap();
    assert_eq!(list.cmpc, LbaStatusList::COMPLETE);
    let entries = rest.chunks_exact(16).take(list.nlsd as usize);
    let entry = |bytes| LbaStatusDescriptor::read_from_bytes(bytes).unwrap();
    let entries: Vec<_> = entries.map(entry).collect();
    let status = LbaStatusDescriptor::WRITE_UNCORRECTABLE;
    assert!(entries.iter().all(|entry| entry.status == status));
    entries.iter().map(|entry| (entry.dslba, entry.nlb0 + 1)).collect()
}

/// LBA Status log page: its header, and the ranges of the first namespace.
fn log(host: &mut Host) -> (LbaStatusLog, Vec<(u64, u32)>) {
    let fields = GetLogPage { lid: lid::LBA_STATUS, numd0: 1023, ..GetLogPage::default() };
    let page = host.page(Sqe::get_log_page(0, fields, 0)).unwrap();
    let (head, rest) = LbaStatusLog::read_from_prefix(&page).unwrap();
    let (element, rest) = LbaStatusElement::read_from_prefix(rest).unwrap();
    let entries = rest.chunks_exact(16).take(element.nlrd as usize);
    let range = |bytes| LbaRange::read_from_bytes(bytes).unwrap();
    let ranges = entries.map(range).map(|range| (range.rslba, range.rnlb0 + 1)).collect();
    if head.nlslne != 0 {
        assert_eq!((element.neid, element.ratype), (1, atype::UNRECOVERABLE));
    }
    (head, ranges)
}

#[test]
fn marked_blocks_are_unreadable_until_written() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    for disk in ["mem:1MiB", file.path().to_str().unwrap()] {
        let mut host = Host::new(&[disk], ADAPTIVE);
        let page = host.page(Sqe { cdw10: 1, ..Sqe::new(0x06, 0, 0) }).unwrap();
        let identify = IdentifyController::read_from_bytes(&page).unwrap();
        assert!(identify.oncs.write_uncorrectable());
        let mut queue = host.create(1, 16, false);
        let at = host.alloc(16384);
        let pages: Vec<u8> = (1..4).flat_map(|n| (at + n * 4096).to_le_bytes()).collect();
        let list = host.alloc(4096);
        host.poke(list, &pages);
        assert_eq!(code(&mut host, &mut queue, mark(10, 3)), Status::SUCCESS);
        assert_eq!(reported_ranges(&mut host, atype::UNRECOVERABLE), [(10, 4)]);
        assert_eq!(reported_ranges(&mut host, atype::SCAN_UNRECOVERABLE), [(10, 4)]);
        let (head, ranges) = log(&mut host);
        assert_eq!((head.lslplen, head.nlslne, head.estulb, head.lsgc), (48, 1, 4, 1));
        assert_eq!(ranges, [(10, 4)]);
        // Read, Compare and Verify fail if any of their blocks is marked.
        for opcode in [0x02, 0x05, 0x0c] {
            for (slba, nlb0) in [(10, 0), (13, 0), (9, 1), (13, 5), (0, 31)] {
                let sqe = blocks(opcode, slba, nlb0).with_prps(at, list);
                assert_eq!(code(&mut host, &mut queue, sqe), Status::UNRECOVERED_READ);
            }
            for (slba, nlb0) in [(9, 0), (14, 7)] {
                let sqe = blocks(opcode, slba, nlb0).with_prps(at, 0);
                assert_eq!(code(&mut host, &mut queue, sqe), Status::SUCCESS);
            }
        }
        // A Copy of marked blocks fails and writes nothing.
        let copy = |host: &mut Host, slba, sdlba, nlb0| {
            let source = host.alloc(4096);
            host.poke(source, CopyRange { slba, nlb0, ..CopyRange::default() }.as_bytes());
            let fields = CopyFields { sdlba, ..CopyFields::default() };
            fields.encode(Sqe::new(0x19, 0, 1)).with_prps(source, 0)
        };
        let sqe = copy(&mut host, 8, 100, 7);
        assert_eq!(code(&mut host, &mut queue, sqe), Status::UNRECOVERED_READ);
        // Deallocated blocks stay marked. Blocks written by Write, Write Zeroes or Copy are
        // readable again.
        assert_eq!(
            code(&mut host, &mut queue, blocks(0x01, 11, 0).with_prps(at, 0)),
            Status::SUCCESS
        );
        assert_eq!(reported_ranges(&mut host, atype::UNRECOVERABLE), [(10, 1), (12, 2)]);
        assert_eq!(
            code(&mut host, &mut queue, blocks(0x02, 11, 0).with_prps(at, 0)),
            Status::SUCCESS
        );
        assert_eq!(code(&mut host, &mut queue, blocks(0x08, 0, 10)), Status::SUCCESS);
        assert_eq!(reported_ranges(&mut host, atype::UNRECOVERABLE), [(12, 2)]);
        let sqe = copy(&mut host, 0, 13, 7);
        assert_eq!(code(&mut host, &mut queue, sqe), Status::SUCCESS);
        assert_eq!(reported_ranges(&mut host, atype::UNRECOVERABLE), [(12, 1)]);
        // A failed write changes nothing.
        let nowhere = blocks(0x01, 12, 0).with_prps(8 << 30, 0);
        assert_eq!(code(&mut host, &mut queue, nowhere), Status::DATA_XFER_ERROR);
        assert_eq!(reported_ranges(&mut host, atype::UNRECOVERABLE), [(12, 1)]);
        assert_eq!(
            code(&mut host, &mut queue, blocks(0x01, 12, 0).with_prps(at, 0)),
            Status::SUCCESS
        );
        assert_eq!(
            (reported_ranges(&mut host, atype::UNRECOVERABLE), log(&mut host).0.nlslne),
            (vec![], 0)
        );
        assert_eq!(
            code(&mut host, &mut queue, blocks(0x02, 0, 31).with_prps(at, list)),
            Status::SUCCESS
        );
    }
}

#[test]
fn a_fused_operation_of_a_marked_block_writes_nothing() {
    let mut host = Host::new(&["mem:1MiB"], ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    let at = host.alloc(4096);
    assert_eq!(code(&mut host, &mut queue, mark(3, 0)), Status::SUCCESS);
    let old = queue.tail;
    host.put(&mut queue, &Sqe { flags: 1, cid: 1, ..blocks(0x05, 3, 0) }.with_prps(at, 0));
    host.put(&mut queue, &Sqe { flags: 2, cid: 2, ..blocks(0x01, 3, 0) }.with_prps(at, 0));
    host.ring(&queue, old);
    let both = [host.wait(&mut queue).1.code(), host.wait(&mut queue).1.code()];
    assert_eq!(both, [Status::UNRECOVERED_READ, Status::FUSED_FAILED]);
    assert_eq!(reported_ranges(&mut host, atype::UNRECOVERABLE), [(3, 1)]);
}

#[test]
fn write_uncorrectable_has_a_limit_and_a_quota() {
    let mut host = Host::new(&["mem:16MiB", "mem:1MiB?read-only=on"], ADAPTIVE);
    let cns6 = Identify { cns: 6, ..Identify::default() }.encode(Sqe::new(0x06, 0, 0));
    let page = host.page(cns6).unwrap();
    // WUSL is 7: 512 KiB, or 1024 blocks of 512 bytes.
    assert_eq!(IdentifyNvmController::read_from_bytes(&page).unwrap().wusl, 7);
    let mut queue = host.create(1, 16, false);
    assert_eq!(code(&mut host, &mut queue, mark(0, 1024)), Status::INVALID_FIELD);
    assert_eq!(code(&mut host, &mut queue, mark(32760, 8)), Status::LBA_OUT_OF_RANGE);
    let nsid = |sqe, nsid| Sqe { nsid, ..sqe };
    let protected = code(&mut host, &mut queue, nsid(mark(0, 0), 2));
    assert_eq!(protected, Status::NAMESPACE_WRITE_PROTECTED);
    let none = code(&mut host, &mut queue, nsid(mark(0, 0), 3));
    assert_eq!(none, Status::INVALID_NAMESPACE_OR_FORMAT);
    for n in 0..4 {
        assert_eq!(code(&mut host, &mut queue, mark(n * 2000, 1023)), Status::SUCCESS);
    }
    assert_eq!(code(&mut host, &mut queue, mark(1024, 0)), Status::COMMAND_SIZE_LIMIT_EXCEEDED);
    assert_eq!(code(&mut host, &mut queue, mark(1023, 0)), Status::SUCCESS);
    let at = host.alloc(4096);
    assert_eq!(code(&mut host, &mut queue, blocks(0x01, 0, 0).with_prps(at, 0)), Status::SUCCESS);
    assert_eq!(code(&mut host, &mut queue, mark(1024, 0)), Status::SUCCESS);
    assert_eq!(log(&mut host).0.estulb, 4096);
    // Marks survive a reset: they are part of the disk's state.
    host.disable();
    host.enable();
    assert_eq!(log(&mut host).0.estulb, 4096);
    // The marks of a namespace disappear with its removal.
    let (sent, removed) = std::sync::mpsc::channel();
    host.controller.remove_namespace(1, move |_| sent.send(()).unwrap()).unwrap();
    removed.recv_timeout(common::LIMIT).unwrap();
    assert_eq!(log(&mut host).0.nlslne, 0);
}

/// All I/O threads apply a mark before the Write Uncorrectable command completes.
#[test]
fn all_io_threads_see_a_mark() {
    let options = PoolOptions { workers: 3, polling: ADAPTIVE, pin: Vec::new() };
    let pool = Pool::start(&options).unwrap();
    let controller =
        Controller::new(common::config(&["mem:1MiB"]), pool, Carrier::default()).unwrap();
    let mut host = Host::attach(controller);
    host.enable();
    let mut queues: Vec<Queue> = (1..=3).map(|qid| host.create(qid, 8, false)).collect();
    let at = host.alloc(4096);
    for round in 0..30 {
        let writer = round % 3;
        assert_eq!(code(&mut host, &mut queues[writer], mark(5, 0)), Status::SUCCESS);
        for queue in &mut queues {
            let read = blocks(0x02, 5, 0).with_prps(at, 0);
            assert_eq!(code(&mut host, queue, read), Status::UNRECOVERED_READ);
        }
        let write = blocks(0x01, 4, 1).with_prps(at, 0);
        assert_eq!(code(&mut host, &mut queues[(writer + 1) % 3], write), Status::SUCCESS);
        for queue in &mut queues {
            let read = blocks(0x02, 5, 0).with_prps(at, 0);
            assert_eq!(code(&mut host, queue, read), Status::SUCCESS);
        }
    }
}
