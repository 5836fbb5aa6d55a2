//! Copies between ranges of the disk.

use proptest::prelude::*;
use rustix::io::Errno;
use shadowbell_block::{BlockDevice, BlockOptions, BlockQueue};
use shadowbell_disk::DiskError;
use shadowbell_testing::test_disk::TestDisk;
use std::sync::Arc;

const MIB: u64 = 1 << 20;

struct Rig {
    backing: TestDisk,
    disk: BlockQueue,
    model: Vec<u8>,
}

impl Rig {
    fn with(bytes: u64, block: u32, options: &BlockOptions) -> Self {
        let backing = TestDisk::new(bytes / u64::from(block), block);
        let device = BlockDevice::new(Arc::new(backing.clone()), options).unwrap();
        let disk = device.queue().unwrap();
        let model: Vec<u8> =
            (0..bytes).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
        backing.mem.bytes().write_from(0, &model).unwrap();
        Self { backing, disk, model }
    }

    fn new(mebibytes: u64) -> Self {
        Self::with(mebibytes * MIB, 512, &BlockOptions::default())
    }

    #[track_caller]
    fn copy(&mut self, from: u64, to: u64, len: u64) {
        self.disk.block_on(self.disk.copy(from, to, len)).unwrap();
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
}

#[test]
fn overlapping_copies_keep_the_source_data() {
    let mut rig = Rig::new(12);
    for distance in [512, 4096, 256 << 10, 700 << 10, 3 * MIB + 512, MIB - 512, 77, MIB + 77] {
        for (from, to) in [(MIB, MIB + distance), (MIB + distance, MIB)] {
            // The ranges consist of whole blocks, or have partial blocks at both ends.
            for (off, len) in [(0, 5 * MIB), (300, 5 * MIB + 3)] {
                rig.copy(from + off, to + off, len);
            }
        }
    }
}

#[test]
fn copies_respect_the_limits_of_the_block_layer() {
    for (block, small_buffers, window) in [(512, 1, 1), (512, 2, 8), (4096, 1, 8)] {
        let mut options = BlockOptions::default();
        options.small_buffers = small_buffers;
        options.window = window;
        options.chunks = 2;
        options.chunk_bytes = 8192;
        let mut rig = Rig::with(16 * MIB, block, &options);
        rig.copy(0, 8 * MIB, 8 * MIB);
        rig.copy(MIB, 0, 8 * MIB);
        rig.copy(0, 100 << 10, 2 * MIB);
        rig.copy(1, 9 * MIB, 300_000);
    }
}

#[test]
fn copies_outside_of_the_disk_are_refused() {
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
        let error = rig.disk.block_on(rig.disk.copy(from, to, len)).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL, "{error}");
    }
    assert!(rig.backing.seen().is_empty());
    // Copies without an effect: two of length 0, and one whose source and destination are the same.
    rig.disk.block_on(rig.disk.copy(MIB, MIB, 0)).unwrap();
    rig.disk.block_on(rig.disk.copy(0, MIB, 0)).unwrap();
    rig.disk.block_on(rig.disk.copy(100, 100, 5000)).unwrap();
    assert!(rig.backing.seen().is_empty());
    let mut options = BlockOptions::default();
    options.read_only = true;
    let rig = Rig::with(MIB, 512, &options);
    assert_eq!(rig.disk.block_on(rig.disk.copy(0, 512, 512)).unwrap_err().errno(), Errno::PERM);
}

#[test]
fn storage_errors_of_a_copy_are_returned() {
    let rig = Rig::new(8);
    rig.backing.instruct(|instructions| instructions.fail = Some(DiskError::NoSpace));
    let error = rig.disk.block_on(rig.disk.copy(0, 4 * MIB, 3 * MIB)).unwrap_err();
    assert_eq!(error.errno(), Errno::NOSPC, "{error}");
    rig.backing.instruct(|instructions| instructions.fail = Some(DiskError::Io(5)));
    assert_eq!(
        rig.disk.block_on(rig.disk.copy(1, 4 * MIB, 3 * MIB)).unwrap_err().errno(),
        Errno::IO
    );
    rig.verify();
    rig.backing.instruct(|instructions| instructions.fail = None);
    let mut rig = rig;
    rig.copy(0, 4 * MIB, 3 * MIB);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_of_copies_equals_memmove(
        block in prop::sample::select(vec![512u32, 4096]),
        chunk_bytes in prop::sample::select(vec![4096usize, 65536]),
        copies in prop::collection::vec((0u64..3_000_000, 0u64..3_000_000, 0u64..1_100_000, any::<bool>()), 1..10),
    ) {
        let mut options = BlockOptions::default();
        options.chunk_bytes = chunk_bytes;
        let mut rig = Rig::with(4 * MIB + 8192, block, &options);
        for (from, to, len, aligned) in copies {
            let to = if aligned { to / 4096 * 4096 + from % 4096 } else { to };
            rig.copy(from, to, len);
        }
        }
}
