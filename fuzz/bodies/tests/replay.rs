//! Replay of the fuzz bodies on any toolchain, with the corpus and some thousand pseudo-random
//! programs. It finds fewer errors than libFuzzer, but detects bodies that no longer work.

use shadowbell_fuzz_bodies as bodies;
use std::path::Path;
use std::sync::{PoisonError, RwLock};
use std::time::Instant;

/// Random number generator Xorshift64*, with the same programs on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

/// Targets that count the open descriptors of this process. They run alone, because other targets
/// would open descriptors meanwhile.
const ALONE: [&str; 2] = ["session", "shared"];
static OTHERS: RwLock<()> = RwLock::new(());

/// Runs the corpus of `target`, and `programs` pseudo-random programs of up to `len` bytes.
fn replay(target: &str, run: fn(&[u8]), programs: u64, len: u64) {
    let _alone =
        ALONE.contains(&target).then(|| OTHERS.write().unwrap_or_else(PoisonError::into_inner));
    let _with_others =
        (!ALONE.contains(&target)).then(|| OTHERS.read().unwrap_or_else(PoisonError::into_inner));
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus").join(target);
    for program in std::fs::read_dir(corpus).into_iter().flatten().flatten() {
        println!("{}", program.path().display());
        run(&std::fs::read(program.path()).expect("a program"));
    }
    // The environment variables BODIES_FROM and BODIES_TIMES select other programs, for example
    // BODIES_FROM=1000000 BODIES_TIMES=100.
    let (since, steps) = (Instant::now(), bodies::steps());
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let first = number("BODIES_FROM").unwrap_or(0);
    for program in first..first + programs * number("BODIES_TIMES").unwrap_or(1) {
        // If a program fails, its number is the last one printed.
        println!("{target} {program}");
        let mut random = Random((program + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let len = random.next() % len;
        let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
        run(&bytes);
    }
    // The count includes the steps of other targets that run at the same time. To measure a target,
    // run it alone.
    let (steps, took) = (bodies::steps() - steps, since.elapsed());
    println!("{target}: {steps} steps in {took:?}");
}

macro_rules! targets {
    ($($name:ident: $programs:literal of $len:literal;)*) => {
        $(#[test]
        fn $name() {
            replay(stringify!($name), bodies::$name::run, $programs, $len);
        })*
    };
}

// Numbers of programs, chosen so that all targets together take some seconds.
targets! {
    session: 500 of 2000;
    shared: 1000 of 1000;
    chaos: 1000 of 2000;
    queues: 600 of 2000;
    driver: 200 of 1000;
    client: 1000 of 1000;
    resets: 600 of 2000;
    subsystem: 60 of 1000;
    file: 400 of 2000;
    qcow2: 300 of 400;
    vhost: 400 of 2000;
    nbd: 500 of 1000;
    decode: 3000 of 5000;
    doorbell: 3000 of 1000;
    text: 3000 of 300;
}
