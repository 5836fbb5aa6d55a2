//! Queue of calls that wait for a thread.

use shadowbell_disk::Lists;

/// Index of the only list in [`Jobs::order`].
const QUEUE: u32 = 0;

/// Waiting calls, in order. The low half of a call's id is the number of its slot in the ring: a
/// small number, unique among the waiting calls. This number is also the index of the call in
/// `slots`, so a call is removed without a search.
pub(super) struct Jobs<J> {
    slots: Vec<Option<(u64, J)>>,
    order: Lists,
    count: usize,
}

impl<J> Default for Jobs<J> {
    fn default() -> Self {
        Self { slots: Vec::new(), order: Lists::default(), count: 0 }
    }
}

impl<J> Jobs<J> {
    pub(super) fn len(&self) -> usize {
        self.count
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(super) fn push_back(&mut self, id: u64, job: J) {
        let at = id as u32;
        if at as usize >= self.slots.len() {
            self.slots.resize_with(at as usize + 1, || None);
        }
        if let Some(slot) = self.slots.get_mut(at as usize) {
            debug_assert!(slot.is_none(), "a slot has one call");
            *slot = Some((id, job));
            self.order.push_back(QUEUE, at);
            self.count += 1;
        }
    }

    pub(super) fn pop_front(&mut self) -> Option<J> {
        let first = self.order.first(QUEUE)?;
        self.take(first)
    }

    /// Removes the call `id` and returns it, if it is waiting.
    pub(super) fn remove(&mut self, id: u64) -> Option<J> {
        let slot = self.slots.get(id as u32 as usize)?;
        slot.as_ref().filter(|(waiting, _)| *waiting == id)?;
        self.take(id as u32)
    }

    /// Removes the `n`th call.
    #[cfg(feature = "scripted")]
    pub(super) fn remove_nth(&mut self, n: usize) -> Option<J> {
        let at = self.order.iter(QUEUE).nth(n)?;
        self.take(at)
    }

    fn take(&mut self, at: u32) -> Option<J> {
        let (_, job) = self.slots.get_mut(at as usize)?.take()?;
        self.order.remove(at);
        self.count -= 1;
        Some(job)
    }
}
