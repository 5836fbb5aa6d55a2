//! `ana-log`: prints the log page Asymmetric Namespace Access.

use super::fields::Fields;
use super::query::{Args, show, show_json};
use super::subject::Subject;
use anyhow::anyhow;
use serde_json::{Map, Value};
use shadowbell_spec::log::{AnaGroup, AnaLog, AnaState};
use std::io::{self, Write};
use std::process::ExitCode;

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
