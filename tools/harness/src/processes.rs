//! Processes and their threads, read from `/proc`. They are listed when a step hangs or leaves
//! processes behind.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::path::PathBuf;

use rustix::process::{Pid, Signal, kill_process};

/// A process, as `/proc` describes it.
#[derive(Debug)]
pub(crate) struct Process {
    pid: i32,
    command: String,
    /// Name of each thread, its state, and the kernel function in which it sleeps.
    threads: Vec<String>,
}

impl Process {
    /// Reads a process. `None` if the process has ended or is a zombie.
    fn read(pid: i32) -> Option<Self> {
        let directory = PathBuf::from(format!("/proc/{pid}"));
        if state(&fs::read_to_string(directory.join("stat")).ok()?)?.state == 'Z' {
            return None;
        }
        let command = fs::read(directory.join("cmdline")).ok()?;
        let command = String::from_utf8_lossy(&command).replace('\0', " ").trim().to_owned();
        let tasks = fs::read_dir(directory.join("task")).ok()?.flatten();
        let threads = tasks.filter_map(|task| {
            let read = |name| fs::read_to_string(task.path().join(name)).ok();
            let state = state(&read("stat")?)?.state;
            Some(format!("{} {state} {}", read("comm")?.trim(), read("wchan")?))
        });
        Some(Self { pid, command, threads: threads.collect() })
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}\n    threads: {}", self.pid, self.command, self.threads.join("; "))
    }
}

/// A list of processes, one per line, with a line of threads each.
pub(crate) fn list(processes: &[Process]) -> String {
    processes.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Ends processes by SIGKILL. A process that has ended meanwhile is no error.
pub(crate) fn kill(processes: &[Process]) {
    for pid in processes.iter().filter_map(|process| Pid::from_raw(process.pid)) {
        let _ = kill_process(pid, Signal::KILL);
    }
}

/// Kills all processes except the calling one that have a pipe open, and returns them. A process
/// may fork between the search and its kill, so the search is repeated until no process is found.
pub(crate) fn kill_holders(pipe_inode: u64) -> Vec<Process> {
    let mut killed: Vec<Process> = Vec::new();
    // The number of searches is limited, because the kernel cannot end a process that waits for a
    // device.
    for _ in 0..1000 {
        let found = holders(pipe_inode);
        if found.is_empty() {
            break;
        }
        kill(&found);
        let is_known = |process: &Process| killed.iter().any(|known| known.pid == process.pid);
        let new: Vec<_> = found.into_iter().filter(|process| !is_known(process)).collect();
        if new.is_empty() {
            // The kernel needs a moment to end a killed process.
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        killed.extend(new);
    }
    killed
}

/// Descendants of a process that have not ended, parents before their children.
pub(crate) fn descendants(ancestor: u32) -> Vec<Process> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for pid in pids() {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
        if let Some(stat) = stat.ok().as_deref().and_then(state) {
            children.entry(stat.parent).or_default().push(pid);
        }
    }
    let mut found = Vec::new();
    let mut next = i32::try_from(ancestor).into_iter().collect::<Vec<_>>();
    while let Some(parent) = next.pop() {
        let of_parent = children.remove(&parent).unwrap_or_default();
        found.extend(of_parent.iter().copied().filter_map(Process::read));
        next.extend(of_parent);
    }
    found
}

/// Processes, except the calling one, that have a pipe open.
pub(crate) fn holders(pipe_inode: u64) -> Vec<Process> {
    let link = PathBuf::from(format!("pipe:[{pipe_inode}]"));
    let has_open = |pid: &i32| {
        let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        files.filter_map(|file| fs::read_link(file.path()).ok()).any(|target| target == link)
    };
    let own = i32::try_from(std::process::id()).ok();
    pids().filter(|pid| Some(*pid) != own).filter(has_open).filter_map(Process::read).collect()
}

fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// State and parent of a process, from `/proc/PID/stat`.
struct Stat {
    state: char,
    parent: i32,
}

fn state(stat: &str) -> Option<Stat> {
    // The name, in parentheses, may itself contain spaces and parentheses.
    let (_, rest) = stat.rsplit_once(") ")?;
    let mut fields = rest.split(' ');
    Some(Stat { state: fields.next()?.chars().next()?, parent: fields.next()?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn descendants_and_holders_of_a_pipe_are_found() {
        let mut shell = Command::new("sh");
        // `cat` is a child that has the shell's standard output open until the shell's standard
        // input is closed.
        shell
            .args(["-c", "exec 3<&0; cat <&3 & wait"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        let inode = rustix::fs::fstat(shell.stdout.as_ref().unwrap()).unwrap().st_ino;
        shadowbell_testing::wait::until("a shell and its child hold the pipe", || {
            holders(inode).len() == 2
        });
        let family = descendants(std::process::id());
        let text = list(&family);
        assert!(
            text.contains(&format!("{} sh -c exec 3<&0; cat <&3 & wait", shell.id())),
            "{text}"
        );
        assert!(text.contains(" cat\n"), "{text}");
        kill(&holders(inode));
        shell.wait().unwrap();
        shadowbell_testing::wait::until("no process holds the pipe", || holders(inode).is_empty());
    }

    #[test]
    fn a_process_name_with_parentheses_is_parsed() {
        let stat = state("12 (a) b) S 7 12 12 0").unwrap();
        assert_eq!((stat.state, stat.parent), ('S', 7));
    }
}
