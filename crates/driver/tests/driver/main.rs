//! The driver against a controller that a test controls.

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

/// Options that do not make a test wait for long.
fn options() -> AttachOptions {
    AttachOptions {
        queue_depth: 16,
        timeouts: Timeouts {
            ready: Some(Duration::from_millis(50)),
            admin: Duration::from_millis(400),
            io: Duration::from_millis(80),
            shutdown: Duration::from_millis(50),
        },
        // Otherwise a fake that holds commands back would not be left alone.
        recovery: Recovery::OFF,
        ..AttachOptions::default()
    }
}

fn attach(fake: &Fake) -> Controller {
    Controller::attach(fake.transport(), &options()).unwrap()
}
