//! Certificates from a directory, and the TLS configuration of client and server.

use crate::error::SessionError;
use crate::session::Session;
use rustls::client::Resumption;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection,
    client::WebPkiServerVerifier,
};
use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const CA: &str = "ca-cert.pem";
const CRL: &str = "ca-crl.pem";
const CLIENT: [&str; 2] = ["client-cert.pem", "client-key.pem"];
const SERVER: [&str; 2] = ["server-cert.pem", "server-key.pem"];
/// Largest file that is read, in bytes. A CRL may be long.
const MAX_FILE: u64 = 16 << 20;

/// Reason why the certificates of a directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CertificateError {
    /// A file is missing or unreadable.
    #[error("{} cannot be read: {source}; the directory must contain {}", .path.display(), .needed)]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
        /// Files that the directory must contain.
        needed: &'static str,
    },
    /// A file contains no object of the expected kind (certificate, key or revocation list).
    #[error("{} contains no {what} in PEM format", .path.display())]
    Empty {
        /// Path of the file.
        path: PathBuf,
        /// Expected kind of object.
        what: &'static str,
    },
    /// A file is not in PEM format, or its content is damaged.
    #[error("{} is damaged: {why}", .path.display())]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Error of the parser.
        why: String,
    },
    /// A certificate and a key do not match, or are of an unsupported kind.
    #[error("{} and its key cannot be used: {why}", .path.display())]
    Pair {
        /// Path of the certificate.
        path: PathBuf,
        /// Reason why the pair cannot be used.
        why: String,
    },
    /// The certificate of the CA cannot be used.
    #[error("{} cannot be used: {why}", .path.display())]
    Authority {
        /// Path of the CA's certificate.
        path: PathBuf,
        /// Reason why the certificate cannot be used.
        why: String,
    },
}

const CLIENT_NEEDS: &str =
    "ca-cert.pem, and client-cert.pem with client-key.pem if the server requires a certificate";
const SERVER_NEEDS: &str = "ca-cert.pem, server-cert.pem and server-key.pem";
const ANY_CLIENT_NEEDS: &str = "server-cert.pem and server-key.pem";

/// Directory of certificates in the layout of libnbd, nbdkit and QEMU.
struct Directory<'a> {
    path: &'a Path,
    needed: &'static str,
}

impl Directory<'_> {
    /// Reads the bytes of a file.
    fn read(&self, name: &str) -> Result<Vec<u8>, CertificateError> {
        let path = self.path.join(name);
        let failed =
            |source| CertificateError::Read { path: path.clone(), source, needed: self.needed };
        let mut bytes = Vec::new();
        let file = std::fs::File::open(&path).map_err(failed)?;
        file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(failed)?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(failed(io::ErrorKind::FileTooLarge.into()));
        }
        Ok(bytes)
    }

    fn has(&self, name: &str) -> bool {
        // An inaccessible file counts as present. A later read of the file then reports the reason.
        self.path.join(name).try_exists().unwrap_or(true)
    }

    /// Reads all objects of a kind from a file.
    fn all<T: PemObject>(
        &self,
        name: &str,
        what: &'static str,
    ) -> Result<Vec<T>, CertificateError> {
        let bytes = self.read(name)?;
        let path = || self.path.join(name);
        let found: Result<Vec<T>, pem::Error> = T::pem_slice_iter(&bytes).collect();
        let found = found
            .map_err(|error| CertificateError::Damaged { path: path(), why: error.to_string() })?;
        if found.is_empty() {
            Err(CertificateError::Empty { path: path(), what })
        } else {
            Ok(found)
        }
    }

    fn roots(&self) -> Result<Arc<RootCertStore>, CertificateError> {
        let mut roots = RootCertStore::empty();
        for certificate in self.all::<CertificateDer<'static>>(CA, "certificate")? {
            roots.add(certificate).map_err(|error| CertificateError::Damaged {
                path: self.path.join(CA),
                why: error.to_string(),
            })?;
        }
        Ok(Arc::new(roots))
    }

    fn crls(&self) -> Result<Vec<CertificateRevocationListDer<'static>>, CertificateError> {
        if self.has(CRL) { self.all(CRL, "list of revoked certificates") } else { Ok(Vec::new()) }
    }

    fn pair(&self, [certificate, key]: [&str; 2]) -> Result<Pair, CertificateError> {
        let chain = self.all(certificate, "certificate")?;
        let mut keys = self.all::<PrivateKeyDer<'static>>(key, "private key")?;
        Ok(Pair { chain, key: keys.swap_remove(0) })
    }

    fn authority(&self, why: impl fmt::Display) -> CertificateError {
        CertificateError::Authority { path: self.path.join(CA), why: why.to_string() }
    }

    fn unusable(&self, name: &str, why: &rustls::Error) -> CertificateError {
        let why = match why {
            rustls::Error::InconsistentKeys(_) => "they do not match".to_owned(),
            other => other.to_string(),
        };
        CertificateError::Pair { path: self.path.join(name), why }
    }
}

struct Pair {
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// TLS configuration of a client.
#[derive(Clone)]
pub struct ClientTls {
    config: Arc<ClientConfig>,
    directory: Arc<Path>,
}

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ClientTls").field(&self.directory).finish()
    }
}

impl ClientTls {
    /// Loads the CA of `directory`, and the client's certificate if there is one.
    ///
    /// # Errors
    /// [`CertificateError`] if a file is missing or unusable.
    pub fn load(directory: &Path) -> Result<Self, CertificateError> {
        let files = Directory { path: directory, needed: CLIENT_NEEDS };
        let verifier = WebPkiServerVerifier::builder_with_provider(files.roots()?, provider())
            .with_crls(files.crls()?)
            .allow_unknown_revocation_status()
            .build()
            .map_err(|error| files.authority(error))?;
        let config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| files.authority(error))?
            .with_webpki_verifier(verifier);
        let mut config = if files.has(CLIENT[0]) || files.has(CLIENT[1]) {
            let Pair { chain, key } = files.pair(CLIENT)?;
            let with = config.with_client_auth_cert(chain, key);
            with.map_err(|error| files.unusable(CLIENT[0], &error))?
        } else {
            config.with_no_client_auth()
        };
        config.resumption = Resumption::disabled();
        Ok(Self { config: Arc::new(config), directory: directory.into() })
    }

    /// Directory of the certificates.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Starts the client's session with a server. The server's certificate must be valid for
    /// `name`, a host name or an IP address.
    ///
    /// # Errors
    /// [`SessionError::Name`] if `name` is neither.
    pub fn session(&self, name: &str) -> Result<Session, SessionError> {
        let bad = || SessionError::Name(name.to_owned());
        let server = ServerName::try_from(name.to_owned()).map_err(|_| bad())?;
        let connection = ClientConnection::new(Arc::clone(&self.config), server);
        let connection = connection.map_err(|error| SessionError::new(&error))?;
        Ok(Session::new(connection.into()))
    }
}

/// TLS configuration of a server.
#[derive(Clone)]
pub struct ServerTls {
    config: Arc<ServerConfig>,
    any_client: bool,
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerTls").field("any_client", &self.any_client).finish_non_exhaustive()
    }
}

impl ServerTls {
    /// Loads the server's certificate of `directory`. Unless `any_client` is true, clients need a
    /// certificate that the directory's CA has signed.
    ///
    /// # Errors
    ///
    /// [`CertificateError`] if a file is missing or unusable.
    pub fn load(directory: &Path, any_client: bool) -> Result<Self, CertificateError> {
        let needed = if any_client { ANY_CLIENT_NEEDS } else { SERVER_NEEDS };
        let files = Directory { path: directory, needed };
        let config = ServerConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(|error| files.authority(error))?;
        let config = if any_client {
            config.with_no_client_auth()
        } else {
            let verifier = WebPkiClientVerifier::builder_with_provider(files.roots()?, provider())
                .with_crls(files.crls()?)
                .allow_unknown_revocation_status()
                .build()
                .map_err(|error| files.authority(error))?;
            config.with_client_cert_verifier(verifier)
        };
        let Pair { chain, key } = files.pair(SERVER)?;
        let config = config.with_single_cert(chain, key);
        let mut config = config.map_err(|error| files.unusable(SERVER[0], &error))?;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(Self { config: Arc::new(config), any_client })
    }

    /// Starts the server's session with a new client.
    ///
    /// # Errors
    /// [`SessionError`] if the session cannot be created.
    pub fn session(&self) -> Result<Session, SessionError> {
        let connection = ServerConnection::new(Arc::clone(&self.config));
        Ok(Session::new(connection.map_err(|error| SessionError::new(&error))?.into()))
    }
}
