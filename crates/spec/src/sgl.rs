//! Scatter Gather List descriptors. Base 2.1, 4.3.2 "Scatter Gather List (SGL)".

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// SGL descriptor, in memory layout: 16 bytes, with the type in the last byte.
///
/// Data blocks, segments and last segments have `address` and `length`. A bit bucket has no
/// address. Keyed descriptors, which only RDMA uses, have a length of three bytes and a key
/// instead.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct SglDescriptor {
    /// Address of the data block or segment.
    pub address: u64,
    /// Length of the data or of the segment (a multiple of 16) in bytes.
    pub length: u32,
    /// Reserved.
    pub reserved: [u8; 3],
    /// SGL Identifier: type in bits 7:4, subtype in bits 3:0.
    pub id: u8,
}

/// Type 0h: data block.
pub const TYPE_DATA_BLOCK: u8 = 0x0;
/// Type 1h: bit bucket, for data that the controller reads from the medium and discards.
pub const TYPE_BIT_BUCKET: u8 = 0x1;
/// Type 2h: segment of descriptors, except the last segment. The last descriptor in the segment
/// describes the next segment.
pub const TYPE_SEGMENT: u8 = 0x2;
/// Type 3h: last segment.
pub const TYPE_LAST_SEGMENT: u8 = 0x3;
/// Type 4h: data block with a key (RDMA).
pub const TYPE_KEYED_DATA_BLOCK: u8 = 0x4;
/// Type 5h: data block of message-based transports.
pub const TYPE_TRANSPORT_DATA_BLOCK: u8 = 0x5;
/// Type Fh: vendor specific.
pub const TYPE_VENDOR: u8 = 0xf;

/// Subtype 0h: the field `address` is a memory address.
pub const SUBTYPE_ADDRESS: u8 = 0x0;
/// Subtype 1h: the field `address` is an offset into the command capsule.
pub const SUBTYPE_OFFSET: u8 = 0x1;

impl SglDescriptor {
    /// Size of a descriptor in bytes.
    pub const SIZE: usize = 16;

    /// Creates a descriptor of this type, with subtype "address".
    const fn of(kind: u8, address: u64, length: u32) -> Self {
        Self { address, length, reserved: [0; 3], id: kind << 4 | SUBTYPE_ADDRESS }
    }

    /// Data block of `length` bytes at `address`.
    pub const fn data_block(address: u64, length: u32) -> Self {
        Self::of(TYPE_DATA_BLOCK, address, length)
    }

    /// Bit bucket for `length` bytes.
    pub const fn bit_bucket(length: u32) -> Self {
        Self::of(TYPE_BIT_BUCKET, 0, length)
    }

    /// Segment with `length` bytes of descriptors at `address`, except the last segment.
    pub const fn segment(address: u64, length: u32) -> Self {
        Self::of(TYPE_SEGMENT, address, length)
    }

    /// Last segment, with `length` bytes of descriptors at `address`.
    pub const fn last_segment(address: u64, length: u32) -> Self {
        Self::of(TYPE_LAST_SEGMENT, address, length)
    }

    /// Type, 0 to 15: one of the `TYPE_` constants, or reserved.
    pub const fn kind(&self) -> u8 {
        self.id >> 4
    }

    /// Subtype, 0 to 15.
    pub const fn subtype(&self) -> u8 {
        self.id & 0xf
    }

    /// Decodes a command's data pointer.
    pub const fn from_dptr(dptr: [u8; 16]) -> Self {
        let raw = u128::from_le_bytes(dptr);
        Self {
            address: raw as u64,
            length: (raw >> 64) as u32,
            reserved: [dptr[12], dptr[13], dptr[14]],
            id: dptr[15],
        }
    }

    /// Encodes a command's data pointer.
    pub const fn to_dptr(self) -> [u8; 16] {
        let [r0, r1, r2] = self.reserved;
        let high = u32::from_le_bytes([r0, r1, r2, self.id]);
        (self.address as u128 | (self.length as u128) << 64 | (high as u128) << 96).to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::{offset_of, size_of};
    use proptest::prelude::*;

    #[test]
    fn layout() {
        assert_eq!(size_of::<SglDescriptor>(), 16);
        assert_eq!(offset_of!(SglDescriptor, address), 0);
        assert_eq!(offset_of!(SglDescriptor, length), 8);
        assert_eq!(offset_of!(SglDescriptor, reserved), 12);
        assert_eq!(offset_of!(SglDescriptor, id), 15);
    }

    #[test]
    fn kinds() {
        assert_eq!(SglDescriptor::data_block(1, 2).id, 0x00);
        assert_eq!(SglDescriptor::bit_bucket(2).id, 0x10);
        assert_eq!(SglDescriptor::segment(1, 2).id, 0x20);
        assert_eq!(SglDescriptor::last_segment(1, 2).id, 0x30);
        let odd = SglDescriptor { id: 0x5a, ..SglDescriptor::default() };
        assert_eq!((odd.kind(), odd.subtype()), (TYPE_TRANSPORT_DATA_BLOCK, 0xa));
    }

    proptest! {
        #[test]
        fn dptr_is_the_descriptor(bytes: [u8; 16]) {
            let descriptor = SglDescriptor::from_dptr(bytes);
            prop_assert_eq!(descriptor.as_bytes(), &bytes[..]);
            prop_assert_eq!(descriptor.to_dptr(), bytes);
        }
    }
}
