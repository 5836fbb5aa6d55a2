//! The requests that a queue has, for disks that carry them out in parts.

use crate::lists::Lists;

/// Tags from here on are looked for one by one.
const INDEXED_TAGS: usize = 1 << 20;

/// Which request has a tag: the newest one, if tags are used again.
#[derive(Debug)]
pub(crate) struct TagIndex<K> {
    keys: Vec<Option<K>>,
}

impl<K: Copy> TagIndex<K> {
    pub(crate) fn new() -> Self {
        Self { keys: Vec::new() }
    }

    /// Remembers which request has this tag.
    pub(crate) fn set(&mut self, tag: u32, key: K) {
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

    /// The request that had this tag last: whoever asks makes sure that it still has it. An error
    /// if such a tag is not remembered, and has to be searched for.
    pub(crate) fn get(&self, tag: u32) -> Result<Option<K>, NotIndexed> {
        match self.keys.get(tag as usize) {
            Some(key) => Ok(*key),
            None if (tag as usize) < INDEXED_TAGS => Ok(None),
            None => Err(NotIndexed),
        }
    }
}

/// The tag is too large for the index.
#[derive(Debug)]
pub(crate) struct NotIndexed;

/// The list of those that wait; see [`Lists`].
const WAITING: u32 = 0;
/// The list of those that have ended.
const OVER: u32 = 1;

/// The requests that a [`Queue`](crate::Queue) has: each has a key, a small number. Some wait for
/// their turn, in order, and some have ended and are to be handed back.
///
/// Whatever is done with one takes the same time, however many there are.
#[derive(Debug)]
pub struct Tasks<T> {
    places: Vec<Option<(u32, T)>>,
    free: Vec<u32>,
    by_tag: TagIndex<u32>,
    lists: Lists,
}

impl<T> Default for Tasks<T> {
    fn default() -> Self {
        let by_tag = TagIndex::new();
        Self { places: Vec::new(), free: Vec::new(), by_tag, lists: Lists::default() }
    }
}

impl<T> Tasks<T> {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a request with this tag. Its key.
    pub fn insert(&mut self, tag: u32, task: T) -> u32 {
        let key = self.free.pop().unwrap_or(self.places.len() as u32);
        match self.places.get_mut(key as usize) {
            Some(place) => *place = Some((tag, task)),
            None => self.places.push(Some((tag, task))),
        }
        self.by_tag.set(tag, key);
        key
    }

    /// A request by its key.
    pub fn get_mut(&mut self, key: u32) -> Option<&mut T> {
        self.places.get_mut(key as usize)?.as_mut().map(|(_, task)| task)
    }

    /// The tag of a request.
    pub fn tag_of(&self, key: u32) -> Option<u32> {
        self.places.get(key as usize)?.as_ref().map(|(tag, _)| *tag)
    }

    /// The key of the request with this tag.
    pub fn find(&self, tag: u32) -> Option<u32> {
        let has_it = |place: &Option<(u32, T)>| place.as_ref().is_some_and(|(of, _)| *of == tag);
        match self.by_tag.get(tag) {
            Ok(key) => key.filter(|key| self.places.get(*key as usize).is_some_and(has_it)),
            Err(_) => self.places.iter().position(has_it).map(|key| key as u32),
        }
    }

    /// The keys of all.
    pub fn keys(&self) -> impl Iterator<Item = u32> {
        (0..).zip(&self.places).filter_map(|(key, place)| place.as_ref().map(|_| key))
    }

    /// The request waits, behind all others that do. One that waits or has ended keeps its place.
    pub fn wait(&mut self, key: u32) {
        if !self.lists.contains(key) {
            self.lists.push_back(WAITING, key);
        }
    }

    /// The request waits, before all others that do. One that has ended keeps its place.
    pub fn wait_first(&mut self, key: u32) {
        if self.lists.list_of(key) != Some(OVER) {
            self.lists.push_front(WAITING, key);
        }
    }

    /// The one that has waited longest.
    pub fn first_waiting(&self) -> Option<u32> {
        self.lists.first(WAITING)
    }

    /// The request does not wait any more. One that has ended stays so.
    pub fn stop_waiting(&mut self, key: u32) {
        if self.lists.list_of(key) == Some(WAITING) {
            self.lists.remove(key);
        }
    }

    /// The request has ended, and does not wait any more. Whether that is new.
    pub fn end(&mut self, key: u32) -> bool {
        let is_new = self.lists.list_of(key) != Some(OVER);
        if is_new {
            self.lists.push_back(OVER, key);
        }
        is_new
    }

    /// Whether there is one that has ended.
    pub fn any_over(&self) -> bool {
        !self.lists.is_empty(OVER)
    }

    /// Takes the next one of those that have ended, with its tag.
    pub fn take_over(&mut self) -> Option<(u32, T)> {
        let key = self.lists.first(OVER)?;
        self.remove(key)
    }

    /// Takes a request out, with its tag.
    pub fn remove(&mut self, key: u32) -> Option<(u32, T)> {
        let taken = self.places.get_mut(key as usize)?.take()?;
        self.lists.remove(key);
        self.free.push(key);
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_found_by_its_tag_as_long_as_it_is_there() {
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
        // Its place is used again, under another tag.
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
        assert!(tasks.end(keys[3]) && !tasks.end(keys[3]) && tasks.any_over());
        tasks.wait(keys[3]);
        tasks.wait_first(keys[3]);
        tasks.stop_waiting(keys[3]);
        assert_eq!(tasks.first_waiting(), Some(keys[1]));
        assert!(tasks.end(keys[0]));
        assert_eq!((tasks.take_over(), tasks.take_over()), (Some((3, ())), Some((0, ()))));
        assert_eq!((tasks.take_over(), tasks.len(), tasks.any_over()), (None, 2, false));
        assert!(tasks.keys().eq([keys[1], keys[2]]));
    }
}
