//! Access to images for a sandboxed server: its supervisor opens images that were named at the
//! start, and images that `ctl` grants. The server process itself cannot grant any.

use crate::control::api::Status;
use crate::control::client::Client;
use crate::disk_spec;
use crate::supervisor::client::SupervisorClient;
use std::path::{Path, PathBuf};

/// Asks the supervisor of a server, if there is one, to grant access to these disks. Failures are
/// ignored, because the server then refuses the request itself if it has to.
pub(crate) fn grant<'a>(client: &Client, disks: impl Iterator<Item = &'a str>) {
    let files: Vec<_> = disks.filter_map(disk_spec::file).collect();
    if files.is_empty() {
        return;
    }
    let Some(pid) = client.get("/v1/status").ok().and_then(|s: Status| s.keeper_pid) else {
        return;
    };
    let Ok(supervisor) = SupervisorClient::find(Path::new(&pid.to_string())) else { return };
    // Relative paths refer to the working directory of the server.
    let from = PathBuf::from(format!("/proc/{pid}/cwd"));
    for file in files {
        if let Ok(file) = from.join(file).canonicalize()
            && !supervisor.grant(&file)
        {
            return;
        }
    }
}

/// Disks that a configuration file names.
pub(crate) fn disks_of(toml: &str) -> Vec<String> {
    let Ok(file) = toml.parse::<toml::Table>() else { return Vec::new() };
    let controllers = file.get("controller").and_then(toml::Value::as_array);
    let disks = controllers.into_iter().flatten().filter_map(|c| c.get("disks")?.as_array());
    let names = disks.flatten().filter_map(|disk| match disk {
        toml::Value::String(name) => Some(name.clone()),
        other => Some(other.get("disk")?.as_str()?.to_owned()),
    });
    names.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_disks_of_a_file_are_found() {
        let toml = "name = \"a\"\n[[controller]]\nsocket = \"s\"\n\
                    disks = [\"a.img?direct=on\", { disk = \"b.img\", nsid = 7 }]\n\
                    [[controller]]\nsocket = \"t\"\ndisks = [\"mem:1MiB\"]\n";
        assert_eq!(disks_of(toml), ["a.img?direct=on", "b.img", "mem:1MiB"]);
        assert!(disks_of("nonsense").is_empty() && disks_of("controller = 7").is_empty());
    }
}
