//! Bounds of the outcome, and the table of rounds.

use std::time::Duration;

use serde_json::json;
use shadowbell_bench::table::Table;

use super::attack::{Attack, Kind};
use super::round::Outcome;

// Bound on the 99th percentile of the victim's latency, for a quiet machine.
const P99: Duration = Duration::from_millis(2);
// Bound on the victim's longest read, of the disk or a register, for a quiet machine.
const LONGEST: Duration = Duration::from_millis(10);
/// Maximum growth of the server's memory and page tables for each hostile controller, in bytes.
const GROWTH: u64 = 64 << 20;
/// Maximum log rate in bytes per second.
const LOG_RATE: u64 = 100 << 10;
// Bound on the duration of an attacker's reset, for a quiet machine.
const RESET: Duration = Duration::from_secs(2);
// Bound on the time from SIGTERM to the server's end, for a quiet machine.
const END: Duration = Duration::from_secs(5);
/// Maximum ratio of the victim's median latency beside honest neighbours to its median alone.
const HONEST: u32 = 3;
/// Medians below this value never fail: the victim's median also depends on the state of the I/O
/// thread, which may sleep or poll.
const HONEST_FLOOR: Duration = Duration::from_micros(30);

/// Strictness of the bounds on times. The bounds on lost reads, on the end of the server, on memory
/// growth and on the log rate are the same in both variants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Strictness {
    /// The bounds, for a measurement on a machine without other load.
    Measured,
    /// [`LENIENT`] times the bounds, and no bound on the median. `cargo xtask test` may run a
    /// program of the dev profile on two busy CPUs. A server that waits for its peers is delayed by
    /// seconds, and exceeds even these bounds. Waits for a CPU are shorter, and do not exceed them.
    Tested,
}

/// Factor of the bounds in [`Strictness::Tested`].
const LENIENT: u32 = 20;

impl Strictness {
    fn times(self) -> u32 {
        if self == Self::Tested { LENIENT } else { 1 }
    }
}

/// True if other load of the machine delayed the victim before the attack, so the round does not
/// count.
pub(crate) fn is_void(outcome: &Outcome, strictness: Strictness) -> bool {
    let times = strictness.times();
    if outcome.hostile.is_some_and(|kind| !kind.is_timed()) {
        return false;
    }
    outcome.baseline.p99 > P99 * times / 2 || outcome.baseline.longest > LONGEST * times / 2
}

/// Bounds that were exceeded.
pub(crate) fn failures(outcome: &Outcome, strictness: Strictness) -> Vec<String> {
    let mut failures = outcome.wrong.clone();
    let times = strictness.times();
    let attacked = &outcome.attacked;
    let mut longer = |what: &str, found: Duration, bound: Duration| {
        let bound = bound * times;
        if found > bound {
            failures.push(format!("{what} is {}, not {}", time(found), time(bound)));
        }
    };
    if outcome.hostile.is_none_or(Kind::is_timed) {
        let (longest, register) = (attacked.served_longest, attacked.served_register);
        longer("the victim's p99, apart from waits for a processor,", attacked.served_p99, P99);
        longer("the victim's longest read, apart from waits for a processor,", longest, LONGEST);
        longer("a register read, apart from waits for a processor,", register, LONGEST);
    }
    longer("the attacker's reset", outcome.reset.unwrap_or_default(), RESET);
    longer("the end after SIGTERM", outcome.end.unwrap_or_default(), END);
    if outcome.hostile == Some(Kind::Honest) && strictness == Strictness::Measured {
        let bound = (outcome.baseline.p50 * HONEST).max(HONEST_FLOOR * HONEST);
        longer("the victim's p50", outcome.attacked.p50, bound);
    }
    if outcome.attacked.lost {
        failures.push("a read of the victim never came back".to_owned());
    } else if outcome.end.is_none() && outcome.wrong.is_empty() {
        failures.push("SIGTERM does not end the server".to_owned());
    }
    let growth = outcome.memory + outcome.page_tables;
    if growth > GROWTH {
        failures.push(format!("the server grew by {} MiB", growth >> 20));
    }
    if let Some(rate) = outcome.log_rate.filter(|rate| *rate > LOG_RATE) {
        failures.push(format!("it logs {} KiB/s", rate >> 10));
    }
    failures
}

/// True if the outcome is within its bounds only because the time is subtracted for which the
/// victim and the server's threads waited for a CPU.
fn waits_for_processors(outcome: &Outcome, strictness: Strictness) -> bool {
    let times = strictness.times();
    let Outcome { attacked, .. } = outcome;
    attacked.p99 > P99 * times || attacked.longest.max(attacked.register) > LONGEST * times
}

/// An empty table of attacks.
pub(crate) fn table() -> Table {
    Table::new(
        "The victim alone and under attack, times in ms",
        &[
            "attack",
            "try",
            "p50 alone",
            "p50",
            "p99 alone",
            "p99",
            "p99 served",
            "longest alone",
            "longest",
            "longest served",
            "register",
            "register served",
            "reads",
            "MiB",
            "page tables",
            "log KiB/s",
            "reset",
            "end",
            "cpu wait",
            "done",
            "refused",
            "verdict",
        ],
    )
}

/// Adds a round to the table.
pub(crate) fn add(
    table: &mut Table,
    attack: &Attack,
    outcome: &Outcome,
    number: u32,
    (failures, strictness): (&[String], Strictness),
) {
    let (baseline, seen) = (&outcome.baseline, &outcome.attacked);
    let millis = |time: Duration| format!("{:.3}", time.as_secs_f64() * 1e3);
    let maybe = |time: Option<Duration>| time.map_or_else(|| "-".to_owned(), millis);
    let mut verdict = if failures.is_empty() { "ok" } else { "FAILS" }.to_owned();
    if waits_for_processors(outcome, strictness) {
        verdict += ", waits for a processor";
    }
    if let Some(why) = &outcome.gave_up {
        verdict += &format!(" (it ended: {why})");
    }
    let cells = vec![
        attack.name.to_owned(),
        number.to_string(),
        millis(baseline.p50),
        millis(seen.p50),
        millis(baseline.p99),
        millis(seen.p99),
        millis(seen.served_p99),
        millis(baseline.longest),
        millis(seen.longest),
        millis(seen.served_longest),
        millis(seen.register),
        millis(seen.served_register),
        seen.reads.to_string(),
        (outcome.memory >> 20).to_string(),
        (outcome.page_tables >> 20).to_string(),
        outcome.log_rate.map_or_else(|| "-".to_owned(), |rate| (rate >> 10).to_string()),
        maybe(outcome.reset),
        maybe(outcome.end),
        millis(outcome.waited),
        outcome.done.to_string(),
        outcome.refused.to_string(),
        verdict,
    ];
    let nanos = |time: Duration| time.as_nanos() as u64;
    table.push(
        cells,
        json!({
            "table": "hostile",
            "attack": attack.name,
            "try": number,
            "alone_p50_ns": nanos(baseline.p50),
            "alone_p99_ns": nanos(baseline.p99),
            "alone_longest_ns": nanos(baseline.longest),
            "p50_ns": nanos(seen.p50),
            "p99_ns": nanos(seen.p99),
            "longest_ns": nanos(seen.longest),
            "served_p99_ns": nanos(seen.served_p99),
            "served_longest_ns": nanos(seen.served_longest),
            "register_longest_ns": nanos(seen.register),
            "served_register_longest_ns": nanos(seen.served_register),
            "reads": seen.reads,
            "memory_growth": outcome.memory,
            "page_table_growth": outcome.page_tables,
            "log_bytes_per_second": outcome.log_rate,
            "reset_ns": outcome.reset.map(nanos),
            "end_ns": outcome.end.map(nanos),
            "cpu_wait_ns": nanos(outcome.waited),
            "done": outcome.done,
            "refused": outcome.refused,
            "failures": failures,
        }),
    );
}

fn time(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    if seconds < 1.0 { format!("{:.2} ms", seconds * 1e3) } else { format!("{seconds:.2} s") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::victim::Seen;

    fn good() -> Outcome {
        let millis = Duration::from_millis;
        let (p50, p99, served_p99) = (millis(1), millis(3), millis(2));
        let seen = Seen { reads: 9, p50, p99, served_p99, ..Seen::default() };
        Outcome {
            attacked: seen,
            memory: GROWTH,
            log_rate: Some(LOG_RATE),
            reset: Some(millis(2000)),
            end: Some(millis(5000)),
            hostile: Some(Kind::Hostile),
            ..Outcome::default()
        }
    }

    #[test]
    fn each_exceeded_bound_is_reported() {
        assert_eq!(failures(&good(), Strictness::Measured), Vec::<String>::new());
        let named = |change: fn(&mut Outcome)| {
            let mut outcome = good();
            change(&mut outcome);
            let failures = failures(&outcome, Strictness::Measured);
            assert_eq!(failures.len(), 1, "{failures:?}");
            failures.concat()
        };
        assert!(named(|o| o.attacked.served_p99 = Duration::from_micros(2001)).contains("p99"));
        assert!(
            named(|o| o.attacked.served_longest = Duration::from_secs(1)).contains("is 1.00 s")
        );
        assert!(
            named(|o| o.attacked.served_register = Duration::from_secs(1)).contains("register")
        );
        assert!(named(|o| o.page_tables = 1 << 20).contains("65 MiB"));
        assert!(named(|o| o.log_rate = Some(29 << 20)).contains("KiB/s"));
        assert!(named(|o| o.reset = Some(Duration::from_secs(3))).contains("reset"));
        assert!(named(|o| o.end = Some(Duration::from_secs(6))).contains("SIGTERM"));
        assert!(named(|o| o.end = None).contains("SIGTERM"));
        assert!(named(|o| o.attacked.lost = true).contains("never came back"));
        assert!(named(|o| o.hostile = Some(Kind::Honest)).contains("p50"));
        let mut counted = good();
        (counted.hostile, counted.attacked.served_p99) = (Some(Kind::CountedExport), P99 * 1000);
        assert_eq!(failures(&counted, Strictness::Measured), Vec::<String>::new());
        counted.attacked.lost = true;
        assert_eq!(failures(&counted, Strictness::Measured).len(), 1);
    }

    #[test]
    fn a_wait_for_a_processor_is_said_and_not_counted() {
        let mut outcome = good();
        (outcome.attacked.p99, outcome.attacked.longest) = (P99 * 10, LONGEST * 10);
        assert_eq!(failures(&outcome, Strictness::Measured), Vec::<String>::new());
        assert!(waits_for_processors(&outcome, Strictness::Measured));
        assert!(!waits_for_processors(&outcome, Strictness::Tested));
    }

    #[test]
    fn test_strictness_relaxes_only_time_limits() {
        let found = |change: fn(&mut Outcome)| {
            let mut outcome = good();
            change(&mut outcome);
            failures(&outcome, Strictness::Tested).len()
        };
        assert_eq!(found(|o| o.attacked.served_p99 = P99 * LENIENT), 0);
        assert_eq!(found(|o| o.attacked.served_longest = LONGEST * LENIENT), 0);
        assert_eq!(found(|o| o.attacked.served_longest = LONGEST * (LENIENT + 1)), 1);
        assert_eq!(found(|o| o.page_tables = 1 << 20), 1);
        assert_eq!(found(|o| o.log_rate = Some(LOG_RATE + 1)), 1);
        assert_eq!(found(|o| o.end = None), 1);
        assert_eq!(found(|o| o.attacked.lost = true), 1);
        assert_eq!(found(|o| o.wrong.push("a lost write".to_owned())), 1);
    }
}
