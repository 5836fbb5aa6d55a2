//! What this process is and stays. It is read once: a process in a sandbox does not ask the system.

use rustix::process::{Uid, geteuid};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

static USER: LazyLock<Uid> = LazyLock::new(geteuid);
static DIRECTORY: LazyLock<Option<PathBuf>> = LazyLock::new(|| std::env::current_dir().ok());

/// Reads it all. Before the sandbox begins, and after the process has become the user that it
/// stays.
pub(crate) fn settle() {
    LazyLock::force(&USER);
    LazyLock::force(&DIRECTORY);
}

/// Whose process this is.
pub(crate) fn user() -> Uid {
    *USER
}

/// The path from the root.
pub(crate) fn absolute(path: &Path) -> PathBuf {
    let path = match &*DIRECTORY {
        Some(directory) if !path.as_os_str().is_empty() => directory.join(path),
        _ => return path.to_owned(),
    };
    std::path::absolute(&path).unwrap_or(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_begin_at_the_root() {
        for path in ["x", "./x/../y", "/x//y/.", ""] {
            let expected = std::path::absolute(path).unwrap_or_default();
            assert_eq!(absolute(Path::new(path)), expected, "{path}");
        }
    }
}
