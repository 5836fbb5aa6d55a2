//! The log pages Supported Log Pages, Commands Supported and Effects, and Feature Identifiers
//! Supported and Effects.

use crate::layout::zero_default;
use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// LID Supported and Effects: support of a log page. Base 2.1, 5.1.12.1.1.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct LogPageSupport {
    /// LID Supported.
    pub lsupp: bool,
    /// Index Offset Supported: the offset of Get Log Page may be an index.
    pub ios: bool,
    #[bits(14)]
    __: u16,
    /// LID Specific Parameter.
    pub lidsp: u16,
}

/// Supported Log Pages, log page 00h: indexed by log page identifier. Base 2.1, 5.1.12.1.1.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct SupportedLogPages {
    /// Support, indexed by log page identifier.
    pub lids: [LogPageSupport; 256],
}

/// Commands Supported and Effects: support of a command, and its effects. Base 2.1, 5.1.12.1.6.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct CommandEffects {
    /// Command Supported.
    pub csupp: bool,
    /// Logical Block Content Change.
    pub lbcc: bool,
    /// Namespace Capability Change.
    pub ncc: bool,
    /// Namespace Inventory Change.
    pub nic: bool,
    /// Controller Capability Change.
    pub ccc: bool,
    #[bits(9)]
    __: u16,
    /// Command Submission and Execution Relaxations.
    #[bits(2)]
    pub cser: u8,
    /// Command Submission and Execution: 0 no restriction, 1 no other command of the namespace
    /// outstanding, 2 no other command of any namespace outstanding.
    #[bits(3)]
    pub cse: u8,
    /// UUID Selection Supported.
    pub uss: bool,
    /// Command Scope: bit 0 namespace, 1 controller, 2 NVM set, 3 endurance group, 4 domain, 5 NVM
    /// subsystem; 0 if not reported.
    #[bits(12)]
    pub csp: u16,
}

/// Commands Supported and Effects, log page 05h. Base 2.1, 5.1.12.1.6.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct CommandsSupportedEffects {
    /// Admin commands, indexed by opcode.
    pub admin: [CommandEffects; 256],
    /// I/O commands, indexed by opcode.
    pub io: [CommandEffects; 256],
    /// Reserved.
    pub reserved2048: [u8; 2048],
}

/// FID Supported and Effects: support of a feature, and its effects. Base 2.1, 5.1.12.1, "Feature
/// Identifiers Supported and Effects".
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct FeatureEffects {
    /// FID Supported.
    pub fsupp: bool,
    /// User Data Content Change.
    pub udcc: bool,
    /// Namespace Capability Change.
    pub ncc: bool,
    /// Namespace Inventory Change.
    pub nic: bool,
    /// Controller Capability Change.
    pub ccc: bool,
    #[bits(14)]
    __: u16,
    /// UUID Selection Supported.
    pub uss: bool,
    /// FID Scope: bits as in [`CommandEffects::csp`].
    #[bits(12)]
    pub fsp: u16,
}

/// Feature Identifiers Supported and Effects, log page 12h: indexed by feature identifier.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct FeaturesSupportedEffects {
    /// Support, indexed by feature identifier.
    pub fids: [FeatureEffects; 256],
}

impl CommandEffects {
    /// Command Scope: one namespace.
    pub const SCOPE_NAMESPACE: u16 = 1 << 0;
    /// Command Scope: one controller.
    pub const SCOPE_CONTROLLER: u16 = 1 << 1;
    /// Command Scope: the NVM subsystem.
    pub const SCOPE_SUBSYSTEM: u16 = 1 << 5;
}

zero_default!(SupportedLogPages, CommandsSupportedEffects, FeaturesSupportedEffects);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::assert_layout;

    #[test]
    fn layout() {
        assert_layout!(SupportedLogPages, 1024, { lids: 0 });
        assert_layout!(CommandsSupportedEffects, 4096, { admin: 0, io: 1024, reserved2048: 2048 });
        assert_layout!(FeaturesSupportedEffects, 1024, { fids: 0 });
    }

    #[test]
    fn bits() {
        assert_eq!(LogPageSupport::new().with_lsupp(true).into_bits(), 1 << 0);
        assert_eq!(LogPageSupport::new().with_ios(true).into_bits(), 1 << 1);
        assert_eq!(LogPageSupport::new().with_lidsp(0xffff).into_bits(), 0xffff << 16);
        assert_eq!(CommandEffects::new().with_csupp(true).into_bits(), 1 << 0);
        assert_eq!(CommandEffects::new().with_lbcc(true).into_bits(), 1 << 1);
        assert_eq!(CommandEffects::new().with_ncc(true).into_bits(), 1 << 2);
        assert_eq!(CommandEffects::new().with_nic(true).into_bits(), 1 << 3);
        assert_eq!(CommandEffects::new().with_ccc(true).into_bits(), 1 << 4);
        assert_eq!(CommandEffects::new().with_cser(3).into_bits(), 3 << 14);
        assert_eq!(CommandEffects::new().with_cse(7).into_bits(), 7 << 16);
        assert_eq!(CommandEffects::new().with_uss(true).into_bits(), 1 << 19);
        assert_eq!(CommandEffects::new().with_csp(0xfff).into_bits(), 0xfff << 20);
        assert_eq!(FeatureEffects::new().with_fsupp(true).into_bits(), 1 << 0);
        assert_eq!(FeatureEffects::new().with_udcc(true).into_bits(), 1 << 1);
        assert_eq!(FeatureEffects::new().with_ncc(true).into_bits(), 1 << 2);
        assert_eq!(FeatureEffects::new().with_nic(true).into_bits(), 1 << 3);
        assert_eq!(FeatureEffects::new().with_ccc(true).into_bits(), 1 << 4);
        assert_eq!(FeatureEffects::new().with_uss(true).into_bits(), 1 << 19);
        assert_eq!(FeatureEffects::new().with_fsp(0xfff).into_bits(), 0xfff << 20);
    }
}
