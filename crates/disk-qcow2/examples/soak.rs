//! Soak test of crash consistency: random operations on a qcow2 image by a process that is killed
//! at random times, and checks of the image afterwards. Built and run by `cargo xtask soak qcow2`.
//!
//! A worker process executes batches that a seed determines. It records in a file which batch was
//! started, completed and flushed. A watching process kills the worker process, opens the image as
//! the next server process would, and checks:
//!
//! * Each unit of the disk contains the last completed data, or data of a later operation.
//! * `qemu-img check` finds no corruption, before and after the image is opened, and repairs leaks.
//! * `qemu-img compare` finds no difference from a raw image of the data that were read.

use shadowbell_disk::{Disk, Op, Request};
use shadowbell_disk_file::FileOptions;
use shadowbell_disk_qcow2::Qcow2Disk;
use shadowbell_memory::{Segments, SharedBytes};
use shadowbell_testing::disks::{Random, memory, run, segments};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

/// Number of bytes of a unit. Each unit is written as a whole.
const UNIT: usize = 4096;
/// Number of units of the disk.
const UNITS: usize = 8192;
/// Number of concurrent operations. Each has its own part of the disk, called a lane.
const LANES: usize = 32;
const LANE: usize = UNITS / LANES;
/// Cluster sizes, one per image.
const CLUSTERS: [&str; 4] = ["64k", "4k", "16k", "512k"];
/// Number of worker processes per image, one after the other.
const PROCESSES: u64 = 40;
/// Ratio of all worker processes to those that are killed soon after their start.
const SOON_EVERY: u64 = 8;

/// Mix of operations on an image. Each cluster size is tested with both mixes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mix {
    /// All sizes and kinds of operations. Most of them allocate or free clusters.
    All,
    /// Mostly short operations on allocated clusters. They take the fast path, which executes many
    /// more of them in the same time.
    Short,
}

impl Mix {
    const BOTH: [Self; 2] = [Self::All, Self::Short];

    fn word(self) -> &'static str {
        match self {
            Self::All => "all",
            Self::Short => "short",
        }
    }

    fn named(word: &str) -> Self {
        if word == Self::Short.word() { Self::Short } else { Self::All }
    }

    /// Mean interval of flushes, in batches.
    fn flush_every(self) -> u64 {
        match self {
            Self::All => 24,
            Self::Short => 96,
        }
    }

    /// Two parameters of the lengths of operations. The first is the mean number of operations
    /// between two that may cover their whole lane. The second is the maximum length of the others,
    /// in units.
    fn lengths(self) -> (u64, usize) {
        match self {
            Self::All => (16, 8),
            Self::Short => (4096, 2),
        }
    }

    /// Maximum run time of a worker process.
    fn longest(self) -> Duration {
        match self {
            Self::All => Duration::from_millis(600),
            Self::Short => Duration::from_millis(2400),
        }
    }

    /// Mean interval between discards, and between Write Zeroes, in operations.
    fn change_every(self) -> u64 {
        match self {
            Self::All => 16,
            Self::Short => 2048,
        }
    }
}

/// Operation of a batch.
#[derive(Clone, Copy)]
struct Step {
    op: Op,
    first: usize,
    count: usize,
    /// Number that identifies the write: it is part of the data of all units that the operation
    /// changes.
    stamp: u64,
}

/// Operations of batch `number`, one in each part (lane) of the disk. `None` if the batch is a
/// flush.
fn batch(mix: Mix, seed: u64, number: u64) -> Option<Vec<Step>> {
    let mut random = Random((seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15)) | 1);
    for _ in 0..4 {
        random.any();
    }
    if random.below(mix.flush_every()) == 0 {
        return None;
    }
    let (long_every, longest) = mix.lengths();
    let step = |lane: usize| {
        let first = random.below(LANE as u64) as usize;
        let most = if random.below(long_every) == 0 { LANE } else { longest };
        let count = 1 + random.below((LANE - first).min(most) as u64) as usize;
        let (op, stamp) = match random.below(mix.change_every()) {
            0 => (Op::Discard, 0),
            1 => (Op::WriteZeroes { deallocate: random.below(2) == 0, fua: false }, 0),
            other if other % 3 == 0 => (Op::Read, 0),
            // The stamp identifies the write that a unit contains: it is unique, and never 0, which
            // stands for zeroes.
            _ => (Op::Write { fua: false }, seed << 40 | number << 8 | (lane as u64 + 1)),
        };
        Step { op, first: lane * LANE + first, count, stamp }
    };
    Some((0..LANES).map(step).collect())
}

/// Content of a unit, a fixed-size part of the disk, after the write with this stamp.
fn content(stamp: u64, unit: usize) -> impl Iterator<Item = u64> {
    let mix = (stamp ^ ((unit as u64) << 20)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..UNIT as u64 / 8).map(move |at| match (stamp, at) {
        (0, _) => 0,
        (_, 0) => stamp,
        (_, 1) => unit as u64,
        _ => mix.wrapping_add(at),
    })
}

fn fill(bytes: &mut Vec<u8>, stamp: u64, unit: usize) {
    bytes.clear();
    content(stamp, unit).for_each(|word| bytes.extend(word.to_le_bytes()));
}

/// Returns the stamp of the write whose data the unit contains. Fails if the content is not that of
/// one write.
fn stamp_of(bytes: &[u8], unit: usize) -> Result<u64, String> {
    let words = || bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    let stamp = words().next().unwrap_or(0);
    if words().eq(content(stamp, unit)) {
        return Ok(stamp);
    }
    let odd = words().zip(content(stamp, unit)).position(|(is, was)| is != was).unwrap_or(0);
    Err(format!("unit {unit} starts with {stamp:#x} and differs from byte {} on", odd * 8))
}

/// Progress of a worker process: number of the last batch that it has begun, and of the last batch
/// that has completed.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    begun: u64,
    answered: u64,
}

impl Progress {
    fn note(self, file: &File) {
        let bytes = [self.begun, self.answered].map(u64::to_le_bytes).concat();
        file.write_all_at(&bytes, 0).unwrap();
    }

    fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_default();
        let word = |at: usize| {
            let word = bytes.get(8 * at..8 * at + 8);
            word.map_or(0, |word| u64::from_le_bytes(word.try_into().unwrap()))
        };
        Self { begun: word(0), answered: word(1) }
    }
}

fn open(image: &Path) -> Result<Qcow2Disk, String> {
    Qcow2Disk::open(image, &FileOptions::default()).map_err(|error| error.to_string())
}

/// Main function of a worker process. It runs until the process is killed.
fn work(image: &Path, progress: &Path, mix: Mix, seed: u64) -> Result<(), String> {
    let disk = open(image)?;
    let mut model = read_all(&disk)?;
    let file = File::options().write(true).create(true).truncate(true).open(progress);
    let file = file.map_err(|error| error.to_string())?;
    let mut queue = disk.queue().map_err(|error| error.to_string())?;
    let bytes = memory(UNITS * UNIT);
    let mut progress = Progress::default();
    let mut unit = Vec::new();
    for number in 1.. {
        progress.begun = number;
        progress.note(&file);
        let Some(steps) = batch(mix, seed, number) else {
            let flush = Request { op: Op::Flush, offset: 0, len: 0 };
            run(&mut *queue, vec![(flush, Segments::new())])[0].map_err(|e| e.to_string())?;
            progress.answered = number;
            progress.note(&file);
            continue;
        };
        let mut requests = Vec::new();
        for step in &steps {
            let (offset, len) = (step.first * UNIT, step.count * UNIT);
            let request = Request { op: step.op, offset: offset as u64, len: len as u64 };
            let moves = matches!(step.op, Op::Read | Op::Write { .. });
            if matches!(step.op, Op::Write { .. }) {
                for at in step.first..step.first + step.count {
                    fill(&mut unit, step.stamp, at);
                    bytes.write_from(at * UNIT, &unit).unwrap();
                }
            }
            let data = if moves { segments(&bytes, offset, len) } else { Segments::new() };
            requests.push((request, data));
        }
        for (step, result) in steps.iter().zip(run(&mut *queue, requests)) {
            result.map_err(|error| format!("{:?}: {error}", step.op))?;
            let units = model.iter_mut().enumerate().skip(step.first).take(step.count);
            for (at, stamp) in units {
                if step.op == Op::Read {
                    same(&bytes, at, &[*stamp], &mut unit)?;
                } else {
                    *stamp = step.stamp;
                }
            }
        }
        progress.answered = number;
        progress.note(&file);
    }
    Ok(())
}

/// Returns the stamp of the unit with index `at` in `bytes`. Fails if the stamp is not one of
/// `may`.
fn same(bytes: &SharedBytes, at: usize, may: &[u64], unit: &mut Vec<u8>) -> Result<u64, String> {
    unit.resize(UNIT, 0);
    bytes.read_into(at * UNIT, unit).unwrap();
    let stamp = stamp_of(unit, at)?;
    if may.contains(&stamp) {
        return Ok(stamp);
    }
    Err(format!("unit {at} holds {stamp:#x}, and may hold {may:x?}"))
}

fn read_into(disk: &Qcow2Disk, bytes: &SharedBytes) -> Result<(), String> {
    let mut queue = disk.queue().map_err(|error| error.to_string())?;
    let piece = UNITS * UNIT / LANES;
    let read = |lane: usize| {
        let request = Request { op: Op::Read, offset: (lane * piece) as u64, len: piece as u64 };
        (request, segments(bytes, lane * piece, piece))
    };
    let results = run(&mut *queue, (0..LANES).map(read).collect());
    results.into_iter().try_for_each(|result| result.map_err(|error| error.to_string()))
}

/// Stamps of all units.
fn read_all(disk: &Qcow2Disk) -> Result<Vec<u64>, String> {
    let bytes = memory(UNITS * UNIT);
    read_into(disk, &bytes)?;
    let mut unit = vec![0; UNIT];
    let stamp = |at: usize| {
        bytes.read_into(at * UNIT, &mut unit).unwrap();
        stamp_of(&unit, at)
    };
    (0..UNITS).map(stamp).collect()
}

/// Totals of all processes so far.
#[derive(Default)]
struct Counters {
    operations: u64,
    kills: u64,
    leaked: u64,
    compared: u64,
}

struct Watch {
    directory: PathBuf,
    seed: u64,
    /// True for a control run. It restores the image as it was before the killed process has
    /// written, so the check must report lost data.
    control: bool,
    counters: Counters,
}

impl Watch {
    fn image(&self) -> PathBuf {
        self.directory.join("soak.qcow2")
    }

    fn qemu_img(&self, arguments: &[&str], more: &[&Path]) -> Result<(i32, String), String> {
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            let output = Command::new("qemu-img").args(arguments).args(more).output();
            let output = output.map_err(|error| format!("qemu-img: {error}"))?;
            let text = [output.stdout, output.stderr].concat();
            let text = String::from_utf8_lossy(&text).into_owned();
            // After a kill, the kernel releases the process's lock of the image only when it has
            // released its io_uring. So the command is repeated for a while.
            let is_held = text.contains("Failed to get") || text.contains("Failed to lock byte");
            if !is_held || Instant::now() > until {
                return Ok((output.status.code().unwrap_or(-1), text));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn create(&self, clusters: &str) -> Result<(), String> {
        let _ = std::fs::remove_file(self.image());
        let options = format!("cluster_size={clusters}");
        let size = (UNITS * UNIT).to_string();
        let name = self.image();
        let name = name.to_str().ok_or("the directory's name is not UTF-8")?;
        let made =
            self.qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options, name, &size], &[])?;
        if made.0 == 0 { Ok(()) } else { Err(made.1) }
    }

    /// Runs a worker process and kills it.
    fn kill_one(&self, mix: Mix, seed: u64, random: &mut Random) -> Result<Progress, String> {
        let progress = self.directory.join("soak.progress");
        let _ = std::fs::remove_file(&progress);
        let mut command = Command::new(std::env::current_exe().map_err(|e| e.to_string())?);
        command.arg("work").arg(self.image()).arg(&progress);
        command.arg(mix.word()).arg(seed.to_string());
        let mut child = command.spawn().map_err(|error| error.to_string())?;
        let soon = random.below(SOON_EVERY) == 0;
        let most = if soon { mix.longest() / 20 } else { mix.longest() };
        let time = most.mul_f64(random.below(1000) as f64 / 1000.0);
        // The random time until the kill begins when the process has read the whole image and begun
        // its first batch.
        let until = Instant::now() + Duration::from_secs(60);
        while Progress::read(&progress).begun == 0 && Instant::now() < until {
            if let Ok(Some(status)) = child.try_wait() {
                return Err(format!("the process ended by itself: {status}"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(time);
        if let Ok(Some(status)) = child.try_wait() {
            return Err(format!("the process ended by itself: {status}"));
        }
        child.kill().map_err(|error| error.to_string())?;
        child.wait().map_err(|error| error.to_string())?;
        Ok(Progress::read(&progress))
    }

    /// Returns the stamps that each unit may contain after a worker process ended with `progress`,
    /// and the number of its operations. A batch that was begun but not answered may be partly
    /// written.
    fn allowed(model: &[u64], (mix, seed): (Mix, u64), progress: Progress) -> (Vec<Vec<u64>>, u64) {
        let mut may: Vec<Vec<u64>> = model.iter().map(|stamp| vec![*stamp]).collect();
        let mut operations = 0;
        for number in 1..=progress.begun {
            let Some(steps) = batch(mix, seed, number) else {
                operations += 1;
                continue;
            };
            for step in steps {
                operations += 1;
                if step.op == Op::Read {
                    continue;
                }
                for unit in &mut may[step.first..step.first + step.count] {
                    if number <= progress.answered {
                        unit.clear();
                    }
                    unit.push(step.stamp);
                }
            }
        }
        (may, operations)
    }

    fn round(&mut self, mix: Mix, model: &mut [u64], random: &mut Random) -> Result<(), String> {
        let seed = random.below(1 << 20) + 1;
        let before = self.directory.join("soak.before");
        if self.control {
            std::fs::copy(self.image(), &before).map_err(|error| error.to_string())?;
        }
        let progress = self.kill_one(mix, seed, random)?;
        if self.control {
            std::fs::copy(&before, self.image()).map_err(|error| error.to_string())?;
        }
        let (may, operations) = Self::allowed(model, (mix, seed), progress);
        self.counters.kills += 1;
        self.counters.operations += operations;
        let image = self.image();
        let (code, text) = self.qemu_img(&["check"], &[&image])?;
        if !matches!(code, 0 | 3) {
            return Err(format!("qemu-img check before the open (seed {seed}): {text}"));
        }
        let disk = open(&image)?;
        let bytes = memory(UNITS * UNIT);
        read_into(&disk, &bytes)?;
        drop(disk);
        let mut unit = Vec::new();
        for (at, may) in may.iter().enumerate() {
            let outcome = same(&bytes, at, may, &mut unit);
            model[at] = outcome.map_err(|why| format!("{why} (seed {seed}, {progress:?})"))?;
        }
        let (code, text) = self.qemu_img(&["check"], &[&image])?;
        match code {
            0 => {}
            3 => {
                self.counters.leaked += 1;
                let (code, text) = self.qemu_img(&["check", "-r", "leaks"], &[&image])?;
                if code != 0 {
                    return Err(format!("leaks cannot be repaired: {text}"));
                }
            }
            _ => return Err(format!("qemu-img check (seed {seed}): {text}")),
        }
        if self.counters.kills.is_multiple_of(4) {
            let raw = self.directory.join("soak.raw");
            let mut all = vec![0; UNITS * UNIT];
            bytes.read_into(0, &mut all).unwrap();
            std::fs::write(&raw, &all).map_err(|error| error.to_string())?;
            let formats = ["compare", "-q", "-f", "raw", "-F", "qcow2"];
            let (code, text) = self.qemu_img(&formats, &[&raw, &image])?;
            if code != 0 {
                return Err(format!("qemu-img compare (seed {seed}): {text}"));
            }
            self.counters.compared += 1;
        }
        Ok(())
    }

    fn run(&mut self, operations: u64) -> Result<(), String> {
        let mut random = Random(self.seed.wrapping_mul(0x2545_f491_4f6c_dd1d) | 1);
        let (began, mut reported) = (Instant::now(), Instant::now());
        let mut images = 0;
        while self.counters.operations < operations {
            let clusters = CLUSTERS[images / Mix::BOTH.len() % CLUSTERS.len()];
            let mix = Mix::BOTH[images % Mix::BOTH.len()];
            images += 1;
            self.create(clusters)?;
            let mut model = vec![0; UNITS];
            for _ in 0..PROCESSES {
                let outcome = self.round(mix, &mut model, &mut random);
                outcome.map_err(|why| format!("clusters of {clusters}, {mix:?}: {why}"))?;
                if reported.elapsed() > Duration::from_secs(10) {
                    reported = Instant::now();
                    self.report(began);
                }
                if self.counters.operations >= operations {
                    break;
                }
            }
        }
        self.report(began);
        Ok(())
    }

    fn report(&self, began: Instant) {
        let Counters { operations, kills, leaked, compared } = &self.counters;
        let seconds = began.elapsed().as_secs_f64();
        println!(
            "{operations} operations in {seconds:.0} s ({:.0} a second), {kills} kills; checked \
             each time: no corruption, {leaked} with leaks, which were repaired; {compared} compared",
            *operations as f64 / seconds
        );
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match words.as_slice() {
        ["work", image, progress, mix, seed] => {
            let (mix, seed) = (Mix::named(mix), seed.parse().unwrap_or(1));
            work(Path::new(image), Path::new(progress), mix, seed)
        }
        ["watch", directory, operations, seed, how] => {
            let (directory, seed) = (PathBuf::from(directory), seed.parse().unwrap_or(1));
            let (control, counters) = (*how == "control", Counters::default());
            let mut watch = Watch { directory, seed, control, counters };
            match watch.run(operations.parse().unwrap_or(0)) {
                Err(why) if control && why.contains("and may hold") => {
                    println!("the control run has failed as required: {why}");
                    Ok(())
                }
                Ok(()) if control => Err("the control run has not detected the loss".to_owned()),
                outcome => outcome,
            }
        }
        _ => Err("this is started by `cargo xtask soak qcow2`".to_owned()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("error: {why}");
            ExitCode::FAILURE
        }
    }
}
