//! Access to images for a sandboxed server: its supervisor opens only images that were named at the
//! start or that `ctl` grants. The server process cannot grant access.

use shadowbell_config::disk_spec;
use shadowbell_control_api::api::Status;
use shadowbell_control_api::client::Client;
use shadowbell_supervisor::client::SupervisorClient;
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
