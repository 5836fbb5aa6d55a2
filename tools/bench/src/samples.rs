//! Statistics of several rounds.

use serde_json::{Map, Value, json};

/// One figure, measured in several rounds.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    pub(crate) fn push(&mut self, value: f64) {
        self.0.push(value);
    }

    /// Number of samples.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Median; 0 if there are no samples.
    pub(crate) fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        let half = sorted.len() / 2;
        let at = |index: usize| sorted.get(index).copied().unwrap_or_default();
        if sorted.len() % 2 == 1 { at(half) } else { (at(half.saturating_sub(1)) + at(half)) / 2.0 }
    }

    pub(crate) fn min(&self) -> f64 {
        self.0.iter().copied().reduce(f64::min).unwrap_or_default()
    }

    pub(crate) fn max(&self) -> f64 {
        self.0.iter().copied().reduce(f64::max).unwrap_or_default()
    }

    /// Minimum, median, maximum.
    pub(crate) fn point(&self) -> [f64; 3] {
        [self.min(), self.median(), self.max()]
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<T: IntoIterator<Item = f64>>(iter: T) -> Self {
        Self(iter.into_iter().collect())
    }
}

/// Fields that are counts, which are summed over the rounds.
const COUNTS: [&str; 6] = [
    "commands",
    "doorbell_mmio_writes",
    "controller_mmio_writes",
    "driver_mmio_writes",
    "samples",
    "seconds",
];

/// Rows of one contestant under one condition, one for each round.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rounds(Vec<Value>);

impl Rounds {
    pub(crate) fn push(&mut self, row: Value) {
        self.0.push(row);
    }

    /// Samples of a field. `latency_ns/p50` is a nested field.
    pub(crate) fn samples(&self, name: &str) -> Samples {
        let path = format!("/{name}");
        self.0.iter().filter_map(|row| row.pointer(&path)?.as_f64()).collect()
    }

    /// True if every round has the field.
    pub(crate) fn has(&self, name: &str) -> bool {
        let path = format!("/{name}");
        !self.0.is_empty()
            && self.0.iter().all(|row| row.pointer(&path).is_some_and(Value::is_number))
    }

    pub(crate) fn median(&self, name: &str) -> f64 {
        self.samples(name).median()
    }

    /// One row of all rounds: medians, sums of counts, minimum and maximum of the IOPS.
    pub(crate) fn row(&self, table: &str) -> Value {
        let all: Vec<&Value> = self.0.iter().collect();
        let mut row = match combine(&all, "") {
            Value::Object(row) => row,
            _ => Map::new(),
        };
        row.insert("table".into(), table.into());
        row.insert("rounds".into(), self.0.len().into());
        if self.has("iops") {
            let iops = self.samples("iops");
            row.insert("iops_min".into(), json!(iops.min()));
            row.insert("iops_max".into(), json!(iops.max()));
        }
        let number = |row: &Map<String, Value>, name: &str| row.get(name).and_then(Value::as_f64);
        if let (Some(writes), Some(commands)) =
            (number(&row, "doorbell_mmio_writes"), number(&row, "commands"))
            && commands > 0.0
        {
            row.insert("mmio_per_io".into(), json!(writes / commands));
        }
        Value::Object(row)
    }
}

fn combine(values: &[&Value], name: &str) -> Value {
    match values.first() {
        Some(Value::Object(first)) => {
            let one = |key: &String| {
                let of_all: Vec<&Value> =
                    values.iter().filter_map(|value| value.get(key)).collect();
                (key.clone(), combine(&of_all, key))
            };
            Value::Object(first.keys().map(one).collect())
        }
        Some(Value::Number(first)) => {
            let numbers: Samples = values.iter().filter_map(|value| value.as_f64()).collect();
            let whole = values.iter().all(|value| value.is_u64());
            if COUNTS.contains(&name) {
                if whole {
                    values.iter().filter_map(|value| value.as_u64()).sum::<u64>().into()
                } else {
                    json!(numbers.0.iter().sum::<f64>())
                }
            } else if values.iter().all(|value| value.as_f64() == first.as_f64()) {
                // Values that are equal in all rounds are copied, because a median would make
                // integers fractions. Most of them are parameters of the measurement.
                Value::Number(first.clone())
            } else {
                json!(numbers.median())
            }
        }
        Some(other) => (*other).clone(),
        None => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        let samples = |values: &[f64]| values.iter().copied().collect::<Samples>();
        assert_eq!(samples(&[3.0, 1.0, 2.0]).point(), [1.0, 2.0, 3.0]);
        assert_eq!(samples(&[4.0, 1.0, 2.0, 3.0]).median(), 2.5);
        assert_eq!(samples(&[7.0]).point(), [7.0; 3]);
        assert_eq!(samples(&[]).point(), [0.0; 3]);
    }

    #[test]
    fn rounds_become_a_row() {
        let mut rounds = Rounds::default();
        for (iops, p50, commands, mmio) in [(10.0, 5, 100, 1), (30.0, 9, 300, 0), (20.0, 7, 200, 2)]
        {
            rounds.push(json!({
                "table": "bench", "device": "shadowbell", "iodepth": 4, "iops": iops,
                "latency_ns": { "p50": p50, "samples": 2 }, "commands": commands,
                "doorbell_mmio_writes": mmio, "mmio_per_io": 0.5, "seconds": 1.5,
            }));
        }
        let want = json!({
            "table": "null", "device": "shadowbell", "iodepth": 4, "iops": 20.0, "iops_min": 10.0,
            "iops_max": 30.0, "latency_ns": { "p50": 7.0, "samples": 6 }, "commands": 600,
            "doorbell_mmio_writes": 3, "mmio_per_io": 0.005, "seconds": 4.5, "rounds": 3,
        });
        assert_eq!(rounds.row("null"), want);
        assert_eq!(rounds.median("latency_ns/p50"), 7.0);
        assert!(rounds.has("iops") && !rounds.has("wire_iops") && !rounds.has("device"));
    }
}
