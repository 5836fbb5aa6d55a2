//! Path broker: creates and removes sockets and files for a server process in a sandbox.
//!
//! The broker's threads act with the server process's user id. They create sockets in
//! [granted](super::grants) directories, one trace file, and TCP sockets at configured addresses.
//! Only sockets that this supervisor has created are removed. So the server process can neither
//! read nor write other files through the broker, and can replace a socket of another program only
//! if that program has ended and the configuration names the path.

use super::grants::{GRANTS, MAX_GRANTS};
use crate::path_protocol::{
    DONE, ERRNO, KEEP, Kind, LISTEN, Made, NO_SOCKET, PAIR, REFUSED, REMOVE, REMOVE_DIRECTORY,
    REMOVE_UNANSWERED, TCP, TRACE,
};
use crate::permissions::{Permissions, bytes_of, path_of};
use crate::protocol::{self, Packet, failure};
use rustix::io::Errno;
use rustix::process::{Gid, Uid, geteuid};
use rustix::thread::{set_thread_groups, set_thread_res_gid, set_thread_res_uid};
use serde::Serialize;
use shadowbell_controller::trace::TraceFile;
use shadowbell_process::process_env::absolute;
use shadowbell_state::Bytes;
use shadowbell_vfio_user::server::{BindError, BindOptions, Listener, remove_socket};
use std::ffi::OsStr;
use std::fs::{DirBuilder, File};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Gives only this thread the credentials of the server process's user. Only the effective user id
/// changes, so that this user cannot send signals to the supervisor.
///
/// # Errors
/// There are no permissions yet, or a system call fails.
pub(super) fn become_user() -> io::Result<()> {
    let permissions = GRANTS.lock().facts.permissions.clone();
    let Some((uid, gid, groups)) = permissions.ok_or(Errno::PERM)?.user else { return Ok(()) };
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    let ours = geteuid();
    if uid == ours {
        return Ok(());
    }
    let groups: Vec<_> = groups.into_iter().map(Gid::from_raw).collect();
    set_thread_groups(&groups)?;
    set_thread_res_gid(gid, gid, gid)?;
    Ok(set_thread_res_uid(ours, uid, ours)?)
}

/// Descriptors and body of an answer. The error may contain a [`BindError`].
type Outcome = io::Result<(Vec<OwnedFd>, Vec<u8>)>;

/// Answer to a request: type, body and descriptors. `None`: the request has no answer.
pub(super) type Answer = Option<(u8, Vec<u8>, Vec<OwnedFd>)>;

/// Carries out a request, and returns the answer.
pub(super) fn answer(packet: &Packet) -> Answer {
    let is_answered = packet.code != REMOVE_UNANSWERED;
    let answer = match outcome(packet) {
        Ok((fds, body)) => (DONE, body, fds),
        Err(error) => match error.downcast::<BindError>() {
            Ok(why) => (NO_SOCKET, json(&why), Vec::new()),
            Err(error) => failure(&error, ERRNO, REFUSED),
        },
    };
    is_answered.then_some(answer)
}

fn outcome(packet: &Packet) -> Outcome {
    // The permissions are cloned, so that no lock is held while a file system may hang.
    let permissions = GRANTS.lock().facts.permissions.clone().ok_or(Errno::PERM)?;
    let path = || Path::new(OsStr::from_bytes(&packet.body));
    match packet.code {
        LISTEN => {
            let (kind, path): (Kind, Bytes) = serde_json::from_slice(&packet.body)?;
            listen(&permissions, kind, &path_of(&path.0))
        }
        REMOVE | REMOVE_UNANSWERED => {
            let made: Made = serde_json::from_slice(&packet.body)?;
            if let Some(file) = made.file.filter(|_| GRANTS.lock().has_created(&made)) {
                let path = path_of(&made.path.0);
                remove_socket(&path, file);
                if path.symlink_metadata().is_err() {
                    GRANTS.lock().removed(&made);
                }
            }
            Ok((Vec::new(), Vec::new()))
        }
        REMOVE_DIRECTORY => {
            if !GRANTS.lock().has_created_directory(path()) {
                return Err(Errno::ACCESS.into());
            }
            std::fs::remove_dir(path())?;
            Ok((Vec::new(), Vec::new()))
        }
        TRACE => {
            let path = permissions.trace.as_ref().ok_or(Errno::ACCESS)?;
            let file = trace(&path_of(&path.0), packet.body == KEEP.as_bytes())?;
            Ok((vec![file.into()], Vec::new()))
        }
        TCP => {
            let address: SocketAddr = packet.text().parse().map_err(|_| Errno::INVAL)?;
            if !permissions.tcp.contains(&address) {
                return Err(Errno::ACCESS.into());
            }
            let listener = TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?.to_string();
            Ok((vec![listener.into()], address.into()))
        }
        PAIR => {
            let (one, other) = protocol::pair()?;
            Ok((vec![one, other], Vec::new()))
        }
        _ => Err(Errno::INVAL.into()),
    }
}

impl Permissions {
    /// Returns true if sockets may be created in the directory of this path.
    fn is_for_sockets(&self, path: &Path) -> bool {
        let Some(Ok(directory)) = path.parent().map(directory) else { return false };
        let real = |path: &Bytes| path_of(&path.0).canonicalize();
        let is_it = |allowed| directory == allowed;
        let is_below = |allowed| directory.starts_with(allowed);
        self.control.iter().any(|allowed| real(allowed).is_ok_and(is_it))
            || self.socket_trees.iter().any(|allowed| real(allowed).is_ok_and(is_below))
    }
}

/// Resolves symbolic links of a directory's path.
fn directory(path: &Path) -> io::Result<PathBuf> {
    if path.as_os_str().is_empty() { Path::new(".").canonicalize() } else { path.canonicalize() }
}

fn listen(permissions: &Permissions, kind: Kind, path: &Path) -> Outcome {
    let own = path.parent().filter(|own| permissions.control.contains(&bytes_of(own)));
    let own = own.filter(|_| kind == Kind::Private);
    if let Some(own) = own {
        match DirBuilder::new().mode(0o700).create(own) {
            Err(source) if source.kind() != io::ErrorKind::AlreadyExists => {
                let what = "created".into();
                return Err(io::Error::other(BindError::System {
                    path: path.into(),
                    what,
                    source,
                }));
            }
            _ => {}
        }
    }
    let at = if path.is_dir() { path.join("cntrl") } else { path.to_owned() };
    let is_configured = permissions.sockets.contains(&bytes_of(&absolute(path)));
    // If the directory does not exist, `bind` reports that.
    let there = at.parent().map(directory).is_some_and(|there| there.is_ok());
    if there && !is_configured && !permissions.is_for_sockets(&at) {
        let text = format!("the sandbox permits no socket at {}", path.display());
        return Err(io::Error::other(text));
    }
    if !GRANTS.lock().has_room_for(&bytes_of(&absolute(&at))) {
        let text = format!("a server creates at most {MAX_GRANTS} sockets: remove others first");
        return Err(io::Error::other(text));
    }
    let (mode, group) = match kind {
        Kind::Plain => (None, None),
        Kind::Controller => (permissions.mode, permissions.group),
        Kind::Private => (Some(0o600), None),
    };
    let made = |file| Made { path: bytes_of(&absolute(&at)), file: Some(file) };
    let replaces = |file| is_configured || own.is_some() || GRANTS.lock().has_created(&made(file));
    let listener = Listener::bind_with(&at, BindOptions { mode, group, replaces: Some(&replaces) });
    let parts = listener.map_err(io::Error::other)?.into_parts()?;
    let made = Made { path: bytes_of(&parts.path), file: parts.file };
    let answer = json(&made);
    GRANTS.lock().created(made, own.map(bytes_of));
    Ok((vec![parts.socket], answer))
}

fn trace(path: &Path, keep: bool) -> io::Result<File> {
    if keep {
        let mut backup = path.as_os_str().to_owned();
        backup.push(".before");
        // The rename fails if there is no previous file.
        let _ = std::fs::rename(path, backup);
    }
    TraceFile::create_file(path)
}

fn json(what: &impl Serialize) -> Vec<u8> {
    // Serialization cannot fail, because the values have only numbers and strings.
    serde_json::to_vec(what).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::grants::Permitted;
    use super::*;
    use crate::broker;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    use std::os::unix::net::{UnixListener, UnixStream};

    struct Asks(OwnedFd);

    impl Asks {
        fn ask(&self, code: u8, body: impl AsRef<OsStr>) -> Packet {
            protocol::send(&self.0, code, body.as_ref(), None).unwrap();
            protocol::receive(&self.0, false).unwrap().unwrap()
        }

        fn listen(&self, kind: Kind, path: &Path) -> Packet {
            self.ask(LISTEN, OsStr::from_bytes(&json(&(kind, bytes_of(path)))))
        }
    }

    /// Tests the answers to a compromised server process that sends requests outside of its
    /// permissions.
    #[test]
    fn requests_outside_of_the_permissions_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        let at = |name: &str| root.join(name);
        let directories =
            ["sockets", "sockets/below", "allowed", "allowed/below", "run", "run/empty"];
        for name in directories.into_iter().chain(["elsewhere", "elsewhere/empty", "shared"]) {
            std::fs::create_dir(at(name)).unwrap();
        }
        std::os::unix::fs::symlink(at("elsewhere"), at("sockets/link")).unwrap();
        std::fs::write(at("sockets/file"), "a disk").unwrap();
        let permissions = Permissions {
            sockets: ["sockets/configured", "shared/own"].map(|name| bytes_of(&at(name))).to_vec(),
            socket_trees: ["sockets", "allowed"].map(|name| bytes_of(&at(name))).to_vec(),
            ..Permissions::default()
        };
        GRANTS.lock().permit(Permitted { permissions, config: None });
        // Other tests share the permissions, whose mode and control directories
        // [`Permissions::extend`] does not change.
        if let Some(permissions) = &mut GRANTS.lock().facts.permissions {
            permissions.mode = Some(0o640);
            permissions.control = vec![bytes_of(&at("run/vm"))];
        }
        let process = Asks(broker::start(broker::Kind::Paths, broker::Owner::new()).unwrap());
        let path = at("sockets/a");
        let others = ["elsewhere/a", "sockets/link/a", "sockets/../elsewhere/a", "run/empty/a"];
        for refused in others {
            let answer = process.listen(Kind::Private, &at(refused));
            assert_eq!(answer.code, REFUSED, "{refused}: {}", answer.text());
        }
        assert_eq!(process.listen(Kind::Plain, &at("allowed/below/a")).code, DONE);
        // A configured path needs no permitted directory, and permits no other path in its own.
        assert_eq!(process.listen(Kind::Plain, &at("shared/own")).code, DONE);
        assert_eq!(process.listen(Kind::Plain, &at("shared/other")).code, REFUSED);
        // A client of the supervisor grants a path.
        assert!(GRANTS.lock().grant_socket(&at("shared/other")));
        assert_eq!(process.listen(Kind::Plain, &at("shared/other")).code, DONE);
        assert_eq!(process.listen(Kind::Plain, &at("shared/third")).code, REFUSED);
        let answer = process.listen(Kind::Plain, &at("sockets/file"));
        assert_eq!(answer.code, NO_SOCKET, "{}", answer.text());
        let answer = process.listen(Kind::Controller, &path);
        let made: Made = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!((answer.code, path_of(&made.path.0)), (DONE, path.clone()));
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode(&path), 0o640);
        drop(UnixStream::connect(&path).unwrap());
        assert_eq!(process.listen(Kind::Private, &at("run/vm/control.sock")).code, DONE);
        assert_eq!((mode(&at("run/vm")), mode(&at("run/vm/control.sock"))), (0o700, 0o600));
        // Files, and sockets of other programs, are not removed.
        let of = |name: &str| {
            let about = std::fs::metadata(at(name)).unwrap();
            Made { path: bytes_of(&at(name)), file: Some((about.dev(), about.ino())) }
        };
        let text = |made: &Made| String::from_utf8(json(made)).unwrap();
        let others = [UnixListener::bind(at("elsewhere/b")), UnixListener::bind(at("sockets/b"))];
        for name in ["sockets/file", "elsewhere/b", "sockets/b"] {
            process.ask(REMOVE, text(&of(name)));
            assert!(at(name).exists(), "{name}");
        }
        drop(others);
        // Sockets that other programs have left are not replaced either, unless the configuration
        // names their path.
        drop(UnixListener::bind(at("sockets/configured")).unwrap());
        let before = of("sockets/b");
        let answer = process.listen(Kind::Plain, &at("sockets/b"));
        assert_eq!((answer.code, of("sockets/b")), (NO_SOCKET, before), "{}", answer.text());
        assert_eq!(process.listen(Kind::Plain, &at("sockets/configured")).code, DONE);
        // Another program's socket at the path of a socket that this supervisor has created is not
        // removed.
        let created = of("sockets/a");
        std::fs::rename(&path, at("sockets/c")).unwrap();
        let other = UnixListener::bind(&path).unwrap();
        for made in [created, of("sockets/a"), of("sockets/c")] {
            process.ask(REMOVE, text(&made));
        }
        assert!(path.exists() && at("sockets/c").exists());
        drop(other);
        std::fs::remove_file(&path).unwrap();
        std::fs::rename(at("sockets/c"), &path).unwrap();
        process.ask(REMOVE, text(&made));
        let answer = process.listen(Kind::Plain, &path);
        assert_eq!(answer.code, DONE, "{}", answer.text());
        let again: Made = serde_json::from_slice(&answer.body).unwrap();
        process.ask(REMOVE, text(&again));
        assert!(!path.exists());
        let others = ["elsewhere/empty", "run", "run/empty", "run/../elsewhere/empty"];
        for name in others {
            assert_eq!(process.ask(REMOVE_DIRECTORY, at(name)).code, ERRNO, "{name}");
            assert!(at(name).exists());
        }
        process.ask(REMOVE, text(&of("run/vm/control.sock")));
        assert_eq!(process.ask(REMOVE_DIRECTORY, at("run/vm")).code, DONE);
        assert!(!at("run/vm").exists());
        assert_eq!(process.ask(TRACE, "").code, ERRNO);
        assert_eq!(process.ask(TCP, "127.0.0.1:0").code, ERRNO);
        assert_eq!(process.ask(b'?', "").code, ERRNO);
        assert_eq!(process.ask(b'p', "{}").code, ERRNO, "nothing registers permissions");
        // The number of sockets is limited. One of them can still be replaced.
        let dummy = |number| Made { path: Bytes(format!("/{number}").into()), file: None };
        assert_eq!(process.listen(Kind::Plain, &path).code, DONE);
        (0..MAX_GRANTS).map(dummy).for_each(|made| GRANTS.lock().created(made, None));
        let answer = process.listen(Kind::Plain, &at("sockets/more"));
        assert!(answer.text().contains("at most 4096 sockets"), "{}", answer.text());
        assert!(answer.code == REFUSED && !at("sockets/more").exists());
        assert_eq!(process.listen(Kind::Plain, &path).code, DONE);
        (0..MAX_GRANTS).map(dummy).for_each(|made| GRANTS.lock().removed(&made));
        assert_eq!(process.listen(Kind::Plain, &at("sockets/more")).code, DONE);
    }
}
