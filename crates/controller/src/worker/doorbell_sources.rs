//! Hosts that a worker hears by itself while it sleeps.

use crate::doorbell_source::{DoorbellSource, Polled};
use crate::shared::{DSTRD, MAX_QUEUES, Shared};
use crate::trace::{COMPLETION_QUEUE, Kind, TraceRing};
use shadowbell_spec::regs::{DoorbellKind, decode_doorbell};
use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// How often in a row it is woken for nothing that it could take, until it no longer listens.
const VAIN: u32 = 8;

struct Registered {
    source: Box<dyn DoorbellSource>,
    shared: Arc<Shared>,
    vain: u32,
}

/// The sources that a worker has, by controller.
#[derive(Default)]
pub(super) struct DoorbellSources(HashMap<u32, Registered>);

impl DoorbellSources {
    /// Takes an source, reported as `token`.
    pub(super) fn take(
        &mut self,
        mut source: Box<dyn DoorbellSource>,
        shared: &Arc<Shared>,
        epoll: &Arc<OwnedFd>,
        token: u64,
    ) {
        match source.watch(epoll, token) {
            Ok(()) => {
                let registered = Registered { source, shared: Arc::clone(shared), vain: 0 };
                self.0.insert(shared.id, registered);
            }
            Err(error) => tracing::debug!(%error, "a worker can not hear a host by itself"),
        }
    }

    /// Gives the source of a controller back, if there is one.
    pub(super) fn give_back(&mut self, controller: u32) {
        self.0.remove(&controller);
    }

    /// An source was reported: takes the doorbell writes of queues that `worker`, which is awake, serves.
    pub(super) fn poll_doorbells(
        &mut self,
        controller: u32,
        worker: usize,
        trace: &mut Option<TraceRing>,
    ) {
        let Some(Registered { source, shared, vain }) = self.0.get_mut(&controller) else { return };
        let Polled { writes, all } = source.poll_doorbells(&mut |offset, value| {
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
        *vain = if writes == 0 && !all { *vain + 1 } else { 0 };
        if *vain >= VAIN {
            self.give_back(controller);
        }
    }
}
