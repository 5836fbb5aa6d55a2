//! The guest's program, run on this machine on a file instead of a disk.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};

use shadowbell_guest::ack::Acknowledged;

const SEED: u64 = 7;

fn tool(arguments: &[String]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_shadowbell-guest-tool")).args(arguments).output().unwrap()
}

fn write(disk: &Path, log: &Path, generation: u64) -> Output {
    tool(&[
        "write".to_owned(),
        format!("device={}", disk.display()),
        format!("acknowledge={}", log.display()),
        format!("generation={generation}"),
        format!("seed={SEED}"),
        "slots=64".to_owned(),
        "threads=4".to_owned(),
        "seconds=1".to_owned(),
    ])
}

#[test]
fn acknowledged_writes_are_on_the_disk_and_losses_are_detected() {
    // The directory is not in /tmp, which may be a tmpfs: O_DIRECT needs a disk file system.
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (disk, log) = (directory.path().join("disk"), directory.path().join("log"));
    File::create(&disk).unwrap().set_len(64 * 4096).unwrap();
    File::create(&log).unwrap();
    let acknowledged = || Acknowledged::parse(&fs::read_to_string(&log).unwrap());
    for session in 0..2 {
        let output = write(&disk, &log, session << 32);
        assert!(output.status.success(), "{output:?}");
        assert!(acknowledged().writes > 64 && acknowledged().failures.is_empty());
        assert_eq!(acknowledged().broken(&disk, SEED).unwrap(), [""; 0]);
        if session == 0 {
            fs::copy(&disk, directory.path().join("old")).unwrap();
        }
    }
    // `old` is the image as it was after the first session. It contains none of the writes of the
    // second session, so every slot is broken.
    let old = directory.path().join("old");
    assert_eq!(acknowledged().broken(&old, SEED).unwrap().len(), acknowledged().slots.len());
    // One damaged byte is detected.
    File::options().write(true).open(&disk).unwrap().write_all_at(b"x", 4096 * 9 + 700).unwrap();
    let broken = acknowledged().broken(&disk, SEED).unwrap();
    assert!(broken.len() == 1 && broken[0].contains("slot 9"), "{broken:?}");
}

#[test]
fn missing_arguments_and_devices_are_reported() {
    let output = tool(&["write".to_owned(), "device=/nonexistent/disk".to_owned()]);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("/nonexistent/disk"));
    let output = tool(&["patrol".to_owned(), "mib=8".to_owned()]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("seconds= is missing"));
}

#[test]
fn a_patrol_of_unused_memory_reports_no_change() {
    let output = tool(&["patrol".to_owned(), "mib=8".to_owned(), "seconds=1".to_owned()]);
    assert!(output.status.success(), "{output:?}");
}
