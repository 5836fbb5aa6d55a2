//! Connection to a controller outside of this process.

use anyhow::{anyhow, bail};
use shadowbell_config::target::Target;
use shadowbell_control_api::discovery;
use shadowbell_driver::{Transport, TransportError, Vfio, VfioError, VfioUser};
use shadowbell_process::exit;
use shadowbell_vfio_user::client::ClientError;
use std::io::ErrorKind;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Maximum time for connecting to a server. It is long, because a server accepts a client only
/// after it has released the previous one.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Limit of the first attempt to connect. It is long enough for a busy server to answer, and to
/// release a client that has just ended.
const SHORT_WAIT: Duration = Duration::from_secs(1);

/// Connects to the controller that `target` names: a PCI function, or one behind a socket.
///
/// # Errors
/// With exit status [`exit::BAD_INPUT`] if there is no such controller or it is in use.
pub fn to(target: &Target) -> anyhow::Result<Arc<dyn Transport>> {
    match target {
        Target::VfioUser { socket, .. } => {
            let transport = connect(socket).map_err(|error| {
                let path = socket.display();
                exit::unavailable(if let Some(why) = missing_server(socket) {
                    anyhow!("no controller behind {path}: {why}")
                } else if let Some(client) = client_of(socket) {
                    anyhow!("{path}: {client}")
                } else {
                    anyhow!("no controller behind {path}: {error}")
                })
            })?;
            Ok(Arc::new(transport))
        }
        Target::Vfio { address, .. } => {
            Ok(Arc::new(Vfio::open(*address).map_err(|error| match error {
                VfioError::Busy { .. } => exit::unavailable(error),
                _ => exit::bad_input(error),
            })?))
        }
        Target::Local { .. } => bail!("{target} is a controller in this process"),
    }
}

/// Connects to a controller. Fails after [`SHORT_WAIT`] if the server reports that another client
/// is connected. With a longer wait, this process could take the controller from a guest's VMM that
/// disconnects only to restart.
fn connect(socket: &Path) -> Result<VfioUser, TransportError> {
    match VfioUser::connect(socket, SHORT_WAIT) {
        Err(error) if is_timeout(&error) && client_of(socket).is_none() => {
            tracing::warn!("waiting for {}, which another client may use", socket.display());
            VfioUser::connect(socket, CONNECT_TIMEOUT)
        }
        outcome => outcome,
    }
}

fn is_timeout(error: &TransportError) -> bool {
    let cause = std::error::Error::source(error).and_then(|cause| cause.downcast_ref());
    matches!(cause, Some(ClientError::Timeout { .. }))
}

/// True if `error` means that another client uses the controller, so that a retry may succeed.
#[must_use]
pub fn is_in_use(error: &anyhow::Error) -> bool {
    error.chain().any(|error| {
        matches!(error.downcast_ref(), Some(ClientError::Timeout { .. }))
            || matches!(error.downcast_ref(), Some(VfioError::Busy { .. }))
    })
}

/// Connects to the controller that a dead process used. The error keeps its type, which
/// [`is_in_use`] needs.
///
/// # Errors
/// As [`to`].
pub fn again(target: &Target) -> anyhow::Result<Arc<dyn Transport>> {
    match target {
        Target::VfioUser { socket, .. } => {
            Ok(Arc::new(VfioUser::connect(socket, CONNECT_TIMEOUT)?))
        }
        other => to(other),
    }
}

/// Error text if the server reports that another client is connected.
fn client_of(path: &Path) -> Option<String> {
    let (_, controller) = discovery::owner(path)?;
    controller.client.then(|| {
        "another client is connected, and a controller serves one at a time; `shadowbell list`, \
         `id-ctrl`, `smart-log` and `error-log` query its server instead"
            .to_owned()
    })
}

/// Error text with a remedy if no server listens at a path.
fn missing_server(path: &Path) -> Option<String> {
    let path = if path.is_dir() { path.join("cntrl") } else { path.to_owned() };
    let serve = format!("`shadowbell serve DISK --socket {}`", path.display());
    match std::fs::metadata(&path) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            Some(format!("there is no such socket; {serve} creates one"))
        }
        Ok(file) if !file.file_type().is_socket() => Some("not a socket".into()),
        Ok(_) => match UnixStream::connect(&path) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                Some(format!("its server has ended; restart it, for example with {serve}"))
            }
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                Some("this user may not connect to it; ask as root or as its owner".to_owned())
            }
            _ => None,
        },
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_server_is_reported_with_the_remedy() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("file"), "").unwrap();
        drop(std::os::unix::net::UnixListener::bind(path("ended")).unwrap());
        for (name, words) in [
            ("none", "there is no such socket; `shadowbell serve DISK --socket "),
            ("file/none", "there is no such socket"),
            ("", "/cntrl` creates one"),
            ("file", "not a socket"),
            ("ended", "its server has ended; restart it"),
        ] {
            let target = Target::VfioUser { socket: path(name), nsid: 1 };
            let Err(error) = to(&target) else { panic!("{name}") };
            assert_eq!(exit::status(&error), exit::BAD_INPUT);
            assert!(error.to_string().contains(words), "{name}: {error}");
        }
    }
}
