//! Controllers with attached clients that are idle or nearly idle.

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

/// Process `shadowbell attach-many`, which runs until its standard input is closed.
pub(crate) struct IdleClients {
    process: Process,
    input: PipeWriter,
    directory: TempDir,
}

impl IdleClients {
    /// Attaches to the controllers with the indexes `which`.
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

    /// Waits for line `index` of the process's output.
    pub(crate) fn line(&mut self, index: usize) -> Result<Value> {
        let deadline = wait::deadline();
        loop {
            let text = fs::read_to_string(self.path("out"))?;
            // The part after the last line feed is an incomplete line, or empty.
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
                bail!("shadowbell attach-many prints no line");
            }
            wait::pause();
        }
    }

    /// Detaches from all controllers.
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
