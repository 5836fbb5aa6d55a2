//! Crash recovery of an RBD image.
//!
//! # Fence
//!
//! Requests that the dead process has sent may still be in flight, and Ceph's servers (OSDs)
//! execute them when they arrive. So the next process adds the dead client to the cluster's
//! *blocklist*, by the address in the checkpoint, and waits for the cluster's new map. Each request
//! of the next process contains the version of that map. An OSD obtains this version before it
//! executes the request, and from then on refuses all requests of the dead client. librbd breaks
//! the `exclusive-lock` of an image in the same way.
//!
//! An entry of the blocklist expires after an hour (`mon_osd_blocklist_default_expire`). Adding an
//! entry requires a user with the capability for it (`profile rbd`).
//!
//! # Durability
//!
//! librbd may complete writes in a cache of its process. So an image with checkpoints is opened
//! without that cache. If the image was opened with the cache, or if the cluster's administrator
//! has enforced the cache, a write completes only after a flush that follows it.

use crate::error::OpenError;
use crate::uri::RbdSpec;
use serde::{Deserialize, Serialize};
use shadowbell_disk::{DiskInfo, Wait, WaitReason};
use std::thread;
use std::time::{Duration, Instant};

/// Key of an RBD disk in a checkpoint.
pub(crate) const KEY: &str = "rbd";
/// Delay between two attempts to reach the cluster.
const RETRY_INTERVAL: Duration = Duration::from_millis(100);

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedImage {
    /// Addresses by which the cluster identifies the client of the dead process.
    pub(crate) addresses: Vec<String>,
    pub(crate) block_size: u32,
    pub(crate) blocks: u64,
    pub(crate) read_only: bool,
    granularity: u32,
}

impl SavedImage {
    pub(crate) fn new(info: &DiskInfo, addresses: Vec<String>) -> Self {
        Self {
            addresses,
            block_size: info.block_size,
            blocks: info.blocks,
            read_only: info.read_only,
            granularity: info.granularity,
        }
    }

    /// Returns the disk properties that the guest has seen, or an error if the disk `now` cannot
    /// provide them.
    pub(crate) fn with_previous_properties(
        &self,
        now: &DiskInfo,
    ) -> Result<DiskInfo, &'static str> {
        if now.read_only != self.read_only {
            return Err("it has become read-only, or writable");
        }
        if now.block_size != self.block_size || now.blocks < self.blocks {
            return Err("it is smaller than it was");
        }
        let mut info = now.clone();
        (info.blocks, info.granularity) = (self.blocks, self.granularity);
        Ok(info)
    }
}

/// Parses the addresses that Ceph reports for a client. The text contains one address, or several
/// in brackets. An address may start with a prefix for the protocol version.
pub(crate) fn addresses(text: &str) -> Vec<String> {
    let list = text.trim_matches(['[', ']']).split(',');
    let plain =
        list.map(|one| ["v1:", "v2:", "any:"].iter().fold(one, |one, p| one.trim_start_matches(p)));
    let mut found: Vec<String> =
        plain.map(str::trim).filter(|one| !one.is_empty()).map(str::to_owned).collect();
    found.dedup();
    found
}

/// Repeats `open` until the cluster is reachable. Each attempt runs on a separate thread, because a
/// call of Ceph's libraries cannot be cancelled. If `wait` ends the waiting, this function returns
/// and the thread continues.
pub(crate) fn reach<T: Send + 'static>(
    spec: &RbdSpec,
    wait: Wait<'_>,
    open: impl Fn() -> Result<T, OpenError> + Clone + Send + 'static,
) -> Result<T, OpenError> {
    let mut last: Option<String> = None;
    loop {
        let reason = last.as_deref().map_or(WaitReason::InFlight, WaitReason::Unavailable);
        let attempt_again = open.clone();
        let attempt = thread::Builder::new().name("sb-rbd-open".into()).spawn(attempt_again);
        let attempt = attempt.map_err(|source| OpenError::Ceph {
            disk: spec.to_string(),
            what: "starting a thread for opening the image",
            source,
        })?;
        while !attempt.is_finished() {
            check_wait(spec, wait, reason)?;
        }
        let outcome =
            attempt.join().unwrap_or_else(|_| Err(refused(spec, "opening it has failed")));
        let why = match outcome {
            Err(error) if error.is_for_now() => error.to_string(),
            outcome => return outcome,
        };
        let since = Instant::now();
        while since.elapsed() < RETRY_INTERVAL {
            check_wait(spec, wait, WaitReason::Unavailable(&why))?;
        }
        last = Some(why);
    }
}

fn check_wait(spec: &RbdSpec, wait: Wait<'_>, reason: WaitReason<'_>) -> Result<(), OpenError> {
    if wait(reason) { Ok(()) } else { Err(refused(spec, "the wait was given up")) }
}

/// Creates the error for a disk that cannot be recovered.
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
    fn a_shrunken_or_read_only_image_is_not_recovered() {
        let mut info = DiskInfo::new(512, 100);
        info.granularity = 8;
        let saved = SavedImage::new(&info, Vec::new());
        info.blocks = 200;
        info.granularity = 16;
        let with_previous_properties = saved.with_previous_properties(&info).unwrap();
        assert_eq!(
            (with_previous_properties.blocks, with_previous_properties.granularity),
            (100, 8)
        );
        info.blocks = 99;
        assert!(saved.with_previous_properties(&info).is_err());
        (info.blocks, info.read_only) = (100, true);
        assert!(saved.with_previous_properties(&info).is_err());
    }
}
