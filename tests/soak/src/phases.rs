//! Durations of the steps of a server's start, parsed from its debug log.

use std::time::Duration;

use serde_json::json;
use shadowbell_bench::table::Table;

use super::times::{Times, millis};

/// Words before the durations in a log line.
const WORDS: &str = "it took: ";

/// Durations of many starts, in the order of the steps.
#[derive(Debug, Default)]
pub(crate) struct Phases(Vec<(String, Times)>);

impl Phases {
    /// Parses a log.
    pub(crate) fn read(log: &str) -> Self {
        let mut phases = Self::default();
        log.lines().filter_map(|line| line.split_once(WORDS)).for_each(|(_, rest)| {
            for phase in rest.trim_end_matches(" us").split(", ") {
                let Some((name, micros)) = phase.rsplit_once(' ') else { continue };
                if let Ok(micros) = micros.parse() {
                    phases.push(name, Duration::from_micros(micros));
                }
            }
        });
        phases
    }

    fn push(&mut self, name: &str, time: Duration) {
        match self.0.iter_mut().find(|(known, _)| known == name) {
            Some((_, times)) => times.push(time),
            None => {
                let mut times = Times::default();
                times.push(time);
                self.0.push((name.to_owned(), times));
            }
        }
    }

    pub(crate) fn table(&self) -> Table {
        let mut table = Table::new(
            "of which in the new process, ms",
            &["phase", "times", "p50", "p99", "longest"],
        );
        for (name, times) in &self.0 {
            let [p50, p99, longest] = [0.5, 0.99, 1.0].map(|share| millis(times.at(share)));
            let figures = [p50, p99, longest].map(|time| format!("{time:.2}"));
            let cells = [vec![name.clone(), times.count().to_string()], figures.to_vec()].concat();
            let json = json!({
                "table": "soak kill phases", "phase": name, "p50_ms": p50, "p99_ms": p99,
                "longest_ms": longest,
            });
            table.push(cells, json);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_found_in_a_log() {
        let log = "DEBUG it took: configuration 120, control socket 30 us\n\
                   INFO something else, 7 us\n\
                   DEBUG it took: configuration 80, control socket 50 us\n";
        let phases = Phases::read(log);
        let of = |nth: usize| (phases.0[nth].0.as_str(), phases.0[nth].1.at(1.0).as_micros());
        assert_eq!([of(0), of(1)], [("configuration", 120), ("control socket", 50)]);
        assert_eq!(phases.0[0].1.count(), 2);
    }
}
