//! The thread that serves the sockets, and how its reactor is taken out of it while it rests.

use parking_lot::{Condvar, Mutex};
use shadowbell_vfio_user::server::{Ended, Handle, Reactor};
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

/// What both threads know of the reactor.
enum State {
    /// The thread has it. `rest`: it is asked to come to rest.
    Serving { rest: bool },
    /// It is at rest; nobody has taken it yet.
    Resting(Reactor),
    /// It was taken out, or has come to its end.
    Away,
    /// It is given back, and is to go on.
    Back(Reactor),
    /// It does not come back.
    Over,
}

impl ReactorThread {
    /// Serves. `ended` runs when that came to an end other than by [`rest`](Self::rest).
    ///
    /// # Errors
    /// The system has no more threads.
    pub(super) fn start(
        reactor: Reactor,
        ended: impl FnOnce() + Send + 'static,
    ) -> io::Result<Self> {
        let handle = reactor.handle();
        let state = Mutex::new(State::Serving { rest: false });
        let shared = Arc::new(Shared { state, changed: Condvar::new() });
        let ours = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("sb-reactor".into());
        let thread = thread.spawn(move || {
            let outcome = ours.serve(reactor);
            ended();
            outcome
        })?;
        Ok(Self { handle, shared, thread })
    }

    /// The way to the reactor.
    pub(super) fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Has the reactor come to rest, and takes it out. `None` if it does not in time: then it goes
    /// on.
    pub(super) fn rest(&self, until: Instant) -> Option<Reactor> {
        let mut state = self.shared.state.lock();
        // It may not have come to what it was given back.
        while matches!(*state, State::Back(_)) {
            if self.shared.changed.wait_until(&mut state, until).timed_out() {
                return None;
            }
        }
        if !matches!(*state, State::Serving { .. }) {
            return None;
        }
        *state = State::Serving { rest: true };
        self.handle.freeze();
        while matches!(*state, State::Serving { .. }) {
            if self.shared.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        match std::mem::replace(&mut *state, State::Away) {
            State::Resting(reactor) => Some(reactor),
            State::Serving { .. } => {
                // Should it come to rest now, the thread has it go on.
                *state = State::Serving { rest: false };
                self.handle.thaw();
                None
            }
            other => {
                *state = other;
                None
            }
        }
    }

    /// Has the reactor that was taken out go on.
    pub(super) fn go_on(&self, reactor: Reactor) {
        *self.shared.state.lock() = State::Back(reactor);
        self.shared.changed.notify_all();
    }

    /// The reactor that was taken out does not come back.
    pub(super) fn leave(self) {
        *self.shared.state.lock() = State::Over;
        self.shared.changed.notify_all();
        let _ = self.thread.join();
    }

    /// Ends the service, and waits for the end. Outside: the thread has panicked.
    ///
    /// # Errors
    /// The service had come to its end by itself.
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
                Ok(Ended::Frozen) if matches!(*state, State::Serving { rest: true }) => {}
                // Nobody waits for it any more.
                Ok(Ended::Frozen) => continue,
                Ok(Ended::Stopped) | Err(_) => {
                    *state = State::Away;
                    self.changed.notify_all();
                    drop(state);
                    drop(reactor);
                    return outcome.map(drop);
                }
            }
            *state = State::Resting(reactor);
            self.changed.notify_all();
            reactor = loop {
                match std::mem::replace(&mut *state, State::Away) {
                    State::Back(reactor) => {
                        *state = State::Serving { rest: false };
                        self.changed.notify_all();
                        break reactor;
                    }
                    State::Over => return Ok(()),
                    other => *state = other,
                }
                self.changed.wait(&mut state);
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_vfio_user::server::Limits;

    /// Controllers that go one by one have it rest again before its thread has come to go on.
    #[test]
    fn a_rest_may_follow_another_at_once() {
        let reactor = Reactor::new(Limits::default()).unwrap();
        let thread = ReactorThread::start(reactor, || {}).unwrap();
        for _ in 0..200 {
            let reactor = thread.rest(shadowbell_testing::wait::deadline()).expect("a rest");
            thread.go_on(reactor);
        }
        thread.stop().unwrap().unwrap();
    }
}
