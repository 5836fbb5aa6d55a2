//! System calls of the data path. strace counts them in a separate run, because it makes every
//! system call slower.

use shadowbell_testing::wait;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;
use shadowbell_guest::process::Process;

use crate::load::Load;
use crate::server::{Server, child, output};
use crate::settings::Settings;

/// Prefixes of the names of the driver's and the controller's threads.
const DRIVER: &str = "job";
const CONTROLLER: &str = "sb-worker";

/// System calls per I/O of each side.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct PerIo {
    pub(crate) driver: f64,
    pub(crate) controller: f64,
}

/// Counts the system calls per I/O of this load: the difference between the counts of a long and a
/// short run, divided by the difference between their numbers of I/Os. So the start and the end of
/// a run are not counted.
pub(crate) fn count(settings: &Settings, load: &Load<'_>) -> Result<PerIo> {
    let (few, many) = if settings.quick { (200, 1200) } else { (1000, 21_000) };
    let short = run(settings, load, few)?;
    let long = run(settings, load, many)?;
    // The difference is at least 0: if an I/O needs no system call, the short run may by chance
    // have more system calls than the long one.
    let more = |a: u64, b: u64| b.saturating_sub(a) as f64 / (many - few) as f64;
    Ok(PerIo { driver: more(short.0, long.0), controller: more(short.1, long.1) })
}

/// System calls of both sides in a run of `ios` I/Os.
fn run(settings: &Settings, load: &Load<'_>, ios: u64) -> Result<(u64, u64)> {
    let server = load.serve(settings)?;
    let directory = tempfile::tempdir()?;
    let file = |name: &str| directory.path().join(name);
    let mut attached = attach(&server, &file("server"))?;
    let mut command = child(Path::new("strace"));
    command
        .args(["-f", "-Y", "-qq", "-o"])
        .arg(file("bench"))
        .args(load.count(settings, &server, ios));
    output("strace shadowbell bench", command, Duration::from_secs(120))?;
    // SIGINT makes strace detach without an effect on the server.
    attached.signal(Signal::INT)?;
    attached.wait(wait::LIMIT)?;
    server.stop()?;
    let read =
        |name: &str| fs::read_to_string(file(name)).with_context(|| format!("strace: {name}"));
    Ok((calls(&read("bench")?, DRIVER), calls(&read("server")?, CONTROLLER)))
}

/// Starts strace on all threads of the server.
fn attach(server: &Server, out: &Path) -> Result<Process> {
    let id = server.id();
    let mut command: Command = child(Path::new("strace"));
    command.args(["-f", "-Y", "-qq", "-o"]).arg(out).args(["-p", &id.to_string()]);
    command.stderr(std::process::Stdio::null());
    let mut strace = Process::spawn("strace", &mut command)?;
    let deadline = wait::deadline();
    while !is_traced(id)? {
        if strace.ended()?.is_some() || Instant::now() > deadline {
            bail!(
                "strace cannot attach to the server: run as root, or set kernel.yama.ptrace_scope to 0"
            );
        }
        wait::pause();
    }
    Ok(strace)
}

/// True if every thread of the process has a tracer.
fn is_traced(pid: u32) -> Result<bool> {
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let status = fs::read_to_string(task?.path().join("status"))?;
        let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"));
        if tracer.is_none_or(|tracer| tracer.trim() == "0") {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Number of system calls of the threads whose names begin with `thread`. A line is `123<name>
/// call(...) = 0`. If a line of another thread interrupts the line of a system call, its second
/// part is not counted.
fn calls(trace: &str, thread: &str) -> u64 {
    let of_thread = |line: &&str| {
        line.split_once('<').is_some_and(|(id, rest)| {
            id.bytes().all(|b| b.is_ascii_digit()) && rest.starts_with(thread)
        })
    };
    let is_call = |line: &&str| {
        let what = line.split_once("> ").map_or("", |(_, rest)| rest.trim_start());
        what.starts_with(|c: char| c.is_ascii_lowercase())
    };
    trace.lines().filter(of_thread).filter(is_call).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_once_and_by_thread() {
        let trace = "\
            101<shadowbell> execve(\"a\", [\"b\"], 0x1 /* 5 vars */) = 0\n\
            102<job0> sched_yield() = 0\n\
            102<job0> ppoll([{fd=5, events=POLLIN}], 1, NULL, NULL, 8 <unfinished ...>\n\
            103<sb-worker0> epoll_wait(3, [], 8, 0) = 0\n\
            102<job0> <... ppoll resumed>)     = 1 ([{fd=5, revents=POLLIN}])\n\
            102<job0> --- SIGUSR1 {si_signo=SIGUSR1} ---\n\
            102<job0> +++ exited with 0 +++\n";
        assert_eq!((calls(trace, DRIVER), calls(trace, CONTROLLER)), (2, 1));
        assert_eq!(calls("", DRIVER), 0);
    }

    #[test]
    fn this_process_is_not_traced() {
        assert!(!is_traced(std::process::id()).unwrap());
    }
}
