//! A kill.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::count::Count;

/// How long it may take until another process is there.
const PATIENCE: Duration = Duration::from_secs(20);

/// Kills the process that serves, and waits until there is another one.
pub(super) fn once(supervisor: u32, count: &mut Count) -> Result<()> {
    kill_worker(supervisor)?;
    count.done += 1;
    Ok(())
}

/// The same, without a count. Not until that one serves, for only the guest shows it.
pub(crate) fn kill_worker(supervisor: u32) -> Result<()> {
    let before =
        worker(supervisor).with_context(|| format!("process {supervisor} has no worker"))?;
    let pid = Pid::from_raw(before.cast_signed()).context("a process number")?;
    kill_process(pid, Signal::KILL).context("kill -9")?;
    let began = Instant::now();
    while worker(supervisor).is_none_or(|now| now == before) {
        if began.elapsed() > PATIENCE {
            bail!("nobody has come after process {before}");
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// The process that serves, or is about to.
fn worker(supervisor: u32) -> Option<u32> {
    let list =
        std::fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).ok()?;
    list.split_whitespace().last()?.parse().ok()
}
