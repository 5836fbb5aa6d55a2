//! Namespace identification descriptors: permanent identifiers of a namespace. Base 2.1, 5.1.13,
//! "Namespace Identification Descriptor list (CNS 03h)".

use super::codes::IDENTIFY_SIZE;
use crate::layout::zero_default;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const TYPE_EUI64: u8 = 1;
const TYPE_NGUID: u8 = 2;
const TYPE_UUID: u8 = 3;
const TYPE_CSI: u8 = 4;
const HEADER: usize = 4;

/// Identifier of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceId<'a> {
    /// NIDT 1h: IEEE Extended Unique Identifier, big-endian.
    Eui64([u8; 8]),
    /// NIDT 2h: Namespace Globally Unique Identifier, big-endian.
    Nguid([u8; 16]),
    /// NIDT 3h: Namespace UUID, big-endian.
    Uuid([u8; 16]),
    /// NIDT 4h: Command Set Identifier; required for every namespace.
    Csi(u8),
    /// Unknown type, or a known type with a wrong length.
    Other {
        /// Namespace Identifier Type.
        nidt: u8,
        /// The identifier.
        nid: &'a [u8],
    },
}

/// Descriptor list, in memory layout. A descriptor of length 0 ends the list.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct NamespaceIds {
    /// Descriptors: each has NIDT, NIDL, two reserved bytes, and NIDL bytes of identifier.
    pub bytes: [u8; IDENTIFY_SIZE],
}

zero_default!(NamespaceIds);

impl NamespaceIds {
    /// Creates a list of these identifiers, in order. Identifiers that do not fit are left out. One
    /// identifier of each type always fits.
    pub fn new<'a>(ids: impl IntoIterator<Item = NamespaceId<'a>>) -> Self {
        let mut list = Self::default();
        let mut at = 0;
        for id in ids {
            let csi_byte;
            let (nidt, nid): (u8, &[u8]) = match &id {
                NamespaceId::Eui64(eui64) => (TYPE_EUI64, eui64),
                NamespaceId::Nguid(nguid) => (TYPE_NGUID, nguid),
                NamespaceId::Uuid(uuid) => (TYPE_UUID, uuid),
                NamespaceId::Csi(csi) => {
                    csi_byte = [*csi];
                    (TYPE_CSI, &csi_byte)
                }
                NamespaceId::Other { nidt, nid } => (*nidt, nid),
            };
            let Ok(nidl) = u8::try_from(nid.len()) else { continue };
            let end = at + HEADER + nid.len();
            if nidl == 0 {
                continue;
            }
            let Some(room) = list.bytes.get_mut(at..end) else { continue };
            let (header, body) = room.split_at_mut(HEADER);
            header.copy_from_slice(&[nidt, nidl, 0, 0]);
            body.copy_from_slice(nid);
            at = end;
        }
        list
    }

    /// Descriptors up to the end of the list, or up to a descriptor that exceeds the list.
    pub fn iter(&self) -> impl Iterator<Item = NamespaceId<'_>> {
        let mut rest = &self.bytes[..];
        core::iter::from_fn(move || {
            let (&[nidt, nidl, _, _], body) = rest.split_first_chunk::<HEADER>()?;
            if nidl == 0 {
                return None;
            }
            let (nid, after) = body.split_at_checked(nidl.into())?;
            rest = after;
            let other = NamespaceId::Other { nidt, nid };
            Some(match nidt {
                TYPE_EUI64 => nid.try_into().map_or(other, NamespaceId::Eui64),
                TYPE_NGUID => nid.try_into().map_or(other, NamespaceId::Nguid),
                TYPE_UUID => nid.try_into().map_or(other, NamespaceId::Uuid),
                TYPE_CSI => nid.try_into().map_or(other, |[csi]: [u8; 1]| NamespaceId::Csi(csi)),
                _ => other,
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bytes() {
        let list = NamespaceIds::new([
            NamespaceId::Uuid([0x11; 16]),
            NamespaceId::Csi(0),
            NamespaceId::Eui64([0x22; 8]),
        ]);
        assert_eq!(list.bytes[..4], [3, 16, 0, 0]);
        assert_eq!(list.bytes[4..20], [0x11; 16]);
        assert_eq!(list.bytes[20..25], [4, 1, 0, 0, 0]);
        assert_eq!(list.bytes[25..29], [1, 8, 0, 0]);
        assert_eq!(list.bytes[29..37], [0x22; 8]);
        assert_eq!(list.bytes[37..], [0; IDENTIFY_SIZE - 37]);
    }

    #[test]
    fn namespace_identifiers_are_decoded_as_encoded() {
        let ids = [
            NamespaceId::Eui64([1; 8]),
            NamespaceId::Nguid([2; 16]),
            NamespaceId::Uuid([3; 16]),
            NamespaceId::Csi(2),
            NamespaceId::Other { nidt: 9, nid: b"xyz" },
            // An EUI-64 has 8 bytes, so 3 bytes are decoded as `Other`.
            NamespaceId::Other { nidt: 1, nid: b"xyz" },
        ];
        let list = NamespaceIds::new(ids);
        assert_eq!(list.iter().collect::<Vec<_>>(), ids);
    }

    #[test]
    fn identifiers_beyond_the_page_are_omitted() {
        let many = std::iter::repeat_n(NamespaceId::Other { nidt: 9, nid: &[7; 255] }, 20);
        let list = NamespaceIds::new(many);
        assert_eq!(list.iter().count(), 4096 / 259);
        let long = NamespaceId::Other { nidt: 9, nid: &[7; 256] };
        let empty = NamespaceId::Other { nidt: 9, nid: &[] };
        let list = NamespaceIds::new([long, empty, NamespaceId::Csi(1)]);
        assert_eq!(list.iter().collect::<Vec<_>>(), [NamespaceId::Csi(1)]);
    }

    #[test]
    fn a_full_list_ends() {
        let list = NamespaceIds { bytes: [1; IDENTIFY_SIZE] };
        assert_eq!(list.iter().count(), IDENTIFY_SIZE / 5);
        let list = NamespaceIds { bytes: [255; IDENTIFY_SIZE] };
        assert_eq!(list.iter().count(), IDENTIFY_SIZE / 259);
    }

    proptest! {
        #[test]
        fn any_bytes_iterate(start: [u8; 32], at in 0..IDENTIFY_SIZE - 32) {
            let mut list = NamespaceIds { bytes: [9; IDENTIFY_SIZE] };
            list.bytes[at..at + 32].copy_from_slice(&start);
            prop_assert!(list.iter().count() <= IDENTIFY_SIZE / 5);
        }
    }
}
