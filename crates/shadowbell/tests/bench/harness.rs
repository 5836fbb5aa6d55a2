//! Runs the program and a server of it, and collects their output.

use assert_cmd::Command;
use serde_json::Value;
use shadowbell_testing::process_group::ProcessGroup;
use shadowbell_testing::wait::{LIMIT, until};
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tempfile::TempDir;

/// The program with `arguments`.
pub(crate) fn shadowbell<S: AsRef<std::ffi::OsStr>>(
    arguments: impl IntoIterator<Item = S>,
) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_shadowbell"));
    command.args(arguments).timeout(LIMIT).env_remove("RUST_LOG");
    command
}

/// The program with the words of `line` as arguments.
pub(crate) fn line(line: &str) -> Command {
    shadowbell(line.split_whitespace())
}

/// Standard output of a command that must succeed.
pub(crate) fn output(command: &mut Command) -> String {
    let assert = command.assert().success();
    String::from_utf8(assert.get_output().stdout.clone()).unwrap()
}

/// The last output line of a command, parsed as JSON.
pub(crate) fn json(command: &mut Command) -> Value {
    let text = output(command);
    serde_json::from_str(text.lines().last().unwrap_or_default()).expect(&text)
}

/// Standard error of a command that must end with `status`.
pub(crate) fn stderr_of_failure(command: &mut Command, status: i32) -> String {
    let assert = command.assert().code(status);
    let text = String::from_utf8(assert.get_output().stderr.clone()).unwrap();
    assert!(!text.contains("panicked"), "{text}");
    text
}

/// `shadowbell serve` in a temporary directory. Killed on drop.
pub(crate) struct Server {
    child: ProcessGroup,
    pub(crate) directory: TempDir,
}

impl Server {
    pub(crate) fn start(arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("vm0.sock");
        let log = File::create(directory.path().join("log")).unwrap();
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_shadowbell"));
        command
            .arg("serve")
            .args(arguments)
            .arg("--socket")
            .arg(&socket)
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        let child = ProcessGroup::spawn(&mut command).unwrap();
        let server = Self { child, directory };
        // The socket file exists before the server listens, so the test connects.
        until("a server", || UnixStream::connect(server.socket()).is_ok());
        server
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("vm0.sock")
    }

    /// Process id of the server.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Namespace `nsid` of the server, as a TARGET argument.
    pub(crate) fn target(&self, nsid: u32) -> String {
        format!("vfio-user:{}/{nsid}", self.socket().display())
    }

    /// Waits until `words` are in the server's log.
    pub(crate) fn wait_for_log(&self, words: &str) {
        until(words, || self.log().contains(words));
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.directory.path().join("log")).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill();
        if std::thread::panicking() {
            eprintln!("log of the server:\n{}", self.log());
        }
    }
}

/// Deterministic pseudo-random bytes.
pub(crate) fn bytes(len: usize) -> Vec<u8> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

/// Creates a file with `bytes`, and returns its path.
pub(crate) fn file(directory: &Path, name: &str, bytes: &[u8]) -> String {
    let path = directory.join(name);
    std::fs::write(&path, bytes).unwrap();
    path.to_str().unwrap().to_owned()
}
