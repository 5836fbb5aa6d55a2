//! A request for a disk of zones, and how far it is.

use crate::request::DiskError;
use shadowbell_memory::Segments;

/// What a request is for the disk below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// One request there, and nothing else.
    Plain,
    /// It has its place in this zone.
    Write { zone: usize, flush: bool },
    /// What was written has come; it is to be on the medium.
    Flush,
    /// Several others are its parts.
    Parts,
    /// A part of the request with this key.
    Part { parent: u32 },
    /// A reset of the zone at `at`, and of all others that can be with `all`.
    Reset { at: u64, all: bool, stage: Stage },
}

/// How far the reset of a zone is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The zone is to be had first.
    Asking,
    /// Its data are thrown away from here on, to there.
    Discarding { from: u64, to: u64 },
}

/// One request.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) kind: Kind,
    /// No other of the queue has this.
    pub(super) serial: u64,
    /// What came with it, if the disk below does not have it.
    pub(super) data: Segments,
    /// Parts that have not ended.
    pub(super) left: u32,
    pub(super) outcome: Result<(), DiskError>,
}

impl Task {
    pub(super) fn new(kind: Kind, serial: u64) -> Self {
        Self { kind, serial, data: Segments::new(), left: 0, outcome: Ok(()) }
    }
}
