//! Check of the source code: only one function receives descriptors of peers, and it wraps them in
//! `PeerFd`.

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

/// Scans the sources of all crates. Only `socket.rs` receives descriptors of peers, and it wraps
/// each of them immediately. The other files that receive descriptors get them from a process of
/// this program or of the system. They wrap descriptors of clients again before use. Only `PeerFd`
/// itself and the closer thread can access the raw descriptor.
#[test]
fn descriptors_are_received_in_listed_files_only() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let (mut all, mut receive, mut close) = (Vec::new(), Vec::new(), Vec::new());
    for crate_of in std::fs::read_dir(crates).unwrap().flatten() {
        sources(&crate_of.path().join("src"), &mut all);
    }
    for path in all {
        let text = std::fs::read_to_string(&path).unwrap();
        let name = path.strip_prefix(crates).unwrap().display().to_string();
        // `libc::SYS_recvmsg` is in the sandbox's list of allowed system calls. That file receives
        // nothing.
        let text = text.replace("libc::SYS_recvmsg", "");
        // If a call has no control buffer, the kernel delivers no descriptors to it.
        let has_no_room = text.contains("RecvAncillaryBuffer::default()")
            && !text.contains("RecvAncillaryBuffer::new")
            || text.contains("libc::recvmsg") && !text.contains("msg_control");
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
            // Receives a mounted /dev/fuse from fusermount3, a program of the system.
            "export/src/fuse/mount.rs",
            // Receives a mounted /dev/fuse from an operator, by the control socket.
            "server/src/control/socket_io.rs",
            "state/src/channel.rs",
            "supervisor/src/protocol.rs",
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
