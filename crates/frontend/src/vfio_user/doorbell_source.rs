//! A client's socket as a controller's doorbell source: a sleeping worker polls it by itself.
//!
//! A guest that waits for each command writes a doorbell for each, as a message; if only the
//! server's thread polled for it, two threads would be woken per command. After several writes in a
//! row that each woke the same worker, that worker is given the client's [`SharedSocket`].

use shadowbell_controller::{DoorbellSource, PolledDoorbells};
use shadowbell_spec::regs::DOORBELLS;
use shadowbell_vfio_user::SharedSocket;
use shadowbell_vfio_user::device::region;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// How many writes in a row have to wake a worker.
const WAKES: u32 = 8;

/// Doorbell writes that woke the same worker, one after the other.
#[derive(Debug, Default)]
pub(super) struct WakingWrites {
    worker: usize,
    count: u32,
}

impl WakingWrites {
    /// A write woke `worker`, or nobody. One that wakes nobody says nothing: a guest without shadow
    /// doorbells also writes how far it has read.
    pub(super) fn count(&mut self, woken: Option<usize>) {
        let Some(worker) = woken else { return };
        self.count = if worker == self.worker { self.count.saturating_add(1) } else { 1 };
        self.worker = worker;
    }

    /// The client does something else.
    pub(super) fn reset(&mut self) {
        self.count = 0;
    }

    /// The worker that is to poll the socket by itself.
    pub(super) fn worker(&self) -> Option<usize> {
        (self.count >= WAKES).then_some(self.worker)
    }
}

/// The doorbell writes among what a client sends.
pub(super) struct SocketDoorbells(pub(super) SharedSocket);

impl DoorbellSource for SocketDoorbells {
    fn watch(&mut self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()> {
        self.0.watch(epoll, token)
    }

    fn poll_doorbells(&mut self, ring: &mut dyn FnMut(u64, u32) -> bool) -> PolledDoorbells {
        let polled = self.0.poll_writes(&mut |index, offset, data| {
            let is_doorbell = index == region::BAR0 && offset >= DOORBELLS;
            let value = data.try_into().map(u32::from_le_bytes);
            is_doorbell && value.is_ok_and(|value| ring(offset, value))
        });
        PolledDoorbells { writes: polled.writes, all: polled.all }
    }
}
