//! Memory and CPU time of a process, from /proc.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::param::clock_ticks_per_second;

/// Memory of a process, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Private memory.
    pub(crate) anonymous: u64,
    /// Shared memory: touched memory of clients, and the doorbell pages.
    pub(crate) shared: u64,
}

/// Current memory of a process.
pub(crate) fn memory(pid: u32) -> Result<Memory> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).context(path)?;
    Ok(Memory {
        anonymous: field(&status, "RssAnon:").context("no RssAnon")? * 1024,
        shared: field(&status, "RssShmem:").context("no RssShmem")? * 1024,
    })
}

fn field(status: &str, name: &str) -> Option<u64> {
    let rest = status.lines().find_map(|line| line.strip_prefix(name))?;
    rest.trim().trim_end_matches(" kB").parse().ok()
}

/// CPU time and number of time slices of a process, over all its threads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Used {
    /// CPU time.
    pub(crate) time: Duration,
    /// Number of times that a thread got a CPU.
    pub(crate) slices: u64,
}

/// Current usage of a process.
pub(crate) fn used(pid: u32) -> Result<Used> {
    let tasks = format!("/proc/{pid}/task");
    let mut sum = Used::default();
    for task in fs::read_dir(&tasks).context(tasks)? {
        // A thread may end after it was listed.
        let Ok(text) = fs::read_to_string(task?.path().join("schedstat")) else { continue };
        let (time, slices) = schedstat(&text).context("schedstat")?;
        sum.time += Duration::from_nanos(time);
        sum.slices += slices;
    }
    Ok(sum)
}

/// CPU time of a process, including threads that have ended, because a server may have one thread
/// for each client. The resolution is a clock tick, usually 10 ms.
pub(crate) fn time_of_all(pid: u32) -> Result<Duration> {
    let path = format!("/proc/{pid}/stat");
    let ticks = ticks(&fs::read_to_string(&path).context(path)?).context("stat")?;
    Ok(Duration::from_secs_f64(ticks as f64 / clock_ticks_per_second() as f64))
}

/// User and kernel ticks: fields 14 and 15. Field 2 is a name that may contain spaces.
fn ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// CPU time in nanoseconds (field 1) and number of time slices (field 3).
fn schedstat(text: &str) -> Option<(u64, u64)> {
    let mut fields = text.split_whitespace();
    Some((fields.next()?.parse().ok()?, fields.nth(1)?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_testing::process_group::ProcessGroup;
    use shadowbell_testing::wait::until;

    #[test]
    fn the_fields_of_proc_are_found() {
        let status = "VmRSS:\t  99 kB\nRssAnon:\t    1234 kB\nRssShmem:\t       8 kB\n";
        assert_eq!((field(status, "RssAnon:"), field(status, "RssShmem:")), (Some(1234), Some(8)));
        assert_eq!(field(status, "RssFile:"), None);
        let stat = "7 (a b) c) S 1 7 7 0 -1 4194560 1 2 3 4 50 60 7 8 20 0 1\n";
        assert_eq!((ticks(stat), ticks("7 (a) S 1")), (Some(110), None));
        assert_eq!(schedstat("300 20 7\n"), Some((300, 7)));
        assert_eq!(schedstat("300 20"), None);
    }

    #[test]
    fn the_usage_of_a_process_is_read() {
        let script = "while sleep 0.01; do :; done";
        let mut command = std::process::Command::new("sh");
        let mut child = ProcessGroup::spawn(command.args(["-c", script])).unwrap();
        let before = used(child.id()).unwrap();
        // The thread gets a new time slice after each of its sleeps.
        until("another slice", || used(child.id()).unwrap().slices > before.slices);
        assert!(memory(child.id()).unwrap().anonymous >= 4096);
        child.kill();
        assert!(memory(u32::MAX).is_err() && used(u32::MAX).is_err());
    }
}
