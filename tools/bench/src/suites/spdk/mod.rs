//! The suite `spdk`: this project's ends next to SPDK's.
//!
//! This controller is compared with SPDK's vfio-user target (`nvmf_tgt`), and this driver with
//! its client (`spdk_nvme_perf`). All four pairs are measured in turns, each end pinned to its
//! own CPU, so each end is compared with SPDK's end and the same partner.

mod compare;
mod huge_pages;
mod perf;
mod target;
mod tree;

pub(crate) use compare::run;
pub(crate) use huge_pages::HugePages;
pub(crate) use tree::{HOW_TO_BUILD, Tree};
