//! Opening of disks by their specifications.

use crate::disk_kinds::{DiskKind, Lifetime, nbd_peer, sandbox_conflict};
use anyhow::anyhow;
use shadowbell_config::disk_layers::Layers;
use shadowbell_config::disk_spec::{DiskSpecError, check_name, spec_error, split};
use shadowbell_disk::Disk;
use shadowbell_disk_file::OpenAttempt;
use shadowbell_disk_nbd::{Connector, connect_by};
use shadowbell_process::exit;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Opens the disk that `spec` names: any disk of [`shadowbell_disk_file::open`], and
///
/// | `spec` | disk |
/// |---|---|
/// | `disk.qcow2` | qcow2 image, detected by its first bytes, whatever its name |
/// | `nbd://host:10809/export`, `nbd+unix:///export?socket=PATH` | NBD export: `NbdSpec` |
/// | `rbd:pool/image`, `rbd:pool/image@snapshot` | image of a Ceph cluster: `RbdSpec` |
/// | `nvme://0000:01:00.0/1` | namespace 1 of a PCI function, with VFIO |
/// | `vfio-user:/run/ssd.sock/1` | namespace 1 of a controller behind a vfio-user socket |
///
/// Options of the `nvme:` and `vfio-user:` disks:
///
/// | option | value | default |
/// |---|---|---|
/// | `read-only` | `on`, `off` | `off`; `on` for a write-protected namespace |
/// | `zero-copy` | `on`: the device accesses guest memory directly if possible; `off` | `on` |
/// | `queue-pairs` | number of queue pairs, one for each thread that uses the disk | 8 |
/// | `timeout` | time in seconds after which a command counts as failed | the driver's |
///
/// Options of all disks: metadata (`metadata=8&pi=1`):
/// [`MetadataFormat`](shadowbell_disk::MetadataFormat); error policy (`on-error=stop`):
/// [`ErrorPolicy`](shadowbell_disk_layers::ErrorPolicy); rate limits (`iops=1000`,
/// `write-bandwidth=100MiB:1GiB`) and a limit group (`limit-group=db`):
/// [`Limits::set`](shadowbell_disk_layers::Limits::set).
///
/// Option of memory and raw images: zones (`zoned=64MiB`):
/// [`ZoneFormat`](shadowbell_disk::ZoneFormat).
///
/// # Errors
/// [`DiskSpecError`].
pub fn open(spec: &str) -> Result<Arc<dyn Disk>, DiskSpecError> {
    open_by(spec, Lifetime::Process)
}

/// Opens a disk like [`open`]. A later process can recover or take over the disk, if the disk's
/// type supports that.
///
/// # Errors
/// [`DiskSpecError`].
pub fn open_recoverable(spec: &str) -> Result<Arc<dyn Disk>, DiskSpecError> {
    open_by(spec, Lifetime::Supervisor)
}

/// Adds the layers of `spec` to an open disk. `recovers` is true if `disk` was recovered from
/// another process, so that hosts must not notice the change of the process.
///
/// # Errors
/// [`DiskSpecError`].
pub fn wrap_disk(
    spec: &str,
    (layers, recovers): (&Layers, bool),
    disk: Arc<dyn Disk>,
) -> Result<Arc<dyn Disk>, DiskSpecError> {
    layers.wrap_disk(disk, recovers).map_err(|why| spec_error(spec, why))
}

/// From now on, refuses to open disks that the sandbox does not permit ([`sandbox_conflict`]), and
/// NBD disks that do not use a `connector`.
pub fn contain(connector: Option<Connector>) {
    IS_CONTAINED.store(true, Ordering::Relaxed);
    CONNECTS.store(connector.is_some(), Ordering::Relaxed);
    if let Some(connector) = connector {
        connect_by(connector);
    }
}

static IS_CONTAINED: AtomicBool = AtomicBool::new(false);
static CONNECTS: AtomicBool = AtomicBool::new(false);

/// Reason why this process, which is in a sandbox, cannot open a disk.
fn conflict(spec: &str) -> Option<&'static str> {
    if !IS_CONTAINED.load(Ordering::Relaxed) {
        return None;
    }
    let connects = nbd_peer(spec).is_some() && !CONNECTS.load(Ordering::Relaxed);
    sandbox_conflict(spec).or_else(|| connects.then_some("connects to a server by itself"))
}

fn open_by(spec: &str, lifetime: Lifetime) -> Result<Arc<dyn Disk>, DiskSpecError> {
    let (spec, layers) = split(spec)?;
    check_name(&spec)?;
    let kind = DiskKind::of(&spec)?;
    if let Some(why) = conflict(&spec) {
        let why = anyhow!("{spec} {why}: the server needs `--sandbox off` for that");
        return Err(DiskSpecError::Other(exit::bad_input(why)));
    }
    let disk = {
        let _attempt = OpenAttempt::begin();
        (kind.open)(&spec, lifetime)?
    };
    if let Some(remark) = disk.remark() {
        tracing::warn!("{remark}");
    }
    let is_read_only = disk.info().read_only && !kind.states_read_only;
    if let Some(remark) = write_protection(&spec, is_read_only)? {
        tracing::warn!("{remark}");
    }
    wrap_disk(&spec, (&layers, false), disk)
}

/// Handles a disk that was opened read-only. Returns a warning if the specification did not request
/// it, and an error if the specification requested a writable disk.
fn write_protection(spec: &str, is_read_only: bool) -> Result<Option<String>, DiskSpecError> {
    if !is_read_only {
        return Ok(None);
    }
    let (name, options) = spec.split_once('?').unwrap_or((spec, ""));
    let mut options = options.split('&').filter_map(|option| option.split_once('='));
    match options.find(|(option, _)| *option == "read-only") {
        None => Ok(Some(format!(
            "{name}: read-only, because the system permits no writes; add `read-only=on` if this \
             is intended"
        ))),
        Some((_, "off" | "false" | "no")) => Err(spec_error(
            spec,
            "the system permits no writes; change its permissions, or leave out `read-only=off`"
                .to_owned(),
        )),
        Some(_) => Ok(None),
    }
}

/// Error text for a TARGET that is the path of a missing file.
#[must_use]
pub fn nothing_at(path: &str) -> String {
    let looks_like_socket =
        Path::new(path).extension().is_some_and(|end| end == "sock" || end == "socket");
    let make = if looks_like_socket {
        format!("`shadowbell serve DISK --socket {path}` creates such a socket")
    } else {
        format!("`truncate -s 10G {path}` creates an empty image")
    };
    format!(
        "{path}: there is no such file; a TARGET is a disk (disk.img, /dev/sdb, mem:1GiB), \
         vfio-user:PATH for a controller behind a socket, or nvme://0000:01:00.0 for a PCI device; \
         {make}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk_kinds::check;

    #[test]
    fn a_disk_may_have_a_uuid() {
        let error = open("mem:1MiB?uuid=7").unwrap_err().into_error();
        assert!(format!("{error:#}").contains("`7` is no UUID"), "{error:#}");
        open("mem:1MiB?uuid=0190163d-8694-739b-aea5-966c26f8ad91").unwrap();
    }

    #[test]
    fn a_write_protected_disk_has_a_remark() {
        for spec in ["a", "a?read-only=on", "a?direct=on&read-only=off"] {
            assert_eq!(write_protection(spec, false).unwrap(), None);
        }
        assert_eq!(write_protection("a?read-only=on", true).unwrap(), None);
        let remark = write_protection("a?direct=on", true).unwrap().unwrap();
        assert!(remark.starts_with("a: read-only, because"), "{remark}");
        let error = write_protection("a?read-only=off", true).unwrap_err();
        assert!(error.to_string().contains("the system permits no writes"), "{error}");
        assert_eq!(exit::status(&error.into_error()), exit::BAD_INPUT);
        for spec in ["-", "-?read-only=on"] {
            assert!(open(spec).unwrap_err().to_string().contains("give `./-`"));
            assert!(check(spec).unwrap_err().to_string().contains("give `./-`"));
        }
    }

    #[test]
    fn nonsense_is_refused_with_the_reason() {
        for (spec, words) in [
            ("nvme://nvme0n1", "is no PCI address"),
            ("nvme://0000:01:00.0/0", "count from 1"),
            ("vfio-user:", "lacks a socket"),
            ("nbd://", "lacks a host"),
            ("rbd:pool", "lacks an image"),
            ("rbd:p/i@s?read-only=off", "takes no writes"),
            ("nbd+unix:///x", "lacks a socket"),
            ("nbd://host/x?direct=on", "no option `direct`"),
            ("vfio-user:/nonexistent/a.sock/1", "no controller behind /nonexistent/a.sock"),
            ("vfio-user:/a.sock?block-size=512", "has no option `block-size`"),
            ("vfio-user:/a.sock?direct=on", "has no option `direct`"),
            ("vfio-user:/a.sock?read-only=1", "`on` or `off`, not `1`"),
            ("vfio-user:/a.sock?read-only", "no option; options are written"),
        ] {
            let error = open(spec).unwrap_err();
            assert!(error.to_string().contains(words), "{spec}: {error}");
            assert_eq!(exit::status(&error.into_error()), exit::BAD_INPUT, "{spec}");
        }
        assert!(matches!(open("mem:lots").unwrap_err(), DiskSpecError::Disk(_)));
    }
}
