//! Disks whose blocks have metadata. Requests transfer data only, and the block device generates
//! and checks the metadata.

use rustix::io::Errno;
use shadowbell_block::{BlockDevice, BlockOptions, Zeroes};
use shadowbell_disk::{Disk, DiskError, MetadataFormat};
use shadowbell_disk_file::MemDisk;
use shadowbell_disk_layers::MetadataDisk;
use std::sync::Arc;

fn over(memory: &MemDisk, format: &str) -> Arc<dyn Disk> {
    let options = format.split('&').filter_map(|option| option.split_once('='));
    let format = MetadataFormat::parse(options).unwrap().unwrap();
    Arc::new(MetadataDisk::new(Arc::new(memory.clone()), format).unwrap())
}

fn data(seed: u64, len: usize) -> Vec<u8> {
    let word = |at: u64| (at << 8 ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes();
    (0..len as u64 / 8 + 1).flat_map(word).take(len).collect()
}

#[test]
fn byte_ranges_work_with_every_metadata_format() {
    for (block, format) in [
        (512, "metadata=8&pi=1"),
        (4096, "metadata=8&pi=2&extended=on"),
        (512, "metadata=16&guard=64&pi=1&extended=on"),
        (4096, "metadata=16&guard=64&pi=3"),
    ] {
        let memory = MemDisk::new((1 << 20) / u64::from(block), block).unwrap();
        let mut options = BlockOptions::default();
        (options.chunks, options.chunk_bytes) = (3, 16384);
        let device = BlockDevice::new(over(&memory, format), &options).unwrap();
        let disk = device.queue().unwrap();
        let size = disk.geometry().bytes as usize;
        assert!(size < 1 << 20, "{format}");
        let mut model = vec![0; size];
        for (turn, (at, len)) in
            [(0, size), (1, 5), (511, 100_001), (size - 70_001, 70_001), (4096, 8192)]
                .into_iter()
                .enumerate()
        {
            let bytes = data(turn as u64, len);
            disk.block_on(disk.write(at as u64, &bytes, turn == 2)).unwrap();
            model[at..at + len].copy_from_slice(&bytes);
            let mut back = vec![0; len];
            disk.block_on(disk.read(at as u64, &mut back)).unwrap();
            assert!(back == bytes, "{format}");
        }
        for deallocate in [false, true] {
            let how = Zeroes { deallocate, ..Zeroes::default() };
            let at = if deallocate { 300_001 } else { 200_001 };
            disk.block_on(disk.write_zeroes(at, 50_000, how)).unwrap();
            model[at as usize..][..50_000].fill(0);
        }
        disk.block_on(disk.copy(0, 600_000, 40_960)).unwrap();
        model.copy_within(0..40_960, 600_000);
        let mut found = vec![1; size];
        disk.block_on(disk.read(0, &mut found)).unwrap();
        assert!(found == model, "{format}");

        // The data is changed, but not its metadata.
        memory.bytes().write_from(8192, &[!model[8192]]).unwrap();
        let error = disk.block_on(disk.read(8200, &mut [0; 8])).unwrap_err();
        assert_eq!(error.disk(), Some(DiskError::GuardCheck), "{format}");
        assert_eq!(error.errno(), Errno::IO);
        // A partial write has to read the block and fails. A write of the whole block succeeds.
        let error = disk.block_on(disk.write(8200, &[0; 8], false)).unwrap_err();
        assert_eq!(error.disk(), Some(DiskError::GuardCheck), "{error}");
        disk.block_on(disk.write(8192, &model[8192..8192 + 4096], false)).unwrap();
        disk.block_on(disk.read(0, &mut found)).unwrap();
        assert!(found == model, "{format}");
    }
}
