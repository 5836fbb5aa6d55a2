//! Exec of the new program by the supervisor, after a server process of that program serves. The
//! supervisor's process id stays the same.
//!
//! An error after exec could not be undone. So before exec the new program is started once with a
//! snapshot ([`CHECK`]) and reports whether it could continue from this snapshot. Until exec, and
//! after a failed exec, the old program continues.
//!
//! Exec happens only while one server process serves and no upgrade or restart runs. Messages of
//! the server process and of clients stay in their sockets, signals are blocked, and a server
//! process that ends stays a zombie until the new program waits for it.

use super::command_line::{AS_SUPERVISOR, with_snapshot};
use super::log::log_line;
use super::pending_exec::{Identity, LIMIT, PendingExec, Step, identity};
use super::snapshot::PartialSnapshot;
use super::snapshot_codec::{self, Held};
use super::state::Supervisor;
use super::upgrade_progress::send_outcome;
use super::{broker, grants::GRANTS};
use crate::checkpoint::memory_of;
use crate::permissions::Permit;
use crate::protocol;
use rustix::io::{FdFlags, fcntl_setfd};
use shadowbell_memory::process::{BlockedSignals, execute, take_inherited, unblock_signals};
use shadowbell_process::{deferred_close, logging};
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Command-line argument of a program that is started to check a snapshot.
pub const CHECK: &str = "supervisor-check";

/// Maximum time before the exec until the log is written. A reader that hangs does not delay the
/// exec further.
const LOGS: Duration = Duration::from_millis(50);

/// Answer of a program that accepts the snapshot.
const CAN: &str = "can go on";

/// Prints whether this program could continue from the snapshot on its standard input.
pub fn check() -> std::process::ExitCode {
    let memory = io::stdin().as_fd().try_clone_to_owned().map_err(|error| error.to_string());
    let checked =
        memory.and_then(|memory| snapshot_codec::check(memory).map_err(|why| why.to_string()));
    let answer = checked.map_or_else(|why| why, |()| CAN.to_owned());
    let is_said = io::stdout().write_all(answer.as_bytes()).is_ok();
    std::process::ExitCode::from(u8::from(!is_said))
}

impl Supervisor {
    /// Advances a pending exec, or gives it up.
    pub(super) fn advance_exec(&mut self, now: Instant) {
        let Some(mut pending_exec) = self.pending_exec.take() else { return };
        if self.ended != 0 || self.exit_code.is_some() {
            return pending_exec.ends(None);
        }
        match self.advance_step(&mut pending_exec, now) {
            Ok(()) if now < pending_exec.until => self.pending_exec = Some(pending_exec),
            Ok(()) => {
                let limit = LIMIT.as_secs();
                let what = match pending_exec.step {
                    Step::Can(_) if deferred_close::is_waiting() => {
                        "a descriptor that the server process sent was not closed"
                    }
                    Step::Requested(..) => "the new program did not answer",
                    _ => "there was no quiet moment",
                };
                pending_exec.ends(Some(&format!("{what} within {limit} s")));
            }
            Err(why) => pending_exec.ends(Some(&why)),
        }
    }

    /// Takes the next step of a pending exec. Does nothing while the step has to wait: for the
    /// answer of the check, or until no upgrade, restart or message is pending.
    fn advance_step(&mut self, pending_exec: &mut PendingExec, now: Instant) -> Result<(), String> {
        match &mut pending_exec.step {
            Step::Wanted => {
                let (child, identity) = self
                    .ask(&pending_exec.program)
                    .map_err(|error| format!("cannot start the new program: {error}"))?;
                pending_exec.step = Step::Requested(child, identity);
            }
            Step::Requested(child, identity) => {
                if child.try_wait().is_ok_and(|ended| ended.is_none()) {
                    return Ok(());
                }
                let answer = answer_of(child);
                if answer != CAN {
                    let why = if answer.is_empty() { "no support for that" } else { &answer };
                    return Err(format!(
                        "the new program cannot continue from the supervisor's state: {why}"
                    ));
                }
                pending_exec.step = Step::Can(*identity);
                pending_exec.until = now + LIMIT;
                return self.exec_when_quiet(pending_exec);
            }
            Step::Can(_) => return self.exec_when_quiet(pending_exec),
        }
        Ok(())
    }

    /// Starts the program as a check, with a snapshot on its standard input.
    fn ask(&self, program: &Path) -> io::Result<(Child, Identity)> {
        let identity = identity(program)?;
        let images = GRANTS.lock().images();
        let snapshot = self.snapshot(&images, None).map_err(io::Error::other)?;
        let memory = memory_of(&snapshot.bytes)?;
        let mut command = Command::new(program);
        command.arg(CHECK).stdin(Stdio::from(memory));
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        Ok((command.spawn()?, identity))
    }

    /// Returns true if one server process serves and no upgrade or restart runs. No descriptor is
    /// being closed: the exec would wait for a thread whose close waits for a file system.
    fn is_quiet(&self) -> bool {
        let worker = self.worker.as_ref();
        worker.is_some_and(|worker| {
            worker.serves_since.is_some()
                && !(worker.has_unsent() || worker.items.is_open || worker.process.has_ended())
                // The next program would handle a message again that is still in the socket.
                && !worker.is_seen
        }) && self.upgrade.is_none()
            && self.leaving.is_empty()
            && !deferred_close::is_waiting()
            && self.config_reads.iter().all(|read| read.deadline().is_none())
            && self.restart.is_none()
            && self.died.is_none()
            && self.left.is_none()
    }

    /// Executes the program if the supervisor is quiet (`is_quiet`).
    fn exec_when_quiet(&mut self, pending_exec: &mut PendingExec) -> Result<(), String> {
        if !self.is_quiet() {
            return Ok(());
        }
        let blocked = BlockedSignals::new(&self.all_signals());
        let _blocked = blocked.map_err(|error| error.to_string())?;
        self.execute(pending_exec)
    }

    /// Executes the program. Signals are blocked.
    fn execute(&mut self, pending_exec: &mut PendingExec) -> Result<(), String> {
        // Signals that came before they were blocked are handled first, because one may end the
        // service.
        if let Some(signal) = self.signals.next() {
            self.take_signal(signal);
            return Ok(());
        }
        // While a broker answers a request, the exec waits.
        let Some(_paused) = broker::pause() else { return Ok(()) };
        if !matches!(pending_exec.step, Step::Can(before) if identity(&pending_exec.program).is_ok_and(|now| now == before))
        {
            // The file was replaced after the check, so the new file is checked.
            pending_exec.step = Step::Wanted;
            return Ok(());
        }
        let held = Held {
            brokers: broker::all().map_err(|error| error.to_string())?,
            asker: pending_exec.asker.take(),
            outcome: pending_exec.outcome.clone(),
        };
        let error = self.exec_with_snapshot(&pending_exec.program, &held);
        pending_exec.asker = held.asker;
        Err(format!("{}: {error}", pending_exec.program.display()))
    }

    /// Sends the snapshot to a socket and executes the program. Returns only on failure.
    fn exec_with_snapshot(&self, program: &Path, held: &Held) -> io::Error {
        let send = || {
            let (ours, theirs) = protocol::pair()?;
            let images = GRANTS.lock().images();
            let record = self.snapshot(&images, Some(held)).map_err(io::Error::other)?;
            record.send(&ours, &mut 0)?;
            // The new program inherits `theirs`. If exec fails, the drop of `theirs` closes the
            // socket.
            fcntl_setfd(&theirs, FdFlags::empty())?;
            Ok(theirs)
        };
        match send() {
            Ok(left) => {
                logging::finish_within(LOGS);
                execute(program.as_os_str(), with_snapshot(&self.arguments, left.as_raw_fd()))
            }
            Err(error) => error,
        }
    }

    /// Creates the supervisor from the snapshot that this process sent before exec.
    ///
    /// # Errors
    /// There is no complete snapshot at the descriptor `left`.
    pub(super) fn resume_after_exec(
        arguments: Vec<OsString>,
        left: RawFd,
        permit: Permit,
    ) -> io::Result<Self> {
        let nothing = || {
            io::Error::other(format!(
                "{AS_SUPERVISOR} is an internal option of the supervisor; leave it out"
            ))
        };
        let left = take_inherited(left).ok_or_else(nothing)?;
        let mut record = None;
        while let Ok(Some(packet)) = protocol::receive(&left, true) {
            record = PartialSnapshot::take(record, packet);
        }
        let record = record.filter(PartialSnapshot::is_complete).ok_or_else(nothing)?;
        let mut supervisor = Self::new(arguments, permit)?;
        let parcel = record.read().map_err(io::Error::other)?;
        let held = supervisor.restore(parcel, true).map_err(io::Error::other)?;
        let held = held.unwrap_or_default();
        supervisor.permit_servers();
        broker::restore_all(held.brokers);
        let program = supervisor.program.display().to_string();
        log_line(&format!("the supervisor now runs {program}"));
        send_outcome(
            held.asker,
            Ok(&format!("{}; its supervisor runs that program too", held.outcome)),
        );
        unblock_signals(&supervisor.all_signals())?;
        Ok(supervisor)
    }
}

impl Supervisor {
    /// Permits the NBD servers of the configuration, which a snapshot of an earlier version lacks.
    fn permit_servers(&self) {
        let config = GRANTS.lock().facts.config.clone();
        if let Ok(permissions) = (self.permit)(&self.arguments, config.as_deref()) {
            let mut grants = GRANTS.lock();
            for server in &permissions.servers {
                grants.grant_server(&server.0);
            }
        }
    }
}

/// Reads the answer of the program that checked the snapshot and has ended.
fn answer_of(child: &mut Child) -> String {
    let Some(output) = child.stdout.take() else { return String::new() };
    // The read must not block, because a child of the program may still hold the pipe open.
    let _ = rustix::io::ioctl_fionbio(&output, true);
    let mut answer = [0; 512];
    let len = { output }.read(&mut answer).unwrap_or_default();
    String::from_utf8_lossy(&answer[..len]).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::super::process::Process;
    use super::super::worker::Worker;
    use super::*;
    use crate::permissions::Permissions;
    use rustix::net::sockopt::{set_socket_linger, set_socket_send_buffer_size};
    use shadowbell_testing::wait::{LIMIT, until};
    use std::net::{TcpListener, TcpStream};

    /// The exec waits while a descriptor is being closed: it would have to wait for the closing
    /// thread, without a limit, and no signal would be handled.
    #[test]
    fn a_close_that_does_not_end_prevents_the_exec() {
        let mut supervisor =
            Supervisor::new(Vec::new(), |_, _| Ok(Permissions::default())).unwrap();
        let process = Process::from_saved(rustix::process::getpid(), None, false);
        let mut worker = Worker::new(process, None, Path::new(""));
        worker.serves_since = Some(Instant::now());
        supervisor.worker = Some(worker);
        // Other tests close descriptors, too.
        until("a moment without a close", || supervisor.is_quiet());
        // The close of this socket lingers until its peer, which does not read, is dropped.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (reader, _) = listener.accept().unwrap();
        set_socket_send_buffer_size(&slow, 4096).unwrap();
        slow.set_nonblocking(true).unwrap();
        while slow.write(&[0; 65536]).is_ok() {}
        slow.set_nonblocking(false).unwrap();
        set_socket_linger(&slow, Some(LIMIT)).unwrap();
        deferred_close::defer([slow.into()]);
        assert!(!supervisor.is_quiet());
        drop(reader);
        until("the end of the close", || supervisor.is_quiet());
    }
}
