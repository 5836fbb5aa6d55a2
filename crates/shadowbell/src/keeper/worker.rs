//! A worker, as its keeper has it.

use crate::keeper_link::{self, AS_WORKER, Packet};
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

/// A process that serves, or is to.
pub(super) struct Worker {
    child: Child,
    /// Until it has closed its end.
    link: Option<OwnedFd>,
    /// Its program.
    pub(super) program: PathBuf,
    /// Whether it has ever served.
    pub(super) has_served: bool,
    /// Why it can not go on, as it says itself.
    pub(super) why: Option<String>,
}

impl Worker {
    /// Starts one by the arguments of this process, and tells it `how` it begins.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn start(program: &Path, arguments: &[OsString], how: &str) -> io::Result<Self> {
        let (ours, theirs) = keeper_link::pair()?;
        // A worker that does not read must not hold up its keeper.
        rustix::io::ioctl_fionbio(&ours, true)?;
        let mut command = Command::new(program);
        let mut words = arguments.iter();
        command.arg0(words.next().map_or(program.as_os_str(), OsString::as_os_str));
        let mut is_verb_there = false;
        for word in words {
            command.arg(word);
            if !is_verb_there && is_verb(word) {
                command.args([AS_WORKER, how]);
                is_verb_there = true;
            }
        }
        let child = command.stdin(Stdio::from(theirs)).spawn()?;
        let program = program.to_owned();
        Ok(Self { child, link: Some(ours), program, has_served: false, why: None })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Where it can be heard.
    pub(super) fn link(&self) -> Option<BorrowedFd<'_>> {
        self.link.as_ref().map(AsFd::as_fd)
    }

    /// Says something; in vain if it is dead.
    pub(super) fn say(&self, letter: u8, body: &str, fd: Option<BorrowedFd<'_>>) {
        if let Some(link) = &self.link {
            let _ = keeper_link::send(link, letter, body, fd);
        }
    }

    /// What it has said, if anything.
    pub(super) fn hear(&mut self) -> Option<Packet> {
        match keeper_link::receive(self.link.as_ref()?, true) {
            Ok(Some(packet)) => Some(packet),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Ok(None) | Err(_) => {
                self.link = None;
                None
            }
        }
    }

    /// How it has ended, if it has.
    pub(super) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Ends it at once, and waits until it has.
    pub(super) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether this word of a command line is the verb that has a keeper.
pub(super) fn is_verb(word: &OsStr) -> bool {
    word == "serve"
}

/// How a process ended, for a sentence.
pub(super) fn how(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was ended by signal {signal}"),
        (None, code) => format!("ended with exit status {}", code.unwrap_or_default()),
    }
}
