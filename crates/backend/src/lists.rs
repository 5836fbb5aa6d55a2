//! Lists of small numbers.

/// No number: the end of a list.
const NONE: u32 = u32::MAX;

/// Where a number stands.
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

/// Lists of small numbers, such as the places of a table. A number is in one of them at most, and
/// is added, found and taken out in the same time, however many there are. Lists have small numbers
/// as well.
///
/// What a guest has under way is in such lists: it chooses how much that is, and then ends all of
/// it at once.
#[derive(Debug, Default)]
pub struct Lists {
    links: Vec<Link>,
    ends: Vec<Ends>,
}

impl Lists {
    /// The first number of a list.
    pub fn first(&self, list: u32) -> Option<u32> {
        let first = self.ends.get(list as usize)?.first;
        (first != NONE).then_some(first)
    }

    /// The number after `of` in its list.
    pub fn after(&self, of: u32) -> Option<u32> {
        let after = self.links.get(of as usize)?.after;
        (after != NONE).then_some(after)
    }

    /// Whether there is nothing in a list.
    pub fn is_empty(&self, list: u32) -> bool {
        self.first(list).is_none()
    }

    /// Whether a number is in a list, whichever it is.
    pub fn contains(&self, number: u32) -> bool {
        self.list_of(number).is_some()
    }

    /// The list that a number is in.
    pub fn list_of(&self, number: u32) -> Option<u32> {
        let list = self.links.get(number as usize)?.list;
        (list != NONE).then_some(list)
    }

    /// The numbers of a list, in order.
    pub fn iter(&self, list: u32) -> impl Iterator<Item = u32> {
        std::iter::successors(self.first(list), |number| self.after(*number))
    }

    /// Adds a number at the end of a list, out of the one that it is in.
    pub fn push_back(&mut self, list: u32, number: u32) {
        let last = self.prepare(list, number).last;
        self.put(number, Link { list, before: last, after: NONE });
    }

    /// Adds a number at the beginning of a list, out of the one that it is in.
    pub fn push_front(&mut self, list: u32, number: u32) {
        let first = self.prepare(list, number).first;
        self.put(number, Link { list, before: NONE, after: first });
    }

    /// Takes a number out of its list. Whether it was in one.
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

    /// Takes the first number out of a list.
    pub fn pop_front(&mut self, list: u32) -> Option<u32> {
        let first = self.first(list)?;
        self.remove(first);
        Some(first)
    }

    /// Nothing is in any list any more.
    pub fn clear(&mut self) {
        self.links.clear();
        self.ends.clear();
    }

    /// There are places for the list and the number, which is in none. The ends of the list.
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

    /// What comes after `of`, or first in the list.
    fn set_after(&mut self, list: u32, of: u32, after: u32) {
        if let Some(link) = self.links.get_mut(of as usize) {
            link.after = after;
        } else if let Some(ends) = self.ends.get_mut(list as usize) {
            ends.first = after;
        }
    }

    /// What comes before `of`, or last in the list.
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
        fn they_are_what_queues_would_be(steps in prop::collection::vec(step(), 0..200)) {
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
