//! Log pages. Base 2.1, 5.1.12.1 "Log Specific Information".

mod ana;
mod effects;
mod pages;
pub mod persistent_event;
mod sanitize;
mod self_test;
mod telemetry;

pub use ana::{
    ANACAP_ALL_STATES, ANACAP_FIXED_GROUPS, AnaGroup, AnaGroupDescriptor, AnaLog, AnaLogHeader,
    AnaState, RETURN_GROUPS_ONLY,
};
pub use effects::{
    CommandEffects, CommandsSupportedEffects, FeatureEffects, FeaturesSupportedEffects,
    LogPageSupport, SupportedLogPages,
};
pub use pages::{
    Afi, ChangedNamespaces, CriticalWarning, ErrorLogEntry, FirmwareSlot, ParameterLocation,
    SmartHealth,
};

pub use sanitize::{SanitizeLog, SanitizeState, sos};
pub use self_test::{SelfTestLog, SelfTestResult, ValidDiagnostics, self_test_result, stc};
pub use telemetry::{TELEMETRY_BLOCK, TelemetryHeader};

/// Log Page Identifiers. Base 2.1, 5.1.12, "Log Page Identifiers".
pub mod lid {
    /// Supported Log Pages: [`SupportedLogPages`](super::SupportedLogPages).
    pub const SUPPORTED_LOG_PAGES: u8 = 0x00;
    /// Error Information: [`ErrorLogEntry`](super::ErrorLogEntry)s, newest first.
    pub const ERROR_INFORMATION: u8 = 0x01;
    /// SMART / Health Information: [`SmartHealth`](super::SmartHealth).
    pub const SMART_HEALTH: u8 = 0x02;
    /// Firmware Slot Information: [`FirmwareSlot`](super::FirmwareSlot).
    pub const FIRMWARE_SLOT: u8 = 0x03;
    /// Changed Attached Namespace List: [`ChangedNamespaces`](super::ChangedNamespaces).
    pub const CHANGED_ATTACHED_NAMESPACES: u8 = 0x04;
    /// Commands Supported and Effects:
    /// [`CommandsSupportedEffects`](super::CommandsSupportedEffects).
    pub const COMMANDS_SUPPORTED_EFFECTS: u8 = 0x05;
    /// Device Self-test.
    pub const SELF_TEST: u8 = 0x06;
    /// Telemetry Host-Initiated.
    pub const TELEMETRY_HOST: u8 = 0x07;
    /// Telemetry Controller-Initiated.
    pub const TELEMETRY_CONTROLLER: u8 = 0x08;
    /// Endurance Group Information.
    pub const ENDURANCE_GROUP: u8 = 0x09;
    /// Predictable Latency Per NVM Set.
    pub const PREDICTABLE_LATENCY: u8 = 0x0a;
    /// Predictable Latency Event Aggregate.
    pub const PREDICTABLE_LATENCY_EVENTS: u8 = 0x0b;
    /// Asymmetric Namespace Access.
    pub const ANA: u8 = 0x0c;
    /// Persistent Event Log.
    pub const PERSISTENT_EVENTS: u8 = 0x0d;
    /// LBA Status Information.
    pub const LBA_STATUS: u8 = 0x0e;
    /// Endurance Group Event Aggregate.
    pub const ENDURANCE_GROUP_EVENTS: u8 = 0x0f;
    /// Media Unit Status.
    pub const MEDIA_UNIT_STATUS: u8 = 0x10;
    /// Supported Capacity Configuration List.
    pub const CAPACITY_CONFIGURATIONS: u8 = 0x11;
    /// Feature Identifiers Supported and Effects:
    /// [`FeaturesSupportedEffects`](super::FeaturesSupportedEffects).
    pub const FEATURES_SUPPORTED_EFFECTS: u8 = 0x12;
    /// NVMe-MI Commands Supported and Effects.
    pub const MI_COMMANDS_SUPPORTED_EFFECTS: u8 = 0x13;
    /// Command and Feature Lockdown.
    pub const LOCKDOWN: u8 = 0x14;
    /// Boot Partition.
    pub const BOOT_PARTITION: u8 = 0x15;
    /// Rotational Media Information.
    pub const ROTATIONAL_MEDIA: u8 = 0x16;
    /// Changed Allocated Namespace List: [`ChangedNamespaces`](super::ChangedNamespaces).
    pub const CHANGED_ALLOCATED_NAMESPACES: u8 = 0x1c;
    /// Discovery.
    pub const DISCOVERY: u8 = 0x70;
    /// Reservation Notification.
    pub const RESERVATION_NOTIFICATION: u8 = 0x80;
    /// Sanitize Status: [`SanitizeLog`](super::SanitizeLog).
    pub const SANITIZE_STATUS: u8 = 0x81;
    /// Changed Zone List.
    pub const CHANGED_ZONES: u8 = 0xbf;

    /// Name in the specification; `None` for an unknown log page.
    pub const fn name(lid: u8) -> Option<&'static str> {
        Some(match lid {
            SUPPORTED_LOG_PAGES => "Supported Log Pages",
            ERROR_INFORMATION => "Error Information",
            SMART_HEALTH => "SMART / Health Information",
            FIRMWARE_SLOT => "Firmware Slot Information",
            CHANGED_ATTACHED_NAMESPACES => "Changed Attached Namespace List",
            COMMANDS_SUPPORTED_EFFECTS => "Commands Supported and Effects",
            SELF_TEST => "Device Self-test",
            TELEMETRY_HOST => "Telemetry Host-Initiated",
            TELEMETRY_CONTROLLER => "Telemetry Controller-Initiated",
            ENDURANCE_GROUP => "Endurance Group Information",
            PREDICTABLE_LATENCY => "Predictable Latency Per NVM Set",
            PREDICTABLE_LATENCY_EVENTS => "Predictable Latency Event Aggregate",
            ANA => "Asymmetric Namespace Access",
            PERSISTENT_EVENTS => "Persistent Event Log",
            LBA_STATUS => "LBA Status Information",
            ENDURANCE_GROUP_EVENTS => "Endurance Group Event Aggregate",
            MEDIA_UNIT_STATUS => "Media Unit Status",
            CAPACITY_CONFIGURATIONS => "Supported Capacity Configuration List",
            FEATURES_SUPPORTED_EFFECTS => "Feature Identifiers Supported and Effects",
            MI_COMMANDS_SUPPORTED_EFFECTS => "NVMe-MI Commands Supported and Effects",
            LOCKDOWN => "Command and Feature Lockdown",
            BOOT_PARTITION => "Boot Partition",
            ROTATIONAL_MEDIA => "Rotational Media Information",
            CHANGED_ALLOCATED_NAMESPACES => "Changed Allocated Namespace List",
            DISCOVERY => "Discovery",
            RESERVATION_NOTIFICATION => "Reservation Notification",
            SANITIZE_STATUS => "Sanitize Status",
            CHANGED_ZONES => "Changed Zone List",
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::lid;

    #[test]
    fn names() {
        assert_eq!(lid::name(0x02), Some("SMART / Health Information"));
        assert_eq!(lid::name(0xc0), None);
        assert_eq!((0..=255).filter(|&lid| lid::name(lid).is_some()).count(), 28);
    }
}
