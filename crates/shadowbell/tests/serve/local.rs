//! A driver attached to a controller in the same process.

use crate::harness::{complete, run};
use shadowbell_controller::config::{Config, NamespaceConfig, uuid_from};
use shadowbell_controller::{Carrier, PoolOptions};
use shadowbell_driver::{AttachOptions, Controller, Doorbells, Transport};
use shadowbell_frontend::InProcess;
use shadowbell_memory::{EventFd, Mapping};
use shadowbell_spec::Status;
use std::sync::Arc;

/// Creates a controller with `disk` and these doorbell mechanisms.
fn local_with(disk: &str, shadow_doorbells: bool, mapped_doorbells: bool) -> Arc<InProcess> {
    let disk = shadowbell_disk_file::open(disk).unwrap();
    let namespaces = vec![NamespaceConfig { uuid: uuid_from("local"), disk }];
    let config = Config { namespaces, shadow_doorbells, ..Config::default() };
    let carrier = Carrier { mapped_doorbells, ..Carrier::default() };
    let pool = PoolOptions { workers: 1, ..PoolOptions::default() };
    Arc::new(InProcess::start(config, carrier, &pool, "local".into()).unwrap())
}

fn local(disk: &str) -> Arc<InProcess> {
    local_with(disk, true, false)
}

#[test]
fn io_with_every_kind_of_doorbell() {
    for (shadow, mapped, expected) in [
        (true, false, Doorbells::Shadow),
        (false, false, Doorbells::Mmio),
        (false, true, Doorbells::Mapped),
    ] {
        let way = local_with("mem:4MiB", shadow, mapped);
        let transport: Arc<dyn Transport> = way.clone();
        let mut controller =
            Controller::attach(transport, &AttachOptions { queue_depth: 16, ..Default::default() })
                .unwrap();
        assert_eq!(controller.doorbells(), expected);
        let namespace = controller.namespace(1).unwrap().clone();
        let pool = controller.buffers(8, 4096).unwrap();
        let mut queue = controller.take_queue_pair().unwrap();
        for round in 0u64..50 {
            for n in 0..8 {
                let mut buffer = pool.take().unwrap();
                assert!(buffer.copy_from(0, &(round * 8 + n).to_le_bytes()));
                queue.submit(namespace.write(n * 8, 8).unwrap(), Some(buffer)).unwrap();
            }
            queue.ring().unwrap();
            for _ in 0..8 {
                assert_eq!(complete(&mut queue).status, Status::SUCCESS);
            }
        }
        let done = run(&mut queue, namespace.read(0, 8).unwrap(), pool.take());
        assert_eq!(done.buffer.unwrap().to_vec(8), (49u64 * 8).to_le_bytes());
        let (sq, cq) = way.controller().stats().io_queues();
        assert_eq!((sq.commands, cq.completions), (401, 401));
        drop(queue);
        controller.detach().unwrap();
    }
}

#[test]
fn memory_and_interrupts_are_checked() {
    let way = local("mem:1MiB");
    assert_eq!(way.irq_vectors(), 65);
    let event = EventFd::new().unwrap();
    way.set_irq(64, Some(&event)).unwrap();
    way.set_irq(64, None).unwrap();
    assert!(way.set_irq(65, Some(&event)).unwrap_err().to_string().contains("no such vector"));
    let memory = Mapping::anonymous(4096).unwrap();
    let iova = way.map_dma(&memory).unwrap();
    assert!(way.map_dma(&memory).is_err(), "twice");
    way.unmap_dma(iova, 4096).unwrap();
    assert!(way.unmap_dma(iova, 4096).is_err());
    way.reset().unwrap();
    way.reset().unwrap();
    assert!(way.doorbell_page().is_none());
}

#[test]
fn a_controller_can_be_attached_to_again() {
    let way = local("mem:1MiB");
    for _ in 0..20 {
        let transport: Arc<dyn Transport> = way.clone();
        let controller = Controller::attach(transport, &AttachOptions::default()).unwrap();
        assert_eq!(controller.namespaces().len(), 1);
    }
}

#[test]
fn an_open_disk_can_be_attached_in_process() {
    let disk = shadowbell_disk_file::open("mem:1MiB?block-size=4096").unwrap();
    let transport = Arc::new(InProcess::over(disk).unwrap());
    let controller = Controller::attach(transport, &AttachOptions::default());
    assert_eq!(controller.unwrap().namespace(1).unwrap().block_size(), 4096);
}

#[test]
fn memory_that_was_just_mapped_can_be_used() {
    let way = local("mem:1MiB");
    let transport: Arc<dyn Transport> = way.clone();
    let mut controller = Controller::attach(transport, &AttachOptions::default()).unwrap();
    let namespace = controller.namespace(1).unwrap().clone();
    let mut queue = controller.take_queue_pair().unwrap();
    for round in 0..20_000 {
        // The I/O thread must receive the mapping of the new buffer before the command, although a
        // doorbell write does not wait for the controller.
        let pool = controller.buffers(1, 4096).unwrap();
        let done = run(&mut queue, namespace.write(0, 8).unwrap(), pool.take());
        assert_eq!(done.status, Status::SUCCESS, "round {round}");
    }
}
