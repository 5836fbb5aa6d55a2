//! Controller configuration of the user, and its conversion to a configuration for the controller
//! crate.

use crate::disk_spec::{self, DiskSpecError};
use crate::disk_uuids;
pub use crate::doorbell_mode::OfferedDoorbells;
use crate::pool::{self, PoolSpec};
use crate::subsystems::{self, Membership};
use crate::uuid_text::parse_uuid;
use serde::{Deserialize, Serialize};
use shadowbell_controller::NamespacePool;
use shadowbell_controller::config::{Config, ConfigError, NamespaceConfig, uuid_from};
use shadowbell_disk::Disk;
use shadowbell_process::exit;
use shadowbell_process::process_env;
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

/// Controller configuration of the user. `None` means a default that depends on other settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ControllerConfig {
    /// Disks in the order of the namespaces, in the syntax of `shadowbell_storage::disk_open`.
    pub disks: Vec<DiskConfig>,
    /// Serial number.
    pub serial: Option<String>,
    /// Model number.
    pub model: Option<String>,
    /// Maximum number of I/O queue pairs.
    pub queues: Option<u16>,
    /// Maximum queue size in entries.
    pub queue_entries: Option<u32>,
    /// Maximum transfer size of a command in bytes.
    pub max_transfer: Option<u64>,
    /// Doorbell mechanism.
    pub doorbells: OfferedDoorbells,
    /// True to refuse writes to all namespaces, even if their disks are writable.
    pub read_only: bool,
    /// Pool for namespaces that the host creates. Attached namespaces of the pool are in `disks`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<PoolSpec>,
    /// Subsystem of several controllers with the same namespaces.
    #[serde(default)]
    pub subsystem: Option<Membership>,
}

/// Namespace as requested by the user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskConfig {
    /// Id of a named disk. `None` for a disk that the controller specifies itself: its id is
    /// derived from the controller and the NSID.
    #[serde(default)]
    pub id: Option<String>,
    /// Disk, in the syntax of `shadowbell_storage::disk_open::open`.
    pub disk: String,
    /// UUID of the namespace. With `None`, a stable UUID is derived from the
    /// name of the disk.
    pub uuid: Option<[u8; 16]>,
    /// NSID; `None` means the NSID of the previous disk plus one.
    #[serde(default)]
    pub nsid: Option<u32>,
    /// True to permit another writer of the disk, if that writer permits this one too.
    #[serde(default)]
    pub share: bool,
}

impl DiskConfig {
    /// Namespace of a disk. The options of the disk may contain the UUID.
    #[must_use]
    pub fn of(disk: impl Into<String>) -> Self {
        Self::with(disk.into(), None, None)
    }

    /// Namespace of a disk, with a UUID and an NSID. The argument `uuid` overrides the option
    /// `uuid=` of the disk.
    #[must_use]
    pub fn with(disk: String, uuid: Option<[u8; 16]>, nsid: Option<u32>) -> Self {
        let (rest, option) = disk_spec::take_option(&disk, "uuid");
        // An invalid UUID stays among the options and is refused when the disk is opened.
        let (disk, uuid) = match option.and_then(|text| parse_uuid(&text)) {
            Some(option) => (rest, uuid.or(Some(option))),
            None => (disk, uuid),
        };
        Self { id: None, disk, uuid, nsid, share: false }
    }

    /// Name of the disk as a resource that only one namespace can use at a time: the specification
    /// without options, and with an absolute path for a file or device.
    #[must_use]
    pub fn exclusive_resources(&self) -> String {
        let disk = disk_spec::with_absolute_paths(&self.disk);
        disk.split('?').next().unwrap_or_default().to_owned()
    }
}

/// NSIDs of these disks.
pub fn nsids(disks: &[DiskConfig]) -> impl Iterator<Item = u32> {
    disks.iter().scan(0, |last: &mut u32, disk| {
        *last = disk.nsid.unwrap_or(last.saturating_add(1));
        Some(*last)
    })
}

/// Error in the configuration of a controller.
#[derive(Debug, thiserror::Error)]
pub enum ConfigureError {
    /// A disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] DiskSpecError),
    /// Contradiction between the disk's `read-only=off` and the controller's read-only option.
    #[error(
        "the disk `{0}` has `read-only=off`, but the controller is read-only: leave out one of these \
         options"
    )]
    Writable(String),
    /// The controller cannot join its subsystem.
    #[error("{0}")]
    Subsystem(String),
    /// Maximum transfer size that MDTS cannot express.
    #[error("the maximum transfer size is a power of two from 1 MiB to 16 MiB, not {0} bytes")]
    MaxTransfer(u64),
    /// The index of the pool cannot be read.
    #[error("cannot read the index of the pool: {0}")]
    Pool(std::io::Error),
    /// Invalid configuration of the controller.
    #[error(transparent)]
    Controller(#[from] ConfigError),
}

impl ConfigureError {
    /// Converts to an error for `main`, with exit status [`exit::BAD_INPUT`] unless a disk's error
    /// has another one.
    #[must_use]
    pub fn into_error(self) -> anyhow::Error {
        match self {
            Self::Disk(error) => error.into_error(),
            error => exit::bad_input(error),
        }
    }
}

impl ControllerConfig {
    /// Controller with these disks and defaults for all other settings.
    #[cfg(test)]
    pub fn of(disks: &[&str]) -> Self {
        let disks = disks.iter().map(|disk| DiskConfig::of(*disk));
        Self { disks: disks.collect(), ..Self::default() }
    }

    /// Opens the disks like [`open_by`](Self::open_by). Supports only files and disks in memory,
    /// without layers.
    #[cfg(test)]
    pub fn open(&self, location: &str) -> Result<Config, ConfigureError> {
        self.open_by(location, |_, spec| Ok(shadowbell_disk_file::open(spec)?))
    }

    /// Opens and locks the disks, and validates the configuration. Calls `open` with the index and
    /// the specification of each disk. Creates no files.
    ///
    /// `location` is a text that identifies this controller, for example the path of its socket.
    /// The default serial number is derived from that text.
    ///
    /// # Errors
    /// [`ConfigureError`], as a sentence for the user.
    pub fn open_by(
        &self,
        location: &str,
        mut open: impl FnMut(usize, &str) -> Result<Arc<dyn Disk>, DiskSpecError>,
    ) -> Result<Config, ConfigureError> {
        let disks = self.disks.iter().enumerate();
        let disks = disks.map(|(index, config)| {
            open_disk(&config.disk, self.read_only, |spec| match &self.subsystem {
                Some(membership) => subsystems::disk(membership, index, spec, || open(index, spec)),
                None => open(index, spec),
            })
        });
        self.configure(location, disks.collect::<Result<_, _>>()?)
    }

    /// True if both configurations are equal except for their disks.
    #[must_use]
    pub fn is_same_but_disks(&self, other: &Self) -> bool {
        let bare = |config: &Self| {
            let mut bare = Self { disks: Vec::new(), ..config.clone() };
            if let Some(membership) = &mut bare.subsystem {
                membership.state = process_env::absolute(&membership.state);
            }
            bare
        };
        bare(self) == bare(other)
    }

    /// True if both configurations are equal. An unset UUID equals any UUID.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        let is_same_disk = |(one, other): (&DiskConfig, &DiskConfig)| {
            disk_spec::with_absolute_paths(&one.disk) == disk_spec::with_absolute_paths(&other.disk)
                && (&one.id, one.share) == (&other.id, other.share)
                && one.uuid.zip(other.uuid).is_none_or(|(one, other)| one == other)
        };
        self.is_same_but_disks(other)
            && nsids(&self.disks).eq(nsids(&other.disks))
            && self.disks.iter().zip(&other.disks).all(is_same_disk)
    }

    /// UUID for a disk that is added to the controller with this serial number. It differs from the
    /// UUIDs in `taken`.
    #[must_use]
    pub fn uuid_of(serial: &str, disk: &dyn Disk, taken: HashSet<[u8; 16]>) -> [u8; 16] {
        Uuids { serial, taken }.of(disk, None)
    }

    /// Validates the configuration with disks that are open already. Only the UUIDs and NSIDs of
    /// `self.disks` are used.
    ///
    /// # Errors
    /// As [`open_by`](Self::open_by).
    pub fn configure(
        &self,
        location: &str,
        disks: Vec<Arc<dyn Disk>>,
    ) -> Result<Config, ConfigureError> {
        let default = Config::default();
        let mdts = match self.max_transfer {
            None => default.mdts,
            Some(bytes) => mdts(bytes).ok_or(ConfigureError::MaxTransfer(bytes))?,
        };
        // All controllers of a subsystem have the same serial number.
        let shared = self.subsystem.as_ref().map(|membership| {
            let own = || serial_from(&process_env::absolute(&membership.state).to_string_lossy());
            membership.serial.clone().unwrap_or_else(own)
        });
        let own = || self.serial.clone().unwrap_or_else(|| serial_from(location));
        let serial = shared.unwrap_or_else(own);
        let member = self.subsystem.as_ref().map(subsystems::join).transpose();
        let member = member.map_err(|error| ConfigureError::Subsystem(format!("{error:#}")))?;
        let mut uuids = Uuids::new(&serial);
        let given = self.disks.iter().map(|config| config.uuid).chain(std::iter::repeat(None));
        let namespaces = disks
            .into_iter()
            .zip(given)
            .map(|(disk, given)| NamespaceConfig { uuid: uuids.of(&*disk, given), disk })
            .collect();
        let is_numbered = self.disks.iter().any(|disk| disk.nsid.is_some());
        let pool = self.pool.as_ref().and_then(pool::opened);
        if let Some(pool) = &pool {
            pool.refresh().map_err(ConfigureError::Pool)?;
        }
        let config = Config {
            pool: pool.map(|pool| pool as Arc<dyn NamespacePool>),
            nsids: if is_numbered { nsids(&self.disks).collect() } else { Vec::new() },
            serial,
            model: self.model.clone().unwrap_or(default.model),
            namespaces,
            io_queues: self.queues.unwrap_or(default.io_queues),
            max_queue_entries: self.queue_entries.unwrap_or(default.max_queue_entries),
            mdts,
            // Shadow doorbells would not help with mapped doorbells. A write to a mapped doorbell
            // does not notify the controller either, so the I/O thread polls with short sleeps in
            // any case.
            shadow_doorbells: self.doorbells == OfferedDoorbells::Shadow,
            member,
            ..Config::default()
        };
        config.validate()?;
        Ok(config)
    }
}

/// Generator of the UUIDs of a controller's namespaces.
struct Uuids<'a> {
    serial: &'a str,
    taken: HashSet<[u8; 16]>,
}

impl<'a> Uuids<'a> {
    fn new(serial: &'a str) -> Self {
        Self { serial, taken: HashSet::new() }
    }

    /// UUID of a disk: `given`, or the one in the [state directory](disk_uuids), or a UUID that is
    /// derived from the name of the disk; for a disk in memory, also from the serial number.
    fn of(&mut self, disk: &dyn Disk, given: Option<[u8; 16]>) -> [u8; 16] {
        let uuid = given.unwrap_or_else(|| {
            let name = identity(disk);
            // The name of a memory disk is not unique, so the serial number is added.
            let is_memory = name.starts_with("mem:") || name.starts_with("null:");
            let stored = if is_memory { None } else { disk_uuids::uuid_of(&name) };
            if let Some(stored) = stored.filter(|uuid| !self.taken.contains(uuid)) {
                return stored;
            }
            let name = if is_memory { format!("{}/{name}", self.serial) } else { name };
            // Several disks in memory may have the same name. Their position then distinguishes
            // them.
            (0u32..)
                .map(|n| match n {
                    0 => uuid_from(&name),
                    n => uuid_from(&format!("{name}/{n}")),
                })
                .find(|uuid| !self.taken.contains(uuid))
                .unwrap_or_default()
        });
        self.taken.insert(uuid);
        uuid
    }
}

/// Validates the maximum transfer size of a controller.
pub(crate) fn check_max_transfer(bytes: u64) -> Result<(), String> {
    let outcome = mdts(bytes).ok_or(ConfigureError::MaxTransfer(bytes));
    outcome.map(drop).map_err(|error| error.to_string())
}

/// Validates the serial number of a controller.
pub(crate) fn check_serial(serial: &str) -> Result<(), String> {
    check_text(&Config { serial: serial.to_owned(), ..Config::default() })
}

/// Validates the model number of a controller.
pub(crate) fn check_model(model: &str) -> Result<(), String> {
    check_text(&Config { model: model.to_owned(), ..Config::default() })
}

/// Reports an invalid text field of a configuration. Other errors are ignored, because the
/// configuration has no namespaces yet.
fn check_text(config: &Config) -> Result<(), String> {
    match config.validate() {
        Err(error @ ConfigError::Text { .. }) => Err(error.to_string()),
        _ => Ok(()),
    }
}

/// MDTS for a maximum transfer size in bytes. `None` unless the size is 4096 bytes times a
/// supported power of two.
fn mdts(bytes: u64) -> Option<u8> {
    let mdts = bytes.checked_ilog2()?.checked_sub(12)? as u8;
    let possible =
        shadowbell_controller::config::MDTS_RANGE.contains(&mdts) && bytes.is_power_of_two();
    possible.then_some(mdts)
}

/// Opens a disk, with `read-only=on` for a read-only controller.
///
/// # Errors
/// [`ConfigureError`].
pub fn open_disk(
    spec: &str,
    read_only: bool,
    open: impl FnOnce(&str) -> Result<Arc<dyn Disk>, DiskSpecError>,
) -> Result<Arc<dyn Disk>, ConfigureError> {
    let asked = spec.split_once('?').is_some_and(|(_, options)| {
        options.split('&').any(|option| option.starts_with("read-only="))
    });
    let disk = if read_only && !asked {
        open(&disk_spec::with_option(spec, "read-only", "on"))?
    } else {
        open(spec)?
    };
    if read_only && !disk.info().read_only {
        return Err(ConfigureError::Writable(spec.to_owned()));
    }
    Ok(disk)
}

/// Identity of a disk. For a file it is the canonical path, so that it does not depend on the
/// working directory.
fn identity(disk: &dyn Disk) -> String {
    let name = disk.name();
    match std::fs::canonicalize(process_env::absolute(Path::new(&name))) {
        Ok(path) => path.display().to_string(),
        Err(_) => name,
    }
}

/// Serial number derived from a location. The same location always has the same number, and
/// different locations have different numbers.
fn serial_from(location: &str) -> String {
    // The last seven bytes of a UUID have no fixed bits. Their 14 hexadecimal digits, after two
    // letters, fit the serial number field.
    let uuid = uuid_from(location);
    let digits: String = uuid.iter().skip(9).take(7).map(|byte| format!("{byte:02X}")).collect();
    format!("SB{digits}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_make_a_controller() {
        let config =
            ControllerConfig::of(&["mem:1MiB", "mem:1MiB", "null:1GiB"]).open("a").unwrap();
        assert_eq!(config.namespaces.len(), 3);
        assert!(config.shadow_doorbells);
        assert!(config.serial.starts_with("SB") && config.serial.len() == 16);
        let again = ControllerConfig::of(&["mem:1MiB", "mem:1MiB", "null:1GiB"]).open("a").unwrap();
        let uuids = |config: &Config| config.namespaces.iter().map(|n| n.uuid).collect::<Vec<_>>();
        assert_eq!(uuids(&config), uuids(&again));
        let other = ControllerConfig::of(&["mem:1MiB"]).open("b").unwrap();
        assert_ne!(other.serial, config.serial);
        assert!(!uuids(&config).contains(&other.namespaces[0].uuid));
    }

    #[test]
    fn a_uuid_can_be_an_option_of_the_disk() {
        const UUID: &str = "0190163d-8694-739b-aea5-966c26f8ad91";
        let disk = DiskConfig::of(format!("mem:1MiB?uuid={UUID}&block-size=4096"));
        assert_eq!((&disk.disk[..], disk.uuid), ("mem:1MiB?block-size=4096", parse_uuid(UUID)));
        let config = ControllerConfig { disks: vec![disk], ..ControllerConfig::default() };
        // The UUID does not depend on the location of the controller.
        for location in ["a", "b"] {
            let namespaces = config.open(location).unwrap().namespaces;
            assert_eq!(Some(namespaces[0].uuid), parse_uuid(UUID));
        }
        // The argument overrides the option. An invalid option stays in the specification; opening
        // the disk refuses it.
        let other = parse_uuid(&UUID.replace('9', "8"));
        assert_eq!(DiskConfig::with(format!("x?uuid={UUID}"), other, Some(3)).uuid, other);
        assert_eq!(DiskConfig::of("x?uuid=7").disk, "x?uuid=7");
    }

    /// The UUID of a file does not depend on the controller's socket or serial number.
    #[test]
    fn the_uuid_belongs_to_the_disk() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("disk.img");
        std::fs::write(&image, [0; 4096]).unwrap();
        let uuids = |location: &str, serial: Option<&str>| {
            let config = ControllerConfig::of(&[image.to_str().unwrap(), "mem:1MiB"]);
            let config = ControllerConfig { serial: serial.map(str::to_owned), ..config };
            let config = config.open(location).unwrap();
            (config.namespaces[0].uuid, config.namespaces[1].uuid)
        };
        let (one, other) = (uuids("x", None), uuids("y", Some("OTHER")));
        assert_eq!(one.0, other.0);
        assert_ne!(one.1, other.1);
    }

    #[test]
    fn a_uuid_does_not_depend_on_the_path_of_the_file() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("disk.img");
        std::fs::write(&image, [0; 4096]).unwrap();
        let uuid = |path: std::path::PathBuf| {
            let config = ControllerConfig::of(&[path.to_str().unwrap()]);
            config.open("x").unwrap().namespaces[0].uuid
        };
        assert_eq!(uuid(image), uuid(directory.path().join("./disk.img")));
    }

    #[test]
    fn read_only_applies_to_all_namespaces() {
        let asked =
            |disk: &str| ControllerConfig { read_only: true, ..ControllerConfig::of(&[disk]) };
        for disk in ["mem:1MiB", "mem:1MiB?block-size=4096", "mem:1MiB?read-only=on"] {
            let config = asked(disk).open("x").unwrap();
            assert!(config.namespaces[0].disk.info().read_only, "{disk}");
        }
        let error = asked("mem:1MiB?read-only=off").open("x").unwrap_err();
        assert!(error.to_string().contains("leave out one of these"), "{error}");
        assert_eq!(exit::status(&error.into_error()), exit::BAD_INPUT);
    }

    #[test]
    fn max_transfer_is_a_power_of_two() {
        assert_eq!(mdts(1 << 20), Some(8));
        assert_eq!(mdts(16 << 20), Some(12));
        for bytes in [0, 1, 4096, 512 << 10, 3 << 20, 32 << 20, u64::MAX] {
            assert_eq!(mdts(bytes), None, "{bytes}");
        }
    }

    #[test]
    fn configuration_errors_exit_with_bad_input() {
        let refused = |config: ControllerConfig| config.open("x").unwrap_err();
        let missing = refused(ControllerConfig::of(&["/nonexistent/disk.img"])).into_error();
        assert_eq!(exit::status(&missing), exit::BAD_INPUT, "{missing}");
        assert_eq!(exit::status(&exit::for_service(missing)), exit::FAILED);
        let mut config = ControllerConfig::of(&["mem:1MiB"]);
        config.serial = Some("x".repeat(21));
        assert!(refused(config).to_string().contains("serial number"));
    }
}
