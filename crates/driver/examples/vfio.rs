//! Reads the first block of a PCI device of this machine, through Linux VFIO:
//!
//!     shadowbell bind 0000:01:00.0
//!     cargo run -p shadowbell-driver --example vfio -- 0000:01:00.0
//!
//! `bind` detaches the kernel's NVMe driver from the device and binds the device to vfio-pci;
//! `unbind` returns the device to the kernel's driver. This example only reads.

#[path = "common/tour.rs"]
mod tour;

use shadowbell_driver::{PciAddress, Vfio};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    tour::end(run())
}

fn run() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).ok_or("which device? for example 0000:01:00.0")?;
    let ssd = Vfio::open(address.parse::<PciAddress>()?)?;
    tour::take(Arc::new(ssd), false)
}
