//! Where the control sockets are: `/run/shadowbell/NAME/control.sock`, or below
//! `$XDG_RUNTIME_DIR` for a user who is not root.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The variable that names another directory for the sockets.
pub(crate) const VARIABLE: &str = "SHADOWBELL_RUN_DIR";
/// The socket's name in the directory of its server.
const SOCKET: &str = "control.sock";
/// The longest name of a server: a socket's path has 107 bytes at most.
const MAX_NAME: usize = 40;

/// Where the control socket is to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Place {
    /// The name of the server, if one was given.
    pub(crate) name: Option<String>,
    /// The path, if one was given.
    pub(crate) path: Option<PathBuf>,
}

/// The directory, where it was settled.
static SETTLED: OnceLock<Option<PathBuf>> = OnceLock::new();

/// The directory in which each server has one, from now on, whoever's this process becomes.
pub(crate) fn settle() -> Option<PathBuf> {
    SETTLED.get_or_init(find).clone()
}

/// The directory in which each server has one. `None`: this user has no such directory.
pub(crate) fn directory() -> Option<PathBuf> {
    SETTLED.get().cloned().unwrap_or_else(find)
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

/// The control socket of the server of this name, in `directory`.
pub(crate) fn socket(directory: &Path, name: &str) -> PathBuf {
    directory.join(name).join(SOCKET)
}

/// The servers that have a directory in `directory`, by name, with their sockets. Some may have
/// ended.
pub(crate) fn servers(directory: &Path) -> Vec<(String, PathBuf)> {
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

/// A name that can be that of a directory and a word of a command line.
pub(crate) fn check_name(name: &str) -> Result<String, String> {
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

/// The name of a server of which nothing but a path is known: that of its configuration file, or
/// of its socket, without directory and ending.
pub(crate) fn name_from(path: &Path) -> String {
    let named = match path.file_name() {
        // SPDK's name for every socket.
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
    fn a_user_has_a_directory_of_his_own() {
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
    fn names_are_words() {
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
