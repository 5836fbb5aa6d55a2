//! Connections of a disk, and their creation.

use crate::connect::connect_to;
use crate::error::OpenError;
use crate::export::Export;
use crate::link::Link;
use crate::negotiate::{Greeted, NegotiationError, greet, negotiate, request_export, request_tls};
use crate::shared::Shared;
use crate::stream::{Patient, Stream};
use crate::tls::TlsStream;
use crate::tls_proxy;
use crate::uri::{NbdSpec, Secure, ServerAddress};
use parking_lot::Mutex;
use shadowbell_memory::EventFd;
use shadowbell_tls::ClientTls;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Timeout for connecting and the handshake.
const CONNECT: Duration = Duration::from_secs(10);

pub(crate) struct Connections {
    pub(crate) connector: Connector,
    pub(crate) shared: Arc<Shared>,
    pub(crate) links: Box<[Mutex<Link>]>,
    /// Properties of the export in the first handshake. A new connection must offer at least the
    /// features that this disk uses.
    pub(crate) first: Export,
    /// Maximum length of the data of one subrequest, in bytes.
    pub(crate) part: u32,
}

/// Handle that the disk and its queues share. Dropping the last clone ends the connections.
pub(crate) struct Handle(pub(crate) Arc<Connections>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.shared.stop.signal();
    }
}

/// Parameters for connecting to the server.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    pub(crate) spec: NbdSpec,
    /// TLS client configuration, if TLS is used.
    tls: Option<ClientTls>,
}

impl Connector {
    /// Creates the parameters for connections to the server of `spec`. Loads the TLS certificates.
    ///
    /// # Errors
    /// [`OpenError::Certificates`].
    pub(crate) fn new(spec: &NbdSpec) -> Result<Self, OpenError> {
        let load = |secure: &Secure| ClientTls::load(&secure.directory);
        let tls = spec.secure.as_ref().map(load).transpose();
        let tls = tls.map_err(|why| OpenError::Certificates { disk: spec.to_string(), why })?;
        Ok(Self { spec: spec.clone(), tls })
    }

    /// Connects and negotiates the export.
    ///
    /// # Errors
    /// [`OpenError`].
    pub(crate) fn connect(&self, stop: &EventFd) -> Result<(Stream, Export), OpenError> {
        let name = &self.spec.export;
        self.reach(
            stop,
            |patient, greeted| negotiate(patient, name, greeted),
            |secured, greeted| negotiate(secured, name, greeted),
        )
    }

    /// Queries the current properties of the export on a new connection. Does not open the export.
    ///
    /// # Errors
    /// [`OpenError`].
    pub(crate) fn query_export(&self, stop: &EventFd) -> Result<Export, OpenError> {
        let name = &self.spec.export;
        let outcome = self.reach(
            stop,
            |patient, _| request_export(patient, name),
            |secured, _| request_export(secured, name),
        );
        outcome.map(|(_, export)| export)
    }

    /// Connects, then runs `without_tls` on the connection, or `secured` if TLS is used.
    fn reach(
        &self,
        stop: &EventFd,
        without_tls: impl FnOnce(&mut Patient<'_>, Greeted) -> Result<Export, NegotiationError>,
        secured: impl FnOnce(&mut TlsStream<'_>, Greeted) -> Result<Export, NegotiationError>,
    ) -> Result<(Stream, Export), OpenError> {
        let until = Instant::now() + CONNECT;
        let disk = || self.spec.to_string();
        let stream = connect_to(&self.spec.server_address, until, stop)
            .map_err(|source| OpenError::Connect { disk: disk(), source })?;
        let refused = |why| OpenError::Negotiation { disk: disk(), why };
        let mut patient = Patient { stream: &stream, until, stop };
        let greeted = greet(&mut patient).map_err(refused)?;
        let Some(tls) = &self.tls else {
            let export = without_tls(&mut patient, greeted).map_err(refused)?;
            return Ok((stream, export));
        };
        request_tls(&mut patient).map_err(refused)?;
        let session = tls.session(&self.host());
        let session = session.map_err(|why| refused(NegotiationError::Tls(why)))?;
        let agree = |patient| {
            let mut through = TlsStream::agree(patient, session)?;
            let export = secured(&mut through, greeted)?;
            Ok((through.into_session(), export))
        };
        let (session, export) = agree(patient).map_err(refused)?;
        let relayed = tls_proxy::start(stream, session, disk());
        let stream = relayed.map_err(|source| OpenError::System { disk: disk(), source })?;
        Ok((stream, export))
    }

    /// Name that the server's certificate must be valid for.
    fn host(&self) -> String {
        let configured = self.spec.secure.as_ref().and_then(|secure| secure.hostname.clone());
        configured.unwrap_or_else(|| match &self.spec.server_address {
            ServerAddress::Tcp { host, .. } => host.clone(),
            // A UNIX socket has no host name. Its server runs on this machine.
            ServerAddress::Unix(_) => "localhost".to_owned(),
        })
    }
}
