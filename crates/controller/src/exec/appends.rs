//! Zone Append commands in flight: the written LBA is part of their completion.

use std::collections::HashMap;

/// Zone Append command in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Appending {
    /// Byte offset on the disk where the data are appended, if the disk has returned it already.
    pub(super) place: Option<u64>,
    /// Namespace index and tag of the disk request.
    pub(super) tag: (usize, u32),
}

/// Zone Append commands of one engine, by entry.
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

    /// Records the end of a disk request, if its command is a Zone Append.
    pub(super) fn ended(&mut self, parent: u32) {
        if !self.list.is_empty() && self.list.contains_key(&parent) {
            self.over.push(parent);
        }
    }

    /// True if a command has ended and was not [taken](Self::take) yet.
    pub(super) fn has_ended(&self) -> bool {
        !self.over.is_empty()
    }

    /// Takes the ended commands, with their entries.
    pub(super) fn take(&mut self) -> Vec<(u32, Appending)> {
        let over = std::mem::take(&mut self.over);
        over.into_iter().filter_map(|tag| Some((tag, self.list.remove(&tag)?))).collect()
    }
}
