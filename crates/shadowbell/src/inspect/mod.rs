//! What a controller says of itself: nvme-cli's verbs, under its names.
//!
//! `list`, `id-ctrl`, `id-ns`, `smart-log`, `error-log`, `get-feature`, `device-self-test`,
//! `self-test-log`, `telemetry-log`, `persistent-event-log`, `sanitize-log` and `ana-log` attach
//! the driver, ask over the admin queue, and leave. A controller has one host at a time. While a
//! virtual machine has it, its server is asked instead, by its control socket (`subject`); but
//! those that change something, and those about it, have to wait, and so have all of them where no
//! such socket is found.

mod ana;
mod controller;
mod diagnostics;
mod feature;
mod fields;
mod list;
mod logs;
mod namespace;
mod query;
mod sanitize;
mod subject;

pub(crate) use ana::ana_log;
pub(crate) use controller::id_ctrl;
pub(crate) use diagnostics::{
    SelfTestArgs, TelemetryArgs, device_self_test, persistent_event_log, self_test_log,
    telemetry_log,
};
pub(crate) use feature::{FeatureArgs, get_feature};
pub(crate) use list::{ListArgs, list};
pub(crate) use logs::{ErrorLogArgs, error_log, smart_log};
pub(crate) use namespace::id_ns;
pub(crate) use query::Args;
pub(crate) use sanitize::sanitize_log;
