//! Detection of a removed or disconnected SSD: it completes no commands any more.

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};
use shadowbell_memory::EventFd;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;

/// Thread that waits until the socket of an SSD hangs up. Used only for an SSD that is connected by
/// a socket.
pub(crate) struct DisconnectMonitor {
    state: Arc<DisconnectState>,
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct DisconnectState {
    disconnected: AtomicBool,
    /// Events that wake the owners of the disk's queues.
    events: Mutex<Vec<Weak<EventFd>>>,
}

impl DisconnectMonitor {
    pub(crate) fn start(socket: Option<OwnedFd>) -> io::Result<Self> {
        let state = Arc::new(DisconnectState::default());
        let stop = EventFd::new()?;
        let thread = match socket {
            None => None,
            Some(socket) => {
                let (state, stop) = (Arc::clone(&state), stop.try_clone()?);
                let name = "nvme-hang-up".to_owned();
                let run = move || wait(&socket, &stop, &state);
                Some(std::thread::Builder::new().name(name).spawn(run)?)
            }
        };
        Ok(Self { state, stop, thread })
    }

    /// Registers `event`. It is signalled when the SSD is disconnected.
    pub(crate) fn add(&self, event: &Arc<EventFd>) {
        let mut events = self.state.events.lock();
        events.retain(|event| event.strong_count() != 0);
        events.push(Arc::downgrade(event));
    }

    pub(crate) fn is_disconnected(&self) -> bool {
        self.state.disconnected.load(Ordering::Acquire)
    }
}

impl Drop for DisconnectMonitor {
    fn drop(&mut self) {
        self.stop.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn wait(socket: &OwnedFd, stop: &EventFd, state: &DisconnectState) {
    let ended = PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL | PollFlags::RDHUP;
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN),
            PollFd::new(socket, PollFlags::RDHUP),
        ];
        let _ = poll(&mut fds, None);
        let [stop, socket] = &fds;
        if !stop.revents().is_empty() {
            return;
        }
        if socket.revents().intersects(ended) {
            state.disconnected.store(true, Ordering::Release);
            return state
                .events
                .lock()
                .iter()
                .filter_map(Weak::upgrade)
                .for_each(|event| event.signal());
        }
    }
}
