//! What goes between us and the kernel's driver: `include/uapi/linux/ublk_cmd.h`. Plain data in the
//! machine's own byte order.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The unit of places and lengths, whatever the blocks are.
pub(super) const SECTOR: u64 = 512;
/// The most requests that a queue can have; what each queue's descriptors have room for.
pub(super) const MAX_DEPTH: u64 = 4096;
/// The result of a command that waited for a request which never will come: the device is stopped.
/// `UBLK_IO_RES_ABORT`, which is `-ENODEV`.
pub(super) const ABORTED: i32 = -19;

/// `_IOC(direction, 'u', number, size)`.
const fn encode(direction: u32, number: u32, size: usize) -> u32 {
    direction << 30 | (size as u32) << 16 | (b'u' as u32) << 8 | number
}

const fn reads(number: u32) -> u32 {
    encode(2, number, size_of::<ControlCommand>())
}

const fn writes(number: u32) -> u32 {
    encode(3, number, size_of::<ControlCommand>())
}

/// Commands to `/dev/ublk-control`.
pub(super) mod control {
    use super::{reads, writes};

    pub(in super::super) const GET_DEV_INFO: u32 = reads(0x02);
    pub(in super::super) const ADD_DEV: u32 = writes(0x04);
    pub(in super::super) const DEL_DEV: u32 = writes(0x05);
    pub(in super::super) const START_DEV: u32 = writes(0x06);
    pub(in super::super) const STOP_DEV: u32 = writes(0x07);
    pub(in super::super) const SET_PARAMS: u32 = writes(0x08);
    pub(in super::super) const GET_PARAMS: u32 = reads(0x09);
    pub(in super::super) const START_USER_RECOVERY: u32 = writes(0x10);
    pub(in super::super) const END_USER_RECOVERY: u32 = writes(0x11);
    pub(in super::super) const GET_FEATURES: u32 = reads(0x13);
    pub(in super::super) const TRY_STOP_DEV: u32 = writes(0x17);
}

/// Commands to `/dev/ublkcN`.
pub(super) mod io {
    use super::{IoCommand, encode};

    pub(in super::super) const FETCH_REQ: u32 = encode(3, 0x20, size_of::<IoCommand>());
    pub(in super::super) const COMMIT_AND_FETCH_REQ: u32 = encode(3, 0x21, size_of::<IoCommand>());
}

/// Features of a device: what we ask for, and what we can not serve.
pub(super) mod feature {
    /// The device outlives its server, and requests wait for the next one,
    pub(in super::super) const USER_RECOVERY: u64 = 1 << 3;
    /// those too that the last one had taken and not answered.
    pub(in super::super) const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Stopping it can be made to fail while it is open.
    pub(in super::super) const SAFE_STOP: u64 = 1 << 17;
    /// The server copies data, by reads and writes of `/dev/ublkcN`.
    pub(in super::super) const USER_COPY: u64 = 1 << 7;
    /// Data stay where they are: their memory is registered with the ring of the queue.
    pub(in super::super) const AUTO_BUF_REG: u64 = 1 << 11;
    /// Of the kernels since 6.17, which wait for what a dead server had under way with such memory
    /// before the next one gets the request.
    pub(in super::super) const BUF_REG_OFF_DAEMON: u64 = 1 << 14;
    /// Data that the driver does not copy; what can not go straight is copied by us.
    pub(in super::super) const STRAIGHT: u64 = USER_COPY | AUTO_BUF_REG;
    /// Data in other ways (registered by hand, fetched on demand, batches, shared memory), zones,
    /// integrity data, and devices of users.
    const FOREIGN: u64 = 1 | 1 << 2 | 1 << 5 | 1 << 8 | 1 << 15 | 1 << 16 | 1 << 19;

    /// Whether requests of a device with these come in a way that is not served here.
    pub(in super::super) fn is_foreign(flags: u64) -> bool {
        flags & FOREIGN != 0 || !matches!(flags & STRAIGHT, 0 | STRAIGHT)
    }

    /// Whether a kernel with these can leave data where they are.
    pub(in super::super) fn is_straight(features: u64) -> bool {
        const NEEDED: u64 = STRAIGHT | BUF_REG_OFF_DAEMON;
        features & NEEDED == NEEDED
    }
}

/// `struct ublk_auto_buf_reg`, as it is in a command's own `addr`: the place in the ring's table at
/// which the next request's memory is registered. One that can not be registered comes without
/// (`UBLK_AUTO_BUF_REG_FALLBACK`), and says so by [`operation::NOT_REGISTERED`].
pub(super) fn registered_at(index: u16) -> u64 {
    u64::from(index) | 1 << 16
}

/// Where in `/dev/ublkcN` the data of a request are, for a server that copies them.
pub(super) fn data_of(queue: u16, tag: u16) -> u64 {
    (1 << 31) + (u64::from(queue) << 41) + (u64::from(tag) << 25)
}

/// What a device is at the moment: `ublksrv_ctrl_dev_info.state`.
pub(super) mod state {
    pub(in super::super) const DEAD: u16 = 0;
    pub(in super::super) const LIVE: u16 = 1;
}

/// `struct ublksrv_ctrl_cmd`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct ControlCommand {
    pub(super) dev_id: u32,
    /// FFFFh: the command is about no queue.
    pub(super) queue_id: u16,
    pub(super) len: u16,
    pub(super) addr: u64,
    pub(super) data: u64,
    pub(super) dev_path_len: u16,
    pub(super) pad: u16,
    pub(super) reserved: u32,
}

/// `struct ublksrv_ctrl_dev_info`.
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
    /// The server's own, which the driver keeps and does not look at.
    pub(super) server_flags: u64,
    pub(super) owner_uid: u32,
    pub(super) owner_gid: u32,
    pub(super) reserved: [u64; 2],
}

/// Attributes: `ublk_param_basic.attrs`.
pub(super) mod attribute {
    pub(in super::super) const READ_ONLY: u32 = 1;
    pub(in super::super) const VOLATILE_CACHE: u32 = 1 << 2;
    pub(in super::super) const FUA: u32 = 1 << 3;
}

/// Which parameters there are: `ublk_params.types`.
pub(super) mod parameter {
    pub(in super::super) const BASIC: u32 = 1;
    pub(in super::super) const DISCARD: u32 = 1 << 1;
    pub(in super::super) const MEMORY: u32 = 1 << 4;
}

/// `struct ublk_params`, as far as it is used here.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub(super) struct Parameters {
    pub(super) len: u32,
    pub(super) types: u32,
    pub(super) attributes: u32,
    /// Exponents of two, in bytes.
    pub(super) logical_block: u8,
    pub(super) physical_block: u8,
    pub(super) io_optimal: u8,
    pub(super) io_minimal: u8,
    /// In sectors, as everything that follows.
    pub(super) max_request: u32,
    pub(super) chunk: u32,
    pub(super) size: u64,
    pub(super) virtual_boundary: u64,
    pub(super) discard_alignment: u32,
    /// This one is in bytes.
    pub(super) discard_granularity: u32,
    pub(super) max_discard: u32,
    pub(super) max_write_zeroes: u32,
    pub(super) max_discard_segments: u16,
    pub(super) reserved: u16,
    /// Numbers of devices, and zones.
    pub(super) unused: [u32; 12],
    /// Bits that are zero in the addresses of a request's memory.
    pub(super) memory_mask: u32,
    pub(super) rest: [u32; 2],
}

/// Operations: the low byte of `ublksrv_io_desc.op_flags`.
pub(super) mod operation {
    pub(in super::super) const READ: u8 = 0;
    pub(in super::super) const WRITE: u8 = 1;
    pub(in super::super) const FLUSH: u8 = 2;
    pub(in super::super) const DISCARD: u8 = 3;
    pub(in super::super) const WRITE_ZEROES: u8 = 5;
    /// It is durable when it completes.
    pub(in super::super) const FUA: u32 = 1 << 13;
    /// The blocks of zeroes stay allocated.
    pub(in super::super) const NO_UNMAP: u32 = 1 << 15;
    /// Its memory is not registered with the ring.
    pub(in super::super) const NOT_REGISTERED: u32 = 1 << 17;
}

/// `struct ublksrv_io_desc`: a request.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Descriptor {
    pub(super) op_flags: u32,
    pub(super) sectors: u32,
    pub(super) start: u64,
    pub(super) addr: u64,
}

/// `struct ublksrv_io_cmd`.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct IoCommand {
    pub(super) queue: u16,
    pub(super) tag: u16,
    /// Bytes, or a negative error number.
    pub(super) result: i32,
    /// Where the data of the next request with this tag are, or go.
    pub(super) addr: u64,
}

/// Where a queue's descriptors are in `/dev/ublkcN`, and how many bytes of it to map.
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
        // As a C program with the kernel's header prints them.
        assert_eq!(control::GET_DEV_INFO, 0x8020_7502);
        assert_eq!(control::ADD_DEV, 0xc020_7504);
        assert_eq!(control::END_USER_RECOVERY, 0xc020_7511);
        assert_eq!(control::GET_FEATURES, 0x8020_7513);
        assert_eq!(io::FETCH_REQ, 0xc010_7520);
        assert_eq!(io::COMMIT_AND_FETCH_REQ, 0xc010_7521);
    }

    #[test]
    fn fields_are_where_the_kernel_looks() {
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
    fn a_requests_memory_is_named_as_the_kernel_has_it() {
        // `ublk_auto_buf_reg_to_sqe_addr`: the index, a flag, and zeroes.
        assert_eq!(registered_at(0), 0x1_0000);
        assert_eq!(registered_at(0x7f), 0x1_007f);
        assert_eq!(registered_at(u16::MAX), 0x1_ffff);
        // `UBLKSRV_IO_BUF_OFFSET`, `UBLK_QID_OFF` and `UBLK_TAG_OFF`.
        assert_eq!(data_of(0, 0), 0x8000_0000);
        assert_eq!(data_of(0, 1), 0x8200_0000);
        assert_eq!(data_of(1, 127), 0x200_8000_0000 + 127 * (32 << 20));
    }

    #[test]
    fn data_stay_where_they_are_only_if_all_of_it_is_there() {
        // What Linux 6.1, 6.12, 6.16 and 7.2 say that they have.
        for (features, has) in [(0x1f, false), (0x3ff, false), (0x3fff, false), (0xf_ffff, true)] {
            assert_eq!(feature::is_straight(features), has, "{features:x}");
        }
        for (flags, foreign) in [
            (feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE, false),
            (feature::USER_RECOVERY | feature::STRAIGHT | feature::BUF_REG_OFF_DAEMON, false),
            (feature::USER_RECOVERY | feature::USER_COPY, true),
            (feature::USER_RECOVERY | feature::AUTO_BUF_REG, true),
            (feature::STRAIGHT | 1, true),
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
