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

/// What these processes hold now.
pub(crate) fn usage(pids: &[u32]) -> Result<Usage> {
    pids.iter().try_fold(Usage::default(), |sum, pid| {
        let one = usage_of(*pid)?;
        Ok(Usage {
            memory: sum.memory + one.memory,
            page_tables: sum.page_tables + one.page_tables,
            waited: sum.waited + one.waited,
        })
    })
}

fn usage_of(pid: u32) -> Result<Usage> {
    let path = format!("/proc/{pid}/status");
    let status = fs::read_to_string(&path).context(path)?;
    let field = |name: &str| {
        let rest = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        rest.trim().trim_end_matches(" kB").parse::<u64>().unwrap_or(0) * 1024
    };
    Ok(Usage { memory: field("RssAnon:"), page_tables: field("VmPTE:"), waited: waited(pid) })
}

/// Threads of which it is asked, often, for how long they have waited for a processor.
#[derive(Debug)]
pub(crate) struct Threads(Vec<fs::File>);

impl Threads {
    /// Those of a process whose names begin so.
    fn named(pid: u32, names: &[&str]) -> Result<Self> {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).context("the server's threads")?;
        let is_one = |task: &fs::DirEntry| {
            let name = fs::read_to_string(task.path().join("comm")).unwrap_or_default();
            names.iter().any(|start| name.starts_with(start))
        };
        let found = tasks.flatten().filter(is_one);
        let files = found.map(|task| fs::File::open(task.path().join("schedstat")));
        Ok(Self(files.collect::<std::io::Result<_>>()?))
    }

    /// The calling thread.
    pub(crate) fn calling() -> Result<Self> {
        Ok(Self(vec![fs::File::open("/proc/thread-self/schedstat")?]))
    }

    /// For how long, ever. What has ended does not count any more.
    pub(crate) fn waited(&self) -> Duration {
        use std::os::unix::fs::FileExt;
        let nanos = self.0.iter().filter_map(|file| {
            let mut text = [0; 64];
            let len = file.read_at(&mut text, 0).ok()?;
            let text = std::str::from_utf8(text.get(..len)?).ok()?;
            text.split_whitespace().nth(1)?.parse::<u64>().ok()
        });
        Duration::from_nanos(nanos.sum())
    }
}

/// The threads of a server that has one client: it waits for these.
#[derive(Debug)]
pub(crate) struct Serving {
    /// Those that serve its reads: the workers, and what an export has for that client. Not the
    /// reactor, which may be ready to run while nobody waits for it.
    pub(crate) io: Threads,
    /// The reactor, which answers for the registers.
    pub(crate) registers: Threads,
}

impl Serving {
    pub(crate) fn of(pid: u32) -> Result<Self> {
        let io = Threads::named(pid, &["sb-worker", "nbd-"])?;
        Ok(Self { io, registers: Threads::named(pid, &["sb-reactor"])? })
    }
}

fn waited(pid: u32) -> Duration {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return Duration::ZERO };
    let texts = tasks.flatten().filter_map(|t| fs::read_to_string(t.path().join("schedstat")).ok());
    let nanos = texts.filter_map(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok());
    Duration::from_nanos(nanos.sum())
}
