//! Directories of certificates in the layout of libnbd and QEMU, with valid and invalid
//! certificates.

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, date_time_ymd,
};
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

/// A certificate authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

/// Purpose of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CertificatePurpose {
    /// A server.
    Server,
    /// A client.
    Client,
}

/// Properties of a certificate, including defects.
#[derive(Clone, Debug, Default)]
pub struct CertificateSpec<'a> {
    /// Host names and addresses of the certificate.
    pub names: &'a [&'a str],
    /// True if the certificate has expired.
    pub has_expired: bool,
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}

impl Authority {
    /// Creates a new authority with its own key.
    ///
    /// # Panics
    ///
    /// If the library cannot create it.
    #[must_use]
    pub fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        // Names are unique, because authorities of the same name could only be distinguished by the
        // signature.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("authority {} for tests", NEXT.fetch_add(1, Ordering::Relaxed));
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        let pem = params.self_signed(&key).expect("a certificate").pem();
        Self { issuer: Issuer::new(params, key), pem }
    }

    /// Writes the authority's certificate into `directory`.
    ///
    /// # Panics
    ///
    /// If it cannot be written.
    pub fn write_ca(&self, directory: &Path) {
        fs::write(directory.join("ca-cert.pem"), &self.pem).expect("a directory for certificates");
    }

    /// Writes a certificate and its key into `directory`.
    ///
    /// # Panics
    ///
    /// If they cannot be created or written.
    pub fn write_certificate(
        &self,
        directory: &Path,
        purpose: CertificatePurpose,
        spec: &CertificateSpec<'_>,
    ) {
        let names: Vec<String> = spec.names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).expect("names");
        params.distinguished_name.push(DnType::CommonName, "a test");
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![match purpose {
            CertificatePurpose::Server => ExtendedKeyUsagePurpose::ServerAuth,
            CertificatePurpose::Client => ExtendedKeyUsagePurpose::ClientAuth,
        }];
        if spec.has_expired {
            params.not_before = date_time_ymd(2001, 1, 1);
            params.not_after = date_time_ymd(2002, 1, 1);
        }
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        let name = match purpose {
            CertificatePurpose::Server => "server",
            CertificatePurpose::Client => "client",
        };
        let write = |what: &str, text: String| {
            let path = directory.join(format!("{name}-{what}.pem"));
            fs::write(path, text).expect("a directory for certificates");
        };
        write("cert", certificate.pem());
        write("key", key.serialize_pem());
    }

    /// Writes all files of server and client, for the host `localhost` and its addresses.
    ///
    /// # Panics
    ///
    /// Like [`write_certificate`](Self::write_certificate).
    pub fn write_all(&self, directory: &Path) {
        self.write_ca(directory);
        let names = &["localhost", "127.0.0.1", "::1"];
        self.write_certificate(
            directory,
            CertificatePurpose::Server,
            &CertificateSpec { names, ..CertificateSpec::default() },
        );
        self.write_certificate(directory, CertificatePurpose::Client, &CertificateSpec::default());
    }
}
