//! Tests of valid and invalid socket paths.

mod common;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Arc, Barrier};

use common::*;
use shadowbell_vfio_user::Listener;
use shadowbell_vfio_user::server::{BindError, Limits};

#[test]
fn the_socket_file_is_removed_with_the_listener() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = Listener::bind(&path).unwrap();
    assert_eq!(listener.path(), path);
    assert!(path.exists());
    drop(listener);
    assert!(!path.exists());
}

/// Environment variable with the directory for a test's child process.
const DIRECTORY: &str = "SHADOWBELL_TEST_LISTENER_DIRECTORY";

/// If a step of `Listener::bind` fails for lack of descriptors, no socket file is left behind. The
/// test lowers the descriptor limit in a child process, because the limit applies to a whole
/// process.
#[test]
fn a_failed_listener_leaves_no_file() {
    let Some(path) = std::env::var_os(DIRECTORY) else {
        let directory = tempfile::tempdir().unwrap();
        let mut own = std::process::Command::new(std::env::current_exe().unwrap());
        own.args(["--exact", "a_failed_listener_leaves_no_file", "--nocapture"]);
        let output = own.env(DIRECTORY, directory.path()).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        return;
    };
    let directory = Path::new(&path);
    let free = std::fs::File::open("/dev/null").unwrap().as_raw_fd();
    let before = getrlimit(Resource::Nofile);
    // The limit grows by one descriptor in each round, so that each step fails in one of the
    // rounds.
    for more in 0.. {
        let limit = Rlimit { current: Some(free as u64 + more), maximum: before.maximum };
        setrlimit(Resource::Nofile, limit).unwrap();
        let outcome = Listener::bind(directory.join("socket"));
        let usual = Rlimit { current: before.current, maximum: before.maximum };
        setrlimit(Resource::Nofile, usual).unwrap();
        if outcome.is_ok() {
            assert!(more > 2, "the file of the socket needed no descriptor");
            break;
        }
        let left: Vec<_> = std::fs::read_dir(directory).unwrap().collect();
        assert!(left.is_empty(), "{left:?}");
    }
}

#[test]
fn a_replaced_socket_file_is_not_removed() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listener = Listener::bind(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    let successor = UnixListener::bind(&path).unwrap();
    drop(listener);
    assert!(path.exists());
    drop(successor);
}

#[test]
fn a_live_servers_socket_is_not_replaced() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let error = Listener::bind(&path).unwrap_err();
    assert!(matches!(error, BindError::InUse { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        format!(
            "socket path {} is in use by a running server: stop that one, or choose another path",
            path.display()
        )
    );
    // While a client is attached, the path also counts as in use. The failed bind does not disturb
    // the client.
    let mut raw = Raw::attach(&path);
    assert!(matches!(Listener::bind(&path), Err(BindError::InUse { .. })));
    raw.write(0, &[1]).ok();
    drop(raw);
    Raw::attach(&path);
    eventually("both have left", || shared.log().len() == 4);
}

#[test]
fn a_stale_file_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists(), "the standard library leaves the file behind");
    let listener = Listener::bind(&path).unwrap();
    assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
    drop(listener);
}

/// A client that connects as soon as the socket file exists gets no error.
#[test]
fn a_visible_socket_file_accepts_connections() {
    use std::io::ErrorKind;
    let directory = tempfile::tempdir().unwrap();
    for round in 0..300 {
        let path = directory.path().join(format!("socket{round}"));
        let seen = path.clone();
        let client = std::thread::spawn(move || {
            loop {
                match std::os::unix::net::UnixStream::connect(&seen) {
                    Ok(_) => return Ok(()),
                    Err(error) if error.kind() == ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
        });
        let listener = Listener::bind(&path).unwrap();
        client.join().unwrap().unwrap();
        let names: Vec<_> = std::fs::read_dir(directory.path()).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
        drop(listener);
    }
}

#[test]
fn a_path_of_maximum_length_works() {
    let directory = tempfile::tempdir().unwrap();
    let room = 107 - directory.path().as_os_str().len() - 1;
    for len in [room - 8, room - 4, room - 1, room] {
        let path = directory.path().join("y".repeat(len));
        let listener = Listener::bind(&path).unwrap();
        assert_eq!(listener.path(), path);
        std::os::unix::net::UnixStream::connect(&path).unwrap();
        drop(listener);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}

#[test]
fn one_of_many_listeners_replaces_a_stale_file() {
    let directory = tempfile::tempdir().unwrap();
    for round in 0..50 {
        let path = directory.path().join(format!("socket{round}"));
        drop(UnixListener::bind(&path).unwrap());
        let together = Arc::new(Barrier::new(8));
        let threads: Vec<_> = (0..8)
            .map(|_| {
                let (path, together) = (path.clone(), Arc::clone(&together));
                std::thread::spawn(move || {
                    together.wait();
                    Listener::bind(path)
                })
            })
            .collect();
        let outcomes: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let winners = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        assert_eq!(winners, 1, "{outcomes:?}");
        assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
    }
}

#[test]
fn a_file_other_than_a_socket_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("precious");
    std::fs::write(&path, b"data").unwrap();
    let error = Listener::bind(&path).unwrap_err();
    assert!(matches!(error, BindError::NotASocket { .. }), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"data");
}

#[test]
fn a_too_long_path_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let name = |len: usize| {
        let room = len - directory.path().as_os_str().len() - 1;
        directory.path().join("x".repeat(room))
    };
    Listener::bind(name(107)).unwrap();
    let error = Listener::bind(name(108)).unwrap_err();
    assert!(matches!(error, BindError::TooLong { len: 108, .. }), "{error}");
    assert!(error.to_string().contains("108 bytes"), "{error}");
    assert!(error.to_string().contains("allows 107"), "{error}");
}

#[test]
fn a_missing_directory_is_named() {
    let error = Listener::bind("/nonexistent/deep/socket").unwrap_err();
    assert!(matches!(error, BindError::NoDirectory { .. }), "{error}");
    assert!(error.to_string().contains("create /nonexistent/deep first"), "{error}");
    let file = tempfile::NamedTempFile::new().unwrap();
    let error = Listener::bind(file.path().join("socket")).unwrap_err();
    assert!(matches!(error, BindError::NoDirectory { .. }), "{error}");
}

#[test]
fn a_directory_gets_the_socket_that_spdk_looks_for() {
    let directory = tempfile::tempdir().unwrap();
    let listener = Listener::bind(directory.path()).unwrap();
    assert_eq!(listener.path(), directory.path().join("cntrl"));
    assert!(Path::new(listener.path()).exists());
}
