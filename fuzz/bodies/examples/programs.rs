//! Runs one fuzz body on any toolchain, without libFuzzer and sanitizers. The inputs are randomly
//! changed programs of a corpus, and new programs. Without coverage feedback the body executes
//! about ten times as many steps in the same time. `cargo xtask fuzz --plain` uses this program.

use clap::Parser;
use rustix::io::pwrite;
use shadowbell_fuzz_bodies as bodies;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

#[derive(Parser)]
struct Arguments {
    /// Name of the body
    target: String,
    /// Directory of the corpus, one file per program
    #[arg(long)]
    corpus: PathBuf,
    /// Directory for failing programs
    #[arg(long)]
    artifacts: PathBuf,
    /// Duration
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Seed of the random programs
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run the programs of the corpus without changes, repeatedly
    #[arg(long)]
    unchanged: bool,
    /// Maximum size of a program in bytes
    #[arg(long, default_value_t = 4096)]
    longest: usize,
}

/// Time after which a program counts as hung.
const HUNG: Duration = Duration::from_secs(100);

/// Random number generator Xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| (self.next() >> 32) as u8).collect()
    }
}

macro_rules! bodies {
    ($($name:ident)*) => {
        fn body(name: &str) -> Option<fn(&[u8])> {
            match name {
                $(stringify!($name) => Some(bodies::$name::run),)*
                _ => None,
            }
        }
    };
}

bodies! { session shared chaos queues driver client resets subsystem file qcow2 vhost nbd decode doorbell text }

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let Some(run) = body(&arguments.target) else {
        eprintln!("there is no body {}", arguments.target);
        return ExitCode::from(2);
    };
    std::fs::create_dir_all(&arguments.artifacts).expect("a directory for what fails");
    let corpus = programs(&arguments.corpus);
    let mut random = Random(arguments.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    // The current program is written to a file, so that it is available after the process has been
    // killed.
    let now = arguments.artifacts.join(format!("now-{}", std::process::id()));
    let file: OwnedFd = std::fs::File::create(&now).expect("a file for the program").into();
    static PROGRAMS: AtomicU64 = AtomicU64::new(0);
    watch(&PROGRAMS, now.clone());
    let end = Instant::now() + Duration::from_secs(arguments.seconds);
    let mut again = corpus.iter().cycle();
    while Instant::now() < end {
        let program = match again.next() {
            Some(program) if arguments.unchanged => program.clone(),
            _ => {
                let mut program = begin(&corpus, &mut random, arguments.longest);
                for _ in 0..random.below(8) {
                    change(&mut program, &corpus, &mut random);
                }
                program.truncate(arguments.longest);
                program
            }
        };
        let mut record = (program.len() as u64).to_le_bytes().to_vec();
        record.extend_from_slice(&program);
        pwrite(&file, &record, 0).expect("the program is written down");
        if catch_unwind(AssertUnwindSafe(|| run(&program))).is_err() {
            let number = PROGRAMS.load(Ordering::Relaxed);
            let path = arguments.artifacts.join(format!("plain-{}-{number}", arguments.seed));
            std::fs::write(&path, &program).expect("what fails is kept");
            eprintln!("Test unit written to {}", path.display());
            return ExitCode::FAILURE;
        }
        PROGRAMS.fetch_add(1, Ordering::Relaxed);
    }
    let _ = std::fs::remove_file(&now);
    let programs = PROGRAMS.load(Ordering::Relaxed);
    println!("{programs} programs, {} steps", bodies::steps());
    ExitCode::SUCCESS
}

/// Contents of the files of a directory.
fn programs(directory: &Path) -> Vec<Vec<u8>> {
    let files = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let programs: Vec<_> = files.filter_map(|file| std::fs::read(file.path()).ok()).collect();
    println!("{} programs to begin with", programs.len());
    programs
}

/// A program of the corpus, or a new one.
fn begin(corpus: &[Vec<u8>], random: &mut Random, longest: usize) -> Vec<u8> {
    match corpus.get(random.below(corpus.len() + 1 + corpus.len() / 4)) {
        Some(program) => program.clone(),
        None => {
            let len = random.below(longest);
            random.bytes(len)
        }
    }
}

/// Changes the program at random.
fn change(program: &mut Vec<u8>, corpus: &[Vec<u8>], random: &mut Random) {
    let at = random.below(program.len() + 1);
    let len = 1 + random.below(16);
    let to = (at + len).min(program.len());
    match random.below(8) {
        0 => drop(program.drain(at..to)),
        1 => {
            let new = random.bytes(len);
            program.splice(at..at, new);
        }
        2 | 3 => {
            if let Some(byte) = program.get_mut(at) {
                *byte = random.next() as u8;
            }
        }
        4 => {
            if let Some(byte) = program.get_mut(at) {
                *byte ^= 1 << random.below(8);
            }
        }
        5 => program[at..to].fill(random.next() as u8),
        6 => {
            let piece = program[at..to].to_vec();
            let again = random.below(program.len() + 1);
            program.splice(again..again, piece);
        }
        _ => {
            // Replaces the end of the program by the end of another program.
            if let Some(other) = corpus.get(random.below(corpus.len())) {
                let from = random.below(other.len() + 1);
                program.truncate(at);
                program.extend_from_slice(&other[from..]);
            }
        }
    }
}

/// Ends the process if a program runs longer than [`HUNG`].
fn watch(programs: &'static AtomicU64, now: PathBuf) {
    std::thread::spawn(move || {
        let (mut last, mut since) = (0, Instant::now());
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let count = programs.load(Ordering::Relaxed);
            if count != last {
                (last, since) = (count, Instant::now());
            } else if since.elapsed() > HUNG {
                eprintln!("a program does not come to its end: {}\n{}", now.display(), threads());
                std::process::exit(3);
            }
        }
    });
}

/// Names, states, context switches and system calls of the threads of this process.
fn threads() -> String {
    let read = |path: PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let mut text = String::new();
    for task in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let task = task.path();
        let status = read(task.join("status"));
        let facts = ["Name:", "State:", "voluntary_ctxt", "nonvoluntary_ctxt"];
        let facts = facts.map(|name| status.lines().find(|line| line.starts_with(name)));
        let facts: Vec<_> = facts.into_iter().flatten().collect();
        let call = read(task.join("syscall"));
        let times: Vec<_> = read(task.join("stat"))
            .rsplit(')')
            .next()
            .map(|rest| rest.split_whitespace().skip(11).take(2).map(str::to_owned).collect())
            .unwrap_or_default();
        let (facts, call) = (facts.join(", ").replace('\t', " "), call.trim());
        text += &format!("{}: {facts}; ticks {times:?}; {call}\n", task.display());
        text += &read(task.join("stack"));
    }
    text
}
