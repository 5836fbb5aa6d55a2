//! Thread that runs the reactor of the vfio-user sockets, and the pause that takes the reactor out
//! of the thread for an upgrade.

use parking_lot::{Condvar, Mutex};
use shadowbell_vfio_user::server::{Handle, Reactor, RunEnd};
use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

pub(super) struct ReactorThread {
    handle: Handle,
    shared: Arc<Shared>,
    thread: JoinHandle<io::Result<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// Owner of the reactor, as known to the reactor thread and to the thread that pauses it.
enum State {
    /// The reactor thread runs the reactor. `pause`: a pause is requested.
    Serving { pause: bool },
    /// The reactor is paused, and not taken out yet.
    Paused(Box<Reactor>),
    /// The reactor was taken out, or has ended.
    Gone,
}

impl ReactorThread {
    /// Starts the thread, which calls `ended` when the reactor has ended.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(
        reactor: Reactor,
        ended: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let handle = reactor.handle();
        let state = Mutex::new(State::Serving { pause: false });
        let shared = Arc::new(Shared { state, changed: Condvar::new() });
        let shared_clone = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("sb-reactor".into());
        let thread = thread.spawn(move || {
            let outcome = shared_clone.serve(reactor);
            ended();
            outcome
        })?;
        Ok(Self { handle, shared, thread })
    }

    /// Handle of the reactor.
    pub(super) fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Pauses the reactor and returns it. `None` if it has not paused by `until`; it then
    /// continues.
    pub(super) fn pause(&self, until: Instant) -> Option<Reactor> {
        let mut state = self.shared.state.lock();
        if !matches!(*state, State::Serving { .. }) {
            return None;
        }
        *state = State::Serving { pause: true };
        self.handle.freeze();
        while matches!(*state, State::Serving { .. }) {
            if self.shared.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        match std::mem::replace(&mut *state, State::Gone) {
            State::Paused(reactor) => Some(*reactor),
            State::Serving { .. } => {
                // If the reactor pauses after this timeout, `Shared::serve` runs it again.
                *state = State::Serving { pause: false };
                self.handle.thaw();
                None
            }
            State::Gone => None,
        }
    }

    /// Stops the reactor and waits for the thread. The outer error means that the thread has
    /// panicked.
    ///
    /// # Errors
    /// The reactor had failed before.
    pub(super) fn stop(self) -> std::thread::Result<io::Result<()>> {
        self.handle.stop();
        self.thread.join()
    }
}

impl Shared {
    fn serve(&self, mut reactor: Reactor) -> io::Result<()> {
        loop {
            let outcome = reactor.run();
            let mut state = self.state.lock();
            match outcome {
                Ok(RunEnd::Frozen) if matches!(*state, State::Serving { pause: true }) => {
                    *state = State::Paused(Box::new(reactor));
                    self.changed.notify_all();
                    drop(state);
                    // The paused thread waits for the end of the process.
                    loop {
                        std::thread::park();
                    }
                }
                // The reactor has paused (`Frozen`) after `pause` had given up, so it continues.
                Ok(RunEnd::Frozen) => {}
                Ok(RunEnd::Stopped) | Err(_) => {
                    *state = State::Gone;
                    self.changed.notify_all();
                    drop(state);
                    drop(reactor);
                    return outcome.map(drop);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_vfio_user::server::Limits;

    #[test]
    fn a_pause_that_timed_out_may_be_repeated() {
        let reactor = Reactor::new(Limits::default()).unwrap();
        let thread = ReactorThread::start(reactor, || {}).unwrap();
        while thread.pause(Instant::now()).is_none() {}
        assert!(thread.pause(Instant::now()).is_none(), "it is taken out");
    }
}
