//! Lets a sleeping worker hear the client's doorbell writes by itself.
//!
//! A guest that waits for each command writes a doorbell for each, as a message; with nobody but the
//! server's thread to hear it, two threads are woken. After several writes in a row that each woke
//! the same worker, that worker is given the server's [`SharedSocket`] of this client.

use shadowbell_controller::{DoorbellSource, PolledDoorbells};
use shadowbell_spec::regs::DOORBELLS;
use shadowbell_vfio_user::device::region;
use shadowbell_vfio_user::server::SharedSocket;
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
    pub(super) fn forget(&mut self) {
        self.count = 0;
    }

    /// The worker that is to hear by itself.
    pub(super) fn worker(&self) -> Option<usize> {
        (self.count >= WAKES).then_some(self.worker)
    }
}

/// A client, as a worker hears it.
pub(super) struct ClientSocket(pub(super) SharedSocket);

impl DoorbellSource for ClientSocket {
    fn watch(&mut self, epoll: &Arc<OwnedFd>, token: u64) -> io::Result<()> {
        self.0.watch(epoll, token)
    }

    fn poll_doorbells(&mut self, ring: &mut dyn FnMut(u64, u32) -> bool) -> PolledDoorbells {
        let heard = self.0.poll_writes(&mut |index, offset, data| {
            let is_doorbell = index == region::BAR0 && offset >= DOORBELLS;
            let value = data.try_into().map(u32::from_le_bytes);
            is_doorbell && value.is_ok_and(|value| ring(offset, value))
        });
        PolledDoorbells { writes: heard.writes, all: heard.all }
    }
}
