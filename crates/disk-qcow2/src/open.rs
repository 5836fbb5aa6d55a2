//! Opening an image, its external data file and its backing files.

use crate::check::Check;
use crate::error::OpenError;
use crate::format::{Base, Format};
use crate::header::{Header, read_start};
use crate::repair::Scan;
use crate::snapshot::Snapshot;
use crate::storage::FileStorage;
use shadowbell_disk_file::{Direct, FileOptions, ImageBytes, ImageFile};
use shadowbell_memory::contain_panic;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum number of backing files in a chain.
pub(crate) const MAX_CHAIN: usize = 64;

/// Opened image.
pub(crate) struct Opened {
    pub(crate) format: Arc<Format>,
    /// Locked files of the image: its own file, its data file, and its backing files.
    pub(crate) files: Vec<ImageFile>,
    /// File for the fast path. `None` without io_uring.
    pub(crate) bytes: Option<ImageBytes>,
    /// Check of the image, if it continues in the background.
    pub(crate) check: Option<Arc<Check>>,
}

/// Provider of the open files of an image. [`open`](Self::open) is called for the image first, then
/// for its data file, then for each backing file.
pub(crate) trait Files {
    /// Opens the next file, which has the path `path`.
    fn open(&mut self, path: &Path, read_only: bool) -> Result<ImageFile, OpenError>;
}

/// Opens files by their paths.
pub(crate) struct ByPath;

impl Files for ByPath {
    fn open(&mut self, path: &Path, read_only: bool) -> Result<ImageFile, OpenError> {
        Ok(ImageFile::open(path, read_only)?)
    }
}

/// Opens the image at `path`, its data file and its backing files.
pub(crate) fn open(
    path: &Path,
    options: &FileOptions,
    files: &mut dyn Files,
) -> Result<Opened, OpenError> {
    let mut chain = Chain { files, opened: Vec::new(), options };
    let format = Arc::new(chain.open_image(path, options.read_only)?);
    let opened = chain.opened;
    format.limit_caches(opened.len() - 1);
    let is_writable = opened.first().is_some_and(|file| !file.is_read_only());
    // The guest's data are in the external data file if there is one, and otherwise in the image.
    let data = opened.get(usize::from(format.data_file.is_some())).or(opened.first());
    let block_size = options.block_size.unwrap_or(512);
    let bytes = match data {
        Some(data) => {
            let alignment = data.set_direct(options.direct, 512)?;
            ImageBytes::new(data, alignment, block_size, options.aio)?
        }
        None => None,
    };
    let size = format.header.size;
    if !size.is_multiple_of(u64::from(block_size)) {
        let path = path.display().to_string();
        return Err(OpenError::NotBlockMultiple { path, size, block_size });
    }
    // The check is the last step of opening, because it may continue in the background.
    let check = if is_writable {
        contain_panic(|| prepare(path, &format)).unwrap_or_else(|why| {
            Err(OpenError::Damaged { path: path.display().to_string(), why })
        })?
    } else {
        None
    };
    Ok(Opened { format, files: opened, bytes, check })
}

/// Checks an image that is opened for writing, and repairs its reference counts if it is dirty.
/// Changes nothing before all checks have passed. Returns the check of the references if it
/// continues in the background.
fn prepare(path: &Path, format: &Arc<Format>) -> Result<Option<Arc<Check>>, OpenError> {
    let name = path.display().to_string();
    if format.header.is_corrupt {
        let why = format!(
            "it is marked as corrupt, so it is not written; serve it with `read-only=on`, or repair \
             it with `qemu-img check -r all {name}`"
        );
        return Err(OpenError::Refused { path: name, why });
    }
    let system = |source| table_error(&name, source);
    let snapshots = Snapshot::read_all(&format.file, &format.header).map_err(system)?;
    if let Err(why) = format.protect_tables(&snapshots).map_err(system)? {
        return Err(OpenError::Damaged { path: name, why });
    }
    let top = {
        let meta = &mut *format.meta();
        meta.counts.top(&format.file, &mut meta.cache).map_err(system)?
    };
    // If an image is not dirty, each cluster that it refers to has a reference count above 0. So
    // the file is complete if it contains the last cluster with a reference count above 0.
    let is_long = top <= format.file.len().div_ceil(format.layout.cluster());
    if !format.header.is_dirty && (is_long || !format.file.grows) {
        format.header.clear_features(&format.file).map_err(system)?;
        return Ok(None);
    }
    let (format, shown) = (Arc::clone(format), name.clone());
    Check::run(&name, move |goes_on| check(&shown, &format, &snapshots, goes_on))
}

/// Compares the length of the file with all references, and repairs the reference counts of a dirty
/// image.
fn check(
    name: &str,
    format: &Format,
    snapshots: &[Snapshot],
    goes_on: &dyn Fn() -> bool,
) -> Result<(), OpenError> {
    let system = |source| table_error(name, source);
    let scan = Scan { format, snapshots, goes_on };
    let (counts, len) = scan.run(format.header.is_dirty).map_err(system)?;
    let missing = len.saturating_sub(format.file.len().next_multiple_of(format.layout.cluster()));
    if format.file.grows && missing != 0 {
        let why = format!(
            "the file ends {missing} bytes before the last cluster that its tables refer to: its \
             copy is not complete, or it was not flushed before a loss of power; serve it with \
             `read-only=on`, or extend it with `truncate -s {len} {name}`, and the missing data \
             read as zeroes"
        );
        return Err(OpenError::Refused { path: name.to_owned(), why });
    }
    format.header.clear_features(&format.file).map_err(system)?;
    if format.header.is_dirty {
        if let Err(why) = scan.rebuild(counts).map_err(system)? {
            return Err(OpenError::Damaged { path: name.to_owned(), why: why.to_owned() });
        }
        format.header.clear_dirty(&format.file).map_err(system)?;
        tracing::info!("{name}: it was not closed, and its reference counts were repaired");
    }
    Ok(())
}

/// Creates the error for tables that cannot be read or are invalid.
fn table_error(name: &str, source: io::Error) -> OpenError {
    let path = name.to_owned();
    match source.kind() {
        io::ErrorKind::InvalidData => OpenError::Damaged { path, why: format!("it has {source}") },
        _ => OpenError::System { path, what: "reading its tables", source },
    }
}

/// Files that are opened for one image.
struct Chain<'a> {
    files: &'a mut dyn Files,
    opened: Vec<ImageFile>,
    options: &'a FileOptions,
}

impl Chain<'_> {
    /// Opens a file, which must not be in the chain yet.
    fn add(&mut self, path: &Path, read_only: bool) -> Result<&ImageFile, OpenError> {
        let shown = || path.display().to_string();
        let is_known = |about: io::Result<std::fs::Metadata>| {
            let id = about.ok().map(|about| (about.dev(), about.ino()));
            self.opened.iter().any(|file| {
                let about = file.file().metadata().ok();
                id.is_some() && about.map(|about| (about.dev(), about.ino())) == id
            })
        };
        let cycle = || OpenError::Refused {
            path: shown(),
            why:
                "it is its own backing file, directly or through others; give it another one with \
                  `qemu-img rebase -u`"
                    .to_owned(),
        };
        if self.opened.len() > MAX_CHAIN {
            let why = format!("it is more than {MAX_CHAIN} backing files away from its image");
            return Err(OpenError::Refused { path: shown(), why });
        }
        let file = match self.files.open(path, read_only) {
            Ok(file) if is_known(file.file().metadata()) => return Err(cycle()),
            Ok(file) => file,
            // The file is busy because this process has opened it already.
            Err(OpenError::File(shadowbell_disk::OpenError::Busy { .. }))
                if is_known(std::fs::metadata(path)) =>
            {
                return Err(cycle());
            }
            Err(error) => return Err(error),
        };
        self.opened.push(file);
        self.opened.last().ok_or_else(cycle)
    }

    /// Opens an image with its data file and its backing files.
    fn open_image(&mut self, path: &Path, read_only: bool) -> Result<Format, OpenError> {
        let options = self.options;
        let shown = || path.display().to_string();
        let image = self.add(path, read_only)?;
        let (header, is_read_only) = (read_header(path, image)?, image.is_read_only());
        let file = storage(path, image, options.direct)?;
        let named = header.data_file.as_ref().or(header.backing.as_ref().map(|(name, _)| name));
        if let Some(name) = named.filter(|_| !options.allow_backing) {
            let (path, name) = (shown(), name.clone());
            return Err(match header.data_file {
                Some(_) => OpenError::DataFile { path, name },
                None => OpenError::Backing { path, backing: name },
            });
        }
        let data_file = match &header.data_file {
            None => None,
            Some(name) => {
                let at = beside(path, name)?;
                let data_file = self.add(&at, read_only)?;
                if data_file.is_read_only() && !is_read_only {
                    let why =
                        "its external data file is not writable; serve it with `read-only=on`";
                    return Err(OpenError::Refused { path: shown(), why: why.to_owned() });
                }
                Some(storage(&at, data_file, options.direct)?)
            }
        };
        let base = match &header.backing {
            None => None,
            Some(backing) => Some(self.open_backing(path, backing)?),
        };
        Ok(Format::new(header, file, data_file, base))
    }

    /// Opens the backing file of the image at `path`. The file is opened read-only, in the format
    /// that the image states.
    fn open_backing(
        &mut self,
        path: &Path,
        (name, format): &(String, Option<String>),
    ) -> Result<Base, OpenError> {
        let shown = || path.display().to_string();
        let at = beside(path, name)?;
        match format.as_deref() {
            Some("raw" | "file" | "host_device") => {
                let direct = self.options.direct;
                let file = self.add(&at, true)?;
                Ok(Base::Raw(storage(&at, file, direct)?))
            }
            Some("qcow2") => Ok(Base::Qcow2(Box::new(self.open_image(&at, true)?))),
            Some(other) => Err(OpenError::Unsupported {
                path: shown(),
                what: format!("has the backing file `{name}` of the format {other}"),
            }),
            None => Err(OpenError::BackingFormat { path: shown(), backing: name.clone() }),
        }
    }
}

/// Path of a local file that the image at `path` names.
pub(crate) fn beside(path: &Path, name: &str) -> Result<PathBuf, OpenError> {
    let name = name.strip_prefix("file:").unwrap_or(name);
    if name.split_once(':').is_some_and(|(kind, _)| !kind.contains('/')) {
        return Err(OpenError::Unsupported {
            path: path.display().to_string(),
            what: format!("refers to `{name}`, which is not a local file"),
        });
    }
    Ok(path.parent().unwrap_or(Path::new("")).join(name))
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

fn storage(path: &Path, file: &ImageFile, direct: Direct) -> Result<FileStorage, OpenError> {
    let alignment = file.set_direct(direct, 512)?;
    let clone = file.file().try_clone().and_then(|file| FileStorage::new(file, alignment));
    clone.map_err(|source| {
        let path = path.display().to_string();
        OpenError::System { path, what: "reading its length", source }
    })
}
