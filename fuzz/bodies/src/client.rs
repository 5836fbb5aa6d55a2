//! Hostile vfio-user server against the client. Its replies are in the socket before the client
//! sends its requests. Most replies have the correct id and command. Their fields, lengths and
//! descriptors are arbitrary, and commands of the server may come between them.

use crate::limits::Limits;
use crate::source::Source;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketFlags,
    SocketType, sendmsg, shutdown, socketpair,
};
use shadowbell_testing::wait::LIMIT;
use shadowbell_vfio_user::Client;
use shadowbell_vfio_user::client::{DmaRange, Options, ShortWrite};
use shadowbell_vfio_user::device::DmaUnmap;
use shadowbell_vfio_user::wire::{self, Header, command as verb};
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use zerocopy::IntoBytes;

const QUESTIONS: usize = 24;

/// Runs the program that `input` encodes.
pub fn run(input: &[u8]) {
    let mut source = Source::new(input);
    let limits = Limits::begin();
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let pair = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let (ours, theirs) = pair.expect("a pair of sockets");
    let questions: Vec<u16> = (0..1 + source.below(QUESTIONS))
        .map(|n| if n == 0 { verb::VERSION } else { source.of(&REQUESTS) })
        .collect();
    for (id, question) in questions.iter().enumerate() {
        reply(&mut source, &ours, id as u16, *question);
    }
    // The server sends no further reply.
    let _ = shutdown(&ours, Shutdown::Write);
    let options = Options { timeout: Some(LIMIT) };
    let client = Client::from_stream(theirs, options);
    limits.step("client");
    let Ok(client) = client else { return };
    for question in &questions[1..] {
        send_request(&client, *question);
        limits.step("client");
    }
}

const REQUESTS: [u16; 10] = [
    verb::DEVICE_GET_REGION_INFO,
    verb::DEVICE_GET_REGION_IO_FDS,
    verb::DEVICE_GET_INFO,
    verb::DEVICE_GET_IRQ_INFO,
    verb::REGION_READ,
    verb::REGION_WRITE,
    verb::REGION_WRITE_MULTI,
    verb::DMA_MAP,
    verb::DMA_UNMAP,
    verb::DEVICE_RESET,
];

/// Sends a request and ignores its result. The request must end.
fn send_request(client: &Client, question: u16) {
    let mut data = [0; 64];
    match question {
        verb::DEVICE_GET_REGION_INFO => {
            if let Ok(region) = client.region_info(0) {
                let _ = format!("{region:?}");
            }
        }
        verb::DEVICE_GET_REGION_IO_FDS => {
            if let Ok(found) = client.region_io_fds(0) {
                assert!(found.areas.iter().all(|(_, event)| *event < found.events.len()));
            }
        }
        verb::DEVICE_GET_INFO => drop(client.device_info()),
        verb::DEVICE_GET_IRQ_INFO => drop(client.irq_info(2)),
        verb::REGION_READ => drop(client.region_read(0, 8, &mut data)),
        verb::REGION_WRITE => drop(client.region_write(0, 8, &data[..4])),
        verb::REGION_WRITE_MULTI => {
            let write = ShortWrite { region: 0, offset: 4096, data: &data[..4] };
            let _ = client.region_write_multi(&[write, write], false);
        }
        verb::DMA_MAP => {
            let share = DmaRange {
                iova: 0x1000,
                len: 4096,
                readable: true,
                writable: true,
                fd: None,
                fd_offset: 0,
            };
            let _ = client.dma_map(&share);
        }
        verb::DMA_UNMAP => drop(client.dma_unmap(DmaUnmap::Range { iova: 0x1000, len: 4096 })),
        _ => drop(client.reset()),
    }
}

/// Writes the reply to a request into the socket.
fn reply(source: &mut Source<'_>, socket: &OwnedFd, id: u16, question: u16) {
    let mut payload = match question {
        verb::VERSION => version(source),
        verb::DEVICE_GET_INFO => {
            let numbers = [16, 3, source.near(&[9]) as u32, source.near(&[5]) as u32];
            numbers.as_bytes().to_vec()
        }
        verb::DEVICE_GET_REGION_INFO => region_info(source),
        verb::DEVICE_GET_REGION_IO_FDS => io_fds(source),
        verb::DEVICE_GET_IRQ_INFO => {
            let count = source.near(&[65, 0]) as u32;
            wire::IrqInfo { argsz: 16, flags: source.of(&[1, 0, 0xff]), index: 2, count }
                .as_bytes()
                .to_vec()
        }
        verb::REGION_READ => {
            let count = source.near(&[64, 0, 65]) as u32;
            let mut bytes = wire::RegionAccess { offset: 8, region: 0, count }.as_bytes().to_vec();
            bytes.extend(source.exactly(64));
            bytes
        }
        verb::REGION_WRITE => {
            let count = source.near(&[4]) as u32;
            wire::RegionAccess { offset: 8, region: 0, count }.as_bytes().to_vec()
        }
        verb::REGION_WRITE_MULTI => source.near(&[2]).to_le_bytes().to_vec(),
        verb::DMA_UNMAP => {
            wire::DmaUnmap { argsz: 24, flags: 0, address: 0x1000, size: 4096 }.as_bytes().to_vec()
        }
        _ => Vec::new(),
    };
    if source.rarely(8) {
        payload.truncate(source.below(payload.len() + 1));
    }
    if source.rarely(8) {
        let at = source.below(payload.len());
        if let Some(byte) = payload.get_mut(at) {
            *byte = source.u8();
        }
    }
    if source.rarely(8) {
        // A command of the server, sent between two replies.
        let id = source.u16();
        send(source, socket, Header { id, command: 11, size: 0, flags: 0, error: 0 }, &[], 0);
    }
    let failed = source.rarely(8);
    let header = Header {
        id: if source.rarely(24) { source.u16() } else { id },
        command: if source.rarely(24) { source.u16() } else { question },
        size: 0,
        flags: if failed { 0x21 } else { source.of(&[1, 1, 1, 1, 1, 1, 1, 1, 0x31, 2, 0]) },
        error: if failed { source.near(&[22, 0, 4095, 4096]) as u32 } else { 0 },
    };
    let fds = if source.rarely(3) { 1 + source.below(20) } else { 0 };
    send(source, socket, header, &payload, fds);
}

fn send(source: &mut Source<'_>, socket: &OwnedFd, header: Header, payload: &[u8], fds: usize) {
    let len = (wire::HEADER_LEN + payload.len()) as u64;
    let size = if source.rarely(16) { source.near(&[len, 16]) } else { len } as u32;
    let bytes = [Header { size, ..header }.as_bytes(), payload].concat();
    let fds: Vec<OwnedFd> = (0..fds).map(|_| descriptor(source)).collect();
    let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !borrowed.is_empty() {
        assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
    }
    // If the socket is full, the message is truncated, which is also an input.
    let _ = sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL);
}

fn descriptor(source: &mut Source<'_>) -> OwnedFd {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};
    if source.rarely(3) {
        memfd_create("area", MemfdFlags::CLOEXEC).expect("a memfd")
    } else {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")
    }
}

fn version(source: &mut Source<'_>) -> Vec<u8> {
    let mut bytes = vec![0, 0, source.of(&[1, 1, 1, 0, 2]), 0];
    match source.below(4) {
        0 => bytes.extend(source.bytes(64)),
        1 => {}
        _ => {
            let number = |source: &mut Source<'_>| source.near(&[1, 16, 1 << 20, 65535]);
            let json = format!(
                "{{\"capabilities\":{{\"max_msg_fds\":{},\"max_data_xfer_size\":{},\
                 \"max_dma_maps\":{},\"write_multiple\":{}}}}}\0",
                number(source),
                number(source),
                number(source),
                source.bool()
            );
            bytes.extend(json.into_bytes());
        }
    }
    bytes
}

fn region_info(source: &mut Source<'_>) -> Vec<u8> {
    let info = wire::RegionInfo {
        argsz: source.near(&[32, 64, 4096]) as u32,
        flags: source.of(&[15, 15, 7, 3, 0xffff]),
        index: 0,
        cap_offset: source.near(&[32, 32, 0, 31, 33]) as u32,
        size: source.near(&[0x4000, 0]),
        offset: source.near(&[0, 4096]),
    };
    let mut bytes = info.as_bytes().to_vec();
    for _ in 0..source.below(4) {
        let next = source.near(&[0, 32, 56, 64]) as u32;
        let (id, version) = (source.of(&[1, 1, 2]), 1);
        bytes.extend(wire::CapabilityHeader { id, version, next }.as_bytes());
        let areas = source.below(4);
        let nr_areas = if source.rarely(4) { source.u32() } else { areas as u32 };
        bytes.extend(wire::SparseMmap { nr_areas, reserved: 0 }.as_bytes());
        for _ in 0..areas {
            let area = wire::SparseArea {
                offset: source.near(&[0x1000, 0]),
                size: source.near(&[0x1000, 0]),
            };
            bytes.extend(area.as_bytes());
        }
    }
    bytes
}

fn io_fds(source: &mut Source<'_>) -> Vec<u8> {
    let entries = source.below(6);
    let count = if source.rarely(4) { source.u32() } else { entries as u32 };
    let argsz = source.near(&[16 + 40 * entries as u64, 4096]) as u32;
    let mut bytes = wire::RegionIoFds { argsz, flags: 0, index: 0, count }.as_bytes().to_vec();
    for n in 0..entries {
        let entry = wire::IoFd {
            offset: source.near(&[0x1008, 0x1000, 0x4000]),
            size: source.near(&[4, 0]),
            fd_index: source.near(&[n as u64, 0, 19]) as u32,
            kind: source.of(&[0, 0, 0, 1]),
            flags: source.of(&[0, 0, 0, 1]),
            padding: 0,
            datamatch: 0,
        };
        bytes.extend(entry.as_bytes());
    }
    bytes
}
