//! Fields of NVMe data structures, under the names of nvme-cli, as text and JSON; options of the
//! verbs that query one target.

use serde_json::{Map, Value, json};
use shadowbell_config::target::{self, Target};
use shadowbell_process::output::Output;
use std::fmt::{self, Write as _};
use std::io::{self, Write};

/// Value of a field and its format in text. A number of more than 64 bits is a string in JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
enum FieldValue {
    Text(String),
    Decimal(u128),
    Hexadecimal(u128),
    Flag(bool),
    /// Array, for JSON only; the text has [`Line`](Self::Line)s instead.
    List(Vec<Value>),
    /// Element of an array, for text only.
    Line(String),
}

/// Named values, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Fields {
    list: Vec<(String, FieldValue, String)>,
}

impl Fields {
    fn add(&mut self, name: impl Into<String>, value: FieldValue) -> &mut Self {
        self.list.push((name.into(), value, String::new()));
        self
    }

    /// Adds a text field.
    pub(super) fn text(&mut self, name: impl Into<String>, value: impl fmt::Display) -> &mut Self {
        self.add(name, FieldValue::Text(value.to_string()))
    }

    /// Adds a number, decimal in text.
    pub(super) fn number(&mut self, name: impl Into<String>, value: impl Into<u128>) -> &mut Self {
        self.add(name, FieldValue::Decimal(value.into()))
    }

    /// Adds bits or an identifier, hexadecimal in text.
    pub(super) fn bits(&mut self, name: impl Into<String>, value: impl Into<u128>) -> &mut Self {
        self.add(name, FieldValue::Hexadecimal(value.into()))
    }

    /// Adds a flag.
    pub(super) fn flag(&mut self, name: impl Into<String>, value: bool) -> &mut Self {
        self.add(name, FieldValue::Flag(value))
    }

    /// Adds an identifier of several bytes as hexadecimal digits.
    pub(super) fn bytes(&mut self, name: impl Into<String>, value: &[u8]) -> &mut Self {
        let text = value.iter().fold(String::new(), |mut text, byte| {
            // Writing to a string does not fail.
            let _ = write!(text, "{byte:02x}");
            text
        });
        self.text(name, text)
    }

    /// Adds an array, for JSON only.
    pub(super) fn list(&mut self, name: impl Into<String>, values: Vec<Value>) -> &mut Self {
        self.add(name, FieldValue::List(values))
    }

    /// Adds an element of an array, for text only.
    pub(super) fn line(&mut self, name: impl Into<String>, value: impl fmt::Display) -> &mut Self {
        self.add(name, FieldValue::Line(value.to_string()))
    }

    /// Adds an explanation to the field that was added last, for text only.
    pub(super) fn meaning(&mut self, meaning: impl fmt::Display) -> &mut Self {
        if let Some((.., note)) = self.list.last_mut() {
            *note = meaning.to_string();
        }
        self
    }

    /// JSON object with all fields except the text-only ones.
    pub(super) fn to_json(&self) -> Map<String, Value> {
        let value = |shown: &FieldValue| match shown {
            FieldValue::Text(text) => Some(json!(text)),
            FieldValue::Flag(flag) => Some(json!(flag)),
            FieldValue::Decimal(n) | FieldValue::Hexadecimal(n) => Some(match u64::try_from(*n) {
                Ok(n) => json!(n),
                // JSON readers do not keep numbers beyond 64 bits exactly.
                Err(_) => json!(n.to_string()),
            }),
            FieldValue::List(values) => Some(json!(values)),
            FieldValue::Line(_) => None,
        };
        let values = self.list.iter().map(|(name, shown, _)| Some((name.clone(), value(shown)?)));
        values.flatten().collect()
    }
}

impl fmt::Display for Fields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let for_people =
            || self.list.iter().filter(|(_, shown, _)| !matches!(shown, FieldValue::List(_)));
        let width = for_people().map(|(name, ..)| name.len()).max().unwrap_or(0);
        for (name, shown, meaning) in for_people() {
            write!(f, "{name:width$} : ")?;
            match shown {
                FieldValue::Text(text) | FieldValue::Line(text) => f.write_str(text)?,
                FieldValue::List(_) => {}
                FieldValue::Flag(flag) => write!(f, "{flag}")?,
                FieldValue::Decimal(n) => write!(f, "{n}")?,
                FieldValue::Hexadecimal(0) => f.write_str("0")?,
                FieldValue::Hexadecimal(n) => write!(f, "{n:#x}")?,
            }
            if !meaning.is_empty() {
                write!(f, " ({meaning})")?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

/// Explanation of a temperature in kelvins.
pub(super) fn kelvins(value: u16) -> String {
    if value == 0 {
        "not reported".to_owned()
    } else {
        format!("{} degrees Celsius", i32::from(value) - 273)
    }
}

/// Options of the verbs that query one target.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct Args {
    /// Controller or namespace to query
    #[arg(value_name = "TARGET")]
    pub target: Target,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Prints fields: below a heading, or as one line of JSON.
pub(super) fn show(heading: &str, fields: &Fields, json: bool) -> io::Result<()> {
    if json { show_json(fields.to_json()) } else { write!(io::stdout(), "{heading}\n{fields}") }
}

pub(super) fn show_json(object: Map<String, Value>) -> io::Result<()> {
    writeln!(io::stdout(), "{}", Value::Object(object))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_json_have_the_same_fields() {
        let mut fields = Fields::default();
        fields.bits("vid", 0x5342u16).number("mdts", 8u8).meaning("1 MiB").text("sn", "A B");
        fields.bytes("eui64", &[0, 0xab]).number("tnvmcap", u128::MAX).bits("cmic", 0u8);
        fields.flag("wce", true);
        fields.list("states", vec![json!({ "power": 5 })]).line("state 0", "5 W");
        let text = fields.to_string();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "vid     : 0x5342");
        assert_eq!(lines[1], "mdts    : 8 (1 MiB)");
        assert_eq!(lines[2], "sn      : A B");
        assert_eq!(lines[3], "eui64   : 00ab");
        assert_eq!(lines[5], "cmic    : 0");
        assert_eq!(lines[6], "wce     : true");
        assert_eq!(&lines[7..], ["state 0 : 5 W"]);
        let json = Value::Object(fields.to_json());
        assert_eq!(json["vid"], 0x5342);
        assert_eq!(json["mdts"], 8);
        assert_eq!(json["sn"], "A B");
        assert_eq!(json["wce"], true);
        assert_eq!((&json["states"][0]["power"], json.get("state 0")), (&json!(5), None));
        assert_eq!(json["tnvmcap"], u128::MAX.to_string());
    }
}
