//! Commands, registers and addresses of a host. Most are plausible, so that the input is not
//! rejected by the decoder; some are random.

use crate::layered;
use crate::source::Source;
use shadowbell_spec::Sqe;
use shadowbell_spec::sgl::SglDescriptor;
use shadowbell_spec::sqe::NSID_ALL;
use zerocopy::IntoBytes;

/// Bus address of a guest's memory.
pub(crate) const BASE: u64 = 0x10_0000;
/// Size of a page in bytes.
pub(crate) const PAGE: u64 = 4096;
/// Number of pages of the guest's memory.
pub(crate) const PAGES: u64 = 32;
/// First page for data and lists.
const DATA: u64 = 14;

/// Address of a page of the guest's memory.
pub(crate) fn page(number: u64) -> u64 {
    BASE + number * PAGE
}
/// Number of entries of the admin queue.
pub(crate) const ADMIN_ENTRIES: u32 = 16;
/// Addresses of the admin submission queue and the admin completion queue.
pub(crate) const ASQ: u64 = BASE;
pub(crate) const ACQ: u64 = BASE + PAGE;
/// Addresses of the buffers of Doorbell Buffer Config.
pub(crate) const SHADOW: u64 = BASE + 12 * PAGE;
pub(crate) const EVENT_IDX: u64 = BASE + 13 * PAGE;

/// Usual address of submission queue `qid`.
pub(crate) fn sq_at(qid: u16) -> u64 {
    page(u64::from(qid % 6) * 2)
}

/// Usual address of the completion queue of submission queue `qid`.
pub(crate) fn cq_at(qid: u16) -> u64 {
    sq_at(qid) + PAGE
}

/// An address for data. Most are in the guest's memory.
pub(crate) fn address(source: &mut Source<'_>) -> u64 {
    let anywhere = page(DATA + source.below((PAGES - DATA) as usize) as u64);
    match source.below(16) {
        0..=7 => anywhere,
        8 | 9 => anywhere + (u64::from(source.u16()) & 0xffc),
        10 => anywhere + (u64::from(source.u16()) & 0xfff),
        11 => anywhere + PAGE - 8 * (1 + u64::from(source.u8() & 3)),
        12 => page(source.below(PAGES as usize) as u64),
        13 => page(PAGES) - u64::from(source.u8()),
        14 => 0,
        _ => source.near(&[BASE, u64::MAX - 4095, 1 << 63, page(PAGES)]),
    }
}

/// A data pointer: two PRPs or an SGL descriptor, with the flags that select them.
fn data_pointer(source: &mut Source<'_>) -> ([u8; 16], u8) {
    if source.rarely(4) {
        let kind = source.of(&[0x00, 0x00, 0x10, 0x20, 0x30, 0x01, 0x40, 0xf0, 0x21]);
        let length = source.near(&[512, 4096, 16, 32, 0, 64, 1 << 20]) as u32;
        let flags = source.of(&[0x40, 0x40, 0x40, 0x80, 0xc0]);
        return (descriptor(address(source), length, kind).to_dptr(), flags);
    }
    let prp2 = if source.bool() { address(source) } else { 0 };
    let mut dptr = [0; 16];
    dptr[..8].copy_from_slice(&address(source).to_le_bytes());
    dptr[8..].copy_from_slice(&prp2.to_le_bytes());
    (dptr, 0)
}

/// An SGL descriptor of any type.
pub(crate) fn descriptor(address: u64, length: u32, identifier: u8) -> SglDescriptor {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&address.to_le_bytes());
    bytes[8..12].copy_from_slice(&length.to_le_bytes());
    bytes[15] = identifier;
    SglDescriptor::from_dptr(bytes)
}

/// A command for the admin queue, or for an I/O queue.
pub(crate) fn command(source: &mut Source<'_>, admin: bool) -> Sqe {
    let opcode = match (source.rarely(16), admin) {
        (true, _) => source.u8(),
        (false, true) => source.of(&[
            0x06, 0x05, 0x01, 0x7c, 0x02, 0x09, 0x0a, 0x0c, 0x08, 0x00, 0x04, 0x05, 0x01, 0x18,
            0x80, 0x86, 0x14,
        ]),
        (false, false) => {
            source.of(&[0x02, 0x01, 0x02, 0x01, 0x05, 0x00, 0x08, 0x09, 0x0c, 0x19, 0x04])
        }
    };
    let nsid = source.of(&[1, 1, 1, 1, 2, 0, 3, NSID_ALL, 3, 4, 4, 5]);
    let cid = u16::from(source.u8());
    let (dptr, flags) = data_pointer(source);
    let mut sqe = Sqe::new(opcode, cid, nsid);
    (sqe.dptr, sqe.flags) = (dptr, flags);
    if admin {
        admin_fields(source, &mut sqe);
    } else {
        io_fields(source, &mut sqe);
        let metadata = address(source);
        layered::fields(source, &mut sqe, metadata);
    }
    if source.rarely(8) {
        // Changes one random field.
        let (at, value) = (source.below(16), source.u32());
        let bytes = sqe.as_mut_bytes();
        bytes[at * 4..at * 4 + 4].copy_from_slice(&value.to_le_bytes());
    }
    sqe
}

fn admin_fields(source: &mut Source<'_>, sqe: &mut Sqe) {
    let qid = source.of(&[1u16, 1, 1, 2, 2, 3, 4, 0, 64, 65]);
    match sqe.opcode {
        0x00 | 0x04 => sqe.cdw10 = qid.into(),
        0x01 | 0x05 => {
            let cq = sqe.opcode == 0x05;
            if !source.rarely(8) {
                *sqe = sqe.with_prps(if cq { cq_at(qid) } else { sq_at(qid) }, 0);
                sqe.flags = 0;
            }
            let size = source.of(&[3u32, 7, 15, 63, 1, 0, 255, 1000, 4095, 0xffff]);
            sqe.cdw10 = u32::from(qid) | size << 16;
            let other = u32::from(if source.rarely(4) { source.u16() % 5 } else { qid });
            let flags = source.of(&[1u32, 1, 1, 3, 0]);
            sqe.cdw11 = flags | other << 16;
        }
        0x02 => {
            sqe.cdw10 = u32::from(source.of(&[2u8, 1, 3, 5, 4, 0, 0x0d, 0xc0, 6, 7, 8, 0x0e]))
                | u32::from(source.of(&[0u8, 0, 1, 2, 3])) << 8
                | u32::from(source.of(&[0x7fu16, 15, 1023, 0xffff, 0])) << 16;
            sqe.cdw11 = u32::from(source.rarely(8));
            sqe.cdw12 = source.near(&[0, 0, 64, 512, 4096]) as u32;
        }
        0x06 => {
            sqe.cdw10 = u32::from(source.of(&[1u8, 0, 2, 3, 5, 6, 7, 8, 0x1c, 0x10, 0x13]));
            let any = source.u32();
            sqe.cdw11 = source.of(&[0, 0, 2 << 24, any]);
        }
        0x08 => sqe.cdw10 = u32::from(qid) | u32::from(source.u8()) << 16,
        0x09 | 0x0a => {
            sqe.cdw10 =
                u32::from(source.of(&[7u8, 8, 9, 11, 6, 4, 1, 2, 5, 10, 14, 15, 0x16, 0x80]))
                    | u32::from(source.below(8) as u8) << 8
                    | u32::from(source.rarely(8)) << 31;
            sqe.cdw11 = source.near(&[0, 1, 0x3_0003, 0x0101, 0xffff_ffff]) as u32;
        }
        0x14 => sqe.cdw10 = source.of(&[1u32, 2, 0xf, 0, 0xe]),
        0x86 => {
            sqe.cdw10 = source.near(&[0, 1, 8, 100, 127, 128]) as u32;
            sqe.cdw11 = u32::from(source.rarely(8));
            sqe.cdw12 = source.of(&[1023u32, 1, 5, 0, 2047, 0xffff_ffff]);
            let atype = source.of(&[2u32, 2, 2, 0x10, 0x11, 0]);
            sqe.cdw13 = source.of(&[0u32, 1, 8, 128, 0xffff]) | atype << 24;
        }
        0x7c if !source.rarely(8) => {
            *sqe = sqe.with_prps(SHADOW, EVENT_IDX);
            sqe.flags = 0;
        }
        _ => sqe.cdw10 = source.u32(),
    }
}

fn io_fields(source: &mut Source<'_>, sqe: &mut Sqe) {
    let slba = source.near(&[0, 1, 8, 100, 127, 128]);
    (sqe.cdw10, sqe.cdw11) = (slba as u32, (slba >> 32) as u32);
    if source.rarely(8) {
        // Mostly one of the two commands of a fused operation.
        sqe.opcode = source.of(&[0x05, 0x01, sqe.opcode]);
        sqe.flags |= source.of(&[1, 2, 1, 2, 3]);
    }
    match sqe.opcode {
        0x09 => {
            sqe.cdw10 = source.of(&[0, 1, 3, 255]);
            sqe.cdw11 = source.of(&[4, 4, 0, 7]);
        }
        0x19 => sqe.cdw12 = source.of(&[0u32, 0, 1, 3, 127, 255, 0x100, 0x201, 0x302, 0xf00]),
        _ => {
            let blocks = source.of(&[0u32, 1, 7, 8, 15, 23, 63, 127, 0xffff]);
            sqe.cdw12 =
                blocks | u32::from(source.rarely(4)) << 30 | u32::from(source.rarely(8)) << 25;
        }
    }
}

/// Contents of a PRP list, an SGL segment or a range list: addresses, descriptors, ranges.
pub(crate) fn list(source: &mut Source<'_>) -> Vec<u8> {
    let entries = 1 + source.below(16);
    let kind = source.below(4);
    let mut bytes = Vec::new();
    for _ in 0..entries {
        match kind {
            0 => bytes.extend(address(source).to_le_bytes()),
            1 => {
                let kind = source.of(&[0x00, 0x00, 0x00, 0x10, 0x20, 0x30, 0x01, 0x4f]);
                let length = source.near(&[16, 512, 1024, 4096, 48, 0]) as u32;
                bytes.extend(descriptor(address(source), length, kind).to_dptr());
            }
            2 => {
                bytes.extend(source.u32().to_le_bytes());
                bytes.extend((source.near(&[1, 8, 0, 128]) as u32).to_le_bytes());
                bytes.extend(source.near(&[0, 1, 64, 127, 128]).to_le_bytes());
            }
            _ => {
                let range = shadowbell_spec::nvm::CopyRange {
                    snsid: source.of(&[1u32, 2, 0, 3, 4, u32::MAX]),
                    reserved4: 0,
                    slba: source.near(&[0, 1, 64, 127]),
                    nlb0: source.near(&[0, 7, 63, 0xffff]) as u16,
                    reserved18: [0; 4],
                    sopt: 0,
                    reftag: 0,
                    apptag: 0,
                    apptag_mask: 0,
                };
                bytes.extend(range.as_bytes());
            }
        }
    }
    bytes
}
