//! Descriptors are closed in every error case. The test is a program of its own, because it counts
//! the descriptors of the whole process.

mod common;

use common::*;
use shadowbell_vfio_user::Client;
use shadowbell_vfio_user::client::{DmaRange, Options};
use shadowbell_vfio_user::device::DmaUnmap;
use shadowbell_vfio_user::server::Limits;
use shadowbell_vfio_user::wire::{self, command, header_flags};
use zerocopy::IntoBytes;

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn a_client_of_every_kind(path: &std::path::Path) {
    let client = Client::connect(path, Options::default()).unwrap();
    let memory = memfd(0x1000);
    let share = DmaRange {
        iova: 0,
        len: 0x1000,
        readable: true,
        writable: true,
        fd: Some(std::os::fd::AsFd::as_fd(&memory)),
        fd_offset: 0,
    };
    client.dma_map(&share).unwrap();
    client.set_irq_eventfds(2, 0, &eventfds(33)).unwrap();
    assert!(client.set_irq_eventfds(2, 30, &eventfds(4)).is_err());
    assert_eq!(client.region_info(2).unwrap().areas.len(), 1);
    client.dma_unmap(DmaUnmap::All).unwrap();
    drop(client);

    // Messages with descriptors: some do not use them, some are refused or posted, and some have
    // unknown commands.
    let mut raw = Raw::attach(path);
    for command in 0..20 {
        raw.request_with_fds(command, &[&[0; 40]], &eventfds(3));
        let fds = eventfds(3);
        let fds: Vec<_> = fds.iter().map(std::os::fd::AsFd::as_fd).collect();
        let posted = raw.message(command, header_flags::NO_REPLY, &[&[1; 40]]);
        raw.send_with_fds(&posted, &fds);
    }
    let ask = wire::RegionInfo { argsz: 32, flags: 0, index: 2, cap_offset: 0, size: 0, offset: 0 };
    for _ in 0..10 {
        raw.request(command::DEVICE_GET_REGION_INFO, &[ask.as_bytes()]);
    }
    // Descriptors are sent with half a message, and with garbage.
    let fds = eventfds(20);
    let fds: Vec<_> = fds.iter().map(std::os::fd::AsFd::as_fd).collect();
    raw.send_with_fds(&[1; 10], &fds);
    drop(raw);
    let raw = Raw::attach(path);
    raw.send_with_fds(&[0; 100], &fds);
    drop(raw);
}

#[test]
fn no_descriptor_is_left_open() {
    let (mut server, path, shared) = Server::with_recorded_device(Limits::default());
    let settle = || {
        Raw::attach(&path);
        eventually("all have left", || {
            let log = shared.log();
            let count = |what: &str| log.iter().filter(|line| line.starts_with(what)).count();
            count("connected") == count("disconnected")
        });
    };
    a_client_of_every_kind(&path);
    settle();
    let before = open_descriptors();
    for _ in 0..20 {
        a_client_of_every_kind(&path);
    }
    settle();
    assert_eq!(open_descriptors(), before);
    // Replacements of the server, and cancelled replacements, leave no descriptors open either.
    let mut raw = Raw::attach(&path);
    let events = eventfds(7);
    let fds: Vec<_> = events.iter().map(std::os::fd::AsFd::as_fd).collect();
    let bytes = raw.message(command::DMA_MAP, header_flags::NO_REPLY, &[&[0; 32]]);
    raw.send_with_fds(&bytes[..20], &fds);
    for _ in 0..20 {
        server.replace(&[&shared]);
        let old = server.freeze();
        drop(server.successor(&[&shared]));
        server.run(old);
    }
    raw.send(&bytes[20..]);
    raw.read(0, 1).ok();
    drop((raw, events));
    settle();
    eventually("all are closed", || open_descriptors() == before);
    server.stop();
    assert!(open_descriptors() < before);
}
