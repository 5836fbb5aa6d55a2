//! MSI-X table and pending bits, which a client accesses in a region.
//!
//! A VMM has its own MSI-X table for the guest, and receives interrupts through eventfds. This
//! table does not affect interrupts: it stores what was written. After a reset, all vectors in it
//! are masked.

use crate::Errno;

/// Size of an entry in bytes (PCI Express Base Specification, 7.7.2.5).
const ENTRY: usize = 16;

/// Writable bits of an entry: the address except for its two lowest bits, the data, and the mask
/// bit of Vector Control.
const WRITABLE: [u8; ENTRY] =
    [0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0];

/// Mask bit of Vector Control.
const MASKED: u8 = 1;

/// MSI-X table and pending bits of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MsixTable {
    table: Vec<u8>,
    pending: Vec<u8>,
}

impl MsixTable {
    /// Creates a table of `vectors` entries, all masked.
    pub fn new(vectors: u16) -> Self {
        let vectors = usize::from(vectors);
        let mut table =
            Self { table: vec![0; vectors * ENTRY], pending: vec![0; vectors.div_ceil(64) * 8] };
        table.reset();
        table
    }

    /// Masks all vectors and clears everything else.
    pub fn reset(&mut self) {
        self.pending.fill(0);
        self.table.fill(0);
        for control in self.table.iter_mut().skip(12).step_by(ENTRY) {
            *control = MASKED;
        }
    }

    /// Table and pending bits, for a later [`restore`](Self::restore).
    pub fn bytes(&self) -> (&[u8], &[u8]) {
        (&self.table, &self.pending)
    }

    /// Restores table and pending bits. Returns false, and changes nothing, if the number of
    /// vectors differs.
    #[must_use]
    pub fn restore(&mut self, table: &[u8], pending: &[u8]) -> bool {
        let fits = table.len() == self.table.len() && pending.len() == self.pending.len();
        if fits {
            self.table.copy_from_slice(table);
            self.pending.copy_from_slice(pending);
        }
        fits
    }

    /// Reads from the table.
    ///
    /// # Errors
    ///
    /// [`Errno::INVAL`] if the range exceeds the table.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        copy(&self.table, offset, data)
    }

    /// Writes to the table.
    ///
    /// # Errors
    ///
    /// [`Errno::INVAL`] if the range exceeds the table.
    pub fn write_table(&mut self, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let start = usize::try_from(offset).map_err(|_| Errno::INVAL)?;
        let end = start.checked_add(data.len()).ok_or(Errno::INVAL)?;
        let bytes = self.table.get_mut(start..end).ok_or(Errno::INVAL)?;
        let masks = WRITABLE.iter().cycle().skip(start % ENTRY);
        for ((byte, mask), new) in bytes.iter_mut().zip(masks).zip(data) {
            *byte = *byte & !mask | new & mask;
        }
        Ok(())
    }

    /// Reads the pending bits. They are read-only, so the caller has to ignore writes to them.
    ///
    /// # Errors
    ///
    /// [`Errno::INVAL`] if the range exceeds the pending bits.
    pub fn read_pending(&self, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        copy(&self.pending, offset, data)
    }

    /// True if the vector is masked, or does not exist.
    pub fn is_masked(&self, vector: u16) -> bool {
        let control = self.table.get(usize::from(vector) * ENTRY + 12);
        control.is_none_or(|control| control & MASKED != 0)
    }

    /// Sets or clears the pending bit of `vector`. If it is set, an interrupt waits until the
    /// vector is unmasked.
    pub fn set_pending(&mut self, vector: u16, pending: bool) {
        if let Some(byte) = self.pending.get_mut(usize::from(vector / 8)) {
            let bit = 1 << (vector % 8);
            *byte = if pending { *byte | bit } else { *byte & !bit };
        }
    }
}

fn copy(from: &[u8], offset: u64, to: &mut [u8]) -> Result<(), Errno> {
    let start = usize::try_from(offset).map_err(|_| Errno::INVAL)?;
    let end = start.checked_add(to.len()).ok_or(Errno::INVAL)?;
    to.copy_from_slice(from.get(start..end).ok_or(Errno::INVAL)?);
    Ok(())
}
