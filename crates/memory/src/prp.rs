//! Physical Region Page entries and lists (Base 2.1, "PRP Entry and List Layout").

use crate::dma::View;
use crate::error::DataPointerError;
use crate::segments::Segments;

/// Number of PRP list entries that are copied by one read of guest memory (512 bytes). The copy is
/// validated.
const CHUNK: usize = 64;

impl View {
    /// Resolves `len` bytes of data that PRP Entry 1 and 2 of a command describe.
    ///
    /// `page` is the host's memory page size (CC.MPS), a power of two of at least 4096. `write` is
    /// true if the device writes the data (a Read command). Only the entries that `len` needs are
    /// read, and each is read once. So a list that the host changes meanwhile, or that points to
    /// itself, costs no more than any other list for `len` bytes.
    ///
    /// # Errors
    /// [`DataPointerError`]; `into` is empty then.
    #[inline(always)]
    pub fn resolve_prps(
        &self,
        prp1: u64,
        prp2: u64,
        len: usize,
        page: usize,
        write: bool,
        into: &mut Segments,
    ) -> Result<(), DataPointerError> {
        // Fast path: if the data is within one page and in the map of the last lookup, it needs
        // neither a list nor PRP 2.
        let offset = prp1 as usize & (page - 1);
        if prp1 & 3 == 0 && len <= page - offset && into.set_whole(self, prp1, len, write) {
            return Ok(());
        }
        self.resolve_any_prps(prp1, prp2, len, page, write, into)
    }

    #[inline(never)]
    fn resolve_any_prps(
        &self,
        prp1: u64,
        prp2: u64,
        len: usize,
        page: usize,
        write: bool,
        into: &mut Segments,
    ) -> Result<(), DataPointerError> {
        into.start(self, write);
        let outcome = self.prps(prp1, prp2, len, page, into);
        if outcome.is_err() {
            into.clear();
        }
        outcome
    }

    fn prps(
        &self,
        prp1: u64,
        prp2: u64,
        len: usize,
        page: usize,
        into: &mut Segments,
    ) -> Result<(), DataPointerError> {
        let mask = page as u64 - 1;
        if prp1 & 3 != 0 {
            return Err(DataPointerError::PrpOffset(prp1));
        }
        let first = len.min(page - (prp1 & mask) as usize);
        if first > 0 {
            into.push(self, prp1, first)?;
        }
        let left = len - first;
        if left == 0 {
            return Ok(());
        }
        if left <= page {
            if prp2 & mask != 0 {
                return Err(DataPointerError::PrpOffset(prp2));
            }
            into.push(self, prp2, left)?;
            return Ok(());
        }
        self.prp_list(prp2, left, page, into)
    }

    fn prp_list(
        &self,
        list: u64,
        mut left: usize,
        page: usize,
        into: &mut Segments,
    ) -> Result<(), DataPointerError> {
        let mask = page as u64 - 1;
        if list & 7 != 0 {
            return Err(DataPointerError::PrpOffset(list));
        }
        let mut at = list;
        loop {
            // Number of entries from `at` to the end of its page. If more entries are needed, the
            // last entry of the page is the pointer to the next list.
            let in_page = ((page as u64 - (at & mask)) / 8) as usize;
            let needed = left.div_ceil(page);
            let take = needed.min(in_page).min(CHUNK);
            let chains = needed > in_page && take == in_page;
            let mut raw = [[0u8; 8]; CHUNK];
            let entries = &mut raw[..take];
            self.read(at, entries.as_flattened_mut())?;
            // Contiguous pages are translated together, because most lists consist of them.
            let (mut start, mut run) = (0u64, 0);
            for (index, entry) in entries.iter().enumerate() {
                let entry = u64::from_le_bytes(*entry);
                if run > 0 && start.checked_add(run as u64) != Some(entry) {
                    into.push(self, start, std::mem::take(&mut run))?;
                }
                if entry & mask != 0 {
                    return Err(DataPointerError::PrpOffset(entry));
                }
                if chains && index + 1 == take {
                    at = entry;
                } else {
                    let n = left.min(page);
                    if run == 0 {
                        start = entry;
                    }
                    run += n;
                    left -= n;
                }
            }
            if run > 0 {
                into.push(self, start, run)?;
            }
            if left == 0 {
                return Ok(());
            }
            if !chains {
                at += take as u64 * 8;
            }
        }
    }
}
