//! The suite `readers`: the sequential readers of the guest suite `readers` at native speed,
//! without ublk.
//!
//! The disk is a loop device on a file that is exported by FUSE. One and five readers read the raw
//! disk; one and two readers read files on ext4, which is mounted again for each measurement.
//!
//! Layers from fio to the memory disk: ext4, loop device, FUSE, driver, vfio-user server.

use shadowbell_testing::wait;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use serde_json::{Value, json};
use shadowbell_guest::process::Process;
use tempfile::TempDir;

use crate::figures::{bandwidth, percent};
use crate::machine;
use crate::samples::Samples;
use crate::server::{Server, child, output};
use crate::settings::Settings;
use crate::table::Table;

/// Size of each read in bytes.
const BLOCK: u32 = 128 << 10;
/// Size in bytes of each file, and of the part of the raw disk that each reader reads.
const FILE: u64 = 512 << 20;
/// Number of readers, and true if they read files and not the raw disk.
const CASES: [(u32, bool); 4] = [(1, false), (5, false), (1, true), (2, true)];
/// Time limit of steps that are not measured.
const LIMIT: Duration = Duration::from_secs(120);

pub(crate) fn run(settings: &Settings) -> Result<Vec<Table>> {
    let mut table = Table {
        title: "Sequential readers of 128 KiB through --fuse and a loop device (S4)".into(),
        head: vec!["readers", "of", "bandwidth", "of one raw"],
        ..Table::default()
    };
    if let Err(why) = needs(settings) {
        table.notes.push(format!("Left out: {why}."));
        return Ok(vec![table]);
    }
    let file = if settings.quick { FILE / 16 } else { FILE };
    let disk = Mounted::start(settings, 5 * file)?;
    disk.format(file)?;
    let mut found = CASES.map(|_| (Samples::default(), Samples::default()));
    for _ in 0..settings.rounds {
        let mut one = None;
        for ((readers, files), (moved, share)) in CASES.into_iter().zip(&mut found) {
            let bytes = disk.read(readers, files, file)?;
            let one = *one.get_or_insert(bytes);
            moved.push(bytes);
            share.push(bytes / one * 100.0);
        }
    }
    disk.stop()?;
    for ((readers, files), (moved, share)) in CASES.into_iter().zip(&found) {
        let [min, median, max] = moved.point();
        table.rows.push(vec![
            readers.to_string(),
            if files { "files on ext4" } else { "the raw disk" }.into(),
            bandwidth(median),
            percent(share.median()),
        ]);
        let mut row = json!({
            "table": "S4", "device": "shadowbell", "controller": "shadowbell", "through": "fuse+loop",
            "rw": "read", "bs": BLOCK, "iodepth": 1, "numjobs": readers,
            "iops": median / f64::from(BLOCK), "bandwidth_bytes": median,
            "bandwidth_bytes_min": min, "bandwidth_bytes_max": max, "rounds": settings.rounds,
        });
        if let (true, Some(row)) = (files, row.as_object_mut()) {
            row.insert("file_system".into(), "ext4".into());
        }
        table.json.push(row);
    }
    Ok(vec![table])
}

/// Fails with the missing prerequisite of this machine, if there is one.
fn needs(settings: &Settings) -> Result<()> {
    if !rustix::process::getuid().is_root() {
        bail!("mounting needs root");
    }
    for path in ["/dev/fuse", "/dev/loop-control"] {
        if !Path::new(path).exists() {
            bail!("there is no {path}");
        }
    }
    for (program, package) in [("fio", "fio"), ("mkfs.ext4", "e2fsprogs")] {
        machine::need(program, package, !settings.quick).map_err(anyhow::Error::msg)?;
    }
    Ok(())
}

/// A loop device on the exported file. When dropped, its layers are removed in order.
struct Mounted {
    server: Option<Server>,
    export: Process,
    directory: TempDir,
    /// `/dev/loopN`.
    device: Option<String>,
}

impl Mounted {
    fn start(settings: &Settings, bytes: u64) -> Result<Self> {
        let directory = tempfile::tempdir().context("a directory for the disk")?;
        let server = Server::start(&settings.binary, &[&format!("mem:{bytes}")], &[])?;
        let file = directory.path().join("disk");
        let mut command = child(&settings.binary);
        command.arg("-q").args(["export", &server.target(0), "--fuse"]).arg(&file);
        let export = Process::spawn("shadowbell export", &mut command)?;
        fs::create_dir(directory.path().join("mnt")).context("a place to mount")?;
        let mut this = Self { server: Some(server), export, directory, device: None };
        let deadline = Instant::now() + LIMIT;
        while fs::metadata(&file).map_or(0, |about| about.len()) != bytes {
            if this.export.ended()?.is_some() || Instant::now() > deadline {
                bail!("shadowbell export mounts nothing");
            }
            wait::pause();
        }
        let made = this.tool("losetup", &["--find", "--show", "--direct-io=on"], Some(&file))?;
        this.device = Some(made.trim().to_owned());
        Ok(this)
    }

    fn mnt(&self) -> PathBuf {
        self.directory.path().join("mnt")
    }

    fn device(&self) -> Result<&str> {
        self.device.as_deref().context("there is no loop device")
    }

    fn tool(&self, name: &str, words: &[&str], path: Option<&Path>) -> Result<String> {
        let mut command = child(Path::new(name));
        command.args(words).args(path);
        output(name, command, LIMIT)
    }

    /// Makes a file system with one file per reader.
    fn format(&self, bytes: u64) -> Result<()> {
        self.tool("mkfs.ext4", &["-q", "-F", self.device()?], None)?;
        self.tool("mount", &[self.device()?], Some(&self.mnt()))?;
        for file in 0..2 {
            let name = self.mnt().join(file.to_string());
            let words = [format!("of={}", name.display()), format!("count={}", bytes >> 20)];
            let words: Vec<_> = ["if=/dev/zero", "bs=1M", "conv=fsync"]
                .into_iter()
                .chain(words.iter().map(String::as_str))
                .collect();
            self.tool("dd", &words, None)?;
        }
        self.tool("umount", &[], Some(&self.mnt())).map(drop)
    }

    /// Bytes per second of all readers together.
    fn read(&self, readers: u32, files: bool, bytes: u64) -> Result<f64> {
        if files {
            // The file system is mounted again, so that the page cache is empty.
            self.tool("mount", &[self.device()?], Some(&self.mnt()))?;
        }
        let mut command = child(Path::new("fio"));
        command.args(["--rw=read", "--ioengine=psync", "--thread", "--group_reporting"]);
        command.args(["--output-format=json", &format!("--bs={BLOCK}")]);
        command.arg(format!("--size={bytes}"));
        if files {
            for file in 0..readers {
                let path = self.mnt().join(file.to_string());
                command.arg(format!("--name=file{file}"));
                command.arg(format!("--filename={}", path.display()));
            }
        } else {
            command.args(["--direct=1", &format!("--numjobs={readers}")]);
            command.arg(format!("--offset_increment={bytes}"));
            command.args(["--name=raw", &format!("--filename={}", self.device()?)]);
        }
        let text = output("fio", command, LIMIT);
        if files {
            self.tool("umount", &[], Some(&self.mnt()))?;
        }
        moved(&text?)
    }

    /// Removes all layers, and checks for errors.
    fn stop(mut self) -> Result<()> {
        self.tool("losetup", &["--detach", self.device()?], None)?;
        self.device = None;
        self.export.signal(Signal::TERM)?;
        let status = self.export.wait(LIMIT)?;
        if !status.success() {
            bail!("shadowbell export: {}", shadowbell_guest::process::describe(status));
        }
        self.server.take().map_or(Ok(()), |server| server.stop().map(drop))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Some(device) = self.device.take() {
            let quietly = |name: &str, word: &str| {
                let _ = Command::new(name).arg(word).output();
            };
            quietly("umount", &device);
            let _ = Command::new("losetup").args(["--detach", &device]).output();
            quietly("umount", &self.directory.path().join("disk").display().to_string());
        }
    }
}

/// fio's bandwidth.
fn moved(text: &str) -> Result<f64> {
    let start = text.find('{').context("no JSON")?;
    let json: Value = serde_json::from_str(text.get(start..).unwrap_or_default())?;
    let bytes = json.pointer("/jobs/0/read/bw_bytes").and_then(Value::as_f64);
    bytes.filter(|bytes| *bytes > 0.0).with_context(|| format!("fio's output: {text:.400}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bandwidth_is_parsed_and_a_missing_one_is_an_error() {
        let text = r#"a warning {"jobs": [{"read": {"bw_bytes": 4096}}]}"#;
        assert_eq!(moved(text).unwrap(), 4096.0);
        assert!(moved(&text.replace("4096", "0")).is_err());
        assert!(moved("fio: no such file").is_err());
    }
}
