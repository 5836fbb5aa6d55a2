//! A disk's connections, and the way to make one.

use crate::connect::connect_to;
use crate::error::OpenError;
use crate::export::Export;
use crate::link::Link;
use crate::negotiate::{ask, negotiate};
use crate::shared::Shared;
use crate::stream::{Patient, Stream};
use crate::uri::NbdSpec;
use parking_lot::Mutex;
use shadowbell_memory::EventFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a server may take to say what its export is.
const CONNECT: Duration = Duration::from_secs(10);

pub(crate) struct Hub {
    pub(crate) spec: NbdSpec,
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

/// A new connection, on which the export was agreed.
///
/// # Errors
/// [`OpenError`].
pub(crate) fn connect(spec: &NbdSpec, stop: &EventFd) -> Result<(Stream, Export), OpenError> {
    let until = Instant::now() + CONNECT;
    let disk = || spec.to_string();
    let stream = connect_to(&spec.place, until, stop)
        .map_err(|source| OpenError::Connect { disk: disk(), source })?;
    let mut patient = Patient { stream: &stream, until, stop };
    let export = negotiate(&mut patient, &spec.export)
        .map_err(|why| OpenError::Negotiation { disk: disk(), why })?;
    Ok((stream, export))
}

/// What the server says of the export now.
///
/// # Errors
/// [`OpenError`].
pub(crate) fn look(spec: &NbdSpec, stop: &EventFd) -> Result<Export, OpenError> {
    let until = Instant::now() + CONNECT;
    let disk = || spec.to_string();
    let stream = connect_to(&spec.place, until, stop)
        .map_err(|source| OpenError::Connect { disk: disk(), source })?;
    let mut patient = Patient { stream: &stream, until, stop };
    ask(&mut patient, &spec.export).map_err(|why| OpenError::Negotiation { disk: disk(), why })
}
