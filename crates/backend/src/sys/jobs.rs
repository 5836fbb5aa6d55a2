//! Calls that wait for a thread, in order.

use crate::lists::Lists;

/// The one list that there is.
const QUEUE: u32 = 0;

/// Calls that wait. Each has a number, of which the low half is small and of no other call that
/// waits: the slot of its ring. So one is taken out from among the others without a search.
pub(super) struct Jobs<J> {
    places: Vec<Option<(u64, J)>>,
    order: Lists,
    count: usize,
}

impl<J> Default for Jobs<J> {
    fn default() -> Self {
        Self { places: Vec::new(), order: Lists::default(), count: 0 }
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
        if at as usize >= self.places.len() {
            self.places.resize_with(at as usize + 1, || None);
        }
        if let Some(place) = self.places.get_mut(at as usize) {
            debug_assert!(place.is_none(), "a slot has one call");
            *place = Some((id, job));
            self.order.push_back(QUEUE, at);
            self.count += 1;
        }
    }

    pub(super) fn pop_front(&mut self) -> Option<J> {
        let first = self.order.first(QUEUE)?;
        self.take(first)
    }

    /// Takes this call out, if it waits.
    pub(super) fn remove(&mut self, id: u64) -> Option<J> {
        let place = self.places.get(id as u32 as usize)?;
        place.as_ref().filter(|(waiting, _)| *waiting == id)?;
        self.take(id as u32)
    }

    /// Takes the `n`th out.
    #[cfg(feature = "scripted")]
    pub(super) fn remove_nth(&mut self, n: usize) -> Option<J> {
        let at = self.order.iter(QUEUE).nth(n)?;
        self.take(at)
    }

    fn take(&mut self, at: u32) -> Option<J> {
        let (_, job) = self.places.get_mut(at as usize)?.take()?;
        self.order.remove(at);
        self.count -= 1;
        Some(job)
    }
}
