//! Check of an image that may take long, on a thread of its own.

use crate::error::OpenError;
use parking_lot::{Condvar, Mutex};
use shadowbell_disk_file::unpin;
use shadowbell_memory::contain_panic;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Maximum time for which opening an image waits for its check. After that, the check continues in
/// the background, and requests wait for its end.
const LIMIT: Duration = Duration::from_secs(1);

/// Check of an open image.
pub(crate) struct Check {
    state: Mutex<State>,
    ended: Condvar,
    is_cancelled: AtomicBool,
}

enum State {
    /// The check runs. The value is true if it continues in the background.
    Running(bool),
    Passed,
    /// The check has failed. The error is `None` after it was returned or logged.
    Failed(Option<OpenError>),
}

impl Check {
    /// Runs the check `work` on a separate thread. `work` receives a function, and has to end soon
    /// after that function returns false. Returns `None` if the check passes in time. If it takes
    /// longer than [`LIMIT`], returns the running check.
    ///
    /// # Errors
    /// The error of `work`.
    pub(crate) fn run(
        path: &str,
        work: impl FnOnce(&dyn Fn() -> bool) -> Result<(), OpenError> + Send + 'static,
    ) -> Result<Option<Arc<Self>>, OpenError> {
        let check = Arc::new(Self {
            state: Mutex::new(State::Running(false)),
            ended: Condvar::new(),
            is_cancelled: AtomicBool::new(false),
        });
        let (shared, name) = (Arc::clone(&check), path.to_owned());
        let run = move || {
            unpin();
            let goes_on = || !shared.is_cancelled.load(Ordering::Relaxed);
            let outcome = contain_panic(|| work(&goes_on))
                .unwrap_or_else(|why| Err(OpenError::Damaged { path: name.clone(), why }));
            shared.end(&name, outcome);
        };
        let thread = std::thread::Builder::new().name("sb-qcow2-check".into()).spawn(run);
        thread.map_err(|source| system(path, source))?;
        let until = Instant::now() + LIMIT;
        let mut state = check.state.lock();
        while let State::Running(_) = *state {
            if check.ended.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        match &mut *state {
            State::Running(is_open) => {
                *is_open = true;
                tracing::warn!(
                    "{path}: a check of its tables takes long; requests wait for its end"
                );
            }
            State::Passed => return Ok(None),
            State::Failed(error) => {
                return Err(error
                    .take()
                    .unwrap_or_else(|| system(path, io::ErrorKind::Other.into())));
            }
        }
        drop(state);
        Ok(Some(check))
    }

    fn end(&self, name: &str, outcome: Result<(), OpenError>) {
        let mut state = self.state.lock();
        let is_open = matches!(*state, State::Running(true));
        *state = match outcome {
            Ok(()) => State::Passed,
            Err(error) => State::Failed(Some(error)),
        };
        match &mut *state {
            State::Passed if is_open => {
                tracing::info!("{name}: the check of its tables has passed")
            }
            State::Failed(error) if is_open => {
                if let (Some(error), false) =
                    (error.take(), self.is_cancelled.load(Ordering::Relaxed))
                {
                    tracing::error!("{error}; all requests on it fail");
                }
            }
            _ => {}
        }
        self.ended.notify_all();
    }

    /// Waits for the end of the check. Returns true if it has passed.
    pub(crate) fn wait(&self) -> bool {
        let mut state = self.state.lock();
        while let State::Running(_) = *state {
            self.ended.wait(&mut state);
        }
        matches!(*state, State::Passed)
    }

    pub(crate) fn is_running(&self) -> bool {
        matches!(*self.state.lock(), State::Running(_))
    }

    /// Cancels a running check and waits for its end.
    pub(crate) fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Relaxed);
        self.wait();
    }
}

fn system(path: &str, source: io::Error) -> OpenError {
    OpenError::System { path: path.to_owned(), what: "checking its tables", source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    fn damaged() -> OpenError {
        OpenError::Damaged { path: "x".to_owned(), why: "it is damaged".to_owned() }
    }

    #[test]
    fn a_short_check_returns_its_result() {
        assert!(Check::run("x", |_| Ok(())).unwrap().is_none());
        let Err(error) = Check::run("x", |_| Err(damaged())) else { panic!() };
        assert!(error.to_string().contains("it is damaged"), "{error}");
        let Err(error) = Check::run("x", |_| panic!("a bug")) else { panic!() };
        assert!(error.to_string().contains("a bug"), "{error}");
    }

    #[test]
    fn a_long_check_is_waited_for_or_cancelled() {
        for passes in [true, false] {
            let (sender, receiver) = channel();
            let work = move |_: &dyn Fn() -> bool| receiver.recv().unwrap();
            let check = Check::run("x", work).unwrap().unwrap();
            assert!(check.is_running());
            sender.send(if passes { Ok(()) } else { Err(damaged()) }).unwrap();
            assert_eq!((check.wait(), check.is_running()), (passes, false));
        }
        let work = |goes_on: &dyn Fn() -> bool| {
            while goes_on() {
                std::thread::yield_now();
            }
            Err(damaged())
        };
        let check = Check::run("x", work).unwrap().unwrap();
        check.cancel();
        assert!(!check.wait());
    }
}
