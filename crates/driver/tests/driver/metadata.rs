//! Blocks with metadata. Either the controller inserts and strips the metadata, or the host
//! computes and checks them. Commands with metadata are also submitted again after a reset.

#[path = "../common/direct.rs"]
mod direct;

use crate::fake::Fake;
use crate::futures::block_on;
use crate::options;
use direct::Direct;
use shadowbell_controller::{Carrier, Config, Controller as Emulated, NamespaceConfig};
use shadowbell_controller::{Polling, Pool, PoolOptions};
use shadowbell_disk::{Disk, MetadataFormat};
use shadowbell_disk_file::{FileDisk, FileOptions, MemDisk};
use shadowbell_disk_layers::MetadataDisk;
use shadowbell_driver::{
    AsyncQueue, AttachOptions, Buffer, Command, Completion, Controller, IoErrorKind,
    MetadataCommand, Namespace, ProtectionError, QueueError, QueuePair, Recovery, RequestError,
};
use shadowbell_spec::Status;
use shadowbell_spec::identify::{Dps, LbaFormat};
use shadowbell_spec::nvm::{
    CopyRange, DsmRange, PRINFO_APPTAG, PRINFO_GUARD, PRINFO_PRACT, PRINFO_REFTAG,
};
use shadowbell_spec::protection::{GuardKind, ProtectionFields};
use shadowbell_testing::wait;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::IntoBytes;

const BLOCKS: u64 = 1024;
const ROOM: usize = 128 << 10;

struct Host {
    controller: Controller,
    queue: QueuePair,
    namespace: Namespace,
}

impl Host {
    fn over(disk: Arc<dyn Disk>, format: &str) -> Self {
        let options = format.split('&').filter_map(|option| option.split_once('='));
        let format = MetadataFormat::parse(options).unwrap().unwrap();
        let disk: Arc<dyn Disk> = Arc::new(MetadataDisk::new(disk, format).unwrap());
        let polling = Polling::Adaptive(Duration::from_micros(50));
        let pool = Pool::start(&PoolOptions { workers: 1, polling, pin: Vec::new() }).unwrap();
        let namespaces = vec![NamespaceConfig { disk, uuid: [9; 16] }];
        let config = Config { namespaces, ..Config::default() };
        let emulated = Emulated::new(config, pool, Carrier::default()).unwrap();
        let options = AttachOptions { queue_pairs: 1, ..AttachOptions::default() };
        let mut controller = Controller::attach(Arc::new(Direct(emulated)), &options).unwrap();
        let queue = controller.take_queue_pair().unwrap();
        let namespace = controller.namespace(1).unwrap().clone();
        Self { controller, queue, namespace }
    }

    fn new(format: &str) -> Self {
        Self::over(Arc::new(MemDisk::new(BLOCKS * 512, 512).unwrap()), format)
    }

    fn buffer(&self) -> Buffer {
        let mut buffer = self.controller.buffers(1, ROOM).unwrap().take().unwrap();
        buffer.fill(0xee);
        buffer
    }

    fn wait(&mut self) -> Completion {
        let completion = wait::until_some("a completion", || {
            self.queue.wait(Some(wait::deadline())).unwrap();
            self.queue.pop()
        });
        self.queue.ring_cq_doorbell_if_needed().unwrap();
        completion
    }

    fn plain(&mut self, command: Command, buffer: Option<Buffer>) -> (Status, Option<Buffer>) {
        self.queue.submit(command, buffer).unwrap();
        let done = self.wait();
        (done.status, done.buffer)
    }

    fn given(&mut self, command: &MetadataCommand, buffer: Option<Buffer>) -> (Status, Buffer) {
        self.queue.submit_with_metadata(command, buffer).unwrap();
        let done = self.wait();
        (done.status, done.buffer.unwrap_or_else(|| self.buffer()))
    }

    #[track_caller]
    fn write(&mut self, lba: u64, data: &[u8]) {
        let mut buffer = self.buffer();
        assert!(buffer.copy_from(8, data));
        let command = self.namespace.write(lba, (data.len() / 512) as u32).unwrap();
        assert_eq!(self.plain(command.at(8), Some(buffer)).0, Status::SUCCESS);
    }

    fn read(&mut self, lba: u64, blocks: u32) -> Result<Vec<u8>, Status> {
        let command = self.namespace.read(lba, blocks).unwrap();
        let buffer = self.buffer();
        let (status, buffer) = self.plain(command, Some(buffer));
        status.into_result().map(|()| buffer.unwrap().to_vec(blocks as usize * 512))
    }

    /// Reads the data and the metadata of one block, without checks.
    fn raw(&mut self, lba: u64) -> (Vec<u8>, Vec<u8>) {
        let format = *self.namespace.metadata().unwrap();
        let command = self.namespace.read_with_metadata(lba, 1, fields(0, lba)).unwrap();
        let buffer = self.buffer();
        let (status, buffer) = self.given(&command, Some(buffer));
        assert_eq!(status, Status::SUCCESS);
        let all = buffer.to_vec(512 + usize::from(format.size()));
        (all[..512].to_vec(), all[512..].to_vec())
    }

    /// Stores the data and the metadata of one block, without checks.
    fn put(&mut self, lba: u64, data: &[u8], own: &[u8]) {
        let command = self.namespace.write_with_metadata(lba, 1, fields(0, lba)).unwrap();
        let mut buffer = self.buffer();
        assert!(buffer.copy_from(0, data) && buffer.copy_from(512, own));
        assert_eq!(self.given(&command, Some(buffer)).0, Status::SUCCESS);
    }
}

fn fields(prinfo: u8, ref_tag: u64) -> ProtectionFields {
    ProtectionFields { prinfo, ref_tag, ..ProtectionFields::default() }
}

fn data(seed: u64, blocks: usize) -> Vec<u8> {
    let word = |at: u64| (seed << 32 ^ at).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..blocks as u64 * 64).flat_map(word).collect()
}

/// The CRC of T10 DIF, computed bit by bit.
fn t10(data: &[u8]) -> [u8; 2] {
    let mut crc = 0u16;
    for byte in data {
        crc ^= u16::from(*byte) << 8;
        for _ in 0..8 {
            crc = if crc & 0x8000 != 0 { crc << 1 ^ 0x8bb7 } else { crc << 1 };
        }
    }
    crc.to_be_bytes()
}

/// Formats whose metadata consist of protection information only: every type, guard and layout.
fn formats() -> impl Iterator<Item = (u8, bool, String)> {
    (1..=3).flat_map(|pi| {
        [false, true].into_iter().flat_map(move |wide| {
            ["off", "on"].map(|extended| {
                let (size, guard) = if wide { (16, 64) } else { (8, 16) };
                let text = format!("metadata={size}&guard={guard}&pi={pi}&extended={extended}");
                (pi, wide, text)
            })
        })
    })
}

#[test]
fn plain_commands_let_the_controller_insert_and_strip() {
    for (pi, wide, text) in formats() {
        let mut host = Host::new(&text);
        let format = *host.namespace.metadata().unwrap();
        assert_eq!((host.namespace.unusable(), format.protection()), (None, pi), "{text}");
        assert_eq!(format.guard() == GuardKind::Crc64, wide);
        let end = host.namespace.blocks();
        // The first three transfers need a PRP list, two PRPs, and one PRP. The fourth one ends at
        // the end of the disk.
        for (lba, blocks) in [(3, 60), (100, 9), (200, 1), (end - 17, 17)] {
            let wanted = data(lba, blocks as usize);
            host.write(lba, &wanted);
            assert_eq!(host.read(lba, blocks).unwrap(), wanted, "{text}");
            assert_eq!(
                host.plain(host.namespace.verify(lba, blocks).unwrap(), None).0,
                Status::SUCCESS
            );
            // The protection information that the controller inserts is the same that the host
            // computes.
            let (stored, own) = host.raw(lba);
            assert_eq!(stored, wanted[..512]);
            let mut made = vec![0; own.len()];
            let tag = if pi == 3 { 0 } else { lba };
            format.protect(&stored, &mut made, &fields(0, tag), 0);
            assert_eq!(own, made, "{text}");
            if !wide {
                assert_eq!(own[..2], t10(&stored));
            }
        }
        assert!(matches!(host.namespace.read(end - 1, 2), Err(RequestError::PastEnd { .. })));
        assert!(matches!(host.namespace.compare(0, 1), Err(RequestError::CompareMetadata { .. })));
        assert!(!host.namespace.compares());

        // The controller detects wrong data and wrong protection information.
        let (stored, own) = host.raw(10);
        let tags = if wide { 8 } else { 2 };
        let wrong =
            |at: usize| own.iter().enumerate().map(|(i, b)| b ^ u8::from(i == at)).collect();
        let wrong: [Vec<u8>; 2] = [wrong(0), wrong(own.len() - 1)];
        host.put(10, &stored, &wrong[0]);
        assert_eq!(host.read(3, 20).unwrap_err().code(), Status::GUARD_CHECK, "{text}");
        let verify = host.namespace.verify(10, 1).unwrap();
        assert_eq!(host.plain(verify, None).0.code(), Status::GUARD_CHECK);
        host.put(10, &stored, &wrong[1]);
        let found = host.read(3, 20);
        match pi {
            3 => assert_eq!(found.unwrap().len(), 20 * 512),
            _ => assert_eq!(found.unwrap_err().code(), Status::REFERENCE_TAG_CHECK, "{text}"),
        }
        let mut other = own.clone();
        other[tags] = 0x80;
        host.put(10, &stored, &other);
        let app = ProtectionFields { app_mask: 0xff00, ..fields(PRINFO_APPTAG, 10) };
        let read = host.namespace.read_with_metadata(10, 1, app).unwrap();
        let buffer = host.buffer();
        assert_eq!(host.given(&read, Some(buffer)).0.code(), Status::APPLICATION_TAG_CHECK);
        host.put(10, &stored, &own);
        assert_eq!(host.read(3, 60).unwrap(), data(3, 60));

        // Write Zeroes is executed with and without Deallocate. The protection information of a
        // deallocated block consists of FFh bytes. This value disables the checks.
        for deallocate in [false, true] {
            let zeroes = host.namespace.write_zeroes(5, 4, deallocate).unwrap();
            assert_eq!(host.plain(zeroes, None).0, Status::SUCCESS);
            assert_eq!(host.read(4, 6).unwrap()[512..5 * 512], [0; 4 * 512]);
            assert_eq!(host.raw(5).1[0] == 0xff, deallocate, "{text}");
        }
        let mut buffer = host.buffer();
        let range = DsmRange { attributes: 0, blocks: 1, slba: 20 };
        assert!(buffer.copy_from(0, range.as_bytes()));
        let discard = host.namespace.deallocate(1).unwrap();
        assert_eq!(host.plain(discard, Some(buffer)).0, Status::SUCCESS);
        assert_eq!(host.read(20, 1).unwrap().len(), 512);

        // The blocks of a copy have the reference tags of their new LBAs.
        assert_eq!(host.namespace.copy_limits().is_some(), !wide);
        if !wide {
            let source = CopyRange { slba: 30, nlb0: 4, ..CopyRange::default() };
            let mut buffer = host.buffer();
            assert!(buffer.copy_from(0, source.as_bytes()));
            let copy = host.namespace.copy(500, &[source]).unwrap();
            assert_eq!(host.plain(copy, Some(buffer)).0, Status::SUCCESS, "{text}");
            assert_eq!(host.read(500, 5).unwrap(), data(3, 60)[27 * 512..32 * 512]);
        }
    }
}

#[test]
fn a_host_computes_and_checks_protection_information() {
    let all = PRINFO_GUARD | PRINFO_APPTAG | PRINFO_REFTAG;
    let more = ["metadata=64&pi=1", "metadata=64&pi=2&guard=64&pi-first=on&extended=on"];
    let formats = formats().map(|(pi, _, text)| (pi, text));
    for (pi, text) in formats.chain([(1, more[0].to_owned()), (2, more[1].to_owned())]) {
        let mut host = Host::new(&text);
        let (lba, blocks) = (host.namespace.blocks() - 33, 33);
        let checks = if pi == 3 { all & !PRINFO_REFTAG } else { all };
        // With type 2, the reference tag is unrelated to the LBA.
        let ref_tag = if pi == 2 { 0xffff_fff0 } else { lba };
        let tags = ProtectionFields { prinfo: checks, app_tag: 0x5151, app_mask: 0xffff, ref_tag };
        let write = host.namespace.write_with_metadata(lba, blocks, tags).unwrap();
        let mut buffer = host.buffer();
        assert!(buffer.copy_from(0, &data(1, write.buffer_bytes().div_ceil(512))));
        // The write fails, because the protection information has not been generated yet.
        let (status, mut buffer) = host.given(&write, Some(buffer));
        assert_eq!(status.code(), Status::GUARD_CHECK, "{text}");
        assert!(write.protect(&mut buffer));
        let written = buffer.to_vec(write.buffer_bytes());
        let (status, _) = host.given(&write.with_fua(), Some(buffer));
        assert_eq!(status, Status::SUCCESS, "{text}");

        let read = host.namespace.read_with_metadata(lba, blocks, tags).unwrap();
        let buffer = host.buffer();
        let (status, buffer) = host.given(&read, Some(buffer));
        assert_eq!(status, Status::SUCCESS, "{text}");
        assert_eq!(buffer.to_vec(read.buffer_bytes()), written, "{text}");
        assert_eq!(read.check(&buffer), Ok(()));
        // The controller and the host detect the same error.
        let wrong = ProtectionFields { app_tag: 0x5150, ..tags };
        let other = host.namespace.read_with_metadata(lba, blocks, wrong).unwrap();
        let found = Status::APPLICATION_TAG_CHECK;
        assert_eq!(other.check(&buffer), Err(ProtectionError::Block { lba, status: found }));
        assert_eq!(host.given(&other, Some(buffer)).0.code(), found);
        if pi == 2 {
            let wrong = ProtectionFields { ref_tag: ref_tag + 1, ..tags };
            let other = host.namespace.read_with_metadata(lba, blocks, wrong).unwrap();
            let buffer = host.buffer();
            assert_eq!(host.given(&other, Some(buffer)).0.code(), Status::REFERENCE_TAG_CHECK);
        }
        let verify = host.namespace.verify_with_metadata(lba, blocks, tags).unwrap();
        assert_eq!(host.given(&verify, None).0, Status::SUCCESS, "{text}");
        let verify = host.namespace.verify_with_metadata(lba, blocks, wrong).unwrap();
        assert_eq!(host.given(&verify, None).0.code(), Status::APPLICATION_TAG_CHECK);
        let compare = host.namespace.compare_with_metadata(lba, blocks, tags).unwrap();
        let mut buffer = host.buffer();
        assert!(buffer.copy_from(0, &written));
        let (status, mut buffer) = host.given(&compare, Some(buffer));
        assert_eq!(status, Status::SUCCESS, "{text}");
        assert!(buffer.copy_from(0, &[written[0] ^ 1]));
        assert_eq!(host.given(&compare, Some(buffer)).0.code(), Status::COMPARE_FAILURE);

        // If the metadata consist of protection information only, a command with PRACT transfers no
        // metadata. A `Command` without explicit tags works in the same way.
        let strips = ProtectionFields { prinfo: tags.prinfo | PRINFO_PRACT, ..tags };
        let read = host.namespace.read_with_metadata(lba, blocks, strips).unwrap();
        let alone = host.namespace.metadata().unwrap().is_protection_only();
        assert_eq!(
            (read.buffer_bytes() == 33 * 512, host.namespace.unusable().is_none()),
            (alone, alone)
        );
        let buffer = host.buffer();
        assert_eq!(host.given(&read, Some(buffer)).0, Status::SUCCESS, "{text}");
        if !alone {
            let error = host.namespace.read(lba, 1).unwrap_err();
            assert!(error.to_string().contains("metadata"), "{error}");
        } else if pi != 2 {
            assert_eq!(host.read(lba, 1).unwrap(), written[..512]);
        }
    }
}

#[test]
fn plain_metadata_is_stored_unchanged() {
    for extended in ["off", "on"] {
        let mut host = Host::new(&format!("metadata=16&extended={extended}"));
        let write = host.namespace.write_with_metadata(7, 20, fields(PRINFO_PRACT, 3)).unwrap();
        // These metadata contain no protection information, so PRACT and the tags have no effect.
        assert_eq!(write.buffer_bytes(), 20 * 528);
        let mut buffer = host.buffer();
        let wanted = data(5, 21)[..20 * 528].to_vec();
        assert!(buffer.copy_from(0, &wanted) && write.protect(&mut buffer));
        assert_eq!(host.given(&write, Some(buffer)).0, Status::SUCCESS);
        // The read transfers the data to another offset of the buffer.
        let read = host.namespace.read_with_metadata(7, 20, fields(0, 0)).unwrap().at(512);
        let read = if extended == "off" { read.metadata_at(0) } else { read };
        let buffer = host.buffer();
        let (status, buffer) = host.given(&read, Some(buffer));
        assert_eq!((status, read.check(&buffer)), (Status::SUCCESS, Ok(())));
        let found = buffer.to_vec(512 + read.transfer_bytes() as usize);
        let transfer = read.transfer_bytes() as usize;
        assert_eq!(found[512..], wanted[..transfer]);
        assert_eq!(found[..read.metadata_bytes() as usize], wanted[transfer..]);
        assert!(host.namespace.unusable().is_some() && host.namespace.copy_limits().is_none());
        // A buffer that is too short is refused, and returned.
        let short = host.controller.buffers(1, 20 * 528 - 4).unwrap().take().unwrap();
        let read = host.namespace.read_with_metadata(7, 20, fields(0, 0)).unwrap();
        assert!(matches!(read.check(&short), Err(ProtectionError::Buffer { .. })));
        let refused = host.queue.submit_with_metadata(&read, Some(short)).unwrap_err();
        assert!(matches!(refused.reason, QueueError::BufferTooShort { .. }), "{refused}");
        let refused = host.queue.submit_with_metadata(&read, None).unwrap_err();
        assert!(matches!(refused.reason, QueueError::BufferTooShort { .. }), "{refused}");
        let buffer = host.buffer();
        let refused =
            host.queue.submit_with_metadata(&read.metadata_at(20 * 528 + 1), Some(buffer));
        assert_eq!(refused.is_err(), extended == "off");
        if refused.is_ok() {
            assert_eq!(host.wait().status, Status::SUCCESS);
        }
        assert_eq!(host.queue.outstanding(), 0);
        let most = (host.controller.max_transfer_bytes() / 512) as u32;
        let fits = |blocks| host.namespace.read_with_metadata(0, blocks, fields(0, 0));
        assert_eq!(fits(most).is_ok(), extended == "off");
        let error = fits(most + 1).unwrap_err();
        assert!(matches!(error, RequestError::TooLong { .. }), "{error}");
    }
    let host = Host::new("metadata=8");
    let plain = Namespace::clone(&host.namespace);
    assert!(matches!(plain.write(0, 1), Err(RequestError::Unusable { .. })));
}

#[test]
fn futures_transfer_metadata() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(BLOCKS * 512).unwrap();
    let disk = FileDisk::open(file.path(), &FileOptions::default()).unwrap();
    let host = Host::over(Arc::new(disk), "metadata=16&guard=64&pi=2");
    let Host { controller, queue, namespace } = host;
    let pool = controller.buffers(70, 8192).unwrap();
    let disk = AsyncQueue::start(queue).unwrap().open(&namespace);
    let mut buffer = pool.take().unwrap();
    buffer.fill(3);
    // A write without metadata sets PRACT: the host transfers only data, and the controller inserts
    // the protection information.
    let buffer = block_on(disk.write(16, buffer)).unwrap();
    let read =
        namespace.read_with_metadata(16, 4, fields(PRINFO_GUARD | PRINFO_REFTAG, 16)).unwrap();
    let buffer = block_on(disk.transfer_with_metadata(read, buffer)).unwrap();
    assert_eq!(read.check(&buffer), Ok(()));
    let wrong = namespace.read_with_metadata(16, 4, fields(PRINFO_REFTAG, 17)).unwrap();
    let error = block_on(disk.transfer_with_metadata(wrong, buffer)).unwrap_err();
    let IoErrorKind::Status { status, .. } = error.kind else { panic!("{error}") };
    assert_eq!(status.code(), Status::REFERENCE_TAG_CHECK);
    // There are more futures than the queue has slots, and some futures are dropped.
    std::thread::scope(|scope| {
        for nth in 0..8u64 {
            let (disk, pool) = (&disk, &pool);
            scope.spawn(move || {
                for turn in 0..20 {
                    let lba = 100 + nth * 8;
                    let tags = fields(PRINFO_GUARD | PRINFO_REFTAG, nth << 40 | turn);
                    let namespace = disk.namespace();
                    let write = namespace.write_with_metadata(lba, 8, tags).unwrap();
                    let mut buffer = pool.take().unwrap();
                    buffer.fill(turn as u8);
                    assert!(write.protect(&mut buffer));
                    let buffer = block_on(disk.transfer_with_metadata(write, buffer)).unwrap();
                    let read = namespace.read_with_metadata(lba, 8, tags).unwrap();
                    drop(disk.transfer_with_metadata(read, pool.take().unwrap()));
                    let buffer = block_on(disk.transfer_with_metadata(read, buffer)).unwrap();
                    assert_eq!(read.check(&buffer), Ok(()));
                    assert_eq!(buffer.to_vec(1), [turn as u8]);
                }
            });
        }
    });
}

#[test]
fn a_resubmitted_command_keeps_its_tags() {
    let fake = Fake::new();
    fake.with(|state| {
        let namespace = state.namespaces.get_mut(&1).unwrap();
        namespace.lbaf[0] = LbaFormat { ms: 8, lbads: 9, rp: 0 };
        namespace.dps = Dps::new().with_pit(2);
        state.hold = true;
    });
    let recovery = Recovery { watch: Duration::from_millis(2), ..Recovery::default() };
    let attach = AttachOptions { recovery, ..options() };
    let mut controller = Controller::attach(fake.transport(), &attach).unwrap();
    let mut queue = controller.take_queue_pair().unwrap();
    let namespace = controller.namespace(1).unwrap().clone();
    let pool = controller.buffers(3, 8192).unwrap();
    let tags = ProtectionFields {
        prinfo: PRINFO_GUARD,
        app_tag: 0x1234,
        app_mask: 0xff,
        ref_tag: 0xabcd_ef01,
    };
    let given = namespace.write_with_metadata(5, 8, tags).unwrap();
    // Another command is submitted first, so that the command under test does not use the first
    // slot.
    queue.submit(namespace.flush(), None).unwrap();
    queue.submit_with_metadata(&given, pool.take()).unwrap();
    queue.submit(namespace.read(9, 2).unwrap(), pool.take()).unwrap();
    queue.submit(namespace.write_zeroes(77, 3, false).unwrap(), None).unwrap();
    queue.ring().unwrap();
    let entries = || {
        let held: Vec<_> = fake.state().held.iter().map(|(_, sqe)| sqe.with_cid(0)).collect();
        held
    };
    let before = entries();
    assert_eq!(before.len(), 4);
    let written = before[1];
    let dwords = (written.cdw2, written.cdw3, written.cdw14, written.cdw15);
    assert_eq!(dwords, (0, 0, 0xabcd_ef01, 0x00ff_1234));
    assert_eq!((written.cdw12, written.mptr), (7 | 1 << 28, written.prp1() + 4096));
    let read = before[2];
    assert_eq!((read.cdw12, read.mptr, read.cdw14, read.cdw15), (1 | 0b1101 << 26, 0, 9, 0));
    assert_eq!((before[3].cdw12, before[3].cdw14), (2 | 0b1001 << 26, 77));
    fake.with(|state| state.csts = state.csts.with_cfs(true));
    wait::until("a reset", || {
        queue.ring().unwrap();
        controller.recovery_stats().resets != 0 && fake.state().held.len() == 4
    });
    assert_eq!(entries(), before);
    // The commands that reuse the slots must not get the tags of the completed commands.
    for _ in 0..4 {
        fake.complete(0);
    }
    let mut done = 0;
    while queue.pop().is_some() {
        done += 1;
    }
    assert_eq!((done, pool.available()), (4, 3));
    for _ in 0..4 {
        queue.submit(namespace.flush(), None).unwrap();
    }
    queue.ring().unwrap();
    for sqe in entries() {
        assert_eq!((sqe.mptr, sqe.cdw2, sqe.cdw14, sqe.cdw15), (0, 0, 0, 0));
    }
}
