//! Recovery of disks after the death of a server process.
//!
//! Each disk type has its own fence: proof that I/O of the dead process can no longer reach the
//! disk or a guest's memory. `docs/upgrades.md` describes all of them.

use crate::disk_open;
use crate::transport;
use anyhow::{Context, anyhow, bail};
use serde_json::Value;
use shadowbell_config::disk_spec::{self, DiskSpecError};
use shadowbell_disk::{Disk, Wait};
use shadowbell_disk_file::FileSpec;
use shadowbell_disk_nbd::{NbdDisk, NbdSpec};
use shadowbell_disk_nvme::NvmeDisk;
use shadowbell_disk_qcow2::Qcow2Disk;
use shadowbell_disk_rbd::{RbdDisk, RbdSpec};
use shadowbell_state::Descriptors;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Maximum time for which a controller may be unreachable. After it, recovery fails.
const MISSING: Duration = Duration::from_secs(10);
/// Pause between two attempts to attach.
const AGAIN: Duration = Duration::from_millis(20);

/// Recovers the disk of a dead process from its checkpoint. `spec` is the specification by which
/// the dead process opened the disk. Calls `wait` repeatedly while I/O of the dead process may be
/// in flight. With `has_quiesced`, there is none: the process ended for an upgrade.
///
/// # Errors
/// [`DiskSpecError`].
pub fn recover(
    spec: &str,
    state: &Value,
    fds: &mut Descriptors,
    has_quiesced: bool,
    wait: Wait<'_>,
) -> Result<Arc<dyn Disk>, DiskSpecError> {
    let (spec, layers) = disk_spec::split(spec)?;
    let disk = recover_unlimited(&spec, state, fds, has_quiesced, wait)?;
    disk_open::wrap_disk(&spec, (&layers, true), disk)
}

fn recover_unlimited(
    spec: &str,
    state: &Value,
    fds: &mut Descriptors,
    has_quiesced: bool,
    wait: Wait<'_>,
) -> Result<Arc<dyn Disk>, DiskSpecError> {
    if NvmeDisk::is_checkpoint(state) {
        let disk = attach_again(spec, wait)?;
        if !disk.is_same_disk(state) {
            let why = "another disk than before, or its size has changed".to_owned();
            return Err(
                shadowbell_disk::OpenError::NotThatDisk { disk: spec.to_owned(), why }.into()
            );
        }
        return Ok(disk);
    }
    if NbdDisk::is_checkpoint(state) {
        return Ok(Arc::new(NbdDisk::recover(&NbdSpec::parse(spec)?, state, has_quiesced, wait)?));
    }
    if RbdDisk::is_checkpoint(state) {
        return Ok(Arc::new(RbdDisk::recover(&RbdSpec::parse(spec)?, state, wait)?));
    }
    if Qcow2Disk::is_checkpoint(state)
        && let Some(FileSpec { path, options, .. }) = FileSpec::parse(spec)?
    {
        return Ok(Arc::new(Qcow2Disk::recover(&path, &options, state, fds, wait)?));
    }
    Ok(shadowbell_disk_file::recover(spec, state, fds, wait)?)
}

/// True if the disk with this checkpoint can only be recovered after the end of all I/O of its
/// process: the lock of its image does not show the end of its own I/O.
#[must_use]
pub fn needs_process_fence(state: &Value) -> bool {
    let Value::Object(fields) = state else { return false };
    // The state of a layer contains that of the disk below.
    fields.get("locked") == Some(&Value::Bool(false)) || fields.values().any(needs_process_fence)
}

/// True if the disk of a dead process cannot be recovered, not even later: it is another disk, or
/// it has no fence.
#[must_use]
pub fn is_final(error: &DiskSpecError) -> bool {
    use shadowbell_disk::OpenError::NotThatDisk;
    matches!(
        error,
        DiskSpecError::Disk(NotThatDisk { .. })
            | DiskSpecError::Qcow2(shadowbell_disk_qcow2::OpenError::File(NotThatDisk { .. }))
            | DiskSpecError::Nbd(shadowbell_disk_nbd::OpenError::NotThatDisk { .. })
            | DiskSpecError::Rbd(shadowbell_disk_rbd::OpenError::NotThatDisk { .. })
    )
}

/// Attaches the controller of the dead process as soon as the kernel or its server has released it.
/// Attaching resets the controller, which is the fence.
fn attach_again(spec: &str, wait: Wait<'_>) -> Result<Arc<NvmeDisk>, DiskSpecError> {
    let mut missing: Option<Instant> = None;
    loop {
        let error = match attach_once(spec, wait) {
            Ok(disk) => return Ok(Arc::new(disk)),
            Err(error) => error,
        };
        if !transport::is_in_use(&error)
            && missing.get_or_insert_with(Instant::now).elapsed() > MISSING
        {
            return Err(DiskSpecError::Device(error));
        }
        let until = Instant::now() + AGAIN;
        while Instant::now() < until {
            if !wait() {
                return Err(DiskSpecError::Device(error));
            }
        }
    }
}

/// Tries once to attach. The attempt runs on a thread of its own, because it may block. If `wait`
/// returns false, this function returns and the thread continues alone.
fn attach_once(spec: &str, wait: Wait<'_>) -> anyhow::Result<NvmeDisk> {
    let (target, options) = disk_spec::device(spec).map_err(DiskSpecError::into_error)?;
    let named = spec.to_owned();
    let attempt = thread::Builder::new().name("sb-attach".into()).spawn(move || {
        let transport = transport::again(&target).with_context(|| target.to_string())?;
        disk_open::attach(transport, &target, &named, &options)
    })?;
    while !attempt.is_finished() {
        if !wait() {
            bail!("{spec}: recovery was cancelled");
        }
    }
    attempt.join().unwrap_or_else(|_| Err(anyhow!("{spec}: attaching has failed")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_a_disk_without_an_exclusive_lock_needs_the_fence_of_the_process() {
        for (state, expected) in [
            (json!({ "image": 0, "locked": true }), false),
            (json!({ "image": 0, "locked": false }), true),
            (json!({ "qcow2": { "files": [0], "locked": false } }), true),
            (json!({ "qcow2": { "files": [0], "locked": true } }), false),
            (json!({ "nbd": { "blocks": 1 } }), false),
            (json!("null"), false),
        ] {
            assert_eq!(needs_process_fence(&state), expected, "{state}");
        }
    }

    #[test]
    fn a_checkpoint_says_if_the_lock_of_the_image_is_its_fence() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        std::fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        for (options, needs) in [("", false), ("?read-only=on", true)] {
            let disk =
                disk_open::open_recoverable(&format!("{}{options}", path.display())).unwrap();
            let state = disk.checkpoint(&mut Descriptors::default()).unwrap();
            assert_eq!(needs_process_fence(&state), needs, "{options}: {state}");
        }
    }
}
