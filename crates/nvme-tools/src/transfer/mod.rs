//! `read`, `write` and `copy`: transfer bytes from, to and between namespaces.
//!
//! Byte ranges need not be aligned: the partial blocks at both ends are read and rewritten.
//! Several commands are in flight at once. A write ends with a flush, so the data is durable when
//! the program ends successfully.

pub(crate) mod disk;

use crate::overwrite::Overwrite;
use crate::session::Session;
use anyhow::{Context, anyhow, bail};
use disk::{DEPTH, DiskReader, DiskWriter, Piece};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::io::Errno;
use shadowbell_config::parse;
use shadowbell_config::target::{self, Target};
use shadowbell_driver::{AttachOptions, Namespace};
use shadowbell_process::{exit, signals};
use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

/// Read bytes from a namespace
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct ReadArgs {
    /// Namespace to read from
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// Offset of the first byte: 4096, 1MiB
    #[arg(long, default_value = "0", value_parser = parse::offset, value_name = "BYTES")]
    pub offset: u64,
    /// Number of bytes [default: up to the end]
    #[arg(long, value_parser = parse::offset, value_name = "BYTES")]
    pub length: Option<u64>,
    /// Output file; `-` is standard output [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Write bytes to a namespace
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct WriteArgs {
    /// Namespace to write to
    #[arg(value_name = "TARGET")]
    pub target: Target,
    /// Offset of the first byte: 4096, 1MiB
    #[arg(long, default_value = "0", value_parser = parse::offset, value_name = "BYTES")]
    pub offset: u64,
    /// Maximum number of bytes [default: the whole input]
    #[arg(long, value_parser = parse::offset, value_name = "BYTES")]
    pub length: Option<u64>,
    /// Input file; `-` is standard input [default: standard input]
    #[arg(short, long, value_name = "FILE")]
    pub input: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) overwrite: Overwrite,
}

/// Copy a namespace or disk to another one
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = target::HELP)]
pub struct CopyArgs {
    /// Namespace or disk to copy
    #[arg(value_name = "SRC")]
    pub source: Target,
    /// Namespace or disk to overwrite; a missing file is created, as a qcow2 image if its name ends
    /// in .qcow2
    #[arg(value_name = "DST")]
    pub destination: Target,
    #[command(flatten)]
    pub(crate) overwrite: Overwrite,
}

/// Runs `read`.
///
/// # Errors
/// Errors of the driver or the output; with exit status [`exit::BAD_INPUT`] if the range is not
/// inside the namespace.
pub fn read(args: &ReadArgs) -> anyhow::Result<ExitCode> {
    let output = args.output.as_deref().filter(|path| !is_standard(path));
    if output.is_none() && io::stdout().is_terminal() {
        let error = anyhow!("not writing disk data to a terminal; use `> FILE` or `-o FILE`");
        return Err(exit::bad_input(error));
    }
    let mut session = attach(&args.target, 1)?;
    let namespace = session.namespace()?.clone();
    let rest = rest_from(&session, &namespace, args.offset)?;
    let length = args.length.unwrap_or(rest);
    if length > rest {
        return Err(exit::bad_input(anyhow!(
            "{}: {length} bytes from byte {} on reach past the end: there are {rest}",
            args.target,
            args.offset
        )));
    }
    let mut reader = DiskReader::open(&mut session, namespace, args.offset, length)?;
    let (mut out, name): (Box<dyn Write>, String) = match output {
        Some(path) => (Box::new(create(path)?), path.display().to_string()),
        None => (Box::new(io::stdout().lock()), "standard output".to_owned()),
    };
    let bar = progress(Some(length));
    // Without `skip_holes`, every piece has bytes.
    while let Some(Piece::Bytes(bytes)) = reader.next()? {
        out.write_all(bytes).with_context(|| name.clone())?;
        bar.inc(bytes.len() as u64);
    }
    out.flush().with_context(|| name.clone())?;
    bar.finish_and_clear();
    drop(reader);
    session.detach()?;
    tracing::info!("read {length} bytes of {}", args.target);
    Ok(ExitCode::SUCCESS)
}

/// True if `path` means standard input or output. A file of that name is `./-`.
fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

/// Creates or truncates a file, or opens a pipe or device. Refuses a disk that is in use, possibly
/// by this program itself.
fn create(path: &Path) -> anyhow::Result<File> {
    let name = || path.display().to_string();
    let file = File::options().write(true).create(true).truncate(false).open(path);
    let file = file.map_err(exit::bad_input).with_context(name)?;
    // Disks in use hold a lock. A file that does not support locks is not in use as a disk.
    let locked = fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive);
    if matches!(locked, Err(Errno::AGAIN | Errno::ACCESS)) {
        let what = "is a disk that is in use; give the path of another file";
        return Err(exit::bad_input(anyhow!("{} {what}", name())));
    }
    if file.metadata().is_ok_and(|about| about.is_file()) {
        file.set_len(0).with_context(name)?;
    }
    Ok(file)
}

/// Runs `write`.
///
/// # Errors
/// Errors of the driver or the input; with exit status [`exit::BAD_INPUT`] if the input does not
/// fit.
pub fn write(args: &WriteArgs) -> anyhow::Result<ExitCode> {
    let (mut input, name, length): (Box<dyn Read>, String, Option<u64>) =
        match args.input.as_deref().filter(|path| !is_standard(path)) {
            Some(path) => {
                let name = path.display().to_string();
                let file =
                    File::open(path).map_err(exit::bad_input).with_context(|| name.clone())?;
                let about = file.metadata()?;
                if about.is_dir() {
                    return Err(exit::bad_input(anyhow!("{name} is a directory")));
                }
                // The length of a pipe or device is unknown.
                let length = about.is_file().then_some(about.len());
                (Box::new(file), name, length)
            }
            None => (Box::new(io::stdin().lock()), "standard input".to_owned(), None),
        };
    let length = match (length, args.length) {
        (Some(there), Some(wanted)) => Some(there.min(wanted)),
        (there, _) => there,
    };
    args.overwrite.check(&args.target)?;
    let mut session = attach(&args.target, 1)?;
    let namespace = writable(&session)?;
    let rest = rest_from(&session, &namespace, args.offset)?;
    if let Some(length) = length.or(args.length)
        && length > rest
    {
        return Err(exit::bad_input(anyhow!(
            "{}: {length} bytes do not fit: there is room for {rest} from byte {} on",
            args.target,
            args.offset
        )));
    }
    let mut writer = DiskWriter::open(&mut session, namespace, args.offset)?;
    let bar = progress(length);
    let mut input = input.by_ref().take(args.length.unwrap_or(u64::MAX));
    let mut bytes = vec![0; 256 << 10];
    let mut written = 0;
    loop {
        let count = match input.read(&mut bytes) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error).context(name),
        };
        if count == 0 {
            break;
        }
        if count as u64 > rest - written {
            let fits = usize::try_from(rest - written)?;
            writer.write(bytes.get(..fits).unwrap_or_default())?;
            writer.finish()?;
            bail!("{}: full after {rest} bytes, but {name} has more data", args.target);
        }
        writer.write(bytes.get(..count).unwrap_or_default())?;
        written += count as u64;
        bar.inc(count as u64);
    }
    writer.finish()?;
    bar.finish_and_clear();
    session.detach()?;
    tracing::info!("wrote {written} bytes to {}", args.target);
    Ok(ExitCode::SUCCESS)
}

/// Runs `copy`.
///
/// # Errors
/// Errors of the driver; with exit status [`exit::BAD_INPUT`] if the destination is too small.
pub fn copy(args: &CopyArgs) -> anyhow::Result<ExitCode> {
    let CopyArgs { source, destination, overwrite } = args;
    let stop = signals::stop_flag().context("catching signals")?;
    let copy_stream =
        |reader, writer, bytes| copy_stream(reader, writer, bytes, (destination, &stop));
    if source == destination {
        return Err(exit::bad_input(anyhow!("{source} is the source and the destination")));
    }
    // A destination that does not exist has no content to lose; `create_missing` creates it.
    let is_new =
        matches!(destination, Target::Local { disk } if is_path(disk) && !Path::new(disk).exists());
    if !is_new {
        overwrite.check(destination)?;
    }
    // A controller has one host at a time, so two of its namespaces need one session.
    let same = match (source, destination) {
        (Target::VfioUser { socket: one, .. }, Target::VfioUser { socket: other, .. }) => {
            same_file(one, other)
        }
        _ => false,
    };
    let mut from = attach(source, if same { 2 } else { 1 })?;
    let namespace = from.namespace()?.clone();
    let bytes = namespace.bytes();
    if same {
        let into =
            from.controller.namespace(destination.nsid()).cloned().ok_or_else(|| {
                exit::bad_input(anyhow!("{destination}: there is no such namespace"))
            })?;
        if into.nsid() == namespace.nsid() {
            return Err(exit::bad_input(anyhow!("{source} is the source and the destination")));
        }
        check_room(&into, bytes, source, destination)?;
        let mut reader = DiskReader::open(&mut from, namespace, 0, bytes)?;
        reader.skip_holes(from.controller.admin());
        let writer = DiskWriter::open(&mut from, into, 0)?;
        copy_stream(reader, writer, bytes)?;
    } else {
        let created = create_missing(destination, bytes)?;
        let outcome = attach(destination, 1).and_then(|mut to| {
            let into = writable(&to)?;
            check_room(&into, bytes, source, destination)?;
            let mut reader = DiskReader::open(&mut from, namespace, 0, bytes)?;
            reader.skip_holes(from.controller.admin());
            let writer = DiskWriter::open(&mut to, into, 0)?;
            copy_stream(reader, writer, bytes)?;
            to.detach()
        });
        if let (Err(_), Some(path)) = (&outcome, created) {
            // After an interruption, the incomplete file is removed. After an error, it remains,
            // because its content may be useful.
            let is_removed = stop.load(Ordering::Relaxed) && fs::remove_file(&path).is_ok();
            let what = if is_removed { "was incomplete, and is removed" } else { "is incomplete" };
            tracing::warn!("{} {what}", path.display());
        }
        outcome?;
    }
    from.detach()?;
    tracing::info!("copied {bytes} bytes of {source} to {destination}");
    Ok(ExitCode::SUCCESS)
}

/// Copies `bytes` bytes, unless a signal stops it.
fn copy_stream(
    mut reader: DiskReader,
    mut writer: DiskWriter,
    bytes: u64,
    (destination, stop): (&Target, &AtomicBool),
) -> anyhow::Result<()> {
    let bar = progress(Some(bytes));
    let mut done = 0;
    while let Some(read) = reader.next()? {
        if stop.load(Ordering::Relaxed) {
            // `done` includes the writes in flight. They have to complete before the message is
            // true.
            writer.finish()?;
            bail!("interrupted: {destination} has the first {done} of {bytes} bytes");
        }
        let len = match read {
            Piece::Bytes(bytes) => {
                writer.write(bytes)?;
                bytes.len() as u64
            }
            Piece::Zeroes(len) => {
                writer.write_zeroes(len)?;
                len
            }
        };
        done += len;
        bar.inc(len);
    }
    writer.finish()?;
    bar.finish_and_clear();
    Ok(())
}

fn attach(target: &Target, queue_pairs: u16) -> anyhow::Result<Session> {
    // A queue of N entries holds N - 1 commands.
    let queue_depth = (DEPTH as u32 + 1).next_power_of_two();
    Session::attach(target, &AttachOptions { queue_pairs, queue_depth, ..AttachOptions::default() })
}

fn writable(session: &Session) -> anyhow::Result<Namespace> {
    let namespace = session.namespace()?.clone();
    if namespace.is_read_only() {
        return Err(exit::bad_input(anyhow!("{} is read-only", session.target())));
    }
    Ok(namespace)
}

fn rest_from(session: &Session, namespace: &Namespace, offset: u64) -> anyhow::Result<u64> {
    namespace.bytes().checked_sub(offset).ok_or_else(|| {
        let bytes = namespace.bytes();
        let target = session.target();
        exit::bad_input(anyhow!("{target}: byte {offset} is past the end at {bytes}"))
    })
}

fn check_room(
    into: &Namespace,
    bytes: u64,
    source: &Target,
    destination: &Target,
) -> anyhow::Result<()> {
    if into.bytes() >= bytes {
        return Ok(());
    }
    let room = into.bytes();
    Err(exit::bad_input(anyhow!(
        "{source} has {bytes} bytes, but {destination} has room for only {room}"
    )))
}

fn same_file(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    real(one) == real(other)
}

/// Creates the destination with `bytes` bytes if it is the path of a missing file: a qcow2 image if
/// the name ends in `.qcow2`, otherwise a raw image.
fn create_missing(destination: &Target, bytes: u64) -> anyhow::Result<Option<PathBuf>> {
    let Target::Local { disk } = destination else { return Ok(None) };
    let path = Path::new(disk);
    if !is_path(disk) || path.exists() {
        return Ok(None);
    }
    if path.extension().is_some_and(|extension| extension == "qcow2") {
        shadowbell_disk_qcow2::create(path, bytes).map_err(exit::bad_input)?;
    } else {
        let created = File::create_new(path).and_then(|file| file.set_len(bytes));
        created.map_err(exit::bad_input).with_context(|| path.display().to_string())?;
    }
    Ok(Some(path.to_owned()))
}

/// True if the name of a disk is a plain path: not `mem:1GiB`, and without options after a `?`.
fn is_path(disk: &str) -> bool {
    let is_kind = disk.split_once(':').is_some_and(|(kind, _)| !kind.contains('/'));
    !is_kind && !disk.contains('?')
}

fn progress(bytes: Option<u64>) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let (bar, template) = match bytes {
        Some(bytes) => (
            ProgressBar::new(bytes),
            "{wide_bar} {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}",
        ),
        None => (ProgressBar::new_spinner(), "{spinner} {bytes} {binary_bytes_per_sec}"),
    };
    // The templates are constant and valid; an error would leave the default style.
    match ProgressStyle::with_template(template) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}
