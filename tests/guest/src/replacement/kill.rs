//! `kill -9` of the server process.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use shadowbell_testing::wait;

use super::count::Count;

/// Kills the server process, and waits until the supervisor has started another one.
pub(super) fn once(supervisor: u32, count: &mut Count) -> Result<()> {
    kill_worker(supervisor)?;
    count.done += 1;
    Ok(())
}

/// Kills the server process, without counting this for a test, and waits until the next server
/// process exists. The guest has to check whether that process serves.
pub(crate) fn kill_worker(supervisor: u32) -> Result<()> {
    let before =
        worker(supervisor).with_context(|| format!("process {supervisor} has no worker"))?;
    let pid = Pid::from_raw(before.cast_signed()).context("a process number")?;
    kill_process(pid, Signal::KILL).context("kill -9")?;
    let began = Instant::now();
    while worker(supervisor).is_none_or(|now| now == before) {
        if began.elapsed() > wait::LIMIT {
            bail!("no server process was started after process {before}");
        }
        wait::pause();
    }
    Ok(())
}

/// Process id of the server process: the newest child of the supervisor.
fn worker(supervisor: u32) -> Option<u32> {
    let list =
        std::fs::read_to_string(format!("/proc/{supervisor}/task/{supervisor}/children")).ok()?;
    list.split_whitespace().last()?.parse().ok()
}
