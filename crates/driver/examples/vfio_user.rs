//! Reads the first block of a controller behind a vfio-user socket:
//!
//!     shadowbell serve --socket /run/vm0.sock mem:1GiB &
//!     cargo run -p shadowbell-driver --example vfio_user -- /run/vm0.sock
//!
//! Works with any vfio-user server, for example with SPDK's `nvmf_tgt`.

#[path = "common/tour.rs"]
mod tour;

use shadowbell_driver::VfioUser;
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

fn main() -> ExitCode {
    tour::end(run())
}

fn run() -> Result<(), Box<dyn Error>> {
    let socket = std::env::args().nth(1).ok_or("which socket? for example /run/vm0.sock")?;
    let ssd = VfioUser::connect(&socket, Duration::from_secs(5))?;
    tour::take(Arc::new(ssd), false)
}
