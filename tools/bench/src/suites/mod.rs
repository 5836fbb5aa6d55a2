//! Suites, one file each.

pub(crate) mod contest;
pub(crate) mod disks;
pub(crate) mod exports;
pub(crate) mod file;
pub(crate) mod fuse;
pub(crate) mod growth;
pub(crate) mod instructions;
pub(crate) mod mem;
pub(crate) mod null;
pub(crate) mod rbd;
pub(crate) mod readers;
pub(crate) mod scrape;
pub(crate) mod sleep;
pub(crate) mod spdk;
pub(crate) mod vhost;
pub(crate) mod wire;
