//! Request paths of the control interface.

use shadowbell_config::server_config::canonical_path;
use shadowbell_control_api::client::part;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Request path of a controller. The path of an existing socket is made absolute, because the
/// server identifies sockets by absolute paths.
pub(crate) fn controller_path(id: &str) -> String {
    let socket = Path::new(id);
    let is_socket = std::fs::metadata(socket).is_ok_and(|about| about.file_type().is_socket());
    let id = match is_socket {
        true => canonical_path(socket).to_string_lossy().into_owned(),
        false => id.to_owned(),
    };
    format!("/v1/controllers/{}", part(&id))
}
