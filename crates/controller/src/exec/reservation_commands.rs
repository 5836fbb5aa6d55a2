//! The reservation commands of an engine that are under way.

/// The reservation commands of one engine.
#[derive(Debug, Default)]
pub(super) struct ReservationCommands {
    /// A namespace is restricted.
    pub(super) is_restricted: bool,
    /// Under way: tickets and entries.
    pub(super) waiting: Vec<(u64, u32)>,
    /// Entries of those that are over.
    pub(super) ended: Vec<u32>,
}

impl ReservationCommands {
    /// Commands that are under way.
    pub(super) fn len(&self) -> usize {
        self.waiting.len() + self.ended.len()
    }

    /// Whether an entry is one of them.
    pub(super) fn is_one(&self, tag: u32) -> bool {
        self.waiting.iter().any(|(_, waiting)| *waiting == tag) || self.ended.contains(&tag)
    }
}
