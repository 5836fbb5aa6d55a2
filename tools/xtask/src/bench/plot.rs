//! A table as a picture: `target/bench/NAME.svg`.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::prelude::*;

/// Lines over a row of conditions.
#[derive(Debug, Clone, Default)]
pub(super) struct Plot {
    /// Of the file, without `.svg`.
    pub(super) name: String,
    pub(super) title: String,
    /// What the conditions are.
    pub(super) x: String,
    /// What was measured, with its unit.
    pub(super) y: String,
    /// The conditions, in their order.
    pub(super) ticks: Vec<String>,
    pub(super) lines: Vec<Line>,
}

/// One contestant.
#[derive(Debug, Clone, Default)]
pub(super) struct Line {
    pub(super) name: String,
    /// Least, median and most, by condition; `None` where nothing was measured.
    pub(super) points: Vec<Option<[f64; 3]>>,
}

const SIZE: (u32, u32) = (900, 520);

/// Draws it.
pub(super) fn draw(plot: &Plot, path: &Path) -> Result<()> {
    let svg = render(plot)?;
    std::fs::write(path, svg).map_err(|error| anyhow!("{}: {error}", path.display()))
}

fn render(plot: &Plot) -> Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(failed)?;
        let points = || plot.lines.iter().flat_map(|line| &line.points).flatten();
        let top = points().map(|point| point[2]).fold(0.0, f64::max);
        let top = if top > 0.0 { top * 1.1 } else { 1.0 };
        let right = plot.ticks.len().max(1) as f64 - 0.5;
        let mut chart = ChartBuilder::on(&root)
            .caption(&plot.title, ("sans-serif", 20))
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(84)
            .build_cartesian_2d(-0.5..right, 0.0..top)
            .map_err(failed)?;
        let tick = |x: &f64| {
            let nearest = x.round();
            let is_one = (x - nearest).abs() < 1e-6 && nearest >= 0.0;
            plot.ticks.get(nearest as usize).filter(|_| is_one).cloned().unwrap_or_default()
        };
        chart
            .configure_mesh()
            .disable_x_mesh()
            .x_labels(plot.ticks.len() * 2 + 1)
            .x_label_formatter(&tick)
            .y_label_formatter(&|y| short(*y))
            .x_desc(&plot.x)
            .y_desc(&plot.y)
            .label_style(("sans-serif", 14))
            .draw()
            .map_err(failed)?;
        for (index, line) in plot.lines.iter().enumerate() {
            let color = Palette99::pick(index).to_rgba();
            let at = || {
                line.points
                    .iter()
                    .enumerate()
                    .filter_map(|(x, point)| point.map(|point| (x as f64, point)))
            };
            chart
                .draw_series(LineSeries::new(
                    at().map(|(x, [_, median, _])| (x, median)),
                    color.stroke_width(2),
                ))
                .map_err(failed)?
                .label(&line.name)
                .legend(move |(x, y)| {
                    PathElement::new([(x, y), (x + 20, y)], color.stroke_width(3))
                });
            // From the least to the most of the rounds.
            let spans = at().map(|(x, [least, _, most])| {
                PathElement::new([(x, least), (x, most)], color.stroke_width(1))
            });
            chart.draw_series(spans).map_err(failed)?;
            let dots = at().map(|(x, [_, median, _])| Circle::new((x, median), 4, color.filled()));
            chart.draw_series(dots).map_err(failed)?;
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.85))
            .border_style(BLACK.mix(0.3))
            .label_font(("sans-serif", 14))
            .draw()
            .map_err(failed)?;
        root.present().map_err(failed)?;
    }
    Ok(svg)
}

/// Errors of the drawing library borrow what they are about.
fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("drawing: {error}")
}

/// A number for an axis: `1.5 M`.
fn short(value: f64) -> String {
    let units = [(1e9, " G"), (1e6, " M"), (1e3, " K")];
    for (unit, name) in units {
        if value.abs() >= unit {
            let text = format!("{:.2}", value / unit);
            return text.trim_end_matches('0').trim_end_matches('.').to_owned() + name;
        }
    }
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plot_shows_what_it_is_of() {
        let line = |name: &str, points| Line { name: name.to_owned(), points };
        let plot = Plot {
            name: "null".into(),
            title: "Null disk & all".into(),
            x: "iodepth".into(),
            y: "IOPS".into(),
            ticks: vec!["1".into(), "32".into()],
            lines: vec![
                line("the wire", vec![Some([2e6, 2.5e6, 3e6]), Some([1e7; 3])]),
                line("ours", vec![Some([1e6; 3]), None]),
            ],
        };
        let svg = render(&plot).unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        for words in ["Null disk &amp; all", "iodepth", "IOPS", "the wire", "ours", "32", " M"] {
            assert!(svg.contains(words), "{words}: {svg}");
        }
        // A dot for each point that was measured.
        assert_eq!(svg.matches("<circle").count(), 3);
    }

    #[test]
    fn nothing_measured_is_an_empty_plot() {
        assert!(render(&Plot::default()).unwrap().contains("</svg>"));
    }

    #[test]
    fn numbers_on_an_axis_are_short() {
        for (value, text) in [(0.0, "0"), (2.5, "2.5"), (1500.0, "1.5 K"), (2e7, "20 M")] {
            assert_eq!(short(value), text);
        }
    }
}
