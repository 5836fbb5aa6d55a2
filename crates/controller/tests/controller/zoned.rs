//! Zoned namespaces: commands, and comparison with a simple model.

use crate::common;
use common::{Host, Queue};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use shadowbell_controller::{
    Carrier, Config, Controller, NamespaceConfig, Polling, Pool, PoolOptions,
};
use shadowbell_disk::{Disk, ZoneFormat};
use shadowbell_disk_file::{FileDisk, FileOptions};
use shadowbell_disk_layers::ZonedDisk;
use shadowbell_spec::admin::{GetLogPage, Identify};
use shadowbell_spec::identify::{
    IoCommandSets, NamespaceId, NamespaceIds, NamespaceList, cns, csi,
};
use shadowbell_spec::log::{CommandsSupportedEffects, lid};
use shadowbell_spec::nvm::{CopyFields, CopyRange, RwFields};
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::regs::{CC_CSS_ALL, Cc};
use shadowbell_spec::sgl::SglDescriptor;
use shadowbell_spec::zns::{
    IdentifyZonedController, IdentifyZonedNamespace, ZoneAction, ZoneDescriptor,
    ZoneManagementReceive, ZoneManagementSend, ZoneReportHeader, ZoneState,
};
use shadowbell_spec::{Sqe, Status};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));
/// Number of blocks of a zone, and number of its writable blocks.
const SIZE: u64 = 128;
const CAPACITY: u64 = 96;
const SMALL: &str = "zoned=64KiB&zone-capacity=48KiB&max-open=2&max-active=3&zone-extension=64";
/// Memory disk on which the options make eight zones.
const MEMORY: &str = "mem:1536KiB";

fn zones(disk: Arc<dyn Disk>, options: &str, goes_on: bool) -> Arc<dyn Disk> {
    let options = options.split('&').filter_map(|option| option.split_once('='));
    let format = ZoneFormat::parse(options).unwrap().unwrap();
    Arc::new(ZonedDisk::new(disk, format, goes_on).unwrap())
}

fn memory(size: &str, options: &str) -> Arc<dyn Disk> {
    zones(shadowbell_disk_file::open(size).unwrap(), options, false)
}

fn file(path: &Path, options: &str, goes_on: bool) -> Arc<dyn Disk> {
    let disk = FileDisk::open(path, &FileOptions::default()).unwrap();
    zones(Arc::new(disk), options, goes_on)
}

/// Host of a zoned namespace.
struct Guest {
    host: Host,
    queues: Vec<Queue>,
    data: u64,
}

impl Guest {
    fn new(disk: Arc<dyn Disk>) -> Self {
        Self::with(disk, 1, CC_CSS_ALL)
    }

    fn with(disk: Arc<dyn Disk>, workers: usize, css: u8) -> Self {
        let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
        let options = PoolOptions { workers, polling: ADAPTIVE, pin: Vec::new() };
        let pool = Pool::start(&options).unwrap();
        let config = Config { namespaces, ..Config::default() };
        let controller = Controller::new(config, pool, Carrier::default()).unwrap();
        let mut host = Host::attach(controller);
        host.enable_with(Cc::new().with_css(css).with_iosqes(6).with_iocqes(4));
        let queues = (1..=2).map(|qid| host.create(qid, 64, false)).collect();
        let data = host.alloc(1 << 20);
        Self { host, queues, data }
    }

    fn run(&mut self, queue: usize, sqe: Sqe) -> (Status, u32) {
        self.host.run(&mut self.queues[queue], sqe)
    }

    fn rw(&self, op: NvmOpcode, slba: u64, blocks: u64) -> Sqe {
        let fields = RwFields { slba, nlb0: (blocks - 1) as u16, ..RwFields::default() };
        let descriptor = SglDescriptor::data_block(self.data, (blocks * 512) as u32);
        Sqe::with_rw(op, 1, fields, 0).with_sgl(descriptor)
    }

    fn fill(&self, blocks: u64, byte: u8) {
        self.host.poke(self.data, &vec![byte; blocks as usize * 512]);
    }

    fn write(&mut self, slba: u64, blocks: u64, byte: u8) -> Status {
        self.fill(blocks, byte);
        self.run(0, self.rw(NvmOpcode::Write, slba, blocks)).0
    }

    fn append(&mut self, zslba: u64, blocks: u64, byte: u8) -> (Status, u64) {
        self.fill(blocks, byte);
        let (status, low) = self.run(1, self.rw(NvmOpcode::ZoneAppend, zslba, blocks));
        let queue = &self.queues[1];
        let last = (queue.head + queue.entries - 1) % queue.entries;
        let high = self.host.peek32(queue.cq + u64::from(last) * 16 + 4);
        (status, u64::from(high) << 32 | u64::from(low))
    }

    /// Reads blocks. Returns the first byte of each.
    fn read(&mut self, slba: u64, blocks: u64) -> Result<Vec<u8>, Status> {
        self.fill(blocks, 0xee);
        let (status, _) = self.run(1, self.rw(NvmOpcode::Read, slba, blocks));
        status.into_result()?;
        let bytes = self.host.peek(self.data, blocks as usize * 512);
        assert!(bytes.chunks(512).all(|block| block.iter().all(|byte| *byte == block[0])));
        Ok(bytes.chunks(512).map(|block| block[0]).collect())
    }

    fn send(&mut self, action: u8, slba: u64, all: bool) -> Status {
        let send = ZoneManagementSend { slba, zsa: action, all, zsaso: false };
        let sqe = send.encode(1, 0).with_prps(self.data, 0);
        self.run(0, sqe).0
    }

    fn report(&mut self, receive: ZoneManagementReceive) -> Result<Vec<u8>, Status> {
        let len = receive.length();
        self.host.poke(self.data, &vec![0xee; len as usize]);
        let descriptor = SglDescriptor::data_block(self.data, len as u32);
        let (status, _) = self.run(1, receive.encode(1, 0).with_sgl(descriptor));
        status.into_result()?;
        Ok(self.host.peek(self.data, len as usize))
    }

    /// State and write pointer of all zones.
    fn states(&mut self) -> Vec<(ZoneState, u64)> {
        let receive = ZoneManagementReceive { nd0: 1023, ..ZoneManagementReceive::default() };
        let bytes = self.report(receive).unwrap();
        let (header, rest) = ZoneReportHeader::read_from_prefix(&bytes).unwrap();
        let all = rest.chunks_exact(64).take(header.zones as usize);
        let read = |bytes| {
            let zone = ZoneDescriptor::read_from_bytes(bytes).unwrap();
            assert_eq!(zone.zt, 2);
            (ZoneState::from_bits(zone.zs >> 4).unwrap(), zone.wp)
        };
        all.map(read).collect()
    }

    fn identify<T: FromBytes>(&mut self, cns: u8, csi: u8, nsid: u32) -> Result<T, Status> {
        let fields = Identify { cns, csi, cntid: 0xffff, ..Identify::default() };
        let fields = match cns {
            cns::IO_COMMAND_SETS => fields,
            _ => Identify { cntid: 0, ..fields },
        };
        let page = self.host.page(Sqe::identify(nsid, fields, 0))?;
        Ok(T::read_from_prefix(&page).map_err(|_| ()).unwrap().0)
    }
}

/// Simple model of a zoned controller.
struct Model {
    zones: Vec<(ZoneState, Vec<u8>, bool)>,
    /// Zones that were opened implicitly, in order.
    opened: Vec<usize>,
}

const DNR: fn(Status) -> Status = Status::with_dnr;

impl Model {
    fn new() -> Self {
        Self { zones: vec![(ZoneState::Empty, Vec::new(), false); 8], opened: Vec::new() }
    }

    fn counts(&self) -> (usize, usize) {
        let count =
            |which: fn(ZoneState) -> bool| self.zones.iter().filter(|zone| which(zone.0)).count();
        (count(ZoneState::is_open), count(ZoneState::is_active))
    }

    fn set(&mut self, zone: usize, state: ZoneState) {
        self.opened.retain(|other| *other != zone);
        if state == ZoneState::ImplicitlyOpen {
            self.opened.push(zone);
        }
        self.zones[zone].0 = state;
    }

    fn open(&mut self, zone: usize, state: ZoneState) -> Result<(), Status> {
        let now = self.zones[zone].0;
        if !now.is_open() {
            let (open, active) = self.counts();
            if now == ZoneState::Empty && active == 3 {
                return Err(DNR(Status::TOO_MANY_ACTIVE_ZONES));
            }
            if open == 2 {
                let first = *self.opened.first().ok_or(DNR(Status::TOO_MANY_OPEN_ZONES))?;
                self.set(first, ZoneState::Closed);
            }
        } else if now == state || state == ZoneState::ImplicitlyOpen {
            return Ok(());
        }
        self.set(zone, state);
        Ok(())
    }

    fn write(
        &mut self,
        zone: usize,
        at: Option<u64>,
        blocks: u64,
        byte: u8,
    ) -> Result<u64, Status> {
        if zone as u64 * SIZE + at.unwrap_or(0) + blocks > 8 * SIZE {
            return Err(DNR(Status::LBA_OUT_OF_RANGE));
        }
        match self.zones[zone].0 {
            ZoneState::Full => return Err(DNR(Status::ZONE_IS_FULL)),
            ZoneState::ReadOnly => return Err(DNR(Status::ZONE_IS_READ_ONLY)),
            ZoneState::Offline => return Err(DNR(Status::ZONE_IS_OFFLINE)),
            _ => {}
        }
        let pointer = self.zones[zone].1.len() as u64;
        let at = at.unwrap_or(pointer);
        if at + blocks > CAPACITY {
            return Err(DNR(Status::ZONE_BOUNDARY_ERROR));
        }
        if at != pointer {
            return Err(DNR(Status::ZONE_INVALID_WRITE));
        }
        self.open(zone, ZoneState::ImplicitlyOpen)?;
        self.zones[zone].1.extend(std::iter::repeat_n(byte, blocks as usize));
        if pointer + blocks == CAPACITY {
            self.set(zone, ZoneState::Full);
        }
        Ok(pointer)
    }

    fn read(&self, slba: u64, blocks: u64) -> Result<Vec<u8>, Status> {
        if slba / SIZE != (slba + blocks - 1) / SIZE {
            return Err(DNR(Status::ZONE_BOUNDARY_ERROR));
        }
        let (_, data, _) = &self.zones[(slba / SIZE) as usize];
        let from = slba % SIZE;
        let at = |block: u64| data.get(block as usize).copied().unwrap_or(0);
        Ok((from..from + blocks).map(at).collect())
    }

    fn send(&mut self, action: ZoneAction, zone: usize) -> Result<(), Status> {
        let impossible = Err(DNR(Status::INVALID_ZONE_STATE_TRANSITION));
        let now = self.zones[zone].0;
        match action {
            ZoneAction::Open if now.is_active() || now == ZoneState::Empty => {
                self.open(zone, ZoneState::ExplicitlyOpen)?;
            }
            ZoneAction::Close if now.is_active() => self.set(zone, ZoneState::Closed),
            ZoneAction::Finish if now == ZoneState::Full || now.has_write_pointer() => {
                self.set(zone, ZoneState::Full);
            }
            ZoneAction::Reset => {
                self.set(zone, ZoneState::Empty);
                (self.zones[zone].1, self.zones[zone].2) = (Vec::new(), false);
            }
            ZoneAction::SetExtension if now == ZoneState::Empty => {
                if self.counts().1 == 3 {
                    return Err(DNR(Status::TOO_MANY_ACTIVE_ZONES));
                }
                self.set(zone, ZoneState::Closed);
                self.zones[zone].2 = true;
            }
            _ => return impossible,
        }
        Ok(())
    }

    fn send_all(&mut self, action: ZoneAction) -> Result<(), Status> {
        let which: fn(ZoneState) -> bool = match action {
            ZoneAction::Open => |now| now == ZoneState::Closed,
            ZoneAction::Close => ZoneState::is_open,
            ZoneAction::Finish => ZoneState::is_active,
            ZoneAction::Reset => |now| now.is_active() || now == ZoneState::Full,
            ZoneAction::Offline => return Ok(()),
            ZoneAction::SetExtension => return Err(DNR(Status::INVALID_FIELD)),
        };
        let all: Vec<_> = (0..8).filter(|zone| which(self.zones[*zone].0)).collect();
        let fixed = self.counts().0 - self.opened.len();
        if action == ZoneAction::Open && fixed + all.len() > 2 {
            return Err(DNR(Status::TOO_MANY_OPEN_ZONES));
        }
        all.into_iter().try_for_each(|zone| self.send(action, zone))
    }

    fn states(&self) -> Vec<(ZoneState, u64)> {
        let one = |(zone, (state, data, _)): (u64, &(ZoneState, Vec<u8>, bool))| {
            let pointer = zone * SIZE + data.len() as u64;
            (*state, if state.has_write_pointer() { pointer } else { u64::MAX })
        };
        (0..).zip(&self.zones).map(one).collect()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Write { zone: usize, off: u64, blocks: u64, zeroes: bool },
    Append { zone: usize, blocks: u64 },
    Read { slba: u64, blocks: u64 },
    Send { action: ZoneAction, zone: usize, all: bool },
}

fn step() -> impl Strategy<Value = Step> {
    let (zone, blocks) = (0..8usize, prop_oneof![1..20u64, 30..97u64]);
    let off = prop_oneof![8 => Just(0u64), 1 => 1..5u64];
    let actions = ZoneAction::ALL.to_vec();
    prop_oneof![
        4 => (zone.clone(), off, blocks.clone(), prop::bool::weighted(0.2))
            .prop_map(|(zone, off, blocks, zeroes)| Step::Write { zone, off, blocks, zeroes }),
        3 => (zone.clone(), blocks.clone()).prop_map(|(zone, blocks)| Step::Append { zone, blocks }),
        3 => (0..8 * SIZE - 97, blocks).prop_map(|(slba, blocks)| Step::Read { slba, blocks }),
        4 => (prop::sample::select(actions), zone, prop::bool::weighted(0.1))
            .prop_map(|(action, zone, all)| Step::Send { action, zone, all }),
    ]
}

fn compare(guest: &mut Guest, steps: &[Step]) {
    let mut model = Model::new();
    for (nth, step) in steps.iter().enumerate() {
        let byte = nth as u8 | 1;
        let status = |done: Result<u64, Status>| done.map_or_else(|s| s, |_| Status::SUCCESS);
        match *step {
            Step::Write { zone, off, blocks, zeroes } => {
                let at = model.zones[zone].1.len() as u64 + off;
                let byte = if zeroes { 0 } else { byte };
                let expected = model.write(zone, Some(at), blocks, byte);
                guest.fill(blocks, byte);
                let op = if zeroes { NvmOpcode::WriteZeroes } else { NvmOpcode::Write };
                let mut sqe = guest.rw(op, zone as u64 * SIZE + at, blocks);
                if zeroes {
                    (sqe.flags, sqe.dptr) = (0, [0; 16]);
                }
                assert_eq!(guest.run(nth & 1, sqe).0, status(expected), "{step:?}");
            }
            Step::Append { zone, blocks } => {
                let expected = model.write(zone, None, blocks, byte);
                let (done, at) = guest.append(zone as u64 * SIZE, blocks, byte);
                assert_eq!(done, status(expected), "{step:?}");
                assert_eq!(at, expected.map_or(0, |at| at + zone as u64 * SIZE));
            }
            Step::Read { slba, blocks } => {
                assert_eq!(guest.read(slba, blocks), model.read(slba, blocks), "{step:?}");
            }
            Step::Send { action, zone, all } => {
                let slba = zone as u64 * SIZE;
                let done = guest.send(action as u8, slba, all);
                let expected = if all { model.send_all(action) } else { model.send(action, zone) };
                assert_eq!(done, status(expected.map(|()| 0)), "{step:?}");
            }
        }
        assert_eq!(guest.states(), model.states(), "after {step:?}");
    }
}

#[test]
fn zones_match_the_model() {
    let steps = prop::collection::vec(step(), 60);
    let config = ProptestConfig { cases: 12, failure_persistence: None, ..Default::default() };
    let run = |steps: Vec<Step>| {
        compare(&mut Guest::new(memory(MEMORY, SMALL)), &steps);
        Ok(())
    };
    TestRunner::new(config.clone()).run(&steps, run).unwrap();
    let directory = tempfile::tempdir().unwrap();
    let mut runner = TestRunner::new(config);
    for nth in 0..6 {
        let path = directory.path().join(format!("{nth}.img"));
        std::fs::File::create(&path).unwrap().set_len(1536 << 10).unwrap();
        let steps = steps.new_tree(&mut runner).unwrap().current();
        compare(&mut Guest::new(file(&path, SMALL, false)), &steps);
    }
}

#[test]
fn identify_reports_the_format() {
    let options = format!("{SMALL}&append-limit=16KiB&read-across=on");
    let mut guest = Guest::new(memory(MEMORY, &options));
    let zoned: IdentifyZonedNamespace = guest.identify(cns::CSI_NAMESPACE, csi::ZONED, 1).unwrap();
    assert_eq!((zoned.zoc, zoned.ozcs, zoned.mar, zoned.mor), (0, 1, 2, 1));
    assert_eq!((zoned.lbafe[0].zsze, zoned.lbafe[0].zdes), (SIZE, 1));
    let controller: IdentifyZonedController =
        guest.identify(cns::CSI_CONTROLLER, csi::ZONED, 0).unwrap();
    assert_eq!(controller.zasl, 2);
    let sets: IoCommandSets = guest.identify(cns::IO_COMMAND_SETS, 0, 0).unwrap();
    assert_eq!(sets.vectors[0], 0b101);
    let list = |guest: &mut Guest, csi| {
        let list: NamespaceList = guest.identify(cns::CSI_ACTIVE_NAMESPACES, csi, 0).unwrap();
        list.iter().collect::<Vec<_>>()
    };
    assert_eq!((list(&mut guest, csi::ZONED), list(&mut guest, csi::NVM)), (vec![1], vec![]));
    let page = Identify { cns: cns::NAMESPACE_IDS, ..Identify::default() };
    let page = guest.host.page(Sqe::identify(1, page, 0)).unwrap();
    let ids = NamespaceIds::read_from_prefix(&page).unwrap().0;
    assert!(ids.iter().any(|id| id == NamespaceId::Csi(csi::ZONED)));
    let effects = |guest: &mut Guest, csi| {
        let fields = GetLogPage {
            lid: lid::COMMANDS_SUPPORTED_EFFECTS,
            csi,
            numd0: 1023,
            ..Default::default()
        };
        let page = guest.host.page(Sqe::get_log_page(0, fields, 0)).unwrap();
        let page = CommandsSupportedEffects::read_from_bytes(&page).unwrap();
        [0x04, 0x79, 0x7a, 0x7d].map(|opcode: usize| page.io[opcode].csupp())
    };
    assert_eq!(effects(&mut guest, csi::ZONED), [false, true, true, true]);
    assert_eq!(effects(&mut guest, csi::NVM), [true, false, false, false]);
    // Tests the limit of an append, and a read across zones.
    assert_eq!(guest.append(0, 33, 1).0, DNR(Status::INVALID_FIELD));
    assert_eq!(guest.append(0, 32, 1), (Status::SUCCESS, 0));
    assert_eq!(guest.append(SIZE, 32, 2), (Status::SUCCESS, SIZE));
    let across = guest.read(16, 128).unwrap();
    assert_eq!((across[15], across[16], across[111], across[112]), (1, 0, 0, 2));
}

#[test]
fn a_host_of_the_nvm_command_set_alone_sees_no_zones() {
    let mut guest = Guest::with(memory(MEMORY, SMALL), 1, 0);
    let list: NamespaceList = guest.identify(cns::ACTIVE_NAMESPACES, 0, 0).unwrap();
    assert_eq!(list.iter().count(), 0);
    let inactive = DNR(Status::INVALID_FIELD);
    assert_eq!(guest.write(0, 1, 1), inactive);
    assert_eq!(guest.send(4, 0, true), inactive);
    // A namespace without zones has no zone commands.
    let mut guest = Guest::new(shadowbell_disk_file::open("mem:1MiB").unwrap());
    for op in [NvmOpcode::ZoneAppend, NvmOpcode::ZoneManagementSend] {
        let sqe = guest.rw(op, 0, 1);
        assert_eq!(guest.run(0, sqe).0, DNR(Status::INVALID_OPCODE));
    }
    let none: Result<IdentifyZonedNamespace, _> = guest.identify(cns::CSI_NAMESPACE, csi::ZONED, 1);
    assert_eq!(none.map(drop), Err(DNR(Status::INVALID_FIELD)));
}

#[test]
fn invalid_zone_commands_have_their_status() {
    let mut guest = Guest::new(memory(MEMORY, SMALL));
    let (invalid, outside) = (DNR(Status::INVALID_FIELD), DNR(Status::LBA_OUT_OF_RANGE));
    // Zone Management Send.
    assert_eq!(guest.send(0x06, 0, false), invalid);
    assert_eq!(guest.send(0x11, 0, false), invalid);
    assert_eq!(guest.send(4, 1, false), invalid);
    assert_eq!(guest.send(4, 8 * SIZE, false), outside);
    assert_eq!(guest.send(4, u64::MAX, false), outside);
    assert_eq!(guest.send(5, 0, false), DNR(Status::INVALID_ZONE_STATE_TRANSITION));
    assert_eq!(guest.send(1, 0, false), DNR(Status::INVALID_ZONE_STATE_TRANSITION));
    let send = ZoneManagementSend { slba: 0, zsa: 3, all: false, zsaso: true };
    assert_eq!(guest.run(0, send.encode(1, 0)).0, invalid);
    assert_eq!(
        guest.run(0, ZoneManagementSend { zsaso: false, ..send }.encode(9, 0)).0,
        DNR(Status::INVALID_NAMESPACE_OR_FORMAT)
    );
    // Zone Management Receive.
    let receive = ZoneManagementReceive { nd0: 15, ..Default::default() };
    assert_eq!(guest.report(ZoneManagementReceive { zra: 2, ..receive }), Err(invalid));
    assert_eq!(guest.report(ZoneManagementReceive { zrasf: 8, ..receive }), Err(invalid));
    assert_eq!(guest.report(ZoneManagementReceive { nd0: 14, ..receive }), Err(invalid));
    assert_eq!(guest.report(ZoneManagementReceive { slba: 8 * SIZE, ..receive }), Err(outside));
    let long = ZoneManagementReceive { nd0: u32::MAX, ..receive };
    assert_eq!(guest.run(0, long.encode(1, 0)).0, invalid);
    // Zone Append, and other commands.
    assert_eq!(guest.append(1, 1, 1).0, invalid);
    assert_eq!(guest.append(0, 97, 1).0, DNR(Status::ZONE_BOUNDARY_ERROR));
    let uncorrectable = guest.rw(NvmOpcode::WriteUncorrectable, 0, 1);
    let uncorrectable = Sqe { flags: 0, dptr: [0; 16], ..uncorrectable };
    assert_eq!(guest.run(0, uncorrectable).0, DNR(Status::INVALID_OPCODE));
    assert_eq!(guest.write(0, 8, 3), Status::SUCCESS);
    for op in [NvmOpcode::Verify, NvmOpcode::Compare] {
        let sqe = guest.rw(op, SIZE - 1, 2);
        assert_eq!(guest.run(0, sqe).0, DNR(Status::ZONE_BOUNDARY_ERROR));
    }
    // Unwritten blocks compare as zeroes.
    guest.fill(12, 3);
    guest.host.poke(guest.data + 8 * 512, &[0; 4 * 512]);
    let same = guest.rw(NvmOpcode::Compare, 0, 12);
    assert_eq!(guest.run(0, same).0, Status::SUCCESS);
    guest.host.poke(guest.data + 10 * 512, &[1]);
    assert_eq!(guest.run(0, same).0, DNR(Status::COMPARE_FAILURE));
}

#[test]
fn zone_reports_have_the_requested_zones() {
    let mut guest = Guest::new(memory(MEMORY, SMALL));
    guest.write(2 * SIZE, 4, 1);
    guest.host.poke(guest.data, &[0xab; 64]);
    assert_eq!(guest.send(0x10, 5 * SIZE, false), Status::SUCCESS);
    let receive = ZoneManagementReceive { nd0: 1023, ..Default::default() };
    let found = |bytes: &[u8]| {
        let (header, rest) = ZoneReportHeader::read_from_prefix(bytes).unwrap();
        (header.zones, ZoneDescriptor::read_from_prefix(rest).unwrap().0)
    };
    let (count, zone) =
        found(&guest.report(ZoneManagementReceive { zrasf: 2, ..receive }).unwrap());
    assert_eq!((count, zone.zslba, zone.wp, zone.zcap), (1, 2 * SIZE, 2 * SIZE + 4, CAPACITY));
    let extended = ZoneManagementReceive { zra: 1, zrasf: 4, ..receive };
    let bytes = guest.report(extended).unwrap();
    assert_eq!((found(&bytes).0, found(&bytes).1.za), (1, 0x80));
    assert_eq!(bytes[128..192], [0xab; 64]);
    // The buffer has room for the descriptors of two zones. The number of zones in the header
    // includes zones without a descriptor, except if `partial` is set.
    let short = ZoneManagementReceive { nd0: 47, slba: 3 * SIZE + 5, ..Default::default() };
    assert_eq!(found(&guest.report(short).unwrap()).0, 5);
    assert_eq!(
        found(&guest.report(ZoneManagementReceive { partial: true, ..short }).unwrap()).0,
        2
    );
    assert_eq!(found(&guest.report(short).unwrap()).1.zslba, 3 * SIZE);
}

#[test]
fn a_copy_into_a_zone_is_a_write() {
    let mut guest = Guest::new(memory(MEMORY, SMALL));
    assert_eq!(guest.write(0, 20, 5), Status::SUCCESS);
    let mut copy = |from: u64, blocks: u16, to: u64| {
        let range = CopyRange { slba: from, nlb0: blocks - 1, ..CopyRange::default() };
        guest.host.poke(guest.data, range.as_bytes());
        let fields = CopyFields { sdlba: to, ..CopyFields::default() };
        let sqe = fields.encode(Sqe::new(NvmOpcode::Copy as u8, 0, 1)).with_prps(guest.data, 0);
        guest.run(0, sqe).0
    };
    assert_eq!(copy(0, 20, SIZE), Status::SUCCESS);
    assert_eq!(copy(0, 20, SIZE), DNR(Status::ZONE_INVALID_WRITE));
    assert_eq!(copy(120, 20, SIZE + 20), DNR(Status::ZONE_BOUNDARY_ERROR));
    assert_eq!(copy(0, 90, SIZE + 20), DNR(Status::ZONE_BOUNDARY_ERROR));
    assert_eq!(guest.read(SIZE + 19, 2).unwrap(), [5, 0]);
}

#[test]
fn appends_of_several_io_threads_get_distinct_blocks() {
    let mut guest = Guest::with(memory("mem:65MiB", "zoned=64MiB"), 2, CC_CSS_ALL);
    let data = guest.data;
    for round in 0..8u64 {
        let mut sent = Vec::new();
        for nth in 0..60u64 {
            let byte = (round * 60 + nth) as u16;
            let at = data + nth * 4096;
            guest.host.poke(at, &byte.to_le_bytes().repeat(512));
            let fields = RwFields { nlb0: 1, ..RwFields::default() };
            let sqe = Sqe::with_rw(NvmOpcode::ZoneAppend, 1, fields, nth as u16);
            let queue = &mut guest.queues[nth as usize & 1];
            guest.host.put(queue, &sqe.with_prps(at, 0));
            sent.push(byte);
        }
        let mut places = vec![None; 60];
        for queue in &mut guest.queues {
            guest.host.ring(queue, queue.tail);
        }
        for queue in 0..2 {
            for _ in 0..30 {
                let queue = &mut guest.queues[queue];
                let (cid, status, lba) = guest.host.wait(queue);
                assert_eq!(status, Status::SUCCESS);
                assert_eq!(places[usize::from(cid)].replace(u64::from(lba)), None);
            }
        }
        let mut all: Vec<_> = places.iter().map(|place| place.unwrap()).collect();
        for (byte, place) in sent.iter().zip(&all) {
            let sqe = guest.rw(NvmOpcode::Read, *place, 2);
            assert_eq!(guest.run(0, sqe).0, Status::SUCCESS);
            assert_eq!(guest.host.peek(data, 1024), byte.to_le_bytes().repeat(512));
        }
        all.sort_unstable();
        let expected: Vec<_> = (0..60).map(|nth| (round * 60 + nth) * 2).collect();
        assert_eq!(all, expected);
    }
}

#[test]
fn an_append_returns_a_64_bit_lba() {
    let mut guest = Guest::new(memory("mem:5TiB", "zoned=2TiB"));
    assert_eq!(guest.append(1 << 32, 2, 1), (Status::SUCCESS, 1 << 32));
    assert_eq!(guest.append(1 << 32, 2, 2), (Status::SUCCESS, (1 << 32) + 2));
    assert_eq!(guest.read((1 << 32) + 1, 2).unwrap(), [1, 2]);
}

#[test]
fn zones_of_a_file_survive_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.img");
    std::fs::File::create(&path).unwrap().set_len(1536 << 10).unwrap();
    let mut guest = Guest::new(file(&path, SMALL, false));
    assert_eq!(guest.write(0, 96, 1), Status::SUCCESS);
    assert_eq!(guest.append(SIZE, 7, 2), (Status::SUCCESS, SIZE));
    assert_eq!(guest.send(3, 2 * SIZE, false), Status::SUCCESS);
    let before = guest.states();
    drop(guest);
    // A recovery after a crash keeps zones open. Opening the disk again without a recovery closes
    // them.
    let mut guest = Guest::new(file(&path, SMALL, true));
    assert_eq!(guest.states(), before);
    drop(guest);
    let mut guest = Guest::new(file(&path, SMALL, false));
    let mut after = before;
    (after[1].0, after[2].0) = (ZoneState::Closed, ZoneState::Empty);
    assert_eq!(guest.states(), after);
    assert_eq!(guest.read(SIZE, 8).unwrap(), [2, 2, 2, 2, 2, 2, 2, 0]);
    assert_eq!(guest.read(0, 96).unwrap(), [1; 96]);
    assert_eq!(guest.write(SIZE + 7, 1, 3), Status::SUCCESS);
    // After a zone reset, old data cannot be read any more.
    assert_eq!(guest.send(4, 0, true), Status::SUCCESS);
    assert_eq!(guest.write(0, 1, 9), Status::SUCCESS);
    assert_eq!(guest.read(0, 3).unwrap(), [9, 0, 0]);
    let flush = Sqe::flush(1, 0);
    assert_eq!(guest.run(0, flush).0, Status::SUCCESS);
}
