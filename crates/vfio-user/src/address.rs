//! Path of a socket: resolution of directories, and length limit.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Maximum length of a UNIX socket path: `sun_path` has 108 bytes, and clients need room for a NUL.
pub(crate) const MAX_PATH: usize = 107;

/// Name of the socket in a directory, which SPDK's client expects: its transport address is the
/// directory.
const SOCKET_IN_DIRECTORY: &str = "cntrl";

/// Resolves `path` to the path of a socket: a directory stands for its entry `cntrl`.
pub(crate) fn resolve(path: &Path) -> PathBuf {
    if path.is_dir() { path.join(SOCKET_IN_DIRECTORY) } else { path.to_owned() }
}

/// Length in bytes, as the kernel counts it.
pub(crate) fn len(path: &Path) -> usize {
    let name: &OsStr = path.as_os_str();
    name.as_bytes().len()
}
