//! Output of `ctl apply`: added, removed and changed controllers, and their changed settings.

use shadowbell_control_api::api::{Difference, Plan};
use std::io::{self, Write};

/// Prints a plan as text.
///
/// # Errors
/// `out` cannot be written.
pub(crate) fn plan_lines(out: &mut dyn Write, plan: &Plan) -> io::Result<()> {
    let all = [('+', &plan.add), ('-', &plan.remove), ('~', &plan.replace), ('*', &plan.change)];
    for (sign, ids) in all {
        for id in ids {
            let busy = if plan.busy.contains(id) { " (has a client)" } else { "" };
            writeln!(out, "{sign} {id}{busy}")?;
            let its = |one: &&Difference| one.controller.as_ref() == Some(id);
            for difference in plan.differences.iter().filter(its) {
                writeln!(out, "    {}", line(difference))?;
            }
        }
    }
    for difference in plan.differences.iter().filter(|one| one.controller.is_none()) {
        writeln!(out, "* {}", line(difference))?;
    }
    if !plan.applied {
        for loss in &plan.losses {
            writeln!(out, "needs --force: {loss}")?;
        }
    }
    if !plan.later.is_empty() {
        writeln!(
            out,
            "server-wide settings differ ({}); they take effect at the next `shadowbell upgrade` \
             or restart",
            plan.later.join(", ")
        )?;
    }
    let done = if plan.applied { "" } else { "; not applied" };
    writeln!(
        out,
        "controllers: {} added, {} removed, {} replaced, {} changed, {} unchanged{done}",
        plan.add.len(),
        plan.remove.len(),
        plan.replace.len(),
        plan.change.len(),
        plan.unchanged
    )
}

fn line(difference: &Difference) -> String {
    let or_none = |text: &Option<String>| text.clone().unwrap_or_else(|| "none".to_owned());
    let Difference { what, from, to, .. } = difference;
    format!("{what}: {} -> {}", or_none(from), or_none(to))
}
