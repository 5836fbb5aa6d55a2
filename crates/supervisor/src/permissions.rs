//! Permissions of the server process: files, sockets and addresses that the command line and the
//! configuration file name.

use serde::{Deserialize, Serialize};
use shadowbell_state::Bytes;
use std::ffi::OsString;
use std::net::SocketAddr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// Returns the permissions of a command line and of the text of its configuration file.
///
/// # Errors
/// The command line or the text is invalid.
pub type Permit = fn(&[OsString], Option<&str>) -> anyhow::Result<Permissions>;

/// Paths and resources that a server process may request. All paths are absolute, and may contain
/// symbolic links.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Permissions {
    /// Paths of images: files or devices.
    pub images: Vec<Bytes>,
    /// Paths of images that are only opened for reading.
    pub read_only_images: Vec<Bytes>,
    /// Paths of directories and files. Each of these files, and all files below these directories,
    /// are permitted as images, except the supervisor's own files.
    pub image_directories: Vec<Bytes>,
    /// Paths of sockets: configured ones, and those that `ctl` has named. A socket file that a dead
    /// server left at one of these paths is replaced.
    pub sockets: Vec<Bytes>,
    /// Directories in which sockets may be created, including all subdirectories.
    pub socket_trees: Vec<Bytes>,
    /// Directories that may be created for the control socket.
    pub control: Vec<Bytes>,
    /// Credentials for the creation of sockets and files: user, group, and supplementary groups.
    pub user: Option<(u32, u32, Vec<u32>)>,
    /// File mode of the controllers' sockets.
    pub mode: Option<u32>,
    /// Group of the controllers' sockets.
    pub group: Option<u32>,
    /// Path of the trace file.
    pub trace: Option<Bytes>,
    /// State directory, in which the UUIDs of disks are stored.
    pub state_directory: Option<Bytes>,
    /// TCP addresses of the metrics and of exports.
    pub tcp: Vec<SocketAddr>,
    /// NBD servers, to which connections are permitted: TCP addresses, and absolute paths of UNIX
    /// sockets.
    #[serde(default)]
    pub servers: Vec<Bytes>,
}

impl Permissions {
    /// Listed paths of images, and of directories with images.
    pub(super) fn all_images(&self) -> impl Iterator<Item = &Bytes> {
        self.images.iter().chain(&self.read_only_images).chain(&self.image_directories)
    }

    /// Returns whether an image may be written. `None` if its path is not listed. An allowed path
    /// may be that of a file.
    pub(super) fn access(&self, path: &Bytes) -> Option<bool> {
        let is_read_only = self.read_only_images.contains(path);
        let is_allowed = !is_read_only && self.image_directories.contains(path);
        let is_writable = is_allowed || self.images.contains(path);
        (is_writable || is_read_only).then_some(is_writable)
    }

    /// Adds the paths and addresses of a configuration file that was read again. User, mode, group,
    /// control directories, trace file and state directory stay.
    pub(super) fn extend(&mut self, other: Self) {
        for (ours, theirs) in [
            (&mut self.images, other.images),
            (&mut self.read_only_images, other.read_only_images),
            (&mut self.image_directories, other.image_directories),
            (&mut self.sockets, other.sockets),
            (&mut self.socket_trees, other.socket_trees),
            (&mut self.servers, other.servers),
        ] {
            let new: Vec<_> = theirs.into_iter().filter(|path| !ours.contains(path)).collect();
            ours.extend(new);
        }
        self.tcp.extend(other.tcp);
        self.tcp.sort_unstable();
        self.tcp.dedup();
    }
}

/// Bytes of a path.
pub fn bytes_of(path: &Path) -> Bytes {
    Bytes(path.as_os_str().as_bytes().to_vec())
}

/// Path of these bytes.
pub fn path_of(bytes: &[u8]) -> PathBuf {
    OsString::from_vec(bytes.to_vec()).into()
}
