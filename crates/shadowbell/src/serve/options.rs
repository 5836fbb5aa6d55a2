//! What may be asked of `serve`.

use crate::exit::bad_input;
use crate::plan::{ControllerPlan, DiskPlan, Doorbells};
use crate::serve::statistics;
use anyhow::{Context, anyhow};
use serde::Deserialize;
use shadowbell_controller::{Polling, PoolOptions};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Workers that a process may have: the pool counts them in a byte.
pub const MAX_WORKERS: u16 = 254;
/// The longest that a worker polls for nothing, in microseconds: after a second it does not matter
/// any more what a wakeup costs.
pub const MAX_POLL_US: u32 = 1_000_000;
/// Trace records of each worker if nothing is said: 8 MiB.
pub const TRACE_RECORDS: u32 = 1 << 18;

/// Serve disks as an NVMe controller to a virtual machine, over a vfio-user socket
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = AFTER_HELP)]
pub struct Args {
    /// A namespace each: disk.img, /dev/sdb, mem:1GiB, null:1TiB, or one of another controller,
    /// nvme://0000:01:00.0/1, vfio-user:/run/ssd.sock/1; options as in
    /// `disk.img?block-size=4096&read-only=on`
    #[arg(value_name = "DISK", required_unless_present = "config")]
    disks: Vec<String>,

    /// Where to listen; a directory for SPDK (the socket is `cntrl` in there)
    #[arg(long, value_name = "PATH", required_unless_present = "config")]
    socket: Option<PathBuf>,

    /// Serve many controllers, as a TOML file describes them; see below
    #[arg(long, value_name = "FILE", conflicts_with_all = ["disks", "socket", "controller", "pool"])]
    config: Option<PathBuf>,

    #[command(flatten)]
    controller: ControllerArgs,

    #[command(flatten)]
    pool: PoolArgs,

    /// Record every decision about a doorbell in this file, for `shadowbell trace`
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,

    /// How many records to keep of each worker; older ones give way
    #[arg(long, value_name = "N", requires = "trace", value_parser = clap::value_parser!(u32).range(1024..=1 << 24))]
    trace_records: Option<u32>,

    /// Write counters to this file, at the end and on SIGUSR1
    #[arg(long, value_name = "FILE")]
    stats_json: Option<PathBuf>,

    /// Let `shadowbell top` of the same user look at the counters, over a socket here
    #[arg(long, value_name = "PATH")]
    stats_socket: Option<PathBuf>,

    #[cfg(feature = "faults")]
    #[command(flatten)]
    pub(super) faults: super::faults::FaultArgs,
}

const AFTER_HELP: &str = "\
SIGINT and SIGTERM end the service; a second one does not wait for the guests. \
One of them that whoever starts it has set to be ignored stays so, as SIGINT is in a script's \
`shadowbell serve ... &`, and SIGHUP under nohup: SIGTERM is what ends it then. \
SIGUSR1 writes the counters.

A configuration file:

  trace = \"/var/tmp/shadowbell.trace\"        # all of these lines may be left out
  stats-json = \"/run/shadowbell.json\"
  stats-socket = \"/run/shadowbell.stats\"    # for `shadowbell top`
  workers = 2                                # threads that do the I/O
  pin = [2, 3]                               # processors to pin them to
  poll = \"adaptive\"                          # or \"always\", \"never\"
  poll-max-us = 100

  [[controller]]
  socket = \"/run/vm0.sock\"
  disks = [\"vm0.img\", { disk = \"mem:1GiB\", uuid = \"0190163d-8694-739b-aea5-966c26f8ad91\" }]

  [[controller]]
  socket = \"/run/vm1.sock\"
  disks = [\"/dev/vg/vm1\"]
  serial = \"VM1\"
  model = \"Shadowbell NVMe Controller\"
  doorbells = \"shadow\"                       # or \"mmio\", \"mapped\"
  queues = 16
  queue-entries = 1024
  max-transfer = \"1MiB\"
  read-only = false

Exit status:
  0  ended by a signal
  1  it can not go on, or a disk may have lost what it was given
  2  it can not be served as asked: the command line, the file, a disk or a path";

/// What a controller is like.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(id = "controller", multiple = true)]
pub struct ControllerArgs {
    /// How doorbells come to the controller
    #[arg(long, value_enum, value_name = "HOW", default_value_t, hide_default_value = false)]
    doorbells: Doorbells,

    /// The same as `--doorbells mmio`
    #[arg(long, conflicts_with = "doorbells")]
    no_shadow_doorbells: bool,

    /// Most I/O queue pairs of the guest, 1 to 64 [default: 64]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    queues: Option<u16>,

    /// Most entries of a queue, 2 to 4096 [default: 4096]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=4096))]
    queue_entries: Option<u32>,

    /// The largest transfer of one command, a power of two from 1MiB to 16MiB [default: 1MiB]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    max_transfer: Option<u64>,

    /// Serial number, at most 20 characters [default: made from the path of the socket]
    #[arg(long, value_name = "TEXT")]
    serial: Option<String>,

    /// Model number, at most 40 characters
    #[arg(long, value_name = "TEXT")]
    model: Option<String>,

    /// Take no writes, whatever the disks allow
    #[arg(long)]
    read_only: bool,
}

/// The threads that do the work.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(id = "pool", multiple = true)]
pub struct PoolArgs {
    /// Threads that do the I/O [default: one for every two processors, or as many as --pin names]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_WORKERS)))]
    workers: Option<u16>,

    /// Pin the workers to these processors, in order: 2,3 or 4-7
    #[arg(long, value_name = "CPUS", value_parser = processors)]
    pin: Option<Processors>,

    /// When a worker without work sleeps: after a time that adapts, never, or at once
    #[arg(long, value_enum, value_name = "WHEN")]
    poll: Option<Poll>,

    /// The longest that a worker polls before it sleeps, in microseconds [default: 100]
    #[arg(long, value_name = "US", value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_POLL_US)))]
    poll_max: Option<u32>,
}

/// When a worker without work sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Poll {
    /// After polling for a time that grows while that pays, and shrinks while it does not
    #[default]
    Adaptive,
    /// Never: a processor per worker
    Always,
    /// At once
    Never,
}

/// Processors, in the order in which they were named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Processors(pub Vec<usize>);

/// What is to be served, checked as far as that is possible without opening anything.
#[derive(Debug)]
pub struct ServerPlan {
    /// The controllers.
    pub controllers: Vec<Served>,
    /// Their workers.
    pub pool: PoolOptions,
    /// Where to record doorbells, and how many records of each worker.
    pub trace: Option<(PathBuf, u32)>,
    /// Where to write counters.
    pub stats_json: Option<PathBuf>,
    /// Where `top` may ask for them.
    pub stats_socket: Option<PathBuf>,
}

/// A controller and its socket.
#[derive(Debug)]
pub struct Served {
    /// Where it listens, as it was written.
    pub socket: PathBuf,
    /// What it is.
    pub controller: ControllerPlan,
    /// Where it was asked for, if that helps (`vms.toml:12`).
    pub origin: Option<String>,
}

impl Served {
    /// The path of the socket from the root: it names the controller for good.
    #[must_use]
    pub fn place(&self) -> PathBuf {
        let path = std::path::absolute(&self.socket).unwrap_or_else(|_| self.socket.clone());
        // Without the symbolic links of the directory, if there is one.
        match (path.parent().map(Path::canonicalize), path.file_name()) {
            (Some(Ok(directory)), Some(name)) => directory.join(name),
            _ => path,
        }
    }
}

impl Args {
    /// What is to be served.
    ///
    /// # Errors
    /// The configuration file, or a combination of options, makes no sense.
    pub fn plan(self) -> anyhow::Result<ServerPlan> {
        let trace = self.trace.map(|path| (path, self.trace_records.unwrap_or(TRACE_RECORDS)));
        let mut plan = match self.config {
            Some(path) => crate::config::read(&path)?,
            None => ServerPlan {
                controllers: vec![Served {
                    socket: self.socket.unwrap_or_default(),
                    controller: self.controller.plan(self.disks),
                    origin: None,
                }],
                pool: self.pool.options()?,
                trace: None,
                stats_json: None,
                stats_socket: None,
            },
        };
        plan.trace = trace.or(plan.trace);
        plan.stats_json = self.stats_json.or(plan.stats_json);
        plan.stats_socket = self.stats_socket.or(plan.stats_socket);
        if let Some(path) = &plan.stats_json {
            let checked = check_output(path).and_then(|()| statistics::check(path));
            checked.context("--stats-json").map_err(bad_input)?;
        }
        if let Some((path, _)) = &plan.trace {
            check_output(path).context("--trace").map_err(bad_input)?;
        }
        Ok(plan)
    }
}

impl ControllerArgs {
    /// A controller with these disks.
    #[must_use]
    pub fn plan(self, disks: Vec<String>) -> ControllerPlan {
        ControllerPlan {
            disks: disks.into_iter().map(|disk| DiskPlan { disk, uuid: None }).collect(),
            serial: self.serial,
            model: self.model,
            queues: self.queues,
            queue_entries: self.queue_entries,
            max_transfer: self.max_transfer,
            doorbells: if self.no_shadow_doorbells { Doorbells::Mmio } else { self.doorbells },
            read_only: self.read_only,
        }
    }
}

impl PoolArgs {
    fn options(self) -> anyhow::Result<PoolOptions> {
        let pin = self.pin.map_or_else(Vec::new, |Processors(list)| list);
        pool(self.workers, pin, self.poll, self.poll_max).map_err(|why| bad_input(anyhow!(why)))
    }
}

/// The options of the pool, whoever gave them.
///
/// # Errors
/// A sentence about options that contradict each other.
pub fn pool(
    workers: Option<u16>,
    pin: Vec<usize>,
    poll: Option<Poll>,
    poll_max_us: Option<u32>,
) -> Result<PoolOptions, String> {
    let workers = match workers {
        None => pin.len(),
        Some(workers) if pin.len() > usize::from(workers) => {
            return Err(format!(
                "{} processors to pin to are too many for {workers} workers: name at most one for \
                 each",
                pin.len()
            ));
        }
        Some(workers) => workers.into(),
    };
    let polling = match (poll.unwrap_or_default(), poll_max_us) {
        (Poll::Adaptive, None) => Polling::default(),
        (Poll::Adaptive, Some(us)) => Polling::Adaptive(Duration::from_micros(us.into())),
        (Poll::Always, None) => Polling::Always,
        (Poll::Never, None) => Polling::Never,
        (Poll::Always | Poll::Never, Some(_)) => {
            return Err(
                "a longest time to poll makes sense with adaptive polling only: leave it out"
                    .into(),
            );
        }
    };
    Ok(PoolOptions { workers, polling, pin })
}

/// Reads `2,3` or `4-7` or both.
///
/// # Errors
/// A sentence about what can not be understood, or about a processor that this process has not.
pub fn processors(text: &str) -> Result<Processors, String> {
    let number = |text: &str| {
        let number = text.trim().parse::<usize>();
        number.map_err(|_| format!("`{text}` is no processor; write for example 2,3 or 4-7"))
    };
    let mut list = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (number(first)?, number(last)?);
        if first > last {
            return Err(format!("`{part}` is an empty range of processors"));
        }
        if last - first >= usize::from(MAX_WORKERS) {
            return Err(format!("`{part}` are more processors than there can be workers"));
        }
        list.extend(first..=last);
    }
    check_processors(&list)?;
    Ok(Processors(list))
}

/// Whether this process may use these processors, each once.
///
/// # Errors
/// A sentence about the first that is wrong.
pub fn check_processors(list: &[usize]) -> Result<(), String> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    if list.len() > usize::from(MAX_WORKERS) {
        return Err(format!("more than {MAX_WORKERS} processors"));
    }
    let available = sched_getaffinity(None).unwrap_or_default();
    for (n, cpu) in list.iter().enumerate() {
        if list.iter().take(n).any(|other| other == cpu) {
            return Err(format!("processor {cpu} is named twice"));
        }
        if *cpu >= CpuSet::MAX_CPU || !available.is_set(*cpu) {
            let all: Vec<_> = (0..CpuSet::MAX_CPU).filter(|cpu| available.is_set(*cpu)).collect();
            return Err(format!("this process has no processor {cpu}; it has {all:?}"));
        }
    }
    Ok(())
}

/// Reads a size.
fn size(text: &str) -> Result<u64, String> {
    shadowbell_backend::parse_size(text)
}

/// Whether a file can be created at `path`, as far as that can be known without doing it.
fn check_output(path: &Path) -> anyhow::Result<()> {
    if path.is_dir() {
        return Err(anyhow!("{} is a directory; give the path of a file", path.display()));
    }
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    if path.file_name().is_none() || !directory.is_dir() {
        return Err(anyhow!(
            "{} is in no directory: create {} first, or choose another path",
            path.display(),
            directory.display()
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_lists_and_ranges() {
        let available = rustix::thread::sched_getaffinity(None).unwrap();
        let mine = (0..).find(|cpu| available.is_set(*cpu)).unwrap();
        assert_eq!(processors(&mine.to_string()), Ok(Processors(vec![mine])));
        assert_eq!(processors(&format!("{mine}-{mine}")), Ok(Processors(vec![mine])));
        for (text, words) in [
            ("", "no processor"),
            ("a", "no processor"),
            ("0,", "no processor"),
            ("-1", "no processor"),
            ("3-2", "empty range"),
            ("0-100000", "more processors"),
            ("1000000", "has no processor 1000000"),
            (&format!("{mine},{mine}"), "twice"),
        ] {
            let error = processors(text).unwrap_err();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn contradictions_are_refused() {
        assert!(pool(Some(1), vec![0, 1], None, None).unwrap_err().contains("too many"));
        assert_eq!(pool(None, vec![0, 1], None, None).unwrap().workers, 2);
        for poll in [Poll::Always, Poll::Never] {
            assert!(pool(None, vec![], Some(poll), Some(5)).unwrap_err().contains("adaptive"));
        }
        let adaptive = pool(None, vec![], None, Some(5)).unwrap();
        assert_eq!(adaptive.polling, Polling::Adaptive(Duration::from_micros(5)));
    }
}
