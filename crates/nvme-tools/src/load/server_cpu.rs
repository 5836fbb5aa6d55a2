//! CPU time of the server process.

use anyhow::{Context, anyhow};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Meter of another process's CPU usage during a run.
#[derive(Debug)]
pub(super) struct ServerCpu {
    pid: u32,
    begin: Option<(Instant, Duration)>,
    share: Option<f64>,
}

impl ServerCpu {
    /// Meter for the process `pid` and its children: a supervisor and its server process.
    ///
    /// # Errors
    /// There is no such process, or procfs does not show its CPU time.
    pub(super) fn new(pid: u32) -> anyhow::Result<Self> {
        used(pid).with_context(|| format!("reading the CPU time of process {pid}"))?;
        Ok(Self { pid, begin: None, share: None })
    }

    /// Begins the measurement.
    pub(super) fn begin(&mut self) {
        self.begin = used(self.pid).ok().map(|time| (Instant::now(), time));
    }

    /// Ends the measurement.
    pub(super) fn end(&mut self) {
        let Some((since, before)) = self.begin.take() else { return };
        let elapsed = since.elapsed().as_secs_f64();
        if let Ok(now) = used(self.pid)
            && elapsed > 0.0
        {
            self.share = Some(now.saturating_sub(before).as_secs_f64() / elapsed);
        }
    }

    /// CPU usage during the measurement; 1 is one whole CPU.
    pub(super) fn share(&self) -> Option<f64> {
        self.share
    }
}

/// CPU time of a process and its children.
fn used(pid: u32) -> anyhow::Result<Duration> {
    let tasks = |pid: &str| PathBuf::from(format!("/proc/{pid}/task"));
    let own = tasks(&pid.to_string());
    let mut sum = used_by(&own)?;
    // The file `children` requires CONFIG_PROC_CHILDREN. A child that ends meanwhile is skipped.
    let children = fs::read_to_string(own.join(format!("{pid}/children"))).unwrap_or_default();
    for child in children.split_whitespace() {
        sum += used_by(&tasks(child)).unwrap_or_default();
    }
    Ok(sum)
}

/// CPU time of all threads of a process. Read from `schedstat`, whose first field is in
/// nanoseconds, because `stat` counts in hundredths of a second.
fn used_by(tasks: &Path) -> anyhow::Result<Duration> {
    let mut sum = 0u64;
    for task in fs::read_dir(tasks)? {
        // A thread that ends meanwhile is skipped.
        let Ok(text) = fs::read_to_string(task?.path().join("schedstat")) else { continue };
        let time = text.split(' ').next().and_then(|word| word.parse::<u64>().ok());
        sum += time.ok_or_else(|| anyhow!("`{}` in schedstat", text.trim()))?;
    }
    Ok(Duration::from_nanos(sum))
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_testing::process_group::ProcessGroup;
    use shadowbell_testing::wait;

    #[test]
    fn busy_and_idle_processes_are_distinguished() {
        let share = |script: &str| {
            let mut command = std::process::Command::new("sh");
            let child = ProcessGroup::spawn(command.args(["-c", script])).unwrap();
            // The child has usually started its own child after this pause; if not, the caller
            // repeats.
            wait::short_pause();
            let mut meter = ServerCpu::new(child.id()).unwrap();
            meter.begin();
            // Duration of the measurement.
            std::thread::sleep(Duration::from_millis(300));
            meter.end();
            meter.share().unwrap()
        };
        // A busy loop gets some CPU time even on a busy machine; a sleeping process uses none.
        let is_busy = |script| (0.01..1.2).contains(&share(script));
        wait::until("a busy process", || is_busy("while :; do :; done"));
        wait::until("a busy child", || is_busy("exec timeout 1000 sh -c 'while :; do :; done'"));
        wait::until("an idle process", || share("exec sleep 1000") < 0.001);
    }

    #[test]
    fn a_missing_process_is_an_error() {
        let error = ServerCpu::new(u32::MAX).unwrap_err();
        assert!(error.to_string().contains("4294967295"), "{error}");
    }
}
