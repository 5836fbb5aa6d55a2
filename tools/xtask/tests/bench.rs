//! `cargo xtask bench --quick`: every suite works, and its counts are right. Times are not
//! checked, because the machine may have other load.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use shadowbell_bench::workspace::build_for_tests;
use shadowbell_testing::programs::skipped;

fn bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_xtask")).arg("bench").args(arguments).output().unwrap()
}

/// Two CPUs that this process may use, as a command-line argument.
fn processors() -> Option<[String; 2]> {
    let mine = rustix::thread::sched_getaffinity(None).unwrap();
    let mut list = (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| mine.is_set(*cpu));
    Some([list.next()?.to_string(), list.next()?.to_string()])
}

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("{name}: {row}"))
}

#[test]
fn every_suite_works_and_counts() {
    let Some(cpus) = processors() else {
        skipped("needs two processors");
        return;
    };
    let (program, cpus) = (build_for_tests().unwrap(), cpus.join(","));
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).to_str().unwrap();
    let output = bench(&[
        "wire",
        "null",
        "mem",
        "file",
        "sleep",
        "growth",
        "scrape",
        "--quick",
        "--json",
        "--cpus",
        &cpus,
        "--directory",
        directory,
        "--shadowbell",
        program.to_str().unwrap(),
    ]);
    let text = String::from_utf8(output.stdout).unwrap();
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{complaints}");
    let report: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let rows = report["rows"].as_array().unwrap();
    let of = |table: &str, device: &str| {
        let found: Vec<&Value> =
            rows.iter().filter(|row| row["table"] == table && row["device"] == device).collect();
        assert!(!found.is_empty(), "{table} {device}: {text}");
        found
    };
    let shadowbell_rows = |table: &str| of(table, "shadowbell");
    for row in of("wire", "wire") {
        assert!(number(row, "iops") > 0.0 && number(row, "line_ns") > 0.0, "{row}");
    }
    for table in ["null", "mem", "file", "sleep", "paced", "growth-queues"] {
        for row in shadowbell_rows(table) {
            for name in ["iops", "iops_min", "iops_max", "commands", "bandwidth_bytes", "seconds"] {
                assert!(number(row, name) > 0.0, "{name}: {row}");
            }
            for name in ["cpu_ns_per_io", "controller_cpu_ns_per_io", "interrupts_per_io"] {
                assert!(number(row, name) >= 0.0, "{name}: {row}");
            }
            assert!(row["latency_ns"]["p50"].is_number() && row["rounds"] == 1, "{row}");
            assert_eq!(row["doorbells"], "shadow");
        }
    }
    // Driver and controller poll, so there are no interrupts. The driver writes a doorbell register
    // only for the first commands of a queue pair, until the controller reads the shadow doorbells.
    // Commands that filled the disk are not included, because they used another queue pair.
    for row in [shadowbell_rows("null"), shadowbell_rows("mem")].concat() {
        assert!(number(row, "doorbell_mmio_writes") <= 4.0, "{row}");
        assert!(number(row, "controller_mmio_writes") <= 8.0, "{row}");
        assert_eq!(row["interrupts_per_io"], 0.0, "{row}");
    }
    for row in shadowbell_rows("null") {
        assert!(number(row, "wire_iops") > 0.0 && number(row, "wire_percent") > 0.0, "{row}");
    }
    for row in shadowbell_rows("mem") {
        assert!(number(row, "memcpy_bytes") > 0.0 && number(row, "memcpy_percent") > 0.0, "{row}");
    }
    for row in shadowbell_rows("sleep") {
        // At most one doorbell and one interrupt per I/O, and far fewer with many commands in
        // flight.
        let most = if number(row, "iodepth") > 1.0 { 0.5 } else { 1.01 };
        assert!(number(row, "mmio_per_io") <= most, "{row}");
        assert!(number(row, "interrupts_per_io") <= most, "{row}");
    }
    let adaptive: Vec<_> =
        shadowbell_rows("paced").into_iter().filter(|row| row["poll"] == "adaptive").collect();
    assert_eq!(adaptive.len(), 2);
    assert!(adaptive.iter().all(|row| row["cpu_of_polling_percent"].is_number()));
    for row in shadowbell_rows("growth-controllers") {
        assert!(number(row, "memory_bytes") > 0.0, "{row}");
        if number(row, "controllers") > 1.0 {
            assert!(number(row, "memory_bytes_per_controller") < 96.0 * 1024.0, "{row}");
        }
    }
    assert!(
        number(shadowbell_rows("growth-queue-memory")[0], "memory_bytes_per_queue") < 16.0 * 1024.0
    );
    for row in shadowbell_rows("scrape") {
        // Each queue has eighteen lines in `/metrics`, and each empty disk has about twenty for
        // each of two types.
        let (controllers, lines) = (number(row, "controllers"), number(row, "lines"));
        assert!(lines > 60.0 * controllers && number(row, "text_bytes") > 40.0 * lines, "{row}");
        assert!(number(row, "scrapes") >= 3.0 && number(&row["scrape_ns"], "p50") > 0.0, "{row}");
        assert!(number(row, "scrape_cpu_ns") > 0.0 && number(row, "p99_ratio") > 0.0, "{row}");
    }
    // The image was removed.
    let left = std::fs::read_dir(directory).unwrap().flatten();
    let images = left.filter(|entry| entry.path().extension().is_some_and(|name| name == "img"));
    assert_eq!(images.count(), 0);
}

#[test]
fn invalid_arguments_are_refused_with_the_reason() {
    for (arguments, words) in [
        (&["wire", "--check"][..], "`instructions`"),
        (&["wire", "--cpus", "0,0"], "both sides on one"),
        (&["wire", "--cpus", "0,1,2"], "two processors"),
        (&["null", "--shadowbell", "/nowhere/shadowbell"], "/nowhere/shadowbell"),
        (&["instructions", "--check", "--record"], "--record"),
        (&["wire", "--quick", "--rounds", "3"], "--rounds"),
        (&["wire", "--quick", "--cpus", "0,1000000"], "1000000"),
        (&["spdk"], "--spdk DIR"),
        (&["spdk", "--spdk", "/nowhere"], "/nowhere/build/bin/nvmf_tgt is not there"),
        (&["wire", "--spdk", "/nowhere"], "about the suites `spdk` and `exports`"),
        (&["speed"], "speed"),
    ] {
        let output = bench(arguments);
        assert!(!output.status.success(), "{arguments:?}");
        let text = String::from_utf8_lossy(&output.stdout).into_owned()
            + &String::from_utf8_lossy(&output.stderr);
        assert!(text.contains(words), "{arguments:?}: {text}");
    }
}
