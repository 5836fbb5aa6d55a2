//! The image of a process that has died, in the next one.
//!
//! # The fence
//!
//! What the dead process has sent is on its way, and Ceph's servers (OSDs) carry it out when it
//! comes. So the next process has the cluster keep that client out (its *blocklist*), by the
//! address that the dead process had written down, and waits for the cluster's new map of itself.
//! Each request of the next process comes with that map. A server that has it takes nothing of that
//! client any more: not what was under way, and not what may come later. An image with
//! `exclusive-lock` has its lock taken from the dead client in the same way, by librbd.
//!
//! The cluster forgets the entry after an hour by itself (`mon_osd_blocklist_default_expire`). It
//! takes a user who may do that (`profile rbd`).
//!
//! # What is durable
//!
//! librbd may answer writes from memory of its process. So an image that is to be kept for the next
//! process is opened without that cache. If it was opened with it, or who has set up the cluster
//! wants it, each write is followed by a flush before it is answered.

use crate::error::OpenError;
use crate::uri::RbdSpec;
use serde::{Deserialize, Serialize};
use shadowbell_backend::{DiskInfo, Wait};
use std::thread;
use std::time::{Duration, Instant};

/// What says that a disk was kept as an image of Ceph's.
pub(crate) const KEY: &str = "rbd";
/// Between two attempts to reach the cluster.
const AGAIN: Duration = Duration::from_millis(100);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KeptImage {
    /// By which the cluster knows the client.
    pub(crate) addresses: Vec<String>,
    pub(crate) block_size: u32,
    pub(crate) blocks: u64,
    pub(crate) read_only: bool,
    granularity: u32,
}

impl KeptImage {
    pub(crate) fn new(info: &DiskInfo, addresses: Vec<String>) -> Self {
        Self {
            addresses,
            block_size: info.block_size,
            blocks: info.blocks,
            read_only: info.read_only,
            granularity: info.granularity,
        }
    }

    /// What the guest has seen, if `now` can be that.
    pub(crate) fn as_it_was(&self, now: &DiskInfo) -> Result<DiskInfo, &'static str> {
        if now.read_only != self.read_only {
            return Err("it is opened for something else than before");
        }
        if now.block_size != self.block_size || now.blocks < self.blocks {
            return Err("it is smaller than it was");
        }
        let mut info = now.clone();
        (info.blocks, info.granularity) = (self.blocks, self.granularity);
        Ok(info)
    }
}

/// The addresses in what Ceph says of a client: one, or several in brackets; with or without the
/// version of the protocol in front.
pub(crate) fn addresses(text: &str) -> Vec<String> {
    let list = text.trim_matches(['[', ']']).split(',');
    let plain =
        list.map(|one| ["v1:", "v2:", "any:"].iter().fold(one, |one, p| one.trim_start_matches(p)));
    let mut found: Vec<String> =
        plain.map(str::trim).filter(|one| !one.is_empty()).map(str::to_owned).collect();
    found.dedup();
    found
}

/// What `open` gives, as soon as the cluster can be reached. It is done by a thread of its own,
/// which goes on by itself if it is waited for no longer: a call of Ceph's can not be taken back.
pub(crate) fn reach<T: Send + 'static>(
    spec: &RbdSpec,
    wait: Wait<'_>,
    open: impl Fn() -> Result<T, OpenError> + Clone + Send + 'static,
) -> Result<T, OpenError> {
    loop {
        let again = open.clone();
        let attempt = thread::Builder::new().name("sb-rbd-open".into()).spawn(again);
        let attempt = attempt.map_err(|source| OpenError::Ceph {
            disk: spec.to_string(),
            what: "a thread for opening the image",
            source,
        })?;
        while !attempt.is_finished() {
            still(spec, wait)?;
        }
        let outcome =
            attempt.join().unwrap_or_else(|_| Err(refused(spec, "opening it has failed")));
        match outcome {
            Err(error) if error.is_for_now() => {}
            outcome => return outcome,
        }
        let since = Instant::now();
        while since.elapsed() < AGAIN {
            still(spec, wait)?;
        }
    }
}

fn still(spec: &RbdSpec, wait: Wait<'_>) -> Result<(), OpenError> {
    if wait() { Ok(()) } else { Err(refused(spec, "it is not waited for any longer")) }
}

/// It is not the disk that was kept.
pub(crate) fn refused(spec: &RbdSpec, why: impl Into<String>) -> OpenError {
    OpenError::NotThatDisk { disk: spec.to_string(), why: why.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_has_one_address_or_several() {
        for (text, expected) in [
            ("10.0.0.1:0/123", vec!["10.0.0.1:0/123"]),
            ("v1:10.0.0.1:0/123", vec!["10.0.0.1:0/123"]),
            ("[v2:[fe80::1]:0/7,v1:[fe80::1]:0/7]", vec!["[fe80::1]:0/7"]),
            ("[v2:1.2.3.4:0/7,v1:1.2.3.5:0/7]", vec!["1.2.3.4:0/7", "1.2.3.5:0/7"]),
            ("", vec![]),
        ] {
            assert_eq!(addresses(text), expected, "{text}");
        }
    }

    #[test]
    fn an_image_that_became_smaller_is_not_gone_on_with() {
        let mut info = DiskInfo::new(512, 100);
        info.granularity = 8;
        let kept = KeptImage::new(&info, Vec::new());
        info.blocks = 200;
        info.granularity = 16;
        let as_it_was = kept.as_it_was(&info).unwrap();
        assert_eq!((as_it_was.blocks, as_it_was.granularity), (100, 8));
        info.blocks = 99;
        assert!(kept.as_it_was(&info).is_err());
        (info.blocks, info.read_only) = (100, true);
        assert!(kept.as_it_was(&info).is_err());
    }
}
