//! What the system says about the server meanwhile.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

/// What a process holds and has used.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    /// Memory of its own and its page tables, in bytes. What it has mapped of its clients is
    /// theirs.
    pub(crate) memory: u64,
    pub(crate) page_tables: u64,
    /// How long threads of it were ready to run and had no processor: what the machine, and not the
    /// server, is to blame for.
    pub(crate) waited: Duration,
}

/// What a process holds now.
pub(crate) fn usage(pid: u32) -> Result<Usage> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).context(path)?;
    let field = |name: &str| {
        let rest = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        rest.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024
    };
    Ok(Usage { memory: field("RssAnon:"), page_tables: field("VmPTE:"), waited: waited(pid) })
}

fn waited(pid: u32) -> Duration {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return Duration::ZERO };
    let texts = tasks.flatten().filter_map(|t| fs::read_to_string(t.path().join("schedstat")).ok());
    let nanos = texts.filter_map(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
    Duration::from_nanos(nanos.sum())
}
