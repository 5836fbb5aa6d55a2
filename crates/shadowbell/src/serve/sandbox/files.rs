//! The files that the process can reach by a path, and TCP: Landlock.
//!
//! Images are none of them: the keeper opens those. What is left is the directories of sockets, in
//! which these come and go; those of the files that it writes; and what the system says of this
//! process and of devices.

use super::asked::Asked;
use super::opening::{self, Allowed};
use crate::control::place;
use crate::disk_spec;
use crate::serve::server_config::ServerConfig;
use crate::serve::worker_link::WorkerLink;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus, NetPort,
    PathFd, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
    path_beneath_rules,
};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The newest that is made use of: files, TCP, and signals to others and sockets without a file.
const KNOWN: ABI = ABI::V6;

/// What it takes to have sockets in a directory.
fn sockets() -> BitFlags<AccessFs> {
    AccessFs::MakeSock | AccessFs::RemoveFile | AccessFs::ReadDir
}

/// What it takes to write files anew in a directory.
fn outputs() -> BitFlags<AccessFs> {
    let write = AccessFs::MakeReg | AccessFs::RemoveFile | AccessFs::WriteFile | AccessFs::Truncate;
    write | reading()
}

fn reading() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::ReadDir
}

/// What is read: what the system says of this process, of memory, and of block devices.
const READ: [&str; 3] = ["/proc/self", "/proc/sys/vm/max_map_count", "/sys/devices"];

/// All that is needed to give up the rest.
pub(super) struct Files {
    rules: RulesetCreated,
    known: Vec<PathFd>,
}

/// Has the keeper open images from now on, and finds what may be reached otherwise.
///
/// # Errors
/// It can not be, in a sentence.
pub(super) fn prepare(
    asked: &Asked,
    config: &ServerConfig,
    link: Option<&WorkerLink>,
) -> Result<Files, String> {
    let Some(link) = link else {
        return Err("there is no keeper, which would open them (`--keeper`)".to_owned());
    };
    let known = READ.iter().filter_map(|path| PathFd::new(path).ok()).collect();
    let rules = rules(asked, config).map_err(|error| format!("Landlock: {error}"))?;
    opening::begin(link, &allowed(asked, config))?;
    Ok(Files { rules, known })
}

/// The images that the process may have.
fn allowed(asked: &Asked, config: &ServerConfig) -> Allowed {
    let disks = config.controllers.iter().flat_map(|served| &served.controller.disks);
    let paths = disks.filter_map(|disk| disk_spec::file(&disk.disk));
    Allowed {
        files: paths.collect(),
        directories: asked.allow.clone(),
        config: asked.config.clone(),
    }
}

/// The rules, if the system has any.
fn rules(asked: &Asked, config: &ServerConfig) -> Result<RulesetCreated, RulesetError> {
    // Whether there is Landlock at all; what is newer than the first of it may be missing.
    let first = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    first.handle_access(AccessFs::from_all(ABI::V1))?.create()?;
    let rules = Ruleset::default()
        .handle_access(AccessFs::from_all(KNOWN))?
        .handle_access(AccessNet::from_all(KNOWN))?
        .scope(Scope::from_all(KNOWN))?
        .create()?
        .add_rules(path_beneath_rules(READ, reading()))?
        .add_rules(path_beneath_rules(socket_directories(asked, config), sockets()))?
        .add_rules(path_beneath_rules(written(config), outputs()))?;
    let control = config.control.path.is_none().then(place::settle).flatten();
    // Each server has a directory in there.
    let control = control.filter(|directory| make(directory));
    let of_control = sockets() | AccessFs::MakeDir | AccessFs::RemoveDir;
    let rules = rules.add_rules(path_beneath_rules(control, of_control))?;
    match config.metrics {
        Some(address) => rules.add_rule(NetPort::new(address.port(), AccessNet::BindTcp)),
        None => Ok(rules),
    }
}

fn make(directory: &Path) -> bool {
    DirBuilder::new().recursive(true).mode(0o755).create(directory).is_ok()
}

/// Where sockets come and go.
fn socket_directories(asked: &Asked, config: &ServerConfig) -> Vec<PathBuf> {
    let controllers = config.controllers.iter().map(|served| &served.socket);
    let others = config.stats_socket.iter().chain(&config.control.path);
    let of_sockets = controllers.chain(others).map(|socket| {
        // One for SPDK is in that directory.
        if socket.is_dir() { socket.clone() } else { directory_of(socket) }
    });
    let mut all: Vec<_> = of_sockets.chain(asked.allow.iter().cloned()).collect();
    all.sort();
    all.dedup();
    all
}

/// What is written: files by another that takes their place, and what is no file by itself.
fn written(config: &ServerConfig) -> Vec<PathBuf> {
    let trace = config.trace.as_ref().map(|(path, _)| path);
    let files = config.stats_json.iter().chain(trace);
    let files = files.flat_map(|path| [directory_of(path), path.clone()]);
    // In a build for tests: where it says when it is to die.
    files.chain(shadowbell_state::abort_directory()).collect()
}

fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

impl Files {
    /// Gives up the rest.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn restrict(self) -> Result<Held, RulesetError> {
        let status = self.rules.restrict_self()?;
        let held = match status.landlock {
            LandlockStatus::Available { effective_abi, .. } if effective_abi >= ABI::V6 => {
                "files, TCP, signals to others"
            }
            LandlockStatus::Available { effective_abi, .. } if effective_abi >= ABI::V4 => {
                "files, TCP"
            }
            _ => "files",
        };
        Ok(Held { held, _known: self.known })
    }
}

/// What is given up. To be kept for as long as the process lives.
pub(super) struct Held {
    pub(super) held: &'static str,
    /// What the rules for /proc are for: the system makes it anew when nobody has it, and the rules
    /// would not be for that.
    _known: Vec<PathFd>,
}
