//! I/O commands: their effect on the disk, and the status of each invalid command.

use crate::common;
use common::{Host, Queue, slow_host};
use shadowbell_controller::{NamespaceConfig, Polling};
use shadowbell_spec::nvm::{DatasetManagement, RwFields};
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::regs::{self, Cc};
use shadowbell_spec::sqe::NSID_ALL;
use shadowbell_spec::{Sqe, Status};
use std::time::Duration;

const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));

fn host() -> (Host, Queue) {
    let mut host = Host::new(&["mem:8MiB", "mem:1MiB?block-size=4096"], ADAPTIVE);
    let queue = host.create(1, 64, true);
    (host, queue)
}

/// Sets PRP 1 and PRP 2 of a command for `pages`; for more than two pages, stores a PRP list.
fn prps(host: &mut Host, sqe: Sqe, pages: &[u64]) -> Sqe {
    match pages {
        [one] => sqe.with_prps(*one, 0),
        [one, two] => sqe.with_prps(*one, *two),
        [one, rest @ ..] => {
            let list = host.alloc(rest.len() as u64 * 8);
            for (i, page) in rest.iter().enumerate() {
                host.poke(list + i as u64 * 8, &page.to_le_bytes());
            }
            sqe.with_prps(*one, list)
        }
        [] => sqe,
    }
}

#[test]
fn written_data_is_read_back_through_scattered_pages() {
    let (mut host, mut queue) = host();
    for pages in [1usize, 2, 3, 17, 256] {
        let written: Vec<u64> = (0..pages).map(|_| host.alloc(8192)).collect();
        let read: Vec<u64> = (0..pages).map(|_| host.alloc(8192)).collect();
        for (i, page) in written.iter().enumerate() {
            let bytes: Vec<u8> = (0..4096).map(|b| (b * 7 + i * 13) as u8).collect();
            host.poke(*page, &bytes);
        }
        let blocks = (pages * 8 - 1) as u16;
        let sqe = prps(&mut host, Sqe::write(1, 3, blocks, 0), &written);
        assert_eq!(host.run(&mut queue, sqe).0, Status::SUCCESS);
        let sqe = prps(&mut host, Sqe::read(1, 3, blocks, 0), &read);
        assert_eq!(host.run(&mut queue, sqe).0, Status::SUCCESS);
        for (w, r) in written.iter().zip(&read) {
            assert_eq!(host.peek(*w, 4096), host.peek(*r, 4096));
        }
        let sqe = prps(&mut host, Sqe::compare(1, 3, blocks, 0), &read);
        assert_eq!(host.run(&mut queue, sqe).0, Status::SUCCESS);
        host.poke(read[pages - 1] + 4095, &[0xff]);
        let sqe = prps(&mut host, Sqe::compare(1, 3, blocks, 0), &read);
        assert_eq!(host.run(&mut queue, sqe).0.code(), Status::COMPARE_FAILURE);
    }
}

#[test]
fn write_zeroes_deallocate_verify_and_flush_work() {
    let (mut host, mut queue) = host();
    let page = host.alloc(4096);
    host.poke(page, &[0xaa; 4096]);
    assert!(host.run(&mut queue, Sqe::write(1, 0, 7, 0).with_prps(page, 0)).0.is_success());
    assert!(host.run(&mut queue, Sqe::write_zeroes(1, 1, 0, false, 0)).0.is_success());
    let ranges = host.alloc(4096);
    let range = |slba: u64, blocks: u32| {
        let mut bytes = vec![0u8; 4];
        bytes.extend(blocks.to_le_bytes());
        bytes.extend(slba.to_le_bytes());
        bytes
    };
    host.poke(ranges, &[range(3, 1), range(5, 2), range(0, 0)].concat());
    let dsm = DatasetManagement { nr0: 2, ad: true, ..DatasetManagement::default() };
    assert!(host.run(&mut queue, Sqe::dsm(1, dsm, 0).with_prps(ranges, 0)).0.is_success());
    assert!(host.run(&mut queue, Sqe::read(1, 0, 7, 0).with_prps(page, 0)).0.is_success());
    let bytes = host.peek(page, 4096);
    for (block, chunk) in bytes.chunks(512).enumerate() {
        let expected = if [1, 3, 5, 6].contains(&block) { 0 } else { 0xaa };
        assert!(chunk.iter().all(|b| *b == expected), "block {block}");
    }
    // Verify counts in the SMART log's data units read, but not in its host read commands.
    let before = host.controller.stats().io;
    assert!(host.run(&mut queue, Sqe::verify(1, 0, 100, 0)).0.is_success());
    let io = host.controller.stats().io;
    assert_eq!((io.reads - before.reads, io.others - before.others), (0, 1));
    assert_eq!(io.bytes_read - before.bytes_read, 101 * 512);
    assert!(host.run(&mut queue, Sqe::flush(1, 0)).0.is_success());
    assert!(host.run(&mut queue, Sqe::flush(NSID_ALL, 0)).0.is_success());
    // Ranges outside of the namespace.
    host.poke(ranges, &range((8 << 20) / 512, 1));
    let dsm = DatasetManagement { nr0: 0, ad: true, ..DatasetManagement::default() };
    let (status, _) = host.run(&mut queue, Sqe::dsm(1, dsm, 0).with_prps(ranges, 0));
    assert_eq!(status.code(), Status::LBA_OUT_OF_RANGE);
}

#[test]
fn every_bad_command_has_its_status_and_the_queue_continues() {
    let (mut host, mut queue) = host();
    let page = host.alloc(4096);
    let blocks = (8u64 << 20) / 512;
    let fields = |slba, nlb0| RwFields { slba, nlb0, ..RwFields::default() };
    let rw = |slba, nlb0| Sqe::with_rw(NvmOpcode::Read, 1, fields(slba, nlb0), 0);
    let bad_psdt = |flags| Sqe { flags, ..Sqe::read(1, 0, 0, 0).with_prps(page, 0) };
    let cases = [
        (Sqe::new(0x7f, 0, 1), Status::INVALID_OPCODE),
        (Sqe::new(0x0d, 0, 1), Status::INVALID_OPCODE),
        (Sqe::read(0, 0, 0, 0), Status::INVALID_NAMESPACE_OR_FORMAT),
        (Sqe::read(3, 0, 0, 0), Status::INVALID_NAMESPACE_OR_FORMAT),
        (Sqe::read(NSID_ALL, 0, 0, 0), Status::INVALID_NAMESPACE_OR_FORMAT),
        (rw(blocks, 0), Status::LBA_OUT_OF_RANGE),
        (rw(blocks - 1, 1), Status::LBA_OUT_OF_RANGE),
        (rw(u64::MAX, 0), Status::LBA_OUT_OF_RANGE),
        (rw(u64::MAX, 0xffff), Status::LBA_OUT_OF_RANGE),
        (rw(0, 2048), Status::INVALID_FIELD), // 1 MiB and a block, above MDTS
        (Sqe::read(1, 0, 0, 0).with_prps(page + 1, 0), Status::PRP_OFFSET_INVALID),
        (Sqe::read(1, 0, 15, 0).with_prps(page, page + 8), Status::PRP_OFFSET_INVALID),
        (Sqe::read(1, 0, 31, 0).with_prps(page, page + 4), Status::PRP_OFFSET_INVALID),
        (Sqe::read(1, 0, 0, 0).with_prps(0, 0), Status::DATA_XFER_ERROR),
        (Sqe::read(1, 0, 31, 0).with_prps(page, !7), Status::DATA_XFER_ERROR),
        (bad_psdt(0xc0), Status::INVALID_FIELD),
        // Half of a fused operation.
        (bad_psdt(0x01), Status::FUSED_MISSING),
        (bad_psdt(0x40), Status::SGL_DATA_LENGTH_INVALID),
        (Sqe::write_zeroes(1, blocks, 0, false, 0), Status::LBA_OUT_OF_RANGE),
        (Sqe::flush(9, 0), Status::INVALID_NAMESPACE_OR_FORMAT),
    ];
    for (sqe, expected) in cases {
        let (status, _) = host.run(&mut queue, sqe);
        assert_eq!(status.code(), expected, "{sqe:?}");
    }
    assert!(host.run(&mut queue, Sqe::read(1, 0, 7, 0).with_prps(page, 0)).0.is_success());
    assert!(host.controller.stats().io.errors >= cases.len() as u64);
}

#[test]
fn random_entries_never_stop_the_queue() {
    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;
    use zerocopy::FromBytes;
    let (mut host, mut queue) = host();
    let page = host.alloc(1 << 20);
    let mut runner = TestRunner::deterministic();
    for round in 0..3000u32 {
        let mut bytes = proptest::collection::vec(any::<u8>(), 64)
            .new_tree(&mut runner)
            .map(|t| proptest::strategy::ValueTree::current(&t))
            .unwrap();
        // Every second command has mostly valid fields, so that it is not refused by the first
        // checks.
        if round % 2 == 0 {
            bytes[0] = [0, 1, 2, 5, 8, 9, 0xc, 0x19][round as usize / 2 % 8];
            bytes[4..8].copy_from_slice(&1u32.to_le_bytes());
            bytes[44..48].fill(0);
            bytes[41..44].fill(0);
        }
        if round % 3 == 0 {
            bytes[24..32].copy_from_slice(&(page + u64::from(round % 64) * 4).to_le_bytes());
            bytes[32..40].copy_from_slice(&page.to_le_bytes());
        }
        let sqe = Sqe::read_from_bytes(&bytes).unwrap();
        let _ = host.run(&mut queue, sqe);
    }
    assert!(host.run(&mut queue, Sqe::read(1, 0, 7, 0).with_prps(page, 0)).0.is_success());
}

#[test]
fn a_4096_byte_namespace_and_larger_host_pages() {
    let mut host = Host::attach(
        shadowbell_controller::Controller::new(
            common::config(&["mem:8MiB?block-size=4096"]),
            common::pool(ADAPTIVE),
            shadowbell_controller::Carrier::default(),
        )
        .unwrap(),
    );
    // With CC.MPS 4, pages have 64 KiB. The admin queue must be aligned to this size, too.
    (host.admin.sq, host.admin.cq) = (common::BASE + 0x10_0000, common::BASE + 0x11_0000);
    host.enable_with(Cc::new().with_iosqes(6).with_iocqes(4).with_mps(4));
    assert!(host.csts().rdy());
    host.alloc(0x20_0000);
    while !host.alloc(4096).is_multiple_of(0x1_0000) {}
    host.alloc(15 * 4096);
    let mut queue = host.create(1, 1024, false);
    while !host.alloc(4096).is_multiple_of(0x1_0000) {}
    let at = host.alloc(0x2_0000) - 4096;
    host.poke(at + 512, &[9; 0xf000]);
    let write = Sqe::write(1, 0, 14, 0).with_prps(at + 512, 0);
    assert!(host.run(&mut queue, write).0.is_success());
    let list = Sqe::write(1, 0, 31, 0).with_prps(at, at + 4096);
    assert_eq!(host.run(&mut queue, list).0.code(), Status::PRP_OFFSET_INVALID);
}

#[test]
fn a_write_protected_namespace_refuses_every_change() {
    let disk = shadowbell_disk_file::open("mem:1MiB?read-only=on").unwrap();
    let namespaces = vec![NamespaceConfig { disk, uuid: [1; 16] }];
    let config = shadowbell_controller::Config { namespaces, ..Default::default() };
    let mut host = Host::with(config, ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    let page = host.alloc(4096);
    host.poke(page, &[0; 16]);
    host.poke(page + 4, &1u32.to_le_bytes());
    let dsm = DatasetManagement { nr0: 0, ad: true, ..DatasetManagement::default() };
    for sqe in [
        Sqe::write(1, 0, 0, 0).with_prps(page, 0),
        Sqe::write_zeroes(1, 0, 0, false, 0),
        Sqe::dsm(1, dsm, 0).with_prps(page, 0),
    ] {
        assert_eq!(host.run(&mut queue, sqe).0.code(), Status::NAMESPACE_WRITE_PROTECTED);
    }
    assert!(host.run(&mut queue, Sqe::read(1, 0, 0, 0).with_prps(page, 0)).0.is_success());
    assert!(host.run(&mut queue, Sqe::flush(1, 0)).0.is_success());
}

#[test]
fn an_abort_ends_a_command_at_the_disk() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    let page = host.alloc(4096);
    for cid in [10, 11, 12] {
        host.submit(&mut queue, &Sqe::read(1, 0, 0, cid).with_prps(page, 0));
    }
    host.until("three requests", || gate.waiting() == 3);
    gate.heed_cancel.store(true, std::sync::atomic::Ordering::Relaxed);
    let abort = |cid| Sqe::abort(shadowbell_spec::admin::Abort { sqid: 1, cid }, 0);
    assert_eq!(host.must(abort(11)) & 1, 0, "aborted");
    let (cid, status, _) = host.wait(&mut queue);
    assert_eq!((cid, status.code()), (11, Status::ABORT_REQUESTED));
    assert_eq!(host.must(abort(11)) & 1, 1, "there is no such command any more");
    gate.end(Ok(()));
    gate.end(Ok(()));
    assert_eq!(host.wait(&mut queue).0, 10);
    assert_eq!(host.wait(&mut queue).0, 12);
    assert_eq!(host.reap(&mut queue), None, "each command completes once");
    // An Asynchronous Event Request is the only admin command that can be aborted.
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    host.submit(&mut admin, &Sqe::async_event_request(77));
    let cid = 78;
    host.submit(&mut admin, &Sqe::abort(shadowbell_spec::admin::Abort { sqid: 0, cid: 77 }, cid));
    let mut done = [host.wait(&mut admin), host.wait(&mut admin)];
    done.sort_by_key(|d| d.0);
    assert_eq!((done[0].0, done[0].1.code()), (77, Status::ABORT_REQUESTED));
    assert_eq!((done[1].0, done[1].2 & 1), (78, 0));
    host.admin = admin;
}

#[test]
fn disk_errors_map_to_their_nvme_statuses() {
    use shadowbell_disk::DiskError;
    let (mut host, gate) = slow_host(ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    let page = host.alloc(4096);
    let read = Sqe::read(1, 0, 0, 0).with_prps(page, 0);
    let write = Sqe::write(1, 0, 0, 0).with_prps(page, 0);
    for (sqe, error, expected) in [
        (read, DiskError::Io(5), Status::UNRECOVERED_READ),
        (write, DiskError::Io(5), Status::WRITE_FAULT),
        (write, DiskError::NoSpace, Status::CAPACITY_EXCEEDED),
        (read, DiskError::OutOfRange, Status::LBA_OUT_OF_RANGE),
    ] {
        gate.end(Err(error));
        assert_eq!(host.run(&mut queue, sqe).0.code(), expected);
    }
    let io = host.controller.stats().io;
    assert_eq!((io.errors, io.media_errors), (4, 2));
}

#[test]
fn interrupts_come_once_a_batch_and_never_get_lost() {
    for polling in [Polling::Never, ADAPTIVE, Polling::Always] {
        let mut host = Host::new(&["null:1GiB"], polling);
        assert!(host.configure_shadow(|_, _| 0).is_success());
        let mut queue = host.create(1, 256, true);
        let page = host.alloc(4096);
        let irq = queue.irq.take().unwrap();
        let (mut completed, mut submitted, mut interrupts) = (0u32, 0u32, 0u64);
        while completed < 20_000 {
            let old = queue.tail;
            while submitted - completed < 32 {
                host.put(&mut queue, &Sqe::read(1, 0, 0, submitted as u16).with_prps(page, 0));
                submitted += 1;
            }
            host.ring(&queue, old);
            assert!(irq.wait(Some(common::LIMIT)).unwrap(), "an interrupt was lost");
            interrupts += irq.drain();
            while host.reap(&mut queue).is_some() {
                completed += 1;
            }
        }
        assert!(interrupts <= u64::from(completed), "{interrupts} for {completed}");
    }
    assert_eq!(regs::DOORBELLS, 0x1000);
}

#[test]
fn bit_bucket_descriptors_discard_data() {
    use shadowbell_spec::sgl::SglDescriptor;
    let (mut host, mut queue) = host();
    let (page, list) = (host.alloc(4096), host.alloc(4096));
    let blocks: Vec<u8> = (0..8u8).flat_map(|block| [block + 1; 512]).collect();
    host.poke(page, &blocks);
    assert!(host.run(&mut queue, Sqe::write(1, 0, 7, 0).with_prps(page, 0)).0.is_success());
    // The list has bit buckets, so that the read transfers only the third and the last of eight
    // blocks.
    let parts = [
        SglDescriptor::bit_bucket(1024),
        SglDescriptor::data_block(page, 512),
        SglDescriptor::bit_bucket(2048),
        SglDescriptor::data_block(page + 512, 512),
    ];
    let bytes: Vec<u8> = parts.iter().flat_map(|part| part.to_dptr()).collect();
    host.poke(list, &bytes);
    host.poke(page, &[0xee; 4096]);
    let with_list = |sqe: Sqe, parts: u32| {
        let dptr = SglDescriptor::last_segment(list, parts * 16).to_dptr();
        Sqe { flags: 0x40, dptr, ..sqe }
    };
    let read = with_list(Sqe::read(1, 0, 7, 0), 4);
    assert!(host.run(&mut queue, read).0.is_success());
    let expected = [[3; 512], [8; 512], [0xee; 512]].concat();
    assert_eq!(host.peek(page, 1536), expected);
    // In a write, bit buckets have no data, so only the data blocks count.
    let write = with_list(Sqe::write(1, 20, 1, 0), 4);
    assert!(host.run(&mut queue, write).0.is_success());
    assert!(host.run(&mut queue, Sqe::read(1, 20, 1, 0).with_prps(page + 2048, 0)).0.is_success());
    assert_eq!(host.peek(page + 2048, 1024), [[3; 512], [8; 512]].concat());
    let (status, _) = host.run(&mut queue, with_list(Sqe::write(1, 20, 7, 0), 4));
    assert_eq!(status.code(), Status::SGL_DATA_LENGTH_INVALID);
}
