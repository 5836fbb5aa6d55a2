//! Received bytes of a read, whose chunks may arrive in any order.

/// Maximum number of separate ranges. A reply that needs more is refused; no reasonable server
/// sends one.
const MAX_PIECES: usize = 256;

/// Separate ranges of bytes, in order.
#[derive(Debug, Default)]
pub(crate) struct Coverage(Vec<(u32, u32)>);

impl Coverage {
    /// Adds `[from, from + len)`. Returns false if some of these bytes were received before, or if
    /// there are too many ranges.
    pub(crate) fn add(&mut self, from: u32, len: u32) -> bool {
        let Some(to) = from.checked_add(len).filter(|to| *to > from) else { return false };
        let at = self.0.partition_point(|(start, _)| *start < from);
        let before = at.checked_sub(1).and_then(|at| self.0.get(at)).copied();
        let after = self.0.get(at).copied();
        if before.is_some_and(|(_, end)| end > from) || after.is_some_and(|(start, _)| start < to) {
            return false;
        }
        let joins_before = before.is_some_and(|(_, end)| end == from);
        let joins_after = after.is_some_and(|(start, _)| start == to);
        match (joins_before, joins_after) {
            (true, true) => {
                let (_, end) = self.0.remove(at);
                if let Some(piece) = self.0.get_mut(at - 1) {
                    piece.1 = end;
                }
            }
            (true, false) => {
                if let Some(piece) = self.0.get_mut(at - 1) {
                    piece.1 = to;
                }
            }
            (false, true) => {
                if let Some(piece) = self.0.get_mut(at) {
                    piece.0 = from;
                }
            }
            (false, false) if self.0.len() < MAX_PIECES => self.0.insert(at, (from, to)),
            (false, false) => return false,
        }
        true
    }

    /// True if exactly the first `len` bytes were received.
    pub(crate) fn is_whole(&self, len: u32) -> bool {
        self.0 == [(0, len)]
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn as_a_set_of_bytes(chunks in prop::collection::vec((0..64_u32, 0..16_u32), 0..40)) {
            let mut coverage = Coverage::default();
            let mut model = std::collections::BTreeSet::new();
            for (from, len) in chunks {
                let fresh = len > 0 && (from..from + len).all(|byte| !model.contains(&byte));
                prop_assert_eq!(coverage.add(from, len), fresh);
                if fresh {
                    model.extend(from..from + len);
                }
                let whole = model.len() == 64 && model.last() == Some(&63);
                prop_assert_eq!(coverage.is_whole(64), whole);
            }
        }
    }

    #[test]
    fn coverage_has_a_bounded_number_of_pieces() {
        let mut coverage = Coverage::default();
        let taken = (0..10_000).filter(|at| coverage.add(at * 2, 1)).count();
        assert_eq!((taken, coverage.0.len()), (MAX_PIECES, MAX_PIECES));
        assert!(!coverage.add(u32::MAX, 2));
    }
}
