//! The suite `spdk`: the same wire with SPDK at one end, at the other, at both.
//!
//! SPDK's vfio-user target (`nvmf_tgt`) is what this controller is compared to, and its client
//! (`spdk_nvme_perf`) what this driver is. All four pairs are measured in turns, each end pinned to
//! a processor of its own: so each end is also seen next to the other's with the same partner.

mod compare;
mod huge_pages;
mod perf;
mod target;
mod tree;

pub(crate) use compare::run;
pub(crate) use huge_pages::HugePages;
pub(crate) use tree::{HOW_TO_BUILD, Tree};
