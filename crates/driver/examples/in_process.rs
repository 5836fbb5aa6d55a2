//! Writes a block and reads it back, on a controller that this program creates:
//!
//!     cargo run -p shadowbell-driver --example in_process
//!     cargo run -p shadowbell-driver --example in_process -- disk.img
//!
//! Without an argument, the disk of the controller is in memory. A given disk is only read.

#[path = "common/tour.rs"]
mod tour;

use shadowbell_frontend::InProcess;
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    tour::end(run())
}

fn run() -> Result<(), Box<dyn Error>> {
    let disk = std::env::args().nth(1).unwrap_or_else(|| "mem:64MiB".to_owned());
    let ssd = InProcess::over(shadowbell_disk_file::open(&disk)?)?;
    // A disk that the user has given is not written to.
    tour::take(Arc::new(ssd), disk.starts_with("mem:"))
}
