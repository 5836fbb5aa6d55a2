//! The driver against a fake controller.

mod admin;
mod attach;
mod detach;
mod fake;
mod futures;
mod metadata;
mod queue;
mod recovery;
#[cfg(feature = "vfio-user")]
mod vfio_user;

use fake::Fake;
use shadowbell_driver::{AttachOptions, Controller, Recovery, Timeouts};
use shadowbell_testing::wait::LIMIT;
use std::time::Duration;

/// Options with long time limits, which a busy machine does not exceed.
fn options() -> AttachOptions {
    AttachOptions {
        queue_depth: 16,
        timeouts: Timeouts { ready: Some(LIMIT), admin: LIMIT, io: LIMIT, shutdown: LIMIT },
        // Recovery would end commands that the fake controller holds.
        recovery: Recovery::OFF,
        ..AttachOptions::default()
    }
}

/// Options with short time limits, for tests in which a limit expires.
fn impatient() -> AttachOptions {
    // The limits are short, because tests wait until they expire.
    let timeouts = Timeouts {
        ready: Some(Duration::from_millis(50)),
        admin: Duration::from_millis(400),
        io: Duration::from_millis(80),
        shutdown: Duration::from_millis(50),
    };
    AttachOptions { timeouts, ..options() }
}

fn attach(fake: &Fake) -> Controller {
    attach_with(fake, &options())
}

fn attach_with(fake: &Fake, options: &AttachOptions) -> Controller {
    Controller::attach(fake.transport(), options).unwrap()
}
