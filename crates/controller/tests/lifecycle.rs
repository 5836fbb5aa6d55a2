//! Enabling, reset, shutdown and disconnect, with and without commands in flight.

mod common;

use common::{Host, LIMIT, Queue, slow_host};
use shadowbell_controller::{Carrier, Config, Controller, Event, NamespaceConfig, Polling};
use shadowbell_disk::{Disk, DiskError, DiskInfo};
use shadowbell_spec::admin::{Identify, SetFeatures};
use shadowbell_spec::regs::{self, Aqa, Cc, Csts};
use shadowbell_spec::{Sqe, Status};
use shadowbell_testing::wait::{self};
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));

#[test]
fn registers_follow_the_specification() {
    let host = Host::attach(
        Controller::new(common::config(&["mem:1MiB"]), common::pool(ADAPTIVE), Carrier::default())
            .unwrap(),
    );
    let cap = host.cap();
    assert_eq!(cap.mqes(), 4095);
    assert!(cap.cqr() && cap.crwms());
    assert_eq!((cap.dstrd(), cap.mpsmin(), cap.css() & 1), (0, 0, 1));
    assert_eq!(host.read32(regs::VS), 0x0002_0000);
    assert_eq!(host.read32(regs::CC), 0);
    assert_eq!(host.read32(regs::CSTS), 0);
    host.write32(regs::AQA, 0xffff_ffff);
    assert_eq!(host.read32(regs::AQA), 0x0fff_0fff, "reserved bits are zero");
    host.write32(regs::ASQ, 0xffff_ffff);
    host.write32(regs::ASQ + 4, 0x1);
    assert_eq!(host.read64(regs::ASQ), 0x1_ffff_f000);
    host.write32(regs::CSTS, 0xffff_ffff);
    host.write32(regs::VS, 0);
    assert_eq!((host.read32(regs::CSTS), host.read32(regs::VS)), (0, 0x0002_0000));
    host.write32(regs::INTMS, 0b110);
    host.write32(regs::INTMC, 0b010);
    assert_eq!(host.read32(regs::INTMS), 0b100);
    // The controller must survive reads of any offset and length.
    for offset in (0..0x2100).chain([u64::MAX - 3, u64::MAX]) {
        for len in 0..9 {
            host.controller.read(offset, &mut vec![1; len]);
        }
    }
    for len in 0..20 {
        host.controller.write(regs::CC + 1, &vec![0; len]);
        host.controller.write(0x1001, &vec![0; len]);
        host.controller.write(u64::MAX, &vec![0; len]);
    }
}

/// Builds an Identify Controller command.
fn identify() -> Sqe {
    Sqe { cdw10: 1, ..Sqe::new(0x06, 0, 0) }
}

#[test]
fn the_admin_completion_queue_may_come_after_the_controller_is_enabled() {
    let configure = |acq: u64| {
        let pool = common::pool(ADAPTIVE);
        let controller =
            Controller::new(common::config(&["mem:1MiB"]), pool, Carrier::default()).unwrap();
        let host = Host::attach(controller);
        host.write32(regs::AQA, Aqa::new().with_asqs(31).with_acqs(31).into_bits());
        host.controller.write(regs::ASQ, &host.admin.sq.to_le_bytes());
        host.controller.write(regs::ACQ, &acq.to_le_bytes());
        host.write32(regs::CC, Cc::new().with_iosqes(6).with_iocqes(4).with_en(true).into_bits());
        assert!(host.csts().rdy() && !host.csts().cfs(), "the queue is not needed yet");
        host
    };
    // Value of ACQ before the host sets it: an invalid address, or an address that a previous host
    // has set.
    for before in [0, common::BASE + (1 << 20)] {
        let mut host = configure(before);
        let acq = host.admin.cq;
        for (offset, half) in [(0, acq as u32), (4, (acq >> 32) as u32)] {
            host.write32(regs::ACQ + offset, half);
        }
        assert_eq!(host.read64(regs::ACQ), acq);
        let buffer = host.alloc(4096);
        host.must(identify().with_prps(buffer, 0));
        // After the first command, the address cannot change.
        host.controller.write(regs::ACQ, &(acq + 4096).to_le_bytes());
        assert_eq!(host.read64(regs::ACQ), acq);
        host.must(identify().with_prps(buffer, 0));
    }
    // If ACQ has never had a valid address, the first command cannot complete.
    let mut host = configure(0);
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    host.submit(&mut admin, &identify());
    host.until("fatal status", || host.csts().cfs());
    host.admin = admin;
    host.disable();
    host.enable();
}

/// Base 2.1, 3.7.2: a Controller Level Reset resets all registers except those of the admin queue.
/// So it also clears the interrupt mask.
#[test]
fn a_reset_unmasks_the_interrupts() {
    let mut host = Host::new(&["null:1GiB"], ADAPTIVE);
    host.write32(regs::INTMS, 0b110);
    assert_eq!(host.read32(regs::INTMC), 0b110);
    let aqa = host.read32(regs::AQA);
    host.disable();
    assert_eq!((host.read32(regs::INTMS), host.read32(regs::AQA)), (0, aqa));
    host.enable();
    assert_eq!(host.read32(regs::INTMS), 0);
}

#[test]
fn impossible_configurations_end_in_fatal_status_until_reset() {
    let cc = Cc::new().with_iosqes(6).with_iocqes(4);
    let good = Aqa::new().with_asqs(31).with_acqs(31);
    for (cc, aqa, asq) in [
        (cc.with_mps(5), good, common::BASE),
        (cc.with_css(1), good, common::BASE),
        // This value selects the Admin Command Set only. It is invalid, because bit 7 of CAP.CSS is
        // 0.
        (cc.with_css(7), good, common::BASE),
        (cc.with_ams(1), good, common::BASE),
        (cc, good.with_asqs(0), common::BASE),
        (cc, good.with_acqs(0), common::BASE),
        (cc.with_mps(1), good, common::BASE + 4096),
        (cc, good, 0),
    ] {
        let pool = common::pool(ADAPTIVE);
        let controller =
            Controller::new(common::config(&["mem:1MiB"]), pool, Carrier::default()).unwrap();
        let mut host = Host::attach(controller);
        host.write32(regs::AQA, aqa.into_bits());
        host.controller.write(regs::ASQ, &asq.to_le_bytes());
        host.controller.write(regs::ACQ, &(common::BASE + 8192).to_le_bytes());
        host.write32(regs::CC, cc.with_en(true).into_bits());
        let csts = host.csts();
        assert!(csts.cfs() && !csts.rdy(), "{cc:?} {aqa:?} {asq:#x}: {csts:?}");
        host.disable();
        assert_eq!(host.csts(), Csts::new());
        host.enable();
    }
}

#[test]
fn cc_fields_are_fixed_while_the_controller_is_enabled() {
    let mut host = Host::new(&["mem:1MiB"], ADAPTIVE);
    let before = Cc::from_bits(host.read32(regs::CC));
    host.write32(regs::CC, before.with_mps(3).with_ams(1).with_css(1).into_bits());
    assert_eq!(host.read32(regs::CC), before.into_bits());
    // The rejected change of the page size has no effect: PRPs still use pages of 4 KiB.
    let (a, b) = (host.alloc(4096), host.alloc(4096));
    let mut queue = host.create(1, 16, false);
    assert!(host.run(&mut queue, Sqe::read(1, 0, 15, 0).with_prps(a, b)).0.is_success());
    // With EN cleared, the page size may change.
    host.write32(regs::CC, before.with_mps(1).with_en(false).into_bits());
    host.until("the reset", || !host.csts().rdy());
    assert_eq!(Cc::from_bits(host.read32(regs::CC)).mps(), 1);
}

#[test]
fn write_zeroes_has_the_limit_of_wzsl() {
    let mut config = common::config(&["mem:64MiB"]);
    let disk = shadowbell_disk_file::open("mem:512MiB?block-size=4096").unwrap();
    config.namespaces.push(shadowbell_controller::NamespaceConfig { disk, uuid: [9; 16] });
    let mut host = Host::with(config, ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    // WZSL is equivalent to 65536 blocks of 512 bytes. It limits the number of bytes, so the second
    // namespace has a lower limit in blocks.
    let zeroes = |nsid, blocks0: u16| {
        let mut sqe = Sqe::new(0x08, 0, nsid);
        sqe.cdw12 = u32::from(blocks0);
        sqe
    };
    assert!(host.run(&mut queue, zeroes(1, 0xffff)).0.is_success());
    assert!(host.run(&mut queue, zeroes(2, 8191)).0.is_success());
    let (status, _) = host.run(&mut queue, zeroes(2, 8192));
    assert_eq!(status.code(), Status::INVALID_FIELD);
}

#[test]
fn a_reset_waits_for_requests_in_flight() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    let page = host.alloc(4096);
    for cid in 0..4 {
        host.submit(&mut queue, &Sqe::read(1, 0, 0, cid).with_prps(page, 0));
    }
    host.until("four requests", || gate.waiting() == 4);
    let cc = Cc::from_bits(host.read32(regs::CC));
    host.write32(regs::CC, cc.with_en(false).into_bits());
    host.until("the disk to be asked to stop", || gate.cancelled.lock().unwrap().len() >= 4);
    wait::short_pause();
    assert!(host.csts().rdy(), "the disk still writes to the host's memory");
    // If the host sets CC.EN before the reset has ended, the controller is enabled afterwards.
    host.write32(regs::CC, cc.into_bits());
    for _ in 0..4 {
        gate.end(Ok(()));
    }
    host.until("the end of all requests", || gate.waiting() == 0);
    let written = host.peek(queue.cq, 256);
    assert!(written.iter().all(|b| *b == 0), "no completion after the reset began");
    host.until("ready again", || host.csts().rdy());
    host.disable();
    host.enable();
    let mut queue = host.create(1, 16, false);
    gate.end(Ok(()));
    assert!(host.run(&mut queue, Sqe::read(1, 0, 0, 0).with_prps(page, 0)).0.is_success());
}

/// The DMA table is changed twice: a command in flight may use an older table than the one that the
/// unmap replaces. The unmap has to wait for this command, too.
#[test]
fn unmapping_waits_for_commands_of_an_earlier_dma_table() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    let mut queue = host.create(1, 16, true);
    let other = shadowbell_memory::Mapping::anonymous(4096).unwrap().bytes();
    let iova = 1 << 40;
    host.controller.map_dma(iova, 4096, &other).unwrap();
    host.submit(&mut queue, &Sqe::read(1, 0, 7, 5).with_prps(iova, 0));
    host.until("the request", || gate.waiting() == 1);
    let another = shadowbell_memory::Mapping::anonymous(4096).unwrap().bytes();
    host.controller.map_dma(iova + 8192, 4096, &another).unwrap();
    // The statistics contain a reply of the I/O thread. So the thread has received the new table
    // when this call returns.
    let _ = host.controller.stats();
    let (sent, unmapped) = mpsc::channel();
    host.controller.unmap_dma(iova, 4096, move || sent.send(()).unwrap()).unwrap();
    wait::short_pause();
    assert!(unmapped.try_recv().is_err(), "still in flight");
    assert_eq!(other.read::<u8>(0), Some(0));
    gate.end(Ok(()));
    assert_eq!(host.wait(&mut queue).1, Status::SUCCESS);
    unmapped.recv_timeout(LIMIT).unwrap();
    assert_eq!(other.read::<u8>(0), Some(0xee), "the read ended before the unmap");
}

#[test]
fn unmapping_waits_for_commands_in_flight() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    let other = shadowbell_memory::Mapping::shared("other", 4096).unwrap().bytes();
    let iova = common::BASE + common::MEMORY;
    host.controller.map_dma(iova, 4096, &other).unwrap();
    host.submit(&mut queue, &Sqe::read(1, 0, 0, 1).with_prps(iova, 0));
    host.until("the request", || gate.waiting() == 1);
    let (sent, unmapped) = mpsc::channel();
    host.controller.unmap_dma(iova, 4096, move || sent.send(()).unwrap()).unwrap();
    wait::short_pause();
    assert!(unmapped.try_recv().is_err(), "still in flight");
    // New commands cannot access the unmapped memory.
    let (status, _) = host.run(&mut queue, Sqe::write(1, 0, 0, 2).with_prps(iova, 0));
    assert_eq!(status, Status::DATA_XFER_ERROR);
    gate.end(Ok(()));
    unmapped.recv_timeout(LIMIT).unwrap();
    assert_eq!(other.read::<u8>(0), Some(0xee), "the read ended before the unmap");
    assert_eq!(host.wait(&mut queue).0, 1);
    assert!(host.controller.unmap_dma(iova, 4096, || ()).is_err());
}

#[test]
fn an_interrupt_vector_is_configured_for_a_completion_queue() {
    let mut host = Host::new(&["mem:1MiB"], ADAPTIVE);
    let set = |host: &mut Host, vector: u32| {
        let fields = SetFeatures { fid: 0x09, cdw11: 1 << 16 | vector, ..SetFeatures::default() };
        host.admin(Sqe::set_features(0, fields, 0)).0.code()
    };
    let _queue = host.create(3, 16, true);
    // The admin queue has vector 0.
    assert_eq!([0, 3].map(|vector| set(&mut host, vector)), [Status::SUCCESS; 2]);
    assert_eq!([1, 2, 4].map(|vector| set(&mut host, vector)), [Status::INVALID_FIELD; 3]);
    host.must(Sqe::delete_io_sq(3, 0));
    host.must(Sqe::delete_io_cq(3, 0));
    assert_eq!(set(&mut host, 3), Status::INVALID_FIELD);
}

#[test]
fn queues_are_created_and_deleted_by_the_rules() {
    let mut host = Host::new(&["mem:1MiB"], ADAPTIVE);
    let at = host.alloc(1 << 20);
    let bad = |host: &mut Host, sqe: Sqe| host.admin(sqe).0.code();
    use common::{create_cq, create_sq};
    assert_eq!(bad(&mut host, create_cq(0, 15, None, at)), Status::INVALID_QID);
    assert_eq!(bad(&mut host, create_cq(65, 15, None, at)), Status::INVALID_QID);
    assert_eq!(bad(&mut host, create_cq(1, 0, None, at)), Status::INVALID_QUEUE_SIZE);
    assert_eq!(bad(&mut host, create_cq(1, 4096, None, at)), Status::INVALID_QUEUE_SIZE);
    assert_eq!(bad(&mut host, create_cq(1, 15, Some(65), at)), Status::INVALID_INTERRUPT_VECTOR);
    assert_eq!(bad(&mut host, create_cq(1, 15, None, at + 8)), Status::PRP_OFFSET_INVALID);
    assert_eq!(bad(&mut host, create_cq(1, 15, None, 0)), Status::INVALID_FIELD);
    let mut scattered = create_cq(1, 15, None, at);
    scattered.cdw11 &= !1;
    assert_eq!(bad(&mut host, scattered), Status::INVALID_FIELD);
    assert_eq!(bad(&mut host, create_sq(1, 15, 1, at)), Status::CQ_INVALID);
    assert_eq!(bad(&mut host, create_sq(1, 15, 0, at)), Status::INVALID_QID);
    host.must(create_cq(1, 4095, None, at));
    assert_eq!(bad(&mut host, create_cq(1, 15, None, at)), Status::INVALID_QID);
    host.must(create_sq(2, 4095, 1, at + 0x4_0000));
    host.must(create_sq(3, 15, 1, at + 0x8_0000));
    assert_eq!(bad(&mut host, Sqe::delete_io_cq(1, 0)), Status::INVALID_QUEUE_DELETION);
    assert_eq!(bad(&mut host, Sqe::delete_io_sq(1, 0)), Status::INVALID_QID);
    assert_eq!(bad(&mut host, Sqe::delete_io_cq(0, 0)), Status::INVALID_QID);
    host.must(Sqe::delete_io_sq(2, 0));
    host.must(Sqe::delete_io_sq(3, 0));
    host.must(Sqe::delete_io_cq(1, 0));
    assert_eq!(bad(&mut host, Sqe::delete_io_cq(1, 0)), Status::INVALID_QID);
    // Queues with the same identifier and memory are created, used and deleted repeatedly. State of
    // a deleted queue must not affect the next queue with its identifier.
    let page = host.alloc(4096);
    for round in 0..50 {
        host.memory.fill((at - common::BASE) as usize, 1 << 20, 0).unwrap();
        host.must(create_cq(1, 7, None, at));
        host.must(create_sq(1, 7, 1, at + 4096));
        let (sq, cq) = (at + 4096, at);
        let mut queue = Queue { qid: 1, entries: 8, sq, cq, ..Queue::none() };
        for _ in 0..round % 11 {
            let read = Sqe::read(1, 0, 0, 0).with_prps(page, 0);
            assert!(host.run(&mut queue, read).0.is_success());
        }
        host.must(Sqe::delete_io_sq(1, 0));
        host.must(Sqe::delete_io_cq(1, 0));
    }
}

#[test]
fn sixty_four_full_size_queues_work() {
    let mut host = Host::new(&["null:1GiB"], ADAPTIVE);
    let page = host.alloc(4096);
    let mut queues: Vec<Queue> = (1..=64).map(|qid| host.create(qid, 4096, true)).collect();
    for queue in &mut queues {
        let read = Sqe::read(1, 0, 7, 0).with_prps(page, 0);
        assert!(host.run(queue, read).0.is_success());
    }
    let stats = host.controller.stats();
    assert_eq!(stats.submission_queues.len(), 65);
}

#[test]
fn deleting_a_queue_aborts_commands_in_flight() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    gate.heed_cancel.store(true, Ordering::Relaxed);
    let mut queue = host.create(1, 16, false);
    let page = host.alloc(4096);
    for cid in 0..3 {
        host.submit(&mut queue, &Sqe::read(1, 0, 0, cid).with_prps(page, 0));
    }
    host.until("three requests", || gate.waiting() == 3);
    host.must(Sqe::delete_io_sq(1, 0));
    for _ in 0..3 {
        let (_, status, _) = host.wait(&mut queue);
        assert_eq!(status.code(), Status::ABORTED_SQ_DELETION);
    }
    host.must(Sqe::delete_io_cq(1, 0));
}

#[test]
fn shutdown_flushes_and_reports_completion() {
    for shn in [regs::SHN_NORMAL, regs::SHN_ABRUPT] {
        let (mut host, gate) = slow_host(ADAPTIVE);
        let _queue = host.create(1, 16, false);
        let cc = Cc::from_bits(host.read32(regs::CC));
        host.write32(regs::CC, cc.with_shn(shn).into_bits());
        host.until("the flush", || gate.waiting() == 1);
        assert_eq!(host.csts().shst(), regs::SHST_OCCURRING);
        gate.end(Ok(()));
        host.until("the shutdown", || host.csts().shst() == regs::SHST_COMPLETE);
        host.disable();
        assert_eq!(host.csts(), Csts::new());
        host.enable();
    }
}

#[test]
fn shutdown_flushes_writes_of_deleted_queues() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    let _queue = host.create(1, 16, false);
    host.must(Sqe::delete_io_sq(1, 0));
    host.must(Sqe::delete_io_cq(1, 0));
    for _ in 0..2 {
        let cc = Cc::from_bits(host.read32(regs::CC));
        host.write32(regs::CC, cc.with_shn(regs::SHN_NORMAL).into_bits());
        host.until("the flush", || gate.waiting() == 1);
        assert_eq!(host.csts().shst(), regs::SHST_OCCURRING);
        gate.end(Ok(()));
        host.until("the shutdown", || host.csts().shst() == regs::SHST_COMPLETE);
        // In the second round, the shutdown follows a reset, and the host has created no queue
        // since. It flushes nevertheless.
        host.disable();
        host.enable();
    }
}

fn begin_shutdown(host: &Host, shn: u8) {
    let cc = Cc::from_bits(host.read32(regs::CC));
    host.write32(regs::CC, cc.with_shn(shn).into_bits());
}

fn await_shutdown(host: &Host) {
    host.until("the shutdown", || host.csts().shst() == regs::SHST_COMPLETE);
}

/// Base 2.1, 3.6.1: the shutdown ends after all outstanding commands have ended or were aborted.
#[test]
fn a_shutdown_waits_for_commands_in_flight() {
    for shn in [regs::SHN_NORMAL, regs::SHN_ABRUPT] {
        let (mut host, gate) = slow_host(ADAPTIVE);
        let mut queue = host.create(1, 16, false);
        let page = host.alloc(4096);
        host.submit(&mut queue, &Sqe::write(1, 0, 0, 0).with_prps(page, 0));
        host.submit(&mut queue, &Sqe::read(1, 0, 0, 1).with_prps(page, 0));
        host.until("two requests", || gate.waiting() == 2);
        begin_shutdown(&host, shn);
        host.until("the disk to be asked to stop", || gate.cancelled.lock().unwrap().len() >= 2);
        gate.end(Ok(()));
        host.until("the end of the write", || gate.waiting() == 1);
        wait::short_pause();
        assert_eq!(host.csts().shst(), regs::SHST_OCCURRING, "a read is in flight");
        gate.end(Ok(()));
        // The controller flushes only after the write has completed, so that the flush covers the
        // write.
        host.until("the flush", || gate.release.lock().unwrap().is_empty() && gate.waiting() == 1);
        assert_eq!(host.csts().shst(), regs::SHST_OCCURRING);
        gate.end(Ok(()));
        await_shutdown(&host);
        // The controller executes no command until it is reset.
        host.submit(&mut queue, &Sqe::read(1, 0, 0, 2).with_prps(page, 0));
        wait::short_pause();
        assert_eq!((gate.waiting(), host.csts().cfs()), (0, false));
        host.disable();
        assert_eq!(gate.waiting(), 0);
        host.enable();
        let mut queue = host.create(1, 16, false);
        gate.end(Ok(()));
        let read = Sqe::read(1, 0, 0, 0).with_prps(page, 0);
        assert!(host.run(&mut queue, read).0.is_success());
    }
}

/// After a shutdown, the controller changes no byte of host memory, no eventfd and no byte of a
/// disk until the next enable. Commands are in flight when the shutdown starts, and more follow.
#[test]
fn nothing_changes_after_a_shutdown() {
    // The environment variable sets the number of rounds: 10000 for a long run.
    let rounds = std::env::var("SHADOWBELL_TEST_ROUNDS").map_or(200, |n| n.parse().unwrap());
    for polling in [Polling::Never, Polling::Always] {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1 << 20).unwrap();
        let mut host = Host::new(&["mem:1MiB", file.path().to_str().unwrap()], polling);
        let start = host.alloc(0);
        for round in 0..rounds / 2 {
            host.rewind(start);
            let is_shadowed = round % 2 == 1;
            if is_shadowed {
                assert!(host.configure_shadow(|_, _| 0).is_success());
            }
            let mut queue = host.create(1, 128, true);
            let page = host.alloc(4096);
            for cid in 0..64u16 {
                let nsid = u32::from(cid % 2) + 1;
                host.poke32(page, u32::from(cid) ^ round);
                let (lba, len) = (u64::from(cid % 16), cid % 8);
                let sqe = if cid % 4 < 2 {
                    Sqe::write(nsid, lba, len, cid)
                } else {
                    Sqe::read(nsid, lba, len, cid)
                };
                host.put(&mut queue, &sqe.with_prps(page, 0));
            }
            host.ring(&queue, 0);
            begin_shutdown(&host, [regs::SHN_NORMAL, regs::SHN_ABRUPT][round as usize / 2 % 2]);
            await_shutdown(&host);
            let irq = queue.irq.take().unwrap();
            irq.drain();
            let len = (host.alloc(0) - common::BASE) as usize;
            let memory = host.peek(common::BASE, len);
            let disk = std::fs::read(file.path()).unwrap();
            // A doorbell write, which is ignored.
            host.write32(0x1008, 3);
            host.disable();
            let where_ = memory.iter().zip(host.peek(common::BASE, len)).position(|(a, b)| *a != b);
            assert_eq!(where_, None, "host memory, {polling:?}, round {round}");
            assert!(std::fs::read(file.path()).unwrap() == disk, "disk, round {round}");
            assert_eq!(irq.drain(), 0, "interrupts, {polling:?}, round {round}");
            host.shadow = None;
            host.enable();
        }
    }
}

/// If the storage hangs for longer than RTD3 Entry Latency, the controller reports a fatal status,
/// and the shutdown ends when the storage answers.
#[test]
fn a_shutdown_that_exceeds_its_time_is_a_fatal_status() {
    let shut_down = |is_disabled: bool| {
        let (mut host, gate) = slow_host(ADAPTIVE);
        let _queue = host.create(1, 16, false);
        if is_disabled {
            host.disable();
        }
        begin_shutdown(&host, regs::SHN_NORMAL);
        host.until("the flush", || gate.waiting() == 1);
        host.until("the fatal status", || host.csts().cfs());
        assert_eq!(host.csts().shst(), regs::SHST_OCCURRING);
        gate.end(Ok(()));
        await_shutdown(&host);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| shut_down(true));
        shut_down(false);
    });
}

/// If the storage hangs for longer than CAP.TO, the controller reports a fatal status, and the
/// reset ends when the storage answers.
#[test]
fn a_reset_that_exceeds_its_time_is_a_fatal_status() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    let page = host.alloc(4096);
    host.submit(&mut queue, &Sqe::write(1, 0, 0, 0).with_prps(page, 0));
    host.until("a request", || gate.waiting() == 1);
    host.write32(regs::CC, 0);
    host.until("the fatal status", || host.csts().cfs());
    assert!(host.csts().rdy(), "a write is in flight");
    gate.end(Ok(()));
    host.until("the end of the reset", || host.csts() == Csts::new());
    host.enable();
}

/// Disk that reports orphans: requests that are still in flight although their queues were closed.
#[derive(Debug)]
struct Stalled {
    below: Arc<dyn Disk>,
    orphans: AtomicUsize,
}

impl Disk for Stalled {
    fn info(&self) -> DiskInfo {
        self.below.info()
    }

    fn queue(&self) -> io::Result<Box<dyn shadowbell_disk::Queue>> {
        self.below.queue()
    }

    fn name(&self) -> String {
        "stalled".to_owned()
    }

    fn orphans(&self) -> usize {
        self.orphans.load(Ordering::Acquire)
    }
}

/// A controller with orphans does not quiesce, because the next process must not write to the disk
/// before the orphans have ended.
#[test]
fn a_controller_does_not_quiesce_while_its_disk_has_orphans() {
    let below = shadowbell_disk_file::open("mem:1MiB").unwrap();
    let disk = Arc::new(Stalled { below, orphans: AtomicUsize::new(2) });
    let namespaces = vec![NamespaceConfig { disk: Arc::clone(&disk) as _, uuid: [7; 16] }];
    let host = Host::with(Config { namespaces, ..Config::default() }, ADAPTIVE);
    let (sent, done) = mpsc::channel();
    host.controller.freeze(move || sent.send(()).unwrap());
    wait::short_pause();
    assert!(done.try_recv().is_err(), "quiesced with orphans");
    disk.orphans.store(0, Ordering::Release);
    done.recv_timeout(LIMIT).unwrap();
}

/// A doorbell write to a disabled controller submits no command of the queue that is created later.
#[test]
fn admin_doorbells_of_a_disabled_controller_are_ignored() {
    let mut host = Host::new(&["mem:1MiB"], ADAPTIVE);
    host.disable();
    host.write32(0x1000, 5);
    host.enable();
    // With the stale tail, the first 31 commands of this queue would be entries of zeroes.
    let (status, _) = host.admin(Sqe::keep_alive(0));
    assert!(status.is_success(), "{status:?}");
    // The command is the first one of the queue, so its completion is the first entry.
    let second = host.peek(common::BASE + 4096 + 16, 16);
    assert!(second.iter().all(|byte| *byte == 0), "a second command was executed: {second:?}");
}

/// A reset of a disabled controller does not wait for the flush of its shutdown.
#[test]
fn a_reset_of_a_disabled_controller_abandons_its_shutdown() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    let _queue = host.create(1, 16, false);
    host.disable();
    begin_shutdown(&host, regs::SHN_NORMAL);
    host.until("the flush", || gate.waiting() == 1);
    let (sent, done) = mpsc::channel();
    host.controller.reset(move || sent.send(()).unwrap());
    done.recv_timeout(LIMIT).unwrap();
    assert_eq!(host.csts(), Csts::new());
    gate.end(Ok(()));
    host.until("the end of the flush", || gate.waiting() == 0);
    host.enable();
    let mut queue = host.create(1, 16, false);
    let page = host.alloc(4096);
    gate.end(Ok(()));
    let read = Sqe::read(1, 0, 0, 0).with_prps(page, 0);
    assert!(host.run(&mut queue, read).0.is_success());
    assert_eq!(host.csts().shst(), regs::SHST_NORMAL);
}

/// The host clears CC.EN and sets CC.SHN in one write. The controller completes the reset first,
/// and then flushes the caches for the shutdown.
#[test]
fn a_shutdown_during_a_reset_follows_it() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    let page = host.alloc(4096);
    host.submit(&mut queue, &Sqe::write(1, 0, 0, 0).with_prps(page, 0));
    host.until("a request", || gate.waiting() == 1);
    let cc = Cc::from_bits(host.read32(regs::CC));
    host.write32(regs::CC, cc.with_en(false).with_shn(regs::SHN_NORMAL).into_bits());
    host.until("the disk to be asked to stop", || !gate.cancelled.lock().unwrap().is_empty());
    assert_eq!(host.csts().shst(), regs::SHST_OCCURRING);
    gate.end(Ok(()));
    host.until("the end of the reset", || !host.csts().rdy());
    host.until("the flush", || gate.release.lock().unwrap().is_empty() && gate.waiting() == 1);
    assert_eq!(host.csts().shst(), regs::SHST_OCCURRING);
    gate.end(Ok(()));
    await_shutdown(&host);
}

/// A reset begins while a shutdown waits for commands in flight. The reset waits for these commands
/// as well.
#[test]
fn a_reset_during_a_shutdown_waits_for_commands_in_flight() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    let page = host.alloc(4096);
    host.submit(&mut queue, &Sqe::read(1, 0, 0, 0).with_prps(page, 0));
    host.until("a request", || gate.waiting() == 1);
    begin_shutdown(&host, regs::SHN_NORMAL);
    host.until("the disk to be asked to stop", || !gate.cancelled.lock().unwrap().is_empty());
    let cc = Cc::from_bits(host.read32(regs::CC));
    host.write32(regs::CC, cc.with_en(false).with_shn(regs::SHN_NONE).into_bits());
    wait::short_pause();
    assert!(host.csts().rdy(), "the disk still writes to the host's memory");
    gate.end(Ok(()));
    host.until("the end of the reset", || !host.csts().rdy());
    assert_eq!(gate.waiting(), 0);
}

#[test]
fn a_controller_that_is_enabled_during_a_shutdown_stays_enabled() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    host.disable();
    begin_shutdown(&host, regs::SHN_NORMAL);
    host.until("the flush", || gate.waiting() == 1);
    host.enable();
    gate.end(Ok(()));
    host.until("the end of the flush", || gate.waiting() == 0);
    let mut queue = host.create(1, 16, false);
    let page = host.alloc(4096);
    gate.end(Ok(()));
    let read = Sqe::read(1, 0, 0, 0).with_prps(page, 0);
    assert!(host.run(&mut queue, read).0.is_success());
    assert_eq!(host.csts().shst(), regs::SHST_NORMAL);
}

/// Data written before a reset may be in a disk's cache. So a shutdown flushes even if the host has
/// disabled the controller first.
#[test]
fn a_shutdown_of_a_disabled_controller_flushes() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    let _queue = host.create(1, 16, false);
    for _ in 0..2 {
        host.disable();
        let cc = Cc::from_bits(host.read32(regs::CC));
        host.write32(regs::CC, cc.with_shn(regs::SHN_NORMAL).into_bits());
        host.until("the flush", || gate.waiting() == 1);
        assert_eq!(host.csts().shst(), regs::SHST_OCCURRING);
        gate.end(Ok(()));
        host.until("the shutdown", || host.csts().shst() == regs::SHST_COMPLETE);
        assert!(!host.csts().rdy());
        // The flush refers to no guest memory, so the unmap does not wait for it.
        let (sent, gone) = mpsc::channel();
        host.controller.unmap_all(move || sent.send(()).unwrap());
        gone.recv_timeout(LIMIT).unwrap();
        host.controller.map_dma(common::BASE, common::MEMORY, &host.memory).unwrap();
        host.write32(regs::CC, cc.with_shn(regs::SHN_NONE).into_bits());
        host.enable();
        let mut queue = host.create(1, 16, false);
        let page = host.alloc(4096);
        gate.end(Ok(()));
        let read = Sqe::read(1, 0, 0, 0).with_prps(page, 0);
        assert!(host.run(&mut queue, read).0.is_success());
    }
}

#[test]
fn the_write_cache_is_disabled_after_a_flush() {
    use shadowbell_spec::admin::SetFeatures;
    use shadowbell_spec::feature::fid;
    let (mut host, gate) = slow_host(ADAPTIVE);
    let set = |cid, cdw11| {
        let set = SetFeatures { fid: fid::VOLATILE_WRITE_CACHE, cdw11, ..Default::default() };
        set.encode(Sqe::new(0x09, cid, 0))
    };
    for outcome in [Ok(()), Err(DiskError::Io(5))] {
        let mut admin = std::mem::replace(&mut host.admin, Queue::none());
        host.submit(&mut admin, &set(700, 0));
        host.until("the flush", || gate.waiting() == 1);
        assert_eq!(host.reap(&mut admin), None);
        gate.end(outcome);
        let (cid, status, _) = host.wait(&mut admin);
        assert_eq!((cid, status.is_success()), (700, outcome.is_ok()));
        // If the cache is off, there is nothing to flush, and the command ends at once.
        host.submit(&mut admin, &set(701, 0));
        assert_eq!(host.wait(&mut admin), (701, Status::SUCCESS, 0));
        host.submit(&mut admin, &set(702, 1));
        assert_eq!(host.wait(&mut admin), (702, Status::SUCCESS, 0));
        host.admin = admin;
    }
}

#[test]
fn a_disconnect_releases_memory_and_queues() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&events);
    let carrier = Carrier {
        mapped_doorbells: false,
        listener: Some(Box::new(move |event: &Event| seen.lock().unwrap().push(*event))),
    };
    let pool = common::pool(ADAPTIVE);
    let controller = Controller::new(common::config(&["mem:1MiB"]), pool, carrier).unwrap();
    for _ in 0..20 {
        let mut host = Host::attach(controller.clone());
        host.enable();
        assert!(host.configure_shadow(|_, _| 0).is_success());
        let mut queue = host.create(1, 16, true);
        let page = host.alloc(4096);
        let read = Sqe::read(1, 0, 0, 0).with_prps(page, 0);
        assert!(host.run(&mut queue, read).0.is_success());
        let memory = Arc::downgrade(host.memory.mapping());
        let (sent, gone) = mpsc::channel();
        controller.disconnect(move || sent.send(()).unwrap());
        gone.recv_timeout(LIMIT).unwrap();
        drop(host);
        assert_eq!(memory.strong_count(), 0, "the host's memory is released");
    }
    let events = events.lock().unwrap();
    let one = [Event::Enabled, Event::ShadowDoorbells, Event::QueueCreated(1), Event::Disabled];
    assert_eq!(*events, one.repeat(20));
}

/// Host whose memory is a file, which the test can truncate.
fn truncatable_host(disk: &str) -> (Host, std::os::fd::OwnedFd) {
    let controller =
        Controller::new(common::config(&[disk]), common::pool(ADAPTIVE), Carrier::default())
            .unwrap();
    let file = rustix::fs::memfd_create("host", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&file, common::MEMORY).unwrap();
    let map = shadowbell_memory::Mapping::from_fd(
        &file,
        0,
        common::MEMORY,
        shadowbell_memory::Protection::ReadWrite,
    )
    .unwrap();
    let mut host = Host::attach(controller.clone());
    let (sent, gone) = mpsc::channel();
    controller.unmap_all(move || sent.send(()).unwrap());
    gone.recv().unwrap();
    host.memory = map.bytes();
    controller.map_dma(common::BASE, common::MEMORY, &map.bytes()).unwrap();
    host.enable();
    (host, file)
}

/// Address in the host's memory beyond [`TRUNCATED`].
const LOST: u64 = common::BASE + (32 << 20);
/// Size of the host's memory after its truncation; the queues are below.
const TRUNCATED: u64 = 16 << 20;

/// Part of the guest memory is lost by a truncation. The command that accesses it first fails, and
/// so do all later commands. With a memory disk, the I/O thread accesses the memory and gets a
/// SIGBUS. With a file, the kernel accesses it and reports an error of the transfer.
#[test]
fn no_command_in_truncated_memory_succeeds() {
    let image = tempfile::NamedTempFile::new().unwrap();
    image.as_file().set_len(1 << 20).unwrap();
    let file = image.path().to_str().unwrap();
    for disk in ["mem:1MiB", file] {
        for write in [false, true] {
            let (mut host, memory) = truncatable_host(disk);
            let mut queue = host.create(1, 16, false);
            rustix::fs::ftruncate(&memory, TRUNCATED).unwrap();
            for _ in 0..3 {
                let new = if write { Sqe::write } else { Sqe::read };
                let (status, _) = host.run(&mut queue, new(1, 0, 0, 0).with_prps(LOST, 0));
                assert!(!status.is_success(), "{disk}, write: {write}");
            }
            if disk != file {
                host.until("fatal status", || host.csts().cfs());
            }
        }
    }
}

/// If an admin command accesses lost guest memory, the controller reports a fatal status, even if
/// it has no I/O queues.
#[test]
fn no_admin_command_in_truncated_memory_succeeds() {
    let (mut host, memory) = truncatable_host("mem:1MiB");
    rustix::fs::ftruncate(&memory, TRUNCATED).unwrap();
    let identify = Sqe::identify(0, Identify { cns: 1, ..Identify::default() }, 0);
    let (status, _) = host.admin(identify.with_prps(LOST, 0));
    assert!(!status.is_success());
    host.until("fatal status", || host.csts().cfs());
}

#[test]
fn mapped_doorbells_are_found_without_a_trap() {
    let carrier = Carrier { mapped_doorbells: true, listener: None };
    let controller =
        Controller::new(common::config(&["mem:1MiB"]), common::pool(ADAPTIVE), carrier).unwrap();
    let page = controller.doorbells().clone();
    let mut host = Host::attach(controller);
    host.enable();
    let ring = |offset: u64, value: u32| {
        page.cell((offset - regs::DOORBELLS) as usize).unwrap().store(value, Ordering::Release);
    };
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    let (sq, cq) = (host.alloc(4096), host.alloc(4096));
    for sqe in [common::create_cq(1, 15, None, cq), common::create_sq(1, 15, 1, sq)] {
        host.put(&mut admin, &sqe);
        ring(regs::sq_doorbell_offset(0, 0), admin.tail);
        assert!(host.wait(&mut admin).1.is_success());
        ring(regs::cq_doorbell_offset(0, 0), admin.head);
    }
    let mut queue = Queue { qid: 1, entries: 16, sq, cq, ..Queue::none() };
    let data = host.alloc(4096);
    for cid in 0..100 {
        host.put(&mut queue, &Sqe::read(1, 0, 0, cid).with_prps(data, 0));
        ring(regs::sq_doorbell_offset(1, 0), queue.tail);
        assert_eq!(host.wait(&mut queue).0, cid);
        ring(regs::cq_doorbell_offset(1, 0), queue.head);
    }
}

#[test]
fn mapped_memory_is_usable_at_once() {
    // The test is bound to one CPU. So the I/O thread is often preempted after it has handled its
    // messages and before it polls its queues.
    let mut cpus = rustix::thread::CpuSet::new();
    cpus.set(0);
    rustix::thread::sched_setaffinity(None, &cpus).unwrap();
    let mut host = Host::new(&["mem:1MiB"], Polling::Always);
    assert!(host.configure_shadow(|_, _| 0).is_success());
    let mut queue = host.create(1, 256, false);
    let iova = common::BASE + common::MEMORY;
    for round in 0..400u64 {
        let fresh = shadowbell_memory::Mapping::shared("fresh", 4096).unwrap().bytes();
        let at = iova + round * 4096;
        host.controller.map_dma(at, 4096, &fresh).unwrap();
        let (status, _) = host.run(&mut queue, Sqe::read(1, 0, 7, 0).with_prps(at, 0));
        assert!(status.is_success(), "round {round}: {status}");
    }
}

/// VMMs unmap and map all memory again while a guest boots. The host rings a doorbell only once, so
/// the command must be executed even if the queue's memory is not mapped at that time.
#[test]
fn the_admin_queue_continues_when_its_memory_is_mapped_again() {
    let (mut host, gate) = slow_host(ADAPTIVE);
    let mut queue = host.create(1, 16, false);
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    let away = |host: &Host| {
        let (sent, gone) = mpsc::channel();
        host.controller.unmap_all(move || sent.send(()).unwrap());
        gone
    };
    let back = |host: &Host, gone: mpsc::Receiver<()>| {
        gone.recv_timeout(LIMIT).unwrap();
        host.controller.map_dma(common::BASE, common::MEMORY, &host.memory).unwrap();
    };
    // A command submitted while the memory is unmapped.
    let gone = away(&host);
    host.submit(&mut admin, &Sqe::abort(shadowbell_spec::admin::Abort { sqid: 1, cid: 9 }, 70));
    back(&host, gone);
    assert_eq!(host.wait(&mut admin).0, 70);
    // This read completes while the memory is unmapped, because the disk completes its request only
    // then.
    let data = host.alloc(4096);
    host.submit(&mut queue, &Sqe::read(1, 0, 0, 1).with_prps(data, 0));
    host.until("the request", || gate.waiting() == 1);
    host.submit(&mut admin, &Sqe::delete_io_sq(1, 71));
    let gone = away(&host);
    gate.end(Ok(()));
    back(&host, gone);
    assert_eq!(host.wait(&mut admin).0, 71);
}

/// The host requests three pages, so PRP2 points to a list. The log page has only one page of data,
/// and these data extend over two pages of the host.
#[test]
fn a_log_page_shorter_than_asked_for_is_not_written_over_the_prp_list() {
    let mut host = Host::new(&["mem:16MiB"], ADAPTIVE);
    let data = host.alloc(3 * 4096);
    let list = host.alloc(4096);
    for (n, page) in [data + 4096, data + 8192].into_iter().enumerate() {
        host.memory.write((list - common::BASE) as usize + 8 * n, &page).unwrap();
    }
    let fields = shadowbell_spec::admin::GetLogPage {
        lid: shadowbell_spec::log::lid::CHANGED_ATTACHED_NAMESPACES,
        numd0: 0x2dac / 4 - 1,
        ..Default::default()
    };
    let before = host.peek(list, 4096);
    let sqe = Sqe::get_log_page(shadowbell_spec::sqe::NSID_ALL, fields, 0);
    assert!(host.admin(sqe.with_prps(data + 0xb0, list)).0.is_success());
    assert_eq!(host.peek(list, 4096), before);
}
