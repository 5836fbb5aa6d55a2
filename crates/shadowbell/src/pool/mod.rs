//! A pool of namespaces: a directory, in which each namespace has a sparse file, and an index.
//!
//! All files are there before the process is in its sandbox: from then on one of them is made
//! longer or shorter, and none comes or goes. The index says which are namespaces; what it says
//! counts, and not the length of a file. The bytes of all namespaces together are never more than
//! the capacity. They are not reserved: a file system that is full before that has writes end with
//! Capacity Exceeded, as those of any sparse image.
//!
//! | module | what it is |
//! |---|---|
//! | `spec` | how a person names a pool |
//! | `index` | what is written down |
//! | `erase` | what becomes of the files |
//!
//! Which disks that makes is in `pool_disks.rs`, and who carries out what hosts order in
//! `serve/namespace_requests.rs`.

pub(crate) mod erase;
pub(crate) mod index;
mod spec;

pub(crate) use spec::PoolSpec;

use crate::exit::bad_input;
use anyhow::{Context, anyhow};
use index::{Index, MOST, VACANT};
use parking_lot::Mutex;
use shadowbell_backend::ImageFile;
use shadowbell_controller::{NamespacePool, PoolDone, PoolOrder, PoolPort, PoolState};
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, OnceLock};

/// The name of the index.
const INDEX: &str = "index";

/// The pools of this process.
static POOLS: Mutex<BTreeMap<PathBuf, Arc<HostPool>>> = Mutex::new(BTreeMap::new());

/// A pool.
#[derive(Debug)]
pub(crate) struct HostPool {
    spec: PoolSpec,
    /// The index, to be read by a process that has not the lock yet.
    reader: File,
    kept: Mutex<Kept>,
    /// How far a sanitize operation is, in 65536th parts.
    parts: AtomicU16,
    port: OnceLock<PoolPort>,
    orders: Sender<(PoolOrder, PoolDone)>,
    /// For the thread that carries them out.
    waiting: Mutex<Option<Receiver<(PoolOrder, PoolDone)>>>,
}

#[derive(Debug)]
struct Kept {
    /// The index, locked; not as long as another process has it.
    file: Option<ImageFile>,
    number: u64,
    index: Index,
}

impl HostPool {
    /// Opens a pool, and makes what is missing of it. With `locked` nobody else may have it; else
    /// it is [locked](Self::lock) later, when the process before has let go of it.
    fn open(spec: &PoolSpec, locked: bool) -> anyhow::Result<Self> {
        make(&spec.directory)?;
        let path = spec.directory.join(INDEX);
        let file = locked.then(|| ImageFile::open(&path, false)).transpose();
        let file = file.map_err(bad_input)?;
        let reader = File::open(&path)?;
        let (number, index) = index::read(&reader)?;
        let (orders, waiting) = channel();
        let own = Self {
            spec: spec.clone(),
            reader,
            kept: Mutex::new(Kept { file, number, index }),
            parts: AtomicU16::new(0),
            port: OnceLock::new(),
            orders,
            waiting: Mutex::new(Some(waiting)),
        };
        Ok(own)
    }

    /// The file of a namespace.
    pub(crate) fn file(&self, nsid: u32) -> PathBuf {
        file_of(&self.spec.directory, nsid)
    }

    /// What is written down.
    pub(crate) fn index(&self) -> Index {
        self.kept.lock().index.clone()
    }

    /// Reads what the process before has written down, as long as this one has not the lock.
    pub(crate) fn refresh(&self) -> io::Result<()> {
        let mut kept = self.kept.lock();
        if kept.file.is_none() {
            (kept.number, kept.index) = index::read(&self.reader)?;
        }
        Ok(())
    }

    /// Has the pool, if nobody else has it.
    ///
    /// # Errors
    /// Somebody has it, or it can not be read.
    pub(crate) fn lock(&self) -> anyhow::Result<()> {
        if self.kept.lock().file.is_some() {
            return Ok(());
        }
        let file = ImageFile::open(&self.spec.directory.join(INDEX), false)?;
        let (number, index) = index::read(file.file())?;
        *self.kept.lock() = Kept { file: Some(file), number, index };
        Ok(())
    }

    /// Changes what is written down; nothing changes if that can not be. Only the thread that
    /// carries out orders does that.
    ///
    /// # Errors
    /// The system's.
    pub(crate) fn change(&self, change: impl FnOnce(&mut Index)) -> io::Result<()> {
        let mut kept = self.kept.lock();
        let mut after = kept.index.clone();
        change(&mut after);
        after.namespaces.sort_by_key(|entry| entry.nsid);
        let Some(file) = kept.file.take() else {
            return Err(io::Error::other("another process has the pool"));
        };
        let number = kept.number + 1;
        // Nobody who asks for the state waits for the storage.
        drop(kept);
        let written = index::write(file.file(), number, &after);
        let mut kept = self.kept.lock();
        kept.file = Some(file);
        if written.is_ok() {
            (kept.number, kept.index) = (number, after);
        }
        written
    }

    /// A sanitize operation is so far.
    pub(crate) fn set_parts(&self, parts: u16) {
        self.parts.store(parts, Ordering::Relaxed);
    }

    /// How much the namespaces may have together, in bytes.
    pub(crate) fn capacity(&self) -> u64 {
        self.spec.capacity
    }

    /// Where it is.
    pub(crate) fn directory(&self) -> &Path {
        &self.spec.directory
    }

    /// The way to the controller.
    pub(crate) fn port(&self) -> Option<&PoolPort> {
        self.port.get()
    }

    /// What is ordered, for whoever carries it out: the first one gets it.
    pub(crate) fn take_orders(&self) -> Option<Receiver<(PoolOrder, PoolDone)>> {
        self.waiting.lock().take()
    }
}

impl NamespacePool for HostPool {
    fn state(&self) -> PoolState {
        let parts = self.parts.load(Ordering::Relaxed);
        self.kept.lock().index.state(self.spec.capacity, parts)
    }

    fn connect(&self, port: PoolPort) {
        let _ = self.port.set(port);
    }

    fn order(&self, order: PoolOrder, done: PoolDone) {
        // If nobody carries anything out, it ends as it is dropped.
        let _ = self.orders.send((order, done));
    }
}

fn file_of(directory: &Path, nsid: u32) -> PathBuf {
    directory.join(format!("namespace-{nsid:03}"))
}

/// Makes what is missing of a pool: the directory, the index, and a file for each namespace.
fn make(directory: &Path) -> anyhow::Result<()> {
    let here = || format!("the pool {}", directory.display());
    if !directory.exists() {
        DirBuilder::new().mode(0o700).create(directory).with_context(here).map_err(bad_input)?;
    }
    let create = |path: &Path| {
        let mut how = OpenOptions::new();
        how.write(true).create(true).truncate(false).mode(0o600).open(path).with_context(here)
    };
    let path = directory.join(INDEX);
    if !path.exists() {
        let new = directory.join("index.new");
        let file = create(&new).map_err(bad_input)?;
        // Both places have their storage from here on.
        for number in 0..2 {
            index::write(&file, number, &Index::default())?;
        }
        file.sync_all()?;
        std::fs::rename(&new, &path)?;
    }
    for nsid in 1..=MOST {
        let path = file_of(directory, nsid);
        if !path.exists() {
            create(&path).map_err(bad_input)?.set_len(VACANT)?;
        }
    }
    File::open(directory)?.sync_all()?;
    Ok(())
}

/// The pool in this directory, if this process has it.
pub(crate) fn opened(spec: &PoolSpec) -> Option<Arc<HostPool>> {
    POOLS.lock().get(&spec.directory).cloned()
}

/// Opens the pools of the controllers of a server that begins. Before the process is in its
/// sandbox.
///
/// # Errors
/// One of them can not be had.
pub(crate) fn open_all<'a>(
    specs: impl Iterator<Item = &'a PoolSpec>,
    locked: bool,
) -> anyhow::Result<()> {
    for spec in specs {
        let twice =
            || bad_input(anyhow!("the pool {} is asked for twice", spec.directory.display()));
        if POOLS.lock().contains_key(&spec.directory) {
            return Err(twice());
        }
        let pool = HostPool::open(spec, locked)?;
        POOLS.lock().insert(spec.directory.clone(), Arc::new(pool));
    }
    Ok(())
}
