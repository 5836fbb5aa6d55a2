//! Zone Append commands under way: where their data go is in their completion.

use std::collections::HashMap;

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Appending {
    /// Where its data go, in bytes of the disk, if that has been said yet.
    pub(super) place: Option<u64>,
    /// The request of the disk, and the index of the namespace at which that began.
    pub(super) tag: (usize, u32),
}

/// Those of one engine, by their entry.
#[derive(Debug, Default)]
pub(super) struct Appends {
    list: HashMap<u32, Appending>,
    over: Vec<u32>,
}

impl Appends {
    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn begin(&mut self, parent: u32, appending: Appending) {
        self.list.insert(parent, appending);
    }

    /// The request of a command has ended, if it is one of these.
    pub(super) fn ended(&mut self, parent: u32) {
        if !self.list.is_empty() && self.list.contains_key(&parent) {
            self.over.push(parent);
        }
    }

    /// Whether one is over that has not been [taken](Self::take).
    pub(super) fn has_ended(&self) -> bool {
        !self.over.is_empty()
    }

    /// Those that are over, with their entries.
    pub(super) fn take(&mut self) -> Vec<(u32, Appending)> {
        let over = std::mem::take(&mut self.over);
        over.into_iter().filter_map(|tag| Some((tag, self.list.remove(&tag)?))).collect()
    }
}
