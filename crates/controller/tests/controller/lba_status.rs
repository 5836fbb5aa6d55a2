//! Get LBA Status: reported allocated blocks, and limits of the command.

use crate::common;
use common::{BASE, Host, MEMORY, Queue, config};
use proptest::prelude::*;
use shadowbell_controller::config::uuid_from;
use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Polling, Pool};
use shadowbell_disk::{Disk, DiskInfo, Extent, ReportExtent};
use shadowbell_disk_file::{MemDisk, NullDisk};
use shadowbell_disk_layers::{LimitedDisk, Limiter, Limits};
use shadowbell_memory::Mapping;
use shadowbell_spec::admin::{GetLbaStatus, Identify};
use shadowbell_spec::identify::{IdentifyController, IdentifyNvmController, cns};
use shadowbell_spec::lba_status::{LbaStatusDescriptor, LbaStatusList, atype};
use shadowbell_spec::log::{CommandsSupportedEffects, lid};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::{Sqe, Status};
use shadowbell_testing::wait;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;
use zerocopy::FromBytes;

const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));
const FIELD: Status = Status::INVALID_FIELD.with_dnr();
const INVALID: Status = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
const OUTSIDE: Status = Status::LBA_OUT_OF_RANGE.with_dnr();

/// Ranges of allocated blocks: first block, and the first block after the range.
type Found = Vec<(u64, u64)>;

/// Control of an [`ExtentDisk`] by the test, and a record of the calls of the disk.
#[derive(Debug, Default)]
struct Gate {
    stalls: Mutex<bool>,
    continues: Condvar,
    /// True while a call is in progress.
    inside: AtomicBool,
    reported: AtomicU64,
}

impl Gate {
    fn stall(&self, stall: bool) {
        *self.stalls.lock().unwrap() = stall;
        self.continues.notify_all();
    }

    fn is_inside(&self) -> bool {
        self.inside.load(Ordering::SeqCst)
    }
}

/// Disk whose extents do not depend on its data: a function defines them.
#[derive(Clone, Debug)]
struct ExtentDisk {
    inner: MemDisk,
    extent: fn(u64) -> Extent,
    gate: Arc<Gate>,
}

impl ExtentDisk {
    /// Creates a disk for which `extent` returns the extent at a byte offset.
    fn new(blocks: u64, extent: fn(u64) -> Extent) -> Self {
        let inner = MemDisk::new(blocks, 512).unwrap();
        Self { inner, extent, gate: Arc::default() }
    }
}

impl Disk for ExtentDisk {
    fn info(&self) -> DiskInfo {
        self.inner.info()
    }

    fn queue(&self) -> std::io::Result<Box<dyn shadowbell_disk::Queue>> {
        self.inner.queue()
    }

    fn name(&self) -> String {
        "patchy".into()
    }

    fn extents(&self, offset: u64, len: u64, tell: &mut ReportExtent<'_>) {
        self.gate.inside.store(true, Ordering::SeqCst);
        let mut stalls = self.gate.stalls.lock().unwrap();
        while *stalls {
            stalls = self.gate.continues.wait(stalls).unwrap();
        }
        drop(stalls);
        let mut at = offset;
        while at < offset + len {
            let extent = (self.extent)(at);
            self.gate.reported.fetch_add(1, Ordering::SeqCst);
            at += extent.len;
            if !tell(extent) {
                break;
            }
        }
        self.gate.inside.store(false, Ordering::SeqCst);
    }
}

fn over(disks: Vec<Arc<dyn Disk>>) -> Config {
    let numbered = disks.into_iter().enumerate();
    let namespaces = numbered
        .map(|(n, disk)| NamespaceConfig { disk, uuid: uuid_from(&format!("lba-{n}")) })
        .collect();
    Config { namespaces, ..Config::default() }
}

fn host(disk: impl Disk + 'static) -> Host {
    Host::with(over(vec![Arc::new(disk)]), ADAPTIVE)
}

fn query(slba: u64, rl: u16, bytes: u32) -> GetLbaStatus {
    GetLbaStatus { slba, mndw0: bytes / 4 - 1, rl, atype: atype::ALLOCATED }
}

fn parse(page: &[u8]) -> (u8, Found) {
    let (list, mut rest) = LbaStatusList::read_from_prefix(page).unwrap();
    let mut found = Vec::new();
    for _ in 0..list.nlsd {
        let (entry, after) = LbaStatusDescriptor::read_from_prefix(rest).unwrap();
        assert_eq!((entry.status, entry.reserved12, entry.reserved14), (0, 0, [0; 2]));
        found.push((entry.dslba, entry.dslba + u64::from(entry.nlb0) + 1));
        rest = after;
    }
    let ordered = found.windows(2).all(|two| two[0].1 <= two[1].0);
    assert!(ordered && found.iter().all(|one| one.0 < one.1), "{found:?}");
    (list.cmpc, found)
}

fn status(host: &mut Host, nsid: u32, fields: GetLbaStatus) -> Result<(u8, Found), Status> {
    host.page(Sqe::get_lba_status(nsid, fields, 0)).map(|page| parse(&page))
}

/// Extents of 64 KiB: data and holes alternate.
fn alternating(at: u64) -> Extent {
    let len = (64 << 10) - at % (64 << 10);
    Extent { len, allocated: (at >> 16).is_multiple_of(2) }
}

#[test]
fn identify_reports_get_lba_status() {
    let mut host = Host::new(&["mem:1MiB"], ADAPTIVE);
    let fields = |cns| Identify { cns, ..Identify::default() };
    let page = host.page(Sqe::identify(0, fields(cns::CONTROLLER), 0)).unwrap();
    assert!(IdentifyController::read_from_bytes(&page).unwrap().oacs.get_lba_status());
    let page = host.page(Sqe::identify(0, fields(cns::CSI_CONTROLLER), 0)).unwrap();
    let identity = IdentifyNvmController::read_from_bytes(&page).unwrap();
    assert_eq!(identity.aocs, IdentifyNvmController::REPORTS_ALLOCATED);
    let page = shadowbell_controller::OutOfBandCommand::LogPage(lid::COMMANDS_SUPPORTED_EFFECTS);
    let page = host.controller.out_of_band(page).unwrap();
    let effects = CommandsSupportedEffects::read_from_bytes(&page).unwrap();
    assert!(effects.admin[0x86].csupp() && !effects.admin[0x86].lbcc());
}

#[test]
fn allocated_blocks_are_listed_as_far_as_there_is_room() {
    // 64 extents of 128 blocks.
    let mut host = host(ExtentDisk::new(64 * 128, alternating));
    let all: Found = (0..32).map(|n| (n * 256, n * 256 + 128)).collect();
    let complete = LbaStatusList::COMPLETE;
    assert_eq!(status(&mut host, 1, query(0, 0, 4096)), Ok((complete, all.clone())));
    // Ranges that begin or end within an extent.
    let some = vec![(100, 128), (256, 260)];
    assert_eq!(status(&mut host, 1, query(100, 160, 4096)), Ok((complete, some)));
    assert_eq!(status(&mut host, 1, query(130, 100, 4096)), Ok((complete, vec![])));
    assert_eq!(status(&mut host, 1, query(64 * 128 - 1, 1, 4096)), Ok((complete, vec![])));
    // Too short buffers: for only the header, for the header and a part of a descriptor, and for
    // some of the descriptors.
    for (bytes, count) in [(8, 0), (12, 0), (20, 0), (24, 1), (36, 1), (40, 2), (8 + 31 * 16, 31)] {
        let some = all[..count].to_vec();
        let expected = Ok((LbaStatusList::INCOMPLETE, some));
        assert_eq!(status(&mut host, 1, query(0, 0, bytes)), expected, "{bytes}");
    }
    assert_eq!(status(&mut host, 1, query(0, 0, 8 + 32 * 16)), Ok((complete, all)));
    assert_eq!(status(&mut host, 1, query(128, 128, 8)), Ok((complete, vec![])));
    // The command permits 8 KiB, but the list fits in the first page. So the controller must not
    // access the second PRP.
    let at = host.alloc(4096);
    let sqe = Sqe::get_lba_status(1, query(0, 0, 8192), 0).with_prps(at, at + 4096);
    let (ended, _) = host.admin(sqe);
    assert!(ended.is_success());
}

#[test]
fn get_lba_status_writes_only_its_buffer() {
    let mut host = host(ExtentDisk::new(64 * 128, alternating));
    let at = host.alloc(4096);
    host.memory.fill((at - BASE) as usize, 4096, 0xee).unwrap();
    let (ended, _) = host.admin(Sqe::get_lba_status(1, query(0, 0, 40), 0).with_prps(at + 512, 0));
    assert!(ended.is_success());
    let bytes = host.peek(at, 4096);
    assert!(bytes[..512].iter().chain(&bytes[552..]).all(|byte| *byte == 0xee));
    assert_eq!(parse(&bytes[512..]).1.len(), 2);
}

#[test]
fn invalid_get_lba_status_fields_are_refused() {
    let disks: Vec<Arc<dyn Disk>> =
        (0..3).map(|_| -> Arc<dyn Disk> { Arc::new(MemDisk::new(2048, 512).unwrap()) }).collect();
    let mut host = Host::with(over(disks), ADAPTIVE);
    host.controller.remove_namespace(2, |outcome| outcome.unwrap()).unwrap();
    let until = std::time::Instant::now() + common::LIMIT;
    while status(&mut host, 2, query(0, 0, 4096)) != Err(FIELD) {
        assert!(std::time::Instant::now() < until);
    }
    for nsid in [0, 4, NSID_ALL - 1, NSID_ALL] {
        assert_eq!(status(&mut host, nsid, query(0, 0, 4096)), Err(INVALID), "{nsid}");
    }
    for (slba, rl) in [(2048, 0), (2048, 1), (2047, 2), (0, 2049), (u64::MAX, 0), (u64::MAX, 1)] {
        assert_eq!(status(&mut host, 1, query(slba, rl, 4096)), Err(OUTSIDE), "{slba} {rl}");
    }
    for atype in [0, 1, 3, 0x0f, 0x12, 0xff] {
        let fields = GetLbaStatus { atype, ..query(0, 0, 4096) };
        assert_eq!(status(&mut host, 1, fields), Err(FIELD), "{atype}");
    }
    // A buffer too short for the header, and transfers longer than permitted.
    for mndw0 in [0, (1 << 20) - 1, u32::MAX] {
        let fields = GetLbaStatus { mndw0, ..query(0, 0, 4096) };
        assert_eq!(status(&mut host, 1, fields), Err(FIELD), "{mndw0}");
    }
    // The disk reports no unrecoverable blocks.
    for atype in [atype::SCAN_UNRECOVERABLE, atype::UNRECOVERABLE] {
        let fields = GetLbaStatus { atype, ..query(0, 0, 4096) };
        assert_eq!(status(&mut host, 1, fields), Ok((LbaStatusList::COMPLETE, vec![])));
    }
    // Invalid PRPs: outside of the guest's memory, not aligned to a dword, and an invalid PRP list.
    let at = host.alloc(4096);
    let ok = host.alloc(4096);
    for (prp1, prp2, bytes) in
        [(BASE + MEMORY, 0, 4096), (0, 0, 4096), (at + 1, 0, 512), (at, !4095, 65536)]
    {
        let sqe = Sqe::get_lba_status(1, query(0, 0, bytes), 0).with_prps(prp1, prp2);
        assert!(!host.admin(sqe).0.is_success(), "{prp1:#x}");
        let sqe = Sqe::get_lba_status(1, query(0, 0, 4096), 0).with_prps(ok, 0);
        assert!(host.admin(sqe).0.is_success());
    }
}

/// Holes of 512 bytes, each followed by 512 bytes of data.
fn fragmented(at: u64) -> Extent {
    Extent { len: 512, allocated: (at >> 9) % 2 == 1 }
}

/// Holes, reported block by block.
fn single_block_holes(_: u64) -> Extent {
    Extent::hole(512)
}

/// A disk that reports extents of length 0.
fn no_progress(_: u64) -> Extent {
    Extent::data(0)
}

#[test]
fn a_command_examines_a_bounded_number_of_extents() {
    let disk = ExtentDisk::new(1 << 20, fragmented);
    let gate = Arc::clone(&disk.gate);
    let mut host = host(disk);
    // The buffer has room for more descriptors than the number of extents that a command may read.
    let (at, list) = (host.alloc(65536), host.alloc(4096));
    for page in 1..16 {
        host.poke(list + (page - 1) * 8, &(at + page * 4096).to_le_bytes());
    }
    host.must(Sqe::get_lba_status(1, query(0, 0, 65536), 0).with_prps(at, list));
    let (cmpc, found) = parse(&host.peek(at, 65536));
    assert_eq!((cmpc, found.len(), found[0]), (LbaStatusList::INCOMPLETE, 255, (1, 2)));
    assert!(gate.reported.load(Ordering::SeqCst) <= 1100);

    // The disk has no allocated block. Since the command reads a limited number of extents, it ends
    // incomplete, and its only descriptor shows up to which block it has searched.
    let disk = ExtentDisk::new(1 << 20, single_block_holes);
    let gate = Arc::clone(&disk.gate);
    let mut host = self::host(disk);
    let (cmpc, found) = status(&mut host, 1, query(0, 0, 4096)).unwrap();
    assert_eq!((cmpc, found), (LbaStatusList::INCOMPLETE, vec![(1024, 1025)]));
    assert!(gate.reported.load(Ordering::SeqCst) <= 1100);

    let disk = ExtentDisk::new(1 << 20, no_progress);
    let mut host = self::host(disk);
    let (cmpc, found) = status(&mut host, 1, query(7, 0, 4096)).unwrap();
    assert_eq!((cmpc, found), (LbaStatusList::INCOMPLETE, vec![(7, 8)]));
}

/// Extents of 700 bytes of data and 5000 bytes of hole, not aligned to blocks.
fn unaligned_extents(at: u64) -> Extent {
    let in_period = at % 5700;
    if in_period < 700 { Extent::data(700 - in_period) } else { Extent::hole(5700 - in_period) }
}

#[test]
fn a_block_that_has_a_byte_of_data_is_allocated() {
    let mut host = host(ExtentDisk::new(1024, unaligned_extents));
    let (cmpc, found) = status(&mut host, 1, query(0, 0, 4096)).unwrap();
    assert_eq!(cmpc, LbaStatusList::COMPLETE);
    let is_found = |block: u64| found.iter().any(|range| (range.0..range.1).contains(&block));
    for block in 0..1024 {
        let has_data = (block * 512..block * 512 + 512).any(|byte| byte % 5700 < 700);
        assert_eq!(is_found(block), has_data, "block {block}");
    }
}

#[test]
fn long_ranges_take_several_descriptors() {
    let blocks = 3u64 << 32;
    let mut host = host(NullDisk::new(blocks, 512));
    let (cmpc, found) = status(&mut host, 1, query(5, 0, 4096)).unwrap();
    let first = 5 + (1u64 << 32);
    let expected = vec![(5, first), (first, first + (1 << 32)), (first + (1 << 32), blocks)];
    assert_eq!((cmpc, found), (LbaStatusList::COMPLETE, expected));
}

#[test]
fn each_disk_type_reports_its_extents() {
    let limiter = Limiter::new(Limits::default());
    let lasting = MemDisk::recoverable(1 << 16, 512).unwrap();
    lasting.bytes().fill(8 << 20, 4096, 7).unwrap();
    let limited = LimitedDisk::new(Arc::new(lasting), limiter, None);
    let disks: Vec<Arc<dyn Disk>> = vec![
        Arc::new(limited),
        Arc::new(MemDisk::new(1 << 16, 512).unwrap()),
        Arc::new(NullDisk::new(1 << 16, 512)),
        Arc::new(NullDisk::new(1 << 16, 512).with_read_zeroes(true)),
    ];
    let mut host = Host::with(over(disks), ADAPTIVE);
    let complete = LbaStatusList::COMPLETE;
    let (cmpc, found) = status(&mut host, 1, query(0, 0, 4096)).unwrap();
    // The disk's allocation unit may be a huge page, so more blocks may be reported.
    assert_eq!((cmpc, found.len()), (complete, 1));
    assert!(found[0].0 <= 16384 && found[0].1 >= 16392 && found[0].1 - found[0].0 <= 8192);
    for nsid in [2, 3] {
        let all = vec![(0, 1 << 16)];
        assert_eq!(status(&mut host, nsid, query(0, 0, 4096)), Ok((complete, all)), "{nsid}");
    }
    assert_eq!(status(&mut host, 4, query(0, 0, 4096)), Ok((complete, vec![])));
}

/// Submits a Get LBA Status, and waits until the disk has received the query of its extents. The
/// disk does not answer the query yet.
fn stalled(host: &mut Host, gate: &Gate) -> (Queue, u64) {
    gate.stall(true);
    let at = host.alloc(4096);
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    host.submit(&mut admin, &Sqe::get_lba_status(1, query(0, 0, 4096), 900).with_prps(at, 0));
    host.until("the disk to be asked", || gate.is_inside());
    (admin, at)
}

#[test]
fn a_hung_extents_call_delays_no_other_command() {
    let disk = ExtentDisk::new(64 * 128, alternating);
    let gate = Arc::clone(&disk.gate);
    let pool = common::pool(ADAPTIVE);
    let controller = |config| {
        let mut host =
            Host::attach(Controller::new(config, pool.clone(), Carrier::default()).unwrap());
        host.enable();
        host
    };
    let (mut host, mut other) =
        (controller(over(vec![Arc::new(disk)])), controller(config(&["mem:1MiB"])));
    let (mut queue, mut others) = (host.create(1, 16, false), other.create(1, 16, false));
    let page = host.alloc(4096);
    let (mut admin, _) = stalled(&mut host, &gate);
    // I/O reads, registers, and admin commands of both controllers continue.
    for _ in 0..10 {
        assert!(host.run(&mut queue, Sqe::read(1, 0, 7, 0).with_prps(page, 0)).0.is_success());
        assert!(other.run(&mut others, Sqe::read(1, 0, 7, 0).with_prps(page, 0)).0.is_success());
        assert!(host.csts().rdy());
        assert!(status(&mut other, 1, query(0, 0, 4096)).is_ok());
        let identify =
            Sqe::identify(0, Identify { cns: cns::CONTROLLER, ..Identify::default() }, 0);
        assert!(host.run(&mut admin, identify.with_prps(page, 0)).0.is_success());
    }
    // The disk has already received the query of the first command, so an Abort cannot end this
    // command.
    let abort = Sqe::abort(shadowbell_spec::admin::Abort { sqid: 0, cid: 900 }, 0);
    assert_eq!(host.run(&mut admin, abort), (Status::SUCCESS, 1));
    gate.stall(false);
    assert_eq!(host.wait(&mut admin), (900, Status::SUCCESS, 0));
}

#[test]
fn excess_get_lba_status_commands_wait() {
    let disk = ExtentDisk::new(64 * 128, alternating);
    let gate = Arc::clone(&disk.gate);
    let mut host = host(disk);
    let (mut admin, at) = stalled(&mut host, &gate);
    let old = admin.tail;
    for cid in 901..930 {
        host.put(&mut admin, &Sqe::get_lba_status(1, query(0, 0, 4096), cid).with_prps(at, 0));
    }
    host.ring(&admin, old);
    wait::short_pause();
    assert_eq!(host.reap(&mut admin), None);
    gate.stall(false);
    let mut cids: Vec<_> = (900..930).map(|_| host.wait(&mut admin)).collect();
    cids.sort_unstable_by_key(|done| done.0);
    assert!(cids.iter().zip(900..).all(|(done, cid)| *done == (cid, Status::SUCCESS, 0)));
    assert_eq!(parse(&host.peek(at, 4096)).1.len(), 32);
}

#[test]
fn a_reset_does_not_wait_for_the_disk() {
    let disk = ExtentDisk::new(64 * 128, alternating);
    let gate = Arc::clone(&disk.gate);
    let mut host = host(disk);
    let (_, at) = stalled(&mut host, &gate);
    host.memory.fill((at - BASE) as usize, 4096, 0xee).unwrap();
    host.disable();
    host.admin = Queue { entries: 32, sq: BASE, cq: BASE + 4096, ..Queue::none() };
    host.enable();
    assert!(host.page(Sqe::identify(1, Identify::default(), 0)).is_ok());
    gate.stall(false);
    // The command that was in flight at the reset posts no completion. A new command completes.
    assert_eq!(status(&mut host, 1, query(0, 0, 4096)).unwrap().1.len(), 32);
    assert!(host.peek(at, 4096).iter().all(|byte| *byte == 0xee));
}

#[test]
fn a_removal_waits_for_a_running_extents_call() {
    let disk = ExtentDisk::new(64 * 128, alternating);
    let (gate, weak) = (Arc::clone(&disk.gate), Arc::downgrade(&disk.gate));
    let mut host = host(disk);
    let (mut admin, at) = stalled(&mut host, &gate);
    // The second command waits for the end of the first one, so it has not started, and can be
    // aborted.
    host.submit(&mut admin, &Sqe::get_lba_status(1, query(0, 0, 4096), 901).with_prps(at, 0));
    let page = host.alloc(4096);
    let identify = Sqe::identify(1, Identify::default(), 0).with_prps(page, 0);
    assert!(host.run(&mut admin, identify).0.is_success());
    let (sender, removed) = std::sync::mpsc::channel();
    host.controller.remove_namespace(1, move |outcome| sender.send(outcome).unwrap()).unwrap();
    wait::short_pause();
    assert!(removed.try_recv().is_err(), "the disk is in use");
    gate.stall(false);
    removed.recv_timeout(common::LIMIT).unwrap().unwrap();
    let reported = gate.reported.load(Ordering::SeqCst);
    drop(gate);
    assert_eq!(weak.strong_count(), 0, "the disk is released");
    assert!(reported <= 64, "the one that had not begun did not ask");
    let mut ended = [host.wait(&mut admin), host.wait(&mut admin)];
    ended.sort_unstable_by_key(|done| done.0);
    assert_eq!(ended, [(900, INVALID, 0), (901, INVALID, 0)]);
}

#[test]
fn memory_unmapped_during_an_extents_call_is_not_accessed() {
    let disk = ExtentDisk::new(64 * 128, alternating);
    let gate = Arc::clone(&disk.gate);
    let mut host = host(disk);
    let (at, last) = (BASE + MEMORY, Mapping::shared("page", 4096).unwrap().bytes());
    host.controller.map_dma(at, 4096, &last).unwrap();
    gate.stall(true);
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    let sqe = Sqe::get_lba_status(1, query(0, 0, 4096), 900).with_prps(at, 0);
    host.submit(&mut admin, &sqe);
    host.until("the disk to be asked", || gate.is_inside());
    let (sender, gone) = std::sync::mpsc::channel();
    let done = move || sender.send(()).unwrap();
    host.controller.unmap_dma(at, 4096, done).unwrap();
    gone.recv_timeout(common::LIMIT).unwrap();
    last.fill(0, 4096, 0xee).unwrap();
    gate.stall(false);
    let (cid, ended, _) = host.wait(&mut admin);
    assert!(cid == 900 && !ended.is_success(), "{ended}");
    assert!((0..512).all(|word| last.read::<u64>(word * 8) == Some(0xeeee_eeee_eeee_eeee)));
}

#[test]
fn a_driven_pool_answers_get_lba_status() {
    let (pool, mut turns) = Pool::driven(Polling::Never).unwrap();
    let disk = ExtentDisk::new(64 * 128, alternating);
    let controller = Controller::new(over(vec![Arc::new(disk)]), pool, Carrier::default()).unwrap();
    common::run_beside(&mut turns, move || {
        let mut host = Host::attach(controller);
        host.enable();
        let (cmpc, found) = status(&mut host, 1, query(0, 0, 4096)).unwrap();
        assert_eq!((cmpc, found.len()), (LbaStatusList::COMPLETE, 32));
    });
}

#[derive(Clone, Debug)]
enum Step {
    Write(u64, u64),
    Discard(u64, u64),
    Zeroes(u64, u64, bool),
}

const BLOCKS: u64 = 1 << 14;

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..BLOCKS, 1..=64u64).prop_map(|(at, len)| (at, len.min(BLOCKS - at)));
    prop_oneof![
        range().prop_map(|(at, len)| Step::Write(at, len)),
        (0..BLOCKS, 1..=BLOCKS).prop_map(|(at, len)| Step::Discard(at, len.min(BLOCKS - at))),
        (range(), any::<bool>()).prop_map(|((at, len), deac)| Step::Zeroes(at, len, deac)),
    ]
}

/// Checks after every step: blocks that were written and not discarded are reported as allocated,
/// and blocks that are reported as not allocated read as zeroes.
fn model(disk: Arc<dyn Disk>, steps: &[Step]) {
    use shadowbell_disk::{Op, Request, Submitted};
    use shadowbell_memory::{Mapping, Segments};
    let mut host = Host::with(over(vec![Arc::clone(&disk)]), ADAPTIVE);
    let mut queue = disk.queue().unwrap();
    let buffer = Mapping::anonymous(64 * 512).unwrap().bytes();
    buffer.fill(0, 64 * 512, 0xa5).unwrap();
    let mut holds = vec![false; BLOCKS as usize];
    for step in steps {
        let (op, at, len) = match *step {
            Step::Write(at, len) => (Op::Write { fua: false }, at, len),
            Step::Discard(at, len) => (Op::Discard, at, len),
            Step::Zeroes(at, len, deallocate) => {
                (Op::WriteZeroes { deallocate, fua: false }, at, len)
            }
        };
        let request = Request { op, offset: at * 512, len: len * 512 };
        let mut data = match op {
            Op::Write { .. } => Segments::from_bytes(&buffer),
            _ => Segments::new(),
        };
        let mut ended = match queue.submit(1, &request, &mut data) {
            Submitted::Done(outcome) => Some(outcome),
            Submitted::Pending => None,
        };
        queue.commit();
        while ended.is_none() {
            queue.reap(&mut |_, outcome, _| ended = Some(outcome));
        }
        ended.unwrap().unwrap();
        let is_write = matches!(op, Op::Write { .. });
        holds[at as usize..(at + len) as usize].fill(is_write);
        let (mut next, mut allocated) = (0, vec![false; BLOCKS as usize]);
        while next < BLOCKS {
            let (cmpc, found) = status(&mut host, 1, query(next, 0, 72)).unwrap();
            for (first, after) in &found {
                allocated[*first as usize..*after as usize].fill(true);
            }
            next = match (cmpc, found.last()) {
                (LbaStatusList::COMPLETE, _) => BLOCKS,
                (_, last) => last.unwrap().1,
            };
        }
        for (block, (holds, allocated)) in holds.iter().zip(&allocated).enumerate() {
            assert!(!holds || *allocated, "block {block} is reported as a hole, after {step:?}");
        }
        // Reads all blocks for comparison.
        let mut all = vec![0; (BLOCKS * 512) as usize];
        shadowbell_disk_read(&disk, &mut all);
        let blocks = all.chunks(512).zip(&allocated);
        let is_zero = |block: &[u8]| block.iter().all(|byte| *byte == 0);
        assert!(blocks.filter(|(_, allocated)| !**allocated).all(|(block, _)| is_zero(block)));
    }
}

fn shadowbell_disk_read(disk: &Arc<dyn Disk>, into: &mut [u8]) {
    use shadowbell_disk::{Op, Request, Submitted};
    use shadowbell_memory::{Mapping, Segments};
    let buffer = Mapping::anonymous(into.len() as u64).unwrap().bytes();
    let mut queue = disk.queue().unwrap();
    let request = Request { op: Op::Read, offset: 0, len: into.len() as u64 };
    let mut data = Segments::from_bytes(&buffer);
    let mut over = matches!(queue.submit(1, &request, &mut data), Submitted::Done(Ok(())));
    queue.commit();
    while !over {
        queue.reap(&mut |_, outcome, _| {
            outcome.unwrap();
            over = true;
        });
    }
    buffer.read_into(0, into).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, ..ProptestConfig::default() })]

    #[test]
    fn no_block_with_data_is_reported_as_a_hole(steps in prop::collection::vec(step(), 1..24)) {
        model(Arc::new(MemDisk::recoverable(BLOCKS, 512).unwrap()), &steps);
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(BLOCKS * 512).unwrap();
        for direct in ["on", "off"] {
            let uri = format!("{}?direct={direct}", file.path().display());
            if let Ok(disk) = shadowbell_disk_file::open(&uri) {
                model(disk, &steps);
            }
            file.as_file().set_len(0).unwrap();
            file.as_file().set_len(BLOCKS * 512).unwrap();
        }
    }
}
