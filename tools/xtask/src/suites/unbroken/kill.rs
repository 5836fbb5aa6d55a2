//! A kill.

use shadowbell_testing::wait;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use super::count::Count;

/// Kills the process that serves, and waits until there is another one.
pub(super) fn once(keeper: u32, count: &mut Count) -> Result<()> {
    kill_worker(keeper)?;
    count.done += 1;
    Ok(())
}

/// The same, without a count. Not until that one serves, for only the guest shows it.
pub(crate) fn kill_worker(keeper: u32) -> Result<()> {
    let before = worker(keeper).with_context(|| format!("process {keeper} has no worker"))?;
    let pid = Pid::from_raw(before.cast_signed()).context("a process number")?;
    kill_process(pid, Signal::KILL).context("kill -9")?;
    let began = Instant::now();
    while worker(keeper).is_none_or(|now| now == before) {
        if began.elapsed() > wait::LIMIT {
            bail!("nobody has come after process {before}");
        }
        wait::pause();
    }
    Ok(())
}

/// The process that serves, or is about to.
fn worker(keeper: u32) -> Option<u32> {
    let list = std::fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).ok()?;
    list.split_whitespace().last()?.parse().ok()
}
