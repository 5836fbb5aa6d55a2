//! `shadowbell ctl disk`: lists, adds, changes and removes the disks of a server.

use crate::grant::{NamedFiles, grant};
use bytesize::ByteSize;
use clap::Subcommand;
use hyper::Method;
use shadowbell_config::disk_spec;
use shadowbell_config::limits::{DiskLimits, GROUP};
use shadowbell_config::parse;
use shadowbell_config::server_config::canonical_path;
use shadowbell_control_api::api::{Disk, DiskChange, DiskSource, LimitSpec, Size, Status};
use shadowbell_control_api::client::{Client, forced, part};
use shadowbell_process::output::show;
use shadowbell_process::table::Table;
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Option of a disk with the policy for errors of its storage.
const ON_ERROR: &str = "on-error";

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum DiskVerb {
    /// List the disks and their users
    Ls,
    /// Add a disk, for `ctl namespace attach`; no effect if an equal one exists
    Add {
        /// Id of the disk
        id: String,
        /// Disk, as for `serve`
        source: String,
        /// Refuse writes
        #[arg(long)]
        read_only: bool,
    },
    /// Remove a disk that has no user, after a flush
    Remove {
        /// Id of the disk
        disk: String,
    },
    /// Resize a disk (default: to the size of its file)
    Resize {
        /// Id of the disk
        disk: String,
        /// New size, 16GiB, or growth, +1GiB; a file grows with its disk
        #[arg(value_parser = size)]
        size: Option<Size>,
        /// Shrink it even if it has a client, which loses the rest
        #[arg(long)]
        force: bool,
    },
    /// Replace the source of a disk, without a copy of the data
    ///
    /// Rate limits and read-only stay, unless the new source names them (`?iops=N`,
    /// `?read-only=off`).
    Replace {
        /// Id of the disk
        disk: String,
        /// New source, as for `serve`, with the same block size
        source: String,
        /// Replace it even if it has a client, which finds other data
        #[arg(long)]
        force: bool,
    },
    /// Repeat the held requests of a disk that is stopped by an error of its storage
    Resume {
        /// Id of the disk
        disk: String,
    },
    /// Make a disk read-only or writable
    ReadOnly {
        /// Id of the disk
        disk: String,
        /// on: read-only; off: writable
        #[arg(value_enum)]
        switch: Switch,
        /// Make it read-only even if it has a client that may write
        #[arg(long)]
        force: bool,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Switch {
    #[value(aliases = ["true", "yes"])]
    On,
    #[value(aliases = ["false", "no"])]
    Off,
}

/// Parses the size of a disk: `16GiB`, or `+1GiB` to grow.
fn size(text: &str) -> Result<Size, String> {
    match text.strip_prefix('+') {
        Some(growth) => parse::size(growth).map(Size::Grow),
        None => parse::size(text).map(Size::Bytes),
    }
}

/// Request path of a disk.
pub(crate) fn disk_path(id: &str) -> String {
    format!("/v1/disks/{}", part(&canonical_id(id)))
}

/// Id of a disk in requests: in `SOCKET/NSID`, the path of an existing socket is made absolute.
pub(crate) fn canonical_id(id: &str) -> String {
    let known = id.rsplit_once('/').and_then(|(socket, nsid)| {
        let about = std::fs::metadata(socket).ok()?;
        let socket = about.file_type().is_socket().then(|| canonical_path(Path::new(socket)))?;
        Some(format!("{}/{nsid}", socket.display()))
    });
    known.unwrap_or_else(|| id.to_owned())
}

/// True if the server has a disk with this id.
pub(crate) fn is_disk(client: &Client, id: &str) -> anyhow::Result<bool> {
    let all: Vec<Disk> = client.get("/v1/disks")?;
    Ok(all.iter().any(|disk| disk.id == id))
}

/// Runs a verb.
///
/// # Errors
/// The server refuses the request.
pub(crate) fn disk(
    client: &Client,
    verb: &DiskVerb,
    named: &NamedFiles,
    json: bool,
) -> anyhow::Result<()> {
    let absolute = |source: &str| -> anyhow::Result<String> {
        let source = disk_spec::with_absolute_paths(source);
        grant(client, [&source[..]].into_iter(), std::iter::empty(), named)?;
        Ok(source)
    };
    let change = |id: &str, change: DiskChange, force: bool| -> anyhow::Result<Vec<Disk>> {
        Ok(vec![client.send(&Method::PATCH, &forced(&disk_path(id), force), &change)?])
    };
    let now = match verb {
        DiskVerb::Ls => {
            let status: Status = client.get("/v1/status")?;
            let all: Vec<Disk> = client.get("/v1/disks")?;
            return show(&all, json, |out, all| {
                disks(out, all)?;
                match status.waiting {
                    0 => Ok(()),
                    count => writeln!(
                        out,
                        "controllers that wait for their disks: {count}; these disks are not listed, \
                         and `shadowbell ctl controllers` shows the reason"
                    ),
                }
            });
        }
        DiskVerb::Add { id, source, read_only } => {
            let source = match read_only {
                true => disk_spec::with_option(source, "read-only", "on"),
                false => source.clone(),
            };
            let source = DiskSource { source: absolute(&source)? };
            vec![client.send(&Method::PUT, &disk_path(id), &source)?]
        }
        DiskVerb::Remove { disk } => {
            return client.send::<()>(&Method::DELETE, &disk_path(disk), &());
        }
        DiskVerb::Resize { disk, size, force } => {
            let size = Some(size.unwrap_or(Size::Whole));
            change(disk, DiskChange { size, ..DiskChange::default() }, *force)?
        }
        DiskVerb::Replace { disk, source, force } => {
            let before: Disk = client.get(&disk_path(disk))?;
            let new = absolute(source)?;
            let source = Some(new.clone());
            let now = change(disk, DiskChange { source, ..DiskChange::default() }, *force)?;
            return show(&now, json, |out, now| {
                disks(out, now)?;
                let kept = now.iter().flat_map(|now| kept(&before, now, &new)).collect::<Vec<_>>();
                if !kept.is_empty() {
                    writeln!(out, "kept from the old source: {}", kept.join(", "))?;
                }
                Ok(())
            });
        }
        DiskVerb::Resume { disk } => {
            vec![client.send(&Method::POST, &format!("{}/resume", disk_path(disk)), &())?]
        }
        DiskVerb::ReadOnly { disk, switch, force } => {
            let read_only = Some(*switch == Switch::On);
            change(disk, DiskChange { read_only, ..DiskChange::default() }, *force)?
        }
    };
    show(&now, json, disks)
}

/// Properties that a disk has inherited from its old source at a replacement by the source `new`,
/// because `new` does not name them.
fn kept(before: &Disk, now: &Disk, new: &str) -> Vec<String> {
    let (bare, named) = DiskLimits::split(new).unwrap_or_default();
    let limits = now.limits.as_ref().and_then(|spec| spec.parse().ok()).unwrap_or_default();
    let is_named = |name: &str| named.own.texts().any(|(other, _)| other == name);
    let own = limits.own.texts().filter(|(name, _)| !is_named(name));
    let mut all: Vec<_> = own.map(|(name, text)| format!("{name}={text}")).collect();
    let group = limits.group.filter(|_| named.group.is_none());
    all.extend(group.map(|group| format!("{GROUP}={group}")));
    if before.read_only && now.read_only && disk_spec::take_option(&bare, "read-only").1.is_none() {
        all.push("read-only".to_owned());
    }
    let on_error = now.on_error.iter().filter(|_| before.on_error == now.on_error);
    let on_error = on_error.filter(|_| disk_spec::take_option(&bare, ON_ERROR).1.is_none());
    all.extend(on_error.map(|policy| format!("{ON_ERROR}={policy}")));
    all
}

/// Prints a table of disks.
pub(crate) fn disks(out: &mut dyn Write, all: &Vec<Disk>) -> io::Result<()> {
    let headings = ["Disk", "Source", "Size", "Block", "Writes", "Limits", "Users"];
    let mut table = Table::new(headings);
    for disk in all {
        let users = disk.namespaces.iter();
        let users = users.map(|user| format!("{} namespace {}", user.controller, user.nsid));
        let exports = disk.exports.iter().map(|export| format!("export {export}"));
        let users: Vec<_> = users.chain(exports).collect();
        table.line([
            disk.id.clone(),
            disk.source.clone(),
            ByteSize(disk.bytes).display().iec().to_string(),
            disk.block_size.to_string(),
            if disk.read_only { "no" } else { "yes" }.to_owned(),
            limits_text(disk.limits.as_ref()),
            if users.is_empty() { "none".to_owned() } else { users.join(", ") },
        ]);
    }
    write!(out, "{table}")?;
    for disk in all.iter().filter(|disk| disk.deleted) {
        writeln!(
            out,
            "{}: its file {} was deleted, and the data is lost when the disk is closed: copy it \
             before that",
            disk.id, disk.source
        )?;
    }
    for disk in all {
        let Some(reason) = &disk.stopped else { continue };
        let held = match disk.held {
            1 => "1 request is".to_owned(),
            count => format!("{count} requests are"),
        };
        writeln!(out, "{} is stopped: {reason}; {held} held", disk.id)?;
    }
    for disk in all.iter().filter(|disk| disk.stalled) {
        writeln!(
            out,
            "{} is stalled: {} requests in flight, the oldest for {} s",
            disk.id,
            disk.in_flight,
            disk.oldest_ms / 1000
        )?;
    }
    Ok(())
}

/// Text of rate limits for a table.
pub(crate) fn limits_text(spec: Option<&LimitSpec>) -> String {
    spec.and_then(|spec| spec.parse().ok()).unwrap_or_default().to_string()
}
