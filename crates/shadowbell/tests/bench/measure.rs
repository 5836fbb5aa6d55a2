//! Integration tests of `bench`.

use crate::harness::{Server, json, line, output, stderr_of_failure};
use serde_json::Value;
use shadowbell_testing::process_group::ProcessGroup;

fn row(report: &Value) -> &Value {
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 1);
    &rows[0]
}

#[test]
fn a_row_has_the_agreed_names_and_adds_up() {
    let report = json(&mut line(
        "bench local:mem:16MiB --rw randread --bs 4k --iodepth 8 --numjobs 2 --number-ios 2000 --json",
    ));
    let row = row(&report);
    for (name, value) in [
        ("table", "bench"),
        ("device", "shadowbell"),
        ("doorbells", "shadow"),
        ("completion", "poll"),
        ("rw", "randread"),
    ] {
        assert_eq!(row[name], value, "{name}");
    }
    for (name, value) in
        [("bs", 4096), ("iodepth", 8), ("numjobs", 2), ("threads", 2), ("commands", 4000)]
    {
        assert_eq!(row[name], value, "{name}");
    }
    for name in [
        "iops",
        "bandwidth_bytes",
        "doorbell_mmio_writes",
        "mmio_per_io",
        "interrupts_per_io",
        "cpu_ns_per_io",
        "seconds",
    ] {
        assert!(row[name].is_number(), "{name}: {row}");
    }
    let latency = &row["latency_ns"];
    let [p50, p99, p999] = ["p50", "p99", "p999"].map(|name| latency[name].as_u64().unwrap());
    assert!(0 < p50 && p50 <= p99 && p99 <= p999, "{latency}");
    assert!(latency["mean"].as_f64().unwrap() > 0.0);
    // With `--number-ios` there is no warm-up to choose a sampling interval, so every I/O is
    // measured.
    assert_eq!(latency["samples"], 4000);
    let number = |name: &str| row[name].as_f64().unwrap();
    assert!((number("iops") * 4096.0 - number("bandwidth_bytes")).abs() < 1.0);
    assert!((number("mmio_per_io") * 4000.0 - number("doorbell_mmio_writes")).abs() < 1e-6);
    assert!(row.get("syscalls_per_io").is_none(), "what was not counted is not there");
}

#[test]
fn every_io_writes_mmio_without_shadow_doorbells() {
    let report = json(&mut line(
        "bench local:null:1TiB --iodepth 4 --doorbells mmio --number-ios 1000 --json",
    ));
    let row = row(&report);
    assert_eq!(row["doorbells"], "mmio");
    // One tail write for each I/O, and some writes of the completion queue head.
    let writes = row["doorbell_mmio_writes"].as_u64().unwrap();
    assert!((1000..1500).contains(&writes), "{writes}");
    let report = json(&mut line(
        "bench local:null:1TiB --iodepth 32 --iodepth_batch 0 --doorbells mmio --number-ios 1000 --json",
    ));
    let batched = report["rows"][0]["doorbell_mmio_writes"].as_u64().unwrap();
    assert!(batched < writes, "{batched} for batches, {writes} for one at a time");
}

#[test]
fn every_combination_of_doorbells_and_completion_mode_works() {
    for doorbells in ["auto", "shadow", "mmio", "mapped"] {
        for completion in ["poll", "interrupt", "adaptive"] {
            let report = json(&mut line(&format!(
                "bench null:1GiB --doorbells {doorbells} --completion {completion} --rw rw \
                 --iodepth 4 --number-ios 300 --json",
            )));
            let row = row(&report);
            assert_eq!(row["commands"], 300, "{doorbells} {completion}");
            assert_eq!(row["completion"], completion);
            if doorbells != "auto" {
                assert_eq!(row["doorbells"], doorbells);
            }
        }
    }
}

#[test]
fn one_thread_can_drive_several_jobs() {
    let report = json(&mut line(
        "bench null:1GiB --numjobs 4 --threads 1 --iodepth 16 --number-ios 500 --json",
    ));
    let row = row(&report);
    assert_eq!((&row["numjobs"], &row["threads"]), (&4.into(), &1.into()));
    assert_eq!(row["commands"], 2000);
}

#[test]
fn a_run_ends_after_its_runtime() {
    let report =
        json(&mut line("bench mem:1MiB --runtime 50ms --ramp_time 10ms --iodepth 2 --json"));
    let row = row(&report);
    assert!(row["commands"].as_u64().unwrap() > 0);
    assert!(row["seconds"].as_f64().unwrap() > 0.0);
}

#[test]
fn bench_prints_a_text_report() {
    let text = output(&mut line("bench mem:1MiB --rw write --number-ios 10 --iodepth 2"));
    for words in ["write of 4096 bytes", "IOPS=", "latency: mean", "doorbell MMIO writes"] {
        assert!(text.contains(words), "{text}");
    }
}

#[test]
fn bench_verifies_data_in_every_mix() {
    for rw in ["write", "randwrite", "rw", "randrw"] {
        let report = json(&mut line(&format!(
            "bench mem:4MiB --rw {rw} --bs 8k --iodepth 16 --numjobs 2 --number-ios 700 --verify \
             crc32c --json",
        )));
        let row = row(&report);
        assert!(row["verified_blocks"].as_u64().unwrap() > 100, "{rw}: {row}");
        assert_eq!(row["verify_errors"], 0, "{rw}");
    }
}

#[test]
fn bench_data_on_a_served_disk_is_verified_by_a_second_run() {
    let server = Server::start(&["mem:4MiB", "null:1GiB"]);
    let mem = server.target(1);
    let common = "--bs 4k --iodepth 8 --verify on --number-ios 1024 --json";
    let report = json(&mut line(&format!("bench {mem} --rw write {common}")));
    let written = row(&report);
    assert_eq!((&written["verified_blocks"], &written["verify_errors"]), (&1024.into(), &0.into()));
    assert_eq!(written["doorbells"], "shadow");
    // A second session reads the data that the first one wrote.
    let report = json(&mut line(&format!("bench {mem} --rw randread {common}")));
    let read = row(&report);
    assert_eq!((&read["verified_blocks"], &read["verify_errors"]), (&1024.into(), &0.into()));
    // With another seed the pattern does not match.
    let text = stderr_of_failure(&mut line(&format!("bench {mem} --rw read --seed 9 {common}")), 1);
    assert!(text.contains("another --seed"), "{text}");

    let mut null = line(&format!(
        "bench {} --doorbells mmio --completion interrupt --number-ios 200 --iodepth 1 --json",
        server.target(2)
    ));
    let report = json(&mut null);
    let null = row(&report);
    assert_eq!((&null["commands"], &null["doorbells"]), (&200.into(), &"mmio".into()));
}

#[test]
fn invalid_bench_arguments_are_refused_with_the_reason() {
    for (arguments, words) in [
        ("bench nvme://ffff:ff:1f.7/1", "no PCI device ffff:ff:1f.7"),
        ("bench vfio-user:/nowhere/vm0.sock", "/nowhere/vm0.sock"),
        ("bench missing.img", "missing.img"),
        ("bench qcow3:x", "no kind of disk called"),
        ("bench mem:1MiB --bs 1000", "multiple of the block size"),
        ("bench mem:1MiB --bs 2m --number-ios 1", "no room"),
        ("bench mem:64MiB --bs 32m --number-ios 1", "exceeds the maximum transfer size"),
        ("bench mem:1MiB --offset 2m", "past the end"),
        ("bench mem:1MiB --size 2m", "past the end"),
        ("bench mem:1MiB?read-only=on --rw write", "read-only"),
        ("bench mem:16KiB --verify on --rw write", "--verify"),
        ("bench null:1TiB --numjobs 100", "queue pairs"),
        ("bench null:1TiB --iodepth 5000", "--iodepth"),
        ("bench null:1TiB --iodepth 0", "--iodepth"),
        ("bench null:1TiB --rw trim", "trim"),
        ("bench null:1TiB --pin 4000 --number-ios 1", "processor 4000"),
    ] {
        let text = stderr_of_failure(&mut line(arguments), 2);
        assert!(text.contains(words), "{arguments}: {text}");
    }
    let server = Server::start(&["mem:1MiB"]);
    let text =
        stderr_of_failure(&mut line(&format!("bench {} --number-ios 1", server.target(7))), 2);
    assert!(text.contains("no namespace 7"), "{text}");
}

#[test]
fn a_server_that_dies_ends_the_run_with_an_error() {
    let server = Server::start(&["mem:1MiB"]);
    let bench = format!("bench {} --runtime 1h", server.target(1));
    std::thread::scope(|scope| {
        let bench = scope.spawn(|| stderr_of_failure(&mut line(&bench), 1));
        server.wait_for_log("shadow doorbells");
        drop(server);
        let text = bench.join().unwrap();
        assert!(text.contains("vm0.sock"), "{text}");
    });
}

#[test]
fn an_interrupted_run_reports_its_partial_result() {
    let server = Server::start(&["mem:1MiB"]);
    let mut bench = std::process::Command::new(env!("CARGO_BIN_EXE_shadowbell"));
    bench.args(["bench", &server.target(1), "--runtime", "1h", "--json"]);
    let bench = ProcessGroup::spawn(bench.stdout(std::process::Stdio::piped())).unwrap();
    server.wait_for_log("shadow doorbells");
    // The program has installed its signal handlers, because it does so before it attaches.
    bench.signal(rustix::process::Signal::INT);
    let output = bench.output();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let report: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(row(&report)["table"], "bench");
}

#[test]
fn a_paced_load_keeps_to_its_rate() {
    for completion in ["poll", "interrupt", "adaptive"] {
        let report = json(&mut line(&format!(
            "bench null:1GiB --rate_iops 2000 --iodepth 8 --number-ios 400 --completion {completion} \
             --json",
        )));
        let row = row(&report);
        assert_eq!((&row["commands"], &row["rate_iops"]), (&400.into(), &2000.into()));
        // All I/Os are timed from their due time. The last one is due after 399 intervals; an
        // unpaced load would end within a few milliseconds.
        assert_eq!(row["latency_ns"]["samples"], 400, "{completion}");
        assert!(row["seconds"].as_f64().unwrap() >= 399.0 / 2000.0, "{completion}: {row}");
    }
}

#[test]
fn latency_of_an_overdue_load_counts_from_the_due_time() {
    // At a billion I/Os per second all are due at once, so each waits for those before it: the
    // median waits for ten thousand I/Os of at least 10 ns each. A latency measured from submission
    // would cover only the 32 in flight.
    let report =
        json(&mut line("bench null:1GiB --rate-iops 1000000000 --number-ios 20000 --json"));
    let p50 = row(&report)["latency_ns"]["p50"].as_u64().unwrap();
    assert!(p50 >= 10_000 * 10, "{p50}");
}

#[test]
fn the_servers_cpu_time_is_reported() {
    let server = Server::start(&["null:1GiB", "--poll", "always"]);
    let command =
        format!("bench {} --runtime 300ms --json --server-pid {}", server.target(1), server.id());
    let report = json(&mut line(&command));
    let row = row(&report);
    let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name}: {row}"));
    assert!(number("controller_cpu_percent") > 1.0 && number("controller_cpu_ns_per_io") > 1.0);
    let share = number("cpu_ns_per_io") * number("iops") / 1e7;
    assert!((share - number("cpu_percent")).abs() < 1.0, "{share}: {row}");
    let text =
        stderr_of_failure(&mut line("bench null:1GiB --number-ios 1 --server-pid 4000000000"), 2);
    assert!(text.contains("4000000000"), "{text}");
}

#[test]
fn attach_many_attaches_and_loads_several_controllers() {
    let servers = [Server::start(&["null:1GiB"]), Server::start(&["mem:1MiB"])];
    let [first, second] = servers.each_ref().map(|server| server.target(1));
    // Standard input is empty, so the program ends with the load.
    let text = output(&mut line(&format!(
        "attach-many {first} {second} --queues 3 --rate-iops 100 --ios 20"
    )));
    let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let [attached, loaded] = lines.as_slice() else { panic!("{text}") };
    assert_eq!((&attached["attached"], &attached["queue_pairs"]), (&2.into(), &6.into()));
    assert_eq!(attached["attach_ns"]["samples"], 2);
    assert_eq!((&loaded["commands"], &loaded["latency_ns"]["samples"]), (&20.into(), &20.into()));
    assert!(loaded["seconds"].as_f64().unwrap() >= 19.0 / 200.0);
    let text = stderr_of_failure(&mut line(&format!("attach-many {first} --queues 200")), 1);
    assert!(text.contains("queue pairs"), "{text}");
}
