//! Disk specifications of the user: parsing and validation.

use crate::disk_layers::Layers;
use crate::target::Target;
use crate::uuid_text::{invalid_uuid_text, parse_uuid};
use anyhow::anyhow;
use shadowbell_disk_file::FileSpec;
use shadowbell_disk_nbd::NbdSpec;
use shadowbell_disk_nvme::Options;
use shadowbell_disk_rbd::RbdSpec;
use shadowbell_process::exit;
use shadowbell_process::process_env;
use std::path::{Path, PathBuf};

/// Error of a disk specification, as a sentence for the user.
#[derive(Debug, thiserror::Error)]
pub enum DiskSpecError {
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
    pub fn into_error(self) -> anyhow::Error {
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

/// Splits a specification into the bare disk and its layers.
pub fn split(spec: &str) -> Result<(String, Layers), DiskSpecError> {
    // The UUID belongs to the namespace, not to the disk.
    let (spec, uuid) = take_option(spec, "uuid");
    let spec = &spec[..];
    if let Some(text) = uuid.filter(|text| parse_uuid(text).is_none()) {
        return Err(wrong(spec, invalid_uuid_text(&text)));
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
pub fn check(spec: &str) -> Result<(), DiskSpecError> {
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

/// Returns `spec` with this option set to `value`.
#[must_use]
pub fn with_option(spec: &str, name: &str, value: &str) -> String {
    let (disk, options) = spec.split_once('?').unwrap_or((spec, ""));
    let others = options.split('&').filter(|option| {
        !option.is_empty() && option.split_once('=').is_none_or(|(other, _)| other != name)
    });
    let all: Vec<_> = others.map(str::to_owned).chain([format!("{name}={value}")]).collect();
    format!("{disk}?{}", all.join("&"))
}

/// Returns `spec` without the option `name`, and the value of that option.
#[must_use]
pub fn take_option(spec: &str, name: &str) -> (String, Option<String>) {
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

/// Returns `spec` with another size, if it contains a size. The size of a file is determined when
/// the file is opened.
#[must_use]
pub fn with_size(spec: &str, bytes: u64) -> String {
    let (disk, options) = spec.split_once('?').map_or((spec, None), |(d, o)| (d, Some(o)));
    match disk.split_once(':') {
        Some((kind @ ("mem" | "null"), _)) => {
            let options = options.map(|options| format!("?{options}")).unwrap_or_default();
            format!("{kind}:{bytes}{options}")
        }
        _ => spec.to_owned(),
    }
}

/// True if the disk is a namespace of another controller. The server then sometimes waits for the
/// admin queue of that controller, for up to ten seconds if the controller hangs.
#[must_use]
pub fn is_of_a_controller(spec: &str) -> bool {
    ["nvme:", "vfio-user:"].iter().any(|scheme| spec.starts_with(scheme))
}

/// Path of a file or device as written in `spec`; `None` for other disks.
#[must_use]
pub fn file(spec: &str) -> Option<PathBuf> {
    let (spec, _) = split(spec).ok()?;
    if is_of_a_controller(&spec) || NbdSpec::is_one(&spec) || RbdSpec::is_one(&spec) {
        return None;
    }
    Some(FileSpec::parse(&spec).ok()??.path)
}

/// Reason why a sandboxed process cannot open this disk; `None` if it can.
#[must_use]
pub fn outside(spec: &str) -> Option<&'static str> {
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
    None
}

/// File of a disk, as a process opens it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskFile {
    /// Path.
    pub path: PathBuf,
    /// True if the file is only read.
    pub is_read_only: bool,
}

/// Files of a disk: the file or device in `spec`, whose path is from `directory`, and the files
/// that a qcow2 image names, if the options permit them. Empty for other disks.
#[must_use]
pub fn files(spec: &str, directory: &Path) -> Vec<DiskFile> {
    let parsed = file(spec).and_then(|_| FileSpec::parse(&split(spec).ok()?.0).ok()?);
    let Some(FileSpec { path, options, .. }) = parsed else { return Vec::new() };
    let path = directory.join(path);
    let named = match options.allow_backing {
        true => shadowbell_disk_qcow2::named_files(&path),
        false => Vec::new(),
    };
    let image = DiskFile { path, is_read_only: options.read_only };
    let named = named
        .into_iter()
        .map(|(path, is_data)| DiskFile { path, is_read_only: !is_data || options.read_only });
    [image].into_iter().chain(named).collect()
}

/// Size of a disk in memory, which is the memory that it uses when full. `None` for other disks.
#[must_use]
pub fn memory_of(spec: &str) -> Option<u64> {
    let name = spec.split('?').next().unwrap_or_default();
    shadowbell_disk::parse_size(name.strip_prefix("mem:")?).ok()
}

/// Returns `spec` with absolute paths of files, so that it does not depend on the working
/// directory.
#[must_use]
pub fn from_root(spec: &str) -> String {
    let (disk, options) = spec.split_once('?').map_or((spec, None), |(d, o)| (d, Some(o)));
    let is_kind = |(kind, _): &(&str, &str)| {
        kind.starts_with(|c: char| c.is_ascii_alphabetic())
            && kind.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-".contains(&b))
    };
    // This disk has a scheme, so it is not a bare path. The path after `file:` is percent-encoded
    // and is left unchanged.
    if disk.split_once(':').as_ref().is_some_and(is_kind) {
        return spec.to_owned();
    }
    let options = options.map(|options| format!("?{options}")).unwrap_or_default();
    format!("{}{options}", process_env::absolute(Path::new(disk)).display())
}

/// Refuses `-`, which other programs take for standard input or output.
///
/// # Errors
/// [`DiskSpecError`].
pub fn check_name(spec: &str) -> Result<(), DiskSpecError> {
    match spec.split('?').next() {
        Some("-") => Err(wrong(
            spec,
            "standard input and output cannot be used; for a file of that name, give `./-`"
                .to_owned(),
        )),
        _ => Ok(()),
    }
}

/// Creates the error for a specification. `why` is a sentence that does not repeat the
/// specification.
#[must_use]
pub fn wrong(spec: &str, why: String) -> DiskSpecError {
    shadowbell_disk::OpenError::Spec { spec: spec.to_owned(), why }.into()
}

/// Parses a disk that is a namespace of a controller: target and options.
///
/// # Errors
/// [`DiskSpecError::Device`].
pub fn device(spec: &str) -> Result<(Target, Options), DiskSpecError> {
    let wrong = |why: String| {
        DiskSpecError::Device(exit::bad_input(anyhow!("`{spec}` names no disk: {why}")))
    };
    let (name, options) = spec.split_once('?').map_or((spec, None), |(n, o)| (n, Some(o)));
    Ok((name.parse().map_err(wrong)?, parse(options).map_err(wrong)?))
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
    fn one_option_of_a_specification_is_changed() {
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
    fn an_option_is_removed() {
        let taken = |spec| take_option(spec, "uuid");
        assert_eq!(taken("a.img"), ("a.img".into(), None));
        assert_eq!(taken("a.img?iops=5&x"), ("a.img?iops=5&x".into(), None));
        assert_eq!(taken("a.img?uuid=7"), ("a.img".into(), Some("7".into())));
        assert_eq!(taken("a?b=1&uuid=7&c=2"), ("a?b=1&c=2".into(), Some("7".into())));
    }

    #[test]
    fn options_are_parsed() {
        let options = parse(Some("read-only=on&zero-copy=off")).unwrap();
        assert!(options.read_only && !options.zero_copy);
        let options = parse(None).unwrap();
        assert!(!options.read_only && options.zero_copy);
    }
}
