//! `sanitize-log`: prints the progress of a sanitize operation, or the result of the last one.

use super::fields::Fields;
use super::query::{Args, show};
use super::subject::Subject;
use shadowbell_spec::log::{SanitizeLog, sos};
use std::process::ExitCode;

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
