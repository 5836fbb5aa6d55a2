//! The disk of a process that has died, in the next one.
//!
//! # There is no fence
//!
//! What the dead process has sent is the server's. NBD has no way to call it back, and none to wait
//! for it: a server may carry out a write that it has received long after the end of the connection
//! by which it came, and answers a flush on a new one without it. (`qemu-nbd` and `nbdkit` finish
//! what they have received. With a server that retried for seconds what was stuck, a newer write
//! was seen to be overwritten: github.com/ydb-platform/nbs, issue 7070.) So how long that can take
//! is for the operator to say, who knows the server and its storage: `settle=SECONDS`. For so long
//! after a death nothing is sent to the server. Who does not say it has a disk that can not be gone
//! on with.
//!
//! A disk that takes no writes needs none of this: what was read for the dead process came into
//! memory of its own.
//!
//! # What is durable
//!
//! The dead process knew what it had to write again to a server that was restarted; the next one
//! does not. So it begins with a flush, after which nothing of that is needed any more. If the
//! server is restarted between the death and this flush, then what it had answered and not flushed
//! may be lost, and nobody notices.

use crate::error::OpenError;
use crate::uri::NbdSpec;
use serde::{Deserialize, Serialize};
use shadowbell_backend::{DiskInfo, Wait};
use shadowbell_state::{WrongOrder, is_wrong};
use std::time::{Duration, Instant};

/// What says that a disk was kept as an export.
pub(crate) const KEY: &str = "nbd";
/// Why a disk is not kept.
pub(crate) const UNSETTLED: &str = "an NBD server may carry out a write of a process that has died \
     after it has ended; `settle=SECONDS` says how long that can take, and `read-only=on` that \
     there are no writes";
/// Between two attempts to connect.
const AGAIN: Duration = Duration::from_millis(50);

#[derive(Serialize, Deserialize)]
pub(crate) struct KeptExport {
    pub(crate) block_size: u32,
    pub(crate) blocks: u64,
    pub(crate) read_only: bool,
    volatile_cache: bool,
    discard: bool,
    granularity: u32,
    pub(crate) has_lost: bool,
}

impl KeptExport {
    pub(crate) fn new(info: &DiskInfo, has_lost: bool) -> Self {
        Self {
            block_size: info.block_size,
            blocks: info.blocks,
            read_only: info.read_only,
            volatile_cache: info.volatile_cache,
            discard: info.discard,
            granularity: info.granularity,
            has_lost,
        }
    }

    /// What the guest has seen, if `now` can be that.
    pub(crate) fn as_it_was(&self, now: &DiskInfo) -> Result<DiskInfo, &'static str> {
        if now.read_only && !self.read_only {
            return Err("it takes no writes any more");
        }
        if now.block_size != self.block_size || now.blocks < self.blocks {
            return Err("it is smaller than it was");
        }
        if self.volatile_cache && !now.volatile_cache {
            return Err("its server has come back without flushes");
        }
        if self.discard && !now.discard {
            return Err("its server has come back without write zeroes");
        }
        let mut info = now.clone();
        info.blocks = self.blocks;
        (info.read_only, info.granularity) = (self.read_only, self.granularity);
        (info.volatile_cache, info.discard) = (self.volatile_cache, self.discard);
        Ok(info)
    }
}

/// Waits until nothing of the dead process is under way at the server.
///
/// # Errors
/// It is not waited for any longer.
pub(crate) fn settle(spec: &NbdSpec, kept: &KeptExport, wait: Wait<'_>) -> Result<(), OpenError> {
    if kept.read_only || is_wrong(WrongOrder::NoFence) {
        return Ok(());
    }
    let Some(time) = spec.settle else { return Err(refused(spec, UNSETTLED.to_owned())) };
    sleep(spec, time, wait)
}

/// The disk, as soon as its server can be reached.
pub(crate) fn reach<T>(
    spec: &NbdSpec,
    wait: Wait<'_>,
    open: impl Fn() -> Result<T, OpenError>,
) -> Result<T, OpenError> {
    loop {
        match open() {
            Err(OpenError::Connect { .. }) => sleep(spec, AGAIN, wait)?,
            outcome => return outcome,
        }
    }
}

fn sleep(spec: &NbdSpec, time: Duration, wait: Wait<'_>) -> Result<(), OpenError> {
    let since = Instant::now();
    while since.elapsed() < time {
        if !wait() {
            return Err(refused(spec, "it is not waited for any longer".to_owned()));
        }
    }
    Ok(())
}

/// It is not the disk that was kept.
pub(crate) fn refused(spec: &NbdSpec, why: String) -> OpenError {
    OpenError::NotThatDisk { disk: spec.to_string(), why }
}
