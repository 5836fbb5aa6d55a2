//! The Copy command: results, refused commands, and interruptions.

use crate::{common, held};
use common::{Host, Queue, run_beside, slow_host};
use held::Held;
use proptest::prelude::*;
use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Polling, Pool};
use shadowbell_disk::{Disk, DiskError, DiskInfo, Op, Request, Submitted};
use shadowbell_disk_file::MemDisk;
use shadowbell_memory::Segments;
use shadowbell_spec::admin::GetLogPage;
use shadowbell_spec::feature::HostBehaviorSupport;
use shadowbell_spec::identify::{IDENTIFY_SIZE, IdentifyController, IdentifyNamespace, cns};
use shadowbell_spec::log::{SmartHealth, lid};
use shadowbell_spec::nvm::{CopyFields, CopyRange, LongCopyRange};
use shadowbell_spec::regs::{self, Cc};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::{Sqe, Status};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));
/// Maximum size of one Copy (1 MiB) in blocks of 512 bytes.
const MAX_RANGES: u64 = (1 << 20) / 512;

fn host_with_held_disk(blocks: u64) -> (Host, Held) {
    let held = Held::new(blocks);
    held.mark();
    let disk: Arc<dyn Disk> = Arc::new(held.clone());
    let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
    (Host::with(Config { namespaces, ..Config::default() }, ADAPTIVE), held)
}

/// Encodes the descriptors of these ranges (first block, number of blocks).
fn entries(ranges: &[(u64, u64)]) -> Vec<u8> {
    let entry =
        |(slba, blocks): (u64, u64)| CopyRange { slba, nlb0: (blocks - 1) as u16, ..zero() };
    let entries: Vec<CopyRange> = ranges.iter().copied().map(entry).collect();
    entries.as_bytes().to_vec()
}

fn zero() -> CopyRange {
    CopyRange::default()
}

fn command(host: &mut Host, nsid: u32, to: u64, ranges: &[(u64, u64)]) -> Sqe {
    let at = host.alloc(8192);
    host.poke(at, &entries(ranges));
    let nr0 = (ranges.len() - 1) as u8;
    let fields = CopyFields { sdlba: to, nr0, ..CopyFields::default() };
    Sqe::copy(nsid, fields, 0).with_prps(at, at + 4096)
}

fn copy(host: &mut Host, queue: &mut Queue, to: u64, ranges: &[(u64, u64)]) -> (Status, u32) {
    let sqe = command(host, 1, to, ranges);
    host.run(queue, sqe)
}

/// Expected block numbers after a copy that reads all sources before it writes.
fn model(blocks: &mut [u64], to: u64, ranges: &[(u64, u64)]) {
    let sources = ranges.iter().flat_map(|(first, count)| *first..first + count);
    let copied: Vec<u64> = sources.map(|block| blocks[block as usize]).collect();
    blocks[to as usize..][..copied.len()].copy_from_slice(&copied);
}

#[test]
fn identify_reports_the_copy_limits() {
    let mut host = Host::new(&["mem:8MiB", "mem:8MiB?block-size=4096"], ADAPTIVE);
    let identify = |cns, nsid| {
        let fields = shadowbell_spec::admin::Identify { cns, ..Default::default() };
        Sqe::identify(nsid, fields, 0)
    };
    let page = host.page(identify(cns::CONTROLLER, 0)).unwrap();
    let controller = IdentifyController::read_from_bytes(&page[..IDENTIFY_SIZE]).unwrap();
    assert!(controller.oncs.copy() && !controller.oncs.copy_atomicity());
    assert_eq!(controller.ocfs, 0b1111);
    for (nsid, most) in [(1, 2048), (2, 256)] {
        let page = host.page(identify(cns::NAMESPACE, nsid)).unwrap();
        let namespace = IdentifyNamespace::read_from_bytes(&page[..IDENTIFY_SIZE]).unwrap();
        assert_eq!((namespace.mssrl, namespace.mcl, namespace.msrc), (most, most.into(), 127));
    }
}

#[test]
fn blocks_arrive_in_the_order_of_the_ranges() {
    for uri in ["mem:16MiB", "mem:16MiB?block-size=4096"] {
        let mut host = Host::new(&[uri], ADAPTIVE);
        let mut queue = host.create(1, 64, false);
        let size = if uri.contains("4096") { 4096 } else { 512 };
        let page = host.alloc(65536);
        for block in 0..100u64 {
            host.poke(page, &vec![block as u8 + 1; size]);
            let write = Sqe::write(1, block, 0, 0).with_prps(page, 0);
            assert!(host.run(&mut queue, write).0.is_success());
        }
        let (status, _) = copy(&mut host, &mut queue, 1000, &[(90, 3), (0, 2), (50, 1), (91, 2)]);
        assert_eq!(status, Status::SUCCESS);
        for (block, mark) in [91, 92, 93, 1, 2, 51, 92, 93, 0].into_iter().enumerate() {
            let read = Sqe::read(1, 1000 + block as u64, 0, 0).with_prps(page, 0);
            assert!(host.run(&mut queue, read).0.is_success());
            assert_eq!(host.peek(page, size), vec![mark; size], "block {block}");
        }
        let io = host.controller.stats().io;
        assert_eq!((io.copies, io.bytes_copied), (1, 8 * size as u64));
    }
}

/// NVM Command Set 1.2, 1.4.2.7 to 1.4.2.10: a Copy counts as a host read command and a host write
/// command. Its blocks count as data units written, but not as data units read.
#[test]
fn the_health_log_counts_copies() {
    let mut host = Host::new(&["mem:16MiB"], ADAPTIVE);
    let mut queue = host.create(1, 64, false);
    let page = host.alloc(4096);
    let write = Sqe::write(1, 0, 0, 0).with_prps(page, 0);
    assert!(host.run(&mut queue, write).0.is_success());
    assert_eq!(copy(&mut host, &mut queue, 4096, &[(0, 1000), (1, 1000)]).0, Status::SUCCESS);
    let fields = GetLogPage { lid: lid::SMART_HEALTH, numd0: 127, ..GetLogPage::default() };
    let page = host.page(Sqe::get_log_page(NSID_ALL, fields, 0)).unwrap();
    let health = SmartHealth::read_from_bytes(&page[..512]).unwrap();
    // The unit is 1000 blocks of 512 bytes, rounded up, and 1 + 2000 blocks were written.
    assert_eq!((health.data_units_read.get(), health.data_units_written.get()), (0, 3));
    assert_eq!((health.host_read_commands.get(), health.host_write_commands.get()), (1, 2));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Tests a memory disk, which completes requests at once, and a disk that completes them late
    /// and out of order.
    #[test]
    fn sources_are_read_before_the_destination_is_written(
        late in any::<bool>(),
        copies in prop::collection::vec(
            (0u64..900, prop::collection::vec((0u64..960, 1u64..40), 1..8)), 1..12
        ),
    ) {
        let held = Held::new(4096);
        held.mark();
        let disk: Arc<dyn Disk> = match late {
            true => Arc::new(held.clone()),
            false => Arc::new(held.mem.clone()),
        };
        let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
        let mut host = Host::with(Config { namespaces, ..Config::default() }, ADAPTIVE);
        let mut queue = host.create(1, 16, false);
        let mut blocks: Vec<u64> = (0..4096).collect();
        for (to, ranges) in &copies {
            prop_assert_eq!(copy(&mut host, &mut queue, *to, ranges), (Status::SUCCESS, 0));
            model(&mut blocks, *to, ranges);
            prop_assert!(held.marks(0, 1300) == blocks[..1300]);
        }
    }
}

#[test]
fn a_copy_can_swap_two_blocks() {
    let (mut host, held) = host_with_held_disk(64);
    let mut queue = host.create(1, 16, false);
    assert_eq!(copy(&mut host, &mut queue, 10, &[(11, 1), (10, 1)]), (Status::SUCCESS, 0));
    assert_eq!(held.marks(9, 4), [9, 11, 10, 12]);
}

#[test]
fn copy_limits_are_enforced() {
    let (mut host, held) = host_with_held_disk(4 * MAX_RANGES);
    let mut queue = host.create(1, 16, false);
    let blocks = 4 * MAX_RANGES;
    let most = vec![(5, MAX_RANGES / 128); 128];
    for (to, ranges, expected) in [
        (MAX_RANGES, vec![(0, MAX_RANGES)], Status::SUCCESS),
        (blocks - 1, vec![(blocks - 1, 1)], Status::SUCCESS),
        (MAX_RANGES, most.clone(), Status::SUCCESS),
        (0, vec![(0, MAX_RANGES + 1)], Status::COMMAND_SIZE_LIMIT_EXCEEDED),
        (0, vec![(0, 65536)], Status::COMMAND_SIZE_LIMIT_EXCEEDED),
        (
            0,
            vec![(0, MAX_RANGES / 2), (0, MAX_RANGES / 2 + 1)],
            Status::COMMAND_SIZE_LIMIT_EXCEEDED,
        ),
        (0, vec![(0, 1); 129], Status::COMMAND_SIZE_LIMIT_EXCEEDED),
        (0, vec![(0, 65536); 128], Status::COMMAND_SIZE_LIMIT_EXCEEDED),
        (0, vec![(0, 1); 256], Status::COMMAND_SIZE_LIMIT_EXCEEDED),
        (0, vec![(0, 1), (blocks, 1)], Status::LBA_OUT_OF_RANGE),
        (0, vec![(blocks - 1, 2)], Status::LBA_OUT_OF_RANGE),
        (0, vec![(u64::MAX, 1)], Status::LBA_OUT_OF_RANGE),
        (0, vec![(u64::MAX - 3, 8), (0, 1)], Status::LBA_OUT_OF_RANGE),
        (blocks, vec![(0, 1)], Status::LBA_OUT_OF_RANGE),
        (blocks - 3, vec![(0, 2), (9, 2)], Status::LBA_OUT_OF_RANGE),
        (u64::MAX, vec![(0, 1)], Status::LBA_OUT_OF_RANGE),
    ] {
        let before = held.seen().len();
        let (status, dw0) = copy(&mut host, &mut queue, to, &ranges);
        assert_eq!((status.code(), dw0), (expected, 0), "{to} {ranges:?}");
        if expected != Status::SUCCESS {
            assert!(status.dnr());
            assert_eq!(held.seen().len(), before, "nothing is done");
        }
    }
    let marks = held.marks(MAX_RANGES, MAX_RANGES);
    assert_eq!(marks[..18], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 5, 6]);
}

#[test]
fn every_invalid_copy_has_its_status() {
    let mut host = Host::new(&["mem:8MiB"], ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    let good = command(&mut host, 1, 100, &[(0, 1)]);
    let format = |desfmt| CopyFields { desfmt, ..CopyFields::decode(&good) }.encode(good);
    for (sqe, expected) in [
        (format(2), Status::INVALID_FIELD),
        (format(3), Status::INVALID_FIELD),
        (format(4), Status::INVALID_FIELD),
        (format(15), Status::INVALID_FIELD),
        // Copy cannot be fused.
        (Sqe { flags: 1, ..good }, Status::FUSED_MISSING),
        (Sqe { flags: 0xc0, ..good }, Status::INVALID_FIELD),
        (Sqe { nsid: 0, ..good }, Status::INVALID_NAMESPACE_OR_FORMAT),
        (Sqe { nsid: 2, ..good }, Status::INVALID_NAMESPACE_OR_FORMAT),
        (Sqe { nsid: NSID_ALL, ..good }, Status::INVALID_NAMESPACE_OR_FORMAT),
        (good.with_prps(0, 0), Status::DATA_XFER_ERROR),
        (good.with_prps(good.prp1() + 1, 0), Status::PRP_OFFSET_INVALID),
        (good, Status::SUCCESS),
    ] {
        assert_eq!(host.run(&mut queue, sqe).0.code(), expected, "{sqe:?}");
    }
    let disk = shadowbell_disk_file::open("mem:1MiB?read-only=on").unwrap();
    let namespaces = vec![NamespaceConfig { disk, uuid: [1; 16] }];
    let mut host = Host::with(Config { namespaces, ..Config::default() }, ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    for (to, expected) in [(9, Status::NAMESPACE_WRITE_PROTECTED), (2048, Status::LBA_OUT_OF_RANGE)]
    {
        assert_eq!(copy(&mut host, &mut queue, to, &[(0, 1)]).0.code(), expected);
    }
}

#[test]
fn random_descriptors_never_stop_the_queue() {
    use proptest::strategy::ValueTree;
    use proptest::test_runner::TestRunner;
    let (mut host, _held) = host_with_held_disk(4096);
    let mut queue = host.create(1, 16, false);
    let at = host.alloc(8192);
    let mut runner = TestRunner::deterministic();
    let bytes = proptest::collection::vec(any::<u8>(), 8192);
    let mut copied = 0;
    for round in 0..500u64 {
        let mut bytes = bytes.new_tree(&mut runner).unwrap().current();
        for entry in bytes.chunks_exact_mut(32).take(if round % 2 == 0 { 256 } else { 0 }) {
            entry[10..16].fill(0);
            entry[9] &= 0xf;
            entry[17] = 0;
        }
        host.poke(at, &bytes);
        let nr0 = if round % 4 == 0 { (round / 4 % 6) as u8 } else { bytes[0] };
        let fields = CopyFields { sdlba: round, nr0, ..CopyFields::default() };
        let sqe = Sqe::copy(1, fields, 0).with_prps(at, at + 4096);
        copied += u32::from(host.run(&mut queue, sqe).0.is_success());
    }
    assert!(copied > 20, "{copied}");
}

#[test]
fn fua_of_a_copy_applies_to_the_destination() {
    let (mut host, held) = host_with_held_disk(64);
    let mut queue = host.create(1, 16, false);
    for fua in [false, true] {
        let sqe = command(&mut host, 1, 30, &[(0, 2), (8, 1)]);
        let sqe = if fua { sqe.with_fua() } else { sqe };
        assert!(host.run(&mut queue, sqe).0.is_success());
        let seen = held.seen();
        let request =
            |op, block: u64, blocks: u64| Request { op, offset: block * 512, len: blocks * 512 };
        let write = Op::Write { fua };
        let expected = [
            request(Op::Read, 0, 2),
            request(Op::Read, 8, 1),
            request(write, 30, 2),
            request(write, 32, 1),
        ];
        assert_eq!(seen[seen.len() - 4..], expected);
    }
}

#[test]
fn a_failed_copy_reports_its_range() {
    let (mut host, held) = host_with_held_disk(256);
    let mut queue = host.create(1, 16, false);
    let ranges = [(0, 4), (10, 4), (20, 4), (30, 4)];
    // If a source cannot be read, nothing is written.
    held.instruct(|instructions| instructions.fail_at = Some(20 * 512));
    let (status, dw0) = copy(&mut host, &mut queue, 100, &ranges);
    assert_eq!((status.code(), dw0), (Status::UNRECOVERED_READ, 0));
    assert!(held.seen().iter().all(|request| request.op == Op::Read));
    assert_eq!(held.marks(100, 16), (100..116).collect::<Vec<_>>());
    // If a write to the destination fails, dword 0 of the completion contains the index of the
    // source range whose data was being written.
    for (range, block) in [(0, 100), (2, 108), (3, 112)] {
        held.instruct(|instructions| instructions.fail_at = Some(block * 512));
        let (status, dw0) = copy(&mut host, &mut queue, 100, &ranges);
        assert_eq!((status.code(), dw0), (Status::WRITE_FAULT, range));
    }
    let io = host.controller.stats().io;
    assert_eq!((io.errors, io.media_errors, io.copies), (4, 4, 0));
    held.instruct(|instructions| instructions.fail_at = None);
    assert_eq!(copy(&mut host, &mut queue, 100, &ranges), (Status::SUCCESS, 0));
}

#[test]
fn inline_errors_of_a_copy_report_the_range() {
    /// Memory disk that fails writes at block 101.
    #[derive(Debug)]
    struct FailingDisk(MemDisk);
    struct FailingQueue(Box<dyn shadowbell_disk::Queue>);
    impl Disk for FailingDisk {
        fn info(&self) -> DiskInfo {
            self.0.info()
        }
        fn queue(&self) -> std::io::Result<Box<dyn shadowbell_disk::Queue>> {
            Ok(Box::new(FailingQueue(self.0.queue()?)))
        }
        fn name(&self) -> String {
            "worn".into()
        }
    }
    impl shadowbell_disk::Queue for FailingQueue {
        fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
            if request.op != Op::Read && request.offset == 101 * 512 {
                return Submitted::Done(Err(DiskError::NoSpace));
            }
            self.0.submit(tag, request, data)
        }
    }
    let disk: Arc<dyn Disk> = Arc::new(FailingDisk(MemDisk::new(256, 512).unwrap()));
    let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
    let mut host = Host::with(Config { namespaces, ..Config::default() }, ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    let (status, dw0) = copy(&mut host, &mut queue, 100, &[(0, 1), (1, 1), (2, 1)]);
    assert_eq!((status.code(), dw0), (Status::CAPACITY_EXCEEDED, 1));
}

/// Test with more copies than buffers, and with reads among them.
#[test]
fn copies_share_buffers_and_delay_no_other_command() {
    for polling in [Polling::Never, ADAPTIVE, Polling::Always] {
        let held = Held::new(65536);
        held.mark();
        let disks: [Arc<dyn Disk>; 2] =
            [Arc::new(held.clone()), shadowbell_disk_file::open("mem:64MiB").unwrap()];
        let named = disks.into_iter().zip(1..);
        let namespaces =
            named.map(|(disk, n)| NamespaceConfig { disk, uuid: [n; 16] }).collect::<Vec<_>>();
        let mut host = Host::with(Config { namespaces, ..Config::default() }, polling);
        let mut queue = host.create(1, 256, false);
        let page = host.alloc(4096);
        held.instruct(|instructions| instructions.hold = true);
        // 60 copies, alternately on the two disks. The controller has fewer copy buffers.
        for cid in 0..60u16 {
            let to = 32768 + u64::from(cid) * 16;
            let sqe = command(&mut host, 1 + u32::from(cid % 2), to, &[(u64::from(cid), 16)]);
            host.submit(&mut queue, &sqe.with_cid(cid));
        }
        host.submit(&mut queue, &Sqe::read(2, 0, 7, 200).with_prps(page, 0));
        let mut done: Vec<u16> = Vec::new();
        // Copies of the second disk wait for buffers that copies of the first disk hold. Reads do
        // not wait.
        while !done.contains(&200) {
            let (cid, status, _) = host.wait(&mut queue);
            assert!(status.is_success());
            done.push(cid);
        }
        assert!(held.seen().len() <= 4, "{}", held.seen().len());
        held.instruct(|instructions| instructions.hold = false);
        while done.len() < 61 {
            let (cid, status, _) = host.wait(&mut queue);
            assert!(status.is_success());
            done.push(cid);
        }
        done.sort_unstable();
        assert!(done.iter().copied().eq((0..60).chain([200])));
        for cid in (0..60u64).step_by(2) {
            assert_eq!(held.marks(32768 + cid * 16, 16), (cid..cid + 16).collect::<Vec<_>>());
        }
        let io = host.controller.stats().io;
        assert_eq!((io.copies, io.bytes_copied), (60, 60 * 16 * 512));
    }
}

#[test]
fn long_copies_from_memory_yield_to_other_commands() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let config = common::config(&["mem:64MiB"]);
    let controller = Controller::new(config, pool, Carrier::default()).unwrap();
    // The host runs on another thread, because it blocks until its queues are created. This thread
    // acts as the I/O thread, which creates them.
    let host = std::thread::spawn(move || {
        let mut host = Host::attach(controller);
        host.enable();
        let queues = (host.create(1, 64, false), host.create(2, 16, false));
        (host, queues)
    });
    while !host.is_finished() {
        turns.turn();
    }
    let (mut host, (mut copying, mut reading)) = host.join().unwrap();
    while turns.turn() {}
    let page = host.alloc(4096);
    let sqe = command(&mut host, 1, 65536, &[(0, MAX_RANGES)]);
    for cid in 0..8 {
        host.put(&mut copying, &sqe.with_cid(cid));
    }
    host.ring(&copying, 0);
    assert!(turns.turn());
    // Each copy needs two turns of the I/O thread: one to read, and one to write.
    for cid in 0..16 {
        host.submit(&mut reading, &Sqe::read(1, 0, 7, cid).with_prps(page, 0));
        assert!(!turns.sleep(), "there is something to do");
        assert!(turns.turn());
        assert_eq!(host.reap(&mut reading).map(|done| done.0), Some(cid), "in the same turn");
        // The copies complete in order. In two turns, at most one copy completes.
        assert!(host.reap(&mut copying).is_none_or(|done| done.0 <= cid / 2));
    }
    while turns.turn() {}
    while host.reap(&mut copying).is_some() {}
    assert_eq!(copying.head, 8);
}

/// The number of requests of a copy that are in flight at a disk is limited, even if the guest's
/// command has many ranges.
#[test]
fn a_copy_has_few_requests_in_flight() {
    let held = Held::new(1024);
    held.mark();
    let disk: Arc<dyn Disk> = Arc::new(held.clone());
    let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
    let config = Config { namespaces, ..Config::default() };
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let controller = Controller::new(config, pool, Carrier::default()).unwrap();
    let (mut host, mut queue) = run_beside(&mut turns, move || {
        let mut host = Host::attach(controller);
        host.enable();
        let queue = host.create(1, 64, false);
        (host, queue)
    });
    held.instruct(|instructions| instructions.hold = true);
    let ranges: Vec<_> = (0..100).map(|n| (n, 1)).collect();
    for cid in 0..4 {
        let sqe = command(&mut host, 1, 512, &ranges);
        host.put(&mut queue, &sqe.with_cid(cid));
    }
    host.ring(&queue, 0);
    while turns.turn() {}
    assert_eq!(held.seen().len(), 32);
    held.instruct(|instructions| instructions.hold = false);
    let mut done = 0;
    for _ in 0..1000 {
        turns.turn();
        while let Some((_, status, _)) = host.reap(&mut queue) {
            assert_eq!(status, Status::SUCCESS);
            done += 1;
        }
    }
    assert_eq!(done, 4);
    assert_eq!(held.marks(512, 100), (0..100).collect::<Vec<_>>());
}

#[test]
fn an_abort_stops_a_copy() {
    let (mut host, held) = host_with_held_disk(256);
    let mut queue = host.create(1, 16, false);
    held.instruct(|instructions| instructions.hold = true);
    for cid in 0..6 {
        let sqe = command(&mut host, 1, 100 + u64::from(cid) * 10, &[(0, 2), (4, 2)]);
        host.submit(&mut queue, &sqe.with_cid(cid));
    }
    host.until("the reads of four", || held.seen().len() == 8);
    let abort = |cid| Sqe::abort(shadowbell_spec::admin::Abort { sqid: 1, cid }, 0);
    // A copy that waits for a buffer ends at once when it is aborted.
    assert_eq!(host.must(abort(5)) & 1, 0, "aborted");
    let (cid, status, dw0) = host.wait(&mut queue);
    assert_eq!((cid, status.code(), dw0), (5, Status::ABORT_REQUESTED, 0));
    // A copy whose sources are being read ends after these reads.
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    host.submit(&mut admin, &abort(1).with_cid(70));
    host.until("the reads of the others", || {
        held.instruct(|instructions| instructions.hold = false);
        held.instruct(|instructions| instructions.hold = instructions.seen.len() >= 10);
        held.seen().len() >= 10
    });
    held.instruct(|instructions| instructions.hold = false);
    let mut ended = std::collections::BTreeMap::new();
    while ended.len() < 5 {
        let (cid, status, _) = host.wait(&mut queue);
        ended.insert(cid, status.code());
    }
    let aborted = host.wait(&mut admin).2 & 1 == 0;
    assert_eq!(ended[&1] == Status::ABORT_REQUESTED, aborted);
    if aborted {
        assert_eq!(held.marks(110, 4), [110, 111, 112, 113], "not written");
    }
    for cid in [0, 2, 3, 4] {
        assert_eq!(ended[&cid], Status::SUCCESS);
        assert_eq!(held.marks(100 + u64::from(cid) * 10, 4), [0, 1, 4, 5]);
    }
    assert_eq!(host.reap(&mut queue), None, "each command completes once");
}

#[test]
fn a_copy_aborted_by_the_disk_reports_its_range() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    let sqe = command(&mut host, 1, 100, &[(0, 1), (1, 1), (2, 1)]);
    host.submit(&mut queue, &sqe.with_cid(9));
    host.until("the reads", || gate.waiting() == 3);
    (0..3).for_each(|_| gate.end(Ok(())));
    host.until("the writes", || gate.waiting() == 3 && gate.release.lock().unwrap().is_empty());
    gate.end(Ok(()));
    host.until("the first write", || gate.waiting() == 2);
    gate.heed_cancel.store(true, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(host.must(Sqe::abort(shadowbell_spec::admin::Abort { sqid: 1, cid: 9 }, 0)) & 1, 0);
    let (cid, status, dw0) = host.wait(&mut queue);
    assert_eq!((cid, status.code(), dw0), (9, Status::ABORT_REQUESTED, 1));
}

#[test]
fn a_copy_writes_nothing_after_a_reset() {
    let (mut host, held) = host_with_held_disk(4096);
    let mut queue = host.create(1, 64, false);
    held.instruct(|instructions| instructions.hold = true);
    for cid in 0..20 {
        let sqe = command(&mut host, 1, 2000 + u64::from(cid) * 32, &[(0, 16), (64, 16)]);
        host.submit(&mut queue, &sqe.with_cid(cid));
    }
    host.until("the reads of four", || held.seen().len() == 8);
    let cc = Cc::from_bits(host.read32(regs::CC));
    host.write32(regs::CC, cc.with_en(false).into_bits());
    host.until("the reset to be noticed", || held.cancelled() > 0);
    assert!(host.csts().rdy(), "the disk still reads");
    held.instruct(|instructions| instructions.hold = false);
    host.until("the end of the reset", || !host.csts().rdy());
    assert_eq!(held.seen().len(), 8, "no stride was begun");
    assert_eq!(held.marks(2000, 1000), (2000..3000).collect::<Vec<_>>());
    assert!(host.peek(queue.cq, 256).iter().all(|b| *b == 0), "no completion");
    // After the reset all buffers are free again.
    host.enable();
    let mut queue = host.create(1, 64, false);
    for cid in 0..20u64 {
        let to = 2000 + cid * 32;
        assert_eq!(copy(&mut host, &mut queue, to, &[(0, 16), (64, 16)]), (Status::SUCCESS, 0));
    }
}

#[test]
fn deleting_a_queue_ends_its_copies() {
    let (mut host, held) = host_with_held_disk(4096);
    let (mut queue, mut other) = (host.create(1, 64, false), host.create(2, 64, false));
    held.instruct(|instructions| instructions.hold = true);
    for cid in 0..8 {
        let sqe = command(&mut host, 1, 2000 + u64::from(cid) * 32, &[(0, 16)]);
        host.submit(&mut queue, &sqe.with_cid(cid));
        let sqe = command(&mut host, 1, 3000 + u64::from(cid) * 32, &[(0, 16)]);
        host.submit(&mut other, &sqe.with_cid(cid));
    }
    host.until("the reads of four", || held.seen().len() == 4);
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    host.submit(&mut admin, &Sqe::delete_io_sq(1, 5));
    host.until("the deletion to be noticed", || held.cancelled() > 0);
    assert_eq!(host.reap(&mut admin), None, "the deletion waits for reads in flight");
    held.instruct(|instructions| instructions.hold = false);
    assert_eq!(host.wait(&mut admin).1, Status::SUCCESS);
    let mut ended = 0;
    while let Some((_, status, _)) = host.reap(&mut queue) {
        assert_eq!(status.code(), Status::ABORTED_SQ_DELETION);
        ended += 1;
    }
    assert!(ended <= 8);
    assert_eq!(held.marks(2000, 256), (2000..2256).collect::<Vec<_>>(), "nothing was written");
    for _ in 0..8 {
        assert!(host.wait(&mut other).1.is_success());
    }
    for cid in 0..8 {
        assert_eq!(held.marks(3000 + cid * 32, 16), (0..16).collect::<Vec<_>>());
    }
}

/// Enables these copy descriptor formats by Set Features, Host Behavior Support.
fn enable_formats(host: &mut Host, cdfe: u16) {
    let at = host.alloc(4096);
    host.poke(at, HostBehaviorSupport { cdfe, ..HostBehaviorSupport::default() }.as_bytes());
    host.must(Sqe { cdw10: 0x16, ..Sqe::new(0x09, 0, 0).with_prps(at, 0) });
}

/// Builds a Copy to namespace 1 from these ranges (namespace, first block, number of blocks).
fn copy_between(host: &mut Host, format: u8, to: u64, ranges: &[(u32, u64, u64)]) -> Sqe {
    let at = host.alloc(8192);
    let short = |(snsid, slba, blocks): (u32, u64, u64)| {
        let nlb0 = (blocks - 1) as u16;
        // SOPT bit 15: fast copies only. They are always possible.
        CopyRange { snsid, slba, nlb0, sopt: 1 << 15, ..zero() }
    };
    let long = |(snsid, slba, blocks): (u32, u64, u64)| {
        let nlb0 = (blocks - 1) as u16;
        LongCopyRange { snsid, slba, nlb0, elbt: [0xa5; 10], ..LongCopyRange::default() }
    };
    let entries = match format {
        0 | 2 => ranges.iter().copied().map(short).collect::<Vec<_>>().as_bytes().to_vec(),
        _ => ranges.iter().copied().map(long).collect::<Vec<_>>().as_bytes().to_vec(),
    };
    host.poke(at, &entries);
    let nr0 = (ranges.len() - 1) as u8;
    let fields = CopyFields { sdlba: to, nr0, desfmt: format, ..CopyFields::default() };
    Sqe::copy(1, fields, 0).with_prps(at, at + 4096)
}

/// Fills each of `blocks` blocks of a namespace with the namespace's and its own number.
fn mark(host: &mut Host, queue: &mut Queue, nsid: u32, blocks: u64) {
    let page = host.alloc(4096);
    for block in 0..blocks {
        host.poke(page, &[[nsid as u8, block as u8]; 256].concat());
        let write = Sqe::write(nsid, block, 0, 0).with_prps(page, 0);
        assert!(host.run(queue, write).0.is_success());
    }
}

#[test]
fn a_copy_reads_from_other_namespaces() {
    let mut host = Host::new(&["mem:8MiB", "mem:4MiB", "mem:4MiB"], ADAPTIVE);
    let mut queue = host.create(1, 64, false);
    (1..=3).for_each(|nsid| mark(&mut host, &mut queue, nsid, 100));
    let ranges = [(2, 90, 3), (1, 7, 2), (3, 0, 1), (2, 90, 1)];
    let expected = [(2, 90), (2, 91), (2, 92), (1, 7), (1, 8), (3, 0), (2, 90)];
    enable_formats(&mut host, 1 << 2 | 1 << 3);
    for (format, to) in [(2, 1000), (3, 2000)] {
        let sqe = copy_between(&mut host, format, to, &ranges);
        assert_eq!(host.run(&mut queue, sqe), (Status::SUCCESS, 0));
        let page = host.alloc(4096);
        for (at, (nsid, block)) in (to..).zip(expected) {
            let read = Sqe::read(1, at, 0, 0).with_prps(page, 0);
            assert!(host.run(&mut queue, read).0.is_success());
            assert_eq!(host.peek(page, 512), [[nsid, block]; 256].concat(), "{format} {at}");
        }
    }
    // In descriptor formats 0h and 1h, the NSID is ignored: source and destination are in the same
    // namespace.
    let sqe = copy_between(&mut host, 1, 3000, &[(2, 5, 1)]);
    assert_eq!(host.run(&mut queue, sqe), (Status::SUCCESS, 0));
    let page = host.alloc(4096);
    assert!(host.run(&mut queue, Sqe::read(1, 3000, 0, 0).with_prps(page, 0)).0.is_success());
    assert_eq!(host.peek(page, 2), [1, 5]);
}

#[test]
fn a_bad_source_namespace_has_its_status() {
    let disks = ["mem:8MiB", "mem:4MiB", "mem:4MiB?block-size=4096", "mem:1MiB"];
    let mut host = Host::new(&disks, ADAPTIVE);
    let mut queue = host.create(1, 64, false);
    let sqe = copy_between(&mut host, 2, 100, &[(2, 0, 1)]);
    assert_eq!(
        host.run(&mut queue, sqe).0.code(),
        Status::INVALID_FIELD,
        "format 2h is not enabled"
    );
    enable_formats(&mut host, 1 << 2);
    let sqe = copy_between(&mut host, 3, 100, &[(2, 0, 1)]);
    assert_eq!(
        host.run(&mut queue, sqe).0.code(),
        Status::INVALID_FIELD,
        "format 3h is not enabled"
    );
    host.controller.remove_namespace(4, |_| {}).unwrap();
    host.until("no namespace 4", || host.controller.namespaces().len() == 3);
    for (ranges, expected) in [
        (vec![(2, 0, 1), (0, 0, 1)], Status::INVALID_NAMESPACE_OR_FORMAT),
        (vec![(5, 0, 1)], Status::INVALID_NAMESPACE_OR_FORMAT),
        (vec![(NSID_ALL, 0, 1)], Status::INVALID_NAMESPACE_OR_FORMAT),
        (vec![(4, 0, 1)], Status::INVALID_FIELD),
        (vec![(3, 0, 1)], Status::INCOMPATIBLE_NAMESPACE_OR_FORMAT),
        (vec![(2, 8191, 2)], Status::LBA_OUT_OF_RANGE),
        (vec![(2, 0, 1), (1, 100, 1)], Status::OVERLAPPING_IO_RANGE),
        (vec![(2, 0, 1), (1, 98, 3)], Status::OVERLAPPING_IO_RANGE),
        (vec![(2, 0, 1), (1, 102, 1)], Status::SUCCESS),
        (vec![(2, 100, 1)], Status::SUCCESS),
    ] {
        let sqe = copy_between(&mut host, 2, 100, &ranges);
        assert_eq!(host.run(&mut queue, sqe).0.code(), expected, "{ranges:?}");
    }
    // A reset disables the additional descriptor formats.
    host.disable();
    host.enable();
    let mut queue = host.create(1, 64, false);
    let sqe = copy_between(&mut host, 2, 100, &[(2, 0, 1)]);
    assert_eq!(host.run(&mut queue, sqe).0.code(), Status::INVALID_FIELD);
}

/// The source namespace of a copy is removed while the copy reads it. The copy ends with an error.
#[test]
fn a_copy_ends_with_its_source_namespace() {
    let held = Held::new(1024);
    held.mark();
    let source: Arc<dyn Disk> = Arc::new(held.clone());
    let to = shadowbell_disk_file::open("mem:1MiB").unwrap();
    let namespaces = vec![
        NamespaceConfig { disk: to, uuid: [1; 16] },
        NamespaceConfig { disk: source, uuid: [2; 16] },
    ];
    let mut host = Host::with(Config { namespaces, ..Config::default() }, ADAPTIVE);
    let mut queue = host.create(1, 64, false);
    enable_formats(&mut host, 1 << 2);
    let sqe = copy_between(&mut host, 2, 100, &[(2, 0, 1), (2, 5, 1)]);
    held.instruct(|instructions| instructions.hold = true);
    host.submit(&mut queue, &sqe);
    host.until("the reads", || held.seen().len() == 2);
    host.controller.remove_namespace(2, |_| {}).unwrap();
    host.until("the end of them", || held.cancelled() > 0);
    held.instruct(|instructions| instructions.hold = false);
    let (_, status, _) = host.wait(&mut queue);
    assert_eq!(status.code(), Status::INVALID_FIELD, "the namespace is inactive");
}
