//! Bit fields of Identify Controller. Base 2.1, 5.1.13.2.1 "Identify Controller data structure".

use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Controller Multi-Path I/O and Namespace Sharing Capabilities.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Cmic {
    /// The NVM subsystem may have more than one port.
    pub mports: bool,
    /// The NVM subsystem may have more than one controller.
    pub mctrs: bool,
    /// The controller is associated with an SR-IOV virtual function.
    pub ft: bool,
    /// Asymmetric Namespace Access Reporting.
    pub anars: bool,
    #[bits(4)]
    __: u8,
}

/// Optional Asynchronous Events Supported. The bits are those of the Asynchronous Event
/// Configuration feature ([`crate::feature::AsyncEventConfig`]).
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Oaes {
    __: u8,
    /// Attached Namespace Attribute Notices.
    pub nsan: bool,
    /// Firmware Activation Notices.
    pub fan: bool,
    #[bits(1)]
    __: u8,
    /// Asymmetric Namespace Access Change Notices.
    pub anacn: bool,
    /// Predictable Latency Event Aggregate Log Change Notices.
    pub plean: bool,
    /// LBA Status Information Alert Notices.
    pub lsian: bool,
    /// Endurance Group Event Aggregate Log Page Change Notices.
    pub egean: bool,
    /// Normal NVM Subsystem Shutdown.
    pub nnss: bool,
    /// Temperature Threshold Hysteresis Recovery.
    pub tthr: bool,
    /// Reachability Groups Change Notices.
    pub rgcns: bool,
    #[bits(1)]
    __: u8,
    /// Allocated Namespace Attribute Notices.
    pub ansan: bool,
    #[bits(7)]
    __: u8,
    /// Zone Descriptor Changed Notices.
    pub zdcn: bool,
    #[bits(3)]
    __: u8,
    /// Discovery Log Page Change Notices.
    pub dlpcn: bool,
}

/// Controller Attributes.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Ctratt {
    /// Host Identifier Support: 128 bits.
    pub hids: bool,
    /// Non-Operational Power State Permissive Mode.
    pub nopspm: bool,
    /// NVM Sets.
    pub nsets: bool,
    /// Read Recovery Levels.
    pub rrlvls: bool,
    /// Endurance Groups.
    pub egs: bool,
    /// Predictable Latency Mode.
    pub plm: bool,
    /// Traffic Based Keep Alive Support.
    pub tbkas: bool,
    /// Namespace Granularity.
    pub ng: bool,
    /// Submission Queue Associations.
    pub sqa: bool,
    /// UUID List.
    pub ulist: bool,
    /// Multi-Domain Subsystem.
    pub mds: bool,
    /// Fixed Capacity Management.
    pub fcm: bool,
    /// Variable Capacity Management.
    pub vcm: bool,
    /// Delete Endurance Group.
    pub deg: bool,
    /// Delete NVM Set.
    pub dnvms: bool,
    /// Extended LBA Formats Supported.
    pub elbas: bool,
    /// MDTS and Size Limits Exclude Metadata.
    pub mem: bool,
    /// Host Memory Buffer Nonoperational State Access Restriction.
    pub hmbr: bool,
    /// Reservations and Host Identifier Interaction.
    pub rhii: bool,
    /// Flexible Data Placement Support.
    pub fdps: bool,
    #[bits(12)]
    __: u16,
}

/// Controller Type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ControllerType {
    /// Not reported: a controller older than 1.4.
    NotReported = 0,
    /// I/O controller.
    Io = 1,
    /// Discovery controller.
    Discovery = 2,
    /// Administrative controller.
    Administrative = 3,
}

/// Optional Admin Command Support.
#[bitfield(u16)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Oacs {
    /// Security Send and Security Receive.
    pub security: bool,
    /// Format NVM.
    pub format_nvm: bool,
    /// Firmware Commit and Firmware Image Download.
    pub firmware: bool,
    /// Namespace Management and Namespace Attachment.
    pub namespace_management: bool,
    /// Device Self-test.
    pub self_test: bool,
    /// Directive Send and Directive Receive.
    pub directives: bool,
    /// NVMe-MI Send and NVMe-MI Receive.
    pub nvme_mi: bool,
    /// Virtualization Management.
    pub virtualization: bool,
    /// Doorbell Buffer Config.
    pub doorbell_buffer_config: bool,
    /// Get LBA Status.
    pub get_lba_status: bool,
    /// Command and Feature Lockdown.
    pub lockdown: bool,
    /// Host Managed Live Migration.
    pub live_migration: bool,
    #[bits(4)]
    __: u8,
}

/// Firmware Updates.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Frmw {
    /// First Firmware Slot Read Only.
    pub ffsro: bool,
    /// Number Of Firmware Slots, 1 to 7.
    #[bits(3)]
    pub nofs: u8,
    /// Firmware Activation Without Reset.
    pub fawr: bool,
    /// Support Multiple Update Detection.
    pub smud: bool,
    #[bits(2)]
    __: u8,
}

/// Log Page Attributes.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Lpa {
    /// SMART / Health Information per namespace.
    pub smarts: bool,
    /// Commands Supported and Effects log page.
    pub cses: bool,
    /// Log Page Extended Data: offsets, and lengths above 12 bits.
    pub lpeds: bool,
    /// Telemetry.
    pub ts: bool,
    /// Persistent Event log page.
    pub pes: bool,
    /// Miscellaneous Log Page Support: Supported Log Pages, and the effects logs of features and
    /// NVMe-MI commands.
    pub mlps: bool,
    /// Data Area 4 of telemetry.
    pub da4s: bool,
    #[bits(1)]
    __: u8,
}

/// Entry sizes of a queue: SQES and CQES, as powers of two.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct EntrySizes {
    /// Required (and minimum) size: 6 for submission, 4 for completion queues.
    #[bits(4)]
    pub min: u8,
    /// Maximum size.
    #[bits(4)]
    pub max: u8,
}

/// Optional NVM Command Support.
#[bitfield(u16)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Oncs {
    /// Compare.
    pub compare: bool,
    /// Write Uncorrectable.
    pub write_uncorrectable: bool,
    /// Dataset Management.
    pub dataset_management: bool,
    /// Write Zeroes.
    pub write_zeroes: bool,
    /// Save field of Set Features, and Select field of Get Features.
    pub save_and_select: bool,
    /// Reservations.
    pub reservations: bool,
    /// Timestamp feature.
    pub timestamp: bool,
    /// Verify.
    pub verify: bool,
    /// Copy.
    pub copy: bool,
    /// Copy Single Atomicity.
    pub copy_atomicity: bool,
    /// All Fast Copy.
    pub all_fast_copy: bool,
    /// Maximum Write Zeroes With Deallocate: WZDSL is valid.
    pub max_write_zeroes_deallocate: bool,
    /// Namespace Zeroes: the Namespace Zeroes bit of Write Zeroes.
    pub namespace_zeroes: bool,
    #[bits(3)]
    __: u8,
}

/// Format NVM Attributes.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Fna {
    /// Format NVM applies to all namespaces.
    pub fns: bool,
    /// Secure erase applies to all namespaces.
    pub sens: bool,
    /// Cryptographic erase is supported.
    pub cryes: bool,
    /// Format NVM with NSID FFFFFFFFh is not supported.
    pub bcnsid: bool,
    #[bits(4)]
    __: u8,
}

/// Sanitize Capabilities.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Sanicap {
    /// Crypto Erase Support.
    pub ces: bool,
    /// Block Erase Support.
    pub bes: bool,
    /// Overwrite Support.
    pub ows: bool,
    /// Verification Support.
    pub vers: bool,
    #[bits(25)]
    __: u32,
    /// No-Deallocate Inhibited: a sanitize operation deallocates blocks even if the host requests
    /// No-Deallocate.
    pub ndi: bool,
    /// No-Deallocate Modifies Media After Sanitize: 1 no, 2 yes.
    #[bits(2)]
    pub nodmmas: u8,
}

/// Volatile Write Cache.
#[bitfield(u8)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Vwc {
    /// Present: data may be in a volatile cache until a Flush, and the Volatile Write Cache feature
    /// exists.
    pub vwcp: bool,
    /// Flush with NSID FFFFFFFFh: 00b not reported (before 1.4), 10b not supported, 11b supported.
    #[bits(2)]
    pub fb: u8,
    #[bits(5)]
    __: u8,
}

/// SGL Support.
#[bitfield(u32)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Sgls {
    /// 00b no SGLs, 01b SGLs of any alignment, 10b SGLs of dword aligned data blocks.
    #[bits(2)]
    pub support: u8,
    /// Keyed SGL Data Block descriptors.
    pub keyed: bool,
    #[bits(5)]
    __: u8,
    /// SGL Descriptor Threshold: recommended maximum of descriptors per command; 0 if not reported.
    pub threshold: u8,
    /// SGL Bit Bucket descriptors.
    pub bit_bucket: bool,
    /// Byte-aligned contiguous metadata buffer.
    pub metadata_byte_aligned: bool,
    /// An SGL may be longer than the data.
    pub longer_than_data: bool,
    /// MPTR may be the address of an SGL.
    pub metadata_sgl: bool,
    /// The address of a data block may be an offset.
    pub offsets: bool,
    /// Transport SGL Data Block descriptors.
    pub transport: bool,
    #[bits(10)]
    __: u16,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asserts that each flag has the bit number of the specification.
    macro_rules! assert_bits {
        ($type:ident { $($with:ident = $bit:literal),* $(,)? }) => {
            $(assert_eq!(
                $type::new().$with(true).into_bits(),
                1 << $bit,
                concat!(stringify!($type), "::", stringify!($with))
            );)*
        };
    }

    #[test]
    fn flags() {
        assert_bits!(Cmic { with_mports = 0, with_mctrs = 1, with_ft = 2, with_anars = 3 });
        assert_bits!(Oaes {
            with_nsan = 8, with_fan = 9, with_anacn = 11, with_plean = 12, with_lsian = 13,
            with_egean = 14, with_nnss = 15, with_tthr = 16, with_rgcns = 17, with_ansan = 19,
            with_zdcn = 27, with_dlpcn = 31,
        });
        assert_bits!(Ctratt {
            with_hids = 0, with_nopspm = 1, with_nsets = 2, with_rrlvls = 3, with_egs = 4,
            with_plm = 5, with_tbkas = 6, with_ng = 7, with_sqa = 8, with_ulist = 9, with_mds = 10,
            with_fcm = 11, with_vcm = 12, with_deg = 13, with_dnvms = 14, with_elbas = 15,
            with_mem = 16, with_hmbr = 17, with_rhii = 18, with_fdps = 19,
        });
        assert_bits!(Oacs {
            with_security = 0, with_format_nvm = 1, with_firmware = 2,
            with_namespace_management = 3, with_self_test = 4, with_directives = 5,
            with_nvme_mi = 6, with_virtualization = 7, with_doorbell_buffer_config = 8,
            with_get_lba_status = 9, with_lockdown = 10, with_live_migration = 11,
        });
        assert_bits!(Frmw { with_ffsro = 0, with_fawr = 4, with_smud = 5 });
        assert_bits!(Lpa {
            with_smarts = 0, with_cses = 1, with_lpeds = 2, with_ts = 3, with_pes = 4,
            with_mlps = 5, with_da4s = 6,
        });
        assert_bits!(Oncs {
            with_compare = 0, with_write_uncorrectable = 1, with_dataset_management = 2,
            with_write_zeroes = 3, with_save_and_select = 4, with_reservations = 5,
            with_timestamp = 6, with_verify = 7, with_copy = 8, with_copy_atomicity = 9,
            with_all_fast_copy = 10, with_max_write_zeroes_deallocate = 11,
            with_namespace_zeroes = 12,
        });
        assert_bits!(Sanicap {
            with_ces = 0, with_bes = 1, with_ows = 2, with_vers = 3, with_ndi = 29,
        });
        assert_bits!(Fna { with_fns = 0, with_sens = 1, with_cryes = 2, with_bcnsid = 3 });
        assert_bits!(Vwc { with_vwcp = 0 });
        assert_bits!(Sgls {
            with_keyed = 2, with_bit_bucket = 16, with_metadata_byte_aligned = 17,
            with_longer_than_data = 18, with_metadata_sgl = 19, with_offsets = 20,
            with_transport = 21,
        });
    }

    #[test]
    fn numbers() {
        assert_eq!(Frmw::new().with_nofs(7).into_bits(), 7 << 1);
        assert_eq!(EntrySizes::new().with_min(6).with_max(7).into_bits(), 0x76);
        assert_eq!(Vwc::new().with_fb(3).into_bits(), 3 << 1);
        assert_eq!(Sgls::new().with_support(3).into_bits(), 3);
        assert_eq!(Sgls::new().with_threshold(0xff).into_bits(), 0xff << 8);
    }
}
