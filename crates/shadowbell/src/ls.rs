//! `shadowbell ls`: running servers with their controllers, disks and exports.

use bytesize::ByteSize;
use serde::Serialize;
use shadowbell_control_api::api::{Controller, Disk, Export, Status};
use shadowbell_control_api::client::Client;
use shadowbell_control_api::discovery;
use shadowbell_process::output::{Output, show};
use shadowbell_process::table::Table;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

/// List the running servers with their controllers, disks and exports
///
/// `shadowbell` without a verb does the same.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Args {
    /// Server: its name, its process ID, its control socket, or the socket of a controller
    /// [default: all servers with a control socket in the usual directory]
    #[arg(value_name = "SERVER")]
    server: Option<String>,
    #[command(flatten)]
    output: Output,
}

impl Args {
    /// All servers.
    pub(crate) fn all(output: Output) -> Self {
        Self { server: None, output }
    }
}

/// A running server and its objects.
#[derive(Serialize)]
struct Listed {
    status: Status,
    controllers: Vec<Controller>,
    disks: Vec<Disk>,
    exports: Vec<Export>,
}

impl Listed {
    fn of(client: &Client) -> anyhow::Result<Self> {
        Ok(Self {
            status: client.get("/v1/status")?,
            controllers: client.get("/v1/controllers")?,
            disks: client.get("/v1/disks")?,
            exports: client.get("/v1/exports")?,
        })
    }

    /// Lines of the table: kind, id, state, and users or disk.
    fn lines(&self) -> Vec<[String; 4]> {
        let status = &self.status;
        let server = [
            "server".to_owned(),
            status.name.clone(),
            format!("process {}", status.supervisor_pid.unwrap_or(status.pid)),
            format!("shadowbell {}", status.version),
        ];
        let controllers = self.controllers.iter().map(|controller| {
            let state = serde_json::to_value(controller.state).unwrap_or_default();
            let client = if controller.client { ", client" } else { "" };
            [
                "  controller".to_owned(),
                controller.id.clone(),
                format!("{}{client}", state.as_str().unwrap_or_default()),
                match (&controller.waits_for, controller.namespaces.len()) {
                    (Some(why), _) => format!("waits for its disks: {why}"),
                    (None, 1) => "1 namespace".to_owned(),
                    (None, count) => format!("{count} namespaces"),
                },
            ]
        });
        let disks = self.disks.iter().map(|disk| {
            let users = disk.namespaces.iter();
            let users = users.map(|user| format!("{} namespace {}", user.controller, user.nsid));
            let state = match disk {
                Disk { stopped: Some(_), .. } => ", stopped",
                Disk { stalled: true, .. } => ", stalled",
                Disk { deleted: true, .. } => ", deleted",
                _ => "",
            };
            [
                "  disk".to_owned(),
                disk.id.clone(),
                format!("{}{state}", ByteSize(disk.bytes).display().iec()),
                users.collect::<Vec<_>>().join(", "),
            ]
        });
        let exports = self.exports.iter().map(|export| {
            let users = match export.queues {
                0 => "no client".to_owned(),
                _ => "client".to_owned(),
            };
            ["  export".to_owned(), export.id.clone(), users, format!("disk {}", export.disk)]
        });
        std::iter::once(server).chain(controllers).chain(disks).chain(exports).collect()
    }
}

/// Runs the verb.
///
/// # Errors
/// The named server is not found, or does not answer.
pub(crate) fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let (all, others) = match &args.server {
        Some(server) => (vec![Listed::of(&discovery::server(Some(server))?)?], String::new()),
        None => {
            let directory = discovery::directory()?;
            let all = running(&directory);
            let others = all.is_empty().then(|| discovery::of_others(&directory));
            (all, others.unwrap_or_default())
        }
    };
    show(&all, args.output.is_json(), |out, all| print(out, all, &others))?;
    Ok(ExitCode::SUCCESS)
}

/// Servers in a directory. Leaves out a server of another user, and one that ends meanwhile.
fn running(directory: &Path) -> Vec<Listed> {
    let servers = discovery::running(directory).into_iter();
    servers.filter_map(|(_, socket)| Listed::of(&Client::new(&socket)).ok()).collect()
}

fn print(out: &mut dyn Write, all: &[Listed], others: &str) -> io::Result<()> {
    if all.is_empty() {
        return writeln!(
            out,
            "no server is running here: start one by `shadowbell serve DISK --socket PATH`; \
             `shadowbell --help` lists all verbs{others}"
        );
    }
    let mut table = Table::new(["Kind", "Id", "State", "Of"]);
    all.iter().flat_map(Listed::lines).for_each(|line| table.line(line));
    write!(out, "{table}")
}
