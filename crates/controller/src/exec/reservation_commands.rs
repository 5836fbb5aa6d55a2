//! The reservation commands of an engine that are under way.

use std::collections::{HashMap, HashSet};

/// The reservation commands of one engine. A host decides how many there are: none is searched for.
#[derive(Debug, Default)]
pub(super) struct ReservationCommands {
    /// A namespace is restricted.
    pub(super) is_restricted: bool,
    /// Under way: the entry of each ticket.
    waiting: HashMap<u64, u32>,
    /// The entries of these, and of those that are over.
    entries: HashSet<u32>,
    /// Entries of those that are over.
    ended: Vec<u32>,
}

impl ReservationCommands {
    /// Commands that are under way.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether an entry is one of them.
    pub(super) fn is_one(&self, tag: u32) -> bool {
        self.entries.contains(&tag)
    }

    /// The command in this entry has gone to the subsystem with this ticket.
    pub(super) fn begin(&mut self, ticket: u64, tag: u32) {
        self.waiting.insert(ticket, tag);
        self.entries.insert(tag);
    }

    /// The subsystem is done with the command of this ticket: its entry, if it is one of these.
    pub(super) fn end(&mut self, ticket: u64) -> Option<u32> {
        let tag = self.waiting.remove(&ticket)?;
        self.ended.push(tag);
        Some(tag)
    }

    /// Whether a command is over that has not been [taken](Self::take_ended).
    pub(super) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// The entries of those that are over, which are none of these any more.
    pub(super) fn take_ended(&mut self) -> Vec<u32> {
        let ended = std::mem::take(&mut self.ended);
        ended.iter().for_each(|tag| {
            self.entries.remove(tag);
        });
        ended
    }
}
