//! Namespaces that are added, removed and changed while a host uses the controller.

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
