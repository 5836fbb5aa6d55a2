//! `list`: prints a line for each namespace of the given controllers.

use super::subject::Subject;
use serde_json::{Map, Value, json};
use shadowbell_config::target::{self, Target};
use shadowbell_process::output::Output;
use shadowbell_process::table::Table;
use shadowbell_spec::identify::{IdentifyController, IdentifyNamespace};
use std::io::{self, Write};
use std::process::ExitCode;

/// List the namespaces of controllers
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct ListArgs {
    /// Controllers to list
    #[arg(value_name = "TARGET", required = true)]
    pub targets: Vec<Target>,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// A controller cannot be attached. The verb ends at the first controller that cannot be attached.
pub fn list(args: &ListArgs) -> anyhow::Result<ExitCode> {
    let mut devices = Vec::new();
    let mut table =
        Table::new(["Target", "Serial", "Model", "Namespace", "Usage", "Format", "Firmware"]);
    for target in &args.targets {
        let subject = Subject::open(target)?;
        let controller = subject.identify_controller()?;
        for (nsid, namespace) in subject.namespaces()? {
            let row =
                Row { target: target.with_nsid(nsid), controller: &controller, nsid, namespace };
            devices.push(Value::Object(row.describe()));
            table.line(row.line());
        }
        subject.finish()?;
    }
    let mut out = io::stdout().lock();
    if args.output.is_json() {
        writeln!(out, "{}", json!({ "Devices": devices }))?;
    } else {
        write!(out, "{table}")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Namespace of a controller.
struct Row<'a> {
    target: Target,
    controller: &'a IdentifyController,
    nsid: u32,
    namespace: IdentifyNamespace,
}

impl Row<'_> {
    fn block_size(&self) -> u64 {
        self.namespace.format().and_then(|format| format.block_size()).unwrap_or(0)
    }

    fn metadata_size(&self) -> u16 {
        self.namespace.format().map_or(0, |format| format.ms)
    }

    fn used(&self) -> u64 {
        self.namespace.nuse.saturating_mul(self.block_size())
    }

    fn bytes(&self) -> u64 {
        self.namespace.nsze.saturating_mul(self.block_size())
    }

    fn describe(&self) -> Map<String, Value> {
        let object = json!({
            "Target": self.target.to_string(),
            "DevicePath": self.target.to_string(),
            "GenericPath": self.target.to_string(),
            "NameSpace": self.nsid,
            "SerialNumber": self.controller.serial().to_string(),
            "ModelNumber": self.controller.model().to_string(),
            "Firmware": self.controller.firmware().to_string(),
            "UsedBytes": self.used(),
            "PhysicalSize": self.bytes(),
            "MaximumLBA": self.namespace.nsze,
            "SectorSize": self.block_size(),
        });
        match object {
            Value::Object(map) => map,
            _ => Map::new(),
        }
    }

    fn line(&self) -> [String; 7] {
        [
            self.target.to_string(),
            self.controller.serial().to_string(),
            self.controller.model().to_string(),
            self.nsid.to_string(),
            format!("{} / {}", binary(self.used()), binary(self.bytes())),
            format!("{} B + {} B", self.block_size(), self.metadata_size()),
            self.controller.firmware().to_string(),
        ]
    }
}

/// Capacity in IEC units.
fn binary(bytes: u64) -> String {
    bytesize::ByteSize(bytes).display().iec().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_have_iec_units() {
        assert_eq!(binary(1 << 30), "1.0 GiB");
        assert_eq!(binary(512), "512 B");
    }
}
