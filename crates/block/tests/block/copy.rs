//! Copies from one place of the disk to another: by the controller, by hand, and from the one to
//! the other.

use proptest::prelude::*;
use rustix::io::Errno;
use shadowbell_backend::{DiskError, Op};
use shadowbell_block::{BlockDevice, BlockOptions, Blocking, block_on};
use shadowbell_controller::Controller as Emulated;
use shadowbell_controller::faults::Faults;
use shadowbell_driver::{AttachOptions, Controller, Recovery, Timeouts};
use shadowbell_testing::block_device::{TestDisk, attach_to};
use shadowbell_testing::wait;
use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::Duration;

const MIB: u64 = 1 << 20;

struct Rig {
    backing: TestDisk,
    emulated: Emulated,
    controller: Controller,
    disk: Blocking,
    model: Vec<u8>,
}

impl Rig {
    fn with(bytes: u64, block: u32, attach: &AttachOptions, options: &BlockOptions) -> Self {
        let backing = TestDisk::new(bytes / u64::from(block), block);
        let (mut controller, emulated) = attach_to(Arc::new(backing.clone()), attach);
        let disk = Blocking::new(BlockDevice::open(&mut controller, 1, options).unwrap());
        let model: Vec<u8> =
            (0..bytes).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
        backing.mem.bytes().write_from(0, &model).unwrap();
        Self { backing, emulated, controller, disk, model }
    }

    fn new(mebibytes: u64) -> Self {
        Self::with(mebibytes * MIB, 512, &AttachOptions::default(), &BlockOptions::default())
    }

    fn inject(&self, faults: &str) {
        self.emulated.inject(faults.parse::<Faults>().unwrap());
    }

    /// Copy commands that the controller has completed.
    fn commands(&self) -> u64 {
        self.emulated.stats().io.copies
    }

    #[track_caller]
    fn copy(&mut self, from: u64, to: u64, len: u64) {
        self.disk.copy(from, to, len).unwrap();
        self.model.copy_within(from as usize..(from + len) as usize, to as usize);
        self.verify();
    }

    #[track_caller]
    fn verify(&self) {
        let mut bytes = vec![0; self.model.len()];
        self.backing.mem.bytes().read_into(0, &mut bytes).unwrap();
        let wrong = bytes.iter().zip(&self.model).position(|(is, should)| is != should);
        assert_eq!(wrong, None, "the first byte that is wrong");
    }

    fn end(self) {
        drop(self.disk);
        self.controller.detach().unwrap();
    }
}

#[test]
fn whole_blocks_never_come_here() {
    let mut rig = Rig::new(32);
    assert!(rig.disk.geometry().copy);
    rig.copy(0, 16 * MIB, 7 * MIB + 512);
    assert_eq!(rig.commands(), 8);
    let io = rig.emulated.stats().io;
    assert_eq!((io.bytes_copied, io.bytes_read, io.bytes_written), (7 * MIB + 512, 0, 0));
    // The parts of blocks at both ends do.
    rig.copy(700, 20 * MIB + 188, MIB);
    let io = rig.emulated.stats().io;
    assert_eq!((rig.commands(), io.writes), (9, 2));
    // And what does not go from blocks to blocks.
    rig.copy(0, 20 * MIB + 1, MIB);
    assert_eq!(rig.commands(), 9);
    rig.end();
}

#[test]
fn copies_within_a_block_or_two() {
    let mut rig = Rig::new(1);
    for (from, to, len) in [
        (0, 600, 5),
        (0, 1, 100),
        (1, 0, 100),
        (511, 512, 2),
        (512, 511, 2),
        (100, 612, 412),
        (0, 512, 512),
        (100, 612, 413),
        (100, 612, 924),
        (100, 612, 925),
        (4096, 4097, 4096),
        (4097, 4096, 4096),
        (MIB - 1, 0, 1),
        (0, MIB - 1, 1),
        (MIB - 5000, MIB - 4000, 4000),
    ] {
        rig.copy(from, to, len);
    }
    rig.end();
}

#[test]
fn what_overlaps_is_what_it_was() {
    let mut rig = Rig::new(12);
    let mut commands = 0;
    for (distance, by_command) in [
        (512, false),
        (4096, false),
        (256 << 10, true),
        (700 << 10, true),
        (3 * MIB + 512, true),
        (MIB - 512, true),
        (77, false),
        (MIB + 77, false),
    ] {
        for (from, to) in [(MIB, MIB + distance), (MIB + distance, MIB)] {
            // Without parts of blocks, and with.
            for (off, len) in [(0, 5 * MIB), (300, 5 * MIB + 3)] {
                rig.copy(from + off, to + off, len);
                let now = rig.commands();
                assert_eq!(now > commands, by_command, "{distance}");
                commands = now;
            }
        }
    }
    rig.end();
}

#[test]
fn limits_of_the_block_layer_are_kept() {
    let attach = AttachOptions {
        queue_pairs: 1,
        queue_depth: 4,
        max_transfer_bytes: 16384,
        ..AttachOptions::default()
    };
    for (block, small_buffers, window) in [(512, 1, 1), (512, 2, 8), (4096, 1, 8)] {
        let mut options = BlockOptions::default();
        options.small_buffers = small_buffers;
        options.window = window;
        options.chunks = 2;
        options.chunk_bytes = 8192;
        let mut rig = Rig::with(16 * MIB, block, &attach, &options);
        rig.copy(0, 8 * MIB, 8 * MIB);
        rig.copy(MIB, 0, 8 * MIB);
        rig.copy(0, 100 << 10, 2 * MIB);
        rig.copy(1, 9 * MIB, 300_000);
        assert!(rig.commands() >= 8 + 8 + 20, "{}", rig.commands());
        rig.end();
    }
}

#[test]
fn what_is_not_there_is_refused() {
    let rig = Rig::new(1);
    for (from, to, len) in [
        (MIB, 0, 1),
        (0, MIB, 1),
        (0, MIB - 1, 2),
        (MIB - 1, 0, 2),
        (u64::MAX, 0, 2),
        (0, u64::MAX, 2),
        (0, 1, u64::MAX),
        (0, 0, MIB + 1),
    ] {
        let error = rig.disk.copy(from, to, len).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL, "{error}");
    }
    assert!(rig.backing.seen().is_empty());
    // Nothing, and what is there already.
    rig.disk.copy(MIB, MIB, 0).unwrap();
    rig.disk.copy(0, MIB, 0).unwrap();
    rig.disk.copy(100, 100, 5000).unwrap();
    assert!(rig.backing.seen().is_empty());
    rig.end();
    let mut options = BlockOptions::default();
    options.read_only = true;
    let rig = Rig::with(MIB, 512, &AttachOptions::default(), &options);
    assert_eq!(rig.disk.copy(0, 512, 512).unwrap_err().errno(), Errno::PERM);
    rig.end();
}

#[test]
fn a_controller_that_refuses_is_not_asked_again() {
    // Invalid Command Opcode, Invalid Field in Command, Command Size Limit Exceeded.
    for status in ["0x001", "0x002", "0x183"] {
        for (from, to) in [(0, 16 * MIB), (0, MIB), (MIB, 0)] {
            for nth in [1, 3] {
                let attach = AttachOptions { queue_pairs: 1, ..AttachOptions::default() };
                let mut rig = Rig::with(32 * MIB, 512, &attach, &BlockOptions::default());
                rig.inject(&format!("status={status}:at={nth}"));
                rig.copy(from, to, 12 * MIB);
                let before = rig.commands();
                assert!(before < 12);
                rig.copy(0, 20 * MIB, MIB);
                assert_eq!(rig.commands(), before);
                rig.end();
            }
        }
    }
}

#[test]
fn errors_of_the_medium_are_told() {
    let rig = Rig::new(8);
    rig.backing.order(|orders| orders.fail = Some(DiskError::NoSpace));
    let error = rig.disk.copy(0, 4 * MIB, 3 * MIB).unwrap_err();
    assert_eq!(error.errno(), Errno::NOSPC, "{error}");
    rig.backing.order(|orders| orders.fail = Some(DiskError::Io(5)));
    assert_eq!(rig.disk.copy(1, 4 * MIB, 3 * MIB).unwrap_err().errno(), Errno::IO);
    rig.verify();
    rig.backing.order(|orders| orders.fail = None);
    let mut rig = rig;
    rig.copy(0, 4 * MIB, 3 * MIB);
    rig.end();
}

/// Every step of the recovery, in the middle of copies with several commands under way.
#[test]
fn lost_completions_leave_what_they_should() {
    // They are exceeded by a controller that does wrong, and not by one that does not run for a
    // while.
    let timeouts = Timeouts {
        ready: Some(Duration::from_secs(1)),
        admin: Duration::from_secs(2),
        io: Duration::from_millis(800),
        shutdown: wait::LIMIT,
    };
    let recovery = Recovery { watch: Duration::from_millis(5), ..Recovery::default() };
    let attach = AttachOptions { queue_pairs: 1, timeouts, recovery, ..AttachOptions::default() };
    for faults in [
        "drop-after:every=5:limit=4",
        "drop-before:every=5:limit=4",
        "hang:every=5:limit=4",
        "hang:every=5:limit=2,ignore=0x08",
        "fatal:at=6",
        "wrong-cid:every=5:limit=3",
    ] {
        let mut rig = Rig::with(32 * MIB, 512, &attach, &BlockOptions::default());
        rig.inject(faults);
        for (from, to) in [(0, 16 * MIB), (0, 3 * MIB + 512), (2 * MIB, 0), (5, MIB + 517)] {
            rig.copy(from, to, 8 * MIB);
        }
        let stats = rig.controller.recovery_stats();
        assert!(stats.late + stats.resets > 0, "{faults}: {stats:?}");
        assert_eq!(stats.ended, 0, "{faults}: {stats:?}");
        drop(rig);
    }
}

#[test]
fn a_copy_that_nobody_waits_for_keeps_its_destination() {
    let rig = Rig::new(8);
    let disk = rig.disk.disk().clone();
    let mut context = Context::from_waker(Waker::noop());
    rig.backing.order(|orders| orders.hold = true);
    let mut copy = Box::pin(disk.copy(0, MIB, 4096));
    assert!(copy.as_mut().poll(&mut context).is_pending());
    rig.backing.expect(1);
    drop(copy);
    // A part of a block of the destination: it is not read before the copy has written it.
    let mut part = Box::pin(disk.write(MIB + 3, b"abc", false));
    assert!(part.as_mut().poll(&mut context).is_pending());
    wait::moment();
    let seen = rig.backing.seen();
    assert_eq!((seen.len(), seen[0].op, seen[0].len), (1, Op::Read, 4096));
    rig.backing.order(|orders| orders.hold = false);
    block_on(part).unwrap();
    let mut rig = rig;
    rig.model.copy_within(0..4096, MIB as usize);
    rig.model[MIB as usize + 3..][..3].copy_from_slice(b"abc");
    rig.verify();
    drop(disk);
    rig.end();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn any_copies_are_what_memory_would_do(
        block in prop::sample::select(vec![512u32, 4096]),
        chunk_bytes in prop::sample::select(vec![4096usize, 65536]),
        copies in prop::collection::vec((0u64..3_000_000, 0u64..3_000_000, 0u64..1_100_000, any::<bool>()), 1..10),
    ) {
        let mut options = BlockOptions::default();
        options.chunk_bytes = chunk_bytes;
        let mut rig = Rig::with(4 * MIB + 8192, block, &AttachOptions::default(), &options);
        for (from, to, len, aligned) in copies {
            let to = if aligned { to / 4096 * 4096 + from % 4096 } else { to };
            rig.copy(from, to, len);
        }
        rig.end();
    }
}
