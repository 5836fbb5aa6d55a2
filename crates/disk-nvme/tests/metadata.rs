//! Namespace with protection information that is used as a disk without it: the SSD inserts and
//! strips the protection information.

use shadowbell_disk::{Disk, MetadataFormat};
use shadowbell_disk_file::MemDisk;
use shadowbell_disk_layers::MetadataDisk;
use shadowbell_disk_nvme::{NvmeDisk, OpenError, Options};
use shadowbell_driver::{AttachOptions, Buffer, Command, Controller, QueuePair};
use shadowbell_frontend::InProcess;
use shadowbell_spec::Status;
use shadowbell_testing::wait;
use std::sync::Arc;

fn ssd(memory: &MemDisk, format: &str) -> Arc<InProcess> {
    let options = format.split('&').filter_map(|option| option.split_once('='));
    let format = MetadataFormat::parse(options).unwrap().unwrap();
    let disk: Arc<dyn Disk> =
        Arc::new(MetadataDisk::new(Arc::new(memory.clone()), format).unwrap());
    Arc::new(InProcess::over(disk).unwrap())
}

fn run(queue: &mut QueuePair, command: Command, buffer: Buffer) -> (Status, Buffer) {
    queue.submit(command, Some(buffer)).unwrap();
    // `wait` may return without a completion.
    let completion = wait::until_some("a completion", || {
        queue.wait(Some(wait::deadline())).unwrap();
        queue.pop()
    });
    queue.ring_cq_doorbell_if_needed().unwrap();
    (completion.status, completion.buffer.unwrap())
}

#[test]
fn an_ssd_inserts_and_strips_protection_information() {
    for format in ["metadata=8&pi=1", "metadata=16&guard=64&pi=2&extended=on"] {
        for zero_copy in [true, false] {
            let memory = MemDisk::new(4096, 512).unwrap();
            let mut options = Options::default();
            options.zero_copy = zero_copy;
            let disk = NvmeDisk::open(ssd(&memory, format), 1, "an SSD", &options).unwrap();
            let outer = Arc::new(InProcess::over(Arc::new(disk)).unwrap());
            let mut controller = Controller::attach(outer, &AttachOptions::default()).unwrap();
            let namespace = controller.namespace(1).unwrap().clone();
            assert!(namespace.metadata().is_none() && namespace.blocks() < 4096);
            let mut queue = controller.take_queue_pair().unwrap();
            let pool = controller.buffers(1, 65536).unwrap();
            let (lba, count) = (namespace.blocks() - 100, 100);
            let mut buffer = pool.take().unwrap();
            let data: Vec<u8> = (0..51200u32).map(|at| (at / 3) as u8).collect();
            assert!(buffer.copy_from(0, &data));
            let write = namespace.write(lba, count).unwrap();
            let (status, mut buffer) = run(&mut queue, write, buffer);
            assert_eq!(status, Status::SUCCESS, "{format}");
            buffer.fill(0);
            let read = namespace.read(lba, count).unwrap();
            let (status, buffer) = run(&mut queue, read, buffer);
            assert_eq!((status, buffer.to_vec(51200) == data), (Status::SUCCESS, true), "{format}");
            let compare = namespace.compare(lba, count).unwrap();
            let (status, buffer) = run(&mut queue, compare, buffer);
            assert_eq!(status, Status::SUCCESS);
            memory.bytes().write_from((lba as usize + 50) * 512, &[!data[50 * 512]]).unwrap();
            let (status, buffer) = run(&mut queue, read, buffer);
            assert_eq!(status.code(), Status::GUARD_CHECK, "{format}");
            let (status, _) = run(&mut queue, namespace.verify(lba, count).unwrap(), buffer);
            assert_eq!(status.code(), Status::GUARD_CHECK, "{format}");
        }
    }
    let memory = MemDisk::new(4096, 512).unwrap();
    let ssd = ssd(&memory, "metadata=64&pi=1");
    let error = NvmeDisk::open(ssd, 1, "an SSD", &Options::default()).unwrap_err();
    assert!(matches!(error, OpenError::Unusable { .. }), "{error}");
}
