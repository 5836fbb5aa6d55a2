//! Recovery through VFIO: the driver takes every recovery step, and no data are lost.

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use shadowbell_guest::{Guest, Kernel, RunDir};

use super::controllers::Which;
use super::verify::{number, verify};
use shadowbell_bench::table::Table;
use shadowbell_harness::Report;
use shadowbell_testing::wait::LIMIT;

/// Names of all faults of I/O commands, as they are in the server's log. Each of these faults must
/// have been injected at least once.
const INJECTED: [&str; 14] = [
    "Fatal",
    "SubsystemReset",
    "WrongPhase",
    "Hang",
    "DropBefore",
    "DropAfter",
    "Stall",
    "Delay",
    "Duplicate",
    "Corrupt",
    "WrongCid",
    "WrongHead",
    "WrongSqId",
    "Status",
];

/// Options of the load, and its time limits, which suit an emulated guest on a busy machine.
const LOAD: &str = "--iodepth 128 --numjobs 2 --size 32m --max-bs 32k";
const IMPATIENT: &str = "--timeout 240ms --admin-timeout 1 --repeats 40 --retries 200";
/// Minimum number of times that the driver must take each recovery step, except aborts.
const MIN_STEPS: u64 = 3;

pub(crate) fn run(report: &mut Report, guest: &mut Guest, kernel: Kernel) {
    let mut rows = Vec::new();
    for which in [Which::Qemu, Which::Shadowbell] {
        report.check(
            &format!("{}: all commands at once, every byte verified", which.name()),
            |_| {
                let command = format!("{} {LOAD} --runtime 4", which.target());
                let (row, code) = verify(guest, &command)?;
                rows.push((which, row.clone()));
                check_row(&row, code)?;
                ensure!(number(&row, "/recovery/late")? == 0, "no command was recovered: {row}");
                Ok(())
            },
        );
    }
    report.check(
        "hundreds of faults, every recovery step: no lost, repeated or stale write",
        |_| {
            let command = format!("{} {LOAD} {IMPATIENT} --runtime 14", Which::Faulty.target());
            let (row, code) = verify(guest, &command)?;
            rows.push((Which::Faulty, row.clone()));
            check_row(&row, code)?;
            for step in ["late", "aborts", "queues_recreated", "queues_restored", "resets", "fatal"]
            {
                let count = number(&row, &format!("/recovery/{step}"))?;
                ensure!(count >= MIN_STEPS, "{step}: {count}: {row}");
            }
            ensure!(
                number(&row, "/recovery/repeated")? > 0,
                "no command was submitted again: {row}"
            );
            ensure!(number(&row, "/recovery/failed")? == 0, "the controller was given up: {row}");
            // The faults include duplicate completions and completions without a command, which the
            // driver counts as unknown.
            ensure!(number(&row, "/unknown_completions")? > 0, "{row}");
            Ok(())
        },
    );
    report.check(
        "a removed controller ends all commands immediately, with an error message",
        |_| {
            let command = format!("shadowbell verify --force {} {LOAD}", Which::Removed.target());
            let output = guest.run(&command, LIMIT)?;
            ensure!(output.code == 1, "it ended with {}: {}", output.code, output.text);
            ensure!(output.text.contains("all ones"), "{}", output.text);
            ensure!(!output.text.contains("panicked"), "{}", output.text);
            ensure!(output.text.contains("removed 1"), "{}", output.text);
            Ok(())
        },
    );
    report.table(table(rows, kernel));
}

/// Checks the row of a run in which the driver has recovered: no error, and no wrong data.
fn check_row(row: &Value, code: i32) -> Result<()> {
    ensure!(code == 0, "it ended with {code}: {row}");
    ensure!(number(row, "/verify_errors")? == 0 && number(row, "/failed")? == 0, "{row}");
    ensure!(number(row, "/verified_blocks")? > 10_000, "{row}");
    for kind in ["read", "write", "flush", "write-zeroes", "compare"] {
        ensure!(number(row, &format!("/by_kind/{kind}"))? > 0, "no {kind}: {row}");
    }
    Ok(())
}

/// Checks that every fault was injected.
pub(crate) fn injected(run: &RunDir) -> Result<()> {
    let path = run.file(&format!("serve-{}.log", Which::Faulty.name()));
    let log = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    let count = |fault: &str| {
        log.lines().find_map(|line| {
            let (before, after) = line.split_once(" times ")?;
            after.starts_with(fault).then(|| before.rsplit(' ').next()?.parse::<u64>().ok())?
        })
    };
    let mut counted = Vec::new();
    for fault in INJECTED {
        let count = count(fault).with_context(|| format!("nothing about {fault}: {log:.4000}"))?;
        counted.push(format!("{fault} {count}"));
        ensure!(count > 0, "there was no {fault}: {}", counted.join(", "));
    }
    println!("         {}", counted.join(", "));
    Ok(())
}

fn table(rows: Vec<(Which, Value)>, kernel: Kernel) -> Table {
    const STEPS: [&str; 6] =
        ["late", "aborts", "queues_recreated", "resets", "repeated", "queues_restored"];
    let head = [
        "controller",
        "commands",
        "blocks checked",
        "bad",
        "late",
        "aborts",
        "queues recreated",
        "resets",
        "repeated",
        "queues restored",
    ];
    let mut table = Table::new("", &head);
    for (which, mut row) in rows {
        let cell =
            |pointer: String| row.pointer(&pointer).map_or_else(String::new, Value::to_string);
        let mut cells = vec![which.name().to_owned()];
        cells.extend(
            ["commands", "verified_blocks", "verify_errors"].map(|n| cell(format!("/{n}"))),
        );
        cells.extend(STEPS.map(|step| cell(format!("/recovery/{step}"))));
        row["table"] = "recover".into();
        row["controller"] = which.name().into();
        row["kernel"] = kernel.to_string().into();
        table.push(cells, row);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_run_with_errors_fails() {
        let row = |errors: u64, failed: u64| {
            let by_kind =
                json!({"read": 9, "write": 9, "flush": 9, "write-zeroes": 9, "compare": 9});
            json!({"verify_errors": errors, "failed": failed, "verified_blocks": 20_000,
                   "by_kind": by_kind})
        };
        assert!(check_row(&row(0, 0), 0).is_ok());
        for (row, code) in [(row(1, 0), 0), (row(0, 1), 0), (row(0, 0), 1), (json!({}), 0)] {
            assert!(check_row(&row, code).is_err(), "{row}");
        }
    }
}
