//! Disk specifications of the user: parsing and validation.

use crate::disk_layers::Layers;
use crate::uuid_text::{invalid_uuid_text, parse_uuid};
use shadowbell_disk_file::FileSpec;
use shadowbell_process::exit;
use shadowbell_process::process_env;
use std::path::{Path, PathBuf};

/// Error of a disk specification, as a sentence for the user.
#[derive(Debug, thiserror::Error)]
pub enum DiskSpecError {
    /// A disk cannot be opened.
    #[error(transparent)]
    Disk(#[from] shadowbell_disk::OpenError),
    /// A disk cannot be opened, for a reason specific to its kind.
    #[error("{error}")]
    Kind {
        /// Reason, with an exit status.
        error: anyhow::Error,
        /// True if the disk of a dead process cannot be recovered, not even later.
        is_final: bool,
    },
    /// Another error, for example of the controller of an NVMe disk.
    #[error("{0:#}")]
    Other(anyhow::Error),
}

impl DiskSpecError {
    /// Converts to an error for `main`: with exit status [`exit::BAD_INPUT`], except for errors of
    /// the system, of a server, or of a cluster.
    #[must_use]
    pub fn into_error(self) -> anyhow::Error {
        use shadowbell_disk::{MAX_MEMORY, OpenError};
        match self {
            Self::Kind { error, .. } | Self::Other(error) => error,
            Self::Disk(OpenError::Memory { bytes, .. }) if bytes <= MAX_MEMORY => self.into(),
            Self::Disk(OpenError::System { .. } | OpenError::Ring { .. }) => self.into(),
            Self::Disk(ref error) if error.can_pass() => exit::unavailable(self),
            Self::Disk(_) => exit::bad_input(self),
        }
    }
}

/// Splits a specification into the bare disk and its layers.
pub fn split(spec: &str) -> Result<(String, Layers), DiskSpecError> {
    // The UUID belongs to the namespace, not to the disk.
    let (spec, uuid) = take_option(spec, "uuid");
    let spec = &spec[..];
    if let Some(text) = uuid.filter(|text| parse_uuid(text).is_none()) {
        return Err(spec_error(spec, invalid_uuid_text(&text)));
    }
    Layers::split(spec).map_err(|why| {
        let spec = spec.to_owned();
        shadowbell_disk::OpenError::Spec { spec, why }.into()
    })
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

/// True if the specification has `read-only=on`, or another word for it.
#[must_use]
pub fn is_read_only(spec: &str) -> bool {
    let (_, value) = take_option(spec, "read-only");
    value.is_some_and(|value| ["on", "true", "yes"].contains(&&value[..]))
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

/// Returns `spec` with its size replaced by `bytes`, if it contains a size. The specification of a
/// memory disk contains a size; the size of a file is determined when the file is opened.
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

/// Path of a file or device as written in `spec`; `None` for other disks.
#[must_use]
pub fn file(spec: &str) -> Option<PathBuf> {
    image(spec).map(|(path, _)| path)
}

/// Path of the file or device in `spec`, as it is written in `spec`, and true if the file is only
/// read; `None` for other disks.
#[must_use]
pub fn image(spec: &str) -> Option<(PathBuf, bool)> {
    let (spec, _) = split(spec).ok()?;
    // The parser refuses the schemes of other disks.
    let FileSpec { path, options, .. } = FileSpec::parse(&spec).ok()??;
    Some((path, options.read_only))
}

/// Size of a disk in memory: the amount of memory that it uses when it is full. `None` for other
/// disks.
#[must_use]
pub fn memory_of(spec: &str) -> Option<u64> {
    let name = spec.split('?').next().unwrap_or_default();
    shadowbell_disk::parse_size(name.strip_prefix("mem:")?).ok()
}

/// Scheme of a specification. `None` for a bare path.
#[must_use]
pub fn scheme(spec: &str) -> Option<&str> {
    let (scheme, _) = spec.split('?').next()?.split_once(':')?;
    // After other characters, such as a slash, a colon is a part of the path.
    let is_one = scheme.starts_with(|c: char| c.is_ascii_alphabetic())
        && scheme.bytes().all(|b| b.is_ascii_alphanumeric() || b"+-".contains(&b));
    is_one.then_some(scheme)
}

/// Returns `spec` with absolute paths of files, so that it does not depend on the working
/// directory.
#[must_use]
pub fn with_absolute_paths(spec: &str) -> String {
    let (disk, options) = spec.split_once('?').map_or((spec, None), |(d, o)| (d, Some(o)));
    // A specification with a scheme is not a bare path. The path after `file:` is percent-encoded,
    // so it is left unchanged.
    if scheme(disk).is_some() {
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
        Some("-") => Err(spec_error(
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
pub fn spec_error(spec: &str, why: String) -> DiskSpecError {
    shadowbell_disk::OpenError::Spec { spec: spec.to_owned(), why }.into()
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
        assert_eq!(
            with_absolute_paths("a.img?direct=on"),
            format!("{}/a.img?direct=on", here.display())
        );
        for spec in ["/a.img?direct=on", "mem:1MiB", "nvme://0000:01:00.0/1", "file:a%3F.img"] {
            assert_eq!(with_absolute_paths(spec), spec);
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
}
