//! Doorbell sources: hosts whose doorbell writes a sleeping I/O thread receives without the reactor
//! thread.
//!
//! The carrier of a controller delivers a trapped doorbell write with
//! [`Controller::write_doorbell`](crate::Controller::write_doorbell) on its own thread, which then
//! wakes the I/O thread: two wakeups per command. If the writes arrive through a descriptor, the
//! I/O thread can wait for the descriptor as well and take the writes that wake it.

use super::observer::Observer;
use crate::shared::{ControllerShared, DSTRD, MAX_QUEUES};
use crate::trace::{COMPLETION_QUEUE, Kind};
use shadowbell_spec::regs::{DoorbellKind, decode_doorbell};
use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Consecutive futile wakeups by a source after which the source is removed.
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

    /// Handles an event of a source: receives the doorbell writes of queues that `worker` serves,
    /// the calling thread, which is awake.
    pub(super) fn poll_doorbells(
        &mut self,
        controller: u32,
        worker: usize,
        trace: &mut Option<Observer>,
    ) {
        let Some(Registered { source, shared, in_vain }) = self.0.get_mut(&controller) else {
            return;
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
            shadowbell_doorbell::Cell::store_release(&shared.register(qid, kind), value);
            true
        });
        *in_vain = if writes == 0 && !all { *in_vain + 1 } else { 0 };
        if *in_vain >= WAKES_IN_VAIN {
            self.remove(controller);
        }
    }
}

/// Result of [`DoorbellSource::poll_doorbells`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PolledDoorbells {
    /// Number of doorbell writes that were taken.
    pub writes: u32,
    /// True if no more writes were pending. If false, the registrant of the source delivers the
    /// rest.
    pub all: bool,
}

/// Source of a host's doorbell writes. An I/O thread calls all methods, so none may block. The
/// source is dropped when the I/O thread stops polling it.
pub trait DoorbellSource: Send {
    /// Registers the source with `epoll` under `token`: edge-triggered, and if possible reporting
    /// only while a thread sleeps in `epoll`. Called once, before all other methods.
    ///
    /// # Errors
    /// The source cannot be registered, or not now. It is then dropped.
    fn watch(&mut self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()>;

    /// Takes a few doorbell writes after an event of `epoll`, and passes each to `ring` as offset
    /// in BAR0 and value, in the order of arrival. `ring` returns true if it took the write. A
    /// write that it does not take, and all that follow it, must be delivered the usual way.
    fn poll_doorbells(&mut self, ring: &mut dyn FnMut(u64, u32) -> bool) -> PolledDoorbells;
}
