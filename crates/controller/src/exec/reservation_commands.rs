//! In-flight reservation commands of an engine.

use std::collections::{HashMap, HashSet};

/// Reservation commands of one engine. Hash tables, because the host determines their number.
#[derive(Debug, Default)]
pub(super) struct ReservationCommands {
    /// True if access to a namespace is restricted.
    pub(super) is_restricted: bool,
    /// In-flight entry of each ticket that waits for the subsystem.
    waiting: HashMap<u64, u32>,
    /// In-flight entries of waiting and of ended commands.
    entries: HashSet<u32>,
    /// In-flight entries of commands that the subsystem has executed.
    ended: Vec<u32>,
}

impl ReservationCommands {
    /// Number of commands, waiting or ended.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if an entry is a reservation command.
    pub(super) fn is_one(&self, tag: u32) -> bool {
        self.entries.contains(&tag)
    }

    /// Registers a command that was sent to the subsystem.
    pub(super) fn begin(&mut self, ticket: u64, tag: u32) {
        self.waiting.insert(ticket, tag);
        self.entries.insert(tag);
    }

    /// Marks the command of this ticket as ended and returns its entry, if it exists.
    pub(super) fn end(&mut self, ticket: u64) -> Option<u32> {
        let tag = self.waiting.remove(&ticket)?;
        self.ended.push(tag);
        Some(tag)
    }

    /// True if a command has ended and was not [taken](Self::take_ended) yet.
    pub(super) fn has_ended(&self) -> bool {
        !self.ended.is_empty()
    }

    /// Takes the entries of the ended commands.
    pub(super) fn take_ended(&mut self) -> Vec<u32> {
        let ended = std::mem::take(&mut self.ended);
        ended.iter().for_each(|tag| {
            self.entries.remove(tag);
        });
        ended
    }
}
