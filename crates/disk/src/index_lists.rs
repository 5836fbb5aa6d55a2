//! Intrusive doubly linked lists of small numbers, with constant-time removal.

/// End of a list: no number.
const NONE: u32 = u32::MAX;

/// List and neighbours of a number.
#[derive(Clone, Copy, Debug)]
struct Link {
    list: u32,
    before: u32,
    after: u32,
}

const NOWHERE: Link = Link { list: NONE, before: NONE, after: NONE };

#[derive(Clone, Copy, Debug)]
struct Ends {
    first: u32,
    last: u32,
}

const EMPTY: Ends = Ends { first: NONE, last: NONE };

/// Doubly linked lists of small numbers, such as indices into a table. A number is in at most one
/// list. Insertion, look-up and removal take constant time. Lists are named by small numbers too.
///
/// Removal from the middle takes constant time too, because a guest can have many commands in
/// flight and abort all of them at once.
#[derive(Debug, Default)]
pub struct Lists {
    links: Vec<Link>,
    ends: Vec<Ends>,
}

impl Lists {
    /// Returns the first number of a list.
    pub fn first(&self, list: u32) -> Option<u32> {
        let first = self.ends.get(list as usize)?.first;
        (first != NONE).then_some(first)
    }

    /// Returns the number after `of` in its list.
    pub fn after(&self, of: u32) -> Option<u32> {
        let after = self.links.get(of as usize)?.after;
        (after != NONE).then_some(after)
    }

    /// True if the list is empty.
    pub fn is_empty(&self, list: u32) -> bool {
        self.first(list).is_none()
    }

    /// True if the number is in any list.
    pub fn contains(&self, number: u32) -> bool {
        self.list_of(number).is_some()
    }

    /// Returns the list that contains the number.
    pub fn list_of(&self, number: u32) -> Option<u32> {
        let list = self.links.get(number as usize)?.list;
        (list != NONE).then_some(list)
    }

    /// Iterates over the numbers of a list, in order.
    pub fn iter(&self, list: u32) -> impl Iterator<Item = u32> {
        std::iter::successors(self.first(list), |number| self.after(*number))
    }

    /// Appends a number to a list, after removing it from the list that contains it.
    pub fn push_back(&mut self, list: u32, number: u32) {
        let last = self.prepare(list, number).last;
        self.put(number, Link { list, before: last, after: NONE });
    }

    /// Inserts a number at the front of a list, after removing it from the list that contains it.
    pub fn push_front(&mut self, list: u32, number: u32) {
        let first = self.prepare(list, number).first;
        self.put(number, Link { list, before: NONE, after: first });
    }

    /// Removes a number from its list. Returns true if a list contained it.
    pub fn remove(&mut self, number: u32) -> bool {
        let Some(link) = self.links.get_mut(number as usize) else { return false };
        let Link { list, before, after } = std::mem::replace(link, NOWHERE);
        if list == NONE {
            return false;
        }
        self.set_after(list, before, after);
        self.set_before(list, after, before);
        true
    }

    /// Removes and returns the first number of a list.
    pub fn pop_front(&mut self, list: u32) -> Option<u32> {
        let first = self.first(list)?;
        self.remove(first);
        Some(first)
    }

    /// Empties all lists.
    pub fn clear(&mut self) {
        self.links.clear();
        self.ends.clear();
    }

    /// Prepares an insertion: grows the tables for `list` and `number`, and removes the number from
    /// its list. Returns the ends of `list`.
    fn prepare(&mut self, list: u32, number: u32) -> Ends {
        if number as usize >= self.links.len() {
            self.links.resize(number as usize + 1, NOWHERE);
        }
        if list as usize >= self.ends.len() {
            self.ends.resize(list as usize + 1, EMPTY);
        }
        self.remove(number);
        self.ends.get(list as usize).copied().unwrap_or(EMPTY)
    }

    fn put(&mut self, number: u32, link: Link) {
        if let Some(place) = self.links.get_mut(number as usize) {
            *place = link;
        }
        self.set_after(link.list, link.before, number);
        self.set_before(link.list, link.after, number);
    }

    /// Sets the successor of `of`, or the first element of the list if `of` is [`NONE`].
    fn set_after(&mut self, list: u32, of: u32, after: u32) {
        if let Some(link) = self.links.get_mut(of as usize) {
            link.after = after;
        } else if let Some(ends) = self.ends.get_mut(list as usize) {
            ends.first = after;
        }
    }

    /// Sets the predecessor of `of`, or the last element of the list if `of` is [`NONE`].
    fn set_before(&mut self, list: u32, of: u32, before: u32) {
        if let Some(link) = self.links.get_mut(of as usize) {
            link.before = before;
        } else if let Some(ends) = self.ends.get_mut(list as usize) {
            ends.last = before;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    #[derive(Clone, Copy, Debug)]
    enum Step {
        Back(u32, u32),
        Front(u32, u32),
        Remove(u32),
        Pop(u32),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..4u32, 0..12u32).prop_map(|(list, number)| Step::Back(list, number)),
            (0..4u32, 0..12u32).prop_map(|(list, number)| Step::Front(list, number)),
            (0..12u32).prop_map(Step::Remove),
            (0..4u32).prop_map(Step::Pop),
        ]
    }

    proptest! {
        #[test]
        fn index_lists_equal_a_model_of_deques(steps in prop::collection::vec(step(), 0..200)) {
            let mut lists = Lists::default();
            let mut model: [VecDeque<u32>; 4] = Default::default();
            let forget = |model: &mut [VecDeque<u32>; 4], number| {
                model.iter_mut().for_each(|list| list.retain(|other| *other != number));
            };
            for step in steps {
                match step {
                    Step::Back(list, number) => {
                        forget(&mut model, number);
                        model[list as usize].push_back(number);
                        lists.push_back(list, number);
                    }
                    Step::Front(list, number) => {
                        forget(&mut model, number);
                        model[list as usize].push_front(number);
                        lists.push_front(list, number);
                    }
                    Step::Remove(number) => {
                        let is_there = model.iter().any(|list| list.contains(&number));
                        forget(&mut model, number);
                        prop_assert_eq!(lists.remove(number), is_there);
                    }
                    Step::Pop(list) => {
                        prop_assert_eq!(lists.pop_front(list), model[list as usize].pop_front());
                    }
                }
                for (list, expected) in (0u32..).zip(&model) {
                    prop_assert!(lists.iter(list).eq(expected.iter().copied()));
                    prop_assert_eq!(lists.is_empty(list), expected.is_empty());
                }
                for number in 0..12 {
                    let of = (0u32..).zip(&model).find(|(_, list)| list.contains(&number));
                    prop_assert_eq!(lists.list_of(number), of.map(|(list, _)| list));
                    prop_assert_eq!(lists.contains(number), of.is_some());
                }
            }
        }
    }
}
