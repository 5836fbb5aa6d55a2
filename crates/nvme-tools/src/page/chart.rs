//! SVG diagrams.

use crate::load::Interval;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use shadowbell_process::units;
use std::ops::Range;

/// Size of a diagram in pixels, before the page scales it.
const SIZE: (u32, u32) = (640, 300);
/// Colours of the series, distinguishable with colour blindness.
pub(super) const BLUE: RGBColor = RGBColor(0, 90, 181);
pub(super) const ORANGE: RGBColor = RGBColor(220, 95, 0);
pub(super) const GREEN: RGBColor = RGBColor(0, 130, 90);
const INK: RGBColor = RGBColor(34, 34, 34);
const AXIS: RGBColor = RGBColor(110, 110, 110);
const GRID: RGBColor = RGBColor(225, 225, 225);
/// Number of bars per power of ten in the diagram of a distribution.
const BUCKETS: f64 = 16.0;
/// Line height of small text, in pixels.
const LINE: i32 = 17;

/// Result of drawing. The backend writes to memory, so only the library itself can fail.
type Outcome<T = ()> = anyhow::Result<T>;

/// Logarithmic axis for times in nanoseconds.
#[derive(Clone)]
struct Decades {
    low: i32,
    high: i32,
}

impl Decades {
    /// Smallest range of whole powers of ten that contains `values`.
    fn covering(values: impl Iterator<Item = u64>) -> Self {
        let (mut least, mut most) = (u64::MAX, 0);
        for value in values.filter(|value| *value != 0) {
            (least, most) = (least.min(value), most.max(value));
        }
        if most == 0 {
            return Self { low: 3, high: 6 };
        }
        let low = (least as f64).log10().floor() as i32;
        Self { low, high: ((most as f64).log10().ceil() as i32).max(low + 1) }
    }

    /// Position of a value on the axis, in powers of ten.
    fn place(value: u64) -> f64 {
        (value.max(1) as f64).log10()
    }
}

impl Ranged for Decades {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        let part = (value - f64::from(self.low)) / f64::from(self.high - self.low);
        limit.0 + (f64::from(limit.1 - limit.0) * part.clamp(0.0, 1.0)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        let tens = (self.low..=self.high).map(f64::from);
        if hint.weight().allow_light_points() || self.high - self.low > 3 {
            return tens.collect();
        }
        // An axis of few powers of ten also has ticks at 2 and 5 times each power.
        let between = |ten: f64| [ten, ten + 2f64.log10(), ten + 5f64.log10()];
        tens.flat_map(between).filter(|place| *place <= f64::from(self.high)).collect()
    }

    fn range(&self) -> Range<f64> {
        f64::from(self.low)..f64::from(self.high)
    }
}

impl plotters::coord::ranged1d::ValueFormatter<f64> for Decades {
    fn format_ext(&self, value: &f64) -> String {
        units::nanoseconds(10f64.powf(*value).round())
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

/// Draws a diagram as SVG. `label` describes it for screen readers.
fn svg(label: &str, draw: impl FnOnce(&Area<'_>) -> Outcome) -> Outcome<String> {
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        area.fill(&WHITE)?;
        draw(&area)?;
        area.present()?;
    }
    let label = super::html::escape(label);
    Ok(text.replacen("<svg ", &format!("<svg role=\"img\" aria-label=\"{label}\" "), 1))
}

fn text(size: u32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&INK)
}

/// Builds a chart with the margins that all diagrams share.
macro_rules! chart {
    ($area:expr, $x:expr, $y:expr) => {
        ChartBuilder::on($area)
            .margin_top(12)
            .margin_right(24)
            .margin_left(8)
            .x_label_area_size(46)
            .y_label_area_size(78)
            .build_cartesian_2d($x, $y)?
    };
}

/// Draws axes and grid of a diagram.
macro_rules! mesh {
    ($chart:expr, $x:expr, $y:expr $(, $more:ident($($arg:expr),*))*) => {
        $chart
            .configure_mesh()
            .x_desc($x)
            .y_desc($y)
            .label_style(text(14))
            .axis_desc_style(text(15))
            .axis_style(AXIS)
            .bold_line_style(GRID)
            .light_line_style(TRANSPARENT)
            $(.$more($($arg),*))*
            .draw()?
    };
}

/// Range of the time axis: 0 to the end of the last interval.
fn time(intervals: &[Interval]) -> Range<f64> {
    let end = intervals.last().map_or(1.0, |last| last.start + last.seconds);
    0.0..end.max(0.001)
}

fn seconds(value: &f64) -> String {
    // Two decimals, for diagrams of only a second or two.
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Line of a diagram over time.
pub(super) struct Line<'a> {
    pub(super) color: RGBColor,
    /// Value of an interval; `None` leaves a gap.
    pub(super) value: &'a dyn Fn(&Interval) -> Option<f64>,
}

impl Line<'_> {
    /// Corner points of the line as steps. The queues' intervals differ slightly in length, so a
    /// value is drawn until the next interval begins.
    fn steps(&self, intervals: &[Interval]) -> Vec<(f64, f64)> {
        let starts = intervals.iter().skip(1).map(|next| next.start);
        let ends = starts.chain(intervals.last().map(|last| last.start + last.seconds));
        let both = |(interval, end): (&Interval, f64)| {
            let value = (self.value)(interval)?;
            Some([(interval.start, value), (end, value)])
        };
        intervals.iter().zip(ends).filter_map(both).flatten().collect()
    }
}

/// Draws lines over time, on a linear axis from 0.
pub(super) fn lines(
    label: &str,
    intervals: &[Interval],
    unit: &str,
    lines: &[Line<'_>],
) -> Outcome<String> {
    svg(label, |area| {
        let values = lines.iter().flat_map(|line| line.steps(intervals));
        let top = values.map(|(_, value)| value).fold(0.0, f64::max);
        let top = if top > 0.0 { top * 1.1 } else { 1.0 };
        let mut chart = chart!(area, time(intervals), 0.0..top);
        mesh!(
            chart,
            "seconds",
            unit,
            x_label_formatter(&seconds),
            y_label_formatter(&|value| units::count(*value)),
            y_labels(6)
        );
        for line in lines {
            let steps = line.steps(intervals);
            chart.draw_series(AreaSeries::new(steps.clone(), 0.0, line.color.mix(0.12)))?;
            chart.draw_series(LineSeries::new(steps, line.color.stroke_width(2)))?;
        }
        Ok(())
    })
}

/// Draws latencies over time, on a logarithmic axis.
pub(super) fn latency_lines(
    label: &str,
    intervals: &[Interval],
    lines: &[Line<'_>],
) -> Outcome<String> {
    svg(label, |area| {
        let steps = || lines.iter().map(|line| line.steps(intervals));
        let values = steps().flatten().map(|(_, value)| value as u64);
        let mut chart = chart!(area, time(intervals), Decades::covering(values));
        mesh!(chart, "seconds", "latency", x_label_formatter(&seconds), y_labels(8));
        for (line, steps) in lines.iter().zip(steps()) {
            let places = steps.into_iter().map(|(at, value)| (at, Decades::place(value as u64)));
            chart.draw_series(LineSeries::new(places, line.color.stroke_width(2)))?;
        }
        Ok(())
    })
}

/// Index of the bar of a distribution that counts a latency.
fn bucket(value: u64) -> i32 {
    (Decades::place(value) * BUCKETS).floor() as i32
}

/// Fraction of all samples in each bar.
fn shares<'a>(latencies: impl Iterator<Item = &'a (u64, u64)>) -> Vec<(i32, f64)> {
    let (mut all, mut counts) = (0, std::collections::BTreeMap::new());
    for (value, count) in latencies {
        *counts.entry(bucket(*value)).or_insert(0) += count;
        all += count;
    }
    counts.into_iter().map(|(bucket, count)| (bucket, count as f64 / all as f64)).collect()
}

fn edges(bucket: i32) -> (f64, f64) {
    (f64::from(bucket) / BUCKETS, f64::from(bucket + 1) / BUCKETS)
}

fn all_latencies(intervals: &[Interval]) -> impl Iterator<Item = &(u64, u64)> {
    intervals.iter().flat_map(|interval| &interval.latencies)
}

/// Draws a heat map of latencies over time: darker cells have a larger share of their interval.
pub(super) fn heat(label: &str, intervals: &[Interval]) -> Outcome<String> {
    svg(label, |area| {
        let values = all_latencies(intervals).map(|(value, _)| *value);
        let mut chart = chart!(area, time(intervals), Decades::covering(values));
        mesh!(chart, "seconds", "latency", x_label_formatter(&seconds), y_labels(8));
        for interval in intervals {
            let (from, to) = (interval.start, interval.start + interval.seconds);
            for (bucket, share) in shares(interval.latencies.iter()) {
                let (low, high) = edges(bucket);
                // The exponent below 1 keeps cells with few samples visible.
                let color = BLUE.mix(0.12 + 0.88 * share.powf(0.4));
                let cell = Rectangle::new([(from, low), (to, high)], color.filled());
                chart.draw_series(std::iter::once(cell))?;
            }
        }
        Ok(())
    })
}

/// Draws the distribution of latencies over the whole run.
pub(super) fn distribution(label: &str, intervals: &[Interval]) -> Outcome<String> {
    svg(label, |area| {
        let values = all_latencies(intervals).map(|(value, _)| *value);
        let shares = shares(all_latencies(intervals));
        let top = shares.iter().map(|(_, share)| *share).fold(0.0, f64::max).max(0.01) * 110.0;
        let mut chart = chart!(area, Decades::covering(values), 0.0..top);
        mesh!(
            chart,
            "latency",
            "% of I/Os",
            x_labels(10),
            y_labels(6),
            y_label_formatter(&seconds)
        );
        let bars = shares.iter().map(|(bucket, share)| {
            let (low, high) = edges(*bucket);
            Rectangle::new([(low, 0.0), (high, share * 100.0)], BLUE.mix(0.75).filled())
        });
        chart.draw_series(bars)?;
        Ok(())
    })
}

/// Group of adjacent bars.
pub(super) struct Group {
    /// Lines of text below the group.
    pub(super) name: Vec<String>,
    /// Value of each bar, one per series.
    pub(super) values: Vec<f64>,
}

/// Draws groups of bars with their values above them.
pub(super) fn bars(
    label: &str,
    (what, unit): (&str, &str),
    colors: &[RGBColor],
    groups: &[Group],
    format: &dyn Fn(f64) -> String,
) -> Outcome<String> {
    svg(label, |area| {
        let values = groups.iter().flat_map(|group| &group.values).copied();
        let top = values.fold(0.0, f64::max);
        let top = if top > 0.0 { top * 1.2 } else { 1.0 };
        let mut chart = chart!(area, 0.0..groups.len() as f64, 0.0..top);
        mesh!(
            chart,
            what,
            unit,
            disable_x_mesh(),
            x_labels(0),
            y_labels(6),
            y_label_formatter(&|value| format(*value))
        );
        let (middle, below) =
            (Pos::new(HPos::Center, VPos::Bottom), Pos::new(HPos::Center, VPos::Top));
        // Many bars leave no room for labels; the table of the page has their values.
        let labelled = groups.len() * colors.len() <= 16;
        for (n, group) in groups.iter().enumerate() {
            let width = 0.8 / colors.len() as f64;
            let mut last = None;
            for (m, (value, color)) in group.values.iter().zip(colors).enumerate() {
                let left = n as f64 + 0.1 + m as f64 * width;
                let corners = [(left, 0.0), (left + width * 0.94, *value)];
                let bar = Rectangle::new(corners, color.mix(0.85).filled());
                chart.draw_series(std::iter::once(bar))?;
                if labelled {
                    let (x, y) = chart.backend_coord(&(left + width * 0.47, *value));
                    // A label moves up if it would overlap the label of the bar before.
                    let free = |y: &i32| last.is_none_or(|last: i32| (y - last).abs() >= LINE);
                    let y = (0..).map(|n| y - 3 - n).find(free).unwrap_or(y);
                    last = Some(y);
                    area.draw(&Text::new(format(*value), (x, y), text(12).pos(middle)))?;
                }
            }
            let every = groups.len().div_ceil(16);
            for (line, name) in group.name.iter().enumerate().filter(|_| n.is_multiple_of(every)) {
                let (x, y) = chart.backend_coord(&(n as f64 + 0.5, 0.0));
                let at = (x, y + 6 + 17 * line as i32);
                area.draw(&Text::new(name.clone(), at, text(13).pos(below)))?;
            }
        }
        Ok(())
    })
}
