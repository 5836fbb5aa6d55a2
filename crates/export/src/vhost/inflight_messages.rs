//! Messages of the frontend about in-flight tracking. rust-vmm's backend does not support them, so
//! this module answers them, and they are not passed to the backend.

use super::inflight::{Kept, Region, Shape};
use shadowbell_memory::MapError;
use shadowbell_vfio_user::descriptor::PeerFd;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Requests of the protocol.
const SET_PROTOCOL_FEATURES: u32 = 16;
pub(super) const GET_INFLIGHT_FD: u32 = 31;
pub(super) const SET_INFLIGHT_FD: u32 = 32;
/// Bits of a message's flags: the version, the mark of a reply, and the request for a reply.
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Protocol feature bits.
const REPLY_ACK: u64 = 1 << 3;
const INFLIGHT_SHMFD: u64 = 1 << 12;
/// Length of a payload: two words of eight bytes and two of two bytes. Some compilers add padding.
const PAYLOAD: usize = 20;
const PADDED: usize = 24;
/// Page size, for the length of the memory.
const PAGE: u64 = 4096;

/// Invalid message.
#[derive(Debug, thiserror::Error)]
pub(super) enum Bad {
    #[error("its message {0} about requests in flight has {1} bytes")]
    Length(u32, usize),
    #[error("it shares {0} descriptors for requests in flight, and it should be one")]
    Descriptors(usize),
    #[error(
        "it has requests in flight tracked for {queues} queues of {entries} entries, in {len} bytes: \
         there are {have} queues of up to {most} entries, which need {needed} bytes"
    )]
    Shape { queues: u16, entries: u16, len: u64, have: usize, most: usize, needed: u64 },
    #[error("the memory for requests in flight cannot be mapped: {0}")]
    Map(#[from] MapError),
    #[error("memory for requests in flight cannot be created: {0}")]
    Make(#[from] std::io::Error),
}

/// Reply to the frontend.
pub(super) struct Reply {
    pub(super) bytes: Vec<u8>,
    pub(super) fd: Option<OwnedFd>,
}

/// Result of handling a message.
pub(super) enum Handled {
    /// The message is not about in-flight tracking. It is passed to the backend.
    Passed,
    /// The message was handled, with a reply if one is needed.
    Done(Option<Reply>),
}

/// State of a frontend for its messages about in-flight tracking.
pub(super) struct InflightMessages {
    /// Tracking memory that the queues will use.
    kept: Arc<Kept>,
    queues: usize,
    most_entries: usize,
    /// Protocol features that the frontend has accepted.
    features: u64,
}

impl InflightMessages {
    /// Creates the state for a device with `queues` queues of at most `most_entries` entries.
    pub(super) fn new(kept: Arc<Kept>, queues: usize, most_entries: usize) -> Self {
        Self { kept, queues, most_entries, features: 0 }
    }

    /// Handles a message, if it is about in-flight tracking.
    pub(super) fn handle(
        &mut self,
        request: u32,
        flags: u32,
        payload: &[u8],
        fds: &[PeerFd],
    ) -> Result<Handled, Bad> {
        if request == SET_PROTOCOL_FEATURES
            && let Some(features) = word(payload, 0)
        {
            self.features = features;
        }
        // If the feature was not negotiated, the backend refuses these messages as unknown.
        if self.features & INFLIGHT_SHMFD == 0 {
            return Ok(Handled::Passed);
        }
        match request {
            GET_INFLIGHT_FD => {
                Ok(Handled::Done(Some(make(self.shape(request, payload)?, payload)?)))
            }
            SET_INFLIGHT_FD => {
                let shape = self.shape(request, payload)?;
                let [file] = fds else { return Err(Bad::Descriptors(fds.len())) };
                self.check(&shape, shape.len)?;
                self.kept.set(Region::map(file, shape)?);
                let wanted = flags & NEED_REPLY != 0 && self.features & REPLY_ACK != 0;
                let reply = wanted.then(|| reply(request, &[0; 8], None));
                Ok(Handled::Done(reply))
            }
            _ => Ok(Handled::Passed),
        }
    }

    /// Parses a payload and checks its numbers of queues and entries.
    fn shape(&self, request: u32, payload: &[u8]) -> Result<Shape, Bad> {
        let bad = Bad::Length(request, payload.len());
        if payload.len() != PAYLOAD && payload.len() != PADDED {
            return Err(bad);
        }
        let (Some(len), Some(offset), Some(&[q0, q1, e0, e1])) = (
            word(payload, 0),
            word(payload, 8),
            payload.get(16..PAYLOAD).and_then(<[u8]>::as_array),
        ) else {
            return Err(bad);
        };
        let (queues, entries) = (u16::from_ne_bytes([q0, q1]), u16::from_ne_bytes([e0, e1]));
        let shape = Shape { len, offset, queues, entries };
        self.check(&shape, u64::MAX)?;
        Ok(shape)
    }

    /// Checks the numbers of queues and entries, and that `len` bytes are sufficient for them.
    fn check(&self, shape: &Shape, len: u64) -> Result<(), Bad> {
        let (have, most) = (self.queues, self.most_entries);
        let Shape { queues, entries, .. } = *shape;
        let possible = (1..=have).contains(&queues.into()) && (1..=most).contains(&entries.into());
        let needed = shape.needed();
        if possible && needed <= len {
            return Ok(());
        }
        Err(Bad::Shape { queues, entries, len: shape.len, have, most, needed })
    }
}

/// Creates tracking memory. It is used after the frontend has sent it back.
fn make(mut shape: Shape, payload: &[u8]) -> Result<Reply, Bad> {
    shape.len = shape.needed().next_multiple_of(PAGE);
    let file = Region::make(&shape)?;
    let mut answer = [shape.len, 0].map(u64::to_ne_bytes).concat();
    answer.extend(payload.get(16..).unwrap_or_default());
    Ok(reply(GET_INFLIGHT_FD, &answer, Some(file)))
}

fn reply(request: u32, payload: &[u8], fd: Option<OwnedFd>) -> Reply {
    let header = [request, VERSION | REPLY, payload.len() as u32];
    let mut bytes = header.map(u32::to_ne_bytes).concat();
    bytes.extend(payload);
    Reply { bytes, fd }
}

fn word(payload: &[u8], at: usize) -> Option<u64> {
    let bytes = payload.get(at..at + 8)?;
    bytes.try_into().ok().map(u64::from_ne_bytes)
}
