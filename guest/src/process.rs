//! A child that cannot outlive us, and that nobody waits for without a deadline.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::wait;

/// A child process in a process group of its own. Dropping it kills the whole group.
///
/// The caller puts `setpriv --pdeathsig KILL` in front of the command, for the case that this
/// process is killed before it can drop anything; that signal follows the *thread* that started the
/// child, so children are started from threads that live as long as they.
#[derive(Debug)]
pub struct Process {
    child: ProcessGroup,
    name: String,
}

impl Process {
    /// Starts `command`; `name` is for messages.
    pub fn spawn(name: &str, command: &mut Command) -> Result<Self> {
        let child = ProcessGroup::spawn(command).with_context(|| format!("starting {name}"))?;
        Ok(Self { child, name: name.to_owned() })
    }

    /// What it is called in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Its exit status, if it has ended.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("waiting for {}", self.name))
    }

    /// Waits until it ends by itself.
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

    /// Sends it a signal, if it still runs.
    pub fn signal(&mut self, signal: Signal) -> Result<()> {
        if let Some(status) = self.ended()? {
            bail!("{} has ended already ({})", self.name, describe(status));
        }
        kill_process(Pid::from_child(&self.child), signal)
            .with_context(|| format!("a signal for {}", self.name))
    }

    /// Kills it and what it started, and takes its exit status.
    pub fn kill(&mut self) {
        self.child.kill();
    }
}

/// How a process ended, in words.
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
    fn a_dropped_child_takes_its_children_along() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pid");
        let script =
            format!("sleep 1000 & echo $! > {0}.part; mv {0}.part {0}; wait", file.display());
        let process = Process::spawn("sh", Command::new("sh").args(["-c", &script])).unwrap();
        wait::until("the number of the process", || file.exists());
        let grandchild: i32 = std::fs::read_to_string(&file).unwrap().trim().parse().unwrap();
        drop(process);
        let alive = || {
            // A process that nobody has waited for yet is dead all the same.
            std::fs::read_to_string(format!("/proc/{grandchild}/stat"))
                .is_ok_and(|stat| !stat.contains(") Z "))
        };
        assert!(!alive());
    }

    #[test]
    fn waiting_has_an_end() {
        let mut process = Process::spawn("sleep", Command::new("sleep").arg("1000")).unwrap();
        // Short limit: its expiry is tested.
        assert!(process.wait(Duration::from_millis(30)).is_err());
        process.signal(Signal::TERM).unwrap();
        let status = process.wait(wait::LIMIT).unwrap();
        assert_eq!(describe(status), "killed by signal 15");
        assert!(process.signal(Signal::TERM).is_err());
    }
}
