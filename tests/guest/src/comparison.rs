//! Comparison of a ratio of two speeds with its target. Both contestants are measured once in each
//! of several turns, because the other load of the machine changes over time. The outcome is
//! printed and is never a failure.

/// Maximum quotient of the highest and the lowest speed ratio of all turns. If it is exceeded,
/// other load of the machine has disturbed the measurement.
const SPREAD: f64 = 2.0;

pub(crate) const REACHED: &str = "reached";
pub(crate) const OPEN: &str = "open, the turns differ by more";
pub(crate) const MISSED: &str = "missed";

/// Ratio of two speeds, and the target of the ratio.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Comparison {
    /// Ratio of the median turn.
    pub(crate) ratio: f64,
    /// Lowest ratio of a turn.
    pub(crate) least: f64,
    pub(crate) most: f64,
    pub(crate) wanted: f64,
}

impl Comparison {
    /// Compares two contestants by their speeds in each turn. `wanted` is the target of the ratio.
    pub(crate) fn of(turns: &[f64], of_other: &[f64], wanted: f64) -> Self {
        let ratio = |(a, b): (&f64, &f64)| if *b > 0.0 { a / b } else { 0.0 };
        let mut ratios: Vec<f64> = turns.iter().zip(of_other).map(ratio).collect();
        ratios.sort_by(f64::total_cmp);
        let at = |index: usize| ratios.get(index).copied().unwrap_or_default();
        let last = ratios.len().saturating_sub(1);
        Self { ratio: at(ratios.len() / 2), least: at(0), most: at(last), wanted }
    }

    /// Outcome of the comparison. "Reached": all turns reach the target, or the median turn does
    /// and the turns differ by at most [`SPREAD`]. "Missed": no turn reaches the target. Otherwise
    /// open.
    pub(crate) fn outcome(&self) -> &'static str {
        if self.most < self.wanted {
            MISSED
        } else if self.least >= self.wanted
            || self.ratio >= self.wanted && self.most <= self.least * SPREAD
        {
            REACHED
        } else {
            OPEN
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_are_compared_in_pairs() {
        for (turns, ratio, outcome) in [
            ([110.0, 9.0, 51.0], 1.02, REACHED),
            ([110.0, 9.0, 45.0], 0.9, OPEN),
            ([99.0, 9.0, 40.0], 0.9, MISSED),
            ([50.0, 11.0, 60.0], 1.1, OPEN),
            ([500.0, 11.0, 60.0], 1.2, REACHED),
        ] {
            let comparison = Comparison::of(&turns, &[100.0, 10.0, 50.0], 1.0);
            assert!((comparison.ratio - ratio).abs() < 1e-9, "{comparison:?}");
            assert_eq!(comparison.outcome(), outcome, "{comparison:?}");
            assert!(comparison.least <= comparison.ratio && comparison.ratio <= comparison.most);
        }
        assert_eq!(Comparison::of(&[], &[1.0], 1.0).outcome(), MISSED);
        assert_eq!(Comparison::of(&[1.0], &[0.0], 1.0).outcome(), MISSED);
    }
}
