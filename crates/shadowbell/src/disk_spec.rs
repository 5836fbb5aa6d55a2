//! Disk specifications of the user: parsing, validation and opening.

use crate::disk_layers::Layers;
use crate::target::{Target, not_a_disk};
use crate::transport;
use crate::uuid_text::{no_uuid, parse_uuid};
use anyhow::anyhow;
use shadowbell_disk::{Disk, ImageFormat};
use shadowbell_disk_file::{FileSpec, Format};
use shadowbell_disk_nbd::{NbdDisk, NbdSpec};
use shadowbell_disk_nvme::{NvmeDisk, OpenError, Options};
use shadowbell_disk_qcow2::Qcow2Disk;
use shadowbell_disk_rbd::{RbdDisk, RbdSpec};
use shadowbell_driver::Transport;
use shadowbell_process::exit;
use shadowbell_process::process_env;
use shadowbell_state::Descriptors;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Error of a disk specification, as a sentence for the user.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DiskSpecError {
    /// A disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] shadowbell_disk::OpenError),
    /// A qcow2 image cannot be opened.
    #[error(transparent)]
    Qcow2(shadowbell_disk_qcow2::OpenError),
    /// An export of an NBD server cannot be opened.
    #[error(transparent)]
    Nbd(#[from] shadowbell_disk_nbd::OpenError),
    /// An RBD image of a Ceph cluster cannot be opened.
    #[error(transparent)]
    Rbd(#[from] shadowbell_disk_rbd::OpenError),
    /// The controller of an NVMe disk cannot be attached.
    #[error("{0:#}")]
    Device(anyhow::Error),
}

impl DiskSpecError {
    /// Converts to an error for `main`: with exit status [`exit::BAD_INPUT`], except for errors of
    /// the system, of a server, or of a cluster.
    #[must_use]
    pub(crate) fn into_error(self) -> anyhow::Error {
        use shadowbell_disk::{MAX_MEMORY, OpenError};
        match self {
            Self::Device(error) => error,
            Self::Disk(OpenError::Memory { bytes, .. }) if bytes <= MAX_MEMORY => self.into(),
            Self::Disk(OpenError::System { .. } | OpenError::Ring { .. }) => self.into(),
            Self::Qcow2(shadowbell_disk_qcow2::OpenError::System { .. }) => self.into(),
            Self::Nbd(
                shadowbell_disk_nbd::OpenError::Connect { .. }
                | shadowbell_disk_nbd::OpenError::System { .. },
            ) => self.into(),
            Self::Rbd(
                shadowbell_disk_rbd::OpenError::Ceph { .. }
                | shadowbell_disk_rbd::OpenError::Library { .. },
            ) => self.into(),
            Self::Disk(_) | Self::Qcow2(_) | Self::Nbd(_) | Self::Rbd(_) => exit::bad_input(self),
        }
    }
}

impl From<shadowbell_disk_qcow2::OpenError> for DiskSpecError {
    fn from(error: shadowbell_disk_qcow2::OpenError) -> Self {
        match error {
            shadowbell_disk_qcow2::OpenError::File(error) => Self::Disk(error),
            error => Self::Qcow2(error),
        }
    }
}

/// Opens the disk that `spec` names: any disk of [`shadowbell_disk_file::open`], and
///
/// | `spec` | disk |
/// |---|---|
/// | `disk.qcow2` | qcow2 image, detected by its first bytes, whatever its name |
/// | `nbd://host:10809/export`, `nbd+unix:///export?socket=PATH` | NBD export: [`NbdSpec`] |
/// | `rbd:pool/image`, `rbd:pool/image@snapshot` | image of a Ceph cluster: [`RbdSpec`] |
/// | `nvme://0000:01:00.0/1` | namespace 1 of a PCI function, with VFIO |
/// | `vfio-user:/run/ssd.sock/1` | namespace 1 of a controller behind a vfio-user socket |
///
/// Options of the last two:
///
/// | option | value | default |
/// |---|---|---|
/// | `read-only` | `on`, `off` | `off`; `on` for a write-protected namespace |
/// | `zero-copy` | `on`: the device accesses guest memory directly if possible; `off` | `on` |
///
/// Options of all disks: metadata (`metadata=8&pi=1`):
/// [`MetadataFormat`](shadowbell_disk::MetadataFormat); rate limits (`iops=1000`,
/// `write-bandwidth=100MiB:1GiB`) and a limit group (`limit-group=db`):
/// [`Limits::set`](shadowbell_disk_layers::Limits::set).
///
/// Option of memory and raw images: zones (`zoned=64MiB`):
/// [`ZoneFormat`](shadowbell_disk::ZoneFormat).
///
/// # Errors
/// [`DiskSpecError`].
pub(crate) fn open(spec: &str) -> Result<Arc<dyn Disk>, DiskSpecError> {
    open_by(spec, Lifetime::Process)
}

/// As [`open`], for a disk that a later process can recover or take over if its type supports that.
///
/// # Errors
/// [`DiskSpecError`].
pub(crate) fn open_lasting(spec: &str) -> Result<Arc<dyn Disk>, DiskSpecError> {
    open_by(spec, Lifetime::Supervisor)
}

/// Takes over a disk that another process has passed on. `spec` is the specification by which that
/// process opened it.
///
/// # Errors
/// [`DiskSpecError`].
pub(crate) fn adopt(
    spec: &str,
    state: &serde_json::Value,
    fds: &mut Descriptors,
) -> Result<Arc<dyn Disk>, DiskSpecError> {
    let (spec, layers) = split(spec)?;
    put_around(&spec, (&layers, true), shadowbell_disk_file::adopt(&spec, state, fds)?)
}

/// Adds the layers of `spec` to an open disk. With `goes_on`, another process used the disk before,
/// and its hosts continue.
///
/// # Errors
/// [`DiskSpecError`].
pub(crate) fn put_around(
    spec: &str,
    (layers, goes_on): (&Layers, bool),
    disk: Arc<dyn Disk>,
) -> Result<Arc<dyn Disk>, DiskSpecError> {
    layers.put_around(disk, goes_on).map_err(|why| wrong(spec, why))
}

/// Splits a specification into the bare disk and its layers.
pub(crate) fn split(spec: &str) -> Result<(String, Layers), DiskSpecError> {
    // The UUID belongs to the namespace, not to the disk.
    let (spec, uuid) = take_option(spec, "uuid");
    let spec = &spec[..];
    if let Some(text) = uuid.filter(|text| parse_uuid(text).is_none()) {
        return Err(wrong(spec, no_uuid(&text)));
    }
    Layers::split(spec).map_err(|why| {
        let spec = spec.to_owned();
        shadowbell_disk::OpenError::Spec { spec, why }.into()
    })
}

/// Validates `spec` as far as possible without opening anything.
///
/// # Errors
/// [`DiskSpecError`].
pub(crate) fn check(spec: &str) -> Result<(), DiskSpecError> {
    let (spec, _) = split(spec)?;
    check_name(&spec)?;
    let spec = &spec[..];
    if ["nvme:", "vfio-user:"].iter().any(|scheme| spec.starts_with(scheme)) {
        return device(spec).map(drop);
    }
    if NbdSpec::is_one(spec) {
        NbdSpec::parse(spec)?;
        return Ok(());
    }
    if RbdSpec::is_one(spec) {
        RbdSpec::parse(spec)?;
        return Ok(());
    }
    FileSpec::parse(spec)?;
    Ok(())
}

/// `spec` with an option set to `value`.
#[must_use]
pub(crate) fn with_option(spec: &str, name: &str, value: &str) -> String {
    let (disk, options) = spec.split_once('?').unwrap_or((spec, ""));
    let others = options.split('&').filter(|option| {
        !option.is_empty() && option.split_once('=').is_none_or(|(other, _)| other != name)
    });
    let all: Vec<_> = others.map(str::to_owned).chain([format!("{name}={value}")]).collect();
    format!("{disk}?{}", all.join("&"))
}

/// `spec` without the option `name`, and the option's value.
#[must_use]
pub(crate) fn take_option(spec: &str, name: &str) -> (String, Option<String>) {
    let Some((disk, options)) = spec.split_once('?') else { return (spec.to_owned(), None) };
    let is_it = |option: &str| option.split_once('=').is_some_and(|(other, _)| other == name);
    let found = options.split('&').find(|option| is_it(option));
    let Some((_, value)) = found.and_then(|option| option.split_once('=')) else {
        return (spec.to_owned(), None);
    };
    let others: Vec<_> = options.split('&').filter(|option| !is_it(option)).collect();
    let rest = match &others[..] {
        [] => disk.to_owned(),
        others => format!("{disk}?{}", others.join("&")),
    };
    (rest, Some(value.to_owned()))
}

/// `spec` with another size, if it contains one. The size of a file is determined when it is
/// opened.
#[must_use]
pub(crate) fn with_size(spec: &str, bytes: u64) -> String {
    let (disk, options) = spec.split_once('?').map_or((spec, None), |(d, o)| (d, Some(o)));
    match disk.split_once(':') {
        Some((kind @ ("mem" | "null"), _)) => {
            let options = options.map(|options| format!("?{options}")).unwrap_or_default();
            format!("{kind}:{bytes}{options}")
        }
        _ => spec.to_owned(),
    }
}

/// True if the disk is a namespace of another controller. Then the server sometimes waits for that
/// controller's admin queue, up to ten seconds each time if it hangs.
#[must_use]
pub(crate) fn is_of_a_controller(spec: &str) -> bool {
    ["nvme:", "vfio-user:"].iter().any(|scheme| spec.starts_with(scheme))
}

/// Path of a file or device as written in `spec`; `None` for other disks.
#[must_use]
pub(crate) fn file(spec: &str) -> Option<PathBuf> {
    let (spec, _) = split(spec).ok()?;
    if is_of_a_controller(&spec) || NbdSpec::is_one(&spec) || RbdSpec::is_one(&spec) {
        return None;
    }
    Some(FileSpec::parse(&spec).ok()??.path)
}

/// Reason why a sandboxed process cannot open this disk; `None` if it can.
#[must_use]
pub(crate) fn outside(spec: &str) -> Option<&'static str> {
    if NbdSpec::is_one(spec) {
        return Some("connects to a server by itself");
    }
    if RbdSpec::is_one(spec) {
        return Some("loads Ceph's library, which needs other system calls");
    }
    if spec.starts_with("nvme:") {
        return Some("accesses a device with VFIO");
    }
    if spec.starts_with("vfio-user:") {
        return Some("connects to another server by itself");
    }
    let options = FileSpec::parse(&split(spec).ok()?.0).ok()??.options;
    options.allow_backing.then_some("may open backing files, which the image names")
}

/// Size of a disk in memory: the memory that it uses when full. `None` for other disks.
#[must_use]
pub(crate) fn memory_of(spec: &str) -> Option<u64> {
    let name = spec.split('?').next().unwrap_or_default();
    shadowbell_disk::parse_size(name.strip_prefix("mem:")?).ok()
}

/// `spec` independent of the working directory: files by their absolute paths.
#[must_use]
pub(crate) fn from_root(spec: &str) -> String {
    let (disk, options) = spec.split_once('?').map_or((spec, None), |(d, o)| (d, Some(o)));
    let is_kind = |(kind, _): &(&str, &str)| {
        kind.starts_with(|c: char| c.is_ascii_alphabetic())
            && kind.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-".contains(&b))
    };
    // A scheme. The path after `file:` is percent-encoded, so it is not converted.
    if disk.split_once(':').as_ref().is_some_and(is_kind) {
        return spec.to_owned();
    }
    let options = options.map(|options| format!("?{options}")).unwrap_or_default();
    format!("{}{options}", process_env::absolute(Path::new(disk)).display())
}

/// Lifetime of the state that a disk has in memory.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lifetime {
    /// Lifetime of this process.
    Process,
    /// Lifetime of the supervisor, across the server processes that it starts.
    Supervisor,
}

fn open_by(spec: &str, lifetime: Lifetime) -> Result<Arc<dyn Disk>, DiskSpecError> {
    let (spec, layers) = split(spec)?;
    check_name(&spec)?;
    let disk = open_unlimited(&spec, lifetime)?;
    if let Some(remark) = write_protection(&spec, disk.info().read_only)? {
        tracing::warn!("{remark}");
    }
    put_around(&spec, (&layers, false), disk)
}

/// Refuses `-`, which other programs take for standard input or output.
fn check_name(spec: &str) -> Result<(), DiskSpecError> {
    match spec.split('?').next() {
        Some("-") => Err(wrong(
            spec,
            "standard input and output cannot be used; for a file of that name, give `./-`"
                .to_owned(),
        )),
        _ => Ok(()),
    }
}

fn wrong(spec: &str, why: String) -> DiskSpecError {
    shadowbell_disk::OpenError::Spec { spec: spec.to_owned(), why }.into()
}

/// Checks whether a disk may be read-only. Returns a warning if that was not requested.
fn write_protection(spec: &str, is_read_only: bool) -> Result<Option<String>, DiskSpecError> {
    // The specification of an RBD image determines whether it is read-only.
    if !is_read_only || RbdSpec::is_one(spec) {
        return Ok(None);
    }
    let (name, options) = spec.split_once('?').unwrap_or((spec, ""));
    let mut options = options.split('&').filter_map(|option| option.split_once('='));
    match options.find(|(option, _)| *option == "read-only") {
        None => Ok(Some(format!(
            "{name}: read-only, because the system permits no writes; add `read-only=on` if this \
             is intended"
        ))),
        Some((_, "off" | "false" | "no")) => Err(wrong(
            spec,
            "the system permits no writes; change its permissions, or leave out `read-only=off`"
                .to_owned(),
        )),
        Some(_) => Ok(None),
    }
}

/// Forbids disks that the sandbox does not permit ([`outside`]) from now on.
pub(crate) fn contain() {
    IS_CONTAINED.store(true, Ordering::Relaxed);
}

static IS_CONTAINED: AtomicBool = AtomicBool::new(false);

fn open_unlimited(spec: &str, lifetime: Lifetime) -> Result<Arc<dyn Disk>, DiskSpecError> {
    if let Some(why) = outside(spec).filter(|_| IS_CONTAINED.load(Ordering::Relaxed)) {
        let why = anyhow!("{spec} {why}: the server needs `--sandbox off` for that");
        return Err(DiskSpecError::Device(exit::bad_input(why)));
    }
    if NbdSpec::is_one(spec) {
        let disk = NbdDisk::open(&NbdSpec::parse(spec)?)?;
        tracing::info!("{}: {}", disk.name(), disk.describe());
        return Ok(Arc::new(disk));
    }
    if RbdSpec::is_one(spec) {
        let spec = RbdSpec::parse(spec)?;
        let disk = match lifetime {
            Lifetime::Process => RbdDisk::open(&spec)?,
            Lifetime::Supervisor => RbdDisk::open_lasting(&spec)?,
        };
        return Ok(Arc::new(disk));
    }
    if !["nvme:", "vfio-user:"].iter().any(|scheme| spec.starts_with(scheme)) {
        let disk = open_own(spec, lifetime).map_err(|error| match &error {
            DiskSpecError::Disk(shadowbell_disk::OpenError::NoFile { path, .. }) => {
                match not_a_disk(path) {
                    Some(why) => DiskSpecError::Device(exit::bad_input(anyhow!(why))),
                    None => error,
                }
            }
            _ => error,
        })?;
        if let Some(remark) = disk.remark() {
            tracing::warn!("{remark}");
        }
        return Ok(disk);
    }
    let (target, options) = device(spec)?;
    let transport = transport::to(&target).map_err(DiskSpecError::Device)?;
    let disk = attach(transport, &target, spec, &options).map_err(DiskSpecError::Device)?;
    Ok(Arc::new(disk))
}

/// Parses a disk that is a namespace of a controller: target and options.
///
/// # Errors
/// [`DiskSpecError::Device`].
pub(crate) fn device(spec: &str) -> Result<(Target, Options), DiskSpecError> {
    let wrong = |why: String| {
        DiskSpecError::Device(exit::bad_input(anyhow!("`{spec}` names no disk: {why}")))
    };
    let (name, options) = spec.split_once('?').map_or((spec, None), |(n, o)| (n, Some(o)));
    Ok((name.parse().map_err(wrong)?, parse(options).map_err(wrong)?))
}

/// Opens a file or a disk in memory, with detection of qcow2 images.
fn open_own(spec: &str, lifetime: Lifetime) -> Result<Arc<dyn Disk>, DiskSpecError> {
    let open = match lifetime {
        Lifetime::Process => shadowbell_disk_file::open,
        Lifetime::Supervisor => shadowbell_disk_file::open_lasting,
    };
    let file = FileSpec::parse(spec)?;
    let opened = match &file {
        // Not opened as a raw disk, whose error messages would not fit.
        Some(file) if file.options.format == Some(Format::Qcow2) => None,
        _ => match open(spec) {
            Err(shadowbell_disk::OpenError::Format { format: ImageFormat::Qcow2, .. }) => None,
            opened => Some(opened?),
        },
    };
    match (opened, file) {
        (Some(_), Some(FileSpec { options, .. })) if options.allow_backing => {
            Err(shadowbell_disk::OpenError::Spec {
                spec: spec.to_owned(),
                why: "a raw image names no other file; leave out `allow-backing`".to_owned(),
            }
            .into())
        }
        (None, Some(file)) => {
            let disk = Qcow2Disk::open(&file.path, &file.options)?;
            tracing::info!("{}: {}", disk.name(), disk.describe());
            Ok(Arc::new(disk))
        }
        (Some(disk), _) => Ok(disk),
        // Only files can have another format.
        (None, None) => Ok(open(spec)?),
    }
}

/// Attaches the controller at the other end of `transport` and opens its namespace `target`.
///
/// # Errors
/// With exit status [`exit::BAD_INPUT`] if the namespace cannot be used as a disk.
pub(crate) fn attach(
    transport: Arc<dyn Transport>,
    target: &Target,
    spec: &str,
    options: &Options,
) -> anyhow::Result<NvmeDisk> {
    NvmeDisk::open(transport, target.nsid(), spec, options).map_err(|error| match error {
        OpenError::Attach(_) | OpenError::System(_) => {
            anyhow::Error::new(error).context(target.to_string())
        }
        // The user has to name another namespace.
        error => exit::bad_input(error).context(target.to_string()),
    })
}

fn parse(text: Option<&str>) -> Result<Options, String> {
    let mut options = Options::default();
    for option in text.into_iter().flat_map(|text| text.split('&')) {
        let (name, value) = option.split_once('=').ok_or_else(|| {
            format!("`{option}` after the `?` is no option; options are written `name=value`")
        })?;
        let switch = || match value {
            "on" | "true" | "yes" => Ok(true),
            "off" | "false" | "no" => Ok(false),
            other => Err(format!("the option `{name}` is `on` or `off`, not `{other}`")),
        };
        match name {
            "read-only" => options.read_only = switch()?,
            "zero-copy" => options.zero_copy = switch()?,
            "block-size" => {
                return Err(
                    "the block size is that of the device; leave out `block-size`".to_owned()
                );
            }
            other => {
                return Err(format!(
                    "this disk type has no option `{other}`; its options are `read-only`, `zero-copy`"
                ));
            }
        }
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_specification_is_changed_in_one_place() {
        for (spec, changed) in [
            ("a.img", "a.img?read-only=on"),
            ("a.img?read-only=off", "a.img?read-only=on"),
            ("mem:1MiB?read-only=off&block-size=512", "mem:1MiB?block-size=512&read-only=on"),
        ] {
            assert_eq!(with_option(spec, "read-only", "on"), changed);
        }
        assert_eq!(with_size("mem:1MiB?block-size=512", 8192), "mem:8192?block-size=512");
        assert_eq!(with_size("null:1MiB", 8192), "null:8192");
        assert_eq!(with_size("/a.img?direct=on", 8192), "/a.img?direct=on");
        let here = std::env::current_dir().unwrap();
        assert_eq!(from_root("a.img?direct=on"), format!("{}/a.img?direct=on", here.display()));
        for spec in ["/a.img?direct=on", "mem:1MiB", "nvme://0000:01:00.0/1", "file:a%3F.img"] {
            assert_eq!(from_root(spec), spec);
        }
    }

    #[test]
    fn an_option_is_taken_out() {
        let taken = |spec| take_option(spec, "uuid");
        assert_eq!(taken("a.img"), ("a.img".into(), None));
        assert_eq!(taken("a.img?iops=5&x"), ("a.img?iops=5&x".into(), None));
        assert_eq!(taken("a.img?uuid=7"), ("a.img".into(), Some("7".into())));
        assert_eq!(taken("a?b=1&uuid=7&c=2"), ("a?b=1&c=2".into(), Some("7".into())));
        let error = open("mem:1MiB?uuid=7").unwrap_err().into_error();
        assert!(format!("{error:#}").contains("`7` is no UUID"), "{error:#}");
        open("mem:1MiB?uuid=0190163d-8694-739b-aea5-966c26f8ad91").unwrap();
    }

    #[test]
    fn what_can_not_be_written_is_not_so_silently() {
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
    fn options_are_understood() {
        let options = parse(Some("read-only=on&zero-copy=off")).unwrap();
        assert!(options.read_only && !options.zero_copy);
        let options = parse(None).unwrap();
        assert!(!options.read_only && options.zero_copy);
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
            ("vfio-user:/a.sock?block-size=512", "that of the device"),
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
