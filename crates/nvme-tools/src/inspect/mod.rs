//! Verbs that query a controller, with the names of nvme-cli.
//!
//! `list`, `id-ctrl`, `id-ns`, `smart-log`, `error-log`, `get-feature`, `device-self-test`,
//! `self-test-log`, `telemetry-log`, `persistent-event-log`, `sanitize-log` and `ana-log` attach
//! the driver, send admin commands, and detach. A controller has one host at a time. While a
//! virtual machine is attached, most verbs query its server over the control socket instead
//! (`subject`). `get-feature`, `device-self-test`, `telemetry-log` and `persistent-event-log`
//! always attach, and so do all verbs if the server has no control socket in the usual directory:
//! they fail while another client is connected.

mod controller;
mod diagnostics;
mod feature;
mod fields;
mod list;
mod logs;
mod namespace;
mod subject;

pub use controller::id_ctrl;
pub use diagnostics::{
    SelfTestArgs, TelemetryArgs, device_self_test, persistent_event_log, self_test_log,
    telemetry_log,
};
pub use feature::{FeatureArgs, get_feature};
pub use fields::Args;
pub use list::{ListArgs, list};
pub use logs::{ErrorLogArgs, ana_log, error_log, sanitize_log, smart_log};
pub use namespace::id_ns;
