//! Where the socket of a path is.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The longest path of a UNIX socket: `sun_path` holds 108 bytes, and clients want the NUL too.
pub(crate) const MAX_PATH: usize = 107;

/// The name that SPDK's client looks for in the directory it is given as transport address.
const SOCKET_IN_DIRECTORY: &str = "cntrl";

/// The path of the socket for `path`: itself, or if it is a directory, `cntrl` in there.
pub(crate) fn resolve(path: &Path) -> PathBuf {
    if path.is_dir() { path.join(SOCKET_IN_DIRECTORY) } else { path.to_owned() }
}

/// Length in bytes, as the kernel counts.
pub(crate) fn len(path: &Path) -> usize {
    let name: &OsStr = path.as_os_str();
    name.as_bytes().len()
}
