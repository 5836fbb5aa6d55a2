//! Landlock rules: file access by path, TCP, and signals.
//!
//! Images need no rule, since the supervisor opens them. The rules permit directories in which
//! sockets are created and removed, output files, and parts of procfs and sysfs.

use super::asked::Asked;
use super::open_broker::{self, Allowed};
use crate::path_broker;
use crate::worker_link::WorkerLink;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus, NetPort,
    PathFd, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
    path_beneath_rules,
};
use shadowbell_config::disk_spec;
use shadowbell_config::export_config::ExportConfig;
use shadowbell_config::server_config::ServerConfig;
use shadowbell_config::socket_path;
use shadowbell_process::process_env;
use shadowbell_supervisor::path_protocol::{PathPermissions, bytes_of};
use shadowbell_supervisor::protocol::{self, to_supervisor};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use tracing::warn;

/// Newest Landlock ABI in use: files, TCP, signals to other processes and abstract sockets.
const KNOWN: ABI = ABI::V6;

/// Access that creating and removing sockets in a directory requires.
fn sockets() -> BitFlags<AccessFs> {
    AccessFs::MakeSock | AccessFs::RemoveFile | AccessFs::ReadDir
}

/// Access that replacing files in a directory requires.
fn outputs() -> BitFlags<AccessFs> {
    let write = AccessFs::MakeReg | AccessFs::RemoveFile | AccessFs::WriteFile | AccessFs::Truncate;
    write | reading()
}

fn reading() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::ReadDir
}

/// Readable paths: this process, a memory limit, and block devices.
const READ: [&str; 3] = ["/proc/self", "/proc/sys/vm/max_map_count", "/sys/devices"];

/// Prepared Landlock rules.
pub(super) struct Files {
    rules: RulesetCreated,
    known: Vec<PathFd>,
    /// The supervisor creates sockets and output files.
    pub(super) by_supervisor: bool,
}

/// Makes the supervisor open images from now on, and prepares the rules for other paths.
///
/// # Errors
/// There is no supervisor or no Landlock.
pub(super) fn prepare(
    asked: &Asked,
    config: &ServerConfig,
    link: Option<&WorkerLink>,
) -> Result<Files, String> {
    let Some(link) = link else {
        return Err("there is no supervisor to open images (`--no-keeper`)".to_owned());
    };
    let known = READ.iter().filter_map(|path| PathFd::new(path).ok()).collect();
    // Landlock is probed before anything is requested from the supervisor.
    ruleset().map_err(|error| format!("Landlock: {error}"))?;
    open_broker::begin(link, &allowed(asked, config))?;
    let by_supervisor = ask_for_places(asked, config, link)
        .inspect_err(|why| warn!("the sandbox permits the creation of sockets and files: {why}"))
        .is_ok();
    let rules =
        rules(asked, config, by_supervisor).map_err(|error| format!("Landlock: {error}"))?;
    Ok(Files { rules, known, by_supervisor })
}

/// Makes the supervisor create sockets and output files from now on.
fn ask_for_places(asked: &Asked, config: &ServerConfig, link: &WorkerLink) -> Result<(), String> {
    let (ours, theirs) = protocol::pair().map_err(|error| error.to_string())?;
    link.give(to_supervisor::PATH_BROKER, theirs).map_err(|error| error.to_string())?;
    let control = config.control.path.is_none().then(socket_path::settle).flatten();
    let control = control.filter(|directory| make(directory));
    let real = |path: PathBuf| path.canonicalize().ok().map(|path| bytes_of(&path));
    let from_root = |path: &PathBuf| bytes_of(&process_env::absolute(path));
    path_broker::begin(
        ours,
        &PathPermissions {
            user: asked.user.as_ref().map(|user| user.ids(config)),
            directories: socket_directories(asked, config).into_iter().filter_map(real).collect(),
            control: control.and_then(real),
            mode: config.socket_access.mode,
            group: config.socket_access.group.clone(),
            trace: config.trace.as_ref().map(|(path, _)| from_root(path)),
            tcp: config.tcp().collect(),
        },
    )
}

/// Images that the process may request.
fn allowed(asked: &Asked, config: &ServerConfig) -> Allowed {
    let paths = config.disk_specs().filter_map(disk_spec::file);
    let pools = config.controllers.iter().filter_map(|served| served.controller.pool.as_ref());
    let pools = pools.map(|pool| pool.directory.clone());
    Allowed {
        files: paths.collect(),
        directories: asked.allow.iter().cloned().chain(pools).collect(),
        config: asked.config.clone(),
    }
}

fn ruleset() -> Result<RulesetCreated, RulesetError> {
    // ABI 1 is required; newer features are used if the kernel has them.
    let first = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    first.handle_access(AccessFs::from_all(ABI::V1))?.create()?;
    Ruleset::default()
        .handle_access(AccessFs::from_all(KNOWN))?
        .handle_access(AccessNet::from_all(KNOWN))?
        .scope(Scope::from_all(KNOWN))?
        .create()
}

/// Creates the rules.
fn rules(
    asked: &Asked,
    config: &ServerConfig,
    by_supervisor: bool,
) -> Result<RulesetCreated, RulesetError> {
    let rules = ruleset()?
        .add_rules(path_beneath_rules(READ, reading()))?
        // In a build with fault injection: the directory with the abort points.
        .add_rules(path_beneath_rules(shadowbell_state::abort_directory(), outputs()))?;
    if by_supervisor {
        return Ok(rules);
    }
    let rules = rules
        .add_rules(path_beneath_rules(socket_directories(asked, config), sockets()))?
        .add_rules(path_beneath_rules(written(config), outputs()))?;
    let control = config.control.path.is_none().then(socket_path::settle).flatten();
    // Each server has a directory in the common one.
    let control = control.filter(|directory| make(directory));
    let of_control = sockets() | AccessFs::MakeDir | AccessFs::RemoveDir;
    let rules = rules.add_rules(path_beneath_rules(control, of_control))?;
    config.tcp().try_fold(rules, |rules, address| {
        rules.add_rule(NetPort::new(address.port(), AccessNet::BindTcp))
    })
}

fn make(directory: &Path) -> bool {
    DirBuilder::new().recursive(true).mode(0o755).create(directory).is_ok()
}

/// Directories in which sockets are created and removed.
fn socket_directories(asked: &Asked, config: &ServerConfig) -> Vec<PathBuf> {
    let controllers = config.controllers.iter().map(|served| &served.socket);
    let exports = config.exports.iter().filter_map(ExportConfig::socket);
    let paths = controllers.chain(&config.control.path).map(PathBuf::as_path);
    let of_sockets = paths.chain(exports).map(|socket| {
        // A directory stands for the socket in it, as in SPDK.
        if socket.is_dir() { socket.to_owned() } else { directory_of(socket) }
    });
    let mut all: Vec<_> = of_sockets.chain(asked.allow.iter().cloned()).collect();
    all.sort();
    all.dedup();
    all
}

/// Output paths. A regular file is replaced, which needs its directory; other files are opened.
fn written(config: &ServerConfig) -> Vec<PathBuf> {
    let trace = config.trace.iter().map(|(path, _)| path);
    trace.flat_map(|path| [directory_of(path), path.clone()]).collect()
}

fn directory_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    }
}

impl Files {
    /// Rules of a process whose supervisor opens images and creates sockets.
    #[cfg(test)]
    pub(super) fn of_supervised(asked: &Asked, config: &ServerConfig) -> Self {
        let known = READ.iter().filter_map(|path| PathFd::new(path).ok()).collect();
        Self { rules: rules(asked, config, true).unwrap(), known, by_supervisor: true }
    }

    /// Applies the rules to this process.
    ///
    /// # Errors
    /// The kernel refuses the rules.
    pub(super) fn restrict(self) -> Result<Held, RulesetError> {
        let status = self.rules.restrict_self()?;
        let held = match status.landlock {
            LandlockStatus::Available { effective_abi, .. } if effective_abi >= ABI::V6 => {
                "file access, TCP, signals"
            }
            LandlockStatus::Available { effective_abi, .. } if effective_abi >= ABI::V4 => {
                "file access, TCP"
            }
            _ => "file access",
        };
        Ok(Held { held, _known: self.known })
    }
}

/// Applied rules. Must live as long as the process.
pub(super) struct Held {
    pub(super) held: &'static str,
    /// Open paths of the rules. The kernel recreates inodes of /proc that are not in use, and the
    /// rules would not apply to the new inode.
    _known: Vec<PathFd>,
}
