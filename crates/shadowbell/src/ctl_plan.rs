//! Output of `ctl apply`: added, removed and changed controllers, and their changed settings.

use crate::control::api::{Difference, Plan};
use std::io::{self, Write};

/// Prints a plan as text.
///
/// # Errors
/// `out` cannot be written.
pub(crate) fn plan_lines(out: &mut dyn Write, plan: &Plan) -> io::Result<()> {
    let all = [('+', &plan.add), ('-', &plan.remove), ('~', &plan.replace), ('*', &plan.change)];
    for (sign, ids) in all {
        for id in ids {
            let busy = if plan.busy.contains(id) { " (a client has it)" } else { "" };
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
    if plan.later {
        writeln!(
            out,
            "what the file says otherwise of the server itself counts when it goes on in another \
             process (`shadowbell upgrade`) or is started again"
        )?;
    }
    let done = if plan.applied { "" } else { "; nothing was done" };
    writeln!(
        out,
        "{} come, {} go, {} are replaced, {} change, {} stay{done}",
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
