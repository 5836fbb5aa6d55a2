//! Recovery of a namespace of another controller: the controller is attached again, which resets it.

use crate::disk_kinds::{Opened, device};
use crate::disk_open;
use crate::transport;
use anyhow::{Context, anyhow, bail};
use serde_json::Value;
use shadowbell_config::disk_spec::DiskSpecError;
use shadowbell_disk::{OpenError, Wait};
use shadowbell_disk_nvme::NvmeDisk;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Maximum time for which a controller may be unreachable. After it, recovery fails.
const MISSING: Duration = Duration::from_secs(10);
/// Pause between two attempts to attach.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Recovers the disk `spec` of a dead process from its checkpoint.
///
/// # Errors
/// The controller is unreachable, or its namespace is another one.
pub(crate) fn recover(spec: &str, state: &Value, wait: Wait<'_>) -> Opened {
    let disk = attach_again(spec, wait)?;
    if !disk.is_same_disk(state) {
        let why = "another disk than before, or its size has changed".to_owned();
        return Err(OpenError::NotThatDisk { disk: spec.to_owned(), why }.into());
    }
    Ok(disk)
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
            return Err(DiskSpecError::Other(error));
        }
        let until = Instant::now() + RETRY_INTERVAL;
        while Instant::now() < until {
            if !wait() {
                return Err(DiskSpecError::Other(error));
            }
        }
    }
}

/// Tries once to attach. The attempt runs on a thread of its own, because it may block. If `wait`
/// returns false, this function returns and the thread continues alone.
fn attach_once(spec: &str, wait: Wait<'_>) -> anyhow::Result<NvmeDisk> {
    let (target, options) = device(spec).map_err(DiskSpecError::into_error)?;
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
