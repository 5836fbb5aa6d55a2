//! What a controller says of itself: nvme-cli's verbs, under its names.
//!
//! `list`, `id-ctrl`, `id-ns`, `smart-log`, `error-log` and `get-feature` attach the driver, ask
//! over the admin queue, and leave. A controller has one host at a time. While a virtual machine
//! has it, its server is asked instead, by its control socket (`subject`); but `get-feature` has to
//! wait, and so have all of them where no such socket is found.

mod controller;
mod feature;
mod fields;
mod list;
mod logs;
mod namespace;
mod query;
mod subject;

pub(crate) use controller::id_ctrl;
pub(crate) use feature::{FeatureArgs, get_feature};
pub(crate) use list::{ListArgs, list};
pub(crate) use logs::{ErrorLogArgs, error_log, smart_log};
pub(crate) use namespace::id_ns;
pub(crate) use query::Args;
