//! The driver against a fake controller.

mod admin;
mod attach;
mod detach;
mod driven;
mod fake;
mod futures;
mod metadata;
mod queue;
mod recovery;
#[cfg(feature = "vfio-user")]
mod vfio_user;

use fake::Fake;
use shadowbell_driver::{AttachOptions, Controller, Recovery, Timeouts};
use std::time::Duration;

/// Options with short timeouts.
fn options() -> AttachOptions {
    AttachOptions {
        queue_depth: 16,
        timeouts: Timeouts {
            ready: Some(Duration::from_millis(50)),
            admin: Duration::from_millis(400),
            io: Duration::from_millis(80),
            shutdown: Duration::from_millis(50),
        },
        // Recovery would interfere with commands that the fake holds.
        recovery: Recovery::OFF,
        ..AttachOptions::default()
    }
}

fn attach(fake: &Fake) -> Controller {
    Controller::attach(fake.transport(), &options()).unwrap()
}
