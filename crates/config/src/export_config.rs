//! Export configuration: a disk that is exported by NBD.

use serde::{Deserialize, Serialize};
use shadowbell_process::process_env;
use std::path::{Path, PathBuf};

/// Export of a disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct ExportConfig {
    /// Id of the export.
    pub id: String,
    /// Id of the disk.
    pub disk: String,
    /// Listen address: `unix:PATH` or `tcp:ADDRESS`.
    pub nbd: String,
    /// Name of the export for NBD clients.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// Directory with certificates. If it is set, clients without TLS are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tls_certificates: Option<PathBuf>,
    /// True to accept clients without a certificate.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub tls_any_client: bool,
    /// True to refuse writes.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// True to permit another writer of the disk, if that writer permits this one too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub share: bool,
}

impl ExportConfig {
    /// Returns the export with absolute paths, so that it does not depend on the working directory.
    #[must_use]
    pub fn from_root(&self) -> Self {
        let nbd = match self.nbd.strip_prefix("unix:") {
            Some(path) => format!("unix:{}", process_env::absolute(Path::new(path)).display()),
            None => self.nbd.clone(),
        };
        let tls_certificates = self.tls_certificates.as_deref().map(process_env::absolute);
        Self { nbd, tls_certificates, ..self.clone() }
    }

    /// True if both are the same export.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.from_root() == other.from_root()
    }

    /// Path of the UNIX socket, if there is one.
    #[must_use]
    pub fn socket(&self) -> Option<&Path> {
        self.nbd.strip_prefix("unix:").map(Path::new)
    }
}
