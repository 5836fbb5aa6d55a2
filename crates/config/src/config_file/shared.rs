//! NVM subsystems of a configuration file, and their controllers.

use crate::ana_state::{AnaGroups, AnaStateName};
use crate::controller_config::{ControllerConfig, DiskConfig, nsids as nsids_of};
use crate::limits;
use crate::subsystems::Membership;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;
use toml::Spanned;
use utoipa::ToSchema;

/// Table `[[subsystem]]`.
#[derive(Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct SubsystemTable {
    /// Name of the subsystem, for the key `subsystem` of controllers.
    pub(super) name: String,
    /// File that stores the reservations and ANA states.
    #[schema(value_type = String)]
    pub(super) state: PathBuf,
    /// Serial number of the subsystem. Default: derived from the path of `state`.
    pub(super) serial: Option<String>,
    /// Namespace identifiers of each ANA group, from group 1 on: `[[1, 2], [3]]`. Default: one
    /// group.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) ana_groups: Vec<Vec<u32>>,
}

/// ANA states for a controller: one state for all ANA groups, or one for each.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "`ana` is `optimized`, `non-optimized`, `inaccessible`, `persistent-loss` or \
                 `change`, or a list of these, one for each group"
)]
pub(super) enum AnaStates {
    All(AnaStateName),
    Each(Vec<AnaStateName>),
}

/// Subsystem, with the part of its configuration that was read so far.
struct Known {
    table: SubsystemTable,
    /// Number of the subsystem's controllers that were read so far.
    count: u16,
    /// Disks of the subsystem's controllers, and true if the controllers are read-only.
    disks: Option<(Vec<DiskConfig>, bool)>,
}

/// Subsystems by name.
pub(super) struct Subsystems(BTreeMap<String, Known>);

impl Subsystems {
    /// Collects the subsystems of these tables. Calls `refuse` for each
    /// error, with the key.
    pub(super) fn new(
        tables: Vec<Spanned<SubsystemTable>>,
        mut refuse: impl FnMut(&Spanned<SubsystemTable>, &str, String),
    ) -> Self {
        let mut all = BTreeMap::<String, Known>::new();
        for table in tables {
            let SubsystemTable { name, state, .. } = table.get_ref();
            if limits::check_name(name).is_err() {
                let why = format!("`{name}` is no name: it has 1 to 64 letters, digits, `-_.`");
                refuse(&table, "name", why);
            }
            if state.as_os_str().is_empty() {
                refuse(&table, "state", "the path of `state` is empty".to_owned());
            }
            if all.contains_key(name) {
                refuse(&table, "name", format!("the subsystem `{name}` is defined twice"));
            }
            if all.values().any(|other| other.table.state == *state) {
                let why = format!("the file {} is that of another subsystem, too", state.display());
                refuse(&table, "state", why);
            }
            let table = table.into_inner();
            let known = Known { table, count: 0, disks: None };
            all.insert(known.table.name.clone(), known);
        }
        Self(all)
    }

    /// Adds a controller to a subsystem and returns its membership.
    ///
    /// # Errors
    /// The controller does not fit the subsystem.
    pub(super) fn membership(
        &mut self,
        name: &str,
        controller: &ControllerConfig,
        ana: Option<AnaStates>,
    ) -> Result<Membership, String> {
        let known = self.0.get_mut(name).ok_or_else(|| {
            format!("there is no `[[subsystem]]` `{name}`: add one of this name, or correct it")
        })?;
        if controller.serial.is_some() {
            return Err(
                "the controller has the serial number of the subsystem: give it there".to_owned()
            );
        }
        let own = (controller.disks.clone(), controller.read_only);
        if *known.disks.get_or_insert_with(|| own.clone()) != own {
            let why = "the controllers of a subsystem have the same `disks`, and the same \
                       `read-only`: write the same for each";
            return Err(why.to_owned());
        }
        let nsids = known.table.ana_groups.clone();
        AnaGroups::check(&nsids, &nsids_of(&controller.disks).collect::<Vec<_>>())?;
        let mut groups = AnaGroups { nsids, states: Vec::new() };
        let states = match ana {
            None => Vec::new(),
            Some(AnaStates::All(state)) => vec![state; groups.count() as usize],
            Some(AnaStates::Each(states)) if states.len() > groups.count() as usize => {
                let count = groups.count();
                return Err(format!(
                    "`ana` has {} states, and there are {count} groups: the \
                                    subsystem's `ana-groups` defines them",
                    states.len()
                ));
            }
            Some(AnaStates::Each(states)) => states,
        };
        (1..).zip(states).for_each(|(group, state)| groups.set(group, state));
        known.count += 1;
        Ok(Membership {
            name: name.to_owned(),
            state: known.table.state.clone(),
            serial: known.table.serial.clone(),
            cntlid: known.count,
            ana: groups,
        })
    }
}
