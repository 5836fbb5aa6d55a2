//! Definition of an attack, and the environment (`Field`) in which it runs.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;
use shadowbell_spec::Sqe;

use super::server::LogReader;
use crate::peer::guest::Guest;

/// Default memory size of an attacker's guest, in bytes.
pub const MEMORY: u64 = 64 << 20;
/// Pause between the batches of a flood. With it, the attacker needs so little CPU time that this
/// time alone does not delay the victim.
pub const PAUSE: Duration = Duration::from_micros(300);

/// Attack of `cargo xtask hostile`.
#[derive(Debug, Clone, Copy)]
pub struct Attack {
    pub name: &'static str,
    /// Description, for `--list`.
    pub about: &'static str,
    /// Disk strings of the attackers' controllers. The suite creates the file of a string
    /// `DIR/name=BYTES` with this size in bytes.
    pub disks: &'static [&'static str],
    pub log: LogReader,
    pub kind: Kind,
    /// Further options of `shadowbell serve`.
    pub options: &'static [&'static str],
    /// Preparation before the server starts. The argument is the directory of its files.
    pub prepare: Option<fn(&Path) -> Result<()>>,
    /// True if the attack is in the short suite. That suite has one attack for each type of harm,
    /// such as memory or latency.
    pub is_short: bool,
    pub run: fn(&mut Field) -> Result<()>,
}

impl Attack {
    /// A hostile attack on a server that logs to a file.
    pub const fn new(
        name: &'static str,
        about: &'static str,
        disks: &'static [&'static str],
        run: fn(&mut Field) -> Result<()>,
    ) -> Self {
        let (log, kind) = (LogReader::File, Kind::Hostile);
        let options = &[];
        Self { name, about, disks, log, kind, options, prepare: None, is_short: false, run }
    }

    /// Adds the attack to the short suite.
    pub const fn short(self) -> Self {
        Self { is_short: true, ..self }
    }
}

/// Type of attack. It determines which bounds on the server and on the victim's latency apply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Hostile attack: all bounds apply.
    Hostile,
    /// Honest neighbours with a high load. The limit of the victim's median latency is three times
    /// its median without neighbours.
    Honest,
    /// Attack on an export: all bounds apply. The victim and the attackers are clients of one
    /// `shadowbell export`.
    Export,
    /// Hostile attack that is evaluated by counts, such as the number of the victim's reads. The
    /// bounds on the victim's latency do not apply, because the attack may cause a restart of the
    /// server process.
    Counted,
    /// Attack on an export that is evaluated by counts, like [`Kind::Counted`].
    CountedExport,
    /// Control measurement: load on this machine that does not use the server. It shows how far
    /// this load alone delays the victim.
    Control,
}

impl Kind {
    /// True if the bounds of the victim's latency apply.
    pub(crate) fn is_timed(self) -> bool {
        !matches!(self, Self::Counted | Self::CountedExport)
    }
}

/// Time limit of an attack, shared by all its threads.
#[derive(Debug, Clone)]
pub struct Clock {
    until: Arc<Mutex<Instant>>,
    time: Duration,
    reads: Arc<AtomicU64>,
}

impl Clock {
    /// Starts a clock that ends after `time`.
    pub fn start(time: Duration) -> Self {
        let until = Arc::new(Mutex::new(Instant::now() + time));
        Self { until, time, reads: Arc::default() }
    }

    pub fn is_over(&self) -> bool {
        Instant::now() >= *self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Number of reads that the victim has completed during the attack.
    pub fn reads(&self) -> u64 {
        self.reads.load(Ordering::Relaxed)
    }

    /// Counts a completed read of the victim.
    pub(crate) fn count_read(&self) {
        self.reads.fetch_add(1, Ordering::Relaxed);
    }

    /// Ends the attack now.
    pub fn stop(&self) {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Restarts the time limit after the preparation of an attack.
    fn restart(&self) {
        let mut until = self.until.lock().unwrap_or_else(PoisonError::into_inner);
        *until = Instant::now() + self.time;
    }
}

/// Environment of an attack: the server, the attackers' sockets, and the results.
#[derive(Debug)]
pub struct Field {
    /// Sockets of the attackers.
    pub sockets: Vec<PathBuf>,
    /// Directory for files of the attack.
    pub directory: PathBuf,
    pub clock: Clock,
    /// Guests that are still attached at the end of the attack. The suite then resets their
    /// controllers.
    pub guests: Vec<Guest>,
    /// Durations of resets during the attack, as measured by the attack. Resets at the end of the
    /// attack are added later.
    pub resets: Vec<Duration>,
    /// Number of operations that the attack has completed. Each attack defines what it counts.
    pub done: u64,
    /// Number of commands that failed.
    pub refused: u64,
    /// Program of the server, and process id of the started process.
    pub binary: PathBuf,
    pub server: u32,
    /// Failures that the attack has found itself.
    pub found: Vec<String>,
}

impl Field {
    /// Environment on the sockets of a server.
    pub fn new(sockets: Vec<PathBuf>, directory: &Path, clock: Clock) -> Self {
        Self {
            sockets,
            directory: directory.to_owned(),
            clock,
            guests: Vec::new(),
            resets: Vec::new(),
            done: 0,
            refused: 0,
            binary: PathBuf::new(),
            server: 0,
            found: Vec::new(),
        }
    }

    /// Records a failure, and ends the attack.
    pub fn found(&mut self, what: String) {
        self.found.push(what);
        self.clock.stop();
    }

    pub fn is_over(&self) -> bool {
        self.clock.is_over()
    }

    /// Ends the preparation: the time limit of the attack starts now.
    pub fn begin(&self) {
        self.clock.restart();
    }

    /// Socket of the first attacker.
    pub fn socket(&self) -> &Path {
        self.sockets.first().map_or(Path::new(""), PathBuf::as_path)
    }

    /// Attaches a guest to the first attacker's controller.
    pub fn guest(&self) -> Result<Guest> {
        Guest::attach(self.socket(), MEMORY)
    }

    /// Attaches a guest with `queues` queues of `entries` entries.
    pub fn guest_with(&self, queues: usize, entries: u16) -> Result<Guest> {
        let mut guest = self.guest()?;
        (0..queues).try_for_each(|_| guest.create_queue(entries))?;
        Ok(guest)
    }

    /// Keeps all I/O queues of the guest full of commands from `make`, until the end of the attack.
    pub fn fill(&mut self, guest: Guest, make: impl FnMut(u64) -> Sqe) -> Result<()> {
        self.fill_many(vec![guest], u16::MAX, make)
    }

    /// Keeps at most `depth` commands in each I/O queue of these guests, until the end of the
    /// attack.
    pub fn fill_many(
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

    /// Keeps the admin queue full of commands from `make`, until the end of the attack.
    pub fn fill_admin(&mut self, mut guest: Guest, mut make: impl FnMut(u64) -> Sqe) -> Result<()> {
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
            // This pause sets the pace of the attack.
            sleep(Duration::from_micros(100));
        }
        self.guests.push(guest);
        Ok(())
    }

    /// Pops completions, and submits new commands until each I/O queue has `depth` commands in
    /// flight.
    pub fn top_up(
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
