//! Subsystems of several controllers, and what these share: their file and their disks.
//!
//! They are of the process, like the groups of limits. Their files are opened at its start, before
//! it enters its sandbox, and so there is no other time at which one can come.

use crate::ana_word::AnaGroups;
use crate::disk_spec::DiskSpecError;
use anyhow::{Context, anyhow};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use shadowbell_backend::Disk;
use shadowbell_controller::{JoinError, Member, Subsystem};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

/// A controller's place in a subsystem, as a person asked for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    /// The subsystem's name.
    pub(crate) name: String,
    /// Where it keeps what has been reserved.
    pub(crate) state: PathBuf,
    /// The serial number of all of its controllers.
    pub(crate) serial: Option<String>,
    /// The controller's identifier.
    pub(crate) cntlid: u16,
    /// The groups of the namespaces, and their states for the controller.
    #[serde(default)]
    pub(crate) ana: AnaGroups,
}

/// A subsystem of this process.
struct Open {
    /// Until it is made of it: it has a thread, and there is none before the sandbox is entered.
    file: Option<File>,
    subsystem: Option<Subsystem>,
    /// By their place among those of a controller, and by what they are asked for as: each is
    /// opened once.
    disks: HashMap<(usize, String), Weak<dyn Disk>>,
}

static OPEN: Mutex<Option<HashMap<String, Open>>> = Mutex::new(None);

/// Opens the files of these, each once.
///
/// # Errors
/// One can not be opened.
pub(crate) fn open<'a>(places: impl Iterator<Item = &'a Place>) -> anyhow::Result<()> {
    let mut open = OPEN.lock();
    let open = open.get_or_insert_default();
    for Place { name, state, .. } in places {
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

/// The place of a controller.
///
/// # Errors
/// There is no such subsystem, or somebody has the place.
pub(crate) fn join(place: &Place) -> anyhow::Result<Arc<Member>> {
    let mut open = OPEN.lock();
    let found = open.as_mut().and_then(|open| open.get_mut(&place.name)).ok_or_else(|| {
        anyhow!(
            "the subsystem {} is not one that the server was started with: start it again",
            place.name
        )
    })?;
    if let Some(file) = found.file.take() {
        let origin = || format!("the subsystem {}: {}", place.name, place.state.display());
        found.subsystem = Some(Subsystem::new(Some(file)).with_context(origin)?);
    }
    let subsystem = found.subsystem.as_ref().ok_or_else(|| anyhow!("it could not be made"))?;
    let joined = subsystem.join(Some(place.cntlid));
    let joined =
        joined.map_err(|error: JoinError| anyhow!("the subsystem {}: {error}", place.name));
    Ok(joined?.with_ana(place.ana.by_nsid(), place.ana.by_group()))
}

/// The disk that another controller of the subsystem has at this place, or that `open` opens.
///
/// # Errors
/// Those of `open`.
pub(crate) fn disk(
    place: &Place,
    index: usize,
    spec: &str,
    open: impl FnOnce() -> Result<Arc<dyn Disk>, DiskSpecError>,
) -> Result<Arc<dyn Disk>, DiskSpecError> {
    let key = (index, spec.to_owned());
    let known = || {
        let all = OPEN.lock();
        all.as_ref()?.get(&place.name)?.disks.get(&key)?.upgrade()
    };
    if let Some(disk) = known() {
        return Ok(disk);
    }
    let disk = open()?;
    if let Some(its) = OPEN.lock().as_mut().and_then(|all| all.get_mut(&place.name)) {
        its.disks.insert(key, Arc::downgrade(&disk));
    }
    Ok(disk)
}
