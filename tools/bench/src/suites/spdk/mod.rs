//! The suite `spdk`: this project's driver and controller compared with SPDK's.
//!
//! The controllers are Shadowbell's and SPDK's vfio-user target (`nvmf_tgt`). The drivers are
//! Shadowbell's and SPDK's client (`spdk_nvme_perf`). All four pairs are measured in each round,
//! with driver and controller pinned to one CPU each. So Shadowbell's driver and SPDK's are
//! compared with the same controller, and the controllers with the same driver.

mod compare;
mod huge_pages;
mod perf;
mod target;
mod tree;

pub(crate) use compare::run;
pub(crate) use huge_pages::HugePages;
pub(crate) use tree::{HOW_TO_BUILD, Tree};
