//! `get-feature`: prints the values of features.

use super::fields::{Fields, kelvins, show_json};
use super::subject::attach;
use anyhow::anyhow;
use clap::ValueEnum;
use serde_json::{Map, Value, json};
use shadowbell_config::target::{self, Target};
use shadowbell_driver::{Admin, CommandError};
use shadowbell_process::exit;
use shadowbell_process::output::Output;
use shadowbell_spec::feature::{self, Capabilities, Select, fid};
use std::io::{self, Write};
use std::process::ExitCode;

/// Show the value of one feature, or of all supported features
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct FeatureArgs {
    /// Controller or namespace to query
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// Feature identifier: 0x06 or 6 [default: all]
    #[arg(short, long, value_parser = parse_number::<u8>, value_name = "FID")]
    pub feature_id: Option<u8>,
    /// Value to show
    #[arg(short, long, value_enum, default_value_t = SelectArg::Current)]
    pub sel: SelectArg,
    /// Command Dword 11, for features that use it (vector of 09h, sensor of 04h)
    #[arg(long, value_parser = parse_number::<u32>, default_value = "0", value_name = "VALUE")]
    pub cdw11: u32,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Select field of Get Features.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SelectArg {
    /// Current value
    #[value(alias = "0")]
    Current,
    /// Default value
    #[value(alias = "1")]
    Default,
    /// Saved value, which is current after a reset
    #[value(alias = "2")]
    Saved,
    /// Supported capabilities of the feature
    #[value(alias = "3")]
    Supported,
}

impl From<SelectArg> for Select {
    fn from(which: SelectArg) -> Self {
        match which {
            SelectArg::Current => Self::Current,
            SelectArg::Default => Self::Default,
            SelectArg::Saved => Self::Saved,
            SelectArg::Supported => Self::SupportedCapabilities,
        }
    }
}

fn parse_number<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    let number = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    let number = number.map_err(|_| format!("`{text}` is no number; write for example 0x06"))?;
    T::try_from(number).map_err(|_| format!("{text} is too large"))
}

/// Value of a feature.
struct FeatureValue {
    fid: u8,
    value: u32,
    data: Vec<u8>,
}

/// Runs the verb.
///
/// # Errors
/// Errors of the driver. If all features were requested, unsupported ones are skipped.
pub fn get_feature(args: &FeatureArgs) -> anyhow::Result<ExitCode> {
    let session = attach(&args.target)?;
    let admin = session.controller.admin();
    let mut got = Vec::new();
    match args.feature_id {
        Some(fid) => got.push(get(&admin, fid, args).map_err(|error| explain(fid, error))?),
        None => {
            for fid in (0..=u8::MAX).filter(|fid| fid::name(*fid).is_some()) {
                match get(&admin, fid, args) {
                    Ok(feature) => got.push(feature),
                    // Unsupported features are skipped.
                    Err(error) if error.status().is_some() => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
    }
    session.detach()?;
    if args.output.is_json() {
        let features = got.iter().map(|feature| Value::Object(to_json(feature, args.sel)));
        let features = Value::Array(features.collect());
        show_json(Map::from_iter([("features".to_owned(), features)]))?;
    } else {
        let mut out = io::stdout().lock();
        for feature in &got {
            print(&mut out, feature, args.sel)?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn explain(fid: u8, error: CommandError) -> anyhow::Error {
    let refused = error.status().is_some();
    let name = fid::name(fid).unwrap_or("not in the specification");
    let error = anyhow!("feature {fid:#04x} ({name}): {error}");
    if refused { exit::bad_input(error) } else { error }
}

/// Length in bytes of the data buffer of a feature, besides the dword in the completion.
fn data_len(fid: u8) -> usize {
    match fid {
        fid::LBA_RANGE_TYPE => 4096,
        fid::AUTONOMOUS_POWER_STATE => 256,
        fid::TIMESTAMP => 8,
        fid::HOST_BEHAVIOR_SUPPORT => 512,
        // Extended format (128 bits). A controller with the 64-bit format fills the first 8 bytes.
        fid::HOST_IDENTIFIER => 16,
        _ => 0,
    }
}

fn get(admin: &Admin, fid: u8, args: &FeatureArgs) -> Result<FeatureValue, CommandError> {
    let (nsid, select) = (args.target.nsid(), args.sel.into());
    let len = if select == Select::SupportedCapabilities { 0 } else { data_len(fid) };
    let request = |nsid| {
        if len == 0 && args.cdw11 == 0 {
            return Ok((admin.get_feature(fid, nsid, select)?, Vec::new()));
        }
        admin.get_feature_data(fid, nsid, select, args.cdw11, len)
    };
    // A feature is namespace-specific or of the whole controller, and some controllers reject the
    // wrong NSID. So a refused request is repeated without NSID.
    let (value, data) = match request(nsid) {
        Err(error) if error.status().is_some() => request(0).map_err(|_| error)?,
        other => other?,
    };
    Ok(FeatureValue { fid, value, data })
}

fn select_name(which: SelectArg) -> &'static str {
    match which {
        SelectArg::Current => "current value",
        SelectArg::Default => "default value",
        SelectArg::Saved => "saved value",
        SelectArg::Supported => "capabilities",
    }
}

fn print(out: &mut impl Write, feature: &FeatureValue, which: SelectArg) -> io::Result<()> {
    let FeatureValue { fid, value, data } = feature;
    let name = fid::name(*fid).unwrap_or("vendor specific");
    writeln!(out, "get-feature: {fid:#04x} ({name}), {}: {value:#010x}", select_name(which))?;
    for line in decode(feature, which).to_string().lines() {
        writeln!(out, "    {line}")?;
    }
    let end = data.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    for (n, line) in data.get(..end).unwrap_or_default().chunks(16).enumerate() {
        let bytes: Vec<_> = line.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(out, "    {:04x}: {}", n * 16, bytes.join(" "))?;
    }
    Ok(())
}

fn to_json(feature: &FeatureValue, which: SelectArg) -> Map<String, Value> {
    let mut object = decode(feature, which).to_json();
    object.insert("feature_id".to_owned(), json!(feature.fid));
    object.insert("name".to_owned(), json!(fid::name(feature.fid)));
    object.insert("select".to_owned(), json!(select_name(which)));
    object.insert("value".to_owned(), json!(feature.value));
    if !feature.data.is_empty() {
        object.insert("data".to_owned(), json!(feature.data));
    }
    object
}

/// Decodes the bit fields of a value.
fn decode(feature: &FeatureValue, which: SelectArg) -> Fields {
    let mut f = Fields::default();
    let FeatureValue { fid, value, data } = feature;
    let value = *value;
    if which == SelectArg::Supported {
        let may = Capabilities::from_bits(value);
        f.flag("changeable", may.changeable()).flag("saveable", may.saveable());
        f.flag("namespace_specific", may.namespace_specific());
        return f;
    }
    match *fid {
        fid::ARBITRATION => {
            let v = feature::Arbitration::from_bits(value);
            f.number("hpw", v.hpw()).number("mpw", v.mpw()).number("lpw", v.lpw());
            f.number("ab", v.ab());
        }
        fid::POWER_MANAGEMENT => {
            let v = feature::PowerManagement::from_bits(value);
            f.number("wh", v.wh()).number("ps", v.ps());
        }
        fid::TEMPERATURE_THRESHOLD => {
            let v = feature::TemperatureThreshold::from_bits(value);
            f.number("tmpth", v.tmpth()).meaning(kelvins(v.tmpth()));
            f.number("tmpsel", v.tmpsel()).number("thsel", v.thsel());
        }
        fid::ERROR_RECOVERY => {
            let v = feature::ErrorRecovery::from_bits(value);
            f.number("tler", v.tler()).meaning("units of 100 ms");
            f.flag("dulbe", v.dulbe());
        }
        fid::VOLATILE_WRITE_CACHE => {
            f.flag("wce", feature::VolatileWriteCache::from_bits(value).wce());
        }
        fid::NUMBER_OF_QUEUES => {
            let v = feature::NumberOfQueues::from_bits(value);
            // NCQA and NSQA are 0's based.
            f.number("ncq", u32::from(v.ncq()) + 1).number("nsq", u32::from(v.nsq()) + 1);
        }
        fid::INTERRUPT_COALESCING => {
            let v = feature::InterruptCoalescing::from_bits(value);
            f.number("time", u32::from(v.time()) * 100).meaning("microseconds");
            f.number("thr", u32::from(v.thr()) + 1).meaning("completions");
        }
        fid::INTERRUPT_VECTOR_CONFIGURATION => {
            let v = feature::InterruptVectorConfiguration::from_bits(value);
            f.number("iv", v.iv()).flag("cd", v.cd());
        }
        fid::WRITE_ATOMICITY => {
            f.flag("dn", feature::WriteAtomicity::from_bits(value).dn());
        }
        fid::ASYNC_EVENT_CONFIGURATION => {
            let v = feature::AsyncEventConfig::from_bits(value);
            f.bits("smart", v.smart()).flag("nan", v.nan()).flag("fan", v.fan());
        }
        fid::TIMESTAMP => {
            if let Some(bytes) = data.first_chunk() {
                let v = feature::Timestamp::from_bits(u64::from_le_bytes(*bytes));
                f.number("timestamp", v.millis()).meaning("milliseconds");
                f.number("origin", v.origin()).flag("synch", v.synch());
            }
        }
        _ => {}
    }
    f
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_may_be_hexadecimal() {
        assert_eq!(parse_number::<u8>("0x0b"), Ok(11));
        assert_eq!(parse_number::<u8>("11"), Ok(11));
        for text in ["0x100", "256", "-1", "x", "", "0x"] {
            assert!(parse_number::<u8>(text).is_err(), "{text}");
        }
    }

    #[test]
    fn values_are_explained() {
        let got = |fid, value| FeatureValue { fid, value, data: Vec::new() };
        let json = to_json(&got(fid::NUMBER_OF_QUEUES, 0x003f_003f), SelectArg::Current);
        assert_eq!(
            (&json["ncq"], &json["nsq"], &json["feature_id"]),
            (&64.into(), &64.into(), &7.into())
        );
        let mut text = Vec::new();
        print(&mut text, &got(fid::VOLATILE_WRITE_CACHE, 1), SelectArg::Current).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(
            text.starts_with(
                "get-feature: 0x06 (Volatile Write Cache), current value: 0x00000001\n"
            ),
            "{text}"
        );
        assert!(text.contains("wce : true"), "{text}");
        let timestamp =
            FeatureValue { fid: fid::TIMESTAMP, value: 0, data: 5u64.to_le_bytes().to_vec() };
        let json = to_json(&timestamp, SelectArg::Current);
        assert_eq!(json["timestamp"], 5);
        assert_eq!(json["data"][0], 5);
        let json = to_json(&got(fid::VOLATILE_WRITE_CACHE, 4), SelectArg::Supported);
        assert_eq!((&json["changeable"], &json["saveable"]), (&true.into(), &false.into()));
    }

    #[test]
    fn every_feature_prints_whatever_its_value() {
        for fid in 0..=255 {
            for which in [SelectArg::Current, SelectArg::Supported] {
                let feature =
                    FeatureValue { fid, value: u32::MAX, data: vec![0xff; data_len(fid)] };
                print(&mut Vec::new(), &feature, which).unwrap();
            }
        }
    }
}
