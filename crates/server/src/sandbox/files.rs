//! Landlock rules: file access by path, TCP, and signals.
//!
//! Images, sockets and output files need no rule, because the supervisor opens and creates them.
//! The rules permit only parts of procfs and sysfs.

use super::open_broker;
use super::user::User;
use crate::path_broker;
use crate::worker_link::WorkerLink;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, LandlockStatus, PathFd,
    Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
    path_beneath_rules,
};
use shadowbell_config::server_config::ServerConfig;
use shadowbell_config::socket_path;
use shadowbell_process::process_env;
use shadowbell_storage::disk_kinds;
use shadowbell_supervisor::permissions::{Permissions, bytes_of};
use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Newest Landlock ABI in use: files, TCP, signals to other processes, abstract sockets, and
/// sockets by path (Linux 7.1).
const KNOWN: ABI = ABI::V9;

/// Access rights that are required to replace files in a directory.
fn outputs() -> BitFlags<AccessFs> {
    let write = AccessFs::MakeReg | AccessFs::RemoveFile | AccessFs::WriteFile | AccessFs::Truncate;
    write | reading()
}

fn reading() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::ReadDir
}

/// Readable paths: data of this process, a memory limit, and attributes of block devices.
const READ: [&str; 3] = ["/proc/self", "/proc/sys/vm/max_map_count", "/sys/devices"];

/// Prepared Landlock rules.
pub(super) struct Files {
    rules: RulesetCreated,
    known: Vec<PathFd>,
}

/// Makes the supervisor open all further images and create all further sockets, and prepares the
/// Landlock rules.
///
/// # Errors
/// There is no supervisor or no Landlock.
pub(super) fn prepare(config: &ServerConfig, link: Option<&WorkerLink>) -> Result<Files, String> {
    let Some(link) = link else {
        return Err("there is no supervisor to open images (`--no-supervisor`)".to_owned());
    };
    let files = Files::new().map_err(|error| format!("Landlock: {error}"))?;
    let (images, paths) = link.brokers().ok_or("its supervisor has no brokers")?;
    open_broker::begin(images, link.clone());
    path_broker::begin(paths).map_err(|error| format!("the path broker: {error}"))?;
    // The directory of the control sockets is common to all servers. Each server creates its own
    // directory in it.
    config
        .control
        .path
        .is_none()
        .then(socket_path::fix_directory)
        .flatten()
        .map(|path| make(&path));
    Ok(files)
}

/// Permissions of a server process.
///
/// # Errors
/// The group of the sockets does not exist.
pub(crate) fn permissions(
    user: Option<&User>,
    config: &ServerConfig,
) -> anyhow::Result<Permissions> {
    let from_root = |path: &Path| bytes_of(&process_env::absolute(path));
    let all = |paths: &mut dyn Iterator<Item = PathBuf>| {
        let mut paths: Vec<_> = paths.map(|path| process_env::absolute(&path)).collect();
        paths.sort();
        paths.dedup();
        paths.iter().map(|path| bytes_of(path)).collect()
    };
    let images = |is_read_only| {
        let images = config.images().filter(|image| image.1 == is_read_only);
        all(&mut images.map(|(path, _)| path))
    };
    let pools = config.controllers.iter().filter_map(|served| served.controller.pool.as_ref());
    let pools = pools.map(|pool| pool.directory.clone());
    let sockets = config.sockets().map(Path::to_owned).chain(config.control.path.clone());
    let control = config.control.path.is_none().then(socket_path::directory).flatten();
    let name = config.control.name.as_ref().unwrap_or(&config.default_name);
    let names = [name.clone(), socket_path::name_for(name, std::process::id())];
    let control = control.iter().flat_map(|directory| names.iter().map(|n| directory.join(n)));
    let (mode, group) = config.socket_access.numbers()?;
    Ok(Permissions {
        images: images(false),
        read_only_images: images(true),
        image_directories: all(&mut config.allow.iter().cloned().chain(pools)),
        sockets: all(&mut { sockets }),
        socket_trees: all(&mut config.allow.iter().cloned()),
        control: all(&mut control.into_iter()),
        user: user.map(|user| user.ids(config)),
        mode,
        group,
        state_directory: config.state_directory().as_deref().map(from_root),
        trace: config.trace.as_ref().map(|(path, _)| from_root(path)),
        tcp: config.tcp().collect(),
        servers: config
            .disk_specs()
            .filter_map(disk_kinds::nbd_peer)
            .map(|peer| bytes_of(Path::new(&open_broker::server_text(&peer))))
            .collect(),
    })
}

fn ruleset() -> Result<RulesetCreated, RulesetError> {
    // Landlock ABI 1 is required. Restrictions of newer ABIs are used if the kernel has them.
    let first = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    first.handle_access(AccessFs::from_all(ABI::V1))?.create()?;
    Ruleset::default()
        .handle_access(AccessFs::from_all(KNOWN))?
        .handle_access(AccessNet::from_all(KNOWN))?
        .scope(Scope::from_all(KNOWN))?
        .create()
}

fn make(directory: &Path) -> bool {
    DirBuilder::new().recursive(true).mode(0o755).create(directory).is_ok()
}

impl Files {
    /// Rules of a process whose supervisor opens images and creates sockets.
    ///
    /// # Errors
    /// There is no Landlock.
    pub(super) fn new() -> Result<Self, RulesetError> {
        let known = READ.iter().filter_map(|path| PathFd::new(path).ok()).collect();
        // In a build with fault injection, the directory with the abort points is accessible.
        let abort_points = path_beneath_rules(shadowbell_state::abort_directory(), outputs());
        let rules = ruleset()?.add_rules(path_beneath_rules(READ, reading()))?;
        Ok(Self { rules: rules.add_rules(abort_points)?, known })
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

/// Applied Landlock rules. The value must live as long as the process.
pub(super) struct Held {
    pub(super) held: &'static str,
    /// Open descriptors of the paths with rules. A rule applies to an inode. The kernel drops an
    /// unused inode of /proc and creates another one for the same path, and the rule would not
    /// apply to the new inode.
    _known: Vec<PathFd>,
}
