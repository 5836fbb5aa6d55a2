//! Doorbell source for a client's socket, which a sleeping I/O thread polls.
//!
//! A guest that waits for each command sends a doorbell message per command. If only the reactor
//! received messages, each command would wake two threads. So after several consecutive doorbell
//! writes that each woke the same I/O thread, that I/O thread gets the client's [`SharedSocket`].

use shadowbell_controller::{DoorbellSource, PolledDoorbells};
use shadowbell_spec::regs::DOORBELLS;
use shadowbell_vfio_user::SharedSocket;
use shadowbell_vfio_user::device::region;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Number of consecutive wakeups of an I/O thread after which it gets the socket.
const WAKES: u32 = 8;

/// Counter of consecutive doorbell writes that woke the same I/O thread.
#[derive(Debug, Default)]
pub(super) struct WakingWrites {
    worker: usize,
    count: u32,
}

impl WakingWrites {
    /// Counts a write that woke I/O thread `woken`. A write that woke no thread is ignored: a guest
    /// without shadow doorbells also writes completion queue heads.
    pub(super) fn count(&mut self, woken: Option<usize>) {
        let Some(worker) = woken else { return };
        self.count = if worker == self.worker { self.count.saturating_add(1) } else { 1 };
        self.worker = worker;
    }

    /// Restarts the count, because the client has sent a message that is not a doorbell write.
    pub(super) fn reset(&mut self) {
        self.count = 0;
    }

    /// I/O thread that should get the socket.
    pub(super) fn worker(&self) -> Option<usize> {
        (self.count >= WAKES).then_some(self.worker)
    }
}

/// Source of the doorbell writes in the messages of a client.
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
