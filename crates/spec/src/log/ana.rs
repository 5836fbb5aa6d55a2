//! Asymmetric Namespace Access: states of ANA groups, and their log page. Base 2.1, 5.1.12.1,
//! "Asymmetric Namespace Access", and 8.1.1.

use crate::status::Status;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Identify Controller, ANACAP: all five states can be reported.
pub const ANACAP_ALL_STATES: u8 = 0b1_1111;
/// Identify Controller, ANACAP: the ANAGRPID of a namespace does not change while it is attached.
pub const ANACAP_FIXED_GROUPS: u8 = 1 << 6;
/// Get Log Page, Log Specific Parameter: Return Groups Only, without the namespaces of each group.
pub const RETURN_GROUPS_ONLY: u8 = 1 << 0;

/// ANA state of a group of namespaces at a controller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AnaState {
    /// Accessible, with optimal performance.
    #[default]
    Optimized = 0x01,
    /// Accessible; another controller may be faster.
    NonOptimized = 0x02,
    /// Currently inaccessible.
    Inaccessible = 0x03,
    /// Permanently inaccessible.
    PersistentLoss = 0x04,
    /// In transition to another state.
    Change = 0x0f,
}

impl AnaState {
    /// All states.
    pub const ALL: [Self; 5] = [
        Self::Optimized,
        Self::NonOptimized,
        Self::Inaccessible,
        Self::PersistentLoss,
        Self::Change,
    ];

    /// Decodes the field; `None` for a reserved value.
    pub fn from_bits(bits: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|state| *state as u8 == bits & 0xf)
    }

    /// Status with which commands for the namespaces fail. `None` if the commands are executed.
    pub fn refusal(self) -> Option<Status> {
        match self {
            Self::Optimized | Self::NonOptimized => None,
            Self::Inaccessible => Some(Status::ANA_INACCESSIBLE),
            Self::PersistentLoss => Some(Status::ANA_PERSISTENT_LOSS),
            Self::Change => Some(Status::ANA_TRANSITION),
        }
    }

    /// Name for configuration and output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Optimized => "optimized",
            Self::NonOptimized => "non-optimized",
            Self::Inaccessible => "inaccessible",
            Self::PersistentLoss => "persistent-loss",
            Self::Change => "change",
        }
    }

    /// Parses a [name](Self::name).
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.name() == name)
    }
}

/// Head of the log page Asymmetric Namespace Access. [Descriptors](AnaGroupDescriptor) follow, each
/// with the NSIDs of its group.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct AnaLogHeader {
    /// Change Count.
    pub chgcnt: u64,
    /// Number of ANA Group Descriptors.
    pub nagd: u16,
    /// Reserved.
    pub reserved10: [u8; 6],
}

/// Head of an ANA Group Descriptor. NSIDs of 4 bytes each follow.
#[repr(C)]
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
pub struct AnaGroupDescriptor {
    /// ANA Group ID.
    pub agid: u32,
    /// Number of NSID Values.
    pub nnv: u32,
    /// Change Count.
    pub chgcnt: u64,
    /// Asymmetric Namespace Access State, in bits 3:0.
    pub anas: u8,
    /// Reserved.
    pub reserved17: [u8; 15],
}

/// ANA group of the log page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnaGroup {
    /// ANA Group ID.
    pub id: u32,
    /// Change Count of the group's last change.
    pub changes: u64,
    /// State; `None` for a reserved value.
    pub state: Option<AnaState>,
    /// NSIDs of the group; empty with Return Groups Only.
    pub nsids: Vec<u32>,
}

/// Content of the log page Asymmetric Namespace Access, decoded.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AnaLog {
    /// Change Count.
    pub changes: u64,
    /// Groups, in ascending order.
    pub groups: Vec<AnaGroup>,
}

impl AnaLog {
    /// Encodes the page. With `groups_only`, the page contains no namespaces.
    pub fn encode(&self, groups_only: bool) -> Vec<u8> {
        let nagd = u16::try_from(self.groups.len()).unwrap_or(u16::MAX);
        let head = AnaLogHeader { chgcnt: self.changes, nagd, reserved10: [0; 6] };
        let mut page = head.as_bytes().to_vec();
        for group in self.groups.iter().take(nagd.into()) {
            let nsids = if groups_only { &[] } else { &group.nsids[..] };
            let descriptor = AnaGroupDescriptor {
                agid: group.id,
                nnv: nsids.len() as u32,
                chgcnt: group.changes,
                anas: group.state.map_or(0, |state| state as u8),
                ..AnaGroupDescriptor::default()
            };
            page.extend_from_slice(descriptor.as_bytes());
            page.extend(nsids.iter().flat_map(|nsid| nsid.to_le_bytes()));
        }
        page
    }

    /// Decodes a page; `None` if the page is shorter than its counts require.
    pub fn decode(page: &[u8]) -> Option<Self> {
        let (head, mut rest) = AnaLogHeader::read_from_prefix(page).ok()?;
        let mut groups = Vec::new();
        for _ in 0..head.nagd {
            let (descriptor, after) = AnaGroupDescriptor::read_from_prefix(rest).ok()?;
            let bytes = usize::try_from(descriptor.nnv).ok()?.checked_mul(4)?;
            let (nsids, after) = after.split_at_checked(bytes)?;
            let nsids = nsids.chunks_exact(4);
            groups.push(AnaGroup {
                id: descriptor.agid,
                changes: descriptor.chgcnt,
                state: AnaState::from_bits(descriptor.anas),
                nsids: nsids.map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            });
            rest = after;
        }
        Some(Self { changes: head.chgcnt, groups })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ana_log_is_encoded_as_specified_and_decoded() {
        let group = |id, state, nsids: &[u32]| AnaGroup {
            id,
            changes: 7,
            state: Some(state),
            nsids: nsids.to_vec(),
        };
        let groups =
            vec![group(1, AnaState::Inaccessible, &[1, 3]), group(2, AnaState::Change, &[2])];
        let log = AnaLog { changes: 0x0102, groups };
        let page = log.encode(false);
        assert_eq!(page.len(), 16 + 32 + 8 + 32 + 4);
        assert_eq!(page[..12], [2, 1, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!(page[16..24], [1, 0, 0, 0, 2, 0, 0, 0]);
        assert_eq!((page[24], page[32], page[48], page[52]), (7, 3, 1, 3));
        assert_eq!(AnaLog::decode(&page), Some(log.clone()));
        assert_eq!(AnaLog::decode(&page[..page.len() - 1]), None);
        let heads = log.encode(true);
        assert_eq!(heads.len(), 16 + 64);
        assert!(AnaLog::decode(&heads).unwrap().groups.iter().all(|group| group.nsids.is_empty()));
        // The number of NSIDs in the first descriptor exceeds the length of the page.
        let mut page = page;
        page[20..24].fill(0xff);
        assert_eq!(AnaLog::decode(&page), None);
    }

    #[test]
    fn a_state_is_its_number_and_its_name() {
        for state in AnaState::ALL {
            assert_eq!(AnaState::from_bits(state as u8), Some(state));
            assert_eq!(AnaState::from_name(state.name()), Some(state));
        }
        assert_eq!((AnaState::from_bits(0), AnaState::from_bits(5)), (None, None));
        let refusals = AnaState::ALL.map(|state| state.refusal().map(|status| status.bits()));
        assert_eq!(refusals, [None, None, Some(0x302), Some(0x301), Some(0x303)]);
    }
}
