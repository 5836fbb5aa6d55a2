//! Opening an image and its backing files.

use crate::error::OpenError;
use crate::header::{Header, read_start};
use crate::repair::repair;
use crate::storage::FileStorage;
use imago::qcow2::Qcow2;
use imago::raw::Raw;
use imago::{DenyImplicitOpenGate, FormatAccess, FormatDriverBuilder};
use shadowbell_disk_file::{Alignment, Direct, FileOptions, ImageBytes, ImageFile};
use shadowbell_memory::contain_panic;
use std::io;
use std::path::{Path, PathBuf};

/// Maximum length of a chain of backing files.
const MAX_CHAIN: usize = 64;

/// Opened image.
pub(crate) struct Opened {
    pub(crate) format: FormatAccess<FileStorage>,
    pub(crate) header: Header,
    /// File of the image, which is locked.
    pub(crate) file: ImageFile,
    /// Backing files.
    pub(crate) below: Vec<ImageFile>,
    /// True if the page cache is bypassed.
    pub(crate) is_direct: bool,
    /// File for the fast path. `None` without io_uring.
    pub(crate) bytes: Option<ImageBytes>,
    /// True if each cluster of the file has one use only.
    pub(crate) is_sound: bool,
}

/// Source of files. It opens the image first, then each backing file.
pub(crate) trait Files {
    /// Opens the next file. `path` is its path.
    fn open(&mut self, path: &Path, read_only: bool) -> Result<ImageFile, OpenError>;
}

/// Opens files by their paths.
pub(crate) struct ByPath;

impl Files for ByPath {
    fn open(&mut self, path: &Path, read_only: bool) -> Result<ImageFile, OpenError> {
        Ok(ImageFile::open(path, read_only)?)
    }
}

/// Opens the image at `path` with its backing files.
pub(crate) fn open(
    path: &Path,
    options: &FileOptions,
    files: &mut dyn Files,
) -> Result<Opened, OpenError> {
    let file = files.open(path, options.read_only)?;
    let header = read_header(path, &file)?;
    let mut is_sound = true;
    if !file.is_read_only() {
        // The image does not show whether its last user was killed, so the reference counts are
        // always checked.
        let repaired = repair(path, &file, &header)?;
        if repaired.count != 0 {
            tracing::info!(
                "{}: repaired after a crash of its last user: {} clusters were in use and not \
                 counted",
                path.display(),
                repaired.count
            );
        }
        if repaired.missing != 0 {
            tracing::warn!(
                "{}: the file ended {} bytes before its last used cluster, and was extended by \
                 zeroes. That is normal for unflushed data after a loss of power; otherwise check \
                 that the file was copied completely",
                path.display(),
                repaired.missing
            );
        }
        is_sound = repaired.is_sound;
    }
    let mut below = Vec::new();
    let backing = match &header.backing {
        None => None,
        Some((name, _)) if !options.allow_backing => {
            let (path, backing) = (path.display().to_string(), name.clone());
            return Err(OpenError::Backing { path, backing });
        }
        Some(backing) => Some(open_backing(path, backing, options.direct, files, &mut below)?),
    };
    let alignment = file.set_direct(options.direct, 512)?;
    let format = format(path, &file, alignment, !file.is_read_only(), backing)?;
    let block_size = options.block_size.unwrap_or(512);
    let bytes = ImageBytes::new(&file, alignment, block_size, options.aio)?;
    let is_direct = alignment.is_some();
    Ok(Opened { format, header, file, below, is_direct, bytes, is_sound })
}

fn read_header(path: &Path, file: &ImageFile) -> Result<Header, OpenError> {
    let name = path.display().to_string();
    let system = |source| OpenError::System { path: name.clone(), what: "reading it", source };
    let len = if file.is_block_device() {
        u64::MAX / 2
    } else {
        file.file().metadata().map_err(system)?.len()
    };
    let start = read_start(file.file()).map_err(system)?;
    Header::parse(&start, len).map_err(|fault| fault.of(&name))
}

/// Opens the backing file of the image at `path`. The file is opened read-only, in the format that
/// the image states.
fn open_backing(
    path: &Path,
    (name, format_name): &(String, Option<String>),
    direct: Direct,
    files: &mut dyn Files,
    below: &mut Vec<ImageFile>,
) -> Result<FormatAccess<FileStorage>, OpenError> {
    let shown = || path.display().to_string();
    if below.len() == MAX_CHAIN {
        let why = format!("it has more than {MAX_CHAIN} backing files, or they form a cycle");
        return Err(OpenError::Damaged { path: shown(), why });
    }
    let has_protocol = name.split_once(':').is_some_and(|(kind, _)| !kind.contains('/'));
    if has_protocol {
        let what = format!("has the backing file `{name}`, which is not a local file");
        return Err(OpenError::Unsupported { path: shown(), what });
    }
    let at: PathBuf = path.parent().unwrap_or(Path::new("")).join(name);
    match format_name.as_deref() {
        Some("raw" | "file" | "host_device") => {
            let file = files.open(&at, true)?;
            let alignment = file.set_direct(direct, 512)?;
            let raw = storage(&file, alignment)
                .and_then(|storage| Raw::builder(storage).open(DenyImplicitOpenGate::default()))
                .map_err(|source| {
                    let path = at.display().to_string();
                    OpenError::System { path, what: "opening it as a raw image", source }
                })?;
            below.push(file);
            Ok(FormatAccess::new(raw))
        }
        Some("qcow2") => {
            let file = files.open(&at, true)?;
            let header = read_header(&at, &file)?;
            let alignment = file.set_direct(direct, 512)?;
            let kept = below.len();
            below.push(file);
            let backing = match &header.backing {
                None => None,
                Some(backing) => Some(open_backing(&at, backing, direct, files, below)?),
            };
            match below.get(kept) {
                Some(file) => format(&at, file, alignment, false, backing),
                None => Err(OpenError::Damaged { path: shown(), why: "it was closed".into() }),
            }
        }
        Some(other) => Err(OpenError::Unsupported {
            path: shown(),
            what: format!("has the backing file `{name}` of the format {other}"),
        }),
        None => Err(OpenError::BackingFormat { path: shown(), backing: name.clone() }),
    }
}

fn storage(file: &ImageFile, alignment: Option<Alignment>) -> io::Result<FileStorage> {
    FileStorage::new(file.file().try_clone()?, alignment)
}

/// Opens an image by `imago`, after its header was checked.
fn format(
    path: &Path,
    file: &ImageFile,
    alignment: Option<Alignment>,
    writable: bool,
    backing: Option<FormatAccess<FileStorage>>,
) -> Result<FormatAccess<FileStorage>, OpenError> {
    let open = || {
        Qcow2::<FileStorage>::builder(storage(file, alignment)?)
            .write(writable)
            .backing(backing)
            .data_file(None)
            .open(DenyImplicitOpenGate::default())
    };
    let name = || path.display().to_string();
    match contain_panic(open) {
        Ok(Ok(image)) => Ok(FormatAccess::new(image)),
        Ok(Err(error)) if error.kind() == io::ErrorKind::InvalidData => {
            Err(OpenError::Damaged { path: name(), why: error.to_string() })
        }
        Ok(Err(source)) => Err(OpenError::System { path: name(), what: "opening it", source }),
        Err(why) => Err(OpenError::Damaged { path: name(), why }),
    }
}
