//! Output formats of the verbs: text and JSON.

use crate::logging::COMMON;
use clap::ValueEnum;
use serde::Serialize;
use std::borrow::Cow;
use std::io::{self, Write};
use std::ops::RangeInclusive;

/// Output options of verbs that support JSON: `--json`, or `--output-format` as in nvme-cli and
/// fio.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct Output {
    /// Output in JSON
    #[arg(long, global = true, conflicts_with = "output_format", help_heading = COMMON)]
    json: bool,
    /// Output format
    #[arg(short, long, global = true, value_enum, value_name = "FORMAT", help_heading = COMMON)]
    output_format: Option<Format>,
}

/// Output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Text
    Normal,
    /// JSON, as with --json
    Json,
}

impl Output {
    /// True for JSON.
    #[must_use]
    pub fn is_json(self) -> bool {
        self.json || self.output_format == Some(Format::Json)
    }
}

/// Output options of `bench`, whose `--output-format json` is the format of fio.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct BenchOutput {
    /// End with one line of JSON: a row with the same names as other measuring verbs use
    #[arg(long, conflicts_with = "output_format")]
    json: bool,
    /// Output format; `json` is the format of fio
    #[arg(short, long, alias = "output_format", value_enum, value_name = "FORMAT")]
    output_format: Option<BenchFormat>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum BenchFormat {
    /// Text
    Normal,
    /// JSON with the names and units of fio
    #[value(alias = "json+")]
    Json,
}

/// Output format of `bench`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Text.
    Normal,
    /// One row of JSON, as for the other measuring verbs.
    Rows,
    /// JSON in the format of fio.
    Fio,
}

impl BenchOutput {
    /// Returns the requested format.
    #[must_use]
    pub fn shape(self) -> Shape {
        match self.output_format {
            Some(BenchFormat::Json) => Shape::Fio,
            _ if self.json => Shape::Rows,
            _ => Shape::Normal,
        }
    }
}

/// Prints an answer as JSON, or as text that `lines` creates.
///
/// # Errors
/// Standard output cannot be written.
pub fn show<T: Serialize>(
    answer: &T,
    json: bool,
    lines: impl FnOnce(&mut dyn Write, &T) -> io::Result<()>,
) -> anyhow::Result<()> {
    let mut text = Vec::new();
    if json {
        serde_json::to_writer_pretty(&mut text, answer).map_err(io::Error::from)?;
        writeln!(text)?;
    } else {
        lines(&mut text, answer)?;
    }
    let mut out = io::stdout().lock();
    out.write_all(without_control(&String::from_utf8_lossy(&text)).as_bytes())?;
    out.flush()?;
    Ok(())
}

/// Unicode's format characters (Cf), and its line and paragraph separators (Zl, Zp). They change
/// the order of the text, or are invisible.
const FORMAT: [RangeInclusive<char>; 21] = [
    '\u{ad}'..='\u{ad}',
    '\u{600}'..='\u{605}',
    '\u{61c}'..='\u{61c}',
    '\u{6dd}'..='\u{6dd}',
    '\u{70f}'..='\u{70f}',
    '\u{890}'..='\u{891}',
    '\u{8e2}'..='\u{8e2}',
    '\u{180e}'..='\u{180e}',
    '\u{200b}'..='\u{200f}',
    '\u{2028}'..='\u{202e}',
    '\u{2060}'..='\u{2064}',
    '\u{2066}'..='\u{206f}',
    '\u{feff}'..='\u{feff}',
    '\u{fff9}'..='\u{fffb}',
    '\u{110bd}'..='\u{110bd}',
    '\u{110cd}'..='\u{110cd}',
    '\u{13430}'..='\u{1343f}',
    '\u{1bca0}'..='\u{1bca3}',
    '\u{1d173}'..='\u{1d17a}',
    '\u{e0001}'..='\u{e0001}',
    '\u{e0020}'..='\u{e007f}',
];

/// Replaces control characters other than line breaks and tabs, and format characters, by JSON
/// escapes. A server, which may be compromised, chooses parts of the text, and a terminal executes
/// escape sequences.
#[must_use]
pub fn without_control(text: &str) -> Cow<'_, str> {
    let is_format = |c: char| FORMAT.iter().any(|range| range.contains(&c));
    let is_escaped = |c: char| (c.is_control() && !matches!(c, '\n' | '\t')) || is_format(c);
    if !text.contains(is_escaped) {
        return text.into();
    }
    let mut plain = String::new();
    for c in text.chars() {
        match is_escaped(c) {
            true => c
                .encode_utf16(&mut [0; 2])
                .iter()
                .for_each(|unit| plain.push_str(&format!("\\u{unit:04x}"))),
            false => plain.push(c),
        }
    }
    plain.into()
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
    fn json_options_of_nvme_cli_are_accepted() {
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
    fn control_characters_are_not_printed() {
        let text = "vm\u{1b}]0;title\u{7}\u{9b}2J\r\u{7f}\tx\u{fc}\n";
        let plain = "vm\\u001b]0;title\\u0007\\u009b2J\\u000d\\u007f\tx\u{fc}\n";
        assert_eq!(without_control(text), plain);
        assert_eq!(without_control("a\u{202e}b\u{2028}\u{200b}"), "a\\u202eb\\u2028\\u200b");
        // The escapes are also valid in strings of JSON.
        let text = "\u{9b}2J\u{1b}\u{2029}\u{e0041}";
        let json = serde_json::to_string(text).unwrap();
        assert!(without_control(&json).is_ascii());
        let back: String = serde_json::from_str(&without_control(&json)).unwrap();
        assert_eq!(back, text);
    }

    #[test]
    fn output_format_json_is_the_format_of_fio() {
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
