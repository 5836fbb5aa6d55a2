//! A disk's connections, and the way to make one.

use crate::connect::connect_to;
use crate::error::OpenError;
use crate::export::Export;
use crate::link::Link;
use crate::negotiate::{Greeted, NegotiationError, ask, ask_for_tls, greet, negotiate};
use crate::relay;
use crate::secured::Secured;
use crate::shared::Shared;
use crate::stream::{Patient, Stream};
use crate::uri::{NbdSpec, Place, Secure};
use parking_lot::Mutex;
use shadowbell_memory::EventFd;
use shadowbell_tls::ClientTls;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a server may take to say what its export is.
const CONNECT: Duration = Duration::from_secs(10);

pub(crate) struct Hub {
    pub(crate) way: Way,
    pub(crate) shared: Arc<Shared>,
    pub(crate) links: Box<[Mutex<Link>]>,
    /// What the server has said first; what comes later must be able to do as much.
    pub(crate) first: Export,
    /// The most data of one request, in bytes.
    pub(crate) part: u32,
}

/// What keeps the connections: with the last of them they end.
pub(crate) struct Handle(pub(crate) Arc<Hub>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.shared.stop.signal();
    }
}

/// How connections are made to the server.
#[derive(Clone, Debug)]
pub(crate) struct Way {
    pub(crate) spec: NbdSpec,
    /// With TLS.
    tls: Option<ClientTls>,
}

impl Way {
    /// As `spec` says. Its certificates are read now.
    ///
    /// # Errors
    /// [`OpenError::Certificates`].
    pub(crate) fn new(spec: &NbdSpec) -> Result<Self, OpenError> {
        let load = |secure: &Secure| ClientTls::load(&secure.directory);
        let tls = spec.secure.as_ref().map(load).transpose();
        let tls = tls.map_err(|why| OpenError::Certificates { disk: spec.to_string(), why })?;
        Ok(Self { spec: spec.clone(), tls })
    }

    /// A new connection, on which the export was agreed.
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

    /// What the server says of the export now.
    ///
    /// # Errors
    /// [`OpenError`].
    pub(crate) fn look(&self, stop: &EventFd) -> Result<Export, OpenError> {
        let name = &self.spec.export;
        let outcome =
            self.reach(stop, |patient, _| ask(patient, name), |secured, _| ask(secured, name));
        outcome.map(|(_, export)| export)
    }

    /// Connects, and goes on with `plain` or through TLS with `secured`.
    fn reach(
        &self,
        stop: &EventFd,
        plain: impl FnOnce(&mut Patient<'_>, Greeted) -> Result<Export, NegotiationError>,
        secured: impl FnOnce(&mut Secured<'_>, Greeted) -> Result<Export, NegotiationError>,
    ) -> Result<(Stream, Export), OpenError> {
        let until = Instant::now() + CONNECT;
        let disk = || self.spec.to_string();
        let stream = connect_to(&self.spec.place, until, stop)
            .map_err(|source| OpenError::Connect { disk: disk(), source })?;
        let refused = |why| OpenError::Negotiation { disk: disk(), why };
        let mut patient = Patient { stream: &stream, until, stop };
        let greeted = greet(&mut patient).map_err(refused)?;
        let Some(tls) = &self.tls else {
            let export = plain(&mut patient, greeted).map_err(refused)?;
            return Ok((stream, export));
        };
        ask_for_tls(&mut patient).map_err(refused)?;
        let session = tls.session(&self.host());
        let session = session.map_err(|why| refused(NegotiationError::Tls(why)))?;
        let agree = |patient| {
            let mut through = Secured::agree(patient, session)?;
            let export = secured(&mut through, greeted)?;
            Ok((through.into_session(), export))
        };
        let (session, export) = agree(patient).map_err(refused)?;
        let relayed = relay::start(stream, session, disk());
        let stream = relayed.map_err(|source| OpenError::System { disk: disk(), source })?;
        Ok((stream, export))
    }

    /// What the server's certificate has to be for.
    fn host(&self) -> String {
        let said = self.spec.secure.as_ref().and_then(|secure| secure.hostname.clone());
        said.unwrap_or_else(|| match &self.spec.place {
            Place::Tcp { host, .. } => host.clone(),
            // Whoever is behind it is on this machine.
            Place::Unix(_) => "localhost".to_owned(),
        })
    }
}
