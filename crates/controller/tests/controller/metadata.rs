//! Metadata and protection information: layout, checks, and comparison with a simple model.

use crate::common;
use common::{Host, Queue, config};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use shadowbell_controller::{Config, NamespaceConfig, Polling};
use shadowbell_disk::{Disk, MetadataFormat};
use shadowbell_disk_file::{FileDisk, FileOptions};
use shadowbell_disk_layers::MetadataDisk;
use shadowbell_spec::feature::{HostBehaviorSupport, fid};
use shadowbell_spec::identify::{IdentifyController, IdentifyNamespace, IdentifyNvmNamespace, cns};
use shadowbell_spec::nvm::{
    CopyFields, CopyRange, DatasetManagement, DsmRange, LongCopyRange, PRINFO_APPTAG, PRINFO_GUARD,
    PRINFO_PRACT, PRINFO_REFTAG, RwFields,
};
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::protection::{GuardKind, ProtectionInfo};
use shadowbell_spec::sgl::SglDescriptor;
use shadowbell_spec::{Sqe, Status};
use std::sync::Arc;
use std::time::Duration;
use zerocopy::{FromBytes, IntoBytes};

const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));
const ALL: u8 = PRINFO_GUARD | PRINFO_APPTAG | PRINFO_REFTAG;

/// Data and metadata.
type Block = (Vec<u8>, Vec<u8>);

/// Parses a metadata format from options.
fn format(options: &str) -> MetadataFormat {
    let options = options.split('&').filter_map(|option| option.split_once('='));
    MetadataFormat::parse(options).unwrap().unwrap()
}

fn on(disk: Arc<dyn Disk>, options: &str) -> Arc<dyn Disk> {
    Arc::new(MetadataDisk::new(disk, format(options)).unwrap())
}

/// Host of one namespace with metadata, and the metadata format of this namespace.
struct Guest {
    host: Host,
    queue: Queue,
    format: MetadataFormat,
    block: usize,
    blocks: u64,
    data: u64,
    metadata: u64,
}

impl Guest {
    fn new(disk: &str, options: &str) -> Self {
        Self::with(shadowbell_disk_file::open(disk).unwrap(), options)
    }

    fn with(disk: Arc<dyn Disk>, options: &str) -> Self {
        let disk = on(disk, options);
        let info = disk.info();
        let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
        let mut host = Host::with(Config { namespaces, ..Config::default() }, ADAPTIVE);
        let queue = host.create(1, 64, false);
        let (data, metadata) = (host.alloc(65536), host.alloc(65536));
        let mut guest = Self {
            host,
            queue,
            format: format(options),
            block: info.block_size as usize,
            blocks: info.blocks,
            data,
            metadata,
        };
        guest.enable_extended_formats(1);
        guest
    }

    fn enable_extended_formats(&mut self, lbafee: u8) {
        let behavior = HostBehaviorSupport { lbafee, ..HostBehaviorSupport::default() };
        let at = self.host.alloc(4096);
        self.host.poke(at, behavior.as_bytes());
        let fields = shadowbell_spec::admin::SetFeatures {
            fid: fid::HOST_BEHAVIOR_SUPPORT,
            ..Default::default()
        };
        self.host.must(Sqe::set_features(0, fields, 0).with_prps(at, 0));
    }

    fn size(&self) -> usize {
        self.format.size.into()
    }

    /// Builds a command with its data and metadata pointers.
    fn command(&self, op: NvmOpcode, fields: RwFields) -> Sqe {
        let count = usize::from(fields.nlb0) + 1;
        let extended = if self.format.extended { self.size() } else { 0 };
        let len = count * (self.block + extended);
        assert!(len <= 65536);
        let sqe = Sqe::with_rw(op, 1, fields, 0);
        let descriptor = SglDescriptor::data_block(self.data, len as u32);
        // More than two pages would need a PRP list, so the command uses an SGL instead.
        let sqe = if len <= 4096 { sqe.with_prps(self.data, 0) } else { sqe.with_sgl(descriptor) };
        Sqe { mptr: self.metadata, ..sqe }
    }

    fn run(&mut self, op: NvmOpcode, fields: RwFields) -> Status {
        let mut sqe = self.command(op, fields);
        let stripped =
            fields.prinfo & PRINFO_PRACT != 0 && self.format.protection_size() == self.size();
        if stripped && self.format.extended {
            let len = (usize::from(fields.nlb0) + 1) * self.block;
            sqe = sqe.with_sgl(SglDescriptor::data_block(self.data, len as u32));
        }
        self.host.run(&mut self.queue, sqe).0
    }

    /// Stores blocks with their metadata in the transfer buffers.
    fn put(&mut self, blocks: &[Block]) {
        for (nth, (data, own)) in blocks.iter().enumerate() {
            let (block, size) = (self.block, self.size());
            let (at, of) = match self.format.extended {
                true => (self.data + (nth * (block + size)) as u64, None),
                false => (self.data + (nth * block) as u64, Some(self.metadata)),
            };
            self.host.poke(at, data);
            let own_at = of.map_or(at + block as u64, |of| of + (nth * size) as u64);
            self.host.poke(own_at, own);
        }
    }

    fn get(&self, count: usize) -> Vec<Block> {
        let (block, size) = (self.block, self.size());
        let one = |nth: usize| {
            let (at, own) = match self.format.extended {
                true => {
                    let at = self.data + (nth * (block + size)) as u64;
                    (at, at + block as u64)
                }
                false => (self.data + (nth * block) as u64, self.metadata + (nth * size) as u64),
            };
            (self.host.peek(at, block), self.host.peek(own, size))
        };
        (0..count).map(one).collect()
    }
}

/// Computes the protection information of a block.
fn protect(format: &MetadataFormat, data: &[u8], own: &mut [u8], app_tag: u16, ref_tag: u64) {
    let kind = if format.wide_guard { GuardKind::Crc64 } else { GuardKind::Crc16 };
    let size = if format.wide_guard { 16 } else { 8 };
    let at = if format.first { 0 } else { own.len() - size };
    let covered: Vec<u8> = data.iter().chain(&own[..at]).copied().collect();
    let guard = kind.guard(&covered, &[]);
    let info = ProtectionInfo { guard, app_tag, ref_tag: ref_tag & kind.ref_mask() };
    own[at..at + size].copy_from_slice(&info.encode(kind)[..size]);
}

fn rw(slba: u64, count: usize) -> RwFields {
    RwFields { slba, nlb0: (count - 1) as u16, ..RwFields::default() }
}

#[test]
fn identify_reports_the_format() {
    let mut guest = Guest::new("mem:1MiB?block-size=4096", "metadata=64&pi=2&guard=64&pi-first=on");
    let identify = |cns, nsid| {
        let fields = shadowbell_spec::admin::Identify { cns, ..Default::default() };
        Sqe::identify(nsid, fields, 0)
    };
    let page = guest.host.page(identify(cns::NAMESPACE, 1)).unwrap();
    let namespace = IdentifyNamespace::read_from_bytes(&page).unwrap();
    assert_eq!((namespace.lbaf[0].ms, namespace.lbaf[0].lbads), (64, 12));
    assert_eq!((namespace.dps.pit(), namespace.dps.pip()), (2, true));
    assert!(namespace.mc.separate() && !namespace.mc.extended() && !namespace.flbas.extended());
    assert!(namespace.dpc.type2() && namespace.dpc.first() && !namespace.dpc.last());
    assert_eq!(namespace.nsze, guest.blocks);
    let page = guest.host.page(identify(cns::CSI_NAMESPACE, 1)).unwrap();
    let nvm = IdentifyNvmNamespace::read_from_bytes(&page).unwrap();
    assert_eq!((nvm.elbaf[0], nvm.lbstm), (2 << 7, 0));
    let page = guest.host.page(identify(cns::CONTROLLER, 0)).unwrap();
    assert!(IdentifyController::read_from_bytes(&page).unwrap().ctratt.elbas());
    // A namespace with extended guards is unknown to a host that has not enabled the extended LBA
    // formats.
    guest.enable_extended_formats(0);
    let unknown = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
    for op in [NvmOpcode::Read, NvmOpcode::Write, NvmOpcode::Verify, NvmOpcode::WriteZeroes] {
        assert_eq!(guest.run(op, rw(0, 1)), unknown);
    }
    guest.enable_extended_formats(1);
    assert_eq!(guest.run(NvmOpcode::Read, rw(0, 1)), Status::SUCCESS);
    let guest = Guest::new("mem:1MiB", "metadata=8&extended=on");
    let (status, _) = { guest }.host.admin(identify(cns::NAMESPACE, 1).with_prps(0x11_0000, 0));
    assert!(status.is_success());
}

/// Simple model of a controller with metadata.
struct Model {
    format: MetadataFormat,
    blocks: Vec<Block>,
}

impl Model {
    fn new(guest: &Guest) -> Self {
        let mut own = vec![0; guest.size()];
        let at = guest.format.protection_at();
        own[at..at + guest.format.protection_size()].fill(0xff);
        let fresh = (vec![0; guest.block], own);
        Self { format: guest.format, blocks: vec![fresh; guest.blocks as usize] }
    }

    fn check(&self, (data, own): &Block, fields: &RwFields, nth: u64) -> Status {
        let format = &self.format;
        if format.protection == 0 {
            return Status::SUCCESS;
        }
        let (at, size) = (format.protection_at(), format.protection_size());
        let bytes = &own[at..at + size];
        let kind = format.guard();
        let info = ProtectionInfo::decode(kind, bytes);
        let all_ones = info.ref_tag == kind.ref_mask();
        if info.app_tag == 0xffff && (format.protection != 3 || all_ones) {
            return Status::SUCCESS;
        }
        let mut wanted = own.clone();
        protect(format, data, &mut wanted, 0, 0);
        let guard = ProtectionInfo::decode(kind, &wanted[at..]).guard;
        if fields.prinfo & PRINFO_GUARD != 0 && guard != info.guard {
            return Status::GUARD_CHECK;
        }
        let masked = |tag: u16| tag & fields.apptag_mask;
        if fields.prinfo & PRINFO_APPTAG != 0 && masked(info.app_tag) != masked(fields.apptag) {
            return Status::APPLICATION_TAG_CHECK;
        }
        let is_expected = info.ref_tag == (u64::from(fields.reftag) + nth) & kind.ref_mask();
        if fields.prinfo & PRINFO_REFTAG != 0 && !is_expected {
            return Status::REFERENCE_TAG_CHECK;
        }
        Status::SUCCESS
    }

    fn run(&mut self, op: NvmOpcode, fields: RwFields, given: &[Block]) -> (Status, Vec<Block>) {
        let pi = self.format.protection;
        let range = fields.slba as usize..fields.slba as usize + usize::from(fields.nlb0) + 1;
        if range.end > self.blocks.len() {
            return (Status::LBA_OUT_OF_RANGE.with_dnr(), Vec::new());
        }
        let makes = pi != 0 && fields.prinfo & PRINFO_PRACT != 0;
        let invalid = Status::INVALID_PROTECTION_INFORMATION.with_dnr();
        let checks_reference = fields.prinfo & PRINFO_REFTAG != 0 && op != NvmOpcode::WriteZeroes;
        let is_wrong = pi == 3 || pi == 1 && u64::from(fields.reftag) != fields.slba;
        if pi != 0 && checks_reference && is_wrong {
            return (invalid, Vec::new());
        }
        if makes && matches!(op, NvmOpcode::Compare | NvmOpcode::Verify) {
            return (invalid, Vec::new());
        }
        let step = if pi == 3 { 0 } else { 1 };
        let mut new = self.blocks[range.clone()].to_vec();
        let differs = || new.iter().zip(given).any(|(own, given)| own.0 != given.0);
        if op == NvmOpcode::Compare && differs() {
            return (Status::COMPARE_FAILURE.with_dnr(), Vec::new());
        }
        let (at, size) = (self.format.protection_at(), self.format.protection_size());
        for (nth, own) in new.iter_mut().enumerate() {
            let tag = u64::from(fields.reftag) + step * nth as u64;
            let mut status = Status::SUCCESS;
            match op {
                NvmOpcode::Read | NvmOpcode::Verify => {
                    status = self.check(own, &fields, step * nth as u64);
                }
                NvmOpcode::Compare => {
                    status = self.check(own, &fields, step * nth as u64);
                    let plain = |own: &[u8]| [&own[..at], &own[at + size..]].concat();
                    if status.is_success() && plain(&own.1) != plain(&given[nth].1) {
                        status = Status::COMPARE_FAILURE.with_dnr();
                    }
                }
                NvmOpcode::Write => {
                    let mut wanted = given[nth].clone();
                    if makes {
                        if size == usize::from(self.format.size) {
                            wanted.1.fill(0);
                        }
                        protect(&self.format, &wanted.0, &mut wanted.1, fields.apptag, tag);
                    } else {
                        status = self.check(&wanted, &fields, step * nth as u64);
                    }
                    *own = wanted;
                }
                NvmOpcode::WriteZeroes => {
                    own.0.fill(0);
                    own.1.fill(0);
                    own.1[at..at + size].fill(0xff);
                    if makes {
                        protect(&self.format, &own.0, &mut own.1, fields.apptag, tag);
                    }
                }
                _ => unreachable!(),
            }
            if !status.is_success() {
                return (status, Vec::new());
            }
        }
        self.blocks[range].clone_from_slice(&new);
        (Status::SUCCESS, new)
    }
}

/// Command of the test. It may contain a deliberate error.
#[derive(Clone, Debug)]
struct Step {
    op: NvmOpcode,
    slba: u64,
    count: usize,
    prinfo: u8,
    apptag: u16,
    apptag_mask: u16,
    /// Deliberate error: in the reference tag, in a guard or in an application tag. Other values
    /// mean no error.
    wrong: u8,
    escapes: bool,
    fill: u8,
}

fn step(blocks: u64) -> impl Strategy<Value = Step> {
    let op = prop_oneof![
        4 => Just(NvmOpcode::Read),
        4 => Just(NvmOpcode::Write),
        1 => Just(NvmOpcode::Compare),
        1 => Just(NvmOpcode::Verify),
        1 => Just(NvmOpcode::WriteZeroes),
    ];
    let tags = (
        prop_oneof![Just(5), Just(0xffff), any::<u16>()],
        prop_oneof![Just(0), Just(0xffff), any::<u16>()],
    );
    let fields = (0u8..16, tags, 0u8..8, prop::bool::weighted(0.1), 0u8..4);
    (op, 0..blocks + 1, 1usize..7, fields).prop_map(
        |(op, slba, count, (prinfo, (apptag, apptag_mask), wrong, escapes, fill))| Step {
            op,
            slba,
            count,
            prinfo,
            apptag,
            apptag_mask,
            wrong,
            escapes,
            fill,
        },
    )
}

fn execute_step(guest: &mut Guest, model: &mut Model, step: &Step) {
    let Step { op, slba, count, prinfo, apptag, apptag_mask, wrong, .. } = *step;
    let reftag = slba as u32 + u32::from(wrong == 1);
    let fields = RwFields { prinfo, apptag, apptag_mask, reftag, ..rw(slba, count) };
    let format = guest.format;
    let stride = if format.protection == 3 { 0 } else { 1 };
    let given: Vec<_> = (0..count)
        .map(|nth| {
            let data = vec![step.fill; guest.block];
            let mut own: Vec<u8> = (0..guest.size()).map(|at| at as u8 ^ step.fill).collect();
            if format.protection != 0 {
                let app_tag = if step.escapes { 0xffff } else { apptag };
                let tag = u64::from(reftag) + stride * nth as u64 + u64::from(wrong == 2);
                protect(&format, &data, &mut own, app_tag, tag);
                own[format.protection_at()] ^= u8::from(wrong == 3 && nth + 1 == count);
            }
            (data, own)
        })
        .collect();
    let stripped = format.protection != 0
        && prinfo & PRINFO_PRACT != 0
        && format.protection_size() == guest.size();
    if stripped {
        let data: Vec<u8> = given.iter().flat_map(|(data, _)| data).copied().collect();
        guest.host.poke(guest.data, &data);
    } else {
        guest.put(&given);
    }
    let (expected, found) = model.run(op, fields, &given);
    let status = guest.run(op, fields);
    let code = |status: Status| status.code();
    assert_eq!(code(status), code(expected), "{step:?}");
    if op == NvmOpcode::Read && status.is_success() {
        if stripped {
            let data: Vec<u8> = found.iter().flat_map(|(data, _)| data).copied().collect();
            assert_eq!(guest.host.peek(guest.data, data.len()), data, "{step:?}");
        } else {
            assert!(guest.get(count) == found, "{step:?}");
        }
    }
}

fn compare_with_model(disk: Arc<dyn Disk>, options: &str, steps: usize) {
    let mut guest = Guest::with(disk, options);
    let mut model = Model::new(&guest);
    let mut runner = TestRunner::default();
    for _ in 0..steps {
        let step = step(guest.blocks).new_tree(&mut runner).unwrap().current();
        execute_step(&mut guest, &mut model, &step);
    }
    // Final comparison of all blocks.
    for slba in 0..guest.blocks {
        assert_eq!(guest.run(NvmOpcode::Read, rw(slba, 1)), Status::SUCCESS);
        assert!(guest.get(1)[0] == model.blocks[slba as usize], "block {slba}");
    }
}

const OPTIONS: [&str; 12] = [
    "metadata=8",
    "metadata=64&extended=on",
    "metadata=8&pi=1",
    "metadata=8&pi=1&extended=on",
    "metadata=8&pi=2",
    "metadata=8&pi=3",
    "metadata=16&pi=1&guard=64",
    "metadata=16&pi=3&guard=64&extended=on",
    "metadata=16&pi=1",
    "metadata=64&pi=2&pi-first=on",
    "metadata=64&pi=2&guard=64&extended=on",
    "metadata=64&pi=3&pi-first=on&guard=64",
];

#[test]
fn a_memory_disk_with_metadata_matches_the_model() {
    for (nth, options) in OPTIONS.into_iter().enumerate() {
        let disk = if nth % 2 == 0 { "mem:24KiB" } else { "mem:96KiB?block-size=4096" };
        compare_with_model(shadowbell_disk_file::open(disk).unwrap(), options, 100);
    }
}

#[test]
fn a_file_with_metadata_matches_the_model() {
    for options in [OPTIONS[2], OPTIONS[7], OPTIONS[9]] {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(24 << 10).unwrap();
        let disk = FileDisk::open(file.path(), &FileOptions::default()).unwrap();
        compare_with_model(Arc::new(disk), options, 100);
    }
}

#[test]
fn invalid_metadata_pointers_are_refused() {
    let mut guest = Guest::new("mem:1MiB", "metadata=8&pi=1");
    let read = guest.command(NvmOpcode::Read, rw(0, 1));
    let run = |guest: &mut Guest, sqe: Sqe| guest.host.run(&mut guest.queue, sqe).0;
    let sgl = SglDescriptor::data_block(guest.data, 512);
    let invalid = Status::INVALID_FIELD.with_dnr();
    assert_eq!(run(&mut guest, Sqe { mptr: read.mptr + 2, ..read }), invalid);
    assert_eq!(run(&mut guest, Sqe { mptr: read.mptr + 3, ..read }.with_sgl(sgl)), Status::SUCCESS);
    let list = read.with_sgl(sgl);
    assert_eq!(run(&mut guest, Sqe { flags: 0b1000_0000, ..list }), invalid);
    let far = run(&mut guest, Sqe { mptr: 1 << 50, ..read });
    assert!(!far.is_success());
    // With PRACT, no metadata are transferred, so even an invalid metadata pointer is ignored.
    let stripped = RwFields { prinfo: PRINFO_PRACT, ..rw(0, 1) };
    let stripped = guest.command(NvmOpcode::Read, stripped);
    assert_eq!(run(&mut guest, Sqe { mptr: 1 << 50, ..stripped }), Status::SUCCESS);
    // The data of the transfer are as long as MDTS allows, so with the metadata it is too long.
    let guest = Guest::new("mem:4MiB", "metadata=8&extended=on");
    let mdts = 1usize << (12 + config(&["mem:1MiB"]).mdts);
    let sqe = Sqe::with_rw(NvmOpcode::Read, 1, rw(0, mdts / 512), 0);
    assert_eq!(run(&mut { guest }, sqe), invalid);
}

#[test]
fn deallocated_blocks_are_not_checked() {
    for options in ["metadata=8&pi=1", "metadata=16&pi=3&guard=64"] {
        let mut guest = Guest::new("mem:1MiB", options);
        let kind = guest.format.guard();
        let insert = |slba| RwFields { prinfo: PRINFO_PRACT, reftag: slba as u32, ..rw(slba, 2) };
        assert_eq!(guest.run(NvmOpcode::Write, insert(7)), Status::SUCCESS);
        let range = DsmRange { blocks: 1, slba: 7, attributes: 0 };
        guest.host.poke(guest.data, range.as_bytes());
        let fields = DatasetManagement { ad: true, ..Default::default() };
        let sqe = Sqe::dsm(1, fields, 0).with_prps(guest.data, 0);
        assert_eq!(guest.host.run(&mut guest.queue, sqe).0, Status::SUCCESS);
        // The tags of the block disable the check. The tags that the read expects have no
        // influence.
        let prinfo = PRINFO_GUARD | PRINFO_APPTAG;
        let read = RwFields { prinfo, apptag: 9, apptag_mask: 0xffff, ..rw(7, 1) };
        assert_eq!(guest.run(NvmOpcode::Read, read), Status::SUCCESS);
        assert_eq!(guest.get(1)[0].1, vec![0xff; kind.size()]);
        let status = guest.run(NvmOpcode::Read, RwFields { slba: 8, ..read });
        assert_eq!(status, Status::APPLICATION_TAG_CHECK);
    }
}

#[test]
fn a_long_range_is_verified_in_pieces() {
    let mut guest = Guest::new("mem:8MiB", "metadata=8&pi=1");
    let blocks = 6000;
    let fields = RwFields { prinfo: PRINFO_PRACT, reftag: 3, apptag: 1, ..rw(3, blocks) };
    assert_eq!(guest.run_plain(NvmOpcode::WriteZeroes, fields), Status::SUCCESS);
    let verify = RwFields { prinfo: ALL, apptag_mask: 0xffff, ..fields };
    assert_eq!(guest.run_plain(NvmOpcode::Verify, verify), Status::SUCCESS);
    // The last block has another tag than the command expects. The block after it was never
    // written.
    let last = RwFields { reftag: 9, apptag: 1, prinfo: PRINFO_PRACT, ..rw(3 + 5999, 1) };
    assert_eq!(guest.run(NvmOpcode::Write, last), Status::SUCCESS);
    assert_eq!(guest.run_plain(NvmOpcode::Verify, verify), Status::REFERENCE_TAG_CHECK);
    let shorter = RwFields { nlb0: verify.nlb0 - 1, ..verify };
    assert_eq!(guest.run_plain(NvmOpcode::Verify, shorter), Status::SUCCESS);
}

impl Guest {
    /// Runs a command without data.
    fn run_plain(&mut self, op: NvmOpcode, fields: RwFields) -> Status {
        self.host.run(&mut self.queue, Sqe::with_rw(op, 1, fields, 0)).0
    }

    fn copy(&mut self, fields: CopyFields, ranges: &[u8], upper: u32) -> Status {
        self.host.poke(self.data, ranges);
        let sqe = Sqe::copy(1, fields, 0).with_prps(self.data, 0);
        self.host.run(&mut self.queue, Sqe { cdw3: upper, ..sqe }).0
    }
}

#[test]
fn copies_check_and_insert() {
    for (options, desfmt) in [("metadata=8&pi=1", 0), ("metadata=16&pi=1&guard=64", 1)] {
        let mut guest = Guest::new("mem:1MiB", options);
        let written = RwFields { prinfo: PRINFO_PRACT, apptag: 5, reftag: 10, ..rw(10, 4) };
        let mark: Vec<u8> = (0..2048u32).map(|at| (at / 3) as u8).collect();
        guest.host.poke(guest.data, &mark);
        assert_eq!(guest.run(NvmOpcode::Write, written), Status::SUCCESS);
        let range = |slba: u64, count: u16, reftag: u32, apptag: u16| -> Vec<u8> {
            if desfmt == 0 {
                let zero = CopyRange::default();
                let range = CopyRange { slba, nlb0: count - 1, reftag, apptag, ..zero };
                return CopyRange { apptag_mask: 0xffff, ..range }.as_bytes().to_vec();
            }
            let mut range = LongCopyRange { slba, nlb0: count - 1, ..Default::default() };
            (range.apptag, range.apptag_mask) = (apptag, 0xffff);
            range.elbt[6..].copy_from_slice(&reftag.to_be_bytes());
            range.as_bytes().to_vec()
        };
        let copy = CopyFields {
            sdlba: 100,
            nr0: 1,
            desfmt,
            prinfor: ALL | PRINFO_PRACT,
            prinfow: PRINFO_PRACT,
            reftag: 100,
            apptag: 6,
            ..CopyFields::default()
        };
        let both = |apptag| [range(12, 2, 12, apptag), range(10, 1, 10, 5)].concat();
        assert_eq!(guest.copy(copy, &both(5), 0), Status::SUCCESS);
        let checked =
            RwFields { prinfo: ALL, reftag: 100, apptag: 6, apptag_mask: 0xffff, ..rw(100, 3) };
        assert_eq!(guest.run(NvmOpcode::Read, checked), Status::SUCCESS);
        let copied: Vec<u8> = guest.get(3).into_iter().flat_map(|(data, _)| data).collect();
        assert_eq!(copied, [&mark[1024..], &mark[..512]].concat());
        // The copy fails if the tags do not match.
        assert_eq!(guest.copy(copy, &both(4), 0), Status::APPLICATION_TAG_CHECK);
        let invalid = Status::INVALID_PROTECTION_INFORMATION.with_dnr();
        let elsewhere = [range(12, 2, 13, 5), range(10, 1, 10, 5)].concat();
        assert_eq!(guest.copy(copy, &elsewhere, 0), invalid);
        let uneven = CopyFields { prinfor: ALL, ..copy };
        assert_eq!(guest.copy(uneven, &both(5), 0), Status::INVALID_FIELD.with_dnr());
        let other = CopyFields { desfmt: desfmt ^ 1, ..copy };
        let refused = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
        assert_eq!(guest.copy(other, &both(5), 0), refused);
        // The reference tags are copied unchanged. They do not match the blocks of the destination,
        // so the check fails.
        let kept = CopyFields { prinfor: ALL, prinfow: ALL, ..copy };
        let kept = CopyFields { apptag: 5, apptag_mask: 0xffff, ..kept };
        assert_eq!(guest.copy(kept, &both(5), 0), Status::REFERENCE_TAG_CHECK);
        let kept = CopyFields { prinfow: PRINFO_GUARD | PRINFO_APPTAG, ..kept };
        assert_eq!(guest.copy(kept, &both(5), 0), Status::SUCCESS);
        let read = RwFields { prinfo: ALL, ..checked };
        assert_eq!(guest.run(NvmOpcode::Read, read), Status::APPLICATION_TAG_CHECK);
    }
}

#[test]
fn a_block_and_its_metadata_are_written_atomically() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(1 << 20).unwrap();
    let disk = FileDisk::open(file.path(), &FileOptions::default()).unwrap();
    let mut guest = Guest::with(Arc::new(disk), "metadata=8&pi=1");
    let prinfo = PRINFO_PRACT | ALL;
    let own = guest.host.alloc(32 * 4096);
    for round in 0..8u64 {
        let mut sqes = Vec::new();
        for nth in 0..32u64 {
            let at = own + nth * 4096;
            guest.host.poke(at, &vec![(round * 7 + nth) as u8; 4096]);
            let slba = nth * 5 % 24;
            let op = if nth % 3 == 0 { NvmOpcode::Read } else { NvmOpcode::Write };
            let fields = RwFields { prinfo, reftag: slba as u32, ..rw(slba, 8) };
            sqes.push(Sqe::with_rw(op, 1, fields, 0).with_prps(at, 0).with_cid(nth as u16));
        }
        for sqe in &sqes {
            guest.host.submit(&mut guest.queue, sqe);
        }
        for _ in &sqes {
            let (cid, status, _) = guest.host.wait(&mut guest.queue);
            assert!(status.is_success(), "command {cid}: {status}");
        }
    }
}
