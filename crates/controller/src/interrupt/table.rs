//! Table of interrupt vectors (MSI-X): eventfds of the VMM or the driver.

use parking_lot::{Mutex, MutexGuard};
use shadowbell_memory::EventFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Interrupt vectors of a controller. The control plane sets them, and I/O threads raise them.
///
/// An I/O thread caches the eventfd of a vector. It reads the table again only if the generation
/// has changed, so it takes no lock to raise an interrupt.
#[derive(Debug)]
pub(crate) struct IrqTable {
    generation: AtomicU32,
    lines: Mutex<Vec<Line>>,
}

#[derive(Debug, Default)]
struct Line {
    event: Option<Arc<EventFd>>,
    /// True if the vector was raised while no eventfd was connected. The next connected eventfd is
    /// signalled.
    pending: bool,
}

impl IrqTable {
    pub(crate) fn new(vectors: usize) -> Self {
        let lines = (0..vectors).map(|_| Line::default()).collect();
        Self { generation: AtomicU32::new(0), lines: Mutex::new(lines) }
    }

    /// Number of vectors.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Line>> {
        self.lines.lock()
    }

    /// Connects `vector` to `event`, or disconnects it. False if the vector does not exist.
    pub(crate) fn set(&self, vector: usize, event: Option<EventFd>) -> bool {
        let mut lines = self.lock();
        let Some(line) = lines.get_mut(vector) else { return false };
        line.event = event.map(Arc::new);
        if let Some(event) = &line.event
            && std::mem::take(&mut line.pending)
        {
            event.signal();
        }
        self.generation.fetch_add(1, Ordering::Release);
        true
    }

    /// Raises `vector` when a client requests it by SET_IRQS. Returns false if the vector does not
    /// exist.
    pub(crate) fn trigger(&self, vector: usize) -> bool {
        let mut lines = self.lock();
        match lines.get_mut(vector) {
            Some(Line { event: Some(event), .. }) => event.signal(),
            Some(line) => line.pending = true,
            None => return false,
        }
        true
    }

    /// Vectors that were raised while no eventfd was connected.
    pub(crate) fn pending(&self) -> Vec<u16> {
        let lines = self.lock();
        (0..).zip(lines.iter()).filter(|(_, line)| line.pending).map(|(vector, _)| vector).collect()
    }

    /// Disconnects all vectors and clears pending interrupts.
    pub(crate) fn clear(&self) {
        self.lock().iter_mut().for_each(|line| *line = Line::default());
        self.generation.fetch_add(1, Ordering::Release);
    }

    /// Clears pending interrupts: all queues were deleted.
    pub(crate) fn clear_pending(&self) {
        self.lock().iter_mut().for_each(|line| line.pending = false);
    }

    /// Eventfd connected to `vector`.
    pub(crate) fn event(&self, vector: usize) -> Option<Arc<EventFd>> {
        self.lock().get(vector).and_then(|line| line.event.clone())
    }

    fn current(&self, vector: u16) -> (u32, Option<Arc<EventFd>>) {
        let lines = self.lock();
        let event = lines.get(usize::from(vector)).and_then(|line| line.event.clone());
        (self.generation.load(Ordering::Acquire), event)
    }
}

/// Interrupt line of a completion queue, with a cached eventfd.
#[derive(Debug)]
pub(crate) struct IrqLine {
    table: Arc<IrqTable>,
    vector: u16,
    generation: u32,
    event: Option<Arc<EventFd>>,
}

impl IrqLine {
    pub(crate) fn new(table: Arc<IrqTable>, vector: u16) -> Self {
        let (generation, event) = table.current(vector);
        Self { table, vector, generation, event }
    }

    pub(crate) fn vector(&self) -> u16 {
        self.vector
    }

    /// Raises the vector.
    pub(crate) fn raise(&mut self) {
        if self.table.generation.load(Ordering::Acquire) != self.generation {
            (self.generation, self.event) = self.table.current(self.vector);
        }
        match &self.event {
            Some(event) => event.signal(),
            None => {
                self.table.trigger(usize::from(self.vector));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupt_without_a_descriptor_is_not_lost() {
        let table = Arc::new(IrqTable::new(3));
        let mut line = IrqLine::new(Arc::clone(&table), 2);
        line.raise();
        let event = EventFd::new().unwrap();
        assert!(table.set(2, Some(event.try_clone().unwrap())));
        assert_eq!(event.drain(), 1, "delivered as soon as it was connected");
        line.raise();
        assert_eq!(event.drain(), 1);
        table.set(2, None);
        line.raise();
        assert_eq!(event.drain(), 0);
        table.clear_pending();
        table.set(2, Some(event.try_clone().unwrap()));
        assert_eq!(event.drain(), 0);
        assert!(!table.set(3, None));
        assert!(!table.trigger(3));
    }
}
