//! `shadowbell verify` in the guest.

use anyhow::{Context, Result};
use serde_json::Value;
use shadowbell_guest::Guest;
use shadowbell_testing::wait::LIMIT;

/// Number at a JSON pointer of a row. If it is missing, the error shows the row.
pub(crate) fn number(row: &Value, pointer: &str) -> Result<u64> {
    row.pointer(pointer).and_then(Value::as_u64).with_context(|| format!("{pointer}: {row}"))
}

/// Last row that `shadowbell verify` prints, after a success or a failure, and the exit status.
pub(crate) fn verify(guest: &mut Guest, arguments: &str) -> Result<(Value, i32)> {
    let output = guest.run(&format!("shadowbell verify {arguments} --json --force"), LIMIT)?;
    let line = output.text.lines().rev().find(|line| line.starts_with('{'));
    let line = line.with_context(|| format!("no JSON: {:.2000}", output.text))?;
    let mut json: Value = serde_json::from_str(line)?;
    Ok((json["rows"][0].take(), output.code))
}
