//! Status field of a completion. Base 2.1, 4.2.3 "Status Field Definition"; NVM 1.1, "Status Codes"
//! for those of I/O commands (80h to BFh).

use core::fmt;

/// Status of a completion: 15 bits, the status word of a [`Cqe`](crate::Cqe) without its phase tag.
///
/// | bits | field |
/// |---|---|
/// | 7:0 | SC, status code |
/// | 10:8 | SCT, status code type |
/// | 12:11 | CRD, command retry delay |
/// | 13 | M, more information in the Error Information log page |
/// | 14 | DNR, do not retry |
///
/// CRD, M and DNR are zero in the named constants. To compare a peer's status with a constant,
/// apply [`code`](Self::code) first.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Status(u16);

/// Status Code Type. Base 2.1, 4.2.3.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum StatusCodeType {
    /// 0h, Generic Command Status.
    Generic = 0,
    /// 1h, Command Specific Status.
    CommandSpecific = 1,
    /// 2h, Media and Data Integrity Errors.
    Media = 2,
    /// 3h, Path Related Status.
    Path = 3,
    /// 4h, reserved.
    Reserved4 = 4,
    /// 5h, reserved.
    Reserved5 = 5,
    /// 6h, reserved.
    Reserved6 = 6,
    /// 7h, vendor specific.
    Vendor = 7,
}

const MORE: u16 = 1 << 13;
const DNR: u16 = 1 << 14;

impl Status {
    /// Creates the status with this type and code. Only three bits of `sct` are used.
    pub const fn new(sct: u8, sc: u8) -> Self {
        Self((sct as u16 & 7) << 8 | sc as u16)
    }

    /// Decodes the 15 bits; bit 15 is ignored.
    pub const fn from_bits(bits: u16) -> Self {
        Self(bits & 0x7fff)
    }

    /// Encodes the 15 bits.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// SC, the status code.
    pub const fn sc(self) -> u8 {
        self.0 as u8
    }

    /// SCT, the status code type, as a number from 0 to 7.
    pub const fn sct(self) -> u8 {
        (self.0 >> 8 & 7) as u8
    }

    /// SCT, the status code type.
    pub const fn code_type(self) -> StatusCodeType {
        match self.sct() {
            0 => StatusCodeType::Generic,
            1 => StatusCodeType::CommandSpecific,
            2 => StatusCodeType::Media,
            3 => StatusCodeType::Path,
            4 => StatusCodeType::Reserved4,
            5 => StatusCodeType::Reserved5,
            6 => StatusCodeType::Reserved6,
            _ => StatusCodeType::Vendor,
        }
    }

    /// Status with only SCT and SC. It can be compared with the named constants.
    #[must_use]
    pub const fn code(self) -> Self {
        Self(self.0 & 0x7ff)
    }

    /// CRD: 0 to retry immediately, 1 to 3 to retry after the delay CRDT1 to CRDT3 of Identify
    /// Controller.
    pub const fn crd(self) -> u8 {
        (self.0 >> 11 & 3) as u8
    }

    /// M: the Error Information log page has details.
    pub const fn more(self) -> bool {
        self.0 & MORE != 0
    }

    /// DNR: a retry of the command would fail again.
    pub const fn dnr(self) -> bool {
        self.0 & DNR != 0
    }

    /// Sets DNR.
    #[must_use]
    pub const fn with_dnr(self) -> Self {
        Self(self.0 | DNR)
    }

    /// Sets M.
    #[must_use]
    pub const fn with_more(self) -> Self {
        Self(self.0 | MORE)
    }

    /// Sets the command retry delay (two bits).
    #[must_use]
    pub const fn with_crd(self, crd: u8) -> Self {
        Self(self.0 & !(3 << 11) | (crd as u16 & 3) << 11)
    }

    /// True if the command succeeded: SCT and SC are zero.
    pub const fn is_success(self) -> bool {
        self.code().0 == 0
    }

    /// `Ok` if the command succeeded, otherwise the status as the error.
    pub const fn into_result(self) -> Result<(), Self> {
        if self.is_success() { Ok(()) } else { Err(self) }
    }
}

/// Name in the specification and the status code in hexadecimal, for example `Invalid Field in
/// Command (SCT 0h, SC 02h, DNR)`.
impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name().unwrap_or(match self.code_type() {
            StatusCodeType::Generic => "Unknown Generic Command Status",
            StatusCodeType::CommandSpecific => "Unknown Command Specific Status",
            StatusCodeType::Media => "Unknown Media and Data Integrity Error",
            StatusCodeType::Path => "Unknown Path Related Status",
            StatusCodeType::Vendor => "Vendor Specific Status",
            _ => "Reserved Status Code Type",
        });
        write!(f, "{name} (SCT {:X}h, SC {:02X}h", self.sct(), self.sc())?;
        if self.crd() != 0 {
            write!(f, ", CRD {}", self.crd())?;
        }
        if self.more() {
            f.write_str(", More")?;
        }
        if self.dnr() {
            f.write_str(", DNR")?;
        }
        f.write_str(")")
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Status({self})")
    }
}

impl std::error::Error for Status {}

macro_rules! statuses {
    ($($name:ident = ($sct:literal, $sc:literal), $text:literal;)*) => {
        impl Status {
            $(
                #[doc = concat!($text, ": SCT ", stringify!($sct), ", SC ", stringify!($sc), ".")]
                pub const $name: Self = Self::new($sct, $sc);
            )*

            /// All statuses with a name, in the order of type and code.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// Name in the specification; `None` for an unknown status. CRD, M and DNR are ignored.
            pub const fn name(self) -> Option<&'static str> {
                match self.code() {
                    $(Self::$name => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

statuses! {
    // Generic Command Status
    SUCCESS = (0, 0x00), "Successful Completion";
    INVALID_OPCODE = (0, 0x01), "Invalid Command Opcode";
    INVALID_FIELD = (0, 0x02), "Invalid Field in Command";
    CID_CONFLICT = (0, 0x03), "Command ID Conflict";
    DATA_XFER_ERROR = (0, 0x04), "Data Transfer Error";
    ABORTED_POWER_LOSS = (0, 0x05), "Commands Aborted due to Power Loss Notification";
    INTERNAL = (0, 0x06), "Internal Error";
    ABORT_REQUESTED = (0, 0x07), "Command Abort Requested";
    ABORTED_SQ_DELETION = (0, 0x08), "Command Aborted due to SQ Deletion";
    FUSED_FAILED = (0, 0x09), "Command Aborted due to Failed Fused Command";
    FUSED_MISSING = (0, 0x0a), "Command Aborted due to Missing Fused Command";
    INVALID_NAMESPACE_OR_FORMAT = (0, 0x0b), "Invalid Namespace or Format";
    COMMAND_SEQUENCE_ERROR = (0, 0x0c), "Command Sequence Error";
    SGL_INVALID_SEGMENT_DESCRIPTOR = (0, 0x0d), "Invalid SGL Segment Descriptor";
    SGL_INVALID_NUMBER_OF_DESCRIPTORS = (0, 0x0e), "Invalid Number of SGL Descriptors";
    SGL_DATA_LENGTH_INVALID = (0, 0x0f), "Data SGL Length Invalid";
    SGL_METADATA_LENGTH_INVALID = (0, 0x10), "Metadata SGL Length Invalid";
    SGL_DESCRIPTOR_TYPE_INVALID = (0, 0x11), "SGL Descriptor Type Invalid";
    INVALID_USE_OF_CMB = (0, 0x12), "Invalid Use of Controller Memory Buffer";
    PRP_OFFSET_INVALID = (0, 0x13), "PRP Offset Invalid";
    ATOMIC_WRITE_UNIT_EXCEEDED = (0, 0x14), "Atomic Write Unit Exceeded";
    OPERATION_DENIED = (0, 0x15), "Operation Denied";
    SGL_OFFSET_INVALID = (0, 0x16), "SGL Offset Invalid";
    HOST_ID_INCONSISTENT_FORMAT = (0, 0x18), "Host Identifier Inconsistent Format";
    KEEP_ALIVE_TIMER_EXPIRED = (0, 0x19), "Keep Alive Timer Expired";
    KEEP_ALIVE_TIMEOUT_INVALID = (0, 0x1a), "Keep Alive Timeout Invalid";
    ABORTED_PREEMPT_AND_ABORT = (0, 0x1b), "Command Aborted due to Preempt and Abort";
    SANITIZE_FAILED = (0, 0x1c), "Sanitize Failed";
    SANITIZE_IN_PROGRESS = (0, 0x1d), "Sanitize In Progress";
    SGL_DATA_BLOCK_GRANULARITY_INVALID = (0, 0x1e), "SGL Data Block Granularity Invalid";
    COMMAND_NOT_SUPPORTED_FOR_QUEUE_IN_CMB = (0, 0x1f), "Command Not Supported for Queue in CMB";
    NAMESPACE_WRITE_PROTECTED = (0, 0x20), "Namespace is Write Protected";
    COMMAND_INTERRUPTED = (0, 0x21), "Command Interrupted";
    TRANSIENT_TRANSPORT_ERROR = (0, 0x22), "Transient Transport Error";
    COMMAND_PROHIBITED_BY_LOCKDOWN = (0, 0x23), "Command Prohibited by Command and Feature Lockdown";
    ADMIN_COMMAND_MEDIA_NOT_READY = (0, 0x24), "Admin Command Media Not Ready";
    INVALID_KEY_TAG = (0, 0x25), "Invalid Key Tag";
    HOST_DISPERSED_NAMESPACE_NOT_ENABLED = (0, 0x26), "Host Dispersed Namespace Support Not Enabled";
    HOST_ID_NOT_INITIALIZED = (0, 0x27), "Host Identifier Not Initialized";
    INCORRECT_KEY = (0, 0x28), "Incorrect Key";
    FDP_DISABLED = (0, 0x29), "FDP Disabled";
    INVALID_PLACEMENT_HANDLE_LIST = (0, 0x2a), "Invalid Placement Handle List";
    LBA_OUT_OF_RANGE = (0, 0x80), "LBA Out of Range";
    CAPACITY_EXCEEDED = (0, 0x81), "Capacity Exceeded";
    NAMESPACE_NOT_READY = (0, 0x82), "Namespace Not Ready";
    RESERVATION_CONFLICT = (0, 0x83), "Reservation Conflict";
    FORMAT_IN_PROGRESS = (0, 0x84), "Format In Progress";
    // Command Specific Status
    CQ_INVALID = (1, 0x00), "Completion Queue Invalid";
    INVALID_QID = (1, 0x01), "Invalid Queue Identifier";
    INVALID_QUEUE_SIZE = (1, 0x02), "Invalid Queue Size";
    ABORT_LIMIT = (1, 0x03), "Abort Command Limit Exceeded";
    AER_LIMIT = (1, 0x05), "Asynchronous Event Request Limit Exceeded";
    INVALID_FW_SLOT = (1, 0x06), "Invalid Firmware Slot";
    INVALID_FW_IMAGE = (1, 0x07), "Invalid Firmware Image";
    INVALID_INTERRUPT_VECTOR = (1, 0x08), "Invalid Interrupt Vector";
    INVALID_LOG_PAGE = (1, 0x09), "Invalid Log Page";
    INVALID_FORMAT = (1, 0x0a), "Invalid Format";
    FW_NEEDS_CONVENTIONAL_RESET = (1, 0x0b), "Firmware Activation Requires Conventional Reset";
    INVALID_QUEUE_DELETION = (1, 0x0c), "Invalid Queue Deletion";
    FEATURE_NOT_SAVEABLE = (1, 0x0d), "Feature Identifier Not Saveable";
    FEATURE_NOT_CHANGEABLE = (1, 0x0e), "Feature Not Changeable";
    FEATURE_NOT_NAMESPACE_SPECIFIC = (1, 0x0f), "Feature Not Namespace Specific";
    FW_NEEDS_SUBSYSTEM_RESET = (1, 0x10), "Firmware Activation Requires NVM Subsystem Reset";
    FW_NEEDS_CONTROLLER_RESET = (1, 0x11), "Firmware Activation Requires Controller Level Reset";
    FW_NEEDS_MAX_TIME_VIOLATION = (1, 0x12), "Firmware Activation Requires Maximum Time Violation";
    FW_ACTIVATION_PROHIBITED = (1, 0x13), "Firmware Activation Prohibited";
    OVERLAPPING_RANGE = (1, 0x14), "Overlapping Range";
    NAMESPACE_INSUFFICIENT_CAPACITY = (1, 0x15), "Namespace Insufficient Capacity";
    NAMESPACE_ID_UNAVAILABLE = (1, 0x16), "Namespace Identifier Unavailable";
    NAMESPACE_ALREADY_ATTACHED = (1, 0x18), "Namespace Already Attached";
    NAMESPACE_IS_PRIVATE = (1, 0x19), "Namespace Is Private";
    NAMESPACE_NOT_ATTACHED = (1, 0x1a), "Namespace Not Attached";
    THIN_PROVISIONING_NOT_SUPPORTED = (1, 0x1b), "Thin Provisioning Not Supported";
    CONTROLLER_LIST_INVALID = (1, 0x1c), "Controller List Invalid";
    SELF_TEST_IN_PROGRESS = (1, 0x1d), "Device Self-test In Progress";
    BOOT_PARTITION_WRITE_PROHIBITED = (1, 0x1e), "Boot Partition Write Prohibited";
    INVALID_CONTROLLER_ID = (1, 0x1f), "Invalid Controller Identifier";
    INVALID_SECONDARY_CONTROLLER_STATE = (1, 0x20), "Invalid Secondary Controller State";
    INVALID_NUMBER_OF_CONTROLLER_RESOURCES = (1, 0x21), "Invalid Number of Controller Resources";
    INVALID_RESOURCE_ID = (1, 0x22), "Invalid Resource Identifier";
    SANITIZE_PROHIBITED_PMR = (1, 0x23), "Sanitize Prohibited While Persistent Memory Region is Enabled";
    ANA_GROUP_ID_INVALID = (1, 0x24), "ANA Group Identifier Invalid";
    ANA_ATTACH_FAILED = (1, 0x25), "ANA Attach Failed";
    INSUFFICIENT_CAPACITY = (1, 0x26), "Insufficient Capacity";
    NAMESPACE_ATTACHMENT_LIMIT = (1, 0x27), "Namespace Attachment Limit Exceeded";
    PROHIBITION_NOT_SUPPORTED = (1, 0x28), "Prohibition of Command Execution Not Supported";
    IO_COMMAND_SET_NOT_SUPPORTED = (1, 0x29), "I/O Command Set Not Supported";
    IO_COMMAND_SET_NOT_ENABLED = (1, 0x2a), "I/O Command Set Not Enabled";
    IO_COMMAND_SET_COMBINATION_REJECTED = (1, 0x2b), "I/O Command Set Combination Rejected";
    INVALID_IO_COMMAND_SET = (1, 0x2c), "Invalid I/O Command Set";
    ID_UNAVAILABLE = (1, 0x2d), "Identifier Unavailable";
    CONFLICTING_ATTRIBUTES = (1, 0x80), "Conflicting Attributes";
    INVALID_PROTECTION_INFORMATION = (1, 0x81), "Invalid Protection Information";
    ATTEMPT_TO_WRITE_RO_RANGE = (1, 0x82), "Attempted Write to Read Only Range";
    COMMAND_SIZE_LIMIT_EXCEEDED = (1, 0x83), "Command Size Limit Exceeded";
    INVALID_COMMAND_ID = (1, 0x84), "Invalid Command ID";
    INCOMPATIBLE_NAMESPACE_OR_FORMAT = (1, 0x85), "Incompatible Namespace or Format";
    FAST_COPY_NOT_POSSIBLE = (1, 0x86), "Fast Copy Not Possible";
    OVERLAPPING_IO_RANGE = (1, 0x87), "Overlapping I/O Range";
    INSUFFICIENT_RESOURCES = (1, 0x89), "Insufficient Resources";
    ZONE_BOUNDARY_ERROR = (1, 0xb8), "Zone Boundary Error";
    ZONE_IS_FULL = (1, 0xb9), "Zone Is Full";
    ZONE_IS_READ_ONLY = (1, 0xba), "Zone Is Read Only";
    ZONE_IS_OFFLINE = (1, 0xbb), "Zone Is Offline";
    ZONE_INVALID_WRITE = (1, 0xbc), "Zone Invalid Write";
    TOO_MANY_ACTIVE_ZONES = (1, 0xbd), "Too Many Active Zones";
    TOO_MANY_OPEN_ZONES = (1, 0xbe), "Too Many Open Zones";
    INVALID_ZONE_STATE_TRANSITION = (1, 0xbf), "Invalid Zone State Transition";
    // Media and Data Integrity Errors
    WRITE_FAULT = (2, 0x80), "Write Fault";
    UNRECOVERED_READ = (2, 0x81), "Unrecovered Read Error";
    GUARD_CHECK = (2, 0x82), "End-to-end Guard Check Error";
    APPLICATION_TAG_CHECK = (2, 0x83), "End-to-end Application Tag Check Error";
    REFERENCE_TAG_CHECK = (2, 0x84), "End-to-end Reference Tag Check Error";
    COMPARE_FAILURE = (2, 0x85), "Compare Failure";
    ACCESS_DENIED = (2, 0x86), "Access Denied";
    DEALLOCATED_OR_UNWRITTEN = (2, 0x87), "Deallocated or Unwritten Logical Block";
    STORAGE_TAG_CHECK = (2, 0x88), "End-to-end Storage Tag Check Error";
    // Path Related Status
    INTERNAL_PATH_ERROR = (3, 0x00), "Internal Path Error";
    ANA_PERSISTENT_LOSS = (3, 0x01), "Asymmetric Access Persistent Loss";
    ANA_INACCESSIBLE = (3, 0x02), "Asymmetric Access Inaccessible";
    ANA_TRANSITION = (3, 0x03), "Asymmetric Access Transition";
    CONTROLLER_PATHING_ERROR = (3, 0x60), "Controller Pathing Error";
    HOST_PATHING_ERROR = (3, 0x70), "Host Pathing Error";
    ABORTED_BY_HOST = (3, 0x71), "Command Aborted By Host";
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bits() {
        assert_eq!(Status::SUCCESS.bits(), 0);
        assert_eq!(Status::INVALID_QID.bits(), 0x101);
        assert_eq!(Status::COMPARE_FAILURE.bits(), 0x285);
        assert_eq!(Status::ABORTED_BY_HOST.bits(), 0x371);
        assert_eq!(Status::INVALID_FIELD.with_dnr().bits(), 0x4002);
        assert_eq!(Status::INVALID_FIELD.with_more().bits(), 0x2002);
        assert_eq!(Status::NAMESPACE_NOT_READY.with_crd(3).bits(), 0x1882);
        assert_eq!(Status::from_bits(0xffff).bits(), 0x7fff);
    }

    #[test]
    fn success_is_the_code_alone() {
        assert!(Status::SUCCESS.with_more().with_dnr().is_success());
        assert!(!Status::INVALID_OPCODE.is_success());
        // SC 00h means success only if the type is Generic.
        assert!(!Status::CQ_INVALID.is_success());
        assert_eq!(Status::CQ_INVALID.into_result(), Err(Status::CQ_INVALID));
        assert_eq!(Status::SUCCESS.into_result(), Ok(()));
    }

    #[test]
    fn names_are_in_order_and_once() {
        assert!(Status::ALL.windows(2).all(|pair| pair[0].bits() < pair[1].bits()));
        for status in Status::ALL {
            assert!(status.name().is_some());
            assert_eq!(status.with_dnr().with_crd(1).with_more().name(), status.name());
        }
    }

    #[test]
    fn display() {
        assert_eq!(
            Status::INVALID_FIELD.with_dnr().to_string(),
            "Invalid Field in Command (SCT 0h, SC 02h, DNR)"
        );
        assert_eq!(
            Status::WRITE_FAULT.with_crd(2).with_more().to_string(),
            "Write Fault (SCT 2h, SC 80h, CRD 2, More)"
        );
        assert_eq!(Status::new(7, 0xab).to_string(), "Vendor Specific Status (SCT 7h, SC ABh)");
        assert_eq!(Status::new(5, 1).to_string(), "Reserved Status Code Type (SCT 5h, SC 01h)");
        assert_eq!(
            format!("{:?}", Status::SUCCESS),
            "Status(Successful Completion (SCT 0h, SC 00h))"
        );
    }

    proptest! {
        #[test]
        fn any_status_prints(bits: u16) {
            let status = Status::from_bits(bits);
            let text = status.to_string();
            let code = format!("SC {:02X}h", status.sc());
            prop_assert!(text.contains(&code), "{}", text);
            prop_assert_eq!(Status::new(status.sct(), status.sc()), status.code());
            prop_assert_eq!(status.code_type() as u8, status.sct());
        }
    }
}
