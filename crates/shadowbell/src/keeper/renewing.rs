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

use super::command_line::{AS_KEEPER, with_left};
use super::record::Arriving;
use super::renewal::{Identity, LIMIT, Renewal, Step, identity};
use super::saved::{self, Held};
use super::say::say;
use super::state::Keeper;
use super::upgrade::tell_outcome;
use super::{opener, places};
use crate::keeper_link;
use rustix::io::{FdFlags, fcntl_setfd};
use shadowbell_memory::process::{block_signals, execute, take_inherited, unblock_signals};
use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

/// The only word on the command line of a program that is asked whether it could go on.
pub(crate) const CHECK: &str = "keeper-check";

/// What it answers if it can.
const CAN: &str = "can go on";

/// Answers whether this program could go on from the record that is its standard input.
pub(crate) fn check() -> std::process::ExitCode {
    let answer = match io::stdin().as_fd().try_clone_to_owned() {
        Ok(memory) => match saved::check(memory) {
            Ok(()) => CAN.to_owned(),
            Err(why) => why.to_string(),
        },
        Err(error) => error.to_string(),
    };
    let is_said = io::stdout().write_all(answer.as_bytes()).is_ok();
    std::process::ExitCode::from(u8::from(!is_said))
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
            places: places::all().map_err(|error| text(&error))?,
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
        held.places.into_iter().for_each(|(socket, saved)| places::restore(socket, saved));
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
