//! Controllers that are attached and idle, or nearly.

use shadowbell_testing::wait;
use std::fs::{self, File};
use std::io::PipeWriter;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;
use shadowbell_guest::process::{Process, describe};
use tempfile::TempDir;

use crate::server::{Server, child};
use crate::settings::Settings;

/// `shadowbell attach-many`: it goes on until its standard input ends.
pub(crate) struct Held {
    process: Process,
    input: PipeWriter,
    directory: TempDir,
}

impl Held {
    /// Attaches to these controllers of the server.
    pub(crate) fn start(
        settings: &Settings,
        server: &Server,
        which: Range<usize>,
        options: &[String],
    ) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let (reader, input) = std::io::pipe()?;
        let mut command = child(&settings.binary);
        command.arg("attach-many").args(which.map(|n| server.target(n))).args(options);
        command.stdin(reader).stdout(File::create(directory.path().join("out"))?);
        command.stderr(File::create(directory.path().join("err"))?);
        let process = Process::spawn("shadowbell attach-many", &mut command)?;
        Ok(Self { process, input, directory })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Waits for a line of what it prints.
    pub(crate) fn line(&mut self, index: usize) -> Result<Value> {
        let deadline = wait::deadline();
        loop {
            let text = fs::read_to_string(self.path("out"))?;
            // The last piece has no end of line yet, or is empty.
            let lines: Vec<&str> = text.split('\n').collect();
            if lines.len() > index + 1
                && let Some(line) = lines.get(index)
            {
                return serde_json::from_str(line).with_context(|| format!("hold: {line}"));
            }
            if let Some(status) = self.process.ended()? {
                let complaint = fs::read_to_string(self.path("err")).unwrap_or_default();
                bail!("shadowbell attach-many ended ({}): {complaint}", describe(status));
            }
            if Instant::now() > deadline {
                bail!("shadowbell attach-many says nothing");
            }
            wait::pause();
        }
    }

    /// Leaves them.
    pub(crate) fn end(self) -> Result<()> {
        let Self { mut process, input, directory } = self;
        drop(input);
        let status = process.wait(Duration::from_secs(60))?;
        if !status.success() {
            let complaint = fs::read_to_string(directory.path().join("err")).unwrap_or_default();
            bail!("shadowbell attach-many: {}: {complaint}", describe(status));
        }
        Ok(())
    }
}
