//! Serves a 64 MiB memory disk as an NVMe controller, at a vfio-user socket:
//!
//! ```sh
//! cargo run --release --example serve -- /tmp/nvme0.sock
//! ```
//!
//! QEMU (10.1 or later) attaches the controller with `-device '{"driver": "vfio-user-pci",
//! "socket": {"type": "unix", "path": "/tmp/nvme0.sock"}}'`. The guest's memory must be shared:
//! `-object memory-backend-memfd,id=mem,size=2G,share=on -machine memory-backend=mem`.

use shadowbell_controller::config::uuid_from;
use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Pool, PoolOptions};
use shadowbell_frontend::ControllerDevice;
use shadowbell_vfio_user::{Listener, Reactor};
use std::error::Error;
use std::sync::Arc;

fn main() -> Result<(), Box<dyn Error>> {
    let Some(path) = std::env::args_os().nth(1) else {
        return Err("usage: serve SOCKET".into());
    };

    // The controller has one namespace, and two I/O threads execute its commands.
    let disk = shadowbell_disk_file::open("mem:64MiB")?;
    let namespace = NamespaceConfig { uuid: uuid_from("an example"), disk };
    let config = Config { namespaces: vec![namespace], ..Config::default() };
    let pool = Pool::start(&PoolOptions { workers: 2, ..PoolOptions::default() })?;
    let controller = Controller::new(config, pool, Carrier::default())?;

    // The device is the PCI function of the controller. A VMM connects to the listener's socket.
    let events = Arc::new(|event| println!("client: {event:?}"));
    let device = ControllerDevice::new(controller, events)?;
    let mut reactor = Reactor::new(Default::default())?;
    reactor.add(Listener::bind(&path)?, Box::new(device))?;
    println!("ready at {}", path.display());
    reactor.run()?;
    Ok(())
}
