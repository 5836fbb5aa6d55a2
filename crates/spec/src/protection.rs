//! Protection information in a logical block's metadata. NVM 1.1, 5.2 "End-to-end Data Protection".

use crate::status::Status;
use crc_fast::{CrcAlgorithm, Digest, checksum};

/// Guard type. NVM 1.1, "Protection Information Formats".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GuardKind {
    /// 16-bit guard: the CRC of T10 DIF. The reference tag has 32 bits. Protection information has
    /// 8 bytes.
    #[default]
    Crc16,
    /// 64-bit guard: the CRC of NVMe. The reference tag has 48 bits, and there is no storage tag.
    /// Protection information has 16 bytes.
    Crc64,
}

impl GuardKind {
    /// Size of the protection information in bytes.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            Self::Crc16 => 8,
            Self::Crc64 => 16,
        }
    }

    /// Mask of the reference tag.
    #[inline]
    pub const fn ref_mask(self) -> u64 {
        match self {
            Self::Crc16 => u32::MAX as u64,
            Self::Crc64 => (1 << 48) - 1,
        }
    }

    /// Protection Information Format, as encoded in an extended LBA format.
    pub const fn code(self) -> u32 {
        match self {
            Self::Crc16 => 0,
            Self::Crc64 => 2,
        }
    }

    /// Guard of the bytes `data`, followed by the bytes `more`.
    #[inline]
    pub fn guard(self, data: &[u8], more: &[u8]) -> u64 {
        let algorithm = match self {
            Self::Crc16 => CrcAlgorithm::Crc16T10Dif,
            Self::Crc64 => CrcAlgorithm::Crc64Nvme,
        };
        if more.is_empty() {
            return checksum(algorithm, data);
        }
        let mut digest = Digest::new(algorithm);
        digest.update(data);
        digest.update(more);
        digest.finalize()
    }
}

/// Protection information of a logical block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProtectionInfo {
    /// Guard.
    pub guard: u64,
    /// Logical Block Application Tag.
    pub app_tag: u16,
    /// Logical Block Reference Tag.
    pub ref_tag: u64,
}

/// Decodes a big-endian number.
fn number(from: &[u8]) -> u64 {
    from.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

impl ProtectionInfo {
    /// Application tag that disables the checks of a block.
    pub const ESCAPE: u16 = 0xffff;

    /// Decodes protection information from the first bytes of `bytes`. The result is all zeroes if
    /// there are too few bytes.
    pub fn decode(kind: GuardKind, bytes: &[u8]) -> Self {
        let guard = kind.size() - kind.ref_mask().count_ones() as usize / 8 - 2;
        let Some((guard, rest)) = bytes.get(..kind.size()).and_then(|b| b.split_at_checked(guard))
        else {
            return Self::default();
        };
        let (app_tag, ref_tag) = rest.split_at(2);
        Self { guard: number(guard), app_tag: number(app_tag) as u16, ref_tag: number(ref_tag) }
    }

    /// Encodes the fields into the first [`GuardKind::size`] bytes.
    pub fn encode(&self, kind: GuardKind) -> [u8; 16] {
        let Self { guard, app_tag, ref_tag } = *self;
        let all = match kind {
            GuardKind::Crc16 => {
                u128::from(guard & 0xffff) << 112
                    | u128::from(app_tag) << 96
                    | u128::from(ref_tag & kind.ref_mask()) << 64
            }
            GuardKind::Crc64 => {
                u128::from(guard) << 64
                    | u128::from(app_tag) << 48
                    | u128::from(ref_tag & kind.ref_mask())
            }
        };
        all.to_be_bytes()
    }

    /// True if this protection information disables the checks of its block.
    #[inline]
    pub const fn is_escape(&self, pi_type: u8, kind: GuardKind) -> bool {
        self.app_tag == Self::ESCAPE && (pi_type != 3 || self.ref_tag == kind.ref_mask())
    }
}

/// Protection information fields of a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProtectionFields {
    /// PRCHK and PRACT, encoded as in [`RwFields::prinfo`](crate::nvm::RwFields::prinfo).
    pub prinfo: u8,
    /// Application tag that is written or expected.
    pub app_tag: u16,
    /// Mask of the application tag's bits that are compared.
    pub app_mask: u16,
    /// Reference tag of the first block.
    pub ref_tag: u64,
}

impl ProtectionFields {
    /// Reference tag of block number `nth`, counted from 0.
    #[inline]
    pub const fn ref_tag_of(&self, pi_type: u8, kind: GuardKind, nth: u64) -> u64 {
        // With type 3, all blocks of the command have the same reference tag.
        let nth = if pi_type == 3 { 0 } else { nth };
        self.ref_tag.wrapping_add(nth) & kind.ref_mask()
    }

    /// Checks the reference tag of a command whose first block is `slba`, if the command checks
    /// reference tags. With type 1, it must be the low bits of `slba`; with type 3, the check is
    /// not permitted.
    ///
    /// # Errors
    /// Invalid Protection Information.
    pub fn check(&self, pi_type: u8, kind: GuardKind, slba: u64) -> Result<(), Status> {
        let checks_reference = self.prinfo & crate::nvm::PRINFO_REFTAG != 0;
        let is_wrong = match pi_type {
            1 => self.ref_tag & kind.ref_mask() != slba & kind.ref_mask(),
            3 => true,
            _ => false,
        };
        if checks_reference && is_wrong {
            return Err(Status::INVALID_PROTECTION_INFORMATION.with_dnr());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvm::PRINFO_REFTAG;
    use proptest::prelude::*;

    /// Reference implementation of a CRC, which computes it bit by bit.
    fn crc(data: &[u8], bits: u32, polynomial: u64, reflected: bool) -> u64 {
        let top = 1u64 << (bits - 1);
        let mask = top | (top - 1);
        let mut crc = if reflected { mask } else { 0 };
        for byte in data {
            if reflected {
                crc ^= u64::from(*byte);
                for _ in 0..8 {
                    crc = if crc & 1 != 0 { crc >> 1 ^ polynomial } else { crc >> 1 };
                }
            } else {
                crc ^= u64::from(*byte) << (bits - 8);
                for _ in 0..8 {
                    crc = (if crc & top != 0 { crc << 1 ^ polynomial } else { crc << 1 }) & mask;
                }
            }
        }
        if reflected { crc ^ mask } else { crc }
    }

    #[test]
    fn guards_are_those_of_the_standards() {
        // The values are from the catalogue of CRCs, and from NVM 1.1, "64b CRC Test Cases".
        assert_eq!(GuardKind::Crc16.guard(b"123456789", b""), 0xd0db);
        assert_eq!(GuardKind::Crc64.guard(b"123456789", b""), 0xae8b_1486_0a79_9888);
        assert_eq!(GuardKind::Crc64.guard(&[0; 4096], b""), 0x6482_d367_eb22_b64e);
        assert_eq!(GuardKind::Crc64.guard(&[0xff; 4096], b""), 0xc0dd_ba73_02ec_a3ac);
    }

    #[test]
    fn only_valid_protection_fields_are_accepted() {
        let fields = |prinfo, ref_tag| ProtectionFields { prinfo, ref_tag, ..Default::default() };
        let (crc16, crc64) = (GuardKind::Crc16, GuardKind::Crc64);
        let invalid = Err(Status::INVALID_PROTECTION_INFORMATION.with_dnr());
        assert_eq!(fields(PRINFO_REFTAG, 7).check(1, crc16, 0x1_0000_0007), Ok(()));
        assert_eq!(fields(PRINFO_REFTAG, 7).check(1, crc64, 0x1_0000_0007), invalid);
        assert_eq!(fields(PRINFO_REFTAG, 8).check(1, crc16, 7), invalid);
        assert_eq!(fields(0, 8).check(1, crc16, 7), Ok(()));
        assert_eq!(fields(PRINFO_REFTAG, 8).check(2, crc16, 7), Ok(()));
        assert_eq!(fields(PRINFO_REFTAG, 7).check(3, crc16, 7), invalid);
        assert_eq!(fields(0, 7).check(3, crc16, 7), Ok(()));
    }

    #[test]
    fn escapes() {
        let info = |app_tag, ref_tag| ProtectionInfo { guard: 0, app_tag, ref_tag };
        for kind in [GuardKind::Crc16, GuardKind::Crc64] {
            for (pi_type, without, with) in [(1, true, true), (2, true, true), (3, false, true)] {
                assert_eq!(info(0xffff, 0).is_escape(pi_type, kind), without);
                assert_eq!(info(0xffff, kind.ref_mask()).is_escape(pi_type, kind), with);
                assert!(!info(0xfffe, kind.ref_mask()).is_escape(pi_type, kind));
            }
        }
    }

    proptest! {
        #[test]
        fn guards_are_those_of_a_plain_division(data: Vec<u8>, at: usize) {
            let (first, more) = data.split_at(at % (data.len() + 1));
            prop_assert_eq!(GuardKind::Crc16.guard(first, more), crc(&data, 16, 0x8bb7, false));
            let reflected = 0x9a6c_9329_ac4b_c9b5;
            prop_assert_eq!(GuardKind::Crc64.guard(first, more), crc(&data, 64, reflected, true));
        }

        #[test]
        fn protection_information_is_decoded_as_encoded(guard: u64, app_tag: u16, ref_tag: u64) {
            for (kind, mask) in [(GuardKind::Crc16, 0xffff), (GuardKind::Crc64, u64::MAX)] {
                let guard = guard & mask;
                let info = ProtectionInfo { guard, app_tag, ref_tag: ref_tag & kind.ref_mask() };
                let bytes = info.encode(kind);
                prop_assert_eq!(ProtectionInfo::decode(kind, &bytes[..kind.size()]), info);
                prop_assert_eq!(ProtectionInfo::decode(kind, &bytes[..7]), Default::default());
                prop_assert_eq!(&bytes[kind.size()..], &[0; 8][..16 - kind.size()]);
            }
        }
    }
}
