//! Cost limits of one step of a program. Code that is correct but slow, or that uses too much
//! memory, exceeds them and fails.
//!
//! The allocator counts memory over all threads. The tests run several programs concurrently, so
//! the limit is higher than the memory of all of them together. Time is CPU time of the thread that
//! runs the program, so other load of the machine has no effect. A step is a few messages or
//! commands, and the time limit is a hundred times their cost.

use cap::Cap;
use rustix::time::{ClockId, clock_gettime};
use shadowbell_controller::{Controller, Turns};
use std::alloc::System;
use std::cell::Cell;
use std::ffi::OsString;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Maximum memory in bytes that a program may allocate, beyond the memory in use before it.
const MAX_ALLOCATED: usize = 48 << 20;
/// Maximum CPU time of a step. With the address sanitizer, a step takes several times as long.
const TIME: Duration = Duration::from_secs(1);
/// Maximum number of pending messages to an I/O thread. Each admin command in flight causes a few
/// of them, and a guest can cause no others. The highest number seen is 4.
const MESSAGES: usize = 64;
/// Maximum number of pending notices to the control plane: one for each entry of the error log, and
/// a few for each admin command.
const NOTICES: usize = 64 + 32;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);
static STEPS: AtomicU64 = AtomicU64::new(0);

/// Path of the file to which a run under libFuzzer writes the number of steps, and the number of
/// steps between two writes of this file.
static REPORT: LazyLock<Option<OsString>> = LazyLock::new(|| std::env::var_os("BODIES_STEPS"));
const OFTEN: u64 = 1024;

/// Number of steps of all programs so far.
pub fn steps() -> u64 {
    STEPS.load(Ordering::Relaxed)
}

/// Limits of one program.
pub(crate) struct Limits {
    allocated: usize,
    time: Cell<Duration>,
}

impl Limits {
    /// Records the memory in use before the program.
    pub(crate) fn begin() -> Self {
        Self { allocated: ALLOCATOR.allocated(), time: Cell::new(time()) }
    }

    /// Checks the limits after a step.
    pub(crate) fn step(&self, body: &str) {
        let steps = STEPS.fetch_add(1, Ordering::Relaxed) + 1;
        if steps.is_multiple_of(OFTEN)
            && let Some(path) = REPORT.as_ref()
        {
            // The file is opened for each write, because some programs count the descriptors of
            // this process.
            let _ = std::fs::write(path, steps.to_string());
        }
        let held = ALLOCATOR.allocated().saturating_sub(self.allocated);
        assert!(held <= MAX_ALLOCATED, "{body}: {held} bytes are held after a step");
        let now = time();
        let took = now.saturating_sub(self.time.replace(now));
        assert!(took <= TIME, "{body}: a step took {took:?}");
    }

    /// Checks the limits of [`step`](Self::step), and those of an I/O thread and a controller.
    pub(crate) fn step_of(&self, body: &str, turns: &mut Turns, controller: &Controller) {
        let (messages, notices) = (turns.max_messages(), controller.max_notices());
        assert!(messages <= MESSAGES, "{body}: {messages} messages have waited for a worker");
        assert!(notices <= NOTICES, "{body}: {notices} notices have waited for the control plane");
        self.step(body);
    }
}

fn time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}
