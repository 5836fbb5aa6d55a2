//! User input: sizes, disks, targets, command lines, a configuration file. Each text is parsed, or
//! refused with a message.

use crate::limits::Limits;
use crate::source::Source;
use clap::Parser;
use rustix::fs::{MemfdFlags, memfd_create};
use shadowbell::testing::{BenchArgs, Target, check_config_file};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

/// Command line of `shadowbell bench` with any arguments.
#[derive(Parser)]
struct Bench {
    #[command(flatten)]
    args: BenchArgs,
}

/// Runs the program that `input` encodes.
pub fn run(input: &[u8]) {
    let mut source = Source::new(input);
    let limits = Limits::begin();
    while !source.is_empty() {
        understand(&mut source);
        limits.step("text");
    }
}

fn understand(source: &mut Source<'_>) {
    let kind = source.below(6);
    let text = String::from_utf8_lossy(&source.bytes(1024)).into_owned();
    match kind {
        0 => {
            if let Ok(size) = shadowbell_disk::parse_size(&text) {
                assert!(!text.trim().is_empty(), "nothing is {size} bytes");
            }
        }
        1 => {
            // Disk types with files are excluded, because a random name could be that of any file.
            for scheme in ["null:", "mem:"] {
                let spec = format!("{scheme}{text}");
                if let Ok(disk) = shadowbell_disk_file::open(&spec) {
                    let info = disk.info();
                    assert!(info.blocks > 0 && [512, 4096].contains(&info.block_size), "{info:?}");
                }
            }
        }
        2 => {
            if let Ok(target) = text.parse::<Target>() {
                // A parsed value is printed as a text that parses to the same value.
                let again = target.to_string().parse::<Target>();
                let again = again.unwrap_or_else(|error| panic!("{target}: {error}"));
                assert_eq!(again.to_string(), target.to_string());
            }
        }
        3 => {
            let words = text.split(['\n', ' ']).filter(|word| !word.is_empty());
            let bench = Bench::try_parse_from(["bench"].into_iter().chain(words));
            if let Some(Ok(config)) = bench.ok().map(|bench| bench.args.load_config()) {
                let _ = config.attach_options();
            }
        }
        4 => with_file(text.as_bytes(), |path| drop(check_config_file(path))),
        _ => with_file(&source.bytes(1 << 12), |path| {
            let Ok(records) = shadowbell_controller::trace::read_trace(path) else { return };
            for record in records.take(100_000) {
                let _ = format!("{record:?}");
            }
        }),
    }
}

/// Makes a file with these bytes, which exists while `look` runs.
fn with_file(bytes: &[u8], look: impl FnOnce(&std::path::Path)) {
    let fd: OwnedFd = memfd_create("text", MemfdFlags::CLOEXEC).expect("a memfd");
    let mut rest = bytes;
    while !rest.is_empty() {
        let len = rustix::io::write(&fd, rest).expect("room");
        rest = &rest[len..];
    }
    look(&PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd())));
}
