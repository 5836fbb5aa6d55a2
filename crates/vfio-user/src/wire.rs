//! Header and payloads of vfio-user messages, in memory layout.
//!
//! All fields are in host byte order, as the protocol requires. Names are those of the
//! specification (`docs/interop/vfio-user.rst`), or of `<linux/vfio.h>` where the specification
//! refers to it.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::Errno;

/// Protocol version that this crate implements: major and minor.
pub const VERSION: (u16, u16) = (0, 1);

/// Size of the header of every message, in bytes.
pub const HEADER_LEN: usize = size_of::<Header>();

/// Size of a protocol structure in bytes, as used in `argsz` fields.
pub(crate) const fn wire_size<T>() -> u32 {
    size_of::<T>() as u32
}

/// Splits a payload into the structure at its start and the rest.
///
/// # Errors
/// The payload is too short.
pub(crate) fn split<T: FromBytes + KnownLayout + Immutable>(
    payload: &[u8],
) -> Result<(T, &[u8]), Errno> {
    T::read_from_prefix(payload).map_err(|_| Errno::INVAL)
}

/// Splits a payload that begins with an `argsz` field, in which the client states the size of its
/// structure or reply buffer.
///
/// # Errors
/// The payload is too short, or `argsz` is less than the size of `T`.
pub(crate) fn split_sized<T: FromBytes + KnownLayout + Immutable>(
    payload: &[u8],
) -> Result<(T, &[u8]), Errno> {
    let (argsz, _) = split::<u32>(payload)?;
    if argsz < wire_size::<T>() { Err(Errno::INVAL) } else { split(payload) }
}

/// Commands.
pub mod command {
    /// Negotiates version and capabilities; the first message of a connection.
    pub const VERSION: u16 = 1;
    /// Maps a memory range for the device.
    pub const DMA_MAP: u16 = 2;
    /// Unmaps memory.
    pub const DMA_UNMAP: u16 = 3;
    /// Queries the device.
    pub const DEVICE_GET_INFO: u16 = 4;
    /// Queries a region.
    pub const DEVICE_GET_REGION_INFO: u16 = 5;
    /// Queries the descriptors that replace writes to parts of a region.
    pub const DEVICE_GET_REGION_IO_FDS: u16 = 6;
    /// Queries an interrupt index.
    pub const DEVICE_GET_IRQ_INFO: u16 = 7;
    /// Sets up, masks or raises interrupts.
    pub const DEVICE_SET_IRQS: u16 = 8;
    /// Reads from a region.
    pub const REGION_READ: u16 = 9;
    /// Writes to a region.
    pub const REGION_WRITE: u16 = 10;
    /// Server to client: reads memory that was mapped without a descriptor.
    pub const DMA_READ: u16 = 11;
    /// Server to client: writes memory that was mapped without a descriptor.
    pub const DMA_WRITE: u16 = 12;
    /// Resets the device.
    pub const DEVICE_RESET: u16 = 13;
    /// Dirty page tracking. The specification no longer has the command, but old clients send it.
    pub const DIRTY_PAGES: u16 = 14;
    /// Writes several short values to regions.
    pub const REGION_WRITE_MULTI: u16 = 15;
    /// Gets, sets or probes a feature of the device (migration).
    pub const DEVICE_FEATURE: u16 = 16;
    /// Reads migration data.
    pub const MIG_DATA_READ: u16 = 17;
    /// Writes migration data.
    pub const MIG_DATA_WRITE: u16 = 18;

    /// Name of a command in the specification, for logs.
    pub fn name(command: u16) -> &'static str {
        match command {
            VERSION => "VERSION",
            DMA_MAP => "DMA_MAP",
            DMA_UNMAP => "DMA_UNMAP",
            DEVICE_GET_INFO => "DEVICE_GET_INFO",
            DEVICE_GET_REGION_INFO => "DEVICE_GET_REGION_INFO",
            DEVICE_GET_REGION_IO_FDS => "DEVICE_GET_REGION_IO_FDS",
            DEVICE_GET_IRQ_INFO => "DEVICE_GET_IRQ_INFO",
            DEVICE_SET_IRQS => "DEVICE_SET_IRQS",
            REGION_READ => "REGION_READ",
            REGION_WRITE => "REGION_WRITE",
            DMA_READ => "DMA_READ",
            DMA_WRITE => "DMA_WRITE",
            DEVICE_RESET => "DEVICE_RESET",
            DIRTY_PAGES => "DIRTY_PAGES",
            REGION_WRITE_MULTI => "REGION_WRITE_MULTI",
            DEVICE_FEATURE => "DEVICE_FEATURE",
            MIG_DATA_READ => "MIG_DATA_READ",
            MIG_DATA_WRITE => "MIG_DATA_WRITE",
            _ => "an unknown command",
        }
    }
}

/// Bits of [`Header::flags`].
pub mod header_flags {
    /// Mask of the message type.
    pub const TYPE_MASK: u32 = 0xf;
    /// Type: a command.
    pub const COMMAND: u32 = 0;
    /// Type: the reply to a command.
    pub const REPLY: u32 = 1;
    /// In a command: the sender expects no reply.
    pub const NO_REPLY: u32 = 1 << 4;
    /// In a reply: the command failed with [`Header::error`](super::Header::error).
    pub const ERROR: u32 = 1 << 5;
}

/// Message header.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Identifier that the sender of a command chooses. The reply has the same identifier. The
    /// identifier need not be unique.
    pub id: u16,
    /// See [`command`].
    pub command: u16,
    /// Size of the message in bytes, this header included.
    pub size: u32,
    /// See [`header_flags`].
    pub flags: u32,
    /// Error number (errno), valid in a reply with the error flag.
    pub error: u32,
}

impl Header {
    /// True for the reply to a command.
    pub fn is_reply(&self) -> bool {
        self.flags & header_flags::TYPE_MASK == header_flags::REPLY
    }

    /// True if the sender of this command expects no reply.
    pub fn no_reply(&self) -> bool {
        self.flags & header_flags::NO_REPLY != 0
    }
}

/// VERSION, command and reply. JSON with a final NUL may follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Version {
    /// Major version, which must be equal in client and server.
    pub major: u16,
    /// Minor version. The lower one of client and server applies.
    pub minor: u16,
}

/// Bits of [`DmaMap::flags`].
pub mod dma_map_flags {
    /// The device may read the range.
    pub const READ: u32 = 1 << 0;
    /// The device may write the range.
    pub const WRITE: u32 = 1 << 1;
}

/// DMA_MAP; the reply has no payload. If the memory can be mapped, the message has a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaMap {
    /// Size of this structure in bytes.
    pub argsz: u32,
    /// See [`dma_map_flags`].
    pub flags: u32,
    /// Offset of the range in the descriptor's file.
    pub offset: u64,
    /// First bus address.
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
}

/// Bits of [`DmaUnmap::flags`], from `<linux/vfio.h>`.
pub mod dma_unmap_flags {
    /// The reply should contain a bitmap of written pages.
    pub const GET_DIRTY_BITMAP: u32 = 1 << 0;
    /// Unmaps everything; address and size are 0.
    pub const ALL: u32 = 1 << 1;
}

/// DMA_UNMAP; the reply has the same payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaUnmap {
    /// Maximum payload size of the reply in bytes.
    pub argsz: u32,
    /// See [`dma_unmap_flags`].
    pub flags: u32,
    /// First bus address.
    pub address: u64,
    /// Length in bytes.
    pub size: u64,
}

/// Bits of [`DeviceInfo::flags`].
pub mod device_flags {
    /// DEVICE_RESET is supported.
    pub const RESET: u32 = 1 << 0;
    /// PCI device.
    pub const PCI: u32 = 1 << 1;
}

/// DEVICE_GET_INFO, command and reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DeviceInfo {
    /// Maximum payload size of the reply in bytes; in the reply, the size of the complete payload.
    pub argsz: u32,
    /// See [`device_flags`].
    pub flags: u32,
    /// Number of regions.
    pub num_regions: u32,
    /// Number of interrupt indexes.
    pub num_irqs: u32,
}

/// Bits of [`RegionInfo::flags`].
pub mod region_flags {
    /// The region can be read.
    pub const READ: u32 = 1 << 0;
    /// The region can be written.
    pub const WRITE: u32 = 1 << 1;
    /// The region can be mapped, and the message has a descriptor.
    pub const MMAP: u32 = 1 << 2;
    /// Capabilities follow.
    pub const CAPS: u32 = 1 << 3;
}

/// DEVICE_GET_REGION_INFO, command and reply; in the reply a list of capabilities may follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionInfo {
    /// Maximum payload size of the reply in bytes; in the reply, the size of the complete payload.
    pub argsz: u32,
    /// See [`region_flags`].
    pub flags: u32,
    /// Region index.
    pub index: u32,
    /// Offset of the first capability from the start of this structure; 0 if there is none.
    pub cap_offset: u32,
    /// Size of the region in bytes.
    pub size: u64,
    /// Offset of the region in the descriptor's file.
    pub offset: u64,
}

/// DEVICE_GET_REGION_IO_FDS, command and reply; in the reply `count` [`IoFd`] entries follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionIoFds {
    /// Maximum payload size of the reply in bytes; in the reply, the size of the complete payload.
    pub argsz: u32,
    /// Always 0.
    pub flags: u32,
    /// Region index.
    pub index: u32,
    /// In the reply, the number of [`IoFd`] entries.
    pub count: u32,
}

/// [`IoFd::kind`]: an eventfd.
pub const IO_FD_EVENT: u32 = 0;

/// Part of a region, and the descriptor that replaces accesses to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IoFd {
    /// Offset in the region.
    pub offset: u64,
    /// Length; 0 if accesses of any size at the offset match.
    pub size: u64,
    /// Index of the descriptor among those of the message.
    pub fd_index: u32,
    /// See [`IO_FD_EVENT`].
    pub kind: u32,
    /// `KVM_IOEVENTFD_FLAG_*`.
    pub flags: u32,
    /// Padding.
    pub padding: u32,
    /// The only value that matches, if `flags` has `KVM_IOEVENTFD_FLAG_DATAMATCH`.
    pub datamatch: u64,
}

/// [`CapabilityHeader::id`] of the list of mappable areas.
pub const CAPABILITY_SPARSE_MMAP: u16 = 1;

/// Header of a region capability (`vfio_info_cap_header`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct CapabilityHeader {
    /// Capability identifier.
    pub id: u16,
    /// Version of the capability's layout.
    pub version: u16,
    /// Offset of the next capability from the start of [`RegionInfo`]; 0 for the last one.
    pub next: u32,
}

/// Sparse mmap capability, after its header; the areas follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseMmap {
    /// Number of areas.
    pub nr_areas: u32,
    /// Reserved.
    pub reserved: u32,
}

/// Mappable area of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SparseArea {
    /// Offset in the region.
    pub offset: u64,
    /// Length.
    pub size: u64,
}

/// Bits of [`IrqInfo::flags`].
pub mod irq_info_flags {
    /// Interrupts can be signalled through eventfds.
    pub const EVENTFD: u32 = 1 << 0;
    /// Interrupts can be masked.
    pub const MASKABLE: u32 = 1 << 1;
    /// An interrupt masks itself when it is signalled.
    pub const AUTOMASKED: u32 = 1 << 2;
    /// The number of interrupts can only be changed after all of them are disabled.
    pub const NORESIZE: u32 = 1 << 3;
}

/// DEVICE_GET_IRQ_INFO, command and reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct IrqInfo {
    /// Maximum payload size of the reply in bytes; in the reply, the size of the complete payload.
    pub argsz: u32,
    /// See [`irq_info_flags`].
    pub flags: u32,
    /// Interrupt index.
    pub index: u32,
    /// Number of interrupts.
    pub count: u32,
}

/// Bits of [`SetIrqs::flags`].
pub mod set_irqs_flags {
    /// No data.
    pub const DATA_NONE: u32 = 1 << 0;
    /// One byte per interrupt follows.
    pub const DATA_BOOL: u32 = 1 << 1;
    /// The message has eventfds.
    pub const DATA_EVENTFD: u32 = 1 << 2;
    /// Masks interrupts.
    pub const ACTION_MASK: u32 = 1 << 3;
    /// Unmasks interrupts.
    pub const ACTION_UNMASK: u32 = 1 << 4;
    /// Raises interrupts, or sets their eventfds.
    pub const ACTION_TRIGGER: u32 = 1 << 5;
    /// Mask of all data bits.
    pub const DATA_MASK: u32 = DATA_NONE | DATA_BOOL | DATA_EVENTFD;
    /// Mask of all action bits.
    pub const ACTION_BITS: u32 = ACTION_MASK | ACTION_UNMASK | ACTION_TRIGGER;
}

/// DEVICE_SET_IRQS; the reply has no payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct SetIrqs {
    /// Size of this structure and of the data after it, in bytes.
    pub argsz: u32,
    /// See [`set_irqs_flags`].
    pub flags: u32,
    /// Interrupt index.
    pub index: u32,
    /// First interrupt of the range.
    pub start: u32,
    /// Length of the range.
    pub count: u32,
}

/// REGION_READ and REGION_WRITE, command and reply; the data follow, if any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct RegionAccess {
    /// Offset in the region.
    pub offset: u64,
    /// Region index.
    pub region: u32,
    /// Length of the data in bytes.
    pub count: u32,
}

/// DMA_READ and DMA_WRITE, command and reply; the data follow, if any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct DmaAccess {
    /// Bus address.
    pub address: u64,
    /// Length of the data in bytes.
    pub count: u64,
}

/// REGION_WRITE_MULTI, command and reply; in the command, [`MultiEntry`] entries follow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct WriteMulti {
    /// Number of writes.
    pub count: u64,
}

/// One write of REGION_WRITE_MULTI.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct MultiEntry {
    /// Offset in the region.
    pub offset: u64,
    /// Region index.
    pub region: u32,
    /// Number of valid bytes in `data`; at most 8.
    pub count: u32,
    /// Data, in the first bytes of the field.
    pub data: [u8; 8],
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_specification() {
        assert_eq!(size_of::<Header>(), 16);
        assert_eq!(size_of::<Version>(), 4);
        assert_eq!(size_of::<DmaMap>(), 32);
        assert_eq!(size_of::<DmaUnmap>(), 24);
        assert_eq!(size_of::<DeviceInfo>(), 16);
        assert_eq!(size_of::<RegionInfo>(), 32);
        assert_eq!(size_of::<CapabilityHeader>(), 8);
        assert_eq!(size_of::<SparseMmap>(), 8);
        assert_eq!(size_of::<SparseArea>(), 16);
        assert_eq!(size_of::<IrqInfo>(), 16);
        assert_eq!(size_of::<SetIrqs>(), 20);
        assert_eq!(size_of::<RegionAccess>(), 16);
        assert_eq!(size_of::<DmaAccess>(), 16);
        assert_eq!(size_of::<WriteMulti>(), 8);
        assert_eq!(size_of::<MultiEntry>(), 24);
    }

    #[test]
    fn fields_have_the_positions_of_the_specification() {
        let header = Header { id: 0x1122, command: 0x3344, size: 0x5566, flags: 0x21, error: 5 };
        let mut expected = Vec::new();
        expected.extend(0x1122u16.to_ne_bytes());
        expected.extend(0x3344u16.to_ne_bytes());
        expected.extend(0x5566u32.to_ne_bytes());
        expected.extend(0x21u32.to_ne_bytes());
        expected.extend(5u32.to_ne_bytes());
        assert_eq!(header.as_bytes(), expected);

        assert_eq!(std::mem::offset_of!(DmaMap, offset), 8);
        assert_eq!(std::mem::offset_of!(DmaMap, address), 16);
        assert_eq!(std::mem::offset_of!(DmaMap, size), 24);
        assert_eq!(std::mem::offset_of!(DmaUnmap, address), 8);
        assert_eq!(std::mem::offset_of!(DmaUnmap, size), 16);
        assert_eq!(std::mem::offset_of!(RegionInfo, cap_offset), 12);
        assert_eq!(std::mem::offset_of!(RegionInfo, size), 16);
        assert_eq!(std::mem::offset_of!(RegionInfo, offset), 24);
        assert_eq!(std::mem::offset_of!(SetIrqs, count), 16);
        assert_eq!(std::mem::offset_of!(RegionAccess, region), 8);
        assert_eq!(std::mem::offset_of!(MultiEntry, data), 16);
    }
}
