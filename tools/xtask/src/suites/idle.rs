//! Whether a process does nothing at all.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

/// What one thread has used since it started.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Used {
    name: String,
    /// Clock ticks, in the kernel and outside.
    ticks: u64,
    switches: u64,
}

/// The name of the threads that the kernel makes for io_uring. Each looks every five seconds
/// whether it is still needed, and nobody can tell it not to: one such look is no work of the
/// process.
const KERNELS_OWN: &str = "iou-wrk-";

/// What was under way a moment ago comes to its end first: a thread that the kernel keeps for
/// io_uring's slow operations (a flush, a punched hole) leaves after five idle seconds.
const SETTLE: Duration = Duration::from_secs(7);

/// An error unless the process and its children go three seconds without using any time, once it has settled.
pub(crate) fn check(process: u32) -> Result<()> {
    sleep(SETTLE);
    idle_now(process)
}

fn idle_now(process: u32) -> Result<()> {
    let before = all_used(process)?;
    // A thread with a timer, or one that polls, is seen in this time.
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
    /// What was used meanwhile, in words; `None` if nothing was.
    fn since(&self, before: &Self) -> Option<String> {
        let switches = self.switches.saturating_sub(before.switches);
        let ticks = self.ticks.saturating_sub(before.ticks);
        let allowed = u64::from(self.name.starts_with(KERNELS_OWN));
        (switches > allowed || ticks > 0)
            .then(|| format!("{}: {switches} context switches, {ticks} clock ticks", self.name))
    }
}

/// Of a process and its children.
fn all_used(process: u32) -> Result<BTreeMap<OsString, Used>> {
    let tasks = format!("/proc/{process}/task");
    let mut all = used(Path::new(&tasks))?;
    let children = fs::read_to_string(format!("{tasks}/{process}/children"))?;
    for child in children.split_whitespace() {
        all.append(&mut used(Path::new(&format!("/proc/{child}/task")))?);
    }
    Ok(all)
}

/// By thread id.
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

/// utime and stime of `/proc/PID/stat`: the fields 14 and 15, counted after the name, which may
/// hold anything and ends with the last parenthesis.
pub(crate) fn ticks(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split(' ').skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// Both kinds of context switches of `/proc/PID/status`.
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
    fn only_the_kernels_own_threads_may_look_around() {
        let used = |name: &str, ticks, switches| Used { name: name.to_owned(), ticks, switches };
        let quiet = |before: Used, after: Used| after.since(&before).is_none();
        assert!(quiet(used("worker", 5, 9), used("worker", 5, 9)));
        assert!(!quiet(used("worker", 5, 9), used("worker", 5, 10)));
        assert!(!quiet(used("worker", 5, 9), used("worker", 6, 9)));
        assert!(quiet(used("iou-wrk-7", 0, 9), used("iou-wrk-7", 0, 10)));
        assert!(!quiet(used("iou-wrk-7", 0, 9), used("iou-wrk-7", 0, 11)));
    }

    #[test]
    fn a_busy_process_is_told_from_an_idle_one() {
        for (script, idle) in [("exec sleep 1000", true), ("while sleep 0.05; do :; done", false)] {
            let mut command = Command::new("sh");
            let child = ProcessGroup::spawn(command.args(["-c", script])).unwrap();
            // The shell starts its program first.
            wait::until(script, || idle_now(child.id()).is_ok() == idle);
        }
    }
}
