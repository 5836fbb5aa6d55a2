//! Shadow Doorbell and EventIdx buffers: offset of a queue's entry.
//!
//! Base 2.1, 5.2.5 "Doorbell Buffer Config command". Each buffer is one memory page, with the same
//! layout as the doorbell registers: submission queue tail and completion queue head of queue 0,
//! then of queue 1 and so on, `4 << CAP.DSTRD` bytes apart. An entry is four bytes, of which the
//! low 16 bits are the queue index.

use crate::regs::{
    Doorbell, DoorbellKind, cq_doorbell_offset, doorbell_stride, sq_doorbell_offset,
};

/// Offset of the entry of submission queue `qid` in each buffer.
pub const fn sq_entry_offset(qid: u16, dstrd: u8) -> u64 {
    sq_doorbell_offset(qid, dstrd) - crate::regs::DOORBELLS
}

/// Offset of the entry of completion queue `qid` in each buffer.
pub const fn cq_entry_offset(qid: u16, dstrd: u8) -> u64 {
    cq_doorbell_offset(qid, dstrd) - crate::regs::DOORBELLS
}

/// Offset of the entry of `doorbell` in each buffer.
pub const fn entry_offset(doorbell: Doorbell, dstrd: u8) -> u64 {
    match doorbell.kind {
        DoorbellKind::Sq => sq_entry_offset(doorbell.qid, dstrd),
        DoorbellKind::Cq => cq_entry_offset(doorbell.qid, dstrd),
    }
}

/// Number of queue pairs, including the admin queue, whose entries fit into a page of `page_size`
/// bytes. Queues beyond that number have no shadow doorbells and use their doorbell registers.
///
/// A controller should not allocate more queues. The inequality in 5.2.5 permits twice as many,
/// because it has one stride per queue number, but the layout has two strides per queue pair.
pub const fn queue_pairs_in_page(page_size: u64, dstrd: u8) -> u64 {
    page_size / (2 * doorbell_stride(dstrd))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries() {
        assert_eq!(sq_entry_offset(0, 0), 0);
        assert_eq!(cq_entry_offset(0, 0), 4);
        assert_eq!(sq_entry_offset(1, 0), 8);
        assert_eq!(cq_entry_offset(1, 0), 12);
        assert_eq!(sq_entry_offset(5, 2), 160);
        assert_eq!(cq_entry_offset(5, 2), 176);
        assert_eq!(entry_offset(Doorbell { qid: 5, kind: DoorbellKind::Sq }, 2), 160);
        assert_eq!(entry_offset(Doorbell { qid: 5, kind: DoorbellKind::Cq }, 2), 176);
    }

    #[test]
    fn page_capacity() {
        assert_eq!(queue_pairs_in_page(4096, 0), 512);
        assert_eq!(queue_pairs_in_page(4096, 4), 32);
        assert_eq!(queue_pairs_in_page(4096, 15), 0);
        for dstrd in 0..10 {
            let last = (queue_pairs_in_page(4096, dstrd) - 1) as u16;
            assert!(cq_entry_offset(last, dstrd) + 4 <= 4096);
            assert!(cq_entry_offset(last + 1, dstrd) + 4 > 4096);
        }
    }
}
