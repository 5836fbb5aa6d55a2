//! Check that an idle process uses no CPU time.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// CPU usage of one thread since its start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Used {
    name: String,
    /// Clock ticks, user and kernel.
    ticks: u64,
    switches: u64,
}

/// Prefix of the names of the kernel's io_uring worker threads. An idle one wakes up every five
/// seconds to check whether to exit. A process cannot prevent that, so these wakeups do not count.
const KERNEL_WORKER_PREFIX: &str = "iou-wrk-";

/// Time to wait before the check, so that two activities have ended. The kernel's worker threads
/// for slow io_uring operations (flush, hole punching) exit after five idle seconds. The control
/// socket's time limit for the head of a request runs for up to ten seconds after the statistics
/// were read.
const SETTLE_TIME: Duration = Duration::from_secs(12);

/// Waits, and then fails if the process or its children use CPU time within three seconds.
pub(crate) fn check(process: u32) -> Result<()> {
    sleep(SETTLE_TIME);
    idle_now(process)
}

fn idle_now(process: u32) -> Result<()> {
    let before = all_used(process)?;
    // Duration of the measurement. A thread that polls or has a timer uses CPU time within it.
    sleep(Duration::from_secs(3));
    let after = all_used(process)?;
    let busy: Vec<String> = after
        .iter()
        .filter_map(|(id, now)| now.since(&before.get(id).cloned().unwrap_or_default()))
        .collect();
    ensure!(busy.is_empty(), "in three idle seconds, by thread:\n{}", busy.join("\n"));
    Ok(())
}

impl Used {
    /// Description of the CPU usage since `before`; `None` if there was none.
    fn since(&self, before: &Self) -> Option<String> {
        let switches = self.switches.saturating_sub(before.switches);
        let ticks = self.ticks.saturating_sub(before.ticks);
        let allowed = u64::from(self.name.starts_with(KERNEL_WORKER_PREFIX));
        (switches > allowed || ticks > 0)
            .then(|| format!("{}: {switches} context switches, {ticks} clock ticks", self.name))
    }
}

/// CPU usage of a process and its children.
fn all_used(process: u32) -> Result<BTreeMap<OsString, Used>> {
    let tasks = format!("/proc/{process}/task");
    let mut all = used(Path::new(&tasks))?;
    let children = fs::read_to_string(format!("{tasks}/{process}/children"))?;
    for child in children.split_whitespace() {
        all.append(&mut used(Path::new(&format!("/proc/{child}/task")))?);
    }
    Ok(all)
}

/// CPU usage by thread id.
fn used(tasks: &Path) -> Result<BTreeMap<OsString, Used>> {
    fs::read_dir(tasks)
        .with_context(|| tasks.display().to_string())?
        .map(|task| {
            let task = task?;
            let path = task.path();
            let name = fs::read_to_string(path.join("comm"))?.trim().to_owned();
            let ticks = ticks(&fs::read_to_string(path.join("stat"))?).context("stat")?;
            let switches = switches(&fs::read_to_string(path.join("status"))?);
            Ok((task.file_name(), Used { name, ticks, switches }))
        })
        .collect()
}

/// utime and stime of `/proc/PID/stat`: fields 14 and 15, counted from the last parenthesis,
/// because the name in field 2 may contain any character.
pub(crate) fn ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ').skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// Voluntary and involuntary context switches of `/proc/PID/status`.
fn switches(status: &str) -> u64 {
    status
        .lines()
        .filter_map(|line| line.split_once("voluntary_ctxt_switches:"))
        .filter_map(|(_, number)| number.trim().parse::<u64>().ok())
        .sum()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use shadowbell_testing::process_group::ProcessGroup;
    use shadowbell_testing::wait;

    #[test]
    fn the_fields_of_proc_are_found() {
        let stat = "42 (a) b ) S 1 42 42 0 -1 4194304 100 0 0 0 17 5 0 0 20 0 1 0 99";
        assert_eq!(ticks(stat), Some(22));
        assert_eq!(ticks("nonsense"), None);
        let status = "Name:\tx\nvoluntary_ctxt_switches:\t7\nnonvoluntary_ctxt_switches:\t2\n";
        assert_eq!(switches(status), 9);
    }

    #[test]
    fn only_kernel_threads_may_wake_up() {
        let used = |name: &str, ticks, switches| Used { name: name.to_owned(), ticks, switches };
        let quiet = |before: Used, after: Used| after.since(&before).is_none();
        assert!(quiet(used("worker", 5, 9), used("worker", 5, 9)));
        assert!(!quiet(used("worker", 5, 9), used("worker", 5, 10)));
        assert!(!quiet(used("worker", 5, 9), used("worker", 6, 9)));
        assert!(quiet(used("iou-wrk-7", 0, 9), used("iou-wrk-7", 0, 10)));
        assert!(!quiet(used("iou-wrk-7", 0, 9), used("iou-wrk-7", 0, 11)));
    }

    #[test]
    fn busy_and_idle_processes_are_distinguished() {
        for (script, idle) in [("exec sleep 1000", true), ("while sleep 0.05; do :; done", false)] {
            let mut command = Command::new("sh");
            let child = ProcessGroup::spawn(command.args(["-c", script])).unwrap();
            // The check is repeated, because the shell is idle only after it has started its
            // program.
            wait::until(script, || idle_now(child.id()).is_ok() == idle);
        }
    }
}
