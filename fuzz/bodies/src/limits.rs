//! Limits of a step of a program: slow code and unbounded memory are findings as well.
//!
//! Memory is counted by the allocator of the program that uses this crate, over all threads: the
//! tests run several programs at a time, and the limit exceeds the memory of all of them. Time is
//! CPU time of the thread that executes the program. A step is some messages or commands, and the
//! limit is a hundred times its usual time, so other load of the machine has no effect.

use cap::Cap;
use rustix::time::{ClockId, clock_gettime};
use shadowbell_controller::{Controller, Turns};
use std::alloc::System;
use std::cell::Cell;
use std::ffi::OsString;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Maximum memory in bytes of a program, beyond that at its start.
const HELD: usize = 48 << 20;
/// Maximum CPU time of a step. The address sanitizer multiplies it.
const TIME: Duration = Duration::from_secs(1);
/// Maximum number of messages that wait for an I/O thread: some for each admin command in flight,
/// independent of the guest's behaviour. The observed maximum is 4.
const MESSAGES: usize = 64;
/// Maximum number of notices that wait for a control plane: the size of the error log, and some
/// for each admin command.
const NOTICES: usize = 64 + 32;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);
static STEPS: AtomicU64 = AtomicU64::new(0);

/// File for the number of steps, for the program that runs libFuzzer, and the interval of its
/// updates.
static REPORT: LazyLock<Option<OsString>> = LazyLock::new(|| std::env::var_os("BODIES_STEPS"));
const OFTEN: u64 = 1024;

/// Number of steps of all programs.
pub fn steps() -> u64 {
    STEPS.load(Ordering::Relaxed)
}

/// Limits of one program.
pub(crate) struct Limits {
    allocated: usize,
    time: Cell<Duration>,
}

impl Limits {
    /// Starts a program.
    pub(crate) fn begin() -> Self {
        Self { allocated: ALLOCATOR.allocated(), time: Cell::new(time()) }
    }

    /// Ends a step, and checks its limits.
    pub(crate) fn step(&self, body: &str) {
        let steps = STEPS.fetch_add(1, Ordering::Relaxed) + 1;
        if steps.is_multiple_of(OFTEN)
            && let Some(path) = REPORT.as_ref()
        {
            // The file is opened each time, because some programs count the descriptors of this
            // process.
            let _ = std::fs::write(path, steps.to_string());
        }
        let held = ALLOCATOR.allocated().saturating_sub(self.allocated);
        assert!(held <= HELD, "{body}: {held} bytes are held after a step");
        let now = time();
        let took = now.saturating_sub(self.time.replace(now));
        assert!(took <= TIME, "{body}: a step took {took:?}");
    }

    /// Ends a step of a program with an I/O thread and a controller.
    pub(crate) fn step_of(&self, body: &str, turns: &mut Turns, controller: &Controller) {
        let (messages, notices) = (turns.most_messages(), controller.most_notices());
        assert!(messages <= MESSAGES, "{body}: {messages} messages have waited for a worker");
        assert!(notices <= NOTICES, "{body}: {notices} notices have waited for the control plane");
        self.step(body);
    }
}

fn time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}
