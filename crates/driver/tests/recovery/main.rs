//! Recovery of the driver from injected faults of the real controller.

#[path = "../common/direct.rs"]
mod direct;
mod disk;
mod model;
mod served;
mod soak;
mod steps;

use ::shadowbell_disk::Disk;
use shadowbell_controller::faults::{Faults, Injected};
use shadowbell_controller::{
    Carrier, Config, Controller as Emulated, NamespaceConfig, Pool, PoolOptions,
};
use shadowbell_driver::{AttachOptions, Recovery, Timeouts};
use shadowbell_testing::wait::LIMIT;
use std::sync::Arc;
use std::time::Duration;

fn emulated(disk: Arc<dyn Disk>) -> Emulated {
    let pool = Pool::start(&PoolOptions { workers: 1, ..PoolOptions::default() }).unwrap();
    let namespace =
        NamespaceConfig { disk, uuid: shadowbell_controller::config::uuid_from("a test") };
    let config = Config { namespaces: vec![namespace], io_queues: 4, ..Config::default() };
    Emulated::new(config, pool, Carrier::default()).unwrap()
}

/// Options with time limits that only injected faults exceed: they are long enough for a controller
/// that gets no processor for a while on a busy machine.
fn options() -> AttachOptions {
    AttachOptions {
        // Only injected faults exceed these limits.
        timeouts: Timeouts {
            ready: Some(Duration::from_secs(1)),
            admin: Duration::from_secs(2),
            io: Duration::from_millis(800),
            shutdown: LIMIT,
        },
        recovery: Recovery { watch: Duration::from_millis(5), ..Recovery::default() },
        ..AttachOptions::default()
    }
}

fn inject(controller: &Emulated, faults: &str) -> Injected {
    controller.inject(faults.parse::<Faults>().unwrap())
}
