//! Namespaces that come, go and change while a host uses the controller.

#[path = "../common/mod.rs"]
mod common;

mod add;
mod host;
mod late;
mod model;
mod remove;
mod reset;
mod resize;
mod successor;
