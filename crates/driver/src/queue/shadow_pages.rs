//! Shadow Doorbell and EventIdx buffers. Base 2.1, 5.1.6.

use super::doorbell::ShadowCells;
use shadowbell_memory::SharedBytes;
use shadowbell_spec::dbbuf;

/// The two pages that were passed to the controller by Doorbell Buffer Config.
pub(crate) struct ShadowPages {
    pub(crate) values: SharedBytes,
    pub(crate) event_idxs: SharedBytes,
    pub(crate) dstrd: u8,
}

impl ShadowPages {
    /// Cells of a queue pair's two doorbells; `None` if they are beyond the page.
    pub(crate) fn of(&self, qid: u16) -> Option<[ShadowCells; 2]> {
        let at = |offset: u64| {
            let offset = usize::try_from(offset).ok()?;
            Some(ShadowCells {
                value: self.values.cell(offset)?,
                event_idx: self.event_idxs.cell(offset)?,
            })
        };
        Some([
            at(dbbuf::sq_entry_offset(qid, self.dstrd))?,
            at(dbbuf::cq_entry_offset(qid, self.dstrd))?,
        ])
    }
}
