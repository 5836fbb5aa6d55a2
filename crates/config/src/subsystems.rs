//! NVM subsystems of several controllers, with their reservation files and shared disks.
//!
//! Subsystems exist once per process. Their files are opened at start-up, before the process enters
//! its sandbox, so no subsystem can be added later.

use crate::ana_state::AnaGroups;
use crate::disk_spec::DiskSpecError;
use anyhow::{Context, anyhow};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shadowbell_controller::{JoinError, Member, Subsystem};
use shadowbell_disk::Disk;
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

/// Membership of a controller in a subsystem, as requested by the user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Membership {
    /// Name of the subsystem.
    pub name: String,
    /// File for persistent reservations.
    pub state: PathBuf,
    /// Serial number of all controllers of the subsystem.
    pub serial: Option<String>,
    /// Controller identifier (CNTLID).
    pub cntlid: u16,
    /// ANA groups of the namespaces, and their states for the controller.
    #[serde(default)]
    pub ana: AnaGroups,
}

/// Open subsystem of this process.
struct Open {
    /// File of the subsystem, until the subsystem is created from it. The creation starts a thread,
    /// and a process cannot enter its sandbox with several threads. So the subsystem is created
    /// afterwards.
    file: Option<File>,
    subsystem: Option<Subsystem>,
    /// Open disks, by their index in a controller and their specification. The controllers of the
    /// subsystem share these disks.
    disks: HashMap<(usize, String), Weak<dyn Disk>>,
}

static OPEN: Mutex<Option<HashMap<String, Open>>> = Mutex::new(None);

/// Opens the files of these subsystems, each once.
///
/// # Errors
/// A file cannot be opened.
pub fn open<'a>(memberships: impl Iterator<Item = &'a Membership>) -> anyhow::Result<()> {
    let mut open = OPEN.lock();
    let open = open.get_or_insert_default();
    for Membership { name, state, .. } in memberships {
        if open.contains_key(name) {
            continue;
        }
        let mut options = File::options();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let origin = || format!("the subsystem {name}: {}", state.display());
        let file = Some(options.open(state).with_context(origin)?);
        open.insert(name.clone(), Open { file, subsystem: None, disks: HashMap::new() });
    }
    Ok(())
}

/// Adds a controller to its subsystem.
///
/// # Errors
/// The subsystem does not exist, or the controller identifier is in use.
pub fn join(membership: &Membership) -> anyhow::Result<Arc<Member>> {
    let mut open = OPEN.lock();
    let found = open.as_mut().and_then(|open| open.get_mut(&membership.name)).ok_or_else(|| {
        anyhow!("the subsystem {} was not opened at start-up: restart the server", membership.name)
    })?;
    if let Some(file) = found.file.take() {
        let origin =
            || format!("the subsystem {}: {}", membership.name, membership.state.display());
        found.subsystem = Some(Subsystem::new(Some(file)).with_context(origin)?);
    }
    let subsystem = found.subsystem.as_ref().ok_or_else(|| anyhow!("it could not be created"))?;
    let joined = subsystem.join(Some(membership.cntlid));
    let joined =
        joined.map_err(|error: JoinError| anyhow!("the subsystem {}: {error}", membership.name));
    Ok(joined?.with_ana(membership.ana.by_nsid(), membership.ana.by_group()))
}

/// Returns the disk if another controller of the subsystem has opened it. Otherwise opens the disk
/// by `open`.
///
/// # Errors
/// Errors of `open`.
pub fn disk(
    membership: &Membership,
    index: usize,
    spec: &str,
    open: impl FnOnce() -> Result<Arc<dyn Disk>, DiskSpecError>,
) -> Result<Arc<dyn Disk>, DiskSpecError> {
    let key = (index, spec.to_owned());
    let known = || {
        let all = OPEN.lock();
        all.as_ref()?.get(&membership.name)?.disks.get(&key)?.upgrade()
    };
    if let Some(disk) = known() {
        return Ok(disk);
    }
    let disk = open()?;
    if let Some(its) = OPEN.lock().as_mut().and_then(|all| all.get_mut(&membership.name)) {
        its.disks.insert(key, Arc::downgrade(&disk));
    }
    Ok(disk)
}
