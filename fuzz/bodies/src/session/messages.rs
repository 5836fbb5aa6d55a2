//! Messages of every kind, with any fields.

use crate::command::{self, BASE, PAGE, PAGES};
use crate::source::Source;
use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create};
use shadowbell_vfio_user::migration::{
    DeviceFeature, DeviceState, LoggingControl, LoggingReport, MigData, feature, feature_flags,
};
use shadowbell_vfio_user::wire::{self, Header, command as verb};
use std::os::fd::OwnedFd;
use zerocopy::IntoBytes;

/// Maximum number of descriptors with one message.
pub(crate) const MAX_FDS: usize = 70;

pub(crate) fn message(command: u16, id: u16, payload: &[&[u8]]) -> Vec<u8> {
    message_with(command, id, 0, payload)
}

pub(crate) fn message_with(command: u16, id: u16, flags: u32, payload: &[&[u8]]) -> Vec<u8> {
    let payload = payload.concat();
    let size = (wire::HEADER_LEN + payload.len()) as u32;
    let mut bytes = Header { id, command, size, flags, error: 0 }.as_bytes().to_vec();
    bytes.extend(payload);
    bytes
}

pub(crate) fn access(region: u32, offset: u64, count: u32) -> [u8; 16] {
    zerocopy::transmute!(wire::RegionAccess { offset, region, count })
}

pub(crate) fn dma_map(address: u64, size: u64, offset: u64, flags: u32) -> [u8; 32] {
    zerocopy::transmute!(wire::DmaMap { argsz: 32, flags, offset, address, size })
}

/// Returns a random message, its descriptors, and true if descriptors may have another type than
/// the message needs.
pub(crate) fn any(source: &mut Source<'_>, file: &OwnedFd) -> (Vec<u8>, Vec<OwnedFd>, bool) {
    let verb = if source.rarely(12) { source.u16() } else { 1 + source.below(18) as u16 };
    let (mut fds, mut odd) = (Vec::new(), false);
    let payload = match verb {
        verb::VERSION => {
            let mut bytes = vec![0, 0, source.of(&[1, 0, 2]), 0];
            bytes.extend(source.bytes(64));
            bytes
        }
        verb::DMA_MAP => {
            (fds, odd) = descriptors(source, file, 0);
            let iova = source.near(&[BASE, BASE + PAGES * PAGE, 0, 1 << 40, BASE + PAGE]);
            let size = source.near(&[PAGE, PAGES * PAGE, 0, 512, 1 << 30, 1 << 44]);
            let offset = source.near(&[0, 0, PAGE, 1, PAGES * PAGE]);
            dma_map(iova, size, offset, source.of(&[3, 3, 1, 2, 0, 7])).to_vec()
        }
        verb::DMA_UNMAP => {
            if source.rarely(4) {
                (fds, odd) = descriptors(source, file, 0);
            }
            let flags = source.of(&[0, 0, 2, 1, 4]);
            let all = flags == 2 && !source.rarely(4);
            let address = if all { 0 } else { source.near(&[BASE, 0, 1 << 40, BASE + PAGE]) };
            let size = if all { 0 } else { source.near(&[PAGE, PAGES * PAGE, 0, 1 << 30]) };
            wire::DmaUnmap { argsz: 24, flags, address, size }.as_bytes().to_vec()
        }
        verb::DEVICE_GET_REGION_INFO => {
            let argsz = source.near(&[32, 64, 4064, 16]) as u32;
            let index = source.near(&[0, 1, 4, 7, 8, 9, 15, 16]) as u32;
            let info =
                wire::RegionInfo { argsz, flags: 0, index, cap_offset: 0, size: 0, offset: 0 };
            info.as_bytes().to_vec()
        }
        verb::DEVICE_GET_REGION_IO_FDS => {
            let argsz = source.near(&[16, 64, 4096, 0]) as u32;
            let index = source.near(&[0, 0, 1, 9]) as u32;
            let flags = u32::from(source.rarely(8));
            wire::RegionIoFds { argsz, flags, index, count: 0 }.as_bytes().to_vec()
        }
        verb::DEVICE_GET_IRQ_INFO => {
            let index = source.near(&[2, 0, 1, 3, 4, 5]) as u32;
            wire::IrqInfo { argsz: 16, flags: 0, index, count: 0 }.as_bytes().to_vec()
        }
        verb::DEVICE_SET_IRQS => {
            let data = source.of(&[4, 4, 1, 2, 3, 0]);
            let action = source.of(&[0x20, 0x20, 0x20, 8, 0x10, 0x38]);
            let index = source.near(&[2, 2, 2, 0, 5]) as u32;
            let start = source.near(&[0, 0, 1, 64]) as u32;
            let mut count = source.near(&[1, 2, 0, 5, 65, 255]) as u32;
            if data == 4 {
                (fds, odd) = descriptors(source, file, 1);
                if !source.rarely(4) {
                    count = fds.len() as u32;
                }
            }
            let set = wire::SetIrqs { argsz: 20, flags: data | action, index, start, count };
            let mut bytes = set.as_bytes().to_vec();
            bytes.extend(source.bytes(8));
            bytes
        }
        verb::REGION_READ => {
            let (region, offset) = region_and_offset(source);
            let count = source.near(&[4, 8, 1, 2, 256, 4096, 1 << 20, 0]) as u32;
            // Most reads are short, because a long reply is slow and rarely finds more.
            let count = if source.rarely(8) { count } else { count & 0x1fff };
            access(region, offset, count).to_vec()
        }
        verb::REGION_WRITE => {
            let (region, offset) = region_and_offset(source);
            let len = source.of(&[4, 8, 4, 2, 1, 0, 3, 16, 4096]);
            let data = value(source, len);
            let count = if source.rarely(8) { source.u32() } else { len as u32 };
            [access(region, offset, count).as_slice(), &data].concat()
        }
        verb::REGION_WRITE_MULTI => {
            let entries = source.below(6);
            let count = if source.rarely(8) { source.u64() } else { entries as u64 };
            let mut bytes = count.to_le_bytes().to_vec();
            for _ in 0..entries {
                let (region, offset) = region_and_offset(source);
                let len = source.near(&[4, 8, 2, 0, 9]) as u32;
                let data = value(source, 8).try_into().unwrap_or_default();
                bytes.extend(wire::MultiEntry { offset, region, count: len, data }.as_bytes());
            }
            bytes
        }
        verb::DEVICE_FEATURE => feature(source),
        verb::MIG_DATA_READ | verb::MIG_DATA_WRITE => {
            let data = source.bytes(64);
            let size = source.near(&[data.len() as u64, 0, 64, 1 << 20, u64::from(u32::MAX)]);
            let size = if source.rarely(3) { size as u32 } else { data.len() as u32 };
            let head = MigData { argsz: size.wrapping_add(8), size };
            [head.as_bytes(), &data].concat()
        }
        _ => {
            if source.rarely(4) {
                (fds, odd) = descriptors(source, file, 0);
            }
            source.bytes(48)
        }
    };
    let flags = match source.below(8) {
        0 => 0x10,
        1 if source.rarely(4) => source.u32(),
        _ => 0,
    };
    (message_with(verb, source.u8().into(), flags, &[&payload]), fds, odd)
}

/// A DEVICE_FEATURE message: mostly migration states and the dirty log.
fn feature(source: &mut Source<'_>) -> Vec<u8> {
    let (index, method, data) = match source.below(8) {
        0..=2 => {
            let state = source.near(&[1, 2, 3, 4, 0, 5]) as u32;
            let state = DeviceState { state, data_fd: 0 };
            (feature::MIG_DEVICE_STATE, feature_flags::SET, state.as_bytes().to_vec())
        }
        3 => {
            let num_ranges = source.near(&[0, 0, 1, 2, 4096, u64::from(u32::MAX)]) as u32;
            let control = LoggingControl { page_size: source.u64(), num_ranges, reserved: 0 };
            let range = [BASE, source.near(&[PAGE, PAGES * PAGE, 0, u64::MAX])];
            let data = [control.as_bytes(), range.as_bytes()].concat();
            (feature::DMA_LOGGING_START, feature_flags::SET, data)
        }
        4 => (feature::DMA_LOGGING_STOP, feature_flags::SET, Vec::new()),
        5 | 6 => {
            let iova = source.near(&[BASE, 0, BASE + PAGE, u64::MAX - PAGE]);
            let length = source.near(&[PAGES * PAGE, PAGE, 0, 1 << 30, u64::MAX]);
            let page_size = source.near(&[PAGE, 1, 512, 1 << 20, 0, 1 << 63]);
            let report = LoggingReport { iova, length, page_size };
            (feature::DMA_LOGGING_REPORT, feature_flags::GET, report.as_bytes().to_vec())
        }
        _ => (source.near(&[1, 2, 0, 9]) as u32 & feature_flags::INDEX, 0, source.bytes(32)),
    };
    let method = match source.below(8) {
        0 => feature_flags::GET,
        1 => feature_flags::PROBE | method,
        2 => source.u32() & !feature_flags::INDEX,
        _ => method,
    };
    let head = DeviceFeature { argsz: source.near(&[64, 8, 0]) as u32, flags: index | method };
    [head.as_bytes(), &data].concat()
}

/// A region and an offset in it.
fn region_and_offset(source: &mut Source<'_>) -> (u32, u64) {
    let region = source.of(&[0, 0, 0, 7, 7, 4, 1, 8, 9, u32::MAX]);
    let offset = match region {
        0 => source.near(&[
            0, 0x14, 0x1c, 0x24, 0x28, 0x30, 0x20, 0x0c, 0x1000, 0x1004, 0x1008, 0x100c, 0x2000,
            0x3ff8, 0x4000,
        ]),
        7 => source
            .near(&[0, 4, 0x10, 0x14, 0x20, 0x34, 0x40, 0x50, 0x60, 0x80, 0xb0, 0x100, 0x1000]),
        _ => source.near(&[0, 8, 12, 16, 0x7f0, 0x800, 0x1000]),
    };
    (region, offset)
}

/// Data for a register.
fn value(source: &mut Source<'_>, len: usize) -> Vec<u8> {
    let value = source.near(&[
        0x0046_0001,
        0,
        1,
        6,
        2,
        4,
        0x000f_000f,
        command::ASQ,
        command::ACQ,
        0x0046_4001,
        0x4e56_4d65,
        0xffff_ffff,
        0x8000,
    ]);
    let mut bytes = value.to_le_bytes().to_vec();
    bytes.resize(len.max(8), 0);
    bytes.truncate(len);
    bytes
}

/// Returns random descriptors, and true if their types are random. Otherwise all have the type
/// `wanted`: 0 for memory, 1 for eventfds.
fn descriptors(source: &mut Source<'_>, file: &OwnedFd, wanted: usize) -> (Vec<OwnedFd>, bool) {
    let count = match (source.below(8), wanted) {
        (0, _) => 0,
        (1, _) => source.below(MAX_FDS),
        (_, 0) => 1,
        _ => 1 + source.below(5),
    };
    let odd = source.rarely(6);
    // Few descriptors of random types: the server accepts the next client only after it has closed
    // them, which takes time.
    let count = if odd { count.min(4) } else { count };
    let fds = (0..count).map(|_| {
        let kind = if odd { source.below(8) } else { wanted };
        descriptor(kind, file)
    });
    (fds.collect(), odd)
}

fn descriptor(kind: usize, file: &OwnedFd) -> OwnedFd {
    use rustix::event::{EventfdFlags, eventfd};
    let null = |flags| rustix::fs::open("/dev/null", flags, Mode::empty());
    match kind {
        0 => file.try_clone().map_err(|_| rustix::io::Errno::MFILE),
        1 => eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK),
        // A full eventfd: a write to it blocks.
        2 => eventfd(0, EventfdFlags::CLOEXEC).inspect(|fd| {
            let _ = rustix::io::write(fd, &(u64::MAX - 1).to_ne_bytes());
        }),
        3 => null(OFlags::RDWR | OFlags::CLOEXEC),
        4 => null(OFlags::PATH | OFlags::CLOEXEC),
        5 => rustix::pipe::pipe().map(|(reader, _)| reader),
        // A memfd that is empty and sealed.
        6 => {
            memfd_create("sealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).inspect(|fd| {
                let _ = rustix::fs::fcntl_add_seals(fd, rustix::fs::SealFlags::all());
            })
        }
        _ => rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC),
    }
    .expect("a descriptor")
}

/// Changes the bytes of a message, as a faulty client might.
pub(crate) fn mangle(source: &mut Source<'_>, bytes: &mut Vec<u8>) {
    match source.below(4) {
        0 => bytes.truncate(source.below(bytes.len() + 1)),
        1 => {
            let at = source.below(bytes.len());
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= source.u8();
            }
        }
        2 => {
            let size =
                source.near(&[bytes.len() as u64, 16, 0, 1 << 20, u64::from(u32::MAX)]) as u32;
            if let Some(field) = bytes.get_mut(4..8) {
                field.copy_from_slice(&size.to_le_bytes());
            }
        }
        _ => {
            let more = source.bytes(32);
            bytes.extend(more);
            let len = bytes.len() as u32;
            if source.bool()
                && let Some(field) = bytes.get_mut(4..8)
            {
                field.copy_from_slice(&len.to_le_bytes());
            }
        }
    }
}
