//! The guest's memory, as far as the SSD may reach it by itself.

use crate::device::Shared;
use shadowbell_driver::SharedMemory;
use shadowbell_memory::{DmaTable, Mapping, Segments};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// What all queues of a disk have lent.
#[derive(Default)]
pub(crate) struct Loans(Mutex<List>);

#[derive(Default)]
struct List {
    lent: Vec<Weak<SharedMemory>>,
    /// What the SSD can not have.
    refused: Vec<Weak<Mapping>>,
}

impl Loans {
    fn list(&self) -> MutexGuard<'_, List> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shared {
    /// Has the SSD reach a mapping, if it can. Takes its time the first time.
    fn lend(&self, mapping: &Arc<Mapping>) -> Option<Arc<SharedMemory>> {
        // Held while the memory is shared, so that two queues do not share it twice.
        let mut list = self.loans.list();
        list.lent.retain(|lent| lent.strong_count() != 0);
        list.refused.retain(|refused| refused.strong_count() != 0);
        let mut known = list.lent.iter().filter_map(Weak::upgrade);
        if let Some(lent) = known.find(|lent| Arc::ptr_eq(lent.mapping(), mapping)) {
            return Some(lent);
        }
        drop(known);
        if list.refused.iter().any(|refused| refused.as_ptr() == Arc::as_ptr(mapping)) {
            return None;
        }
        match self.controller().share_memory(mapping) {
            Ok(lent) => {
                tracing::debug!(len = mapping.len(), "{} reaches a guest's memory", self.name);
                let lent = Arc::new(lent);
                list.lent.push(Arc::downgrade(&lent));
                Some(lent)
            }
            Err(error) => {
                if list.refused.is_empty() {
                    tracing::info!("{}: what is read and written is copied: {error}", self.name);
                }
                list.refused.push(Arc::downgrade(mapping));
                None
            }
        }
    }
}

/// What one queue remembers of it.
pub(crate) struct Lender {
    shared: Arc<Shared>,
    lent: Vec<Known<Arc<SharedMemory>>>,
    /// Mappings that the SSD can not have.
    refused: Vec<Known<Arc<Mapping>>>,
}

/// Memory, and where the guest had it when it was last looked for.
struct Known<T> {
    memory: T,
    iova: u64,
}

impl<T> Known<T> {
    fn new(memory: T) -> Self {
        Self { memory, iova: 0 }
    }

    /// Whether `mapping`, which is the memory's, is in `table` still. There can be tens of thousands of
    /// ranges, which change all the time, so it is looked for where it was first.
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

impl Lender {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, lent: Vec::new(), refused: Vec::new() }
    }

    /// The memory with the byte at `address`, which is one of `data`, if the SSD can reach it: and
    /// where in the memory the byte is.
    pub(crate) fn find(&mut self, address: usize, data: &Segments) -> Option<(&SharedMemory, usize)> {
        if !self.shared.zero_copy {
            return None;
        }
        let known = self.lent.iter().position(|lent| lent.memory.mapping().holds(address));
        let index = match known {
            Some(index) => index,
            None if self.refused.iter().any(|refused| refused.memory.holds(address)) => {
                return None;
            }
            None => self.learn(data.mapping_at(address)?)?,
        };
        let lent = &self.lent.get(index)?.memory;
        Some((lent, address - lent.mapping().address()))
    }

    #[cold]
    fn learn(&mut self, mapping: &Arc<Mapping>) -> Option<usize> {
        match self.shared.lend(mapping) {
            Some(lent) => {
                self.lent.push(Known::new(lent));
                Some(self.lent.len() - 1)
            }
            None => {
                self.refused.push(Known::new(Arc::clone(mapping)));
                None
            }
        }
    }

    /// Forgets memory that is not in `table`.
    pub(crate) fn keep(&mut self, table: &DmaTable) {
        self.lent.retain_mut(|lent| lent.is_in(table, |memory| memory.mapping()));
        self.refused.retain_mut(|refused| refused.is_in(table, |memory| memory));
    }
}
