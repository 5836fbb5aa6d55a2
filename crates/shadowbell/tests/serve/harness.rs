//! `shadowbell serve` in processes of its own, and a driver that attaches to it.

use shadowbell_driver::{
    AttachOptions, Command as NvmCommand, Completion, Controller, QueuePair, VfioUser,
};
use shadowbell_testing::process_group::ProcessGroup;
pub(crate) use shadowbell_testing::wait::until;
use shadowbell_testing::wait::{self, LIMIT};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Command that runs the program under test. In a VM, the environment has the program's path.
pub(crate) fn program() -> Command {
    let elsewhere = std::env::var_os("SHADOWBELL_TEST_PROGRAM");
    Command::new(elsewhere.unwrap_or_else(|| env!("CARGO_BIN_EXE_shadowbell").into()))
}

/// Command that runs the program under test with the default action of SIGHUP. The tests may run
/// with an ignored SIGHUP (`nohup`), which the program would inherit.
pub(crate) fn program_with_sighup() -> Command {
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP").arg(program().get_program());
    command
}

/// Creates an image of zeroes.
pub(crate) fn image(directory: &Path, name: &str, bytes: u64) -> PathBuf {
    let path = directory.join(name);
    std::fs::File::create(&path).unwrap().set_len(bytes).unwrap();
    path
}

/// A running server. On drop, all of its processes are killed and waited for.
pub(crate) struct Server {
    child: ProcessGroup,
    directory: TempDir,
}

impl Server {
    /// Serves `disks` with further `options` at [`socket`](Self::socket).
    pub(crate) fn start(disks: &[&str], options: &[&str]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), disks, options)
    }

    /// Serves `disks` with further `options`, with files in `directory`.
    pub(crate) fn start_in(directory: TempDir, disks: &[&str], options: &[&str]) -> Self {
        let socket = directory.path().join("vm.sock");
        let mut command = program();
        command.arg("serve").args(disks).arg("--socket").arg(&socket).args(options);
        Self::spawn(command, directory, &["vm.sock"])
    }

    /// Runs `command`, and waits for the sockets of these names.
    pub(crate) fn spawn(mut command: Command, directory: TempDir, sockets: &[&str]) -> Self {
        let file = |name: &str| std::fs::File::create(directory.path().join(name)).unwrap();
        command.stdout(file("stdout")).stderr(file("stderr"));
        Self::spawn_to(command, directory, sockets)
    }

    /// Like `spawn`, but the command's standard output and standard error are not redirected.
    pub(crate) fn spawn_to(mut command: Command, directory: TempDir, sockets: &[&str]) -> Self {
        command.stdin(Stdio::null()).current_dir(directory.path()).env_remove("RUST_LOG");
        // Without a state directory, UUIDs are derived from the disks' paths, and nothing is
        // written outside of this directory.
        command.env("STATE_DIRECTORY", "");
        // The control socket is in this directory, too.
        command.env("SHADOWBELL_RUN_DIR", directory.path().join("run"));
        // The stop timeout is raised, because on a loaded machine the end of a server may take
        // longer than the default.
        let has = |word: &str| command.get_args().any(|argument| argument == word);
        if (has("serve") || has("export")) && !has("--stop-timeout") && !has("--") {
            command.args(["--stop-timeout", "600"]);
        }
        let child = ProcessGroup::spawn(&mut command).unwrap();
        // The command contains a copy of the writing end of a pipe. The drop closes this copy.
        drop(command);
        let mut server = Self { child, directory };
        until("the server's socket", || {
            let ended = server.child.try_wait().unwrap();
            assert!(ended.is_none(), "{ended:?}: {}", server.stderr());
            // The file may exist before the server listens, so the test connects.
            let mut paths = sockets.iter().map(|name| server.directory.path().join(name));
            paths.all(|path| UnixStream::connect(path).is_ok())
        });
        server
    }

    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Waits for the end of the server, and returns its directory for another server.
    pub(crate) fn into_directory(mut self) -> TempDir {
        self.child.wait_all();
        std::mem::replace(&mut self.directory, tempfile::tempdir().unwrap())
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory().join("vm.sock")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn stdout(&self) -> String {
        std::fs::read_to_string(self.directory().join("stdout")).unwrap()
    }

    pub(crate) fn stderr(&self) -> String {
        // The file does not exist if a test redirects standard error.
        std::fs::read_to_string(self.directory().join("stderr")).unwrap_or_default()
    }

    /// Waits until `words` are in the server's log.
    #[track_caller]
    pub(crate) fn wait_for_log(&self, words: &str) {
        // If the words do not appear, `until` panics, and the drop of the server prints its log.
        until(words, || self.stderr().contains(words));
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        self.child.signal(signal);
    }

    /// Ends the server with SIGTERM, as an operator does.
    pub(crate) fn stop(&mut self) -> ExitStatus {
        self.signal(rustix::process::Signal::TERM);
        self.wait()
    }

    pub(crate) fn wait(&mut self) -> ExitStatus {
        self.child.wait()
    }

    pub(crate) fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Attaches a driver to the server.
    pub(crate) fn attach(&self) -> Controller {
        self.attach_with(&AttachOptions { queue_pairs: 2, ..AttachOptions::default() })
    }

    pub(crate) fn attach_with(&self, options: &AttachOptions) -> Controller {
        attach(&self.socket(), options)
    }
}

pub(crate) fn attach(socket: &Path, options: &AttachOptions) -> Controller {
    let transport = VfioUser::connect(socket, LIMIT).unwrap();
    Controller::attach(Arc::new(transport), options).unwrap()
}

/// Appends the state of every thread of a process and its children, for a test that has timed
/// out.
fn threads_of(pid: u32, out: &mut String) {
    let read = |path: String| std::fs::read_to_string(path).unwrap_or_default();
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task"));
    for task in tasks.into_iter().flatten().flatten() {
        let task = task.path().display().to_string();
        let status = read(format!("{task}/status"));
        let field = |name: &str| status.lines().find(|line| line.starts_with(name));
        let facts = ["Name:", "State:", "voluntary_ctxt", "nonvoluntary_ctxt"];
        let facts: Vec<_> = facts.iter().filter_map(|name| field(name)).collect();
        let call = read(format!("{task}/syscall"));
        let facts = facts.join(", ").replace('\t', " ");
        out.push_str(&format!("{task}: {facts}; {}\n", call.trim()));
        for line in read(format!("{task}/stack")).lines() {
            out.push_str(&format!("    {line}\n"));
        }
        for child in read(format!("{task}/children")).split_whitespace() {
            threads_of(child.parse().unwrap(), out);
        }
    }
}

impl Server {
    /// Prints the state of the server's processes.
    fn print_threads(&self) {
        let mut threads = String::new();
        threads_of(self.child.id(), &mut threads);
        eprintln!("threads of the server:\n{threads}");
    }

    /// Runs `act`. If `act` takes long, prints the state of the server's threads while it runs.
    pub(crate) fn with_hang_report<T>(&self, act: impl FnOnce() -> T) -> T {
        let (done, waits) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|threads| {
            threads.spawn(move || {
                if waits.recv_timeout(SLOW) == Err(RecvTimeoutError::Timeout) {
                    eprintln!("slow operation; state of the server:");
                    self.print_threads();
                }
            });
            let outcome = act();
            drop(done);
            outcome
        })
    }
}

// Time after which `with_hang_report` prints the state of the threads. It does not limit `act`.
const SLOW: Duration = Duration::from_secs(4);

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.print_threads();
        }
        self.child.kill();
        if std::thread::panicking() {
            eprintln!("log of the server:\n{}", self.stderr());
        }
    }
}

/// Runs one command to its completion.
#[track_caller]
pub(crate) fn run(
    queue: &mut QueuePair,
    command: NvmCommand,
    buffer: Option<shadowbell_driver::Buffer>,
) -> Completion {
    queue.submit(command, buffer).unwrap();
    queue.ring().unwrap();
    complete(queue)
}

/// Waits for the next completion.
#[track_caller]
pub(crate) fn complete(queue: &mut QueuePair) -> Completion {
    let deadline = wait::deadline();
    loop {
        if let Some(completion) = queue.pop() {
            queue.ring_cq_doorbell_if_needed().unwrap();
            return completion;
        }
        let done = queue.wait(Some(deadline)).unwrap();
        assert!(done || Instant::now() < deadline, "a command does not complete");
    }
}

/// Runs the program to its end. Returns exit status, output and errors.
pub(crate) fn finish(mut command: Command) -> (Option<i32>, String, String) {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env_remove("RUST_LOG");
    let output = ProcessGroup::spawn(&mut command).unwrap().output();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}
