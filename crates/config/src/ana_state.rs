//! ANA states in options, configuration and JSON, and the ANA groups of a subsystem.

use serde::{Deserialize, Serialize};
use shadowbell_controller::MAX_ANA_GROUPS;
use shadowbell_spec::log::AnaState;
use std::fmt;
use utoipa::ToSchema;

/// ANA state of a group for a controller.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize, ToSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum AnaStateName {
    /// Optimized path: preferred by hosts
    #[default]
    Optimized,
    /// Working path that hosts use only if no optimized one is available
    NonOptimized,
    /// Path that is unavailable at present
    Inaccessible,
    /// Path that is permanently unavailable
    PersistentLoss,
    /// Transition to another state, which follows within a minute
    Change,
}

impl From<AnaStateName> for AnaState {
    fn from(name: AnaStateName) -> Self {
        match name {
            AnaStateName::Optimized => Self::Optimized,
            AnaStateName::NonOptimized => Self::NonOptimized,
            AnaStateName::Inaccessible => Self::Inaccessible,
            AnaStateName::PersistentLoss => Self::PersistentLoss,
            AnaStateName::Change => Self::Change,
        }
    }
}

impl From<AnaState> for AnaStateName {
    fn from(state: AnaState) -> Self {
        match state {
            AnaState::Optimized => Self::Optimized,
            AnaState::NonOptimized => Self::NonOptimized,
            AnaState::Inaccessible => Self::Inaccessible,
            AnaState::PersistentLoss => Self::PersistentLoss,
            AnaState::Change => Self::Change,
        }
    }
}

impl fmt::Display for AnaStateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(AnaState::from(*self).name())
    }
}

/// ANA groups of a subsystem's namespaces, with their states for one of its controllers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnaGroups {
    /// NSIDs of groups 1, 2 and so on. Namespaces that are not listed belong to group 1.
    #[serde(default)]
    pub nsids: Vec<Vec<u32>>,
    /// States of groups 1, 2 and so on; missing ones are optimized.
    #[serde(default)]
    pub states: Vec<AnaStateName>,
}

impl AnaGroups {
    /// Validates groups of the namespaces `all`. The error is a sentence.
    pub fn check(nsids: &[Vec<u32>], all: &[u32]) -> Result<(), String> {
        if nsids.len() > MAX_ANA_GROUPS as usize {
            return Err(format!("`ana-groups` has {MAX_ANA_GROUPS} groups at most"));
        }
        let mut seen = Vec::new();
        for nsid in nsids.iter().flatten() {
            if seen.contains(nsid) {
                return Err(format!("`ana-groups` has namespace {nsid} twice"));
            }
            if !all.contains(nsid) {
                return Err(format!("`ana-groups` has namespace {nsid}, which does not exist"));
            }
            seen.push(*nsid);
        }
        Ok(())
    }

    /// Number of groups, at least 1.
    pub fn count(&self) -> u32 {
        self.nsids.len().max(1) as u32
    }

    /// State of the group with number `group`. Groups are counted from 1.
    pub fn state(&self, group: u32) -> AnaStateName {
        let at = (group as usize).checked_sub(1);
        at.and_then(|at| self.states.get(at)).copied().unwrap_or_default()
    }

    /// Sets the state of a group. Optimized states at the end of the list are not stored.
    pub fn set(&mut self, group: u32, state: AnaStateName) {
        let Some(at) = (group as usize).checked_sub(1) else { return };
        let room = self.states.len().max(at + 1);
        self.states.resize(room, AnaStateName::default());
        if let Some(its) = self.states.get_mut(at) {
            *its = state;
        }
        while self.states.last() == Some(&AnaStateName::default()) {
            self.states.pop();
        }
    }

    /// Pairs of NSID and group for all listed namespaces.
    pub fn by_nsid(&self) -> impl Iterator<Item = (u32, u32)> {
        let groups = (1..).zip(&self.nsids);
        groups.flat_map(|(group, nsids)| nsids.iter().map(move |nsid| (*nsid, group)))
    }

    /// Pairs of group and state for all stored states.
    pub fn by_group(&self) -> impl Iterator<Item = (u32, AnaState)> {
        (1..).zip(&self.states).map(|(group, state)| (group, (*state).into()))
    }

    /// States of all groups as text: `optimized, inaccessible`. `None` if all are optimized.
    pub fn text(&self) -> Option<String> {
        let states = (1..=self.count()).map(|group| self.state(group).to_string());
        let is_plain = self.by_group().all(|(_, state)| state == AnaState::Optimized);
        (!is_plain).then(|| states.collect::<Vec<_>>().join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_after_the_last_unoptimized_one_are_not_stored() {
        let mut groups = AnaGroups { nsids: vec![vec![2], vec![1, 3]], states: Vec::new() };
        assert_eq!((groups.count(), groups.text()), (2, None));
        groups.set(2, AnaStateName::Change);
        assert_eq!(groups.states, [AnaStateName::Optimized, AnaStateName::Change]);
        assert_eq!(groups.text().unwrap(), "optimized, change");
        assert_eq!(groups.by_nsid().collect::<Vec<_>>(), [(2, 1), (1, 2), (3, 2)]);
        groups.set(2, AnaStateName::Optimized);
        assert!(groups.states.is_empty());
        assert_eq!(AnaGroups::default().count(), 1);
    }

    #[test]
    fn invalid_ana_groups_are_refused() {
        let check = |nsids: &[&[u32]]| {
            let nsids = nsids.iter().map(|group| group.to_vec()).collect::<Vec<_>>();
            AnaGroups::check(&nsids, &[1, 2])
        };
        assert_eq!(check(&[&[1], &[], &[2]]), Ok(()));
        assert!(check(&[&[1], &[1]]).unwrap_err().contains("twice"));
        assert!(check(&[&[3]]).unwrap_err().contains("which does not exist"));
        assert!(check(&[&[] as &[u32]; 17]).unwrap_err().contains("16"));
    }
}
