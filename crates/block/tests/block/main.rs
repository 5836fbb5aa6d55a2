//! Integration tests of the block device, on disks in memory.

mod behaviour;
mod copy;
mod direct;
mod metadata;
mod model;
