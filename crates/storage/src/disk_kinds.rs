//! Kinds of disks: one table of scheme, options, parser, opening, recovery, and conflict with the
//! sandbox. A new kind is a crate and a row.

use crate::nvme_disk;
use anyhow::anyhow;
use serde_json::Value;
use shadowbell_config::disk_layers::Layers;
use shadowbell_config::disk_spec::{self, DiskSpecError, spec_error};
use shadowbell_config::target::not_a_disk;
use shadowbell_disk::{Disk, DiskOptions, ImageFormat, OpenError, Wait};
use shadowbell_disk_file::{
    FILE_OPTIONS, FileSpec, Format, MEMORY_OPTIONS, NULL_OPTIONS, open, open_recoverable, recover,
};
pub use shadowbell_disk_nbd::Peer;
use shadowbell_disk_nbd::{NbdDisk, NbdSpec};
use shadowbell_disk_nvme::NvmeDisk;
use shadowbell_disk_qcow2::Qcow2Disk;
use shadowbell_disk_rbd::{RbdDisk, RbdSpec};
use shadowbell_process::exit;
use shadowbell_state::Descriptors;
use std::sync::Arc;

/// Open disk, or the reason why there is none.
pub(crate) type Opened = Result<Arc<dyn Disk>, DiskSpecError>;

/// Lifetime of the state that a disk has in memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lifetime {
    /// Lifetime of this process.
    Process,
    /// Lifetime of the supervisor, across the server processes that it starts.
    Supervisor,
}

/// Disk of a dead process.
pub(crate) struct Recovery<'a, 'b> {
    pub(crate) state: &'a Value,
    pub(crate) fds: &'a mut Descriptors,
    /// True if the process ended for an upgrade, without I/O in flight.
    pub(crate) has_quiesced: bool,
    pub(crate) wait: Wait<'b>,
}

/// Kind of disk. Its functions get specifications without the options of layers (metadata, error
/// policy, limits).
pub(crate) struct DiskKind {
    /// Short name, for the reference.
    pub(crate) name: &'static str,
    /// Forms of the specification, for the reference.
    pub(crate) forms: &'static [&'static str],
    /// Description, for the reference.
    pub(crate) text: &'static str,
    /// Schemes of the specifications. Bare paths have the first scheme of the table `KINDS`.
    pub(crate) schemes: &'static [&'static str],
    /// Image format whose files are disks of this kind, whatever the scheme.
    format: Option<ImageFormat>,
    /// Names of the options, without those of layers.
    pub(crate) options: &'static [&'static str],
    /// Validation without access to the disk.
    parse: fn(&str) -> Result<(), DiskSpecError>,
    pub(crate) open: fn(&str, Lifetime) -> Opened,
    /// Function that returns true if a value is the checkpoint of a disk of this kind.
    is_state: fn(&Value) -> bool,
    pub(crate) recover: fn(&str, Recovery<'_, '_>) -> Opened,
    /// Function that opens the disk with a checkpoint that cannot be recovered. `None` for a disk
    /// that is opened by its specification alone.
    pub(crate) reopen: Option<fn(&str, &Value) -> Opened>,
    /// Reason why a sandboxed process cannot open the disk.
    sandbox_conflict: fn(&str) -> Option<&'static str>,
    /// True if only the specification, and never the storage, makes a disk of this kind read-only.
    pub(crate) states_read_only: bool,
    /// True if an I/O thread may have to wait for the disk.
    may_block: bool,
}

/// Files, block devices and NVMe character devices.
static FILE: DiskKind = DiskKind {
    name: "file",
    forms: &["PATH", "file:PATH"],
    text: "Raw image, block device (/dev/sdb), or NVMe character device (/dev/ng0n1). With `file:`, \
           a name may begin like another kind, and `%3F` stands for a question mark.",
    schemes: &["file"],
    format: None,
    options: &FILE_OPTIONS,
    parse: |spec| Ok(FileSpec::parse(spec).map(drop)?),
    open: open_file,
    is_state: |_| false,
    recover: |spec, from| Ok(recover(spec, from.state, from.fds, from.wait)?),
    reopen: None,
    sandbox_conflict: |_| None,
    states_read_only: false,
    may_block: false,
};

/// All kinds.
pub(crate) static KINDS: [&DiskKind; 7] = [
    &FILE,
    &DiskKind {
        name: "mem",
        forms: &["mem:SIZE"],
        text: "Memory, which is lost when the server ends.",
        schemes: &["mem"],
        options: &MEMORY_OPTIONS,
        open: open_simple,
        ..FILE
    },
    &DiskKind {
        name: "null",
        forms: &["null:SIZE"],
        text: "No data, for measurements: writes are discarded.",
        schemes: &["null"],
        options: &NULL_OPTIONS,
        open: open_simple,
        ..FILE
    },
    &DiskKind {
        name: "qcow2",
        forms: &["PATH"],
        text: "qcow2 image, recognised by its first bytes.",
        schemes: &[],
        format: Some(ImageFormat::Qcow2),
        open: |spec, _| {
            let FileSpec { path, options, .. } = file_of(spec)?;
            let disk = Qcow2Disk::open(&path, &options).map_err(qcow2_error)?;
            tracing::info!("{}: {}", disk.name(), disk.describe());
            Ok(Arc::new(disk))
        },
        is_state: Qcow2Disk::is_checkpoint,
        recover: |spec, Recovery { state, fds, wait, .. }| {
            let FileSpec { path, options, .. } = file_of(spec)?;
            let disk = Qcow2Disk::recover(&path, &options, state, fds, wait);
            Ok(Arc::new(disk.map_err(qcow2_error)?))
        },
        ..FILE
    },
    &DiskKind {
        name: "nbd",
        forms: &[
            "nbd://HOST[:PORT]/EXPORT",
            "nbd+unix:///EXPORT?socket=PATH",
            "nbds://HOST[:PORT]/EXPORT",
            "nbds+unix:///EXPORT?socket=PATH",
        ],
        text: "Export of an NBD server, by TCP or a Unix socket; `nbds` is with TLS.",
        schemes: &NbdSpec::SCHEMES,
        format: None,
        options: &NbdSpec::OPTIONS,
        parse: |spec| NbdSpec::parse(spec).map(drop).map_err(nbd_error),
        open: open_nbd,
        is_state: NbdDisk::is_checkpoint,
        recover: |spec, Recovery { state, has_quiesced, wait, .. }| {
            let spec = NbdSpec::parse(spec).map_err(nbd_error)?;
            let disk = NbdDisk::recover(&spec, state, has_quiesced, wait);
            Ok(Arc::new(disk.map_err(nbd_error)?))
        },
        reopen: Some(|spec, state| {
            let spec = NbdSpec::parse(spec).map_err(nbd_error)?;
            Ok(Arc::new(NbdDisk::reopen(&spec, state).map_err(nbd_error)?))
        }),
        sandbox_conflict: |spec| NbdSpec::parse(spec).ok()?.sandbox_conflict(),
        states_read_only: false,
        may_block: false,
    },
    &DiskKind {
        name: "rbd",
        forms: &["rbd:POOL/IMAGE[@SNAPSHOT]"],
        text: "Image of a Ceph cluster, by librbd.",
        schemes: &["rbd"],
        format: None,
        options: &RbdSpec::OPTIONS,
        parse: |spec| RbdSpec::parse(spec).map(drop).map_err(rbd_error),
        open: |spec, lifetime| {
            let spec = RbdSpec::parse(spec).map_err(rbd_error)?;
            let disk = match lifetime {
                Lifetime::Process => RbdDisk::open(&spec),
                Lifetime::Supervisor => RbdDisk::open_recoverable(&spec),
            };
            Ok(Arc::new(disk.map_err(rbd_error)?))
        },
        is_state: RbdDisk::is_checkpoint,
        recover: |spec, Recovery { state, wait, .. }| {
            let spec = RbdSpec::parse(spec).map_err(rbd_error)?;
            Ok(Arc::new(RbdDisk::recover(&spec, state, wait).map_err(rbd_error)?))
        },
        reopen: None,
        sandbox_conflict: |_| Some("loads Ceph's library, which needs other system calls"),
        states_read_only: true,
        may_block: false,
    },
    &DiskKind {
        name: "nvme",
        forms: &["nvme://ADDRESS/NSID", "vfio-user:SOCKET/NSID"],
        text: "Namespace of another NVMe controller: a PCI function, by VFIO (`shadowbell bind` takes \
               it from the kernel), or a controller behind a vfio-user socket.",
        schemes: &["nvme", "vfio-user"],
        format: None,
        options: &nvme_disk::OPTIONS,
        parse: |spec| nvme_disk::parse(spec).map(drop),
        open: |spec, _| nvme_disk::open(spec),
        is_state: NvmeDisk::is_checkpoint,
        recover: |spec, Recovery { state, wait, .. }| nvme_disk::recover(spec, state, wait),
        reopen: None,
        sandbox_conflict: |_| Some("accesses another controller by itself"),
        states_read_only: false,
        may_block: true,
    },
];

impl DiskKind {
    /// Returns the kind of the disk `spec`, and checks the names of its options.
    ///
    /// # Errors
    /// The scheme of `spec`, or one of its options, is unknown.
    pub(crate) fn of(spec: &str) -> Result<&'static Self, DiskSpecError> {
        let scheme = disk_spec::scheme(spec);
        let kind = scheme.map_or(Some(&FILE), Self::named).ok_or_else(|| {
            let all = KINDS.iter().flat_map(|kind| kind.schemes);
            let all: Vec<_> = all.map(|scheme| format!("`{scheme}:`")).collect();
            let name = scheme.unwrap_or_default();
            spec_error(
                spec,
                format!(
                    "there is no kind of disk called `{name}`; there are {} (for a file of that name \
                     write `file:{}`)",
                    all.join(", "),
                    spec.split('?').next().unwrap_or_default()
                ),
            )
        })?;
        let known: Vec<_> = kind.options.iter().copied().chain(Layers::options()).collect();
        let checked = DiskOptions::split(spec)
            .and_then(|(_, options)| options.check(scheme.unwrap_or("file"), &known));
        checked.map_err(|why| spec_error(spec, why))?;
        Ok(kind)
    }

    fn named(scheme: &str) -> Option<&'static Self> {
        KINDS.into_iter().find(|kind| kind.schemes.contains(&scheme))
    }

    /// Kind of the files with this format.
    fn of_format(format: ImageFormat) -> Option<&'static Self> {
        KINDS.into_iter().find(|kind| kind.format == Some(format))
    }

    /// Kind of the disk with this checkpoint.
    pub(crate) fn of_state(state: &Value) -> &'static Self {
        KINDS.into_iter().find(|kind| (kind.is_state)(state)).unwrap_or(&FILE)
    }
}

/// Validates `spec` as far as possible without opening anything.
///
/// # Errors
/// [`DiskSpecError`].
pub fn check(spec: &str) -> Result<(), DiskSpecError> {
    let (spec, _) = disk_spec::split(spec)?;
    disk_spec::check_name(&spec)?;
    (DiskKind::of(&spec)?.parse)(&spec)
}

/// Reason why a sandboxed process cannot open this disk; `None` if it can.
#[must_use]
pub fn sandbox_conflict(spec: &str) -> Option<&'static str> {
    let (spec, _) = disk_spec::split(spec).ok()?;
    (DiskKind::of(&spec).ok()?.sandbox_conflict)(&spec)
}

/// Address of the NBD server to which a sandboxed process has its supervisor connect for this
/// disk. `None` for other disks.
#[must_use]
pub fn nbd_peer(spec: &str) -> Option<Peer> {
    let (spec, _) = disk_spec::split(spec).ok()?;
    let is_nbd = NbdSpec::SCHEMES.contains(&disk_spec::scheme(&spec)?);
    is_nbd.then(|| NbdSpec::parse(&spec).ok()?.peer()).flatten()
}

/// True if an I/O thread may have to wait for the disk. A namespace of another controller waits for
/// the admin queue of that controller, for up to ten seconds if the controller hangs.
#[must_use]
pub fn may_block(spec: &str) -> bool {
    disk_spec::scheme(spec).and_then(DiskKind::named).is_some_and(|kind| kind.may_block)
}

/// Opens a raw image or a device. An image of another format is opened by its kind.
fn open_file(spec: &str, lifetime: Lifetime) -> Opened {
    let FileSpec { options, .. } = file_of(spec)?;
    // With `format=qcow2`, opening a raw disk first would report errors that do not fit the image.
    let named = options.format == Some(Format::Qcow2);
    if let Some(kind) = named.then(|| DiskKind::of_format(ImageFormat::Qcow2)).flatten() {
        return (kind.open)(spec, lifetime);
    }
    match open_simple(spec, lifetime) {
        Ok(_) if options.allow_backing => Err(spec_error(
            spec,
            "a raw image names no other file; leave out `allow-backing`".to_owned(),
        )),
        Err(DiskSpecError::Disk(OpenError::Format { path, format })) => {
            match DiskKind::of_format(format) {
                Some(kind) => (kind.open)(spec, lifetime),
                None => Err(OpenError::Format { path, format }.into()),
            }
        }
        Err(DiskSpecError::Disk(OpenError::NoFile { path, what })) => match not_a_disk(&path) {
            Some(why) => Err(DiskSpecError::Other(exit::bad_input(anyhow!(why)))),
            None => Err(OpenError::NoFile { path, what }.into()),
        },
        opened => opened,
    }
}

fn open_simple(spec: &str, lifetime: Lifetime) -> Opened {
    Ok(match lifetime {
        Lifetime::Process => open(spec),
        Lifetime::Supervisor => open_recoverable(spec),
    }?)
}

fn open_nbd(spec: &str, lifetime: Lifetime) -> Opened {
    let disk = NbdSpec::parse(spec).and_then(|spec| NbdDisk::open(&spec)).map_err(nbd_error)?;
    let name = disk.name();
    tracing::info!("{name}: {}", disk.describe());
    if let Some(why) = disk.unfenced().filter(|_| lifetime == Lifetime::Supervisor) {
        tracing::warn!("{name}: it cannot be recovered after a server crash: {why}");
    }
    Ok(Arc::new(disk))
}

fn file_of(spec: &str) -> Result<FileSpec, DiskSpecError> {
    let file = FileSpec::parse(spec)?;
    file.ok_or_else(|| spec_error(spec, "it is not a file".to_owned()))
}

fn qcow2_error(error: shadowbell_disk_qcow2::OpenError) -> DiskSpecError {
    use shadowbell_disk_qcow2::OpenError::{File, System};
    match error {
        File(error) => error.into(),
        error => kind_error(matches!(error, System { .. }), false, error),
    }
}

fn nbd_error(error: shadowbell_disk_nbd::OpenError) -> DiskSpecError {
    use shadowbell_disk_nbd::OpenError::{Connect, NotThatDisk, System};
    let is_of_system = matches!(error, Connect { .. } | System { .. });
    kind_error(is_of_system, matches!(error, NotThatDisk { .. }), error)
}

fn rbd_error(error: shadowbell_disk_rbd::OpenError) -> DiskSpecError {
    use shadowbell_disk_rbd::OpenError::{Ceph, Library, NotThatDisk};
    let is_of_system = matches!(error, Ceph { .. } | Library { .. });
    kind_error(is_of_system, matches!(error, NotThatDisk { .. }), error)
}

/// Converts an error of one kind of disk. With `is_of_system`, the system or a server has caused
/// the error. Otherwise it counts as bad input of the user. With `is_final`, the disk of a dead
/// process cannot be recovered, not even later.
fn kind_error<E>(is_of_system: bool, is_final: bool, error: E) -> DiskSpecError
where
    E: std::error::Error + Send + Sync + 'static,
{
    let error = if is_of_system { error.into() } else { exit::bad_input(error) };
    DiskSpecError::Kind { error, is_final }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_option_is_refused_with_the_options_of_the_kind_and_its_layers() {
        for (spec, own) in [
            (
                "a.img?x=1",
                "`file:` has no option `x`; its options are `block-size`, `read-only`, `dir",
            ),
            (
                "mem:1MiB?x=1&iops=5",
                "`mem:` has no option `x`; its options are `block-size`, `read-",
            ),
            ("nbd://a/b?x=1", "`nbd:` has no option `x`; its options are `socket`, "),
            ("rbd:a/b?x=1", "`rbd:` has no option `x`; its options are `conf`, "),
            (
                "nvme://0:1:2.0?x=1",
                "`nvme:` has no option `x`; its options are `read-only`, `zero-",
            ),
        ] {
            let error = check(spec).unwrap_err().to_string();
            assert!(error.contains(own), "{error}");
            for option in Layers::options() {
                assert!(error.contains(&format!("`{option}`")), "{option}: {error}");
            }
        }
        let error = check("vhdx:a").unwrap_err().to_string();
        for scheme in
            ["`file:`", "`mem:`", "`nbds+unix:`", "`rbd:`", "`vfio-user:`", "`file:vhdx:a`"]
        {
            assert!(error.contains(scheme), "{error}");
        }
    }

    #[test]
    fn the_kind_is_that_of_the_scheme() {
        for (spec, hindrance) in [
            ("a.img", None),
            ("./a:b.img", None),
            ("mem:1MiB?iops=5", None),
            ("a.img?allow-backing=on&iops=5", None),
            ("nbd://127.0.0.1/b", None),
            ("nbd+unix:///b?socket=/a.sock&iops=5", None),
            ("nbd://a/b", Some("a host name")),
            ("nbds://127.0.0.1/b?tls-certificates=/a", Some("certificates")),
            ("rbd:a/b@c", Some("Ceph")),
            ("vfio-user:/a.sock/1", Some("controller")),
        ] {
            let why = sandbox_conflict(spec);
            assert_eq!(why.is_some(), hindrance.is_some(), "{spec}: {why:?}");
            assert!(why.unwrap_or_default().contains(hindrance.unwrap_or_default()), "{spec}");
        }
        assert!(may_block("nvme://0000:01:00.0/1") && may_block("vfio-user:/a.sock"));
        assert!(!may_block("nbd://a/b") && !may_block("/nvme:a"));
    }
}
