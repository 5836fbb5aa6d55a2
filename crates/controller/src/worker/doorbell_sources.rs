//! Doorbell sources: descriptors from which a sleeping I/O thread receives doorbell writes
//! directly, without the reactor thread.
//!
//! Without a source, the front end of a controller receives a trapped doorbell write on its own
//! thread, and wakes the I/O thread by
//! [`Controller::write_doorbell`](crate::Controller::write_doorbell): two wakeups per command. With
//! a source, the I/O thread also waits for the source's descriptor, and receives the writes itself:
//! one wakeup.

use super::observer::Observer;
use crate::shared::{ControllerShared, DSTRD, MAX_QUEUES};
use crate::trace::{COMPLETION_QUEUE, Kind};
use shadowbell_doorbell::InvalidDoorbell;
use shadowbell_spec::regs::{DoorbellKind, decode_doorbell};
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Maximum number of consecutive events of a source in which no doorbell write was for this thread.
/// The source is then removed.
const WAKES_IN_VAIN: u32 = 8;

struct Registered {
    source: Box<dyn DoorbellSource>,
    shared: Arc<ControllerShared>,
    in_vain: u32,
}

/// Doorbell sources of an I/O thread, by controller.
#[derive(Default)]
pub(super) struct DoorbellSources(HashMap<u32, Registered>);

impl DoorbellSources {
    /// Adds a source, whose epoll token is `token`.
    pub(super) fn add(
        &mut self,
        mut source: Box<dyn DoorbellSource>,
        shared: &Arc<ControllerShared>,
        epoll: &Arc<OwnedFd>,
        token: u64,
    ) {
        match source.watch(epoll, token) {
            Ok(()) => {
                let registered = Registered { source, shared: Arc::clone(shared), in_vain: 0 };
                self.0.insert(shared.id, registered);
            }
            Err(error) => {
                tracing::debug!(%error, "cannot receive doorbell writes on the I/O thread")
            }
        }
    }

    /// Removes the source of a controller, if there is one.
    pub(super) fn remove(&mut self, controller: u32) {
        self.0.remove(&controller);
    }

    /// Handles an event of a source. `worker` is the calling thread: only doorbell writes of its
    /// queues are received. Returns the invalid completion queue heads by queue identifier.
    pub(super) fn poll_doorbells(
        &mut self,
        controller: u32,
        worker: usize,
        trace: &mut Option<Observer>,
    ) -> Vec<(u16, InvalidDoorbell)> {
        let mut invalid = Vec::new();
        let Some(Registered { source, shared, in_vain }) = self.0.get_mut(&controller) else {
            return invalid;
        };
        let PolledDoorbells { writes, all } = source.poll_doorbells(&mut |offset, value| {
            let doorbell = decode_doorbell(offset, DSTRD);
            let Some(doorbell) = doorbell.filter(|d| d.qid != 0 && usize::from(d.qid) < MAX_QUEUES)
            else {
                return false;
            };
            let (qid, kind) = (doorbell.qid, doorbell.kind);
            if shared.owner(qid, kind) != Some(worker) {
                return false;
            }
            shared.trap(qid, kind);
            if let Some(trace) = trace {
                let side = if kind == DoorbellKind::Cq { COMPLETION_QUEUE } else { 0 };
                trace.record(Kind::MmioWrite, controller as u16, qid | side, value, 0);
            }
            let register = shared.register(qid, kind);
            match shared.validate_trapped(qid, kind, &register, value) {
                Ok(value) => shadowbell_doorbell::Cell::store_release(&register, value),
                Err(error) => invalid.push((qid, error)),
            }
            true
        });
        *in_vain = if writes == 0 && !all { *in_vain + 1 } else { 0 };
        if *in_vain >= WAKES_IN_VAIN {
            self.remove(controller);
        }
        invalid
    }
}

/// Result of [`DoorbellSource::poll_doorbells`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolledDoorbells {
    /// Number of doorbell writes that the I/O thread has received and handled.
    pub writes: u32,
    /// True if all pending writes were handled. If false, the front end that owns the source has to
    /// deliver the others.
    pub all: bool,
}

/// Source of a host's doorbell writes. An I/O thread calls all methods, so they must not block. The
/// I/O thread drops the source when it no longer uses it.
pub trait DoorbellSource: Send {
    /// Registers the source with `epoll` under `token`, edge-triggered. If possible, the source
    /// reports events only while a thread sleeps in `epoll`. Called once, before all other methods.
    ///
    /// # Errors
    /// The source cannot be registered. The caller then drops it.
    fn watch(&mut self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()>;

    /// Receives a few doorbell writes after an event of `epoll`. Calls `ring` for each write, in
    /// order of arrival, with the offset in BAR0 and the value. `ring` returns true if it has
    /// handled the write. If it returns false, the front end that owns the source must deliver this
    /// write and all later ones.
    fn poll_doorbells(&mut self, ring: &mut dyn FnMut(u64, u32) -> bool) -> PolledDoorbells;
}
