//! TLS session errors. The messages are for the person who has created the certificates.

use rustls::{AlertDescription as Alert, CertificateError, Error};

/// Reason why a TLS session has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The server name is invalid, so that no certificate can match it.
    #[error("`{0}` is neither the name of a host nor an address, so no certificate can be for it")]
    Name(String),
    /// The peer's certificate is signed by another CA.
    #[error(
        "the other end's certificate is not signed by the CA in ca-cert.pem; give both ends \
         certificates of one CA"
    )]
    Issuer,
    /// The peer's certificate is for another host than the one to which this client has connected.
    #[error("the certificate of the other end is not for this host but for {0}")]
    OtherName(String),
    /// The peer's certificate has expired.
    #[error("the certificate of the other end has expired")]
    Expired,
    /// The peer's certificate is not valid yet.
    #[error("the certificate of the other end is not valid yet: one of the two clocks is wrong")]
    NotYet,
    /// The peer's certificate is revoked by the CA.
    #[error("the certificate of the other end was revoked")]
    Revoked,
    /// The peer's certificate is for another purpose: a server's is required and it is a client's,
    /// or the reverse.
    #[error("the certificate of the other end is for another purpose (client or server)")]
    Purpose,
    /// The peer's certificate cannot be used for another reason.
    #[error("the certificate of the other end cannot be used: {0}")]
    Certificate(String),
    /// The peer has sent no certificate, although one is required.
    #[error("the other end has sent no certificate")]
    None,
    /// The peer requires a certificate, and this side has sent none.
    #[error("the other end requires a certificate, and got none")]
    Wanted,
    /// The peer has refused the certificate of this side.
    #[error("the other end refuses this end's certificate: {0}")]
    Refused(&'static str),
    /// The peer has ended the session with an alert.
    #[error("the other end has ended the TLS session: {0}")]
    Alert(String),
    /// The received bytes are not TLS records.
    #[error("the other end does not send TLS")]
    NoTls,
    /// Another error of the TLS library.
    #[error("{0}")]
    Other(String),
}

impl SessionError {
    pub(crate) fn new(error: &Error) -> Self {
        match error {
            Error::InvalidCertificate(certificate) => Self::certificate(certificate),
            Error::NoCertificatesPresented => Self::None,
            Error::AlertReceived(alert) => Self::alert(*alert),
            Error::InvalidMessage(_) => Self::NoTls,
            other => Self::Other(other.to_string()),
        }
    }

    fn certificate(error: &CertificateError) -> Self {
        match error {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => Self::Issuer,
            CertificateError::NotValidForName => Self::OtherName("others".to_owned()),
            CertificateError::NotValidForNameContext { presented, .. } => {
                // webpki returns names in the notation `DnsName("host")` or `IpAddress(127.0.0.1)`.
                let bare = |name: &String| {
                    let inner = name.split_once('(').and_then(|(_, rest)| rest.strip_suffix(')'));
                    inner.unwrap_or(name).trim_matches('"').to_owned()
                };
                let names: Vec<String> = presented.iter().map(bare).collect();
                let none = "none: it has no subjectAltName".to_owned();
                Self::OtherName(if names.is_empty() { none } else { names.join(", ") })
            }
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => Self::Expired,
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                Self::NotYet
            }
            CertificateError::Revoked => Self::Revoked,
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                Self::Purpose
            }
            other => Self::Certificate(other.to_string()),
        }
    }

    fn alert(alert: Alert) -> Self {
        match alert {
            Alert::CertificateRequired => Self::Wanted,
            Alert::UnknownCA => Self::Refused("it does not know the CA that has signed it"),
            // The peer sends this alert if its CA has the name of the CA that signed the
            // certificate, but another key.
            Alert::DecryptError => Self::Refused("it is not signed by the CA that is known there"),
            Alert::CertificateExpired => Self::Refused("it has expired"),
            Alert::CertificateRevoked => Self::Refused("it was revoked"),
            Alert::BadCertificate
            | Alert::UnsupportedCertificate
            | Alert::CertificateUnknown
            | Alert::AccessDenied => Self::Refused("it cannot be used there"),
            // A TLS 1.2 server sends this alert if a client has no certificate.
            Alert::HandshakeFailure => {
                Self::Alert("the ends do not agree; it may require a certificate".to_owned())
            }
            other => Self::Alert(format!("{other:?}")),
        }
    }
}
