//! The block device on the emulated controller, both ends in one process.

mod behaviour;
mod copy;
mod direct;
mod metadata;
mod model;
