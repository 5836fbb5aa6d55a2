//! Transfer of a file-backed disk to another process.
//!
//! The open file itself is passed, and the lock with it, so that no third process can take the lock
//! in between. No probing is repeated, so the transfer is fast. Recorded states (lost data, a
//! truncated file) are passed too.

use super::flusher::Flusher;
use super::namespace::NamespaceFacts;
use super::open::{engine, syncs, zeroes};
use super::options::FileOptions;
use super::shared::{Alignment, FileShared, Hold, ranges};
use super::write_atomicity::WriteAtomicity;
use crate::sys;
use serde::{Deserialize, Serialize};
use shadowbell_disk::DiskInfo;
use shadowbell_state::{Descriptors, FdRef};
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

#[derive(Serialize, Deserialize)]
struct SavedFile {
    file: FdRef,
    info: DiskInfo,
    direct: Option<Alignment>,
    waits: bool,
    regular: bool,
    end: u64,
    full: u64,
    no_zero_range: bool,
    no_punch: bool,
    lost: i32,
    /// Identify data, if the file is an NVMe generic character device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    namespace: Option<NamespaceFacts>,
}

/// Key around the state of a namespace, so that a release without namespace support does not take
/// it for a file.
const NAMESPACE: &str = "namespace";

pub(super) fn save(shared: &FileShared, fds: &mut Descriptors) -> io::Result<serde_json::Value> {
    let saved = SavedFile {
        file: fds.add(shared.file.try_clone()?.into()),
        info: shared.info.clone(),
        direct: shared.direct,
        waits: shared.waits,
        regular: shared.regular,
        end: shared.end.load(Ordering::Relaxed),
        full: shared.full.load(Ordering::Relaxed),
        no_zero_range: shared.no_zero_range.load(Ordering::Relaxed),
        no_punch: shared.no_punch.load(Ordering::Relaxed),
        lost: shared.flusher.lost(),
        namespace: shared.namespace.clone(),
    };
    let is_namespace = saved.namespace.is_some();
    let state = serde_json::to_value(saved)?;
    Ok(if is_namespace { serde_json::json!({ NAMESPACE: state }) } else { state })
}

pub(super) fn adopt(
    options: &FileOptions,
    state: &serde_json::Value,
    fds: &mut Descriptors,
) -> Result<FileShared, String> {
    let state = state.get(NAMESPACE).unwrap_or(state);
    let saved = SavedFile::deserialize(state).map_err(|error| error.to_string())?;
    let file = fds.take(saved.file).map_err(|error| error.to_string())?;
    let about = saved.namespace.as_ref();
    let uring = if about.is_some() { sys::takes_commands } else { sys::available };
    let (engine, no_uring) = engine(options.aio, uring).map_err(|why| why.to_string())?;
    let file = Arc::new(File::from(file));
    let flusher = Flusher::after(Arc::clone(&file), syncs(about, saved.direct), saved.lost);
    let metadata = file.metadata().map_err(|error| error.to_string())?;
    let size = saved.info.block_size;
    let direct = saved.direct.is_some();
    let atom = match about {
        Some(facts) => WriteAtomicity::of_namespace(facts, size),
        None => WriteAtomicity::of_file(&file, &metadata, !saved.regular, direct, size),
    };
    Ok(FileShared {
        // The lock is shared until the process that passed it has ended.
        hold: Hold::new(&file, &flusher, true),
        flusher,
        file,
        info: saved.info.clone(),
        atom,
        ranges: ranges(saved.direct, saved.info.block_size),
        direct: saved.direct,
        engine,
        no_uring,
        waits: saved.waits,
        regular: saved.regular,
        end: AtomicU64::new(saved.end),
        full: AtomicU64::new(saved.full),
        no_zero_range: AtomicBool::new(saved.no_zero_range),
        no_punch: AtomicBool::new(saved.no_punch),
        namespace: saved.namespace,
        zeroes: zeroes().map_err(|error| error.to_string())?,
        #[cfg(feature = "scripted")]
        script: None,
    })
}
