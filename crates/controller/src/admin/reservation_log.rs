//! The log page Reservation Notification, and which notices a host wants. Base 2.1, 5.1.12.1,
//! "Reservation Notification", and 5.1.25, "Reservation Notification Mask".

use crate::saved::{SavedAna, SavedSharing};
use shadowbell_spec::reservation::ReservationNotification;
use std::collections::{BTreeMap, VecDeque};
use zerocopy::IntoBytes;

/// Notices that wait to be read, at most. Of more the oldest are lost, which their count shows.
const MAX_NOTICES: usize = 64;
/// The bits of the mask that there are: one for each type.
const MASK: u32 = 0b1110;

/// Notices for the host of a controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReservationLog {
    /// Types that are not wanted, by namespace: bit n for type n.
    masks: BTreeMap<u32, u32>,
    /// Number, type and namespace; the oldest first.
    notices: VecDeque<(u64, u8, u32)>,
    /// How many there were.
    made: u64,
}

impl ReservationLog {
    /// Something has happened: whether the host wants to know, and so there is an event to raise.
    pub(crate) fn tell(&mut self, nsid: u32, kind: u8) -> bool {
        if self.mask(nsid) & 1 << kind != 0 {
            return false;
        }
        if self.notices.len() >= MAX_NOTICES {
            self.notices.pop_front();
        }
        // 0 is the count of a log without a notice.
        self.made = self.made.checked_add(1).unwrap_or(1);
        self.notices.push_back((self.made, kind, nsid));
        true
    }

    /// The page: the oldest notice.
    pub(crate) fn page(&self) -> Vec<u8> {
        let mut page = ReservationNotification::default();
        if let Some((count, kind, nsid)) = self.notices.front() {
            let left = self.notices.len() - 1;
            page.lpcount = *count;
            page.kind = *kind;
            page.available = left.min(255) as u8;
            page.nsid = *nsid;
        }
        page.as_bytes().to_vec()
    }

    /// The host has read the page.
    pub(crate) fn was_read(&mut self) {
        self.notices.pop_front();
    }

    /// The feature Reservation Notification Mask.
    pub(crate) fn mask(&self, nsid: u32) -> u32 {
        self.masks.get(&nsid).copied().unwrap_or(0)
    }

    /// Sets that.
    pub(crate) fn set_mask(&mut self, nsid: u32, mask: u32) {
        self.masks.insert(nsid, mask & MASK);
    }

    /// Another namespace is behind this NSID, or none.
    pub(crate) fn forget_namespace(&mut self, nsid: u32) {
        self.masks.remove(&nsid);
        self.notices.retain(|(_, _, of)| *of != nsid);
    }

    /// As plain data, beside the host's identifier and what it can know of ANA groups.
    pub(crate) fn save(&self, host: Vec<u8>, ana: SavedAna) -> SavedSharing {
        let masks = self.masks.iter().map(|(nsid, mask)| (*nsid, *mask)).collect();
        let notices = self.notices.iter().copied().collect();
        SavedSharing { host, masks, notices, notices_made: self.made, ana }
    }

    /// The other side of [`save`](Self::save).
    pub(crate) fn restore(saved: &SavedSharing) -> Self {
        let SavedSharing { masks, notices, notices_made, .. } = saved;
        let notices = notices.iter().copied().take(MAX_NOTICES).collect();
        Self { masks: masks.iter().copied().collect(), notices, made: *notices_made }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::FromBytes;

    fn read(log: &ReservationLog) -> (u64, u8, u8, u32) {
        let page = ReservationNotification::read_from_bytes(&log.page()).unwrap();
        (page.lpcount, page.kind, page.available, page.nsid)
    }

    #[test]
    fn notices_are_read_one_by_one_the_oldest_first() {
        let mut log = ReservationLog::default();
        assert_eq!(read(&log), (0, 0, 0, 0));
        log.set_mask(2, u32::MAX);
        assert_eq!(log.mask(2), 0b1110);
        assert!(log.tell(1, 1) && !log.tell(2, 1) && log.tell(1, 3));
        assert_eq!(read(&log), (1, 1, 1, 1));
        assert_eq!(ReservationLog::restore(&log.save(Vec::new(), SavedAna::default())), log);
        log.was_read();
        assert_eq!(read(&log), (2, 3, 0, 1));
        log.was_read();
        assert_eq!(read(&log), (0, 0, 0, 0));
    }

    #[test]
    fn a_log_that_nobody_reads_has_an_end() {
        let mut log = ReservationLog::default();
        (0..1000).for_each(|_| assert!(log.tell(1, 2)));
        assert_eq!(read(&log), (937, 2, 63, 1));
        log.forget_namespace(1);
        assert_eq!(read(&log), (0, 0, 0, 0));
    }
}
