//! Namespace Management, Namespace Attachment and Sanitize command dwords.

use crate::Sqe;
use crate::layout::bits;

/// Namespace Management. Base 2.1, 5.1.21 "Namespace Management command".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceManagement {
    /// Select, CDW10 3:0: [`CREATE`](Self::CREATE) or [`DELETE`](Self::DELETE).
    pub sel: u8,
    /// Command Set Identifier, CDW11 31:24.
    pub csi: u8,
}

impl NamespaceManagement {
    /// Creates a namespace. The data are a
    /// [`NamespaceToCreate`](crate::identify::NamespaceToCreate).
    pub const CREATE: u8 = 0;
    /// Deletes the namespace, or all namespaces (FFFFFFFFh).
    pub const DELETE: u8 = 1;

    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self { sel: bits(sqe.cdw10, 3, 0) as u8, csi: bits(sqe.cdw11, 31, 24) as u8 }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.sel as u32 & 0xf;
        sqe.cdw11 = (self.csi as u32) << 24;
        sqe
    }
}

/// Namespace Attachment, whose data are a [`ControllerList`](crate::identify::ControllerList).
/// Base 2.1, 5.1.20 "Namespace Attachment command".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NamespaceAttachment {
    /// Select, CDW10 3:0: [`ATTACH`](Self::ATTACH) or [`DETACH`](Self::DETACH).
    pub sel: u8,
}

impl NamespaceAttachment {
    /// Attaches the namespace to the controllers of the list.
    pub const ATTACH: u8 = 0;
    /// Detaches the namespace from the controllers of the list.
    pub const DETACH: u8 = 1;

    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self { sel: bits(sqe.cdw10, 3, 0) as u8 }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.sel as u32 & 0xf;
        sqe
    }
}

/// Sanitize. Base 2.1, 5.1.22 "Sanitize command".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sanitize {
    /// Sanitize Action, CDW10 2:0: one of the constants of this type.
    pub sanact: u8,
    /// Allow Unrestricted Sanitize Exit, CDW10 bit 3.
    pub ause: bool,
    /// Overwrite Pass Count, CDW10 7:4; 0 means 16 passes.
    pub owpass: u8,
    /// Overwrite Invert Pattern Between Passes, CDW10 bit 8.
    pub oipbp: bool,
    /// No-Deallocate After Sanitize, CDW10 bit 9.
    pub ndas: bool,
    /// Enter Media Verification State, CDW10 bit 10.
    pub emvs: bool,
    /// Overwrite Pattern, CDW11.
    pub ovrpat: u32,
}

impl Sanitize {
    /// Exits failure mode.
    pub const EXIT_FAILURE: u8 = 1;
    /// Starts a block erase.
    pub const BLOCK_ERASE: u8 = 2;
    /// Starts an overwrite.
    pub const OVERWRITE: u8 = 3;
    /// Starts a crypto erase.
    pub const CRYPTO_ERASE: u8 = 4;

    /// Decodes the command's dwords.
    pub const fn decode(sqe: &Sqe) -> Self {
        Self::from_dwords(sqe.cdw10, sqe.cdw11)
    }

    /// Decodes CDW10 and CDW11. The Sanitize Status log page also contains CDW10.
    pub const fn from_dwords(cdw10: u32, cdw11: u32) -> Self {
        Self {
            sanact: bits(cdw10, 2, 0) as u8,
            ause: cdw10 & 1 << 3 != 0,
            owpass: bits(cdw10, 7, 4) as u8,
            oipbp: cdw10 & 1 << 8 != 0,
            ndas: cdw10 & 1 << 9 != 0,
            emvs: cdw10 & 1 << 10 != 0,
            ovrpat: cdw11,
        }
    }

    /// Encodes CDW10.
    pub const fn dword10(self) -> u32 {
        self.sanact as u32 & 7
            | (self.ause as u32) << 3
            | (self.owpass as u32 & 0xf) << 4
            | (self.oipbp as u32) << 8
            | (self.ndas as u32) << 9
            | (self.emvs as u32) << 10
    }

    /// Number of passes of an overwrite: 1 to 16.
    pub const fn passes(self) -> u8 {
        if self.owpass == 0 { 16 } else { self.owpass }
    }

    /// Encodes the fields into the dwords of `sqe`.
    #[must_use]
    pub const fn encode(self, mut sqe: Sqe) -> Sqe {
        sqe.cdw10 = self.dword10();
        sqe.cdw11 = self.ovrpat;
        sqe
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_have_the_positions_of_the_specification() {
        let sqe = Sqe { cdw10: 0xffff_fff1, cdw11: 0x0200_0000, ..Sqe::default() };
        let create = NamespaceManagement { sel: NamespaceManagement::DELETE, csi: 2 };
        assert_eq!(NamespaceManagement::decode(&sqe), create);
        assert_eq!(NamespaceAttachment::decode(&sqe).sel, NamespaceAttachment::DETACH);
        let sqe = Sqe { cdw10: 0b101_0011_1011, cdw11: 7, ..Sqe::default() };
        let sanitize = Sanitize {
            sanact: Sanitize::OVERWRITE,
            ause: true,
            owpass: 3,
            oipbp: true,
            ndas: false,
            emvs: true,
            ovrpat: 7,
        };
        assert_eq!(Sanitize::decode(&sqe), sanitize);
        assert_eq!((sanitize.dword10(), sanitize.passes()), (sqe.cdw10, 3));
        assert_eq!(Sanitize::default().passes(), 16);
        assert_eq!(NamespaceManagement::decode(&create.encode(sqe)), create);
        assert_eq!(Sanitize::decode(&sanitize.encode(Sqe::default())), sanitize);
    }
}
