//! `verify` on good disks, on defective ones, and on a controller with injected faults.

use crate::content::{BadDisk, Defect};
use crate::harness::{json, line, output, stderr_of_failure};
use clap::Parser;
use shadowbell::testing::{Session, VerifyArgs, connect, verify};
use shadowbell_disk_file::MemDisk;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    args: VerifyArgs,
}

/// Verifies 64 KiB of memory with `defect` in write `at`: number of bad blocks, and the error
/// text.
fn run(defect: Defect, at: u64) -> (u64, String) {
    let words = "verify local:bad --number-ios 3000 --iodepth 4 --max-bs 4k --size 64k --numjobs 2";
    let args = Line::parse_from(words.split_whitespace()).args;
    let memory = MemDisk::new(128, 512).unwrap();
    let disk = Arc::new(BadDisk { memory, defect, at, writes: Arc::default() });
    let transport = connect(disk, false).unwrap();
    let options = shadowbell_driver::AttachOptions { queue_pairs: 2, ..Default::default() };
    let mut session = Session::over(args.target.clone(), transport, &options).unwrap();
    let report = verify(&mut session, &args, &AtomicBool::new(false)).unwrap();
    let row = report.json(&args);
    assert_eq!(row["interrupted"], false);
    assert!(row["verified_blocks"].as_u64() > Some(1000), "{row}");
    assert!(row["commands"].as_u64() >= Some(5900), "{row}");
    session.detach().unwrap();
    (report.bad_blocks(), report.described().join("; "))
}

#[test]
fn an_interrupted_verification_says_so() {
    let args =
        Line::parse_from("verify local:memory --max-bs 4k --size 64k".split_whitespace()).args;
    let disk = Arc::new(MemDisk::new(128, 512).unwrap());
    let transport = connect(disk, false).unwrap();
    let options = shadowbell_driver::AttachOptions::default();
    let mut session = Session::over(args.target.clone(), transport, &options).unwrap();
    let report = verify(&mut session, &args, &AtomicBool::new(true)).unwrap();
    assert_eq!(report.json(&args)["interrupted"], true);
    let mut text = Vec::new();
    report.print(&mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("interrupted: only the writes until then were verified"), "{text}");
    session.detach().unwrap();
}

#[test]
fn verify_passes_a_good_disk_and_finds_each_defect() {
    assert_eq!(run(Defect::None, 0), (0, String::new()));
    // The run continues after the defect. A bad block that is overwritten before it is read cannot
    // be found, so several positions of the defect are tried.
    for defect in [Defect::Lost, Defect::Misplaced, Defect::Torn, Defect::Zeroed] {
        let found = (1000..1010).map(|at| run(defect, at)).find(|(bad, _)| *bad != 0);
        let (_, words) = found.unwrap_or_else(|| panic!("{defect:?} was never found"));
        assert!(words.starts_with("byte ") || words.contains("Compare"), "{defect:?}: {words}");
    }
}

#[test]
fn every_kind_of_command_is_used_and_counted() {
    let row =
        json(&mut line("verify mem:16MiB --number-ios 5000 --numjobs 2 --json"))["rows"][0].take();
    for kind in ["read", "write", "write-zeroes", "deallocate", "compare", "flush"] {
        assert!(row["by_kind"][kind].as_u64() > Some(50), "{kind}: {row}");
    }
    assert_eq!(
        (&row["verify_errors"], &row["failed"], &row["retried"]),
        (&0.into(), &0.into(), &0.into())
    );
    assert_eq!(row["recovery"]["late"], 0);
    let text =
        output(&mut line("verify mem:16MiB?block-size=4096 --runtime 300ms --completion poll"));
    assert!(text.contains(" 0 bad") && text.contains("write-zeroes"), "{text}");
}

#[test]
fn invalid_verify_arguments_are_refused_with_the_reason() {
    for (words, reason) in [
        ("mem:16MiB?read-only=on", "read-only"),
        ("mem:16MiB --max-bs 100", "multiple of 512"),
        ("mem:16MiB --size 17m", "reaches past the end"),
        ("mem:16MiB --size 64k --numjobs 2", "room for two commands"),
        ("mem:16MiB --offset 16m", "past the end"),
    ] {
        let text = stderr_of_failure(&mut line(&format!("verify {words}")), 2);
        assert!(text.contains(reason), "{words}: {text}");
    }
}

/// Tests with injected controller faults (feature `faults`).
#[cfg(feature = "faults")]
mod faults {
    use super::*;
    use crate::harness::Server;

    /// Options with short time limits, so that hung commands are aborted soon. The limit of admin
    /// commands is longer, because a reset is tried only a few times.
    const QUICK: &str = "--timeout 40ms --admin-timeout 2s --repeats 20 --retries 50";

    #[test]
    fn every_recovery_step_is_taken_and_nothing_is_lost() {
        let faults = "hang:rate=1/150,drop-after:rate=1/150,drop-before:rate=1/200,\
            duplicate:rate=1/200,wrong-cid:rate=1/400,wrong-phase:every=1500,fatal:every=1200,\
            refuse=0x08:every=4,corrupt:rate=1/300";
        let server = Server::start(&["mem:64MiB", "--faults", faults]);
        let target = server.target(1);
        let row =
            json(&mut line(&format!("verify {target} --number-ios 5000 {QUICK} --json")))["rows"]
                [0]
            .take();
        assert_eq!((&row["verify_errors"], &row["failed"]), (&0.into(), &0.into()), "{row}");
        for step in ["aborts", "queues_recreated", "resets", "repeated"] {
            assert!(row["recovery"][step].as_u64() > Some(1), "{step}: {row}");
        }
        assert_eq!(row["recovery"]["failed"], 0);
    }

    #[test]
    fn a_removed_controller_ends_verify_with_a_message() {
        let server = Server::start(&["mem:64MiB", "--faults", "removal:at=500"]);
        let text = stderr_of_failure(&mut line(&format!("verify {} {QUICK}", server.target(1))), 1);
        assert!(text.contains("all ones") || text.contains("lost the connection"), "{text}");
    }
}
