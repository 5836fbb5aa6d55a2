//! What one step of a program may cost: a body that is correct and slow, or hoards, fails as well.
//!
//! Memory is counted by the allocator of whoever has this crate, over all threads: the tests run
//! several programs at a time, and what is allowed is more than all of them hold. Time is the
//! processor's, of the thread that carries the program out; a step is some messages or commands, so
//! what is allowed is a hundred times what any takes, and a machine at work does not matter.

use cap::Cap;
use rustix::time::{ClockId, clock_gettime};
use shadowbell_controller::{Controller, Turns};
use std::alloc::System;
use std::cell::Cell;
use std::ffi::OsString;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// How much a program may hold beyond what was held before it.
const HELD: usize = 48 << 20;
/// How much of the processor's time a step may take. With the address sanitizer, everything takes
/// some times as long.
const TIME: Duration = Duration::from_secs(1);
/// How many messages may wait for a worker at a time: some for each admin command that can be under
/// way, whatever a guest does, and however often. No program has been seen to have more than 4.
const MESSAGES: usize = 64;
/// How many notices may wait for a control plane: as many as the error log has entries, and some
/// for each admin command.
const NOTICES: usize = 64 + 32;

#[global_allocator]
static ALLOCATOR: Cap<System> = Cap::new(System, usize::MAX);
static STEPS: AtomicU64 = AtomicU64::new(0);

/// Where the number of steps is told, for whoever runs this under libFuzzer, and how often.
static REPORT: LazyLock<Option<OsString>> = LazyLock::new(|| std::env::var_os("BODIES_STEPS"));
const OFTEN: u64 = 1024;

/// How many steps all programs have taken so far.
pub fn steps() -> u64 {
    STEPS.load(Ordering::Relaxed)
}

/// The limits of one program.
pub(crate) struct Limits {
    allocated: usize,
    time: Cell<Duration>,
}

impl Limits {
    /// A program begins.
    pub(crate) fn begin() -> Self {
        Self { allocated: ALLOCATOR.allocated(), time: Cell::new(time()) }
    }

    /// It has taken a step.
    pub(crate) fn step(&self, body: &str) {
        let steps = STEPS.fetch_add(1, Ordering::Relaxed) + 1;
        if steps.is_multiple_of(OFTEN)
            && let Some(path) = REPORT.as_ref()
        {
            // Opened each time: some programs count this process's descriptors.
            let _ = std::fs::write(path, steps.to_string());
        }
        let held = ALLOCATOR.allocated().saturating_sub(self.allocated);
        assert!(held <= HELD, "{body}: {held} bytes are held after a step");
        let now = time();
        let took = now.saturating_sub(self.time.replace(now));
        assert!(took <= TIME, "{body}: a step took {took:?}");
    }

    /// As [`step`](Self::step), of a program with a worker and a controller.
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
