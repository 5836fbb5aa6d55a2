//! Diagrams, as SVG.

use crate::load::Interval;
use crate::units;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::ops::Range;

/// How large a diagram is, before the page scales it to what there is room for.
const SIZE: (u32, u32) = (640, 300);
/// The colours of a diagram's series, which people who do not see all colours can tell apart.
pub(super) const BLUE: RGBColor = RGBColor(0, 90, 181);
pub(super) const ORANGE: RGBColor = RGBColor(220, 95, 0);
pub(super) const GREEN: RGBColor = RGBColor(0, 130, 90);
const INK: RGBColor = RGBColor(34, 34, 34);
const AXIS: RGBColor = RGBColor(110, 110, 110);
const GRID: RGBColor = RGBColor(225, 225, 225);
/// Bars of a distribution in each power of ten.
const BUCKETS: f64 = 16.0;
/// How far lines of small text are apart.
const LINE: i32 = 17;

/// A diagram is drawn in memory, where nothing fails but the library itself.
type Outcome<T = ()> = anyhow::Result<T>;

/// Powers of ten and what is between them, for times in nanoseconds.
#[derive(Clone)]
struct Decades {
    low: i32,
    high: i32,
}

impl Decades {
    /// The powers of ten around these values.
    fn around(values: impl Iterator<Item = u64>) -> Self {
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

    /// Where a value is, in powers of ten.
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
        // With few powers of ten, twice and five times them as well.
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

/// Draws, and says for those who do not see it what it is.
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

/// The chart builder with the margins of all diagrams.
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

/// Axes and grid of a diagram.
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

/// From 0 to when the last interval ends.
fn time(intervals: &[Interval]) -> Range<f64> {
    let end = intervals.last().map_or(1.0, |last| last.start + last.seconds);
    0.0..end.max(0.001)
}

fn seconds(value: &f64) -> String {
    // A diagram of a second or two has labels of tenths.
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// A line over time.
pub(super) struct Line<'a> {
    pub(super) color: RGBColor,
    /// For each interval.
    pub(super) value: &'a dyn Fn(&Interval) -> Option<f64>,
}

impl Line<'_> {
    /// A value holds from the beginning of its interval to that of the next one: those of several
    /// queues are not quite the same.
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

/// Lines over time, from 0 up.
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

/// Latencies over time, in powers of ten.
pub(super) fn latency_lines(
    label: &str,
    intervals: &[Interval],
    lines: &[Line<'_>],
) -> Outcome<String> {
    svg(label, |area| {
        let steps = || lines.iter().map(|line| line.steps(intervals));
        let values = steps().flatten().map(|(_, value)| value as u64);
        let mut chart = chart!(area, time(intervals), Decades::around(values));
        mesh!(chart, "seconds", "latency", x_label_formatter(&seconds), y_labels(8));
        for (line, steps) in lines.iter().zip(steps()) {
            let places = steps.into_iter().map(|(at, value)| (at, Decades::place(value as u64)));
            chart.draw_series(LineSeries::new(places, line.color.stroke_width(2)))?;
        }
        Ok(())
    })
}

/// In which bar of a distribution a latency is.
fn bucket(value: u64) -> i32 {
    (Decades::place(value) * BUCKETS).floor() as i32
}

/// How much of all that was counted is in each bar.
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

/// The distribution of latencies over time: the darker, the more of an interval's I/Os.
pub(super) fn heat(label: &str, intervals: &[Interval]) -> Outcome<String> {
    svg(label, |area| {
        let values = all_latencies(intervals).map(|(value, _)| *value);
        let mut chart = chart!(area, time(intervals), Decades::around(values));
        mesh!(chart, "seconds", "latency", x_label_formatter(&seconds), y_labels(8));
        for interval in intervals {
            let (from, to) = (interval.start, interval.start + interval.seconds);
            for (bucket, share) in shares(interval.latencies.iter()) {
                let (low, high) = edges(bucket);
                // A root, so that few are seen too.
                let color = BLUE.mix(0.12 + 0.88 * share.powf(0.4));
                let cell = Rectangle::new([(from, low), (to, high)], color.filled());
                chart.draw_series(std::iter::once(cell))?;
            }
        }
        Ok(())
    })
}

/// The distribution of latencies over the whole run.
pub(super) fn distribution(label: &str, intervals: &[Interval]) -> Outcome<String> {
    svg(label, |area| {
        let values = all_latencies(intervals).map(|(value, _)| *value);
        let shares = shares(all_latencies(intervals));
        let top = shares.iter().map(|(_, share)| *share).fold(0.0, f64::max).max(0.01) * 110.0;
        let mut chart = chart!(area, Decades::around(values), 0.0..top);
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

/// Bars beside each other.
pub(super) struct Group {
    /// Lines of text below them.
    pub(super) name: Vec<String>,
    /// A bar for each series.
    pub(super) values: Vec<f64>,
}

/// Groups of bars, with their values above them.
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
        // Where there are many, their values are in the table.
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
                    // Beside another one at the same height there is no room.
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
