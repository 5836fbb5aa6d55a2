//! Limit of the connections at a socket, and eviction of idle ones.

use super::socket_io::ClientSocket;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::Notify;

/// Methods that the path supports. `None` if the path does not exist.
pub(super) struct Seats {
    limit: usize,
    /// Seats of the current connections, the oldest first.
    taken: Mutex<Vec<Arc<Seat>>>,
    /// Signalled when a connection ends or becomes idle.
    changed: Arc<Notify>,
}

/// Seat that one connection holds until the connection ends or is evicted.
pub(super) struct Seat {
    /// True while a request is executed.
    is_busy: AtomicBool,
    /// True while response bytes wait for the client.
    is_sending: Arc<AtomicBool>,
    evict: Notify,
    changed: Arc<Notify>,
}

/// Guard that marks a connection as busy while a request of it is executed.
pub(super) struct Busy(Arc<Seat>);

impl Seats {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit, taken: Mutex::default(), changed: Arc::default() }
    }

    /// Waits for a free seat. If there is none, the oldest idle connection is evicted.
    pub(super) async fn take(&self, client: &ClientSocket) -> Arc<Seat> {
        loop {
            if let Some(seat) = self.try_take(client) {
                return seat;
            }
            self.changed.notified().await;
        }
    }

    fn try_take(&self, client: &ClientSocket) -> Option<Arc<Seat>> {
        let mut taken = self.taken.lock();
        if taken.len() >= self.limit {
            if let Some(idle) = taken.iter().find(|seat| seat.is_idle()) {
                idle.evict.notify_one();
            }
            return None;
        }
        let seat = Arc::new(Seat {
            is_busy: AtomicBool::new(false),
            is_sending: client.is_sending(),
            evict: Notify::new(),
            changed: Arc::clone(&self.changed),
        });
        taken.push(Arc::clone(&seat));
        Some(seat)
    }

    /// Frees the seat of a connection that has ended.
    pub(super) fn release(&self, seat: &Arc<Seat>) {
        self.taken.lock().retain(|one| !Arc::ptr_eq(one, seat));
        self.changed.notify_one();
    }
}

impl Seat {
    /// Waits until the connection has to be closed for another one.
    pub(super) async fn evicted(&self) {
        loop {
            self.evict.notified().await;
            // A request may have arrived since the eviction was requested.
            if self.is_idle() {
                return;
            }
        }
    }

    /// Begins the execution of a request.
    pub(super) fn busy(self: &Arc<Self>) -> Busy {
        self.is_busy.store(true, Ordering::SeqCst);
        Busy(Arc::clone(self))
    }

    fn is_idle(&self) -> bool {
        !self.is_busy.load(Ordering::SeqCst) && !self.is_sending.load(Ordering::SeqCst)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.is_busy.store(false, Ordering::SeqCst);
        self.0.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};
    use tokio::net::UnixStream;

    /// Polls a future once.
    fn poll<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    #[test]
    fn the_oldest_idle_connection_makes_room() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
        let _guard = runtime.enter();
        let client = || ClientSocket::from(UnixStream::pair().unwrap().0);
        let seats = Seats::new(3);
        let now = |client: &ClientSocket| match poll(pin!(seats.take(client))) {
            Poll::Ready(seat) => Some(seat),
            Poll::Pending => None,
        };
        let sockets = [client(), client(), client(), client()];
        let taken: Vec<_> = sockets[..3].iter().map(|one| now(one).unwrap()).collect();
        // The first connection executes a request, and the second has not read its response, so
        // only the third is idle.
        let busy = taken[0].busy();
        sockets[1].is_sending().store(true, Ordering::SeqCst);
        assert!(now(&sockets[3]).is_none());
        let evicted = |at: usize| poll(pin!(taken[at].evicted())).is_ready();
        assert_eq!([evicted(0), evicted(1), evicted(2)], [false, false, true]);
        seats.release(&taken[2]);
        let last = now(&sockets[3]).expect("a free place");
        // If all connections are busy, a new connection waits until another connection becomes
        // idle.
        let _busy = last.busy();
        let fifth = client();
        let mut waits = pin!(seats.take(&fifth));
        assert!(poll(waits.as_mut()).is_pending() && !evicted(0));
        drop(busy);
        assert!(poll(waits.as_mut()).is_pending() && evicted(0));
        seats.release(&taken[0]);
        assert!(poll(waits.as_mut()).is_ready());
    }
}
