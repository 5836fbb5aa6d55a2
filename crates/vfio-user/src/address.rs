//! Path of a socket: resolution of directories, and length limit.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Maximum length of a UNIX socket path in bytes. `sun_path` has 108 bytes, and clients need one
/// for the final NUL.
pub(crate) const MAX_PATH: usize = 107;

/// Name of the socket file in a directory. SPDK's client expects it, because its transport address
/// is the directory.
const SOCKET_IN_DIRECTORY: &str = "cntrl";

/// Resolves `path` to the path of a socket. If `path` is a directory, the socket is its entry
/// `cntrl`.
pub(crate) fn resolve(path: &Path) -> PathBuf {
    if path.is_dir() { path.join(SOCKET_IN_DIRECTORY) } else { path.to_owned() }
}

/// Length of the path in bytes, as the kernel counts it.
pub(crate) fn len(path: &Path) -> usize {
    let name: &OsStr = path.as_os_str();
    name.as_bytes().len()
}
