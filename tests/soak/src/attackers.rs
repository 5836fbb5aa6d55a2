//! Attackers. Each has its own controller, and runs attacks of `cargo xtask hostile` in sequence.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use super::counters::{Counters, add};
use shadowbell_hostile::attack::{Attack, Clock, Field, Kind};
use shadowbell_hostile::attacks;
use shadowbell_hostile::server::LogReader;

/// Duration of an attack.
const ATTACK: Duration = Duration::from_secs(2);
// Pause until the next attack.
const PAUSE: Duration = Duration::from_millis(250);

/// Attacks that are left out, because they need a FUSE file system.
const EXCLUDED: [&str; 2] = ["fuse-doorbell", "fuse-map"];
/// Attacks for which the attacker uses gigabytes of memory or thousands of descriptors. Only one
/// attacker runs one of these attacks at a time, because the machine has no memory for more.
const ONE_AT_A_TIME: [&str; 4] = ["page-tables", "punch-holes", "big-unmap", "irq-waiters"];

/// Disk of an attacker's controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disk {
    Memory,
    File,
    Null,
}

impl Disk {
    /// Disk of the attacker with this number: memory, file and null in turn.
    pub(crate) fn of(number: usize) -> Self {
        [Self::Memory, Self::File, Self::Null][number % 3]
    }

    /// Disk string for `Server::serve`.
    pub(crate) fn target(self, number: usize) -> String {
        match self {
            Self::Memory => "mem:16MiB".to_owned(),
            Self::File => format!("DIR/attacker{number}.img={}", 128 << 20),
            Self::Null => "null:1TiB".to_owned(),
        }
    }

    /// True if the attack can run on a controller with this disk.
    fn is_usable_for(self, attack: &Attack) -> bool {
        let wanted = match attack.disks {
            [disk] if disk.contains('=') => Self::File,
            [disk] if disk.starts_with("null:") => Self::Null,
            _ => Self::Memory,
        };
        // An attack that declares a memory disk of 16 MiB works with any disk. So the attackers
        // with a null disk run these attacks as well.
        wanted == self || (self == Self::Null && attack.disks == ["mem:16MiB"])
    }
}

/// Attacks that an attacker with this disk can run.
fn attacks_for(disk: Disk) -> Vec<Attack> {
    let is_selected = |attack: &Attack| {
        attack.kind == Kind::Hostile
            && attack.log == LogReader::File
            && !EXCLUDED.contains(&attack.name)
            && disk.is_usable_for(attack)
    };
    attacks::all().into_iter().filter(is_selected).collect()
}

/// Attacker with one controller.
#[derive(Debug)]
pub(crate) struct Attacker {
    pub(crate) number: usize,
    pub(crate) socket: PathBuf,
    pub(crate) disk: Disk,
}

impl Attacker {
    /// Attacks until `stop` is set.
    pub(crate) fn run(
        &self,
        directory: &Path,
        stop: &AtomicBool,
        exclusive: &Mutex<()>,
        counters: &Counters,
    ) {
        let attacks = attacks_for(self.disk);
        // Each attacker begins at another place of the list, so that different attacks run
        // concurrently.
        for attack in attacks.iter().cycle().skip(self.number * 5) {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            if ONE_AT_A_TIME.contains(&attack.name) {
                if let Ok(_exclusive) = exclusive.try_lock() {
                    self.execute(attack, directory, counters);
                }
            } else {
                self.execute(attack, directory, counters);
            }
            sleep(PAUSE);
        }
    }

    fn execute(&self, attack: &Attack, directory: &Path, counters: &Counters) {
        let sockets = vec![self.socket.clone()];
        let mut field = Field::new(sockets, directory, Clock::start(ATTACK));
        add(&counters.attacks, 1);
        if let Err(error) = (attack.run)(&mut field) {
            counters.record_aborted(format!("{}: {error:#}", attack.name));
        }
        field.resets.iter().for_each(|time| counters.record_reset(*time));
        // The reset of a guest that was disconnected fails. This is no error here.
        for guest in &mut field.guests {
            if let Ok(time) = guest.reset() {
                counters.record_reset(time);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_attacks_exist_and_every_disk_has_attacks() {
        let all = attacks::all();
        let is_known = |name: &&str| all.iter().any(|attack| attack.name == *name);
        assert!(EXCLUDED.iter().chain(&ONE_AT_A_TIME).all(is_known));
        for disk in [Disk::Memory, Disk::File, Disk::Null] {
            assert!(attacks_for(disk).len() > 5, "{disk:?}");
        }
    }
}
