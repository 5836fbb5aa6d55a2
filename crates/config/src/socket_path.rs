//! Paths of control sockets: `/run/shadowbell/NAME/control.sock`, or below `$XDG_RUNTIME_DIR` for
//! a user other than root.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Environment variable that overrides the directory of the sockets.
pub const VARIABLE: &str = "SHADOWBELL_RUN_DIR";
/// File name of the socket in the directory of its server.
const SOCKET: &str = "control.sock";
/// Maximum length of a server name, in bytes. The path of the control socket contains the name and
/// has at most 107 bytes, the limit of Unix sockets.
const MAX_NAME: usize = 40;

/// Location of the control socket, as given on the command line or in the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SocketPath {
    /// The name of the server, if one was given.
    pub name: Option<String>,
    /// The path, if one was given.
    pub path: Option<PathBuf>,
}

/// Result of [`fix_directory`].
static DIRECTORY: OnceLock<Option<PathBuf>> = OnceLock::new();

/// Determines the directory of control sockets and returns it. The directory stays the same for
/// this process, even if its user changes later.
pub fn fix_directory() -> Option<PathBuf> {
    DIRECTORY.get_or_init(find).clone()
}

/// Directory with one subdirectory per server. `None` if this user has no directory for sockets.
pub fn directory() -> Option<PathBuf> {
    DIRECTORY.get().cloned().unwrap_or_else(find)
}

fn find() -> Option<PathBuf> {
    let is_root = rustix::process::geteuid().is_root();
    directory_for(is_root, |name| std::env::var_os(name).filter(|value| !value.is_empty()))
}

fn directory_for(is_root: bool, variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if let Some(own) = variable(VARIABLE) {
        return Some(own.into());
    }
    if is_root {
        return Some("/run/shadowbell".into());
    }
    Some(PathBuf::from(variable("XDG_RUNTIME_DIR")?).join("shadowbell"))
}

/// Path of the control socket of the server called `name`.
pub fn socket(directory: &Path, name: &str) -> PathBuf {
    directory.join(name).join(SOCKET)
}

/// Name of a server whose default name another server uses: the default name and the process ID.
pub fn name_for(name: &str, pid: u32) -> String {
    format!("{name}.{pid}")
}

/// Names and control sockets of all servers in `directory`, sorted by name. Includes servers that
/// have ended and left their socket.
pub fn servers(directory: &Path) -> Vec<(String, PathBuf)> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut servers: Vec<_> = names
        .map(|name| {
            let socket = socket(directory, &name);
            (name, socket)
        })
        .filter(|(_, socket)| socket.exists())
        .collect();
    servers.sort();
    servers
}

/// Validates a server name, which is used as a directory name and as a command-line argument.
pub fn check_name(name: &str) -> Result<String, String> {
    let fits = (1..=MAX_NAME).contains(&name.len());
    let is_word = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    if fits && is_word && !name.starts_with(['.', '-']) {
        return Ok(name.to_owned());
    }
    Err(format!(
        "a name has 1 to {MAX_NAME} letters, digits, `-`, `_` and `.`, and begins with \
                 one of the first two"
    ))
}

/// Default name of a server: its configuration file or socket without directory and extension.
pub fn name_from(path: &Path) -> String {
    let named = match path.file_name() {
        // SPDK names every socket `cntrl` and creates a directory for each controller, so the name
        // of the controller is the directory's name.
        Some(name) if name == "cntrl" => path.parent().unwrap_or(path),
        _ => path,
    };
    let stem = named.file_stem().unwrap_or_default().to_string_lossy();
    let is_fine = |c: &char| c.is_ascii_alphanumeric() || "-_.".contains(*c);
    let name: String = stem.chars().filter(is_fine).take(MAX_NAME).collect();
    let name = name.trim_start_matches(['.', '-']);
    if name.is_empty() { "default".to_owned() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_has_a_separate_directory() {
        let none = |_: &str| None;
        let session =
            |name: &str| (name == "XDG_RUNTIME_DIR").then(|| OsString::from("/run/user/1"));
        assert_eq!(directory_for(true, none), Some("/run/shadowbell".into()));
        assert_eq!(directory_for(true, session), Some("/run/shadowbell".into()));
        assert_eq!(directory_for(false, session), Some("/run/user/1/shadowbell".into()));
        assert_eq!(directory_for(false, none), None);
        let own = |name: &str| (name == VARIABLE).then(|| OsString::from("/tmp/x"));
        assert_eq!(directory_for(false, own), Some("/tmp/x".into()));
    }

    #[test]
    fn server_names_are_validated() {
        for name in ["vm0", "a", "vm-1.prod_2"] {
            assert_eq!(check_name(name).as_deref(), Ok(name));
        }
        for name in ["", ".", "..", "-x", "a/b", "a b", "ä", &"x".repeat(41)] {
            assert!(check_name(name).is_err(), "{name}");
        }
        for (path, name) in [
            ("/run/vm0.sock", "vm0"),
            ("/etc/shadowbell.toml", "shadowbell"),
            ("/run/vm1/cntrl", "vm1"),
            ("vm", "vm"),
            ("/", "default"),
            ("/run/..x y.sock", "xy"),
        ] {
            assert_eq!(name_from(Path::new(path)), name, "{path}");
            check_name(&name_from(Path::new(path))).unwrap();
        }
    }
}
