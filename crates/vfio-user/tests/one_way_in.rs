//! Descriptors of peers come in at one place, where they become `PeerFd`s.

use std::path::Path;

fn sources(directory: &Path, found: &mut Vec<std::path::PathBuf>) {
    let Ok(entries) = std::fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let path = entry.path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// Of all crates beside this one: nobody receives descriptors but `socket.rs`, which holds each at
/// once, and those whose peer is a process of ours, the supervisor or another worker (what of it
/// came from a client is in a `PeerFd` again before anybody uses it); and nobody but `PeerFd`
/// itself and the closer has the descriptor in it.
#[test]
fn nobody_else_receives_a_descriptor() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let (mut all, mut receive, mut close) = (Vec::new(), Vec::new(), Vec::new());
    for crate_of in std::fs::read_dir(crates).unwrap().flatten() {
        sources(&crate_of.path().join("src"), &mut all);
    }
    for path in all {
        let text = std::fs::read_to_string(&path).unwrap();
        let name = path.strip_prefix(crates).unwrap().display().to_string();
        // The list of system calls that a process may make names it as well.
        let text = text.replace("libc::SYS_recvmsg", "");
        // Without room for descriptors the system has none arrive.
        let has_no_room = text.contains("RecvAncillaryBuffer::default()")
            && !text.contains("RecvAncillaryBuffer::new");
        let words = ["recvmsg", "RecvAncillary", "ScmRights(rights)"];
        if words.iter().any(|word| text.contains(word)) && !has_no_room {
            receive.push(name.clone());
        }
        let holds = name.starts_with("vfio-user/src/descriptor") && text.contains("OwnedFd");
        if holds && !text.contains("#[cfg(test)]") {
            close.push(name);
        }
    }
    close.sort();
    receive.sort();
    assert_eq!(
        receive,
        [
            "shadowbell/src/supervisor/protocol.rs",
            "state/src/channel.rs",
            "vfio-user/src/socket.rs"
        ]
    );
    assert_eq!(
        close,
        ["channel.rs", "closer.rs", "peer_fd.rs"]
            .map(|file| format!("vfio-user/src/descriptor/{file}"))
    );
    let socket = std::fs::read_to_string(crates.join("vfio-user/src/socket.rs")).unwrap();
    assert_eq!(socket.matches("rights").count(), 2, "each goes into a PeerFd");
    assert!(socket.contains("fds.extend(rights.map(|fd| PeerFd::new(fd, closer)));"));
}
