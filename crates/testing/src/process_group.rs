//! Child processes that end with the test, together with their own children.

use std::io::{self, Read};
use std::ops::{Deref, DerefMut};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Output};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::wait;

/// Child process in a process group of its own.
///
/// The drop kills every process of the group, and waits until all of them have ended. Otherwise a
/// server process could exist for a short time after its supervisor, and still hold locks and
/// ports.
#[derive(Debug)]
pub struct ProcessGroup {
    child: Child,
    ended: bool,
}

impl ProcessGroup {
    /// Starts the program of `command` as the first process of a new group.
    ///
    /// # Errors
    ///
    /// If the program cannot be started.
    pub fn spawn(command: &mut Command) -> io::Result<Self> {
        Ok(Self { child: command.process_group(0).spawn()?, ended: false })
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Sends `signal` to the first process of the group.
    ///
    /// # Panics
    /// If that process has ended and was waited for.
    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("a signal to a child");
    }

    /// Waits until the first process of the group has ended.
    ///
    /// # Panics
    /// After [`wait::LIMIT`].
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let end = format!("the end of process {}", self.child.id());
        wait::until_some(&end, || self.child.try_wait().expect("a child"))
    }

    /// Waits until every process of the group has ended. Returns the exit status of the first
    /// process.
    ///
    /// # Panics
    ///
    /// After [`wait::LIMIT`].
    #[track_caller]
    pub fn wait_all(&mut self) -> ExitStatus {
        let status = self.wait();
        let end = format!("the end of process group {}", self.child.id());
        wait::until(&end, || !has_members(self.pid()));
        self.ended = true;
        status
    }

    /// Waits until the first process has ended. Returns its exit status and the rest of its output.
    ///
    /// # Panics
    ///
    /// After [`wait::LIMIT`].
    #[track_caller]
    pub fn output(mut self) -> Output {
        let stdout = self.child.stdout.take().map(read);
        let stderr = self.child.stderr.take().map(read);
        let status = self.wait();
        let bytes = |reader: Option<JoinHandle<Vec<u8>>>| {
            reader.map_or_else(Vec::new, |reader| reader.join().expect("a reader"))
        };
        Output { status, stdout: bytes(stdout), stderr: bytes(stderr) }
    }

    /// Kills every process of the group, and waits until all of them have ended.
    pub fn kill(&mut self) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        // The group is killed before the first process is waited for. Afterwards the number of the
        // group could belong to another process.
        let _ = kill_process_group(self.pid(), Signal::KILL);
        let deadline = wait::deadline();
        while matches!(self.child.try_wait(), Ok(None)) || has_members(self.pid()) {
            if Instant::now() > deadline {
                // This does not panic, because the test itself may be panicking.
                return eprintln!("process group {} does not end", self.child.id());
            }
            wait::pause();
        }
    }
}

impl Deref for ProcessGroup {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.child
    }
}

impl DerefMut for ProcessGroup {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.child
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Reads a pipe to its end on a separate thread. Both pipes of a child must be read at the same
/// time, because a child that has filled one of them waits for its reader.
fn read(mut pipe: impl Read + Send + 'static) -> JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        pipe.read_to_end(&mut bytes).expect("a pipe");
        bytes
    })
}

/// True if a process of the group has not ended.
fn has_members(group: Pid) -> bool {
    let group = group.as_raw_pid().to_string();
    let processes = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    processes.into_iter().any(|process| {
        let stat = std::fs::read_to_string(process.path().join("stat")).unwrap_or_default();
        // The name in parentheses may contain any characters.
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        let state = fields.next();
        state.is_some_and(|state| !"ZX".contains(state)) && fields.nth(1) == Some(&*group)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    #[test]
    fn children_of_children_end_with_the_group() {
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 1000 & sleep 1000"]).stdout(Stdio::piped());
        let mut group = ProcessGroup::spawn(&mut command).unwrap();
        let mut output = group.stdout.take().unwrap();
        assert!(has_members(group.pid()));
        drop(group);
        // The pipe ends only after every process of the group has ended, because all of them have
        // it open.
        assert_eq!(output.read_to_end(&mut Vec::new()).unwrap(), 0);
    }

    #[test]
    fn a_child_of_an_ended_child_is_waited_for() {
        let mut command = Command::new("sh");
        // A shell gives a background job /dev/null as input, unless the command redirects the
        // input.
        command.args(["-c", "exec 3<&0; cat <&3 & exit 3"]).stdin(Stdio::piped());
        let mut group = ProcessGroup::spawn(&mut command).unwrap();
        assert_eq!(group.wait().code(), Some(3));
        assert!(has_members(group.pid()));
        drop(group.stdin.take());
        assert_eq!(group.wait_all().code(), Some(3));
        assert!(!has_members(group.pid()));
    }
}
