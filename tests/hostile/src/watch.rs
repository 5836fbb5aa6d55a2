//! Resource usage of the server's processes and threads, from /proc.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

/// Memory, CPU wait and descriptors of processes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    /// Private memory and page tables, in bytes. Mapped memory of clients is not included.
    pub memory: u64,
    pub page_tables: u64,
    /// Time for which threads were runnable without a CPU. The load of the machine causes it, not
    /// the server.
    pub waited: Duration,
}

/// Current usage of these processes.
pub fn usage(pids: &[u32]) -> Result<Usage> {
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

/// Threads whose time in the run queue is read often, so their `schedstat` files stay open.
#[derive(Debug)]
pub struct Threads(Vec<fs::File>);

impl Threads {
    /// Threads of a process whose names begin with one of `names`.
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
    pub fn calling() -> Result<Self> {
        Ok(Self(vec![fs::File::open("/proc/thread-self/schedstat")?]))
    }

    /// Total time for which the threads were runnable without a CPU. Ended threads are not
    /// included.
    pub fn waited(&self) -> Duration {
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

/// Threads of a server that the victim waits for.
#[derive(Debug)]
pub struct Serving {
    /// Threads that serve the victim's reads: the I/O threads, and the threads of an export for
    /// this client. The reactor is excluded, because no read waits for it.
    pub io: Threads,
    /// The reactor, which serves register accesses.
    pub registers: Threads,
}

impl Serving {
    pub fn of(pid: u32) -> Result<Self> {
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
