//! Servers that are measured by the same client in turn. The first server is shadowbell's.

use shadowbell_testing::wait;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde_json::{Value, json};
use shadowbell_guest::host::last_lines;
use shadowbell_guest::process::{Process, describe};
use tempfile::TempDir;

use crate::figures::{count, size, time};
use crate::process::time_of_all;
use crate::samples::{Rounds, Samples};
use crate::table::Table;

/// Columns of the table.
pub(crate) const HEAD: [&str; 8] =
    ["rw", "bs", "iodepth", "server", "IOPS", "ours/it", "mean latency", "server/IO"];

/// Condition: access pattern, block size, queue depth.
pub(crate) type Row = (&'static str, u32, u32);

/// Conditions of the contest.
pub(crate) const ROWS: [Row; 6] = [
    ("randread", 4096, 1),
    ("randread", 4096, 32),
    ("randwrite", 4096, 1),
    ("randwrite", 4096, 32),
    ("randread", 65536, 32),
    ("randwrite", 65536, 32),
];

/// Results of a contest.
pub(crate) struct Contest {
    rows: Vec<Row>,
    names: Vec<String>,
    /// Results by condition and server.
    found: Vec<Vec<Rounds>>,
    /// Ratio of shadowbell's IOPS to the server's, in each round.
    ours: Vec<Vec<Samples>>,
}

impl Contest {
    /// Creates a contest of servers with these names, shadowbell's first.
    pub(crate) fn new(rows: &[Row], names: Vec<String>) -> Self {
        Self {
            rows: rows.to_vec(),
            found: vec![vec![Rounds::default(); names.len()]; rows.len()],
            ours: vec![vec![Samples::default(); names.len()]; rows.len()],
            names,
        }
    }

    /// Adds one round of a condition: the results of all servers.
    pub(crate) fn push(&mut self, row: usize, found: Vec<Value>) {
        let iops = |found: &Value| found.get("iops").and_then(Value::as_f64).unwrap_or_default();
        let ours = found.first().map_or(0.0, iops);
        for (at, one) in found.into_iter().enumerate() {
            if iops(&one) > 0.0 {
                self.ours[row][at].push(ours / iops(&one));
            }
            self.found[row][at].push(one);
        }
    }

    /// Adds the results to a table.
    pub(crate) fn show(&self, table: &mut Table, name: &str) {
        for (row, (rw, bs, depth)) in self.rows.iter().enumerate() {
            for (at, server) in self.names.iter().enumerate() {
                let (rounds, ours) = (&self.found[row][at], self.ours[row][at].median());
                let figure = |name: &str| rounds.median(name);
                let mut json = rounds.row(name);
                if let Some(fields) = json.as_object_mut() {
                    fields.insert("device".into(), server.clone().into());
                    fields.insert("ours_by_it".into(), json!(ours));
                }
                table.push(
                    vec![
                        (*rw).into(),
                        size(*bs),
                        depth.to_string(),
                        server.clone(),
                        count(figure("iops")),
                        if at == 0 { "-".into() } else { format!("{ours:.2}") },
                        time(figure("latency_ns/mean")),
                        time(figure("server_cpu_ns_per_io")),
                    ],
                    json,
                );
            }
        }
    }
}

/// A server with a directory. Ended when dropped.
pub(crate) struct Peer {
    process: Process,
    directory: TempDir,
}

impl Peer {
    /// Starts the command that `command` returns for a directory, and waits until `ready` returns
    /// true for it.
    pub(crate) fn start(
        name: &str,
        command: impl FnOnce(&Path) -> Command,
        ready: impl Fn(&Path) -> bool,
    ) -> Result<Self> {
        let directory = tempfile::tempdir().context("a directory for a server")?;
        let at = directory.path().to_owned();
        let log = File::create(at.join("log"))?;
        let mut command = command(&at);
        command.stdout(log.try_clone()?).stderr(log);
        let mut process = Process::spawn(name, &mut command)?;
        let deadline = wait::deadline();
        while !ready(&at) {
            let log = || last_lines(&fs::read(at.join("log")).unwrap_or_default(), 8);
            if let Some(status) = process.ended()? {
                bail!("{name} ended ({}): {}", describe(status), log());
            }
            if Instant::now() > deadline {
                bail!("{name} is not ready: {}", log());
            }
            wait::pause();
        }
        Ok(Self { process, directory })
    }

    /// Path of a file in the directory.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Runs `measure`. Adds the server's CPU time per I/O to the result, and returns it.
    pub(crate) fn measured(&self, measure: impl FnOnce() -> Result<Value>) -> Result<Value> {
        let before = time_of_all(self.process.id())?;
        let mut row = measure()?;
        let time = time_of_all(self.process.id())?.saturating_sub(before).as_nanos() as f64;
        let ios = row.get("commands").and_then(Value::as_f64).filter(|ios| *ios > 0.0);
        if let (Some(fields), Some(ios)) = (row.as_object_mut(), ios) {
            fields.insert("server_cpu_ns_per_io".into(), json!(time / ios));
        }
        Ok(row)
    }
}

impl Drop for Peer {
    /// Sends SIGTERM, so that the server removes its mounts.
    fn drop(&mut self) {
        if self.process.signal(Signal::TERM).is_ok() {
            let _ = self.process.wait(wait::LIMIT);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::child;

    #[test]
    fn ratios_are_within_one_round() {
        let row = |iops: f64| json!({ "iops": iops, "latency_ns": { "mean": 1000.0 } });
        let mut contest = Contest::new(&[("randread", 4096, 1)], vec!["we".into(), "they".into()]);
        contest.push(0, vec![row(30.0), row(10.0)]);
        contest.push(0, vec![row(20.0), row(10.0)]);
        contest.push(0, vec![row(40.0), row(80.0)]);
        let mut table = Table::new("", &HEAD);
        contest.show(&mut table, "x");
        assert_eq!(table.rows[1][3..6], ["they".to_owned(), count(10.0), "2.00".to_owned()]);
        assert_eq!((&table.json[1]["ours_by_it"], &table.rows[0][5][..]), (&json!(2.0), "-"));
    }

    #[test]
    fn start_waits_for_the_server_or_reports_its_end() {
        let shell = |script: &'static str| {
            move |directory: &Path| {
                let mut command = child(Path::new("sh"));
                command.args(["-c", script]).current_dir(directory);
                command
            }
        };
        let is_there = |at: &Path| at.join("ready").exists();
        let peer = Peer::start("sh", shell("touch ready; sleep 60"), is_there).unwrap();
        let row = peer.measured(|| Ok(json!({ "commands": 10 }))).unwrap();
        assert!(row["server_cpu_ns_per_io"].is_number() && peer.path("ready").exists());
        let error = Peer::start("sh", shell("echo why; exit 3"), is_there).err().unwrap();
        assert!(error.to_string().contains("ended (exit code 3): why"), "{error}");
    }
}
