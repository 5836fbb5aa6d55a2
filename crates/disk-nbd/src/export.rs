//! Properties of an export, from the handshake.

use shadowbell_nbd::wire::{MAX_PAYLOAD, transmission};

/// Properties of an export, from the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Export {
    /// Size in bytes.
    pub(crate) size: u64,
    /// Transmission flags: [`transmission`].
    pub(crate) flags: u16,
    /// Minimum and preferred block size of requests in bytes.
    pub(crate) min_block: u32,
    pub(crate) preferred: u32,
    /// Maximum payload of a request in bytes.
    pub(crate) max_payload: u32,
    /// True if structured replies were negotiated.
    pub(crate) structured: bool,
    /// Context id of `base:allocation`, if negotiated.
    pub(crate) allocation: Option<u32>,
}

impl Export {
    /// Properties of an export for which the server announces no block sizes.
    pub(crate) fn new(size: u64, flags: u16) -> Self {
        // Defaults of the protocol.
        Self {
            size,
            flags,
            min_block: 1,
            preferred: 4096,
            max_payload: MAX_PAYLOAD,
            structured: false,
            allocation: None,
        }
    }

    pub(crate) fn has(&self, flag: u16) -> bool {
        self.flags & (flag | transmission::HAS_FLAGS) == flag | transmission::HAS_FLAGS
    }

    /// Sets the block sizes that the server announces. Returns false if they are invalid.
    pub(crate) fn set_sizes(&mut self, min_block: u32, preferred: u32, max_payload: u32) -> bool {
        let sane = min_block.is_power_of_two()
            && preferred.is_power_of_two()
            && min_block <= preferred
            && min_block <= 64 << 10
            && max_payload >= min_block;
        if sane {
            (self.min_block, self.preferred, self.max_payload) =
                (min_block, preferred, max_payload.min(MAX_PAYLOAD));
        }
        sane
    }

    /// Checks if this export can replace `before` for a disk with subrequests of up to `part` bytes
    /// on `connections` connections. Returns `None` if so, and otherwise the name of a missing
    /// feature.
    pub(crate) fn lacks(
        &self,
        before: &Self,
        part: u32,
        connections: usize,
    ) -> Option<&'static str> {
        let needs = [
            (transmission::SEND_FLUSH, "flushes"),
            (transmission::SEND_FUA, "FUA writes"),
            (transmission::SEND_WRITE_ZEROES, "write zeroes"),
        ];
        if let Some((_, what)) = needs.iter().find(|(f, _)| before.has(*f) && !self.has(*f)) {
            return Some(what);
        }
        if self.has(transmission::READ_ONLY) && !before.has(transmission::READ_ONLY) {
            return Some("writes");
        }
        if connections > 1 && !self.has(transmission::CAN_MULTI_CONN) {
            return Some("several connections");
        }
        if self.min_block > before.min_block || self.max_payload < part {
            return Some("the request sizes that it had");
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_make_no_sense_are_refused() {
        let mut export = Export::new(1 << 20, 0);
        for (min_block, preferred, max_payload) in
            [(0, 1, 2), (3, 4, 8), (512, 256, 4096), (1 << 17, 1 << 17, 1 << 20), (4096, 4096, 512)]
        {
            assert!(!export.set_sizes(min_block, preferred, max_payload));
            assert_eq!(export, Export::new(1 << 20, 0));
        }
        assert!(export.set_sizes(1, 4096, u32::MAX));
        assert_eq!(export.max_payload, MAX_PAYLOAD);
    }

    #[test]
    fn an_export_that_can_less_is_not_the_same() {
        let all = transmission::HAS_FLAGS
            | transmission::SEND_FLUSH
            | transmission::SEND_FUA
            | transmission::CAN_MULTI_CONN;
        let before = Export::new(1 << 20, all);
        assert_eq!(before.lacks(&before, 65536, 4), None);
        let with = |flags| Export::new(1 << 20, flags);
        let part = 65536;
        assert!(with(all & !transmission::SEND_FUA).lacks(&before, part, 1).is_some());
        assert_eq!(with(all | transmission::READ_ONLY).lacks(&before, part, 1), Some("writes"));
        let single = with(all & !transmission::CAN_MULTI_CONN);
        assert_eq!(single.lacks(&before, part, 1), None);
        assert_eq!(single.lacks(&before, part, 2), Some("several connections"));
        assert!(with(all | transmission::SEND_TRIM).lacks(&before, part, 2).is_none());
    }
}
