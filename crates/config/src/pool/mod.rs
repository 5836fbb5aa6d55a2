//! Pool of namespaces: a directory with a sparse file per namespace and an index.
//!
//! All files are created before the process enters its sandbox. Afterwards files only grow or
//! shrink. The index, not the length of a file, defines which namespaces exist. The sum of all
//! namespace sizes never exceeds the capacity. Space is not reserved. If the file system is full
//! before the capacity is reached, writes fail with Capacity Exceeded, as with any sparse image.
//!
//! | module | contents |
//! |---|---|
//! | `spec` | parser of `DIR?capacity=SIZE` |
//! | `index` | stored state |
//! | `erase` | erasure of files |
//!
//! The disks of a pool are in `pool_disks.rs`; requests of hosts are executed in
//! `crates/server/src/namespace_requests.rs`.

pub mod erase;
pub mod index;
mod spec;

pub use spec::PoolSpec;

use anyhow::{Context, anyhow};
use index::{Index, MAX_NAMESPACES, VACANT};
use parking_lot::Mutex;
use shadowbell_controller::{NamespacePool, PoolCallback, PoolOrder, PoolPort, PoolState};
use shadowbell_disk_file::ImageFile;
use shadowbell_process::exit::{bad_input, unusable};
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};

/// File name of the index.
const INDEX: &str = "index";

/// Open pools of this process, by directory.
static POOLS: Mutex<BTreeMap<PathBuf, Arc<HostPool>>> = Mutex::new(BTreeMap::new());

/// Pool of namespaces in a directory.
#[derive(Debug)]
pub struct HostPool {
    spec: PoolSpec,
    /// Index file, opened for reading before this process has the lock.
    reader: File,
    open_index: Mutex<OpenIndex>,
    /// Progress of a sanitize operation, in 65536ths.
    parts: AtomicU16,
    port: OnceLock<PoolPort>,
    orders: Sender<(PoolOrder, PoolCallback)>,
    /// Receiver of `orders`. The thread that executes requests takes it.
    waiting: Mutex<Option<Receiver<(PoolOrder, PoolCallback)>>>,
}

#[derive(Debug)]
struct OpenIndex {
    /// Locked index file; `None` while another process has the lock.
    file: Option<ImageFile>,
    number: u64,
    index: Index,
}

impl HostPool {
    /// Opens a pool and creates its missing files. If `locked` is false, the caller
    /// [locks](Self::lock) the pool later, when the previous process has released it.
    fn open(spec: &PoolSpec, locked: bool) -> anyhow::Result<Self> {
        create_missing(&spec.directory)?;
        let path = spec.directory.join(INDEX);
        let file = locked.then(|| ImageFile::open(&path, false)).transpose();
        let file = file.map_err(unusable)?;
        let reader = File::open(&path)?;
        let (number, index) = index::read(&reader)?;
        let (orders, waiting) = channel();
        let own = Self {
            spec: spec.clone(),
            reader,
            open_index: Mutex::new(OpenIndex { file, number, index }),
            parts: AtomicU16::new(0),
            port: OnceLock::new(),
            orders,
            waiting: Mutex::new(Some(waiting)),
        };
        Ok(own)
    }

    /// Path of a namespace's file.
    pub fn file(&self, nsid: u32) -> PathBuf {
        file_of(&self.spec.directory, nsid)
    }

    /// Current state of the index.
    pub fn index(&self) -> Index {
        self.open_index.lock().index.clone()
    }

    /// Reads the index again, unless this process has the lock: only the process with the lock
    /// changes the index.
    pub fn refresh(&self) -> io::Result<()> {
        let mut open_index = self.open_index.lock();
        if open_index.file.is_none() {
            (open_index.number, open_index.index) = index::read(&self.reader)?;
        }
        Ok(())
    }

    /// Locks the pool for this process. No effect if it is locked already.
    ///
    /// # Errors
    /// Another process has the lock, or the index cannot be read.
    pub fn lock(&self) -> anyhow::Result<()> {
        if self.open_index.lock().file.is_some() {
            return Ok(());
        }
        let file = ImageFile::open(&self.spec.directory.join(INDEX), false)?;
        let (number, index) = index::read(file.file())?;
        *self.open_index.lock() = OpenIndex { file: Some(file), number, index };
        Ok(())
    }

    /// Changes the index in the file, then in memory. Only the thread that executes requests calls
    /// this function.
    ///
    /// # Errors
    /// Errors of the file system. The state in memory is then unchanged.
    pub fn change(&self, change: impl FnOnce(&mut Index)) -> io::Result<()> {
        let mut open_index = self.open_index.lock();
        let mut after = open_index.index.clone();
        change(&mut after);
        after.namespaces.sort_by_key(|entry| entry.nsid);
        let Some(file) = open_index.file.take() else {
            return Err(io::Error::other("another process has locked the pool"));
        };
        let number = open_index.number + 1;
        // The lock is released during the write, so that readers of the state do not wait for the
        // storage.
        drop(open_index);
        let written = index::write(file.file(), number, &after);
        let mut open_index = self.open_index.lock();
        open_index.file = Some(file);
        if written.is_ok() {
            (open_index.number, open_index.index) = (number, after);
        }
        written
    }

    /// Sets the progress of a sanitize operation.
    pub fn set_parts(&self, parts: u16) {
        self.parts.store(parts, Ordering::Relaxed);
    }

    /// Capacity in bytes: the limit for the sum of all namespace sizes.
    pub fn capacity(&self) -> u64 {
        self.spec.capacity
    }

    /// Rate of Sanitize Overwrite, in bytes per second.
    pub fn overwrite_rate(&self) -> u64 {
        self.spec.overwrite_rate
    }

    /// Directory of the pool.
    pub fn directory(&self) -> &Path {
        &self.spec.directory
    }

    /// Handle with which the pool notifies its controller; `None` before the controller has
    /// connected.
    pub fn port(&self) -> Option<&PoolPort> {
        self.port.get()
    }

    /// Receiver of requests, for the thread that executes them. `None` after the first call.
    pub fn take_orders(&self) -> Option<Receiver<(PoolOrder, PoolCallback)>> {
        self.waiting.lock().take()
    }
}

impl NamespacePool for HostPool {
    fn state(&self) -> PoolState {
        let parts = self.parts.load(Ordering::Relaxed);
        self.open_index.lock().index.state(self.spec.capacity, parts)
    }

    fn connect(&self, port: PoolPort) {
        let _ = self.port.set(port);
    }

    fn order(&self, order: PoolOrder, done: PoolCallback) {
        // Without a receiver, `done` is dropped, which ends the request.
        let _ = self.orders.send((order, done));
    }
}

fn file_of(directory: &Path, nsid: u32) -> PathBuf {
    directory.join(format!("namespace-{nsid:03}"))
}

/// Creates the missing parts of a pool: the directory, the index, and a file for each namespace.
fn create_missing(directory: &Path) -> anyhow::Result<()> {
    let here = || format!("the pool {}", directory.display());
    if !directory.exists() {
        DirBuilder::new().mode(0o700).create(directory).with_context(here).map_err(unusable)?;
    }
    let create = |path: &Path| {
        let mut how = OpenOptions::new();
        how.write(true).create(true).truncate(false).mode(0o600).open(path).with_context(here)
    };
    let path = directory.join(INDEX);
    if !path.exists() {
        let new = directory.join("index.new");
        let file = create(&new).map_err(unusable)?;
        // Writing both slots once allocates their storage.
        for number in 0..2 {
            index::write(&file, number, &Index::default())?;
        }
        file.sync_all()?;
        std::fs::rename(&new, &path)?;
    }
    for nsid in 1..=MAX_NAMESPACES {
        let path = file_of(directory, nsid);
        if !path.exists() {
            create(&path).map_err(unusable)?.set_len(VACANT)?;
        }
    }
    File::open(directory)?.sync_all()?;
    Ok(())
}

/// Open pool of this process in the directory of `spec`.
pub fn opened(spec: &PoolSpec) -> Option<Arc<HostPool>> {
    POOLS.lock().get(&spec.directory).cloned()
}

/// Opens the pools of all controllers at start-up, before the process enters its sandbox.
///
/// # Errors
/// A pool cannot be opened or locked, or is named twice.
pub fn open_all<'a>(specs: impl Iterator<Item = &'a PoolSpec>, locked: bool) -> anyhow::Result<()> {
    for spec in specs {
        let twice = || bad_input(anyhow!("the pool {} is named twice", spec.directory.display()));
        if POOLS.lock().contains_key(&spec.directory) {
            return Err(twice());
        }
        let pool = HostPool::open(spec, locked)?;
        POOLS.lock().insert(spec.directory.clone(), Arc::new(pool));
    }
    Ok(())
}
