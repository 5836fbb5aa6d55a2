//! TARGET arguments of the command line, each of which names a namespace of a controller.

use shadowbell_driver::PciAddress;
use std::fmt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Explanation of TARGET in the help of verbs.
pub const HELP: &str = "\
A TARGET is one of
  vfio-user:/run/shadowbell/vm0.sock
                           controller behind a vfio-user socket, namespace 1;
                           namespace 2 is vfio-user:/run/shadowbell/vm0.sock/2
  local:disk.img           controller in this process over a disk, in the syntax
                           of `serve`: local:mem:1GiB, local:null:1TiB
  disk.img, mem:1GiB       same as local:; the path of a socket means vfio-user:
  disk.qcow2               qcow2 image, detected by its content; ?format=raw and
                           ?format=qcow2 override that
  nbd://host/export        export of an NBD server; with a Unix socket
                           nbd+unix:///export?socket=PATH; with TLS nbds:
  rbd:pool/image           image of a Ceph cluster; rbd:pool/image@snapshot
  nvme://0000:01:00.0/1    PCI function, with VFIO, namespace 1; bind it first
                           with `shadowbell bind 0000:01:00.0`";

/// Namespace as named by the user. See `HELP`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// Controller behind a vfio-user socket.
    VfioUser {
        /// Path of the socket, or of the directory that contains the socket as `cntrl`.
        socket: PathBuf,
        /// Namespace identifier.
        nsid: u32,
    },
    /// PCI function, accessed with VFIO.
    Vfio {
        /// PCI address.
        address: PciAddress,
        /// Namespace identifier.
        nsid: u32,
    },
    /// Controller that this process emulates, on a disk in the syntax of `disk_open::open`.
    Local {
        /// Disk specification.
        disk: String,
    },
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(rest) = text.strip_prefix("vfio-user:") {
            let (socket, nsid) = split_nsid(rest)?;
            if socket.is_empty() {
                return Err(
                    "it lacks a socket; write for example `vfio-user:/run/shadowbell/vm0.sock`"
                        .into(),
                );
            }
            return Ok(Self::VfioUser { socket: socket.into(), nsid });
        }
        if let Some(rest) = text.strip_prefix("nvme:") {
            let (address, nsid) = split_nsid(rest.strip_prefix("//").unwrap_or(rest))?;
            return Ok(Self::Vfio { address: address.parse()?, nsid });
        }
        let disk = text.strip_prefix("local:").unwrap_or(text);
        if disk.is_empty() {
            return Err("it is empty; write for example `vfio-user:/run/shadowbell/vm0.sock` or \
                        `local:mem:1GiB`"
                .into());
        }
        if disk == text
            && let Some((socket, nsid)) = socket_in(text)
        {
            return Ok(Self::VfioUser { socket: socket.into(), nsid });
        }
        Ok(Self::Local { disk: disk.to_owned() })
    }
}

/// Splits `text` into the path of an existing socket and an optional namespace identifier.
fn socket_in(text: &str) -> Option<(&str, u32)> {
    if is_socket(Path::new(text)) {
        return Some((text, 1));
    }
    split_nsid(text).ok().filter(|(path, _)| is_socket(Path::new(path)))
}

fn is_socket(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|about| about.file_type().is_socket())
}

/// Error text with a correction, if `path` is a socket instead of a disk.
pub fn not_a_disk(path: &str) -> Option<String> {
    let (socket, nsid) = socket_in(path)?;
    Some(if socket == path {
        format!("{path}: it is a socket; the controller behind it is `vfio-user:{socket}`")
    } else {
        format!(
            "{path}: {socket} is a socket; namespace {nsid} of the controller behind it is \
             `vfio-user:{socket}/{nsid}`"
        )
    })
}

/// Splits off a namespace identifier: `/run/vm0.sock/2`.
fn split_nsid(text: &str) -> Result<(&str, u32), String> {
    match text.rsplit_once('/') {
        Some((socket, digits))
            if !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()) =>
        {
            match digits.parse() {
                // FFFFFFFFh is the broadcast NSID.
                Ok(nsid) if nsid != 0 && nsid != u32::MAX => Ok((socket, nsid)),
                _ => Err(format!("`{digits}` is no namespace; they count from 1")),
            }
        }
        _ => Ok((text.strip_suffix('/').unwrap_or(text), 1)),
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::VfioUser { socket, nsid } => write!(f, "vfio-user:{}/{nsid}", socket.display()),
            Self::Vfio { address, nsid } => write!(f, "nvme://{address}/{nsid}"),
            Self::Local { disk } => write!(f, "local:{disk}"),
        }
    }
}

impl Target {
    /// Namespace identifier on the controller.
    #[must_use]
    pub fn nsid(&self) -> u32 {
        match self {
            Self::VfioUser { nsid, .. } | Self::Vfio { nsid, .. } => *nsid,
            Self::Local { .. } => 1,
        }
    }

    /// Returns a target for another namespace of the same controller.
    #[must_use]
    pub fn with_nsid(&self, nsid: u32) -> Self {
        match self {
            Self::VfioUser { socket, .. } => Self::VfioUser { socket: socket.clone(), nsid },
            Self::Vfio { address, .. } => Self::Vfio { address: *address, nsid },
            Self::Local { .. } => self.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vfio_user(socket: &str, nsid: u32) -> Result<Target, String> {
        Ok(Target::VfioUser { socket: socket.into(), nsid })
    }

    #[test]
    fn targets_are_parsed() {
        assert_eq!("vfio-user:/run/vm0.sock".parse(), vfio_user("/run/vm0.sock", 1));
        assert_eq!("vfio-user:/run/vm0.sock/".parse(), vfio_user("/run/vm0.sock", 1));
        assert_eq!("vfio-user:/run/vm0.sock/2".parse(), vfio_user("/run/vm0.sock", 2));
        assert_eq!("vfio-user:vm0.sock".parse(), vfio_user("vm0.sock", 1));
        assert_eq!("vfio-user:/run/7/1".parse(), vfio_user("/run/7", 1));
        let vfio = |address: &str, nsid| {
            Ok::<_, String>(Target::Vfio { address: address.parse().unwrap(), nsid })
        };
        assert_eq!("nvme://0000:01:00.0/1".parse(), vfio("01:00.0", 1));
        assert_eq!("nvme://01:00.0/3".parse(), vfio("0000:01:00.0", 3));
        assert_eq!("nvme://0000:01:00.0".parse(), vfio("0000:01:00.0", 1));
        let local = |disk: &str| Ok::<_, String>(Target::Local { disk: disk.into() });
        assert_eq!("local:mem:1GiB".parse(), local("mem:1GiB"));
        assert_eq!("null:1TiB".parse(), local("null:1TiB"));
        assert_eq!("local:disk.img?read-only=on".parse(), local("disk.img?read-only=on"));
        assert_eq!("disk.img".parse(), local("disk.img"));
        assert_eq!("disk/1".parse(), local("disk/1"));
    }

    #[test]
    fn a_printed_target_parses_to_the_same_target() {
        for text in [
            "vfio-user:/run/vm0.sock/3",
            "nvme://0000:01:00.0/2",
            "local:mem:1GiB",
            "local:disk.img",
        ] {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn invalid_targets_are_refused_with_the_reason() {
        for (text, words) in [
            ("", "empty"),
            ("local:", "empty"),
            ("vfio-user:", "lacks a socket"),
            ("vfio-user:/1", "lacks a socket"),
            ("vfio-user:/run/vm0.sock/0", "count from 1"),
            ("vfio-user:/run/vm0.sock/4294967295", "count from 1"),
            ("vfio-user:/run/vm0.sock/99999999999", "count from 1"),
            ("nvme://0000:01:00.0/0", "count from 1"),
            ("nvme://nvme0n1", "is no PCI address"),
            ("nvme:", "is no PCI address"),
        ] {
            let error = text.parse::<Target>().unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn the_path_of_a_socket_is_a_vfio_user_target() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("vm0.sock");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let target: Target = path.to_str().unwrap().parse().unwrap();
        assert_eq!(target, Target::VfioUser { socket: path, nsid: 1 });
    }

    #[test]
    fn with_nsid_keeps_the_controller() {
        let target: Target = "vfio-user:/run/vm0.sock".parse().unwrap();
        assert_eq!(target.with_nsid(4).to_string(), "vfio-user:/run/vm0.sock/4");
        assert_eq!(target.with_nsid(4).nsid(), 4);
    }
}
