//! nvme-cli in the guest.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use shadowbell_guest::Guest;
use shadowbell_testing::wait::LIMIT;

/// Runs `nvme ARGUMENTS`. Returns its output.
pub(crate) fn nvme(guest: &mut Guest, arguments: &str) -> Result<String> {
    guest.sh(&format!("nvme {arguments}"), LIMIT)
}

/// Runs `nvme ARGUMENTS -o json`. Returns the parsed output.
pub(crate) fn json(guest: &mut Guest, arguments: &str) -> Result<Value> {
    let text = nvme(guest, &format!("{arguments} -o json"))?;
    let start = text.find(['{', '[']).with_context(|| format!("no JSON: {text}"))?;
    serde_json::from_str(text.get(start..).unwrap_or_default())
        .with_context(|| format!("nvme {arguments}: {text}"))
}

/// Number in nvme-cli's output.
pub(crate) fn number(json: &Value, name: &str) -> Result<u64> {
    json.get(name).and_then(Value::as_u64).with_context(|| format!("no {name}"))
}

/// Text in nvme-cli's JSON output, without the blanks that fill it up. Fails if it is empty.
pub(crate) fn text(json: &Value, name: &str) -> Result<String> {
    let text = json.get(name).and_then(Value::as_str).unwrap_or_default().trim();
    if text.is_empty() {
        bail!("{name} is empty");
    }
    Ok(text.to_owned())
}

/// Checks that the controller refuses a command with one of `statuses`. A status contains the
/// status code type and the status code.
pub(crate) fn refused(guest: &mut Guest, arguments: &str, statuses: &[u16]) -> Result<()> {
    let output = guest.run(&format!("nvme {arguments}"), LIMIT)?;
    if output.code == 0 {
        bail!("nvme {arguments} was executed: {}", output.text);
    }
    match status(&output.text) {
        Some(status) if statuses.contains(&status) => Ok(()),
        Some(status) => bail!("nvme {arguments}: status {status:#05x}, not {statuses:#05x?}"),
        None => bail!("nvme {arguments}: no status in: {}", output.text),
    }
}

/// Parses the status in `NVMe status: Invalid Field in Command: ...(0x4002)`.
fn status(text: &str) -> Option<u16> {
    let (_, rest) = text.split_once("NVMe status: ")?;
    let (_, digits) = rest.lines().next()?.rsplit_once("(0x")?;
    let number = u16::from_str_radix(digits.trim_end().strip_suffix(')')?, 16).ok()?;
    // The higher bits contain Do Not Retry, More and the retry delay.
    Some(number & 0x7ff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_is_parsed_without_its_flags() {
        let text = "warning\nNVMe status: LBA Out of Range: The (first) command(0x4080)\n";
        assert_eq!(status(text), Some(0x080));
        assert_eq!(status("NVMe status: Compare Failure(0x285)"), Some(0x285));
        assert_eq!(status("read: Success"), None);
        assert_eq!(status("NVMe status: nothing"), None);
    }

    #[test]
    fn padded_texts_are_trimmed_and_empty_ones_refused() {
        let json = serde_json::json!({ "sn": "abc   ", "mn": "   " });
        assert_eq!(text(&json, "sn").unwrap(), "abc");
        assert!(text(&json, "mn").is_err() && text(&json, "fr").is_err());
    }
}
