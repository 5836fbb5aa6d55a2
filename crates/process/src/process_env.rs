//! Attributes of this process (user, working directory) that are read once at start-up, because the
//! sandbox later forbids the system calls.

use rustix::process::{Uid, geteuid};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

static USER: LazyLock<Uid> = LazyLock::new(geteuid);
static DIRECTORY: LazyLock<Option<PathBuf>> = LazyLock::new(|| std::env::current_dir().ok());

/// Reads the attributes. Must be called after the process has changed its user and before it enters
/// its sandbox.
pub fn store_initial_state() {
    LazyLock::force(&USER);
    LazyLock::force(&DIRECTORY);
}

/// Effective user ID of this process.
pub fn user() -> Uid {
    *USER
}

/// Makes a path absolute. Two paths that differ only in repeated or trailing slashes become equal,
/// because the supervisor compares the paths of a server process with those of its permissions.
pub fn absolute(path: &Path) -> PathBuf {
    let path = match &*DIRECTORY {
        Some(directory) if !path.as_os_str().is_empty() => directory.join(path),
        _ => return path.to_owned(),
    };
    std::path::absolute(&path).unwrap_or(path).components().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_are_made_absolute() {
        for path in ["x", "./x/../y", "/x//y/.", ""] {
            let expected = std::path::absolute(path).unwrap_or_default();
            assert_eq!(absolute(Path::new(path)), expected, "{path}");
        }
        for path in ["//x//y", "/x/y/", "/x/./y//"] {
            assert_eq!(absolute(Path::new(path)).as_os_str(), "/x/y", "{path}");
        }
    }
}
