//! Writes a block and reads it back, on a controller that this program makes itself:
//!
//!     cargo run -p shadowbell-driver --example in_process
//!     cargo run -p shadowbell-driver --example in_process -- disk.img
//!
//! Without a disk to keep its blocks in, the controller keeps them in memory.

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
    let ssd = InProcess::over(shadowbell_backend::open(&disk)?)?;
    // Only a disk of our own making is written to.
    tour::take(Arc::new(ssd), disk.starts_with("mem:"))
}
