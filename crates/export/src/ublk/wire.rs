//! Structures and constants of the kernel's ublk driver (`include/uapi/linux/ublk_cmd.h`), as
//! plain data in native byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Unit of offsets and lengths, independent of the block size, in bytes.
pub(super) const SECTOR: u64 = 512;
/// Largest queue depth, which determines the spacing of the queues' descriptor arrays.
pub(super) const MAX_DEPTH: u64 = 4096;
/// Result of a command that was waiting for a request when the device was stopped:
/// `UBLK_IO_RES_ABORT`, which is `-ENODEV`.
pub(super) const ABORTED: i32 = -19;

/// Encodes `_IOC(direction, 'u', number, size)`.
const fn encode(direction: u32, number: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | number
}

const fn reads(number: u32) -> u32 {
    encode(2, number, size_of::<ControlCommand>())
}

const fn writes(number: u32) -> u32 {
    encode(3, number, size_of::<ControlCommand>())
}

/// Commands for `/dev/ublk-control`.
pub(super) mod control {
    use super::{reads, writes};

    pub(crate) const GET_DEV_INFO: u32 = reads(0x02);
    pub(crate) const ADD_DEV: u32 = writes(0x04);
    pub(crate) const DEL_DEV: u32 = writes(0x05);
    pub(crate) const START_DEV: u32 = writes(0x06);
    pub(crate) const STOP_DEV: u32 = writes(0x07);
    pub(crate) const SET_PARAMS: u32 = writes(0x08);
    pub(crate) const GET_PARAMS: u32 = reads(0x09);
    pub(crate) const START_USER_RECOVERY: u32 = writes(0x10);
    pub(crate) const END_USER_RECOVERY: u32 = writes(0x11);
    pub(crate) const GET_FEATURES: u32 = reads(0x13);
    pub(crate) const TRY_STOP_DEV: u32 = writes(0x17);
}

/// Commands for `/dev/ublkcN`.
pub(super) mod io {
    use super::{IoCommand, encode};

    pub(crate) const FETCH_REQ: u32 = encode(3, 0x20, size_of::<IoCommand>());
    pub(crate) const COMMIT_AND_FETCH_REQ: u32 = encode(3, 0x21, size_of::<IoCommand>());
}

/// Feature flags of a device: those that this program requests, and those that it does not support.
pub(super) mod feature {
    /// The device outlives its server. New requests wait for the next server.
    pub(crate) const USER_RECOVERY: u64 = 1 << 3;
    /// The next server gets the requests that the dead server had not answered.
    pub(crate) const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// A stop can fail if the device is open (`UBLK_CMD_TRY_STOP_DEV`).
    pub(crate) const SAFE_STOP: u64 = 1 << 17;
    /// The server copies data, by reads and writes of `/dev/ublkcN`.
    pub(crate) const USER_COPY: u64 = 1 << 7;
    /// Zero copy: the driver registers the memory of requests with the ring of the queue.
    pub(crate) const AUTO_BUF_REG: u64 = 1 << 11;
    /// Flag that kernels since Linux 6.17 have. If a dead server has calls on registered memory in
    /// flight, these kernels wait for them before the next server gets the request.
    pub(crate) const BUF_REG_OFF_DAEMON: u64 = 1 << 14;
    /// Zero copy, with copies by the server for requests without registered memory.
    pub(crate) const ZERO_COPY: u64 = USER_COPY | AUTO_BUF_REG;
    /// Unsupported features: other methods of data transfer (manual registration, fetch on demand,
    /// batches, shared memory), zones, integrity data, and devices of unprivileged users.
    const FOREIGN: u64 = 1 | 1 << 2 | 1 << 5 | 1 << 8 | 1 << 15 | 1 << 16 | 1 << 19;

    /// True if a device with these flags transfers data by an unsupported method.
    pub(crate) fn is_foreign(flags: u64) -> bool {
        flags & FOREIGN != 0 || !matches!(flags & ZERO_COPY, 0 | ZERO_COPY)
    }

    /// True if a kernel with these features supports zero copy.
    pub(crate) fn is_zero_copy(features: u64) -> bool {
        const NEEDED: u64 = ZERO_COPY | BUF_REG_OFF_DAEMON;
        features & NEEDED == NEEDED
    }
}

/// Encoded `struct ublk_auto_buf_reg` for the `addr` field of a command: the index in the ring's
/// buffer table at which the next request's memory is registered. If the memory of a request cannot
/// be registered, the request arrives without it (`UBLK_AUTO_BUF_REG_FALLBACK`), and has
/// [`operation::NOT_REGISTERED`] set.
pub(super) fn registered_at(index: u16) -> u64 {
    u64::from(index) | 1 << 16
}

/// Offset in bytes of a request's data in `/dev/ublkcN`, for a server that copies the data.
pub(super) fn data_of(queue: u16, tag: u16) -> u64 {
    (1 << 31) + (u64::from(queue) << 41) + (u64::from(tag) << 25)
}

/// Device states: `ublksrv_ctrl_dev_info.state`.
pub(super) mod state {
    pub(crate) const DEAD: u16 = 0;
    pub(crate) const LIVE: u16 = 1;
}

/// Control command, `struct ublksrv_ctrl_cmd`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct ControlCommand {
    pub(super) dev_id: u32,
    /// Queue number; FFFFh for a command without a queue.
    pub(super) queue_id: u16,
    pub(super) len: u16,
    pub(super) addr: u64,
    pub(super) data: u64,
    pub(super) dev_path_len: u16,
    pub(super) pad: u16,
    pub(super) reserved: u32,
}

/// Device information, `struct ublksrv_ctrl_dev_info`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub(super) struct DeviceInfo {
    pub(super) queues: u16,
    pub(super) depth: u16,
    pub(super) state: u16,
    pub(super) pad0: u16,
    pub(super) max_io_bytes: u32,
    pub(super) dev_id: u32,
    pub(super) server_pid: i32,
    pub(super) pad1: u32,
    pub(super) flags: u64,
    /// Flags of the server. The driver stores them without interpretation.
    pub(super) server_flags: u64,
    pub(super) owner_uid: u32,
    pub(super) owner_gid: u32,
    pub(super) reserved: [u64; 2],
}

/// Attributes of a device: `ublk_param_basic.attrs`.
pub(super) mod attribute {
    pub(crate) const READ_ONLY: u32 = 1;
    pub(crate) const VOLATILE_CACHE: u32 = 1 << 2;
    pub(crate) const FUA: u32 = 1 << 3;
}

/// Types of parameters that are set: `ublk_params.types`.
pub(super) mod parameter {
    pub(crate) const BASIC: u32 = 1;
    pub(crate) const DISCARD: u32 = 1 << 1;
    pub(crate) const MEMORY: u32 = 1 << 4;
}

/// Device parameters, `struct ublk_params`, up to the last field that is used.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub(super) struct Parameters {
    pub(super) len: u32,
    pub(super) types: u32,
    pub(super) attributes: u32,
    /// Logical block size in bytes, as an exponent of two. The next fields are other block sizes.
    pub(super) logical_block: u8,
    pub(super) physical_block: u8,
    pub(super) io_optimal: u8,
    pub(super) io_minimal: u8,
    /// Largest request in sectors. The following lengths are also in sectors.
    pub(super) max_request: u32,
    pub(super) chunk: u32,
    pub(super) size: u64,
    pub(super) virtual_boundary: u64,
    pub(super) discard_alignment: u32,
    /// Granularity in bytes.
    pub(super) discard_granularity: u32,
    pub(super) max_discard: u32,
    pub(super) max_write_zeroes: u32,
    pub(super) max_discard_segments: u16,
    pub(super) reserved: u16,
    /// Fields for device numbers and zones.
    pub(super) unused: [u32; 12],
    /// Mask of the address bits that must be zero in the memory of a request.
    pub(super) memory_mask: u32,
    pub(super) rest: [u32; 2],
}

/// Operations: the low byte of `ublksrv_io_desc.op_flags`.
pub(super) mod operation {
    pub(crate) const READ: u8 = 0;
    pub(crate) const WRITE: u8 = 1;
    pub(crate) const FLUSH: u8 = 2;
    pub(crate) const DISCARD: u8 = 3;
    pub(crate) const WRITE_ZEROES: u8 = 5;
    /// Forced unit access: the write is durable when it completes.
    pub(crate) const FUA: u32 = 1 << 13;
    /// Zeroed blocks stay allocated.
    pub(crate) const NO_UNMAP: u32 = 1 << 15;
    /// The memory of the request is not registered with the ring.
    pub(crate) const NOT_REGISTERED: u32 = 1 << 17;
}

/// Request descriptor, `struct ublksrv_io_desc`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Descriptor {
    pub(super) op_flags: u32,
    pub(super) sectors: u32,
    pub(super) start: u64,
    pub(super) addr: u64,
}

/// Queue command, `struct ublksrv_io_cmd`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct IoCommand {
    pub(super) queue: u16,
    pub(super) tag: u16,
    /// Number of bytes, or a negative error number.
    pub(super) result: i32,
    /// Address of the data buffer for the next request with this tag; 0 on a device with zero copy.
    pub(super) addr: u64,
}

/// Offset and length, in bytes, of a queue's descriptor array in `/dev/ublkcN`.
pub(super) fn descriptors(queue: u16, depth: u16, page: u64) -> (u64, u64) {
    let bytes = |depth: u64| (depth * size_of::<Descriptor>() as u64).next_multiple_of(page);
    (u64::from(queue) * bytes(MAX_DEPTH), bytes(depth.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_the_kernels_sizes() {
        assert_eq!(size_of::<ControlCommand>(), 32);
        assert_eq!(size_of::<DeviceInfo>(), 64);
        assert_eq!(size_of::<Parameters>(), 120);
        assert_eq!(size_of::<Descriptor>(), 24);
        assert_eq!(size_of::<IoCommand>(), 16);
    }

    #[test]
    fn commands_are_the_kernels_numbers() {
        // The values were printed by a C program with the kernel's header.
        assert_eq!(control::GET_DEV_INFO, 0x8020_7502);
        assert_eq!(control::ADD_DEV, 0xc020_7504);
        assert_eq!(control::END_USER_RECOVERY, 0xc020_7511);
        assert_eq!(control::GET_FEATURES, 0x8020_7513);
        assert_eq!(io::FETCH_REQ, 0xc010_7520);
        assert_eq!(io::COMMIT_AND_FETCH_REQ, 0xc010_7521);
    }

    #[test]
    fn ublk_structures_have_the_kernels_layout() {
        let info = DeviceInfo { flags: 1, server_flags: 2, dev_id: 3, ..DeviceInfo::default() };
        let bytes = info.as_bytes();
        assert_eq!((bytes[12], bytes[24], bytes[32]), (3, 1, 2));
        let parameters = Parameters {
            max_request: 1,
            size: 2,
            discard_granularity: 3,
            max_discard_segments: 4,
            memory_mask: 5,
            ..Parameters::default()
        };
        let bytes = parameters.as_bytes();
        assert_eq!((bytes[16], bytes[24], bytes[44], bytes[56]), (1, 2, 3, 4));
        assert_eq!(bytes[108], 5);
        let command = ControlCommand { addr: 1, data: 2, dev_path_len: 3, ..Default::default() };
        let bytes = command.as_bytes();
        assert_eq!((bytes[8], bytes[16], bytes[24]), (1, 2, 3));
    }

    #[test]
    fn buffer_addresses_are_encoded_as_in_the_kernel() {
        // `ublk_auto_buf_reg_to_sqe_addr` encodes the index, a flag, and zeroes.
        assert_eq!(registered_at(0), 0x1_0000);
        assert_eq!(registered_at(0x7f), 0x1_007f);
        assert_eq!(registered_at(u16::MAX), 0x1_ffff);
        // The values follow from `UBLKSRV_IO_BUF_OFFSET`, `UBLK_QID_OFF` and `UBLK_TAG_OFF`.
        assert_eq!(data_of(0, 0), 0x8000_0000);
        assert_eq!(data_of(0, 1), 0x8200_0000);
        assert_eq!(data_of(1, 127), 0x200_8000_0000 + 127 * (32 << 20));
    }

    #[test]
    fn zero_copy_requires_all_of_its_features() {
        // Features that Linux 6.1, 6.12, 6.16 and 7.2 report.
        for (features, has) in [(0x1f, false), (0x3ff, false), (0x3fff, false), (0xf_ffff, true)] {
            assert_eq!(feature::is_zero_copy(features), has, "{features:x}");
        }
        for (flags, foreign) in [
            (feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE, false),
            (feature::USER_RECOVERY | feature::ZERO_COPY | feature::BUF_REG_OFF_DAEMON, false),
            (feature::USER_RECOVERY | feature::USER_COPY, true),
            (feature::USER_RECOVERY | feature::AUTO_BUF_REG, true),
            (feature::ZERO_COPY | 1, true),
            (1 << 8, true),
        ] {
            assert_eq!(feature::is_foreign(flags), foreign, "{flags:x}");
        }
    }

    #[test]
    fn every_queue_has_its_own_descriptors() {
        assert_eq!(descriptors(0, 128, 4096), (0, 4096));
        assert_eq!(descriptors(1, 128, 4096), (98_304, 4096));
        assert_eq!(descriptors(2, 4096, 4096), (196_608, 98_304));
        assert_eq!(descriptors(1, 128, 65_536), (131_072, 65_536));
    }
}
