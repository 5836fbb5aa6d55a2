//! Metadata format of a namespace, and generation and check of protection information.

use shadowbell_spec::Status;
use shadowbell_spec::identify::{IdentifyNamespace, LbaFormat};
use shadowbell_spec::nvm::{PRINFO_APPTAG, PRINFO_GUARD, PRINFO_REFTAG};
use shadowbell_spec::protection::{GuardKind, ProtectionFields, ProtectionInfo};

/// Metadata format of each logical block of a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockMetadata {
    pub(super) size: u16,
    pub(super) extended: bool,
    protection: u8,
    guard: GuardKind,
    first: bool,
}

impl BlockMetadata {
    /// Decodes the LBA format in use, and its extended format (`elbaf`, of CNS 05h) if there is
    /// one. `None` if there are no metadata.
    ///
    /// # Errors
    /// The reason why the driver does not support the format, to complete "the namespace ...".
    pub(crate) fn of(
        identity: &IdentifyNamespace,
        format: LbaFormat,
        elbaf: Option<u32>,
    ) -> Result<Option<Self>, &'static str> {
        if format.ms == 0 {
            return Ok(None);
        }
        let protection = identity.dps.pit();
        // ELBAF bits 6:0 are the storage tag size, bits 8:7 the protection information format.
        let elbaf = elbaf.filter(|_| protection != 0).unwrap_or(0);
        let guard = match (elbaf & 0x7f, elbaf >> 7 & 3) {
            (0, 0) => GuardKind::Crc16,
            (0, 2) => GuardKind::Crc64,
            (0, _) => return Err("has 32-bit guards"),
            _ => return Err("has storage tags"),
        };
        if protection > 3 {
            return Err("has protection information of an invalid type");
        }
        if protection != 0 && guard.size() > usize::from(format.ms) {
            return Err("has less metadata than its protection information takes");
        }
        let extended = identity.flbas.extended();
        Ok(Some(Self { size: format.ms, extended, protection, guard, first: identity.dps.pip() }))
    }

    /// The size of a block's metadata in bytes.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.size
    }

    /// True if metadata are transferred at the end of each block and not in a separate buffer.
    #[must_use]
    pub fn is_extended(&self) -> bool {
        self.extended
    }

    /// The type of protection information, 1 to 3; 0 for none.
    #[must_use]
    pub fn protection(&self) -> u8 {
        self.protection
    }

    /// The guard type of protection information.
    #[must_use]
    pub fn guard(&self) -> GuardKind {
        self.guard
    }

    /// The size of protection information in bytes; 0 if there is none.
    #[must_use]
    pub fn protection_size(&self) -> usize {
        if self.protection == 0 { 0 } else { self.guard.size() }
    }

    /// The offset of protection information in a block's metadata.
    #[must_use]
    pub fn protection_at(&self) -> usize {
        if self.first { 0 } else { usize::from(self.size) - self.protection_size() }
    }

    /// True if metadata consist of protection information alone. Then a controller can insert and
    /// strip all metadata, and commands without explicit metadata can be used.
    #[must_use]
    pub fn is_protection_only(&self) -> bool {
        self.protection_size() == usize::from(self.size)
    }

    /// The PRCHK bits that the driver sets in a command without explicit metadata: the guard, and
    /// for types 1 and 2 the reference tag.
    pub(crate) fn checks(&self) -> u8 {
        match self.protection {
            0 => 0,
            3 => PRINFO_GUARD,
            _ => PRINFO_GUARD | PRINFO_REFTAG,
        }
    }

    fn guard_of(&self, data: &[u8], own: &[u8]) -> u64 {
        self.guard.guard(data, own.get(..self.protection_at()).unwrap_or_default())
    }

    /// Generates the protection information of the block `data`, number `nth` of its command, in
    /// the block's metadata `own`. The application tag is copied from `fields`, and the reference
    /// tag is derived from `fields`. The caller must have set the other metadata in `own`, because
    /// the guard covers metadata that precede protection information.
    ///
    /// The method has no effect if `own` is too short, or the format has no protection information.
    pub fn protect(&self, data: &[u8], own: &mut [u8], fields: &ProtectionFields, nth: u64) {
        if self.protection == 0 {
            return;
        }
        let info = ProtectionInfo {
            guard: self.guard_of(data, own),
            app_tag: fields.app_tag,
            ref_tag: fields.ref_tag_of(self.protection, self.guard, nth),
        };
        let (at, size) = (self.protection_at(), self.protection_size());
        let bytes = info.encode(self.guard);
        if let Some((to, from)) = own.get_mut(at..at + size).zip(bytes.get(..size)) {
            to.copy_from_slice(from);
        }
    }

    /// Checks the protection information of the block `data`, number `nth` of its command, like a
    /// controller does, as PRCHK of `fields` selects. A block is not checked if its application tag
    /// is FFFFh and, for type 3, its reference tag is all ones.
    ///
    /// # Errors
    /// End-to-end Guard, Application Tag or Reference Tag Check Error.
    pub fn check(
        &self,
        data: &[u8],
        own: &[u8],
        fields: &ProtectionFields,
        nth: u64,
    ) -> Result<(), Status> {
        if self.protection == 0 {
            return Ok(());
        }
        let info = own.get(self.protection_at()..).unwrap_or_default();
        let info = ProtectionInfo::decode(self.guard, info);
        if info.is_escape(self.protection, self.guard) {
            return Ok(());
        }
        let checks = |bit| fields.prinfo & bit != 0;
        if checks(PRINFO_GUARD) && self.guard_of(data, own) != info.guard {
            return Err(Status::GUARD_CHECK);
        }
        if checks(PRINFO_APPTAG) && (info.app_tag ^ fields.app_tag) & fields.app_mask != 0 {
            return Err(Status::APPLICATION_TAG_CHECK);
        }
        let expected = fields.ref_tag_of(self.protection, self.guard, nth);
        if checks(PRINFO_REFTAG) && self.protection != 3 && info.ref_tag != expected {
            return Err(Status::REFERENCE_TAG_CHECK);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_spec::identify::{Dps, Flbas};

    fn format(ms: u16, pit: u8, elbaf: Option<u32>) -> Result<Option<BlockMetadata>, &'static str> {
        let identity = IdentifyNamespace {
            dps: Dps::new().with_pit(pit),
            flbas: Flbas::new().with_extended(true),
            ..IdentifyNamespace::default()
        };
        BlockMetadata::of(&identity, LbaFormat { ms, lbads: 9, ..LbaFormat::default() }, elbaf)
    }

    #[test]
    fn formats_are_decoded_from_identify() {
        assert_eq!(format(0, 1, None), Ok(None));
        let known = |ms, pit, elbaf| format(ms, pit, elbaf).unwrap().unwrap();
        let plain = known(8, 0, Some(3 << 7 | 5));
        assert_eq!((plain.protection_size(), plain.is_protection_only()), (0, false));
        assert!(plain.is_extended() && plain.checks() == 0);
        assert!(known(8, 1, None).is_protection_only());
        assert!(!known(16, 2, Some(0)).is_protection_only());
        let wide = known(64, 3, Some(2 << 7));
        assert_eq!((wide.guard(), wide.protection_at()), (GuardKind::Crc64, 48));
        for (ms, pit, elbaf) in [
            (8, 4, None),
            (4, 1, None),
            (8, 1, Some(2 << 7)),
            (16, 1, Some(1 << 7)),
            (16, 1, Some(1)),
        ] {
            format(ms, pit, elbaf).unwrap_err();
        }
    }

    #[test]
    fn protection_information_follows_the_specification() {
        // The block consists of 512 bytes of 01h. The test computes the expected guard bit by bit,
        // like the kernel's crc_t10dif.
        let data = [1; 512];
        let mut crc = 0u16;
        for byte in data {
            crc ^= u16::from(byte) << 8;
            for _ in 0..8 {
                crc = if crc & 0x8000 != 0 { crc << 1 ^ 0x8bb7 } else { crc << 1 };
            }
        }
        let format = format(8, 1, None).unwrap().unwrap();
        let fields = ProtectionFields {
            prinfo: PRINFO_GUARD | PRINFO_APPTAG | PRINFO_REFTAG,
            app_tag: 0x1234,
            app_mask: 0xff00,
            ref_tag: 0xfffe,
        };
        let mut own = [0; 8];
        format.protect(&data, &mut own, &fields, 3);
        let mut wanted = crc.to_be_bytes().to_vec();
        wanted.extend([0x12, 0x34, 0, 1, 0, 1]);
        assert_eq!(own.as_slice(), wanted);
        assert_eq!(format.check(&data, &own, &fields, 3), Ok(()));
        assert_eq!(format.check(&data, &own, &fields, 2), Err(Status::REFERENCE_TAG_CHECK));
        let other = |at: usize, to: u8| {
            let mut own = own;
            own[at] = to;
            format.check(&data, &own, &fields, 3)
        };
        assert_eq!(other(0, !own[0]), Err(Status::GUARD_CHECK));
        assert_eq!((other(2, 0x13), other(3, 0)), (Err(Status::APPLICATION_TAG_CHECK), Ok(())));
        let unchecked = [0xff; 8];
        assert_eq!(format.check(&data, &unchecked, &fields, 3), Ok(()));
        // Metadata that are too short must not cause a panic.
        format.protect(&data, &mut [0; 3], &fields, 0);
        format.check(&data, &[0; 3], &fields, 0).unwrap_err();
    }
}
