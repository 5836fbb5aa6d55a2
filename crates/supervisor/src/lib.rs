//! Supervisor process (`serve`, unless `--no-supervisor`): starts the server process, restarts it
//! after a crash, and replaces it on upgrade.
//!
//! The supervisor does no I/O and parses nothing that guests or their VMMs have written. One
//! thread does all of its work, except for jobs that may block: other threads open images, read the
//! configuration file and close descriptors. Everything that a server process may open or create is
//! in the grants (`grants`).
//!
//! # Upgrade
//!
//! The next process is started and prepared; then the running one quiesces and is killed, and the
//! next one recovers as after a crash (`upgrade`).
//!
//! # Crash of the server process
//!
//! A server process sends a checkpoint to the supervisor ([`checkpoint`]): the descriptors and
//! opaque data that the next process needs to continue for the connected clients. If a signal ends
//! the server process, the supervisor starts another one and sends it the checkpoint. The
//! supervisor keeps the checkpoint for further attempts until the new process reports that it has
//! recovered; from then on the new process's own checkpoint is valid. A process that cannot recover
//! reports the reason and ends: the next one then starts without a checkpoint, and the clients lose
//! their controllers.
//!
//! # Upgrade and crash of the supervisor
//!
//! After an upgrade the supervisor executes the new program too (`self_exec`). If a service manager
//! stores descriptors for the supervisor, the supervisor may be killed, and the next one continues
//! (`fd_store`, `adopt`). The supervisor's state is passed as a snapshot in both cases
//! (`snapshot`).
//!
//! [`checkpoint`]: crate::checkpoint
#![forbid(unsafe_code)]

mod adopt;
mod broker;
pub mod checkpoint;
mod checkpoint_codec;
pub mod client;
mod command_line;
mod config_read;
mod connect_broker;
mod control;
mod fd_store;
mod grants;
mod log;
mod monotonic;
mod open_broker;
mod path_broker;
pub mod path_protocol;
mod pending_exec;
pub mod permissions;
mod process;
mod process_exit;
pub mod protocol;
mod restart_policy;
mod self_exec;
mod service_manager;
mod snapshot;
mod snapshot_codec;
mod state;
mod trim_memory;
mod upgrade;
mod upgrade_progress;
mod watchdog;
mod worker;

use checkpoint::Checkpoint;
use command_line::config_file;
use config_read::{ConfigRead, Purpose};
use control::Control;
use grants::{GRANTS, id_of};
use log::log_line;
use pending_exec::PendingExec;
use permissions::Permit;
use protocol::{START, answer, question, to_supervisor, to_worker};
use restart_policy::RestartPolicy;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shadowbell_process::process_env::absolute;
use shadowbell_process::signals::{Caught, Meanings};
use shadowbell_process::{deferred_close, descriptor_limit, exit, logging, notify};
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGUSR1, SIGUSR2};
use state::Supervisor;
use std::ffi::OsString;
use std::io;
use std::mem::replace;
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::time::{Duration, Instant};
use trim_memory::TrimTimer;
use upgrade_progress::{Step, add_warnings, answer_to, requester};
use watchdog::Watchdog;
use worker::{MESSAGES, Worker};

pub use command_line::{DEFAULT_STOP_TIMEOUT, is_asked_for, is_service};
pub use self_exec::{CHECK, check};

/// Maximum time for the messages of one server process in a turn of the main loop.
const TURN: Duration = Duration::from_millis(10);
/// Maximum number of sockets that a server process reports.
const MAX_SOCKETS: usize = 4096;
/// Delay from a change of a checkpoint, or from the end of an image's use, until images that no
/// checkpoint contains any more are released.
const RELEASE: Duration = Duration::from_millis(200);

/// Supervises a server process until it ends or a signal ends the service.
///
/// `permit` returns the permissions of the server process.
pub fn run(mut arguments: Vec<OsString>, permit: Permit) -> ExitCode {
    // The supervisor holds the descriptors of all guests for recovery.
    descriptor_limit::raise();
    // Closing the last descriptor of guest memory frees the memory. This must not block the
    // supervisor's main thread.
    deferred_close::enable();
    let supervisor = match command_line::take_snapshot(&mut arguments) {
        Some(left) => Supervisor::resume_after_exec(arguments, left, permit),
        None => Supervisor::start(arguments, permit),
    };
    let status = match supervisor {
        Ok(mut supervisor) => supervisor.run(),
        Err(error) => {
            log_line(&format!("shadowbell: the supervisor cannot start: {error}"));
            exit::FAILED
        }
    };
    logging::finish();
    ExitCode::from(status)
}

impl Supervisor {
    /// Creates a supervisor without a server process and without sockets.
    fn new(arguments: Vec<OsString>, permit: Permit) -> io::Result<Self> {
        let others = [SIGCHLD, SIGUSR1, SIGUSR2, SIGHUP];
        // Without a configuration file there is nothing to reload, so SIGHUP keeps its default.
        let count = others.len() - usize::from(config_file(&arguments).is_none());
        let Meanings { ends, others } = Meanings::new(&others[..count]);
        let signals = Caught::catch(&[&ends[..], &others].concat())?;
        // `program` is a path and not `/proc/self/exe`, so that a restart uses the file that is
        // then installed.
        let program = std::env::current_exe()?;
        let config = config_file(&arguments).as_deref().map(absolute);
        GRANTS.lock().own_files = config.into_iter().chain([program.clone()]).collect();
        Ok(Self {
            arguments,
            permit,
            program,
            signals,
            ends,
            others,
            control: None,
            worker: None,
            upgrade: None,
            pending_exec: None,
            replacement: None,
            leaving: Vec::new(),
            deaths: RestartPolicy::default(),
            died: None,
            left: None,
            fd_store: None,
            restart: None,
            sockets: Vec::new(),
            is_ready: false,
            trim_timer: TrimTimer::default(),
            reading: None,
            config_reads: Vec::new(),
            release: None,
            watchdog: Watchdog::wanted(),
            ended: 0,
            end_limit: None,
            exit_code: None,
        })
    }

    fn start(arguments: Vec<OsString>, permit: Permit) -> io::Result<Self> {
        let mut supervisor = Self::new(arguments, permit)?;
        supervisor.listen();
        if !supervisor.resume() {
            supervisor.install_config();
            let Self { program, arguments, .. } = &supervisor;
            supervisor.worker = Some(Worker::start(program, arguments, START, None)?);
        }
        supervisor.write_snapshot();
        Ok(supervisor)
    }

    /// Opens the control socket. Without it, only signals control the supervisor.
    fn listen(&mut self) {
        let control = Control::listen().inspect_err(|error| {
            log_line(&format!(
                "warning: `shadowbell upgrade` will not find this server: the supervisor has no \
                 control socket ({error}); send it SIGUSR2 instead"
            ));
        });
        self.control = control.ok();
    }

    /// All signals that the supervisor handles.
    fn all_signals(&self) -> Vec<i32> {
        [&self.ends[..], &self.others].concat()
    }

    fn run(&mut self) -> u8 {
        loop {
            while let Some(signal) = self.signals.next() {
                self.take_signal(signal);
            }
            // The last messages of a server process are handled before its exit.
            self.receive_from_workers();
            self.reap_children();
            self.check_deadlines(Instant::now());
            self.take_configs(Instant::now());
            self.request_reload();
            self.run_watchdog(Instant::now());
            self.advance_exec(Instant::now());
            self.update_fd_store(Instant::now());
            let new = self.upgrade.as_mut().map(|upgrade| &mut upgrade.new);
            self.worker.iter_mut().chain(new).for_each(Worker::forward);
            for _ in 0..MESSAGES {
                let next = self.control.as_mut().and_then(Control::next);
                let Some((packet, client)) = next else { break };
                self.answer(packet, client);
            }
            if let Some(status) = self.exit_code {
                if let Some(fd_store) = self.fd_store.take() {
                    fd_store.end();
                }
                return status;
            }
            self.trim_timer.poll(Instant::now());
            self.wait();
        }
    }

    /// Waits for a descriptor, a signal or the next deadline.
    fn wait(&self) {
        // While too many received descriptors wait to be closed, messages of server processes are
        // not read.
        let is_behind = deferred_close::is_behind();
        let behind = is_behind.then(|| Instant::now() + Duration::from_millis(1));
        let deadlines = self.upgrade.iter().map(|upgrade| upgrade.until);
        let deadlines = deadlines.chain(self.watchdog.as_ref().map(Watchdog::deadline));
        let deadlines = deadlines.chain(self.pending_exec.as_ref().map(PendingExec::deadline));
        let deadlines = deadlines.chain(self.fd_store.as_ref().and_then(|store| store.due));
        let replacement = self.replacement.as_ref().map(|replacement| replacement.until);
        let reads = self.config_reads.iter().filter_map(ConfigRead::deadline);
        let deadlines = deadlines.chain(reads).chain(self.trim_timer.at).chain(replacement);
        let deadlines = deadlines.chain(self.release).chain(behind).chain(self.end_limit);
        let next = deadlines.chain(self.restart).min();
        let timeout = next.and_then(|next| {
            // The timeout is slightly longer, so that the deadline has passed when `poll` returns.
            let wait = next.saturating_duration_since(Instant::now()) + Duration::from_micros(100);
            Timespec::try_from(wait).ok()
        });
        let fds = self.workers().filter(|_| !is_behind).filter_map(Worker::link);
        let fds = fds.chain(self.control.iter().flat_map(Control::fds));
        let fds = fds.chain(self.workers().filter_map(|worker| worker.process.shows_end()));
        let fds = fds.chain(self.config_reads.iter().map(|read| read.ready.as_fd()));
        let fds = fds.chain([self.signals.as_fd()]);
        let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
        let waiting = self.workers().filter(|worker| worker.has_unsent());
        let link = waiting.filter_map(Worker::link);
        fds.extend(link.map(|link| PollFd::from_borrowed_fd(link, PollFlags::OUT)));
        // The result does not matter: the main loop checks everything.
        let _ = poll(&mut fds, timeout.as_ref());
    }

    /// All server processes that have not ended.
    fn workers(&self) -> impl Iterator<Item = &Worker> {
        let workers = self.worker.iter().chain(self.upgrade.iter().map(|upgrade| &upgrade.new));
        workers.chain(&self.leaving)
    }

    /// Returns true if `client` is connected to a process that is no server process. A server
    /// process must not extend its own permissions by a request to the control socket.
    fn is_outside(&self, client: &OwnedFd) -> bool {
        let peer = rustix::net::sockopt::socket_peercred(client).ok();
        let pid = peer.map(|peer| peer.pid.as_raw_pid().cast_unsigned());
        pid.is_some_and(|pid| self.workers().all(|worker| worker.pid() != pid))
    }

    fn take_signal(&mut self, signal: i32) {
        match signal {
            SIGCHLD => {}
            SIGUSR1 => self.send_to_worker(to_worker::REPORT),
            SIGUSR2 => {
                let (program, asker, is_check) = (None, None, false);
                self.read_config_for(Purpose::Upgrade { program, asker, is_check });
            }
            _ if self.ends.contains(&signal) => self.end(),
            SIGHUP => self.reload_requested(),
            _ => {}
        }
    }

    /// Kills a server process, and ignores its exit status and further messages.
    fn kill(&mut self, mut worker: Worker) {
        worker.kill();
        deferred_close::close(worker.link.take());
        self.leaving.push(worker);
    }

    fn send_to_worker(&self, code: u8) {
        if let Some(worker) = &self.worker {
            worker.send(code, "", None);
        }
    }

    /// Ends the service on a signal; kills the server processes on a second one.
    fn end(&mut self) {
        self.ended += 1;
        if self.ended > 1 {
            return self.kill_all(exit::FAILED);
        }
        self.set_end_limit();
        notify::send(notify::STOPPING);
        match self.upgrade.as_ref().map(|upgrade| upgrade.step) {
            None => {}
            Some(Step::Starting | Step::Checking) => {
                // `END` is sent to the process that serves.
                return self.upgrade_failed("the server is shutting down");
            }
            // The upgrade completes or fails shortly; `END` is sent to the process that then
            // serves.
            Some(Step::Quiescing | Step::Ending) => return,
        }
        match &self.worker {
            Some(worker) if worker.link.is_none() => worker.kill(),
            Some(worker) => worker.send(to_worker::END, "", None),
            None => self.exit_code = Some(exit::FAILED),
        }
    }

    /// Begins the time after which the service ends, even if the server process has not ended.
    fn set_end_limit(&mut self) {
        self.end_limit = Some(Instant::now() + command_line::stop_timeout(&self.arguments));
    }

    /// Ends the service at once with this exit status, and kills the server processes.
    fn kill_all(&mut self, status: u8) {
        let mut new = self.upgrade.take().map(|upgrade| upgrade.new);
        for worker in self.worker.iter_mut().chain(&mut new) {
            worker.kill();
        }
        self.exit_code = Some(status);
    }

    /// Handles messages of the server processes, so that signals are handled in between: of each at
    /// most [`MESSAGES`], for a limited time, and only up to a message that requires a snapshot.
    fn receive_from_workers(&mut self) {
        if deferred_close::is_behind() {
            return;
        }
        // The messages of the current server process are handled before those of an upgrade's next
        // process.
        for is_new in [false, true] {
            let until = Instant::now() + TURN;
            for _ in 0..MESSAGES {
                let next = self.upgrade.as_mut().map(|upgrade| &mut upgrade.new);
                let next = if is_new { next } else { self.worker.as_mut() };
                let Some(next) = next.filter(|_| Instant::now() < until) else { break };
                let is_last = next.process.has_ended();
                let Some(packet) = next.receive(self.fd_store.as_mut()) else { break };
                match packet.code {
                    to_supervisor::PREPARED if is_new => self.check_checkpoint(),
                    to_supervisor::CHECKED if is_new => self.checked(&packet.text()),
                    _ if is_new => deferred_close::close(packet.fds),
                    to_supervisor::SOCKET if self.sockets.len() < MAX_SOCKETS => {
                        self.sockets.push(packet.path());
                    }
                    to_supervisor::SERVING => self.serves(&packet.text()),
                    to_supervisor::READ => self.reload_done(&packet.text()),
                    to_supervisor::ALIVE => self.is_alive(&packet.text()),
                    to_supervisor::QUIESCED => self.has_quiesced(&packet.text()),
                    to_supervisor::RECOVERED => {
                        self.replacement_recovered();
                        self.left = None;
                        let worker = self.worker.as_mut();
                        let is_taken = worker.map(|worker| replace(&mut worker.has_taken, true));
                        self.want_snapshot(is_taken == Some(false));
                    }
                    // The request of a process that has ended is refused. Otherwise a program that
                    // requests an upgrade and then dies would be started again and again.
                    to_supervisor::UPGRADE => {
                        let asker = requester(packet.fd(), self.worker.as_ref().map(Worker::pid));
                        let why = "the server process has ended";
                        match is_last {
                            true => asker.into_iter().for_each(|to| answer_to(to, answer::NO, why)),
                            // A server process must not choose a program, so it can only request an
                            // upgrade to the current one.
                            false => self.begin_upgrade(None, asker, false, None),
                        }
                    }
                    to_supervisor::WARNING => {
                        if let Some(replacement) = &mut self.replacement {
                            add_warnings(&mut replacement.warnings, &packet.text());
                        }
                        if let Some(worker) = &mut self.worker {
                            worker.warned = true;
                        }
                    }
                    to_supervisor::FORGET => {
                        packet.fds.iter().for_each(|fd| GRANTS.lock().end_use(fd.as_fd()));
                        deferred_close::close(packet.fds);
                        self.release = Some(Instant::now() + RELEASE);
                    }
                    to_supervisor::USED => self.end_limit = None,
                    to_supervisor::UNUSED if self.ended > 0 => self.set_end_limit(),
                    to_supervisor::RESUMES => {
                        let upgrade = self.upgrade.as_ref();
                        if upgrade.is_some_and(|upgrade| upgrade.step == Step::Quiescing) {
                            self.upgrade_failed(&packet.text());
                            self.want_snapshot(true);
                        }
                    }
                    _ => {}
                }
                if self.update_fd_store(Instant::now()) {
                    break;
                }
            }
        }
    }

    /// Records that the server process serves, and reports readiness to the service manager.
    fn serves(&mut self, status: &str) {
        if self.worker.as_ref().is_some_and(|worker| worker.serves_since.is_some()) {
            return;
        }
        self.want_snapshot(true);
        self.restart = None;
        self.deaths.serves();
        let died = self.died.take();
        if let Some(worker) = &mut self.worker {
            worker.serves_since = Some(Instant::now());
            if let Some(died) = died.filter(|_| worker.has_taken) {
                let (pid, took) = (worker.pid(), died.elapsed().as_millis());
                let rest = if worker.warned { " (not all: see the warnings above)" } else { "" };
                log_line(&format!(
                    "process {pid} has recovered the clients, {took} ms after the previous \
                     process ended{rest}"
                ));
            }
        }
        self.replacement_serves();
        if replace(&mut self.is_ready, true) {
            notify::try_send(&notify::status(status));
        } else {
            notify::send(&notify::ready(status));
        }
    }

    fn check_deadlines(&mut self, now: Instant) {
        if self.exit_code.is_none() && self.end_limit.take_if(|limit| *limit <= now).is_some() {
            let limit = command_line::stop_timeout(&self.arguments).as_secs();
            log_line(&format!(
                "error: the server process has not ended within {limit} s (`--stop-timeout`), and \
                 is killed; its storage or a client does not answer"
            ));
            self.kill_all(exit::UNANSWERED);
        }
        if self.replacement.as_ref().is_some_and(|replacement| replacement.until <= now) {
            self.replacement_is_late();
        }
        if self.restart.is_some_and(|at| at <= now) && self.exit_code.is_none() {
            self.restart = None;
            self.start_again(&self.program.clone());
        }
        self.upgrade_is_late(now);
        self.release_images(now);
    }

    /// Releases unused images that no checkpoint contains any more, a moment after the last change.
    fn release_images(&mut self, now: Instant) {
        let new = self.upgrade.as_mut().map(|upgrade| &mut upgrade.new);
        for worker in self.worker.iter_mut().chain(new) {
            if std::mem::take(&mut worker.has_changed) {
                self.release = Some(now + RELEASE);
            }
        }
        if self.release.take_if(|due| *due <= now).is_some() {
            let left = self.left.iter().map(|left| &left.items);
            let stored = self.workers().map(|worker| &worker.items).chain(left);
            let stored = stored.flat_map(Checkpoint::disk_fds);
            let stored = stored.filter_map(|fd| id_of(fd).ok()).collect();
            GRANTS.lock().release(&stored);
        }
    }

    fn answer(&mut self, packet: protocol::Packet, client: OwnedFd) {
        let is_yes = match packet.code {
            question::IS_YOURS => {
                let pid = packet.text().parse().ok();
                let ours = [Some(std::process::id()), self.worker.as_ref().map(Worker::pid)];
                pid.is_some() && ours.contains(&pid)
            }
            question::GRANT => {
                let path = permissions::path_of(&packet.body);
                let opened = packet.fds.first().filter(|_| self.is_outside(&client));
                opened.is_some_and(|opened| GRANTS.lock().grant(&path, opened.as_fd()).is_ok())
            }
            question::GRANT_SOCKET => {
                self.is_outside(&client) && GRANTS.lock().grant_socket(&packet.path())
            }
            question::GRANT_SERVER => {
                self.is_outside(&client) && GRANTS.lock().grant_server(&packet.body)
            }
            question::SERVES => self.sockets.contains(&packet.path()),
            code @ (question::UPGRADE | question::CHECK) => {
                let program = Some(packet.path()).filter(|path| !path.as_os_str().is_empty());
                let is_check = code == question::CHECK;
                if self.is_outside(&client) {
                    // For an upgrade that is requested from outside, the configuration file is read
                    // again.
                    let asker = Some(client);
                    return self.read_config_for(Purpose::Upgrade { program, asker, is_check });
                }
                if program.is_some() {
                    let why = "a server process must not choose the program of an upgrade";
                    return answer_to(client, answer::NO, why);
                }
                return self.begin_upgrade(None, Some(client), is_check, None);
            }
            _ => return,
        };
        let code = if is_yes { answer::YES } else { answer::NO };
        if protocol::send(&client, code, "", None).is_ok()
            && let Some(control) = &mut self.control
        {
            control.clients.push(client);
        }
    }
}
