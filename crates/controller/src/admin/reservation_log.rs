//! Reservation Notification log page and Reservation Notification Mask. Base 2.1, 5.1.12.1,
//! "Reservation Notification", and 5.1.25, "Reservation Notification Mask".

use crate::saved::{SavedAna, SavedSharing};
use shadowbell_spec::reservation::ReservationNotification;
use std::collections::{BTreeMap, VecDeque};
use zerocopy::IntoBytes;

/// Maximum number of unread notifications. If exceeded, the oldest are dropped; the host sees a gap
/// in their count.
const MAX_NOTICES: usize = 64;
/// Defined bits of the mask: one per notification type.
const MASK: u32 = 0b1110;

/// Reservation notifications for the host of a controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReservationLog {
    /// Masked types by NSID: bit n for type n.
    masks: BTreeMap<u32, u32>,
    /// Notifications (number, type and NSID), oldest first.
    notices: VecDeque<(u64, u8, u32)>,
    /// Number of the last notification.
    made: u64,
}

impl ReservationLog {
    /// Adds a notification, unless its type is masked. Returns true if an event has to be raised.
    pub(crate) fn tell(&mut self, nsid: u32, kind: u8) -> bool {
        if self.mask(nsid) & 1 << kind != 0 {
            return false;
        }
        if self.notices.len() >= MAX_NOTICES {
            self.notices.pop_front();
        }
        // After an overflow the number continues with 1, because 0 means "no notification".
        self.made = self.made.checked_add(1).unwrap_or(1);
        self.notices.push_back((self.made, kind, nsid));
        true
    }

    /// Log page with the oldest notification.
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

    /// Removes the oldest notification, after the host has read it.
    pub(crate) fn was_read(&mut self) {
        self.notices.pop_front();
    }

    /// Value of the Reservation Notification Mask feature.
    pub(crate) fn mask(&self, nsid: u32) -> u32 {
        self.masks.get(&nsid).copied().unwrap_or(0)
    }

    /// Sets the Reservation Notification Mask feature.
    pub(crate) fn set_mask(&mut self, nsid: u32, mask: u32) {
        self.masks.insert(nsid, mask & MASK);
    }

    /// Drops mask and notifications of namespace `nsid`, which was replaced or removed.
    pub(crate) fn forget_namespace(&mut self, nsid: u32) {
        self.masks.remove(&nsid);
        self.notices.retain(|(_, _, of)| *of != nsid);
    }

    /// Snapshot, together with the Host Identifier and the ANA states.
    pub(crate) fn save(&self, host: Vec<u8>, ana: SavedAna) -> SavedSharing {
        let masks = self.masks.iter().map(|(nsid, mask)| (*nsid, *mask)).collect();
        let notices = self.notices.iter().copied().collect();
        SavedSharing { host, masks, notices, notices_made: self.made, ana }
    }

    /// Restores a snapshot of [`save`](Self::save).
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
