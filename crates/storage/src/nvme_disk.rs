//! Namespace of another controller as a disk: parsing, attaching, and recovery (by a reset of the
//! controller).

use crate::transport;
use anyhow::{Context, anyhow, bail};
use serde_json::Value;
use shadowbell_config::disk_spec::{DiskSpecError, spec_error};
use shadowbell_config::target::Target;
use shadowbell_disk::{Disk, DiskOptions, Wait, WaitReason};
use shadowbell_disk_nvme::{NvmeDisk, OpenError, Options};
use shadowbell_driver::Transport;
use shadowbell_process::exit;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// Maximum time for which a controller may be unreachable. After it, recovery fails.
const MISSING: Duration = Duration::from_secs(10);
/// Pause between two attempts to attach.
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// Names of the options.
pub(crate) const OPTIONS: [&str; 4] = ["read-only", "zero-copy", "queue-pairs", "timeout"];

/// Attaches the controller and opens its namespace.
///
/// # Errors
/// [`DiskSpecError`].
pub(crate) fn open(spec: &str) -> Result<Arc<dyn Disk>, DiskSpecError> {
    let (target, options) = parse(spec)?;
    let transport = transport::to(&target).map_err(DiskSpecError::Other)?;
    let disk = attach(transport, &target, spec, &options);
    Ok(Arc::new(disk.map_err(DiskSpecError::Other)?))
}

/// Parses the specification of a disk that is a namespace of a controller: target and options.
///
/// # Errors
/// [`DiskSpecError`].
pub(crate) fn parse(spec: &str) -> Result<(Target, Options), DiskSpecError> {
    let parsed = || {
        let (name, mut options) = DiskOptions::split(spec)?;
        let mut parsed = Options::default();
        parsed.read_only = options.take_switch("read-only")?.unwrap_or(false);
        parsed.zero_copy = options.take_switch("zero-copy")?.unwrap_or(true);
        let mut number = |name| {
            let text = options.take(name);
            text.map(|text| match text.parse::<u16>() {
                Ok(number @ 1..=3600) => Ok(number),
                _ => Err(format!("the option `{name}` is a number from 1 to 3600, not `{text}`")),
            })
            .transpose()
        };
        parsed.queue_pairs = number("queue-pairs")?.unwrap_or(parsed.queue_pairs);
        parsed.timeout = number("timeout")?.map(|seconds| Duration::from_secs(seconds.into()));
        Ok((name.parse()?, parsed))
    };
    parsed().map_err(|why| spec_error(spec, why))
}

/// Recovers the disk `spec` of a dead process from its checkpoint.
///
/// # Errors
/// The controller is unreachable, or its namespace is not the one that the dead process used.
pub(crate) fn recover(
    spec: &str,
    state: &Value,
    wait: Wait<'_>,
) -> Result<Arc<dyn Disk>, DiskSpecError> {
    let disk = attach_again(spec, wait)?;
    if !disk.is_same_disk(state) {
        let why = "another disk than before, or its size has changed".to_owned();
        return Err(shadowbell_disk::OpenError::NotThatDisk { disk: spec.to_owned(), why }.into());
    }
    Ok(disk)
}

/// Attaches the controller that the dead process used, as soon as the kernel (for a PCI function)
/// or the controller's server (for a socket) has released it. Attaching resets the controller. The
/// reset is the fence: it proves that all I/O of the dead process has ended.
fn attach_again(spec: &str, wait: Wait<'_>) -> Result<Arc<NvmeDisk>, DiskSpecError> {
    let mut missing: Option<Instant> = None;
    let mut last: Option<String> = None;
    loop {
        let reason = last.as_deref().map_or(WaitReason::InFlight, WaitReason::Unavailable);
        let error = match attach_once(spec, &|| wait(reason)) {
            Ok(disk) => return Ok(Arc::new(disk)),
            Err(error) => error,
        };
        let is_in_use = transport::is_in_use(&error);
        if !is_in_use && missing.get_or_insert_with(Instant::now).elapsed() > MISSING {
            return Err(DiskSpecError::Other(error));
        }
        last = (!is_in_use).then(|| exit::line(&error));
        let reason = last.as_deref().map_or(WaitReason::InFlight, WaitReason::Unavailable);
        let until = Instant::now() + RETRY_INTERVAL;
        while Instant::now() < until {
            if !wait(reason) {
                return Err(DiskSpecError::Other(error));
            }
        }
    }
}

/// Tries once to attach. The attempt runs on a thread of its own, because it may block. If `wait`
/// returns false, this function returns an error without waiting for the thread, and the result of
/// the attempt is discarded.
fn attach_once(spec: &str, wait: &dyn Fn() -> bool) -> anyhow::Result<NvmeDisk> {
    let (target, options) = parse(spec).map_err(DiskSpecError::into_error)?;
    let named = spec.to_owned();
    let attempt = thread::Builder::new().name("sb-attach".into()).spawn(move || {
        let transport = transport::again(&target).with_context(|| target.to_string())?;
        attach(transport, &target, &named, &options)
    })?;
    while !attempt.is_finished() {
        if !wait() {
            bail!("{spec}: recovery was cancelled");
        }
    }
    attempt.join().unwrap_or_else(|_| Err(anyhow!("{spec}: attaching has failed")))
}

/// Attaches the controller at the other end of `transport` and opens its namespace `target`.
///
/// # Errors
/// With exit status [`exit::BAD_INPUT`] if the namespace cannot be used as a disk.
fn attach(
    transport: Arc<dyn Transport>,
    target: &Target,
    spec: &str,
    options: &Options,
) -> anyhow::Result<NvmeDisk> {
    NvmeDisk::open(transport, target.nsid(), spec, options).map_err(|error| match error {
        OpenError::Attach(_) | OpenError::System(_) => {
            anyhow::Error::new(error).context(target.to_string())
        }
        // Exit status for bad input: the user has to name another namespace.
        error => exit::bad_input(error).context(target.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_options_of_a_controllers_namespace_are_parsed() {
        let (_, options) = parse("nvme://01:00.0?read-only=on&zero-copy=off").unwrap();
        assert!(options.read_only && !options.zero_copy);
        let (_, options) = parse("nvme://01:00.0?queue-pairs=3&timeout=90").unwrap();
        assert!(!options.read_only && options.zero_copy);
        assert_eq!((options.queue_pairs, options.timeout), (3, Some(Duration::from_secs(90))));
        assert!(parse("nvme://01:00.0?timeout=0").is_err());
    }
}
