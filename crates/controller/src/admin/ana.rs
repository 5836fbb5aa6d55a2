//! Asymmetric Namespace Access log page: ANA states of namespaces that several controllers share.
//! Base 2.1, 5.1.12.1 and 8.1.1.

use crate::saved::SavedAna;
use shadowbell_spec::log::{AnaGroup, AnaLog, AnaState};
use std::collections::BTreeMap;

/// ANATT: maximum time in seconds that a group stays in the ANA Change state. States are set by
/// management software, which has to observe the limit.
pub(crate) const TRANSITION_SECONDS: u8 = 60;

/// ANA state changes since the last Controller Level Reset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AnaChanges {
    /// Change Count.
    count: u64,
    /// Last state of each group that the host could know, and the Change Count of its last change.
    groups: BTreeMap<u32, (AnaState, u64)>,
}

impl AnaChanges {
    /// Compares the current states with the known ones. Returns true if one has changed. The first
    /// state of a group does not count as a change.
    pub(crate) fn review(&mut self, states: impl Iterator<Item = (u32, AnaState)>) -> bool {
        let before = self.count;
        for (group, state) in states {
            let (known, changes) = self.groups.entry(group).or_insert((state, 0));
            if *known != state {
                // After an overflow the count continues with 1, because 0 means "no change".
                self.count = self.count.checked_add(1).unwrap_or(1);
                (*known, *changes) = (state, self.count);
            }
        }
        self.count != before
    }

    /// Log page of the given groups and their namespaces.
    pub(crate) fn page(&self, namespaces: &BTreeMap<u32, Vec<u32>>, groups_only: bool) -> Vec<u8> {
        let group = |(id, nsids): (&u32, &Vec<u32>)| {
            let (state, changes) = self.groups.get(id).copied().unwrap_or_default();
            AnaGroup { id: *id, changes, state: Some(state), nsids: nsids.clone() }
        };
        let groups = namespaces.iter().map(group).collect();
        AnaLog { changes: self.count, groups }.encode(groups_only)
    }

    pub(crate) fn save(&self) -> SavedAna {
        let groups = self.groups.iter();
        let groups = groups.map(|(group, (state, changes))| (*group, *state as u8, *changes));
        SavedAna { count: self.count, groups: groups.collect() }
    }

    /// Restores a snapshot of [`save`](Self::save). Groups with an undefined state are dropped.
    pub(crate) fn restore(saved: &SavedAna) -> Self {
        let group = |&(group, state, changes): &(u32, u8, u64)| {
            Some((group, (AnaState::from_bits(state)?, changes)))
        };
        Self { count: saved.count, groups: saved.groups.iter().filter_map(group).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_counts_once_and_survives() {
        let mut changes = AnaChanges::default();
        let see =
            |changes: &mut AnaChanges, states: [AnaState; 2]| changes.review((1..).zip(states));
        let (good, bad) = (AnaState::Optimized, AnaState::Inaccessible);
        assert!(!see(&mut changes, [good, bad]), "the first look");
        assert!(see(&mut changes, [bad, bad]) && !see(&mut changes, [bad, bad]));
        assert!(see(&mut changes, [good, good]));
        let namespaces = BTreeMap::from([(1, vec![1, 3]), (2, vec![2])]);
        let log = AnaLog::decode(&changes.page(&namespaces, false)).unwrap();
        assert_eq!(log.changes, 3);
        assert_eq!(log.groups.iter().map(|group| group.changes).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(log.groups[0].nsids, [1, 3]);
        let mut restored = AnaChanges::restore(&changes.save());
        assert_eq!(restored, changes);
        // A change between snapshot and restore counts as well.
        assert!(see(&mut restored, [good, bad]));
    }
}
