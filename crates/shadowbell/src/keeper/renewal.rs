//! The keeper becomes another program, as the same process: by exec, when a worker of that program
//! serves.
//!
//! Nothing may fail between exec and the moment that the new program has what the old one had. So
//! before it the new program is started once to read a record as the one that it will get
//! ([`CHECK`]), and says whether it could go on from there. Until exec the old program goes on
//! whatever happens, and after a failed one as well.
//!
//! It is done while one worker serves and nothing else is under way. What a worker, a client or who
//! asks says meanwhile stays in its socket, signals wait, and a worker that ends stays a child whose
//! end nobody has looked at.

use super::record::{self, Arriving, Held};
use super::say::say;
use super::upgrading::tell_outcome;
use super::worker::is_verb;
use super::{Keeper, opener};
use crate::keeper_link;
use rustix::fs::stat;
use rustix::io::{FdFlags, fcntl_setfd};
use shadowbell_memory::process::{block_signals, execute, take_inherited, unblock_signals};
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The option by which a keeper knows that it was one before, and where it finds what it was.
pub(super) const AS_KEEPER: &str = "--as-keeper";
/// The only word on the command line of a program that is asked whether it could go on.
pub(crate) const CHECK: &str = "keeper-check";

/// What it answers if it can.
const CAN: &str = "can go on";
/// How long the answer may take, and how long a moment for the rest may be waited for.
const LIMIT: Duration = Duration::from_secs(10);
/// How often it is looked for such a moment.
const LOOK: Duration = Duration::from_millis(20);

/// Answers whether this program could go on from the record that is its standard input.
pub(crate) fn check() -> std::process::ExitCode {
    let answer = match io::stdin().as_fd().try_clone_to_owned() {
        Ok(memory) => match record::check(memory) {
            Ok(()) => CAN.to_owned(),
            Err(why) => why.to_string(),
        },
        Err(error) => error.to_string(),
    };
    let is_said = io::stdout().write_all(answer.as_bytes()).is_ok();
    std::process::ExitCode::from(u8::from(!is_said))
}

/// A file, as it is now.
type Identity = (u64, u64, i64, i64, u64);

fn identity(program: &Path) -> io::Result<Identity> {
    let about = stat(program)?;
    let nsec = about.st_mtime_nsec.cast_signed();
    Ok((about.st_dev, about.st_ino, about.st_mtime, nsec, about.st_size.cast_unsigned()))
}

/// A keeper that is about to become another program.
pub(super) struct Renewal {
    program: PathBuf,
    /// Who waits for the outcome of the upgrade, and what that is.
    asker: Option<OwnedFd>,
    outcome: String,
    step: Step,
    until: Instant,
}

enum Step {
    Wanted,
    /// The program is asked.
    Asked(Child, Identity),
    /// It can go on.
    Can(Identity),
}

impl Renewal {
    pub(super) fn new(program: PathBuf, asker: Option<OwnedFd>, outcome: String) -> Self {
        Self { program, asker, outcome, step: Step::Wanted, until: Instant::now() + LIMIT }
    }

    /// When there is something to do.
    pub(super) fn deadline(&self) -> Instant {
        match self.step {
            Step::Asked(..) => self.until,
            Step::Wanted | Step::Can(_) => self.until.min(Instant::now() + LOOK),
        }
    }

    /// It does not come to that: the upgrade was one all the same.
    pub(super) fn ends(mut self, why: Option<&str>) {
        if let Step::Asked(child, _) = &mut self.step {
            let _ = child.kill();
            let _ = child.wait();
        }
        let mut outcome = self.outcome;
        if let Some(why) = why {
            say(&format!("warning: the keeper goes on as the program that it is: {why}"));
            outcome += &format!("; its keeper goes on as the program that it is: {why}");
        }
        tell_outcome(self.asker, Ok(&outcome));
    }
}

impl Keeper {
    /// Becomes another program, if that is wanted and can be.
    pub(super) fn renew(&mut self, now: Instant) {
        let Some(mut renewal) = self.renewal.take() else { return };
        if self.ended != 0 || self.over.is_some() {
            return renewal.ends(None);
        }
        match self.proceed(&mut renewal, now) {
            Ok(()) if now < renewal.until => self.renewal = Some(renewal),
            Ok(()) => {
                let limit = LIMIT.as_secs();
                let why = match renewal.step {
                    Step::Asked(..) => format!("the new one did not answer within {limit} s"),
                    _ => format!("there was no quiet moment within {limit} s"),
                };
                renewal.ends(Some(&why));
            }
            Err(why) => renewal.ends(Some(&why)),
        }
    }

    /// The next step, if it can be taken now.
    fn proceed(&mut self, renewal: &mut Renewal, now: Instant) -> Result<(), String> {
        match &mut renewal.step {
            Step::Wanted => {
                let (child, identity) = self
                    .ask(&renewal.program)
                    .map_err(|error| format!("the new one can not be asked: {error}"))?;
                renewal.step = Step::Asked(child, identity);
            }
            Step::Asked(child, identity) => {
                if child.try_wait().is_ok_and(|ended| ended.is_none()) {
                    return Ok(());
                }
                let answer = answer_of(child);
                if answer != CAN {
                    let why = if answer.is_empty() { "it does not know how" } else { &answer };
                    return Err(format!("the new one can not go on from what it is: {why}"));
                }
                renewal.step = Step::Can(*identity);
                renewal.until = now + LIMIT;
                return self.become_another(renewal);
            }
            Step::Can(_) => return self.become_another(renewal),
        }
        Ok(())
    }

    /// Starts the program to be asked.
    fn ask(&self, program: &Path) -> io::Result<(Child, Identity)> {
        let identity = identity(program)?;
        let memory = self.record(None).map_err(io::Error::other)?.memory()?;
        let mut command = Command::new(program);
        command.arg(CHECK).stdin(Stdio::from(memory));
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        Ok((command.spawn()?, identity))
    }

    /// One worker serves, and nothing else is under way.
    fn is_quiet(&self) -> bool {
        let worker = self.worker.as_ref();
        worker.is_some_and(|worker| worker.serves_since.is_some() && !worker.has_more_to_hear())
            && self.upgrade.is_none()
            && self.leaving.is_empty()
            && self.restart.is_none()
            && self.died.is_none()
            && self.left.is_none()
    }

    /// Becomes another program, if this is the moment for it.
    fn become_another(&mut self, renewal: &mut Renewal) -> Result<(), String> {
        if !self.is_quiet() {
            return Ok(());
        }
        let all = self.all_signals();
        block_signals(&all).map_err(|error| error.to_string())?;
        let outcome = self.execute(renewal);
        let _ = unblock_signals(&all);
        outcome
    }

    /// Signals wait meanwhile.
    fn execute(&mut self, renewal: &mut Renewal) -> Result<(), String> {
        // Those that came before; what they ask for may be the end of this.
        if let Some(signal) = self.signals.next() {
            self.take_signal(signal);
            return Ok(());
        }
        // Somebody opens an image for a worker.
        let Some(_paused) = opener::pause() else { return Ok(()) };
        let text = |error: &dyn std::fmt::Display| error.to_string();
        if !matches!(renewal.step, Step::Can(before) if identity(&renewal.program).is_ok_and(|now| now == before))
        {
            // It was replaced once more.
            renewal.step = Step::Wanted;
            return Ok(());
        }
        let held = Held {
            openers: opener::openers().map_err(|error| text(&error))?,
            asker: renewal.asker.take(),
            outcome: renewal.outcome.clone(),
        };
        let error = self.leave_to(&renewal.program, &held);
        renewal.asker = held.asker;
        Err(format!("{}: {error}", renewal.program.display()))
    }

    /// Returns only if it can not be.
    fn leave_to(&self, program: &Path, held: &Held) -> io::Error {
        let send = || {
            let (ours, theirs) = keeper_link::pair()?;
            let record = self.record(Some(held)).map_err(io::Error::other)?;
            record.send(&ours, &mut 0)?;
            // It closes by itself if this fails.
            fcntl_setfd(&theirs, FdFlags::empty())?;
            Ok(theirs)
        };
        match send() {
            Ok(left) => execute(program.as_os_str(), with_left(&self.arguments, left.as_raw_fd())),
            Err(error) => error,
        }
    }

    /// Goes on as what this process was, with another program.
    ///
    /// # Errors
    /// There is nothing to go on from.
    pub(super) fn go_on(arguments: Vec<OsString>, left: RawFd) -> io::Result<Self> {
        let nothing = || {
            io::Error::other(format!(
                "{AS_KEEPER} is how a keeper becomes another program; leave it out"
            ))
        };
        let left = take_inherited(left).ok_or_else(nothing)?;
        let mut record = None;
        while let Ok(Some(packet)) = keeper_link::receive(&left, true) {
            record = Arriving::take(record, packet);
        }
        let record = record.filter(Arriving::is_complete).ok_or_else(nothing)?;
        let mut keeper = Self::bare(arguments)?;
        let parcel = record.read().map_err(io::Error::other)?;
        let held = keeper.restore(parcel, true).map_err(io::Error::other)?;
        let held = held.unwrap_or_default();
        held.openers.into_iter().for_each(|(socket, named)| opener::restore(socket, named));
        let program = keeper.program.display().to_string();
        say(&format!("the keeper is {program} from now on"));
        tell_outcome(held.asker, Ok(&format!("{}; its keeper is that program too", held.outcome)));
        unblock_signals(&keeper.all_signals())?;
        Ok(keeper)
    }
}

/// What a program has answered, which has ended.
fn answer_of(child: &mut Child) -> String {
    let Some(output) = child.stdout.take() else { return String::new() };
    // It may have left it to another one.
    let _ = rustix::io::ioctl_fionbio(&output, true);
    let mut answer = [0; 512];
    let len = { output }.read(&mut answer).unwrap_or_default();
    String::from_utf8_lossy(&answer[..len]).trim().to_owned()
}

/// The command line of a keeper that finds there what it was.
fn with_left(arguments: &[OsString], left: RawFd) -> Vec<OsString> {
    let verb = arguments.iter().skip(1).position(|word| is_verb(word)).map_or(1, |at| at + 2);
    let (before, after) = arguments.split_at(verb.min(arguments.len()));
    let added = [AS_KEEPER.into(), left.to_string().into()];
    before.iter().cloned().chain(added).chain(after.iter().cloned()).collect()
}

/// Takes out of a command line what [`with_left`] has put there.
pub(super) fn take_left(arguments: &mut Vec<OsString>) -> Option<RawFd> {
    let at = arguments.iter().position(|word| is_verb(word))? + 1;
    if arguments.get(at)? != AS_KEEPER {
        return None;
    }
    let left = arguments.get(at + 1)?.to_str()?.parse().ok();
    arguments.drain(at..at + 2);
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn a_command_line_comes_back() {
        for line in ["sb serve --keeper mem:1MiB --socket a", "sb -v serve a --keeper -- serve"] {
            let line = words(line);
            let mut with = with_left(&line, 77);
            assert!(super::super::is_asked_for(&with));
            assert_eq!(take_left(&mut with), Some(77));
            assert_eq!(with, line);
            assert_eq!(take_left(&mut with), None);
            assert_eq!(with, line);
        }
    }
}
