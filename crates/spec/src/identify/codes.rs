//! CNS values and Command Set Identifiers of Identify.

/// Size of every Identify data structure in bytes.
pub const IDENTIFY_SIZE: usize = 4096;

/// Controller or Namespace Structure: the data structure that Identify returns. Base 2.1, 5.1.13,
/// "CNS Values".
pub mod cns {
    /// Identify Namespace data structure, for command sets that use it (NVM).
    pub const NAMESPACE: u8 = 0x00;
    /// Controller.
    pub const CONTROLLER: u8 = 0x01;
    /// Active namespace identifiers greater than NSID.
    pub const ACTIVE_NAMESPACES: u8 = 0x02;
    /// Namespace identification descriptors.
    pub const NAMESPACE_IDS: u8 = 0x03;
    /// NVM sets.
    pub const NVM_SETS: u8 = 0x04;
    /// I/O command set specific namespace.
    pub const CSI_NAMESPACE: u8 = 0x05;
    /// I/O command set specific controller.
    pub const CSI_CONTROLLER: u8 = 0x06;
    /// Active namespace identifiers greater than NSID, of one I/O command set.
    pub const CSI_ACTIVE_NAMESPACES: u8 = 0x07;
    /// I/O command set independent namespace.
    pub const INDEPENDENT_NAMESPACE: u8 = 0x08;
    /// Capabilities of namespaces with the user data format of a given index.
    pub const FORMAT_NAMESPACE: u8 = 0x09;
    /// I/O command set specific capabilities of namespaces with the user data format of a given
    /// index.
    pub const CSI_FORMAT_NAMESPACE: u8 = 0x0a;
    /// Allocated namespace identifiers greater than NSID.
    pub const ALLOCATED_NAMESPACES: u8 = 0x10;
    /// Allocated namespace, attached to a controller or not.
    pub const ALLOCATED_NAMESPACE: u8 = 0x11;
    /// Controllers that a namespace is attached to.
    pub const NAMESPACE_CONTROLLERS: u8 = 0x12;
    /// Controllers of the NVM subsystem.
    pub const CONTROLLERS: u8 = 0x13;
    /// Primary controller capabilities.
    pub const PRIMARY_CONTROLLER: u8 = 0x14;
    /// Secondary controllers.
    pub const SECONDARY_CONTROLLERS: u8 = 0x15;
    /// Namespace granularities.
    pub const NAMESPACE_GRANULARITY: u8 = 0x16;
    /// UUIDs.
    pub const UUIDS: u8 = 0x17;
    /// Domains.
    pub const DOMAINS: u8 = 0x18;
    /// Endurance groups.
    pub const ENDURANCE_GROUPS: u8 = 0x19;
    /// Allocated namespace identifiers greater than NSID, of one I/O command set.
    pub const CSI_ALLOCATED_NAMESPACES: u8 = 0x1a;
    /// I/O command set specific allocated namespace, attached to a controller or not.
    pub const CSI_ALLOCATED_NAMESPACE: u8 = 0x1b;
    /// I/O command set combinations.
    pub const IO_COMMAND_SETS: u8 = 0x1c;
}

/// Command Set Identifiers. Base 2.1, "I/O Command Set Identifiers".
pub mod csi {
    /// NVM.
    pub const NVM: u8 = 0x00;
    /// Key Value.
    pub const KEY_VALUE: u8 = 0x01;
    /// Zoned Namespace.
    pub const ZONED: u8 = 0x02;
    /// Subsystem Local Memory.
    pub const LOCAL_MEMORY: u8 = 0x03;
    /// Computational Programs.
    pub const PROGRAMS: u8 = 0x04;
}
