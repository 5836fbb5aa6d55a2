//! What an attack is, and the field that it has.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;
use shadowbell_spec::Sqe;

use super::server::LogReader;
use crate::peer::guest::Guest;

/// Memory of an attacker's guest, where the attack does not say otherwise.
pub(crate) const MEMORY: u64 = 64 << 20;
/// Pauses of a flood: long enough that its processor time is not what the victim feels.
pub(crate) const PAUSE: Duration = Duration::from_micros(300);

/// One attack.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    /// What it does, for people.
    pub(crate) about: &'static str,
    /// The disks of the attackers' controllers. `DIR/name=BYTES` is a file that is made.
    pub(crate) disks: &'static [&'static str],
    pub(crate) log: LogReader,
    pub(crate) kind: Kind,
    /// One of those that the short suite makes: one for each way to do harm.
    pub(crate) is_short: bool,
    pub(crate) run: fn(&mut Field) -> Result<()>,
}

impl Attack {
    /// A hostile attack, whose log goes to a file.
    pub(crate) const fn new(
        name: &'static str,
        about: &'static str,
        disks: &'static [&'static str],
        run: fn(&mut Field) -> Result<()>,
    ) -> Self {
        let (log, kind) = (LogReader::File, Kind::Hostile);
        Self { name, about, disks, log, kind, is_short: false, run }
    }

    /// The same in the short suite.
    pub(crate) const fn short(self) -> Self {
        Self { is_short: true, ..self }
    }
}

/// By what an attack is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// All bounds.
    Hostile,
    /// Neighbours that do much and nothing wrong: the victim's median may triple.
    Honest,
    /// All bounds. The victim and the attackers are peers of one `shadowbell export`.
    Export,
    /// Nothing is done to the server: what the machine alone does to a victim.
    Control,
}

/// When an attack is over, for those who take part in it.
#[derive(Debug, Clone)]
pub(crate) struct Clock {
    until: Arc<Mutex<Instant>>,
    time: Duration,
}

impl Clock {
    /// From now on for so long.
    pub(crate) fn start(time: Duration) -> Self {
        Self { until: Arc::new(Mutex::new(Instant::now() + time)), time }
    }

    pub(crate) fn is_over(&self) -> bool {
        Instant::now() >= *self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is over now, whatever time was left.
    pub(crate) fn stop(&self) {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// The whole time again: what was to be prepared has taken some of it.
    fn restart(&self) {
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        *until = Instant::now() + self.time;
    }
}

/// Where an attack takes place.
#[derive(Debug)]
pub(crate) struct Field {
    /// The attackers' sockets.
    pub(crate) sockets: Vec<PathBuf>,
    /// For files of the attack's own.
    pub(crate) directory: PathBuf,
    pub(crate) clock: Clock,
    /// Those who are still attached at the end, and reset their controllers.
    pub(crate) guests: Vec<Guest>,
    /// Resets of the attackers' own, as they measured them.
    pub(crate) resets: Vec<Duration>,
    /// How much was done, in units of the attack's own.
    pub(crate) done: u64,
    /// Commands that ended with an error.
    pub(crate) refused: u64,
}

impl Field {
    pub(crate) fn is_over(&self) -> bool {
        self.clock.is_over()
    }

    /// Everything is prepared: the attack takes its time from here.
    pub(crate) fn begin(&self) {
        self.clock.restart();
    }

    /// The first attacker's socket.
    pub(crate) fn socket(&self) -> &Path {
        self.sockets.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// A guest of the first attacker.
    pub(crate) fn guest(&self) -> Result<Guest> {
        Guest::attach(self.socket(), MEMORY)
    }

    /// A guest with so many queues of so many entries.
    pub(crate) fn guest_with(&self, queues: usize, entries: u16) -> Result<Guest> {
        let mut guest = self.guest()?;
        (0..queues).try_for_each(|_| guest.create_queue(entries))?;
        Ok(guest)
    }

    /// Keeps all I/O queues of the guest full of such commands, to the end.
    pub(crate) fn fill(&mut self, guest: Guest, make: impl FnMut(u64) -> Sqe) -> Result<()> {
        self.fill_many(vec![guest], u16::MAX, make)
    }

    /// Keeps at most `depth` commands in each I/O queue of these guests, to the end.
    pub(crate) fn fill_many(
        &mut self,
        mut guests: Vec<Guest>,
        depth: u16,
        mut make: impl FnMut(u64) -> Sqe,
    ) -> Result<()> {
        while !self.is_over() {
            for guest in &mut guests {
                self.top_up(guest, depth, &mut make)?;
            }
            sleep(PAUSE);
        }
        self.guests.extend(guests);
        Ok(())
    }

    /// Keeps the admin queue full of such commands, to the end.
    pub(crate) fn fill_admin(
        &mut self,
        mut guest: Guest,
        mut make: impl FnMut(u64) -> Sqe,
    ) -> Result<()> {
        while !self.is_over() {
            let (queue, link) = guest.admin_queue();
            let mut bells = Vec::new();
            let mut popped = false;
            while let Some(cqe) = queue.pop() {
                popped = true;
                self.refused += u64::from(!cqe.status().is_success());
            }
            if popped {
                bells.extend(queue.head_bell());
            }
            let room = queue.room();
            for _ in 0..room {
                queue.push(make(self.done))?;
                self.done += 1;
            }
            if room > 0 {
                bells.extend(queue.bell());
            }
            link.send(&bells, &[])?;
            // The pace of the attack.
            sleep(Duration::from_micros(100));
        }
        self.guests.push(guest);
        Ok(())
    }

    /// Takes what has completed, and fills all I/O queues up to `depth`.
    pub(crate) fn top_up(
        &mut self,
        guest: &mut Guest,
        depth: u16,
        make: &mut dyn FnMut(u64) -> Sqe,
    ) -> Result<()> {
        let mut bells = Vec::new();
        for queue in &mut guest.queues {
            let mut popped = false;
            while let Some(cqe) = queue.pop() {
                popped = true;
                self.refused += u64::from(!cqe.status().is_success());
            }
            if popped {
                bells.extend(queue.head_bell());
            }
            let room = queue.room().min(depth.saturating_sub(queue.outstanding()));
            for _ in 0..room {
                queue.push(make(self.done))?;
                self.done += 1;
            }
            if room > 0 {
                bells.extend(queue.bell());
            }
        }
        guest.link.send(&bells, &[])
    }
}
