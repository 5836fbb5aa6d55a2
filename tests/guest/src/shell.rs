//! `cargo xtask shell`: commands in a guest.

use std::io::BufRead;
use std::time::Duration;

use anyhow::Result;
use shadowbell_guest::{Kernel, RunDir};

use crate::Setup;

/// Boots a guest with a new disk of 1 GiB, and runs the commands, or each line of standard input
/// if there are none.
pub fn run(setup: &Setup, kernel: Kernel, commands: Vec<String>) -> Result<()> {
    let run = RunDir::new(setup.directory())?;
    let image = run.image("disk.img", 1 << 30)?;
    let disk = setup.disk(&run, &image)?;
    let mut guest = setup.boot(&run, kernel, vec![disk.device.clone()], |_| {})?;
    let mut one = |command: &str| -> Result<()> {
        let output = guest.run(command, Duration::from_secs(600))?;
        print!("{}", output.text);
        if output.code != 0 {
            eprintln!("[exit code {}]", output.code);
        }
        Ok(())
    };
    if commands.is_empty() {
        for line in std::io::stdin().lock().lines() {
            one(&line?)?;
        }
    }
    for command in commands {
        one(&command)?;
    }
    guest.power_off(Duration::from_secs(60))?;
    disk.stop()
}
