//! Table of the requests of a queue, for disks that execute requests in several calls.

use crate::index_lists::Lists;

/// Number of tags that have an index entry. Requests with larger tags are found by a linear search.
const INDEXED_TAGS: usize = 1 << 20;

/// Index from tags to request keys. If several requests have the same tag, the index holds the
/// newest one.
#[derive(Debug)]
pub struct TagIndex<K> {
    keys: Vec<Option<K>>,
}

impl<K> Default for TagIndex<K> {
    fn default() -> Self {
        Self { keys: Vec::new() }
    }
}

impl<K: Copy> TagIndex<K> {
    /// Stores the key of the request with this tag. No effect if the tag is too large for the
    /// index.
    pub fn set(&mut self, tag: u32, key: K) {
        let at = tag as usize;
        if at >= INDEXED_TAGS {
            return;
        }
        if at >= self.keys.len() {
            self.keys.resize(at + 1, None);
        }
        if let Some(place) = self.keys.get_mut(at) {
            *place = Some(key);
        }
    }

    /// Returns the key that was stored last for this tag. That request may have ended, and its key
    /// may belong to another request, so the caller has to compare the tag. [`NotIndexed`] means
    /// that the tag is too large for the index; then the caller has to search.
    pub fn get(&self, tag: u32) -> Result<Option<K>, NotIndexed> {
        match self.keys.get(tag as usize) {
            Some(key) => Ok(*key),
            None if (tag as usize) < INDEXED_TAGS => Ok(None),
            None => Err(NotIndexed),
        }
    }
}

/// Error: the tag is too large for the index.
#[derive(Debug)]
pub struct NotIndexed;

/// Number of the list of waiting requests; see [`Lists`].
const WAITING: u32 = 0;
/// Number of the list of ended requests.
const FINISHED: u32 = 1;
/// Number of the list of blocked requests.
const BLOCKED: u32 = 2;

/// Table of the requests of a [`Queue`](crate::Queue), each with a small number as its key. A
/// request is in at most one of three lists: the waiting list, in which the order matters; the list
/// of requests that are blocked by [orphans](crate::Orphans); and the list of ended requests that
/// the caller has not taken yet.
///
/// All operations except `keys` and `unblock_all` take constant time.
#[derive(Debug)]
pub struct Tasks<T> {
    slots: Vec<Option<(u32, T)>>,
    free: Vec<u32>,
    by_tag: TagIndex<u32>,
    lists: Lists,
}

impl<T> Default for Tasks<T> {
    fn default() -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            by_tag: TagIndex::default(),
            lists: Lists::default(),
        }
    }
}

impl<T> Tasks<T> {
    /// Number of requests.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// True if there is no request.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a request with this tag. Returns its key.
    pub fn insert(&mut self, tag: u32, task: T) -> u32 {
        let key = self.free.pop().unwrap_or(self.slots.len() as u32);
        match self.slots.get_mut(key as usize) {
            Some(place) => *place = Some((tag, task)),
            None => self.slots.push(Some((tag, task))),
        }
        self.by_tag.set(tag, key);
        key
    }

    /// Returns a request by its key.
    pub fn get_mut(&mut self, key: u32) -> Option<&mut T> {
        self.slots.get_mut(key as usize)?.as_mut().map(|(_, task)| task)
    }

    /// Returns the tag of a request.
    pub fn tag_of(&self, key: u32) -> Option<u32> {
        self.slots.get(key as usize)?.as_ref().map(|(tag, _)| *tag)
    }

    /// Returns the key of the request with this tag.
    pub fn find(&self, tag: u32) -> Option<u32> {
        let has_it = |place: &Option<(u32, T)>| place.as_ref().is_some_and(|(of, _)| *of == tag);
        match self.by_tag.get(tag) {
            Ok(key) => key.filter(|key| self.slots.get(*key as usize).is_some_and(has_it)),
            Err(_) => self.slots.iter().position(has_it).map(|key| key as u32),
        }
    }

    /// Iterates over the keys of all requests.
    pub fn keys(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.slots).filter_map(|(key, place)| place.as_ref().map(|_| key))
    }

    /// Appends the request to the waiting list. No effect if the request is in a list already.
    pub fn wait(&mut self, key: u32) {
        if !self.lists.contains(key) {
            self.lists.push_back(WAITING, key);
        }
    }

    /// Moves the request to the front of the waiting list. No effect if the request has ended.
    pub fn wait_first(&mut self, key: u32) {
        if self.lists.list_of(key) != Some(FINISHED) {
            self.lists.push_front(WAITING, key);
        }
    }

    /// Returns the request that has waited longest.
    pub fn first_waiting(&self) -> Option<u32> {
        self.lists.first(WAITING)
    }

    /// Removes the request from the waiting list. No effect if the request is not in this list.
    pub fn stop_waiting(&mut self, key: u32) {
        if self.lists.list_of(key) == Some(WAITING) {
            self.lists.remove(key);
        }
    }

    /// Moves the request to the list of blocked requests. No effect if the request has ended.
    pub fn block(&mut self, key: u32) {
        if self.lists.list_of(key) != Some(FINISHED) {
            self.lists.push_back(BLOCKED, key);
        }
    }

    /// True if any request is blocked.
    #[inline]
    pub fn has_blocked(&self) -> bool {
        !self.lists.is_empty(BLOCKED)
    }

    /// Appends all blocked requests to the waiting list, in their order.
    pub fn unblock_all(&mut self) {
        while let Some(key) = self.lists.pop_front(BLOCKED) {
            self.lists.push_back(WAITING, key);
        }
    }

    /// Moves the request to the list of ended requests. Returns false if it was there already.
    pub fn finish(&mut self, key: u32) -> bool {
        let is_new = self.lists.list_of(key) != Some(FINISHED);
        if is_new {
            self.lists.push_back(FINISHED, key);
        }
        is_new
    }

    /// True if any request has ended.
    pub fn has_finished(&self) -> bool {
        !self.lists.is_empty(FINISHED)
    }

    /// Removes and returns the next ended request, with its tag.
    pub fn take_finished(&mut self) -> Option<(u32, T)> {
        let key = self.lists.first(FINISHED)?;
        self.remove(key)
    }

    /// Removes a request and returns it with its tag.
    pub fn remove(&mut self, key: u32) -> Option<(u32, T)> {
        let taken = self.slots.get_mut(key as usize)?.take()?;
        self.lists.remove(key);
        self.free.push(key);
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_found_by_its_tag_until_it_is_removed() {
        let mut tasks = Tasks::default();
        let far = INDEXED_TAGS as u32 + 7;
        let keys = [3, 0, far].map(|tag| tasks.insert(tag, tag));
        for (tag, key) in [3, 0, far].into_iter().zip(keys) {
            assert_eq!(tasks.find(tag), Some(key));
            assert_eq!(tasks.get_mut(key), Some(&mut tag.clone()));
        }
        assert_eq!((tasks.find(1), tasks.find(far + 1), tasks.len()), (None, None, 3));
        assert_eq!(tasks.remove(keys[0]), Some((3, 3)));
        assert_eq!((tasks.find(3), tasks.remove(keys[0]), tasks.len()), (None, None, 2));
        // The new request has the key of the removed one, and another tag.
        assert_eq!(tasks.insert(4, 4), keys[0]);
        assert_eq!((tasks.find(3), tasks.find(4)), (None, Some(keys[0])));
    }

    #[test]
    fn those_that_wait_keep_their_order_and_end_once() {
        let mut tasks = Tasks::default();
        let keys: Vec<u32> = (0..4).map(|tag| tasks.insert(tag, ())).collect();
        keys.iter().for_each(|key| tasks.wait(*key));
        tasks.wait(keys[0]);
        assert_eq!(tasks.first_waiting(), Some(keys[0]));
        tasks.stop_waiting(keys[0]);
        assert_eq!(tasks.first_waiting(), Some(keys[1]));
        tasks.wait_first(keys[3]);
        assert_eq!(tasks.first_waiting(), Some(keys[3]));
        assert!(tasks.finish(keys[3]) && !tasks.finish(keys[3]) && tasks.has_finished());
        tasks.wait(keys[3]);
        tasks.wait_first(keys[3]);
        tasks.block(keys[3]);
        tasks.stop_waiting(keys[3]);
        assert_eq!(tasks.first_waiting(), Some(keys[1]));
        assert!(tasks.finish(keys[0]));
        assert_eq!((tasks.take_finished(), tasks.take_finished()), (Some((3, ())), Some((0, ()))));
        assert_eq!((tasks.take_finished(), tasks.len(), tasks.has_finished()), (None, 2, false));
        assert!(tasks.keys().eq([keys[1], keys[2]]));
    }

    #[test]
    fn blocked_requests_wait_again_or_end() {
        let mut tasks = Tasks::default();
        let keys: Vec<u32> = (0..4).map(|tag| tasks.insert(tag, ())).collect();
        keys.iter().for_each(|key| tasks.wait(*key));
        keys[..3].iter().for_each(|key| tasks.block(*key));
        assert!(tasks.has_blocked());
        assert_eq!(tasks.first_waiting(), Some(keys[3]));
        // `wait` leaves a blocked request blocked, and `finish` ends it.
        tasks.wait(keys[0]);
        assert!(tasks.finish(keys[1]));
        tasks.unblock_all();
        assert!(!tasks.has_blocked());
        tasks.stop_waiting(keys[3]);
        assert_eq!(tasks.first_waiting(), Some(keys[0]));
        tasks.stop_waiting(keys[0]);
        assert_eq!(tasks.first_waiting(), Some(keys[2]));
    }
}
