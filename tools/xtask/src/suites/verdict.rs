//! What the project promises of a speed, and what was measured: turn by turn, because what else the machine
//! does changes from one to the next. A verdict is told and fails nothing.

/// Turns that differ by more than this factor were measured on a machine that had other things to do.
const WOBBLE: f64 = 2.0;

pub(super) const REACHED: &str = "reached";
pub(super) const OPEN: &str = "open, the turns differ by more";
pub(super) const MISSED: &str = "missed";

/// How many times as much as another something was, and how many it is to be.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Verdict {
    /// Of the turn in the middle.
    pub(super) ratio: f64,
    /// Of the turn in which it was least.
    pub(super) least: f64,
    pub(super) most: f64,
    pub(super) wanted: f64,
}

impl Verdict {
    /// Of figures that were taken in turn.
    pub(super) fn of(turns: &[f64], of_other: &[f64], wanted: f64) -> Self {
        let ratio = |(a, b): (&f64, &f64)| if *b > 0.0 { a / b } else { 0.0 };
        let mut ratios: Vec<f64> = turns.iter().zip(of_other).map(ratio).collect();
        ratios.sort_by(f64::total_cmp);
        let at = |index: usize| ratios.get(index).copied().unwrap_or_default();
        let last = ratios.len().saturating_sub(1);
        Self { ratio: at(ratios.len() / 2), least: at(0), most: at(last), wanted }
    }

    /// Clear if all turns say the same; else by the one in the middle, unless the turns differ so much
    /// that it means nothing.
    pub(super) fn words(&self) -> &'static str {
        if self.most < self.wanted {
            MISSED
        } else if self.least >= self.wanted
            || self.ratio >= self.wanted && self.most <= self.least * WOBBLE
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
    fn verdicts_are_of_pairs_of_turns() {
        for (turns, ratio, words) in [
            ([110.0, 9.0, 51.0], 1.02, REACHED),
            ([110.0, 9.0, 45.0], 0.9, OPEN),
            ([99.0, 9.0, 40.0], 0.9, MISSED),
            ([50.0, 11.0, 60.0], 1.1, OPEN),
            ([500.0, 11.0, 60.0], 1.2, REACHED),
        ] {
            let verdict = Verdict::of(&turns, &[100.0, 10.0, 50.0], 1.0);
            assert!((verdict.ratio - ratio).abs() < 1e-9, "{verdict:?}");
            assert_eq!(verdict.words(), words, "{verdict:?}");
            assert!(verdict.least <= verdict.ratio && verdict.ratio <= verdict.most);
        }
        assert_eq!(Verdict::of(&[], &[1.0], 1.0).words(), MISSED);
        assert_eq!(Verdict::of(&[1.0], &[0.0], 1.0).words(), MISSED);
    }
}
