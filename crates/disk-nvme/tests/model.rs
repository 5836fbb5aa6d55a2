//! Namespace of another controller as a disk: all operations, in batches, compared with a model in
//! memory. Disks of other types pass the same suite.

use shadowbell_disk::Disk;
use shadowbell_disk_file::MemDisk;
use shadowbell_disk_nvme::{NvmeDisk, Options};
use shadowbell_frontend::InProcess;
use shadowbell_testing::disks::{Random, batch, content};
use std::sync::Arc;

const SIZE: usize = 4 << 20;

fn model(zero_copy: bool, block_size: u32) {
    let below = MemDisk::new(SIZE as u64 / u64::from(block_size), block_size).unwrap();
    let ssd = Arc::new(InProcess::over(Arc::new(below)).unwrap());
    let mut options = Options::default();
    options.zero_copy = zero_copy;
    options.queue_pairs = 2;
    options.queue_depth = 16;
    let disk = NvmeDisk::open(ssd, 1, "an SSD", &options).unwrap();
    let mut model = vec![0; SIZE];
    let mut random = Random(u64::from(block_size) | 1);
    let mut queues = [disk.queue().unwrap(), disk.queue().unwrap()];
    for _ in 0..20 {
        let queue = &mut queues[random.below(2) as usize];
        batch(&disk, &mut **queue, &mut model, &mut random);
    }
    drop(queues);
    assert!(content(&disk) == model, "the disk differs at the end");
}

#[test]
fn in_place() {
    model(true, 512);
}

#[test]
fn copied() {
    model(false, 4096);
}
