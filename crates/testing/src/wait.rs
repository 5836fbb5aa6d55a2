//! Waits for events, with one limit for all tests.
//!
//! A test waits until an event has happened, even if that takes long on a busy machine. [`LIMIT`]
//! only ensures that the test ends if the event never happens.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::thread::Pid;

/// Limit of every wait. It is long enough for a busy machine.
pub const LIMIT: Duration = Duration::from_secs(300);

/// Pause between two polls of a state.
const PAUSE: Duration = Duration::from_millis(2);

/// Length of [`short_pause`].
const SHORT_PAUSE: Duration = Duration::from_millis(50);

/// Polls `is_reached` until it returns true.
///
/// # Panics
///
/// After [`LIMIT`]. The message contains `what`, the event that did not happen.
#[track_caller]
pub fn until(what: &str, mut is_reached: impl FnMut() -> bool) {
    until_some(what, || is_reached().then_some(()));
}

/// Polls `get` until it returns a value.
///
/// # Panics
///
/// After [`LIMIT`]. The message contains `what`, the event that did not happen.
#[track_caller]
pub fn until_some<T>(what: &str, mut get: impl FnMut() -> Option<T>) -> T {
    let deadline = deadline();
    loop {
        if let Some(value) = get() {
            return value;
        }
        assert!(Instant::now() < deadline, "not within {} s: {what}", LIMIT.as_secs());
        pause();
    }
}

/// Waits until `fd` is readable.
///
/// # Panics
///
/// After [`LIMIT`]. The message contains `what`, the event that did not happen.
#[track_caller]
pub fn readable(what: &str, fd: impl AsFd) {
    let limit = Timespec::try_from(LIMIT).expect("seconds");
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    let began = Instant::now();
    let ready = retry_on_intr(|| poll(&mut fds, Some(&limit))).expect("a poll");
    // If the wakeup is lost, `poll` returns only at the limit, but finds the descriptor readable.
    // So the elapsed time is checked too.
    let is_woken = ready == 1 && began.elapsed() < LIMIT;
    assert!(is_woken, "not within {} s: {what}", LIMIT.as_secs());
}

/// Waits until a thread of this process sleeps in several polls in a row.
///
/// # Panics
///
/// After [`LIMIT`], or if there is no such thread.
#[track_caller]
pub fn asleep(thread: Pid) {
    let stat = format!("/proc/self/task/{}/stat", thread.as_raw_pid());
    let mut times = 0;
    until("a thread's sleep", || {
        let stat = std::fs::read_to_string(&stat).expect("a thread");
        let is_asleep = stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" S "));
        times = if is_asleep { times + 1 } else { 0 };
        // Several polls are needed, because the thread may also sleep for a short time in a lock.
        times == 4
    });
}

/// Deadline of a wait that starts now.
pub fn deadline() -> Instant {
    Instant::now() + LIMIT
}

/// Sleeps between two polls of a state.
pub fn pause() {
    std::thread::sleep(PAUSE);
}

/// Sleeps for a short, fixed time.
///
/// Used to test that an event does *not* happen, such as the completion of a held command, or to
/// let another thread reach a blocking call. On a busy machine the time may be too short. Then the
/// test may miss a fault, but it never fails without a fault.
pub fn short_pause() {
    std::thread::sleep(SHORT_PAUSE);
}
