//! Features: values of Get Features and Set Features. Base 2.1, 5.1.25.1 "Feature Specific
//! Information".
//!
//! Most values are one dword: CDW11 of Set Features, dword 0 of the completion of Get Features. The
//! others are data structures.

use crate::layout::zero_default;
use bitfield_struct::bitfield;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Feature Identifiers. Base 2.1, 5.1.25, "Feature Identifiers".
pub mod fid {
    macro_rules! features {
        ($($name:ident = $fid:literal, $text:literal;)*) => {
            $(
                #[doc = concat!($text, ".")]
                pub const $name: u8 = $fid;
            )*

            /// Name in the specification; `None` for an unknown feature.
            pub const fn name(fid: u8) -> Option<&'static str> {
                match fid {
                    $($name => Some($text),)*
                    _ => None,
                }
            }
        };
    }

    features! {
        ARBITRATION = 0x01, "Arbitration";
        POWER_MANAGEMENT = 0x02, "Power Management";
        LBA_RANGE_TYPE = 0x03, "LBA Range Type";
        TEMPERATURE_THRESHOLD = 0x04, "Temperature Threshold";
        ERROR_RECOVERY = 0x05, "Error Recovery";
        VOLATILE_WRITE_CACHE = 0x06, "Volatile Write Cache";
        NUMBER_OF_QUEUES = 0x07, "Number of Queues";
        INTERRUPT_COALESCING = 0x08, "Interrupt Coalescing";
        INTERRUPT_VECTOR_CONFIGURATION = 0x09, "Interrupt Vector Configuration";
        WRITE_ATOMICITY = 0x0a, "Write Atomicity Normal";
        ASYNC_EVENT_CONFIGURATION = 0x0b, "Asynchronous Event Configuration";
        AUTONOMOUS_POWER_STATE = 0x0c, "Autonomous Power State Transition";
        HOST_MEMORY_BUFFER = 0x0d, "Host Memory Buffer";
        TIMESTAMP = 0x0e, "Timestamp";
        KEEP_ALIVE_TIMER = 0x0f, "Keep Alive Timer";
        THERMAL_MANAGEMENT = 0x10, "Host Controlled Thermal Management";
        NON_OPERATIONAL_POWER_STATE = 0x11, "Non-Operational Power State Config";
        READ_RECOVERY_LEVEL = 0x12, "Read Recovery Level Config";
        PREDICTABLE_LATENCY_CONFIG = 0x13, "Predictable Latency Mode Config";
        PREDICTABLE_LATENCY_WINDOW = 0x14, "Predictable Latency Mode Window";
        LBA_STATUS_REPORT_INTERVAL = 0x15, "LBA Status Information Report Interval";
        HOST_BEHAVIOR_SUPPORT = 0x16, "Host Behavior Support";
        SANITIZE_CONFIG = 0x17, "Sanitize Config";
        ENDURANCE_GROUP_EVENT_CONFIG = 0x18, "Endurance Group Event Configuration";
        IO_COMMAND_SET_PROFILE = 0x19, "I/O Command Set Profile";
        SPINUP_CONTROL = 0x1a, "Spinup Control";
        SOFTWARE_PROGRESS_MARKER = 0x80, "Software Progress Marker";
        HOST_IDENTIFIER = 0x81, "Host Identifier";
        RESERVATION_NOTIFICATION_MASK = 0x82, "Reservation Notification Mask";
        RESERVATION_PERSISTENCE = 0x83, "Reservation Persistence";
        NAMESPACE_WRITE_PROTECTION = 0x84, "Namespace Write Protection Config";
    }
}

/// Select: the value of a feature that Get Features returns. Base 2.1, 5.1.11.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Select {
    /// 000b: current value.
    Current = 0,
    /// 001b: default value.
    Default = 1,
    /// 010b: saved value, which is current after a reset.
    Saved = 2,
    /// 011b: [`Capabilities`] instead of a value.
    SupportedCapabilities = 3,
}

impl Select {
    /// Decodes the three bits of the field; `None` for a reserved value.
    pub const fn from_bits(sel: u8) -> Option<Self> {
        Some(match sel {
            0 => Self::Current,
            1 => Self::Default,
            2 => Self::Saved,
            3 => Self::SupportedCapabilities,
            _ => return None,
        })
    }
}

/// Capabilities of a feature: completion dword 0 of Get Features with
/// [`Select::SupportedCapabilities`]. Base 2.1, 5.1.11.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Capabilities {
    /// Saveable: the value can be saved.
    pub saveable: bool,
    /// Namespace Specific: each namespace has its own value.
    pub namespace_specific: bool,
    /// Changeable by Set Features.
    pub changeable: bool,
    #[bits(29)]
    __: u32,
}

/// Arbitration, 01h.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct Arbitration {
    /// Arbitration Burst: at most `1 << ab` commands at a time; no limit if `ab` is 7.
    #[bits(3)]
    pub ab: u8,
    #[bits(5)]
    __: u8,
    /// Low Priority Weight, 0's based.
    pub lpw: u8,
    /// Medium Priority Weight, 0's based.
    pub mpw: u8,
    /// High Priority Weight, 0's based.
    pub hpw: u8,
}

/// Power Management, 02h.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct PowerManagement {
    /// Power State.
    #[bits(5)]
    pub ps: u8,
    /// Workload Hint.
    #[bits(3)]
    pub wh: u8,
    #[bits(24)]
    __: u32,
}

/// Temperature Threshold, 04h.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct TemperatureThreshold {
    /// Temperature Threshold in kelvins.
    pub tmpth: u16,
    /// Threshold Temperature Select: 0 composite, 1 to 8 a sensor, 15 all (Set Features only).
    #[bits(4)]
    pub tmpsel: u8,
    /// Threshold Type Select: 0 over, 1 under.
    #[bits(2)]
    pub thsel: u8,
    /// Temperature Threshold Hysteresis in kelvins.
    #[bits(3)]
    pub tmpthh: u8,
    #[bits(7)]
    __: u8,
}

/// Error Recovery, 05h, per namespace. NVM 1.1, "Error Recovery".
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct ErrorRecovery {
    /// Time Limited Error Recovery in units of 100 ms; 0 for no limit.
    pub tler: u16,
    /// Deallocated or Unwritten Logical Block Error Enable.
    pub dulbe: bool,
    #[bits(15)]
    __: u16,
}

/// Volatile Write Cache, 06h.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct VolatileWriteCache {
    /// Volatile Write Cache Enable.
    pub wce: bool,
    #[bits(31)]
    __: u32,
}

/// Number of Queues, 07h: the number that the host requests, and the number that the controller has
/// allocated. Set once, before the first I/O queue is created.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct NumberOfQueues {
    /// I/O Submission Queues, 0's based; FFFFh is not allowed.
    pub nsq: u16,
    /// I/O Completion Queues, 0's based; FFFFh is not allowed.
    pub ncq: u16,
}

/// Interrupt Coalescing, 08h.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct InterruptCoalescing {
    /// Aggregation Threshold in completion queue entries per vector, 0's based.
    pub thr: u8,
    /// Aggregation Time in units of 100 microseconds; 0 for no delay.
    pub time: u8,
    __: u16,
}

/// Interrupt Vector Configuration, 09h.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct InterruptVectorConfiguration {
    /// Interrupt Vector.
    pub iv: u16,
    /// Coalescing Disable.
    pub cd: bool,
    #[bits(15)]
    __: u16,
}

/// Write Atomicity Normal, 0Ah. NVM 1.1, "Write Atomicity Normal".
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct WriteAtomicity {
    /// Disable Normal: the host relies only on AWUPF and NAWUPF, not on AWUN and NAWUN.
    pub dn: bool,
    #[bits(31)]
    __: u32,
}

/// Asynchronous Event Configuration, 0Bh: events that the host enables.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct AsyncEventConfig {
    /// SMART / Health Critical Warnings: the bits of
    /// [`CriticalWarning`](crate::log::CriticalWarning).
    pub smart: u8,
    /// Attached Namespace Attribute Notices.
    pub nan: bool,
    /// Firmware Activation Notices.
    pub fan: bool,
    /// Telemetry Log Notices.
    pub tln: bool,
    /// ANA Change Notices.
    pub anacn: bool,
    /// Predictable Latency Event Aggregate Log Change Notices.
    pub plean: bool,
    /// LBA Status Information Alert Notices.
    pub lsian: bool,
    /// Endurance Group Event Aggregate Log Change Notices.
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
    /// Discovery Log Page Change Notification.
    pub dlpcn: bool,
}

/// I/O Command Set Profile, 19h.
#[bitfield(u32)]
#[derive(PartialEq, Eq)]
pub struct IoCommandSetProfile {
    /// I/O Command Set Combination Index in [`IoCommandSets`](crate::identify::IoCommandSets).
    #[bits(9)]
    pub iocsci: u16,
    #[bits(23)]
    __: u32,
}

/// Timestamp, 0Eh: 8 bytes of data. Base 2.1, 5.1.25.1, "Timestamp".
#[bitfield(u64)]
#[derive(PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct Timestamp {
    /// Milliseconds since midnight, 1 January 1970, UTC; or since the controller was reset.
    #[bits(48)]
    pub millis: u64,
    /// Synch (Get Features): the clock was stopped temporarily.
    pub synch: bool,
    /// Timestamp Origin (Get Features): 0 cleared by a reset, 1 set by Set Features.
    #[bits(3)]
    pub origin: u8,
    #[bits(12)]
    __: u16,
}

/// Host Behavior Support, 16h: 512 bytes of data. Base 2.1, 5.1.25.1, "Host Behavior Support".
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct HostBehaviorSupport {
    /// Advanced Command Retry Enable: 1 if the host supports Command Interrupted and retry delays.
    pub acre: u8,
    /// Extended Telemetry Data Area 4 Supported.
    pub etdas: u8,
    /// LBA Format Extension Enable: 1 if the host uses formats of index 16 and above.
    pub lbafee: u8,
    /// Host Dispersed Namespace Support.
    pub hdisns: u8,
    /// Copy Descriptor Formats Enable: bit n for format n (2 to 4).
    pub cdfe: u16,
    /// Reserved.
    pub reserved6: [u8; 506],
}

/// Entry of LBA Range Type, 03h: 64 bytes; the data have up to 64 entries. NVM 1.1, "LBA Range
/// Type".
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct LbaRangeType {
    /// Type: 0 general purpose, 1 file system, 2 RAID, 3 cache, 4 page or swap file.
    pub kind: u8,
    /// Attributes: bit 0 may be overwritten, bit 1 should be hidden.
    pub attributes: u8,
    /// Reserved.
    pub reserved2: [u8; 14],
    /// Starting LBA.
    pub slba: u64,
    /// Number of Logical Blocks, 0's based.
    pub nlb0: u64,
    /// Unique Identifier, big-endian.
    pub guid: [u8; 16],
    /// Reserved.
    pub reserved48: [u8; 16],
}

zero_default!(HostBehaviorSupport, LbaRangeType);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identify::Oaes;
    use crate::layout::assert_layout;

    #[test]
    fn layout() {
        assert_layout!(HostBehaviorSupport, 512, {
            acre: 0, etdas: 1, lbafee: 2, hdisns: 3, cdfe: 4, reserved6: 6,
        });
        assert_layout!(LbaRangeType, 64, {
            kind: 0, attributes: 1, reserved2: 2, slba: 16, nlb0: 24, guid: 32, reserved48: 48,
        });
        assert_eq!(core::mem::size_of::<Timestamp>(), 8);
    }

    #[test]
    fn bits() {
        assert_eq!(Capabilities::new().with_saveable(true).into_bits(), 1 << 0);
        assert_eq!(Capabilities::new().with_namespace_specific(true).into_bits(), 1 << 1);
        assert_eq!(Capabilities::new().with_changeable(true).into_bits(), 1 << 2);
        let value = Arbitration::new().with_ab(7).with_lpw(1).with_mpw(2).with_hpw(3);
        assert_eq!(value.into_bits(), 0x0302_0107);
        assert_eq!(PowerManagement::new().with_ps(31).with_wh(1).into_bits(), 0x3f);
        let value = TemperatureThreshold::new().with_tmpth(0x157).with_tmpsel(8).with_thsel(1);
        assert_eq!(value.into_bits(), 0x0018_0157);
        assert_eq!(TemperatureThreshold::new().with_tmpthh(7).into_bits(), 7 << 22);
        assert_eq!(ErrorRecovery::new().with_tler(9).with_dulbe(true).into_bits(), 0x1_0009);
        assert_eq!(VolatileWriteCache::new().with_wce(true).into_bits(), 1);
        assert_eq!(NumberOfQueues::new().with_nsq(3).with_ncq(5).into_bits(), 0x0005_0003);
        assert_eq!(InterruptCoalescing::new().with_thr(7).with_time(2).into_bits(), 0x0207);
        let value = InterruptVectorConfiguration::new().with_iv(2).with_cd(true);
        assert_eq!(value.into_bits(), 0x1_0002);
        assert_eq!(WriteAtomicity::new().with_dn(true).into_bits(), 1);
        assert_eq!(IoCommandSetProfile::new().with_iocsci(0x1ff).into_bits(), 0x1ff);
        let value = Timestamp::new().with_millis((1 << 48) - 1).with_synch(true).with_origin(1);
        assert_eq!(value.into_bits(), 0x0003_ffff_ffff_ffff);
    }

    /// The bits with which a host enables events have the same numbers as the bits with which a
    /// controller offers them.
    #[test]
    fn event_bits_are_those_of_identify() {
        let config = AsyncEventConfig::new;
        let oaes = Oaes::new;
        assert_eq!(config().with_smart(0xff).into_bits(), 0xff);
        assert_eq!(config().with_tln(true).into_bits(), 1 << 10);
        for (config, oaes, bit) in [
            (config().with_nan(true), oaes().with_nsan(true), 8),
            (config().with_fan(true), oaes().with_fan(true), 9),
            (config().with_anacn(true), oaes().with_anacn(true), 11),
            (config().with_plean(true), oaes().with_plean(true), 12),
            (config().with_lsian(true), oaes().with_lsian(true), 13),
            (config().with_egean(true), oaes().with_egean(true), 14),
            (config().with_nnss(true), oaes().with_nnss(true), 15),
            (config().with_tthr(true), oaes().with_tthr(true), 16),
            (config().with_rgcns(true), oaes().with_rgcns(true), 17),
            (config().with_ansan(true), oaes().with_ansan(true), 19),
            (config().with_zdcn(true), oaes().with_zdcn(true), 27),
            (config().with_dlpcn(true), oaes().with_dlpcn(true), 31),
        ] {
            assert_eq!((config.into_bits(), oaes.into_bits()), (1 << bit, 1 << bit));
        }
    }

    #[test]
    fn selectors_and_names() {
        assert_eq!(Select::from_bits(0), Some(Select::Current));
        assert_eq!(Select::from_bits(3), Some(Select::SupportedCapabilities));
        assert!((4..=255).all(|sel| Select::from_bits(sel).is_none()));
        assert!((0..4).all(|sel| Select::from_bits(sel).is_some_and(|s| s as u8 == sel)));
        assert_eq!(fid::name(0x07), Some("Number of Queues"));
        assert_eq!(fid::name(0x00), None);
        assert_eq!(fid::name(0xc0), None);
    }
}
