//! `shadowbell ctl ana`: ANA states of the controllers of a subsystem.

use hyper::Method;
use shadowbell_config::ana_state::AnaStateName;
use shadowbell_control_api::api::{AnaGroup, AnaStateChange, Controller};
use shadowbell_control_api::client::Client;
use shadowbell_process::output::show;
use shadowbell_process::table::Table;
use std::io::{self, Write};

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct AnaArgs {
    /// Only the controller with this id or socket
    pub(crate) controller: Option<String>,
    /// ANA group identifier, from 1
    #[arg(requires = "state")]
    pub(crate) group: Option<u32>,
    /// New ANA state of the group for the controller
    #[arg(value_enum)]
    pub(crate) state: Option<AnaStateName>,
}

/// Runs the verb. `path` returns the request path of a controller.
///
/// # Errors
/// The server refuses the request.
pub(crate) fn ana(
    client: &Client,
    args: &AnaArgs,
    path: impl Fn(&str) -> String,
    json: bool,
) -> anyhow::Result<()> {
    let of_one = args.controller.as_deref().map(path);
    if let (Some(path), Some(group), Some(state)) = (&of_one, args.group, args.state) {
        let wanted = AnaStateChange { state };
        let path = format!("{path}/ana/{group}");
        let now: AnaGroup = client.send(&Method::PUT, &path, &wanted)?;
        return show(&now, json, |out, now| writeln!(out, "group {} is {}", now.group, now.state));
    }
    let all: Vec<Controller> = match of_one {
        Some(path) => vec![client.get(&path)?],
        None => client.get("/v1/controllers")?,
    };
    let all: Vec<_> = all.into_iter().filter(|controller| !controller.ana.is_empty()).collect();
    show(&all, json, groups)
}

fn groups(out: &mut dyn Write, all: &Vec<Controller>) -> io::Result<()> {
    let mut table = Table::new(["Controller", "Group", "State", "Namespaces"]);
    for controller in all {
        for AnaGroup { group, state, namespaces } in &controller.ana {
            let namespaces: Vec<_> = namespaces.iter().map(u32::to_string).collect();
            table.line([
                controller.id.clone(),
                group.to_string(),
                state.to_string(),
                namespaces.join(", "),
            ]);
        }
    }
    write!(out, "{table}")
}
