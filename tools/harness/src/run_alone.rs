//! Runner of test programs: fails a test program that leaves a process behind.
//!
//! `cargo xtask test` starts each test program through this runner. The runner is the child
//! subreaper of all descendants of the test program, so it also detects daemons.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, WaitOptions, WaitStatus, getpid, set_child_subreaper, wait};

use crate::processes;

/// Runs a test program and waits for all its descendants. Fails if the program fails, or if a
/// descendant still runs `grace` after the program's end.
pub fn run(command: &[OsString], grace: Duration) -> Result<ExitCode> {
    let (program, arguments) = command.split_first().context("no test program is named")?;
    set_child_subreaper(Some(getpid())).context("PR_SET_CHILD_SUBREAPER")?;
    let child = Command::new(program).args(arguments).spawn();
    let child = child.with_context(|| program.display().to_string())?;
    let child = i32::try_from(child.id()).ok().and_then(Pid::from_raw).context("no process")?;
    // The runner also reaps orphans while the program runs, because a test may wait until an orphan
    // no longer exists.
    let status = loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, status))) if pid == child => break status,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error).context("waiting for the test program"),
        }
    };
    let name = Path::new(program).file_name().unwrap_or(program).display();
    let deadline = Instant::now() + grace;
    loop {
        match wait(WaitOptions::NOHANG) {
            Err(rustix::io::Errno::CHILD) => return Ok(exit_code(&name.to_string(), status)),
            Ok(Some(_)) | Err(_) => {}
            Ok(None) if Instant::now() < deadline => thread::sleep(Duration::from_millis(5)),
            Ok(None) => break,
        }
    }
    let left = processes::descendants(std::process::id());
    println!("\nprocesses that {name} has left behind:\n{}", processes::list(&left));
    println!("test {name}: no process is left behind ... FAILED");
    end_descendants();
    Ok(ExitCode::FAILURE)
}

/// Kills all descendants of this process. A process may fork between the search and its kill; its
/// children then become children of this process. So the search is repeated until no descendant is
/// left.
fn end_descendants() {
    // The number of searches is limited, because the kernel cannot end a process that waits for a
    // device.
    for _ in 0..1000 {
        processes::kill(&processes::descendants(std::process::id()));
        loop {
            match wait(WaitOptions::NOHANG) {
                Err(rustix::io::Errno::CHILD) => return,
                Ok(Some(_)) | Err(_) => {}
                // The kernel needs a moment to end a killed process.
                Ok(None) => break thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

fn exit_code(name: &str, status: WaitStatus) -> ExitCode {
    if let Some(signal) = status.terminating_signal() {
        println!("test {name}: ended by signal {signal} ... FAILED");
    }
    let code = status.exit_status().and_then(|code| u8::try_from(code).ok());
    ExitCode::from(code.unwrap_or(101))
}
