//! CPU time and sleeps of a process, and its CPU affinity.

use std::fs;
use std::io::ErrorKind;

use anyhow::{Context, Result};
use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use crate::idle::ticks;

/// Resource usage of a process since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Usage {
    /// CPU time in seconds, user and kernel, including threads that have ended.
    pub(crate) seconds: f64,
    /// Number of voluntary context switches of its threads, excluding threads that have ended.
    pub(crate) sleeps: f64,
}

impl Usage {
    pub(crate) fn of(process: u32) -> Result<Self> {
        let path = format!("/proc/{process}/stat");
        let text = fs::read_to_string(&path).context(path)?;
        let ticks = ticks(&text).context("no times in /proc/PID/stat")?;
        let mut sleeps = 0;
        for thread in threads(process)? {
            let path = format!("/proc/{process}/task/{thread}/status");
            match fs::read_to_string(&path) {
                Ok(text) => sleeps += switches(&text).context("no switches in its status")?,
                // The thread has ended since it was listed.
                Err(error) if is_gone(&error) => {}
                Err(error) => return Err(error).context(path),
            }
        }
        let per_second = rustix::param::clock_ticks_per_second() as f64;
        Ok(Self { seconds: ticks as f64 / per_second, sleeps: sleeps as f64 })
    }

    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            seconds: self.seconds - before.seconds,
            sleeps: (self.sleeps - before.sleeps).max(0.0),
        }
    }
}

/// Pins all threads of `process`, and threads that they start later, to one CPU: the last one that
/// this process may use.
pub(crate) fn pin_to_last_cpu(process: u32) -> Result<()> {
    let allowed = sched_getaffinity(None).context("reading the CPU affinity")?;
    let last =
        (0..CpuSet::MAX_CPU).rfind(|cpu| allowed.is_set(*cpu)).context("no CPU is allowed")?;
    let mut one = CpuSet::new();
    one.set(last);
    for thread in threads(process)? {
        match sched_setaffinity(Pid::from_raw(thread), &one) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => {}
            Err(errno) => return Err(errno).with_context(|| format!("confining thread {thread}")),
        }
    }
    Ok(())
}

fn threads(process: u32) -> Result<Vec<i32>> {
    let path = format!("/proc/{process}/task");
    let entries = fs::read_dir(&path).context(path)?;
    entries.map(|entry| Ok(entry?.file_name().to_string_lossy().parse()?)).collect()
}

fn is_gone(error: &std::io::Error) -> bool {
    let gone = rustix::io::Errno::SRCH.raw_os_error();
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(gone)
}

/// Number of voluntary context switches of a thread.
fn switches(status: &str) -> Option<u64> {
    let value = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"))?;
    value.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_testing::process_group::ProcessGroup;
    use std::sync::mpsc;

    #[test]
    fn cpu_time_grows() {
        let before = Usage::of(std::process::id()).unwrap();
        while Usage::of(std::process::id()).unwrap().since(before).seconds <= 0.0 {}
    }

    #[test]
    fn only_voluntary_switches_are_sleeps() {
        let status = "Name:\tx\nnonvoluntary_ctxt_switches:\t3\nvoluntary_ctxt_switches:\t17\n";
        assert_eq!(switches(status), Some(17));
        assert_eq!(switches("nonvoluntary_ctxt_switches:\t3\n"), None);
    }

    #[test]
    fn the_sleeps_of_every_thread_are_counted() {
        let before = Usage::of(std::process::id()).unwrap();
        let (to, from) = mpsc::channel::<mpsc::Sender<()>>();
        let thread = std::thread::spawn(move || {
            for _ in 0..50 {
                // One of the sleeps that the test counts.
                std::thread::sleep(std::time::Duration::from_micros(100));
            }
            // The thread must not end before its sleeps were counted.
            from.recv().unwrap().send(()).unwrap();
        });
        // A sleep of this thread is counted as well.
        std::thread::sleep(std::time::Duration::from_millis(1));
        while Usage::of(std::process::id()).unwrap().since(before).sleeps < 50.0 {
            std::thread::yield_now();
        }
        let (done, wait) = mpsc::channel();
        to.send(done).unwrap();
        wait.recv().unwrap();
        thread.join().unwrap();
    }

    #[test]
    fn a_pinned_process_has_one_cpu() {
        let mut command = std::process::Command::new("sleep");
        let mut child = ProcessGroup::spawn(command.arg("1000")).unwrap();
        pin_to_last_cpu(child.id()).unwrap();
        let set = sched_getaffinity(Pid::from_raw(child.id() as i32)).unwrap();
        child.kill();
        assert_eq!(set.count(), 1);
        assert!(pin_to_last_cpu(child.id()).is_err(), "the process has ended");
    }
}
