//! `smart-log`, `error-log`, `ana-log` and `sanitize-log`: prints log pages.

use super::fields::{Args, Fields, kelvins, show, show_json};
use super::subject::Subject;
use anyhow::anyhow;
use serde_json::{Map, Value};
use shadowbell_config::target::{self, Target};
use shadowbell_process::output::Output;
use shadowbell_spec::Status;
use shadowbell_spec::log::{
    AnaGroup, AnaLog, AnaState, ErrorLogEntry, SanitizeLog, SmartHealth, sos,
};
use std::io::{self, Write};
use std::process::ExitCode;

/// Runs `smart-log`.
///
/// # Errors
/// Errors of the driver.
pub fn smart_log(args: &Args) -> anyhow::Result<ExitCode> {
    let subject = Subject::open(&args.target)?;
    let log = subject.smart_log()?;
    subject.finish()?;
    show("SMART / Health Information of the controller:", &health(&log), args.output.is_json())?;
    Ok(ExitCode::SUCCESS)
}

fn health(log: &SmartHealth) -> Fields {
    let mut f = Fields::default();
    let warning = log.critical_warning;
    f.bits("critical_warning", warning.into_bits());
    let warnings: Vec<_> = [
        (warning.spare(), "spare is low"),
        (warning.temperature(), "temperature"),
        (warning.reliability(), "reliability is degraded"),
        (warning.read_only(), "media is read only"),
        (warning.volatile_backup(), "backup of volatile memory failed"),
        (warning.persistent_memory(), "persistent memory is unreliable"),
    ]
    .into_iter()
    .filter_map(|(set, text)| set.then_some(text))
    .collect();
    if !warnings.is_empty() {
        f.meaning(warnings.join(", "));
    }
    let temperature = log.temperature.get();
    f.number("temperature", temperature).meaning(kelvins(temperature));
    f.number("avail_spare", log.available_spare).meaning("percent");
    f.number("spare_thresh", log.available_spare_threshold).meaning("percent");
    f.number("percent_used", log.percentage_used).meaning("percent");
    f.bits("endurance_grp_critical_warning_summary", log.endurance_group_warning);
    for (name, units) in [
        ("data_units_read", log.data_units_read.get()),
        ("data_units_written", log.data_units_written.get()),
    ] {
        // A data unit is 1000 times 512 bytes.
        let bytes = units.saturating_mul(512_000);
        let bytes = bytesize::ByteSize(u64::try_from(bytes).unwrap_or(u64::MAX));
        f.number(name, units).meaning(bytes.display().iec());
    }
    f.number("host_read_commands", log.host_read_commands.get());
    f.number("host_write_commands", log.host_write_commands.get());
    f.number("controller_busy_time", log.controller_busy_time.get()).meaning("minutes");
    f.number("power_cycles", log.power_cycles.get());
    f.number("power_on_hours", log.power_on_hours.get());
    f.number("unsafe_shutdowns", log.unsafe_shutdowns.get());
    f.number("media_errors", log.media_errors.get());
    f.number("num_err_log_entries", log.error_log_entries.get());
    f.number("warning_temp_time", log.warning_temperature_time).meaning("minutes");
    f.number("critical_comp_time", log.critical_temperature_time).meaning("minutes");
    for (n, sensor) in log.temperature_sensors.iter().enumerate().filter(|(_, k)| **k != 0) {
        f.number(format!("temperature_sensor_{}", n + 1), *sensor).meaning(kelvins(*sensor));
    }
    f.number("thm_temp1_trans_count", log.thermal_transitions_1);
    f.number("thm_temp2_trans_count", log.thermal_transitions_2);
    f.number("thm_temp1_total_time", log.thermal_time_1).meaning("seconds");
    f.number("thm_temp2_total_time", log.thermal_time_2).meaning("seconds");
    f
}

/// Show the error log of a controller, newest entry first
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct ErrorLogArgs {
    /// Controller to query
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// Maximum number of entries
    #[arg(short = 'e', long, default_value_t = 64, value_name = "N")]
    pub log_entries: u16,
    #[command(flatten)]
    pub(crate) output: Output,
}

/// Runs `error-log`.
///
/// # Errors
/// Errors of the driver.
pub fn error_log(args: &ErrorLogArgs) -> anyhow::Result<ExitCode> {
    let subject = Subject::open(&args.target)?;
    let entries = subject.error_log(args.log_entries)?;
    subject.finish()?;
    if args.output.is_json() {
        let entries = entries.iter().map(|e| Value::Object(entry(e).to_json())).collect();
        show_json(Map::from_iter([("errors".to_owned(), Value::Array(entries))]))?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut out = io::stdout().lock();
    writeln!(out, "Error Information of the controller, {} entries:", entries.len())?;
    for (n, error) in entries.iter().enumerate() {
        writeln!(out, "{:.<20}\n Entry[{n:2}]\n{:.<20}", "", "")?;
        write!(out, "{}", entry(error))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn entry(error: &ErrorLogEntry) -> Fields {
    let mut f = Fields::default();
    f.number("error_count", error.error_count);
    f.number("sqid", error.sqid).bits("cmdid", error.cid);
    // As in a completion queue entry, bit 0 is the phase tag and the status is above it.
    f.bits("status_field", error.status >> 1).meaning(Status::from_bits(error.status >> 1));
    f.number("phase_tag", error.status & 1);
    f.bits("parm_error_location", error.parameter.into_bits());
    if error.parameter != shadowbell_spec::log::ParameterLocation::NONE {
        f.meaning(format!("byte {}, bit {}", error.parameter.byte(), error.parameter.bit()));
    }
    f.bits("lba", error.lba).bits("nsid", error.nsid).number("vs", error.vendor_lid);
    f.number("trtype", error.trtype);
    if error.version >= 1 {
        f.number("csi", error.csi).bits("opcode", error.opcode);
    }
    f.bits("cs", error.command_specific);
    f.bits("trtype_spec_info", error.transport_specific);
    f.number("log_page_version", error.version);
    f
}

/// Runs `ana-log`.
///
/// # Errors
/// Errors of the driver, or the controller has no such log page.
pub fn ana_log(args: &Args) -> anyhow::Result<ExitCode> {
    let subject = Subject::open(&args.target)?;
    let log = subject.ana_log()?;
    subject.finish()?;
    let log = log.ok_or_else(|| {
        anyhow!(
            "the controller does not report Asymmetric Namespace Access (ANA): it belongs to no \
             subsystem of several controllers"
        )
    })?;
    let AnaLog { changes, groups } = &log;
    let mut head = Fields::default();
    head.number("chgcnt", *changes).number("ngrps", groups.len() as u64);
    if args.output.is_json() {
        let groups = groups.iter().map(|its| Value::Object(group(its).to_json())).collect();
        let mut all = head.to_json();
        all.insert("groups".to_owned(), Value::Array(groups));
        show_json(Map::from_iter(all))?;
        return Ok(ExitCode::SUCCESS);
    }
    show("Asymmetric Namespace Access of the controller:", &head, false)?;
    let mut out = io::stdout().lock();
    for its in groups {
        writeln!(out)?;
        write!(out, "{}", group(its))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn group(group: &AnaGroup) -> Fields {
    let mut f = Fields::default();
    let nsids: Vec<_> = group.nsids.iter().map(u32::to_string).collect();
    f.number("grpid", group.id).number("nnsids", group.nsids.len() as u64);
    if !nsids.is_empty() {
        f.meaning(format!("namespaces {}", nsids.join(", ")));
    }
    f.number("chgcnt", group.changes);
    f.number("state", group.state.map_or(0, |state| state as u8));
    f.meaning(group.state.map_or("invalid", AnaState::name));
    f
}

/// Runs `sanitize-log`.
///
/// # Errors
/// Errors of the driver.
pub fn sanitize_log(args: &Args) -> anyhow::Result<ExitCode> {
    let subject = Subject::open(&args.target)?;
    let log = subject.sanitize_log()?;
    subject.finish()?;
    let mut f = Fields::default();
    f.number("sprog", log.sprog);
    if log.sstat.sos() == sos::IN_PROGRESS {
        f.meaning(format!("{:.1} percent", f64::from(log.sprog) * 100.0 / 65536.0));
    }
    f.bits("sstat", log.sstat.into_bits());
    f.meaning(sos::name(log.sstat.sos()).unwrap_or("unknown"));
    f.bits("cdw10_info", log.scdw10);
    for (name, seconds) in [
        ("time_over_write", log.eto),
        ("time_block_erase", log.etbe),
        ("time_crypto_erase", log.etce),
        ("time_over_write_no_dealloc", log.etond),
        ("time_block_erase_no_dealloc", log.etbend),
        ("time_crypto_erase_no_dealloc", log.etcend),
    ] {
        f.number(name, seconds);
        if seconds == SanitizeLog::NO_ESTIMATE {
            f.meaning("not reported");
        }
    }
    show("Sanitize status of the controller:", &f, args.output.is_json())?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_spec::log::{CriticalWarning, ParameterLocation};

    #[test]
    fn health_is_shown_with_its_units() {
        let log = SmartHealth {
            critical_warning: CriticalWarning::new().with_read_only(true),
            temperature: 311.into(),
            data_units_read: 2000.into(),
            ..Default::default()
        };
        let fields = health(&log);
        let text = fields.to_string();
        assert!(text.contains(": 0x8 (media is read only)\n"), "{text}");
        assert!(text.contains(": 311 (38 degrees Celsius)\n"), "{text}");
        assert!(text.contains(": 2000 (976.6 MiB)\n"), "{text}");
        assert!(!text.contains("temperature_sensor_1"), "{text}");
        assert_eq!(fields.to_json()["data_units_read"], 2000);
        let most = SmartHealth { data_units_read: u128::MAX.into(), ..Default::default() };
        assert!(health(&most).to_string().contains("data_units_read"));
    }

    #[test]
    fn an_error_log_entry_names_its_status() {
        let error = ErrorLogEntry {
            error_count: 3,
            status: Status::INVALID_FIELD.bits() << 1 | 1,
            parameter: ParameterLocation::new().with_byte(40).with_bit(2),
            version: 1,
            opcode: 6,
            ..Default::default()
        };
        let fields = entry(&error);
        let text = fields.to_string();
        assert!(text.contains("Invalid Field in Command"), "{text}");
        assert!(text.contains("(byte 40, bit 2)"), "{text}");
        let json = fields.to_json();
        assert_eq!((&json["status_field"], &json["phase_tag"]), (&2.into(), &1.into()));
        assert_eq!(json["opcode"], 6);
    }
}
