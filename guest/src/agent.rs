//! Host side of the guest's agent: sends commands, receives exit codes and output.

use shadowbell_testing::wait::{self, LIMIT};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::frame::{self, Lines, Message};

/// Maximum time of a blocking read. Between two reads, the caller's `check` function is called.
const TICK: Duration = Duration::from_millis(50);

/// Result of a command in the guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// Exit code; 128 + n if signal n ended the command.
    pub code: i32,
    /// Standard output and standard error, with invalid UTF-8 replaced.
    pub text: String,
}

impl Output {
    /// Output of a command that must succeed.
    ///
    /// # Errors
    ///
    /// The command failed; the error has its exit code and output.
    pub fn success(self) -> Result<String> {
        if self.code == 0 {
            return Ok(self.text);
        }
        bail!("exit code {}: {}", self.code, self.text.trim());
    }
}

/// Waits for QEMU's connection to a listening socket. `check` is called repeatedly and may end the
/// wait with an error (for example because QEMU has ended).
pub(crate) fn accept(
    listener: &UnixListener,
    timeout: Duration,
    check: &mut dyn FnMut() -> Result<()>,
) -> Result<UnixStream> {
    listener.set_nonblocking(true)?;
    let deadline = Instant::now() + timeout;
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false)?;
                return Ok(stream);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("waiting for QEMU to connect"),
        }
        check()?;
        if Instant::now() > deadline {
            bail!("QEMU did not connect within {} s", timeout.as_secs());
        }
        wait::pause();
    }
}

/// Connection to the agent in the guest of one QEMU process. It stays open when the guest reboots.
#[derive(Debug)]
pub struct Agent {
    stream: UnixStream,
    lines: Lines,
    sequence: u64,
    boot_id: String,
    /// True after a command has timed out: the agent may not answer later commands.
    lost: bool,
}

impl Agent {
    /// Creates an agent of a connected serial port.
    pub fn new(stream: UnixStream) -> Result<Self> {
        stream.set_read_timeout(Some(TICK))?;
        stream.set_write_timeout(Some(LIMIT))?;
        let boot_id = String::new();
        Ok(Self { stream, lines: Lines::default(), sequence: 0, boot_id, lost: false })
    }

    /// Waits until the agent of a new boot is ready. Calls `check` repeatedly. An error of `check`
    /// ends the wait.
    pub fn wait_hello(
        &mut self,
        timeout: Duration,
        check: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            // Answers of the previous boot may still be in the pipe; they are discarded.
            if let Some(Message::Hello { boot_id }) = self.next(deadline, check)?
                && boot_id != self.boot_id
            {
                self.boot_id = boot_id;
                self.lost = false;
                return Ok(());
            }
        }
    }

    /// Runs a shell command in the guest. While it waits, calls `check` repeatedly. An error of
    /// `check` ends the wait.
    ///
    /// # Errors
    ///
    /// The guest did not answer in time, rebooted meanwhile, or QEMU ended. After a timeout all
    /// further commands fail immediately, until the guest has booted again. A command that fails
    /// in the guest is not an error: see [`Output::success`].
    pub fn run(
        &mut self,
        command: &str,
        timeout: Duration,
        check: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Output> {
        if self.lost {
            bail!("a command before this one never ended: {command}");
        }
        let sequence = self.send(command)?;
        // Until the answer is received, the agent counts as lost.
        self.lost = true;
        let deadline = Instant::now() + timeout;
        loop {
            match self.next(deadline, check).with_context(|| format!("in the guest: {command}"))? {
                Some(Message::End { sequence: ended, code, output }) if ended == sequence => {
                    self.lost = false;
                    let text = String::from_utf8_lossy(&output).into_owned();
                    return Ok(Output { code, text });
                }
                Some(Message::Hello { boot_id }) if boot_id != self.boot_id => {
                    self.boot_id = boot_id;
                    self.lost = false;
                    bail!("the guest restarted while it ran: {command}");
                }
                // The late answer of a command that timed out is ignored.
                Some(_) | None => {}
            }
        }
    }

    /// Sends a command without waiting for its answer, such as a reboot. Returns its sequence
    /// number.
    pub fn send(&mut self, command: &str) -> Result<u64> {
        self.sequence += 1;
        let line = frame::run(self.sequence, command)?;
        self.stream.write_all(line.as_bytes()).context("sending to the guest")?;
        Ok(self.sequence)
    }

    fn next(
        &mut self,
        deadline: Instant,
        check: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<Message>> {
        let mut buffer = [0; 16 * 1024];
        loop {
            if let Some(line) = self.lines.next_line() {
                return frame::parse(&line).with_context(|| format!("damaged answer {line:.80?}"));
            }
            if Instant::now() > deadline {
                bail!("the guest did not answer in time");
            }
            match self.stream.read(&mut buffer) {
                Ok(0) => {
                    check()?;
                    bail!("QEMU closed the guest's serial port");
                }
                Ok(count) => self.lines.push(buffer.get(..count).unwrap_or_default()),
                Err(error)
                    if matches!(
                        error.kind(),
                        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                    ) =>
                {
                    check()?;
                }
                Err(error) => return Err(error).context("reading from the guest"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;
    use shadowbell_testing::process_group::ProcessGroup;

    fn pair() -> (Agent, BufReader<UnixStream>) {
        let (near, far) = UnixStream::pair().unwrap();
        (Agent::new(near).unwrap(), BufReader::new(far))
    }

    /// Runs a guest's agent that answers each command line with the result of the closure.
    fn answer(
        mut port: BufReader<UnixStream>,
        make: impl Fn(u64, &str) -> String + Send + 'static,
    ) {
        std::thread::spawn(move || {
            let mut line = String::new();
            while port.read_line(&mut line).unwrap_or(0) > 0 {
                let mut words = line.trim().split(' ').skip(1);
                let sequence = words.next().unwrap().parse().unwrap();
                let answer = make(sequence, words.next().unwrap());
                port.get_mut().write_all(answer.as_bytes()).unwrap();
                line.clear();
            }
        });
    }

    #[test]
    fn noise_and_late_answers_are_passed_over() {
        let (mut agent, port) = pair();
        answer(port, |n, _| {
            format!("[  3.1] noise\n@END {} 9 3 b2xk\n@END {n} 1 5 aGVsbG8=\n", n - 1)
        });
        let output = agent.run("anything", LIMIT, &mut || Ok(())).unwrap();
        assert_eq!(output, Output { code: 1, text: "hello".into() });
        assert!(output.success().unwrap_err().to_string().contains("hello"));
    }

    #[test]
    fn a_restart_during_a_command_is_an_error_and_the_new_boot_is_known() {
        let (mut agent, port) = pair();
        answer(port, |n, _| match n {
            1 => "@HELLO two\n".into(),
            _ => format!("@END {n} 0 0 \n"),
        });
        let error = agent.run("x", LIMIT, &mut || Ok(())).unwrap_err();
        assert!(error.to_string().contains("restarted"), "{error}");
        assert_eq!(agent.run("x", LIMIT, &mut || Ok(())).unwrap().code, 0);
    }

    #[test]
    fn a_silent_or_dead_machine_is_an_error() {
        let (mut agent, _port) = pair();
        // The limit is short, because the test waits for its expiry.
        let error = agent.run("x", Duration::from_millis(80), &mut || Ok(())).unwrap_err();
        assert!(format!("{error:#}").contains("in time"), "{error:#}");
        let began = Instant::now();
        assert!(agent.run("y", LIMIT, &mut || Ok(())).is_err(), "the guest is lost");
        assert!(began.elapsed() < LIMIT);
        let (mut agent, _port) = pair();
        let error = agent.run("x", LIMIT, &mut || bail!("QEMU ended")).unwrap_err();
        assert!(format!("{error:#}").contains("QEMU ended"), "{error:#}");
    }

    /// Runs the loop of init.sh in a real shell, with a pipe instead of a serial port.
    #[test]
    fn the_guests_loop_speaks_the_same_language() {
        let init = include_str!("init.sh");
        let (_, agent_loop) = init.split_once("exec 3<>$port\n").unwrap();
        let directory = tempfile::tempdir().unwrap();
        let script = agent_loop
            .replace("<&3 || { sleep 1; continue; }", "|| exit 0")
            .replace(">&3", "")
            .replace("3>&-", "")
            .replace("/tmp/.agent", &directory.path().join("agent").display().to_string());
        let (near, far) = UnixStream::pair().unwrap();
        let mut command = Command::new("sh");
        command
            .args(["-c", &script])
            .stdin(Stdio::from(std::os::fd::OwnedFd::from(far.try_clone().unwrap())))
            .stdout(Stdio::from(std::os::fd::OwnedFd::from(far)));
        let mut child = ProcessGroup::spawn(&mut command).unwrap();
        drop(command);
        let mut agent = Agent::new(near).unwrap();
        agent.wait_hello(LIMIT, &mut || Ok(())).unwrap();
        let mut run = |command: &str| agent.run(command, LIMIT, &mut || Ok(())).unwrap();
        assert_eq!(run("echo one; echo two >&2; exit 3").text, "one\ntwo\n");
        assert_eq!(run("exit 3").code, 3);
        assert_eq!(run("printf '@END 9 9 9 '; cat /dev/null").text, "@END 9 9 9 ");
        let long = run("i=0; while [ $i -lt 3000 ]; do echo line $i; i=$((i+1)); done").text;
        assert!(long.starts_with("line 0\n") && long.ends_with("line 2999\n"));
        drop(agent);
        child.wait();
    }
}
