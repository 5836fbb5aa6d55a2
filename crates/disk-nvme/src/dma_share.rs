//! Guest memory that the SSD accesses directly.

use parking_lot::Mutex;
use shadowbell_driver::{Controller, SharedMemory};
use shadowbell_memory::{DmaTable, Mapping, Segments};
use std::sync::{Arc, Weak};

/// Guest memory that is shared with the SSD, for all queues of a disk.
pub(crate) struct DmaShares {
    /// Controller of the SSD. Sharing maps the memory in the IOMMU domain of the SSD (VFIO), or at
    /// its vfio-user server.
    controller: Arc<Mutex<Controller>>,
    /// Name of the disk in messages.
    name: String,
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    shared: Vec<Weak<SharedMemory>>,
    /// Mappings whose sharing has failed. It is not tried again.
    refused: Vec<Weak<Mapping>>,
}

impl DmaShares {
    pub(crate) fn new(controller: Arc<Mutex<Controller>>, name: &str) -> Self {
        Self { controller, name: name.to_owned(), list: Mutex::default() }
    }

    /// Shares a mapping with the SSD, or returns it if it is already shared. `None` if that is not
    /// possible. The first call for a mapping blocks.
    fn share(&self, mapping: &Arc<Mapping>) -> Option<Arc<SharedMemory>> {
        // The lock is held until the memory is shared. Otherwise two queues could share the same
        // memory twice.
        let mut list = self.list.lock();
        list.shared.retain(|shared| shared.strong_count() != 0);
        list.refused.retain(|refused| refused.strong_count() != 0);
        let mut known = list.shared.iter().filter_map(Weak::upgrade);
        if let Some(shared) = known.find(|shared| Arc::ptr_eq(shared.mapping(), mapping)) {
            return Some(shared);
        }
        drop(known);
        if list.refused.iter().any(|refused| refused.as_ptr() == Arc::as_ptr(mapping)) {
            return None;
        }
        let outcome = self.controller.lock().share_memory(mapping);
        match outcome {
            Ok(shared) => {
                tracing::debug!(
                    len = mapping.len(),
                    "{} accesses guest memory directly",
                    self.name
                );
                let shared = Arc::new(shared);
                list.shared.push(Arc::downgrade(&shared));
                Some(shared)
            }
            Err(error) => {
                if list.refused.is_empty() {
                    tracing::info!(
                        "{}: zero-copy is not possible, data are copied: {error}",
                        self.name
                    );
                }
                list.refused.push(Arc::downgrade(mapping));
                None
            }
        }
    }
}

/// Mappings that one queue has already looked up in [`DmaShares`], so that it needs no lock per
/// request.
pub(crate) struct DmaShare {
    /// `None` if the SSD must not access guest memory.
    shares: Option<Arc<DmaShares>>,
    shared: Vec<Known<Arc<SharedMemory>>>,
    /// Mappings whose sharing has failed.
    refused: Vec<Known<Arc<Mapping>>>,
}

/// Memory, and the guest address at which it was found last.
struct Known<T> {
    memory: T,
    iova: u64,
}

impl<T> Known<T> {
    fn new(memory: T) -> Self {
        Self { memory, iova: 0 }
    }

    /// True if the mapping of this memory is still in `table`. The last known address is tried
    /// first, because the table may have tens of thousands of ranges and change often.
    fn is_in(&mut self, table: &DmaTable, mapping: impl Fn(&T) -> &Arc<Mapping>) -> bool {
        let mapping = mapping(&self.memory);
        if table.mapping_at(self.iova).is_some_and(|other| Arc::ptr_eq(mapping, other)) {
            return true;
        }
        let found = table.iova_of(mapping);
        self.iova = found.unwrap_or(0);
        found.is_some()
    }
}

impl DmaShare {
    pub(crate) fn new(shares: Option<Arc<DmaShares>>) -> Self {
        Self { shares, shared: Vec::new(), refused: Vec::new() }
    }

    /// Finds the shared memory that contains `address`. `address` must be the address of a byte of
    /// `data`. Shares the memory if necessary. Returns the memory and the offset in it, or `None`
    /// if the SSD cannot access this byte directly.
    pub(crate) fn find(
        &mut self,
        address: usize,
        data: &Segments,
    ) -> Option<(&SharedMemory, usize)> {
        self.shares.as_ref()?;
        let known = self.shared.iter().position(|shared| shared.memory.mapping().holds(address));
        let index = match known {
            Some(index) => index,
            None if self.refused.iter().any(|refused| refused.memory.holds(address)) => {
                return None;
            }
            None => self.add(data.mapping_at(address)?)?,
        };
        let shared = &self.shared.get(index)?.memory;
        Some((shared, address - shared.mapping().address()))
    }

    #[cold]
    fn add(&mut self, mapping: &Arc<Mapping>) -> Option<usize> {
        match self.shares.as_ref()?.share(mapping) {
            Some(shared) => {
                self.shared.push(Known::new(shared));
                Some(self.shared.len() - 1)
            }
            None => {
                self.refused.push(Known::new(Arc::clone(mapping)));
                None
            }
        }
    }

    /// Drops the entries of all mappings that are not in the new DMA map `table`.
    pub(crate) fn retain(&mut self, table: &DmaTable) {
        self.shared.retain_mut(|shared| shared.is_in(table, |memory| memory.mapping()));
        self.refused.retain_mut(|refused| refused.is_in(table, |memory| memory));
    }
}
