//! Program that runs inside the guest: a writer that reports each acknowledged write, and a check
//! for DMA into free memory.
//!
//! The program is static and uses only the standard library, so it needs no files of the guest
//! and is compiled in a second or two (see `tool.rs`).
#![forbid(unsafe_code)]

#[path = "../ack/sector.rs"]
#[allow(
    unreachable_pub,
    reason = "the file is shared with the library, where the items are public"
)]
mod sector;

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use sector::{PARTS, SECTOR, SLOT, Stamp};

/// `O_DIRECT` of x86: when a write returns, the disk has acknowledged it, and each read comes from
/// the disk, not from the page cache.
const O_DIRECT: i32 = 0o40_000;

const USAGE: &str = "shadowbell-guest-tool write device=PATH slots=N threads=N seconds=N seed=N \
                     generation=N acknowledge=PATH\n\
                     shadowbell-guest-tool patrol mib=N seconds=N";

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let verb = arguments.next().unwrap_or_default();
    let options: HashMap<String, String> = arguments
        .filter_map(|argument| {
            argument.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()))
        })
        .collect();
    let result = match verb.as_str() {
        "write" => write(&options),
        "patrol" => patrol(&options),
        _ => Err(USAGE.to_owned()),
    };
    match result {
        Ok(summary) => {
            println!("{summary}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn text<'a>(options: &'a HashMap<String, String>, name: &str) -> Result<&'a str, String> {
    options.get(name).map(String::as_str).ok_or_else(|| format!("{name}= is missing\n{USAGE}"))
}

fn number(options: &HashMap<String, String>, name: &str) -> Result<u64, String> {
    text(options, name)?.parse().map_err(|error| format!("{name}: {error}"))
}

/// State that the threads of the writer share.
struct Writer {
    disk: File,
    acknowledge: Mutex<File>,
    slots: u64,
    threads: u64,
    seed: u64,
    generation: u64,
    end: Instant,
    writes: AtomicU64,
    reads: AtomicU64,
    failures: AtomicU64,
}

fn write(options: &HashMap<String, String>) -> Result<String, String> {
    let device = text(options, "device")?;
    let disk = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(O_DIRECT)
        .open(device)
        .map_err(|error| format!("{device}: {error}"))?;
    let port = text(options, "acknowledge")?;
    let mut acknowledge =
        OpenOptions::new().append(true).open(port).map_err(|error| format!("{port}: {error}"))?;
    // A previous session may have ended in the middle of a line, so this session starts a new one.
    acknowledge.write_all(b"\n").map_err(|error| format!("{port}: {error}"))?;
    let writer = Writer {
        disk,
        acknowledge: Mutex::new(acknowledge),
        slots: number(options, "slots")?,
        threads: number(options, "threads")?.max(1),
        seed: number(options, "seed")?,
        generation: number(options, "generation")?,
        end: Instant::now() + Duration::from_secs(number(options, "seconds")?),
        writes: AtomicU64::new(0),
        reads: AtomicU64::new(0),
        failures: AtomicU64::new(0),
    };
    std::thread::scope(|scope| {
        for thread in 0..writer.threads {
            let writer = &writer;
            scope.spawn(move || writer.work(thread));
        }
    });
    let summary = format!(
        "writes {} reads {} failures {}",
        writer.writes.into_inner(),
        writer.reads.into_inner(),
        writer.failures.load(Ordering::Relaxed)
    );
    if writer.failures.into_inner() == 0 { Ok(summary) } else { Err(summary) }
}

impl Writer {
    /// Overwrites the slots of this thread in random order, and occasionally reads one back. Each
    /// slot belongs to one thread, so a slot has only one write in flight.
    fn work(&self, thread: u64) {
        let mine = self.slots / self.threads;
        if mine == 0 {
            return;
        }
        let mut last = vec![0_u64; mine as usize];
        let mut generation = self.generation;
        // O_DIRECT requires an aligned buffer, which is a part of a larger one.
        let mut buffer = vec![0_u8; 2 * SLOT];
        let start = buffer.as_ptr().align_offset(SLOT).min(SLOT);
        let Some(buffer) = buffer.get_mut(start..start + SLOT) else { return };
        let mut random = self.seed ^ (thread + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut operation = 0_u64;
        while Instant::now() < self.end && self.failures.load(Ordering::Relaxed) < 20 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            operation += 1;
            let Some(last) = last.get_mut((random % mine) as usize) else { return };
            let slot = (random % mine) * self.threads + thread;
            let at = slot * SLOT as u64;
            if operation.is_multiple_of(4) {
                // The contents of slots that this session has not written are unknown.
                if *last == 0 {
                    continue;
                }
                match self.disk.read_exact_at(buffer, at) {
                    Ok(()) => self.compare(slot, *last, buffer),
                    Err(error) => self.failed(&format!("read of slot {slot}: {error}")),
                }
                self.reads.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            generation += 1;
            sector::fill(Stamp { seed: self.seed, slot, generation }, buffer);
            match self.disk.write_all_at(buffer, at) {
                Ok(()) => {
                    *last = generation;
                    self.writes.fetch_add(1, Ordering::Relaxed);
                    self.report(&format!("A {slot} {generation}\n"));
                }
                Err(error) => self.failed(&format!("write of slot {slot}: {error}")),
            }
        }
    }

    fn compare(&self, slot: u64, generation: u64, bytes: &[u8]) {
        let want = Stamp { seed: self.seed, slot, generation };
        for part in 0..PARTS {
            let sector = bytes.get(part * SECTOR..(part + 1) * SECTOR).unwrap_or_default();
            match sector::read(part, sector) {
                Ok(stamp) if stamp == want => {}
                other => {
                    self.failed(&format!("slot {slot} sector {part}: {want:?} became {other:?}"));
                    return;
                }
            }
        }
    }

    fn failed(&self, what: &str) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        self.report(&format!("E {what}\n"));
        println!("{what}");
    }

    fn report(&self, line: &str) {
        // If the report fails, the write counts as not acknowledged.
        if let Ok(mut port) = self.acknowledge.lock() {
            let _ = port.write_all(line.as_bytes());
        }
    }
}

/// Allocates memory and checks that its contents do not change. The kernel has just freed much of
/// this memory after I/O. So a device that still writes to memory of an ended command is detected.
fn patrol(options: &HashMap<String, String>) -> Result<String, String> {
    let words = (number(options, "mib")? << 20) / 8;
    let end = Instant::now() + Duration::from_secs(number(options, "seconds")?);
    let value = |index: usize| (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let memory: Vec<u64> = (0..words as usize).map(value).collect();
    let mut rounds = 0;
    while Instant::now() < end {
        // Prevents the compiler from assuming the contents that were just written.
        let memory = std::hint::black_box(memory.as_slice());
        if let Some(index) = (0..memory.len()).find(|&i| memory.get(i) != Some(&value(i))) {
            return Err(format!(
                "someone wrote {:x?} at byte {} of the watched memory",
                memory.get(index),
                8 * index
            ));
        }
        rounds += 1;
    }
    Ok(format!("rounds {rounds}"))
}
