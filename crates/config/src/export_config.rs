//! Export configuration: a disk that is exported by NBD, to a VM by vhost-user-blk, as a file by
//! FUSE, or as a block device by ublk.

use serde::{Deserialize, Serialize};
use shadowbell_process::process_env;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use utoipa::ToSchema;

/// Largest default number of queues.
pub const MAX_DEFAULT_QUEUES: u16 = 4;

/// Export of a disk: exactly one of `nbd`, `vhost_user_blk`, `fuse` and `ublk`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ExportConfig {
    /// Id of the export.
    pub id: String,
    /// Id of the disk.
    pub disk: String,
    /// NBD: listen address, `unix:PATH` or `tcp:ADDRESS`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub nbd: Option<String>,
    /// vhost-user-blk: path of the socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub vhost_user_blk: Option<PathBuf>,
    /// FUSE: path of the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(ignore)]
    pub fuse: Option<PathBuf>,
    /// FUSE: process that has mounted the file.
    #[serde(default, skip_serializing_if = "Mounted::is_by_client")]
    #[schema(ignore)]
    pub mounted: Mounted,
    /// FUSE: user and group of the file. The defaults are those of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(ignore)]
    pub owner: Option<(u32, u32)>,
    /// ublk: device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(ignore)]
    pub ublk: Option<UblkConfig>,
    /// Name of the export for NBD clients, or serial number of the virtio disk.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Directory with certificates. If it is set, clients without TLS are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub tls_certificates: Option<PathBuf>,
    /// True to accept clients without a certificate.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tls_any_client: bool,
    /// Number of virtio queues. Default: one per CPU, up to four.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// Longest time in microseconds for which a thread polls before it sleeps. Default: 50.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_max_us: Option<u32>,
    /// Time in seconds after which a request is cancelled. Default: 30.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<u16>,
    /// True to refuse writes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// True to permit another writer of the disk, if that writer permits this one too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub share: bool,
}

/// Process that has mounted a FUSE file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mounted {
    /// `ctl`, which passed the descriptor of `/dev/fuse`.
    #[default]
    ByClient,
    /// The server, which unmounts the file when it ends.
    ByServer {
        /// True if the file was created for the mount.
        created: bool,
    },
}

impl Mounted {
    fn is_by_client(&self) -> bool {
        *self == Self::ByClient
    }
}

/// Device of a ublk export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UblkConfig {
    /// Number of the device. The default is the first free one.
    pub id: Option<u32>,
    /// True to recover the device of a dead process.
    pub recover: bool,
    /// True to copy the data of requests, instead of zero copy.
    pub copy: bool,
}

/// Protocol of an export, with its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol<'a> {
    /// NBD at `unix:PATH` or `tcp:ADDRESS`.
    Nbd(&'a str),
    /// vhost-user-blk at a UNIX socket.
    VhostUserBlk(&'a Path),
    /// FUSE file.
    Fuse(&'a Path),
    /// ublk block device.
    Ublk(UblkConfig),
}

impl ExportConfig {
    /// Protocol of the export.
    ///
    /// # Errors
    /// A sentence about keys that are missing, invalid or contradict each other.
    pub fn protocol(&self) -> Result<Protocol<'_>, String> {
        let mut all = [
            self.nbd.as_deref().map(Protocol::Nbd),
            self.vhost_user_blk.as_deref().map(Protocol::VhostUserBlk),
            self.fuse.as_deref().map(Protocol::Fuse),
            self.ublk.map(Protocol::Ublk),
        ]
        .into_iter()
        .flatten();
        let (Some(protocol), None) = (all.next(), all.next()) else {
            return Err("an export has one of `nbd`, `vhost-user-blk` and `fuse`".to_owned());
        };
        let why = match protocol {
            Protocol::Nbd(_) | Protocol::Fuse(_) if self.queues.is_some() => {
                "`queues` is for `vhost-user-blk` only"
            }
            Protocol::Nbd(nbd) if !["unix:", "tcp:"].iter().any(|kind| nbd.starts_with(kind)) => {
                return Err(format!("`nbd` is `unix:PATH` or `tcp:ADDRESS`, not `{nbd}`"));
            }
            Protocol::VhostUserBlk(_) | Protocol::Fuse(_) | Protocol::Ublk(_)
                if self.tls_certificates.is_some() || self.tls_any_client =>
            {
                "TLS is for `nbd` only: leave out `tls-certificates` and `tls-any-client`"
            }
            Protocol::VhostUserBlk(path) if path.as_os_str().is_empty() => {
                "the path of `vhost-user-blk` is empty"
            }
            _ if self.queues.is_some_and(|queues| !(1..=64).contains(&queues)) => {
                "`queues` is 1 to 64"
            }
            _ if self.timeout.is_some_and(|seconds| !(1..=3600).contains(&seconds)) => {
                "`timeout` is 1 to 3600 seconds"
            }
            _ if self.poll_max_us.is_some_and(|us| us > 1_000_000) => {
                "`poll-max-us` is 0 to 1000000"
            }
            _ => return Ok(protocol),
        };
        Err(why.to_owned())
    }

    /// Returns the export with absolute paths, so that it does not depend on the working directory.
    #[must_use]
    pub fn with_absolute_paths(&self) -> Self {
        let absolute = |path: &Path| process_env::absolute(path);
        let nbd = self.nbd.as_ref().map(|nbd| match nbd.strip_prefix("unix:") {
            Some(path) => format!("unix:{}", absolute(Path::new(path)).display()),
            None => nbd.clone(),
        });
        let vhost_user_blk = self.vhost_user_blk.as_deref().map(absolute);
        let fuse = self.fuse.as_deref().map(absolute);
        let tls_certificates = self.tls_certificates.as_deref().map(absolute);
        Self { nbd, vhost_user_blk, fuse, tls_certificates, ..self.clone() }
    }

    /// True if both configurations describe the same export.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.with_absolute_paths() == other.with_absolute_paths()
    }

    /// Path of the UNIX socket, if there is one.
    #[must_use]
    pub fn socket(&self) -> Option<&Path> {
        match self.protocol().ok()? {
            Protocol::Nbd(address) => address.strip_prefix("unix:").map(Path::new),
            Protocol::VhostUserBlk(path) => Some(path),
            Protocol::Fuse(_) | Protocol::Ublk(_) => None,
        }
    }

    /// Path of the socket or of the file.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.socket().or(self.fuse.as_deref())
    }

    /// Default number of queues: one per processor, at most four.
    #[must_use]
    pub fn default_queues() -> u16 {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        u16::try_from(processors).map_or(MAX_DEFAULT_QUEUES, |count| count.min(MAX_DEFAULT_QUEUES))
    }

    /// True if the export takes privileges that a server process in a sandbox does not have: it
    /// mounts a file, or creates a device.
    #[must_use]
    pub fn is_privileged(&self) -> bool {
        self.ublk.is_some() || !self.mounted.is_by_client()
    }

    /// TCP address, if there is one.
    #[must_use]
    pub fn tcp(&self) -> Option<SocketAddr> {
        self.nbd.as_ref()?.strip_prefix("tcp:")?.parse().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_has_one_protocol_and_its_keys() {
        let nbd = |nbd: &str| ExportConfig { nbd: Some(nbd.into()), ..ExportConfig::default() };
        let vhost = |path: &str| ExportConfig {
            vhost_user_blk: Some(path.into()),
            ..ExportConfig::default()
        };
        assert_eq!(nbd("tcp::1").protocol(), Ok(Protocol::Nbd("tcp::1")));
        assert_eq!(nbd("unix:/a").socket(), Some(Path::new("/a")));
        assert_eq!(nbd("tcp:127.0.0.1:9").tcp(), "127.0.0.1:9".parse().ok());
        let served = ExportConfig { queues: Some(64), ..vhost("/b") };
        assert_eq!(served.protocol(), Ok(Protocol::VhostUserBlk(Path::new("/b"))));
        assert_eq!((served.socket(), served.tcp()), (Some(Path::new("/b")), None));
        for (wrong, why) in [
            (ExportConfig::default(), "one of `nbd`, `vhost-user-blk` and"),
            (ExportConfig { nbd: Some("unix:/a".into()), ..vhost("/b") }, "one of `nbd`"),
            (ExportConfig { fuse: Some("/f".into()), ..vhost("/b") }, "one of `nbd`"),
            (nbd("/a"), "`unix:PATH` or `tcp:ADDRESS`"),
            (vhost(""), "is empty"),
            (ExportConfig { queues: Some(1), ..nbd("unix:/a") }, "`queues` is for"),
            (ExportConfig { queues: Some(65), ..vhost("/b") }, "1 to 64"),
            (ExportConfig { timeout: Some(0), ..nbd("unix:/a") }, "1 to 3600"),
            (ExportConfig { timeout: Some(3601), ..vhost("/b") }, "1 to 3600"),
            (ExportConfig { poll_max_us: Some(1_000_001), ..vhost("/b") }, "0 to 1000000"),
            (ExportConfig { tls_any_client: true, ..vhost("/b") }, "TLS is for `nbd`"),
        ] {
            let said = wrong.protocol().unwrap_err();
            assert!(said.contains(why), "{said}");
        }
        assert!(vhost("b").is_same(&vhost("b")) && !vhost("/b").is_same(&nbd("unix:/b")));
    }
}
