//! `list`: the namespaces of controllers, a line each.

use super::query::attach;
use crate::session::Session;
use crate::table::Table;
use crate::target::{self, Target};
use serde_json::{Map, Value, json};
use shadowbell_driver::Namespace;
use std::io::{self, Write};
use std::process::ExitCode;

/// List the namespaces of controllers
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub(crate) struct ListArgs {
    /// The controllers
    #[arg(value_name = "TARGET", required = true)]
    pub targets: Vec<Target>,
    /// One line of JSON, for machines
    #[arg(long)]
    pub json: bool,
}

/// Runs the verb.
///
/// # Errors
/// The first controller that can not be attached.
pub(crate) fn list(args: &ListArgs) -> anyhow::Result<ExitCode> {
    let mut devices = Vec::new();
    let mut table =
        Table::new(["Target", "Serial", "Model", "Namespace", "Usage", "Format", "Firmware"]);
    for target in &args.targets {
        let session = attach(target)?;
        for namespace in session.controller.namespaces() {
            devices.push(Value::Object(describe(&session, namespace)));
            table.line(line(&session, namespace));
        }
        session.detach()?;
    }
    let mut out = io::stdout().lock();
    if args.json {
        writeln!(out, "{}", json!({ "Devices": devices }))?;
    } else {
        write!(out, "{table}")?;
    }
    Ok(ExitCode::SUCCESS)
}

fn used(namespace: &Namespace) -> u64 {
    namespace.identity().nuse.saturating_mul(namespace.block_size().into())
}

fn describe(session: &Session, namespace: &Namespace) -> Map<String, Value> {
    let identity = session.controller.identity();
    let object = json!({
        "Target": session.target().with_nsid(namespace.nsid()).to_string(),
        "NameSpace": namespace.nsid(),
        "SerialNumber": identity.serial().to_string(),
        "ModelNumber": identity.model().to_string(),
        "Firmware": identity.firmware().to_string(),
        "UsedBytes": used(namespace),
        "PhysicalSize": namespace.bytes(),
        "MaximumLBA": namespace.blocks(),
        "SectorSize": namespace.block_size(),
    });
    match object {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

fn line(session: &Session, namespace: &Namespace) -> [String; 7] {
    let identity = session.controller.identity();
    [
        session.target().with_nsid(namespace.nsid()).to_string(),
        identity.serial().to_string(),
        identity.model().to_string(),
        namespace.nsid().to_string(),
        format!("{} / {}", decimal(used(namespace)), decimal(namespace.bytes())),
        format!("{} B + 0 B", namespace.block_size()),
        identity.firmware().to_string(),
    ]
}

/// A capacity as disks have it on their labels: decimal.
fn decimal(bytes: u64) -> String {
    bytesize::ByteSize(bytes).display().si().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_are_decimal() {
        assert_eq!(decimal(1 << 30), "1.1 GB");
        assert_eq!(decimal(512), "512 B");
    }
}
