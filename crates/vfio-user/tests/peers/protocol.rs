//! Tests of every command and its reply, in the forms that various clients send.

use crate::common;
use common::*;
use shadowbell_vfio_user::Errno;
use shadowbell_vfio_user::server::Limits;
use shadowbell_vfio_user::wire::{self, command, header_flags, region_flags};
use zerocopy::{FromBytes, IntoBytes};

fn version(major: u16, minor: u16) -> wire::Version {
    wire::Version { major, minor }
}

#[test]
fn a_version_without_json_is_answered_in_full() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let mut raw = Raw::connect(&path);
    // SPDK's client sends VERSION with 20 bytes, and its messages all have the identifier 0.
    let mut message = raw.message(command::VERSION, 0, &[version(0, 1).as_bytes()]);
    assert_eq!(message.len(), 20);
    message[..2].fill(0);
    raw.send(&message);
    let reply = raw.reply();
    assert_eq!((reply.header.id, reply.header.size as usize), (0, 16 + reply.payload.len()));
    let payload = reply.ok();
    assert_eq!(payload[..4], [0, 0, 1, 0]);
    let json = b"{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":1048576,\
        \"max_dma_maps\":5}}\0";
    assert_eq!(&payload[4..], json);
    shared.wait_log("connected, 1 fds");
}

#[test]
fn an_older_minor_version_is_agreed_to() {
    let (_server, path, _shared) = Server::with_device(Limits::default());
    let mut raw = Raw::connect(&path);
    let data = b"{\"capabilities\":{\"write_multiple\":true}}\0";
    let reply = raw.request(command::VERSION, &[version(0, 0).as_bytes(), data]).ok();
    assert_eq!(reply[..4], [0; 4]);
    assert!(std::str::from_utf8(&reply[4..]).unwrap().contains("\"write_multiple\":true"));
    let reply = raw.request(command::VERSION, &[version(0, 0).as_bytes()]);
    assert_eq!(reply.errno(), Errno::INVAL);
    assert_eq!(raw.read(0, 4).ok().len(), 20);
}

#[test]
fn a_failed_negotiation_frees_the_device() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let hello = version(0, 1);
    let wrong = version(1, 0);
    let cases: [(u16, Vec<&[u8]>); 5] = [
        (command::VERSION, vec![wrong.as_bytes()]),
        (command::VERSION, vec![hello.as_bytes(), b"{nonsense\0"]),
        (command::VERSION, vec![b"xx"]),
        (command::DEVICE_RESET, vec![]),
        (4711, vec![b"payload"]),
    ];
    for (command, payload) in cases {
        let mut raw = Raw::connect(&path);
        assert_eq!(raw.request(command, &payload).errno(), Errno::INVAL);
        raw.assert_closed();
    }
    Raw::attach(&path);
    shared.wait_log("disconnected");
    assert_eq!(shared.log(), ["connected, 8 fds", "disconnected"]);
}

#[test]
fn the_device_describes_itself() {
    let (_server, path, _shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    let ask = wire::DeviceInfo { argsz: 16, flags: 0, num_regions: 0, num_irqs: 0 };
    let reply = raw.request(command::DEVICE_GET_INFO, &[ask.as_bytes()]).ok();
    let info = wire::DeviceInfo::read_from_bytes(&reply).unwrap();
    assert_eq!(info, wire::DeviceInfo { argsz: 16, flags: 3, num_regions: 9, num_irqs: 5 });

    for index in 0..5 {
        let ask = wire::IrqInfo { argsz: 16, flags: 0, index, count: 0 };
        let reply = raw.request(command::DEVICE_GET_IRQ_INFO, &[ask.as_bytes()]).ok();
        let info = wire::IrqInfo::read_from_bytes(&reply).unwrap();
        let (flags, count) = if index == 2 { (0b1001, VECTORS) } else { (0, 0) };
        assert_eq!(info, wire::IrqInfo { argsz: 16, flags, index, count });
    }
    let ask = wire::IrqInfo { argsz: 16, flags: 0, index: 5, count: 0 };
    let reply = raw.request(command::DEVICE_GET_IRQ_INFO, &[ask.as_bytes()]);
    assert_eq!(reply.errno(), Errno::INVAL);
    let reply = raw.request(command::DEVICE_GET_IRQ_INFO, &[b"short"]);
    assert_eq!(reply.errno(), Errno::INVAL);
}

#[test]
fn a_request_that_reserves_too_little_room_is_refused() {
    let (_server, path, _shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    for argsz in [0, 15] {
        let info = wire::DeviceInfo { argsz, flags: 0, num_regions: 0, num_irqs: 0 };
        let irq = wire::IrqInfo { argsz, flags: 0, index: 2, count: 0 };
        let flags = wire::set_irqs_flags::ACTION_TRIGGER | wire::set_irqs_flags::DATA_NONE;
        let set = wire::SetIrqs { argsz, flags, index: 2, start: 0, count: 0 };
        let requests = [
            (command::DEVICE_GET_INFO, info.as_bytes()),
            (command::DEVICE_GET_IRQ_INFO, irq.as_bytes()),
            (command::DEVICE_SET_IRQS, set.as_bytes()),
        ];
        for (command, request) in requests {
            assert_eq!(raw.request(command, &[request]).errno(), Errno::INVAL, "{command} {argsz}");
        }
        assert_eq!(region_info(&mut raw, 0, argsz, 32).errno(), Errno::INVAL);
    }
    assert_eq!(raw.request(command::DEVICE_GET_INFO, &[]).errno(), Errno::INVAL);
}

fn region_info(raw: &mut Raw, index: u32, argsz: u32, len: usize) -> Reply {
    let ask = wire::RegionInfo { argsz, flags: 0, index, cap_offset: 0, size: 0, offset: 0 };
    let padding = vec![0; len - 32];
    raw.request(command::DEVICE_GET_REGION_INFO, &[ask.as_bytes(), &padding])
}

#[test]
fn every_region_that_a_client_may_ask_about_is_described() {
    let (_server, path, _shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    for index in 0..10 {
        // SPDK's client queries with this size.
        let reply = region_info(&mut raw, index, 4064, 4064).ok();
        let (info, capabilities) = wire::RegionInfo::read_from_prefix(&reply).unwrap();
        assert_eq!((info.index, info.argsz as usize), (index, reply.len()));
        let read_write = region_flags::READ | region_flags::WRITE;
        match index {
            0 => assert_eq!((info.size, info.flags), (BAR0_SIZE, read_write)),
            4 | 7 => assert_eq!((info.size, info.flags), (0x1000, read_write)),
            2 => {
                let flags = read_write | region_flags::MMAP | region_flags::CAPS;
                assert_eq!((info.size, info.flags), (BAR2_SIZE, flags));
                assert_eq!((info.cap_offset, info.offset), (32, BAR2_FILE_OFFSET));
                let mut expected = Vec::new();
                expected.extend(1u16.to_ne_bytes());
                expected.extend(1u16.to_ne_bytes());
                expected.extend(0u32.to_ne_bytes());
                expected.extend(1u32.to_ne_bytes());
                expected.extend(0u32.to_ne_bytes());
                expected.extend(AREA.offset.to_ne_bytes());
                expected.extend(AREA.len.to_ne_bytes());
                assert_eq!(capabilities, expected);
            }
            _ => assert_eq!((info.size, info.flags), (0, 0)),
        }
    }
    assert_eq!(region_info(&mut raw, 4711, 4064, 4064).errno(), Errno::INVAL);
    assert_eq!(region_info(&mut raw, 0, 31, 32).errno(), Errno::INVAL);
}

#[test]
fn a_truncated_region_info_has_the_needed_size() {
    let (_server, path, _shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    let reply = region_info(&mut raw, 2, 32, 32).ok();
    let info = wire::RegionInfo::read_from_bytes(&reply).unwrap();
    assert_eq!((info.argsz, info.cap_offset), (64, 32));
    assert_ne!(info.flags & region_flags::CAPS, 0);
    assert_eq!(region_info(&mut raw, 2, 64, 32).ok().len(), 64);
}

#[test]
fn regions_are_read_and_written() {
    let (_server, path, _shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    let echo = raw.write(0x1000, &[1, 2, 3, 4]).ok();
    assert_eq!(echo, access(0, 0x1000, 4).as_bytes());
    let reply = raw.read(0x0fff, 6).ok();
    assert_eq!(reply[..16], *access(0, 0x0fff, 6).as_bytes());
    assert_eq!(reply[16..], [0, 1, 2, 3, 4, 0]);
    // The access is to the configuration space: two bytes of the Command register.
    let config = access(7, 4, 2);
    raw.request(command::REGION_WRITE, &[config.as_bytes(), &[6, 0]]).ok();
    let reply = raw.request(command::REGION_READ, &[access(7, 0, 8).as_bytes()]).ok();
    assert_eq!(reply[16..], [0x34, 0x12, 0x78, 0x56, 6, 0, 0x10, 0]);
    // An access of no bytes is not an error.
    assert_eq!(raw.read(5, 0).ok(), access(0, 5, 0).as_bytes());
    assert_eq!(raw.write(5, &[]).ok(), access(0, 5, 0).as_bytes());
    // One access can read a whole region.
    assert_eq!(raw.read(0, BAR0_SIZE as usize).ok().len(), 16 + BAR0_SIZE as usize);
}

#[test]
fn invalid_accesses_are_refused() {
    let (_server, path, _shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    let mut refused = |access: wire::RegionAccess, data: &[u8], errno| {
        let reply = raw.request(command::REGION_READ, &[access.as_bytes()]);
        assert_eq!(reply.errno(), errno, "read {access:?}");
        let reply = raw.request(command::REGION_WRITE, &[access.as_bytes(), data]);
        assert_eq!(reply.errno(), errno, "write {access:?}");
    };
    refused(access(0, BAR0_SIZE - 2, 4), &[0; 4], Errno::INVAL);
    refused(access(0, u64::MAX - 1, 4), &[0; 4], Errno::INVAL);
    refused(access(9, 0, 4), &[0; 4], Errno::INVAL);
    refused(access(u32::MAX, 0, 4), &[0; 4], Errno::INVAL);
    refused(access(4, 0, 4), &[0; 4], Errno::NXIO);
    refused(access(0, 0, (1 << 20) + 1), &[0; (1 << 20) + 1], Errno::INVAL);
    refused(access(0, 0, u32::MAX as usize), &[0; 8], Errno::INVAL);
    // The message has fewer bytes of data than its access header announces.
    let reply = raw.request(command::REGION_WRITE, &[access(0, 0, 8).as_bytes(), &[0; 7]]);
    assert_eq!(reply.errno(), Errno::INVAL);
    let reply = raw.request(command::REGION_READ, &[b"too short"]);
    assert_eq!(reply.errno(), Errno::INVAL);
    raw.read(0, 4).ok();
}

#[test]
fn posted_writes_have_no_reply() {
    let (_server, path, _shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    let posted = header_flags::NO_REPLY;
    let mut stream = Vec::new();
    for n in 0..100u8 {
        let access = access(0, n.into(), 1);
        stream.extend(raw.message(command::REGION_WRITE, posted, &[access.as_bytes(), &[n + 1]]));
        // These messages are posted. The server refuses them, and sends no reply.
        let nowhere = common::access(77, 0, 1);
        stream.extend(raw.message(command::REGION_WRITE, posted, &[nowhere.as_bytes(), &[0]]));
        stream.extend(raw.message(4711, posted, &[&[n; 33]]));
    }
    raw.send(&stream);
    // The first reply is that of the read, because the posted messages get none. The read is
    // executed after all writes.
    let expected: Vec<u8> = (1..=100).collect();
    assert_eq!(raw.read(0, 100).ok()[16..], expected);
}

#[test]
fn several_writes_share_one_message() {
    let (_server, path, _shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    let entry = |offset, count, data| wire::MultiEntry { offset, region: 0, count, data };
    let entries = [
        entry(0, 4, [1, 2, 3, 4, 9, 9, 9, 9]),
        entry(2, 1, [7; 8]),
        entry(8, 8, [5; 8]),
        entry(16, 0, [6; 8]),
    ];
    let count = wire::WriteMulti { count: 4 };
    // Like QEMU, the client sends space for many entries, of which only the first ones are valid.
    let payload = [count.as_bytes(), entries.as_bytes(), &[0xff; 24 * 196]];
    assert_eq!(raw.request(command::REGION_WRITE_MULTI, &payload).ok(), count.as_bytes());
    assert_eq!(raw.read(0, 18).ok()[16..], [1, 2, 7, 4, 0, 0, 0, 0, 5, 5, 5, 5, 5, 5, 5, 5, 0, 0]);

    for (count, entries) in [
        (5, &entries[..]),
        (u64::MAX, &entries[..]),
        (u64::MAX / 24 + 1, &entries[..]),
        (1, &[entry(0, 9, [0; 8])][..]),
        (1, &[entry(BAR0_SIZE, 1, [0; 8])][..]),
    ] {
        let payload = [count.as_bytes(), entries.as_bytes()];
        let reply = raw.request(command::REGION_WRITE_MULTI, &payload);
        assert_eq!(reply.errno(), Errno::INVAL);
    }
    let posted = raw.message(
        command::REGION_WRITE_MULTI,
        header_flags::NO_REPLY,
        &[1u64.as_bytes(), [entry(0, 1, [99; 8])].as_bytes()],
    );
    raw.send(&posted);
    assert_eq!(raw.read(0, 1).ok()[16..], [99]);
}

#[test]
fn memory_is_mapped_with_and_without_a_descriptor() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    let map =
        |flags, offset, address, size| wire::DmaMap { argsz: 32, flags, offset, address, size };
    let fd = [memfd(0x3000)];
    let good = map(3, 0x1000, 0x10_0000, 0x2000);
    assert!(raw.request_with_fds(command::DMA_MAP, &[good.as_bytes()], &fd).ok().is_empty());
    let read_only = map(1, 0, 0x20_0000, 0x1000);
    raw.request_with_fds(command::DMA_MAP, &[read_only.as_bytes()], &fd).ok();
    // If the map has no descriptor, the device decides whether to accept it.
    let reply = raw.request(command::DMA_MAP, &[map(3, 0, 0x30_0000, 0x1000).as_bytes()]);
    assert_eq!(reply.errno(), Errno::OPNOTSUPP);
    assert_eq!(
        shared.take_log()[1..],
        [
            "map 0x100000+0x2000 rw at 0x1000",
            "map 0x200000+0x1000 r at 0x0",
            "map 0x300000+0x1000 rw at 0x0",
        ]
    );
    for impossible in [map(3, 0, 0, 0), map(3, 0, u64::MAX, 2), map(3, u64::MAX - 0xfff, 0, 0x1000)]
    {
        let reply = raw.request_with_fds(command::DMA_MAP, &[impossible.as_bytes()], &fd);
        assert_eq!(reply.errno(), Errno::INVAL);
    }
    let two = [memfd(0x1000), memfd(0x1000)];
    let reply = raw.request_with_fds(command::DMA_MAP, &[good.as_bytes()], &two);
    assert_eq!(reply.errno(), Errno::INVAL);
    assert!(shared.take_log().is_empty());

    // The reply repeats the payload of the request. The server does not need the descriptor of the
    // request, and closes it.
    let unmap = |flags, address, size| wire::DmaUnmap { argsz: 24, flags, address, size };
    let range = unmap(0, 0x10_0000, 0x2000);
    let reply = raw.request_with_fds(command::DMA_UNMAP, &[range.as_bytes()], &fd);
    assert_eq!(reply.ok(), range.as_bytes());
    let all = unmap(2, 0, 0);
    assert_eq!(raw.request(command::DMA_UNMAP, &[all.as_bytes()]).ok(), all.as_bytes());
    assert_eq!(shared.take_log(), ["unmap 0x100000+0x2000", "unmap all"]);
    for (impossible, errno) in [
        (unmap(2, 1, 1), Errno::INVAL),
        (unmap(0, 0, 0), Errno::INVAL),
        (unmap(0, u64::MAX, 2), Errno::INVAL),
        (unmap(1, 0, 0x1000), Errno::OPNOTSUPP),
    ] {
        let reply = raw.request(command::DMA_UNMAP, &[impossible.as_bytes()]);
        assert_eq!(reply.errno(), errno);
    }
    assert!(shared.take_log().is_empty());
}

#[test]
fn interrupts_are_set_up_masked_and_raised() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    let set = |flags, index, start, count| wire::SetIrqs { argsz: 20, flags, index, start, count };
    let fds = eventfds(16);
    // Cloud Hypervisor sends 16 eventfds in one message. Like QEMU, the client sends the other
    // eventfds in a second message.
    let many = set(4 | 32, 2, 0, 16);
    raw.request_with_fds(command::DEVICE_SET_IRQS, &[many.as_bytes()], &fds).ok();
    let rest = set(4 | 32, 2, 16, 2);
    raw.request_with_fds(command::DEVICE_SET_IRQS, &[rest.as_bytes()], &fds[..2]).ok();
    assert_eq!(shared.eventfds.lock().unwrap().len(), 18);
    // Three requests. The first one has no descriptors, so it removes eventfds. The second one has
    // zero vectors, so it disables all vectors. The third one masks vectors, and has a flag
    // for each vector that selects it.
    raw.request(command::DEVICE_SET_IRQS, &[set(4 | 32, 2, 3, 2).as_bytes()]).ok();
    raw.request(command::DEVICE_SET_IRQS, &[set(1 | 32, 2, 0, 0).as_bytes()]).ok();
    let payload = [set(2 | 8, 2, 1, 3).as_bytes(), &[1, 0, 2]].concat();
    raw.request(command::DEVICE_SET_IRQS, &[&payload]).ok();
    raw.request(command::DEVICE_SET_IRQS, &[set(1 | 16, 2, 0, 33).as_bytes()]).ok();
    assert_eq!(
        shared.take_log()[1..],
        [
            "Trigger 0+16 with 16 eventfds",
            "Trigger 16+2 with 2 eventfds",
            "Trigger 3+2 with 0 eventfds",
            "Trigger 0+0 with nothing",
            "Mask 1+3 with [true, false, true]",
            "Unmask 0+33 with nothing",
        ]
    );
    for impossible in [
        set(1 | 32, 5, 0, 1),
        set(1 | 32, 2, u32::MAX, 1),
        set(1 | 32, 2, 33, 1),
        set(1 | 2 | 32, 2, 0, 1),
        set(1 | 8 | 32, 2, 0, 1),
        set(1, 2, 0, 1),
        set(32, 2, 0, 1),
        set(2 | 32, 2, 0, 1),
        set(2 | 32, 2, 0, u32::MAX),
    ] {
        let reply = raw.request(command::DEVICE_SET_IRQS, &[impossible.as_bytes()]);
        assert_eq!(reply.errno(), Errno::INVAL, "{impossible:?}");
    }
    // The message has fewer eventfds than vectors.
    let reply = raw.request_with_fds(
        command::DEVICE_SET_IRQS,
        &[set(4 | 32, 2, 0, 3).as_bytes()],
        &fds[..2],
    );
    assert_eq!(reply.errno(), Errno::INVAL);
    assert!(shared.take_log().is_empty());
}

#[test]
fn unknown_commands_are_refused_and_their_payload_skipped() {
    let (_server, path, _shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    let feature = command::DEVICE_FEATURE;
    let unknown = [0, 11, 12, 14, feature, 17, 18, 19, 255, u16::MAX];
    let mut stream = Vec::new();
    for command in unknown {
        // The payload looks like valid messages. The server must not execute them.
        let inner = raw.message(command::DEVICE_RESET, 0, &[]);
        stream.extend(raw.message(command, 0, &[&inner, &inner]));
    }
    raw.send(&stream);
    for command in unknown {
        let reply = raw.reply();
        // The device does not support migration, so it has no features, and DEVICE_FEATURE has
        // another error.
        let errno = if command == feature { Errno::NOTTY } else { Errno::OPNOTSUPP };
        assert_eq!((reply.header.command, reply.errno()), (command, errno));
    }
    raw.read(0, 4).ok();
}

#[test]
fn a_message_may_arrive_byte_by_byte() {
    let (_server, path, _shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    let access = access(0, 0x20, 4);
    let message = raw.message(command::REGION_WRITE, 0, &[access.as_bytes(), &[9; 4]]);
    for byte in message {
        raw.send(&[byte]);
    }
    assert_eq!(raw.reply().ok(), access.as_bytes());
    assert_eq!(raw.read(0x20, 4).ok()[16..], [9; 4]);
}
