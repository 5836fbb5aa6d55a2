//! Who hears that the SSD has gone, while nothing completes that would tell.

use rustix::event::{PollFd, PollFlags, poll};
use shadowbell_memory::EventFd;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

/// Waits for the other end of a socket to hang up, if the SSD is reached by one.
pub(crate) struct Watch {
    state: Arc<State>,
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    gone: AtomicBool,
    /// What the workers of the disk's queues sleep on.
    bells: Mutex<Vec<Weak<EventFd>>>,
}

impl State {
    fn bells(&self) -> MutexGuard<'_, Vec<Weak<EventFd>>> {
        self.bells.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch {
    pub(crate) fn start(socket: Option<OwnedFd>) -> io::Result<Self> {
        let state = Arc::new(State::default());
        let stop = EventFd::new()?;
        let thread = match socket {
            None => None,
            Some(socket) => {
                let (state, stop) = (Arc::clone(&state), stop.try_clone()?);
                let name = "nvme-disk-watch".to_owned();
                let run = move || wait(&socket, &stop, &state);
                Some(std::thread::Builder::new().name(name).spawn(run)?)
            }
        };
        Ok(Self { state, stop, thread })
    }

    /// Signals `bell` when the SSD has gone, if it is still there.
    pub(crate) fn add(&self, bell: &Arc<EventFd>) {
        let mut bells = self.state.bells();
        bells.retain(|bell| bell.strong_count() != 0);
        bells.push(Arc::downgrade(bell));
    }

    pub(crate) fn is_gone(&self) -> bool {
        self.state.gone.load(Ordering::Acquire)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn wait(socket: &OwnedFd, stop: &EventFd, state: &State) {
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
            state.gone.store(true, Ordering::Release);
            return state.bells().iter().filter_map(Weak::upgrade).for_each(|bell| bell.signal());
        }
    }
}
