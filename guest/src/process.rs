//! Child processes that end with this process, and waits with a deadline.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::wait;

/// A child process in its own process group. Dropping the value kills the group.
///
/// The command must begin with `setpriv --pdeathsig KILL`, so that the kernel kills the child if
/// this process is killed. The kernel sends that signal when the *thread* that started the child
/// ends. A thread that starts a child must therefore live at least as long as the child.
#[derive(Debug)]
pub struct Process {
    child: ProcessGroup,
    name: String,
}

impl Process {
    /// Starts `command`. `name` is for messages.
    pub fn spawn(name: &str, command: &mut Command) -> Result<Self> {
        let child = ProcessGroup::spawn(command).with_context(|| format!("starting {name}"))?;
        Ok(Self { child, name: name.to_owned() })
    }

    /// Name in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Exit status, if the process has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("waiting for {}", self.name))
    }

    /// Waits for the end of the process.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.ended()? {
                return Ok(status);
            }
            if Instant::now() > deadline {
                bail!("{} did not end within {} s", self.name, timeout.as_secs());
            }
            wait::pause();
        }
    }

    /// Sends a signal. Fails if the process has ended.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        if let Some(status) = self.ended()? {
            bail!("{} has ended already ({})", self.name, describe(status));
        }
        kill_process(Pid::from_child(&self.child), signal)
            .with_context(|| format!("a signal for {}", self.name))
    }

    /// Kills the process group, and reaps the process.
    pub fn kill(&mut self) {
        self.child.kill();
    }
}

/// Describes an exit status.
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => "unknown end".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropping_a_process_kills_its_children() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pid");
        let script =
            format!("sleep 1000 & echo $! > {0}.part; mv {0}.part {0}; wait", file.display());
        let process = Process::spawn("sh", Command::new("sh").args(["-c", &script])).unwrap();
        wait::until("the number of the process", || file.exists());
        let grandchild: i32 = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        drop(process);
        let alive = || {
            // A zombie counts as ended.
            std::fs::read_to_string(format!("/proc/{grandchild}/stat"))
                .is_ok_and(|stat| !stat.contains(") Z "))
        };
        assert!(!alive());
    }

    #[test]
    fn waiting_has_an_end() {
        let mut process = Process::spawn("sleep", Command::new("sleep").arg("1000")).unwrap();
        // The limit is short, because the test waits for its expiry.
        assert!(process.wait(Duration::from_millis(30)).is_err());
        process.signal(Signal::TERM).unwrap();
        let status = process.wait(wait::LIMIT).unwrap();
        assert_eq!(describe(status), "killed by signal 15");
        assert!(process.signal(Signal::TERM).is_err());
    }
}
