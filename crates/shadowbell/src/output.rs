//! How a verb says what it found: to people, or to machines.

use crate::logging::COMMON;
use clap::ValueEnum;
use serde::Serialize;
use std::io::{self, Write};

/// The options of all verbs that have JSON: `--json`, and nvme-cli's and fio's name for it.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Output {
    /// JSON, for machines
    #[arg(long, global = true, conflicts_with = "output_format", help_heading = COMMON)]
    json: bool,
    /// How to say it
    #[arg(short, long, global = true, value_enum, value_name = "FORMAT", help_heading = COMMON)]
    output_format: Option<Format>,
}

/// For whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people
    Normal,
    /// For machines, as --json
    Json,
}

impl Output {
    /// Whether machines read it.
    #[must_use]
    pub fn is_json(self) -> bool {
        self.json || self.output_format == Some(Format::Json)
    }
}

/// The options of `bench`, where fio's option asks for what fio would print.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct BenchOutput {
    /// End with one line of JSON, for machines: a row of figures, under the names of other verbs'
    #[arg(long, conflicts_with = "output_format")]
    json: bool,
    /// How to say it: `json` has the names and units of fio's JSON
    #[arg(short, long, alias = "output_format", value_enum, value_name = "FORMAT")]
    output_format: Option<BenchFormat>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum BenchFormat {
    /// For people
    Normal,
    /// For machines that read fio's
    #[value(alias = "json+")]
    Json,
}

/// What `bench` prints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Sentences.
    Normal,
    /// A row, as the other measuring verbs.
    Rows,
    /// fio's.
    Fio,
}

impl BenchOutput {
    /// What was asked for.
    #[must_use]
    pub fn shape(self) -> Shape {
        match self.output_format {
            Some(BenchFormat::Json) => Shape::Fio,
            _ if self.json => Shape::Rows,
            _ => Shape::Normal,
        }
    }
}

/// Shows an answer: as JSON, or in lines.
///
/// # Errors
/// Standard output's.
pub(crate) fn show<T: Serialize>(
    answer: &T,
    json: bool,
    lines: impl FnOnce(&mut dyn Write, &T) -> io::Result<()>,
) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    if json {
        serde_json::to_writer_pretty(&mut out, answer).map_err(io::Error::from)?;
        writeln!(out)?;
    } else {
        lines(&mut out, answer)?;
    }
    out.flush()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        output: Output,
    }

    #[derive(Debug, Parser)]
    struct BenchLine {
        #[command(flatten)]
        output: BenchOutput,
    }

    #[test]
    fn json_has_the_names_of_other_programs_too() {
        let is_json = |words: &str| {
            let line = Line::try_parse_from(words.split_whitespace());
            line.map(|line| line.output.is_json()).map_err(|error| error.to_string())
        };
        for words in ["x --json", "x -o json", "x -ojson", "x --output-format=json"] {
            assert_eq!(is_json(words), Ok(true), "{words}");
        }
        for words in ["x", "x -o normal", "x --output-format normal"] {
            assert_eq!(is_json(words), Ok(false), "{words}");
        }
        assert!(is_json("x -o binary").unwrap_err().contains("normal, json"));
        assert!(is_json("x --json -o normal").is_err());
    }

    #[test]
    fn fios_option_asks_for_what_fio_prints() {
        let shape = |words: &str| {
            BenchLine::try_parse_from(words.split_whitespace()).unwrap().output.shape()
        };
        assert_eq!(shape("bench"), Shape::Normal);
        assert_eq!(shape("bench --json"), Shape::Rows);
        for words in ["bench --output-format=json", "bench -o json", "bench --output_format json+"]
        {
            assert_eq!(shape(words), Shape::Fio, "{words}");
        }
        assert_eq!(shape("bench -o normal"), Shape::Normal);
    }
}
