//! The suite `spdk`: this project's driver and controller compared with SPDK's.
//!
//! This controller is compared with SPDK's vfio-user target (`nvmf_tgt`), and this driver with
//! SPDK's client (`spdk_nvme_perf`). All four pairs are measured in turns, with driver and
//! controller pinned to one CPU each. So each contestant is also measured with the same partner as
//! SPDK's.

mod compare;
mod huge_pages;
mod perf;
mod target;
mod tree;

pub(crate) use compare::run;
pub(crate) use huge_pages::HugePages;
pub(crate) use tree::{HOW_TO_BUILD, Tree};
