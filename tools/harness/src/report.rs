//! Report of checks: results, durations and counts.

use std::time::Instant;

use anyhow::Result;
use serde_json::Value;
use shadowbell_bench::table::{Table, json_line};

/// Checks and measurements of one run.
#[derive(Debug, Default)]
pub struct Report {
    part: String,
    passed: u64,
    failures: Vec<String>,
    skipped: Vec<String>,
    rows: Vec<Value>,
}

impl Report {
    /// Begins a section, for example a suite on one kernel, or a step. Later checks belong to this
    /// section.
    pub fn begin(&mut self, part: &str) {
        println!("== {part}");
        part.clone_into(&mut self.part);
    }

    /// Runs one check. Returns its result, or `None` if it has failed. A failure does not end the
    /// run.
    pub fn check<T>(
        &mut self,
        name: &str,
        check: impl FnOnce(&mut Self) -> Result<T>,
    ) -> Option<T> {
        let began = Instant::now();
        let result = check(self);
        let seconds = began.elapsed().as_secs_f64();
        match result {
            Ok(value) => {
                println!("   ok    {name} ({seconds:.1} s)");
                self.passed += 1;
                Some(value)
            }
            Err(error) => {
                let message = format!("{error:#}");
                println!("   FAIL  {name} ({seconds:.1} s)\n{}", indent(&message));
                let cause = cause(&error);
                self.failures.push(format!("{}: {name}: {cause}", self.part));
                None
            }
        }
    }

    /// Adds counts of another program.
    pub fn add(&mut self, passed: u64, failed: &[String]) {
        self.passed += passed;
        self.failures.extend(failed.iter().map(|name| format!("{}: {name}", self.part)));
    }

    /// Adds tests that were skipped, each with its reason.
    pub fn skip(&mut self, skipped: Vec<String>) {
        self.skipped.extend(skipped);
    }

    /// Adds the counts of another report. Its failures already have the names of their sections.
    pub fn include(&mut self, passed: u64, failures: &[String]) {
        self.passed += passed;
        self.failures.extend_from_slice(failures);
    }

    /// Prints a table, and adds its rows to the JSON output.
    pub fn table(&mut self, table: Table) {
        println!("{table}");
        self.rows.extend(table.json);
    }

    /// Number of failed checks.
    pub fn failed(&self) -> usize {
        self.failures.len()
    }

    /// Prints the skipped tests, the names and root causes of the failed checks, and the counts as
    /// the last line.
    pub fn summary(&self) {
        println!();
        for skipped in &self.skipped {
            println!("skipped: {skipped}");
        }
        for failure in &self.failures {
            println!("failed: {failure}");
        }
        println!("{} passed, {} failed", self.passed, self.failures.len());
    }

    /// Counts for the tests of this package: passed checks, and the names of failed ones.
    #[cfg(test)]
    pub fn results(&self) -> (u64, &[String]) {
        (self.passed, &self.failures)
    }

    /// JSON output: one line.
    pub fn json(&self) -> String {
        json_line(&self.rows)
    }
}

/// First line of the error's root cause, up to 300 characters. The summary of a run repeats it,
/// because the whole message may be far above.
fn cause(error: &anyhow::Error) -> String {
    let cause = error.root_cause().to_string();
    cause.lines().next().unwrap_or_default().chars().take(300).collect()
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("         {line}")).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use anyhow::bail;
    use serde_json::json;

    use super::*;

    #[test]
    fn failures_are_counted_and_the_run_continues() {
        let mut report = Report::default();
        report.begin("part");
        assert_eq!(report.check("good", |_| Ok(3)), Some(3));
        assert_eq!(report.check("bad", |_| -> Result<()> { bail!("why\nmore") }), None);
        report.add(4, &["other".to_owned()]);
        assert_eq!((report.passed, report.failed()), (5, 2));
        assert_eq!(report.failures, ["part: bad: why", "part: other"]);
    }

    #[test]
    fn measurements_are_one_line() {
        let mut report = Report::default();
        let mut table = Table::new("", &["IOPS"]);
        table.push(vec!["1.5".into()], json!({ "table": "S3", "iops": 1.5 }));
        report.table(table);
        assert_eq!(report.json(), r#"{"rows":[{"iops":1.5,"table":"S3"}]}"#);
    }
}
