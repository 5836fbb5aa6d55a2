//! The MSI-X table and its pending bits, as a client sees them in a region.
//!
//! A VMM keeps the table that counts and takes interrupts through eventfds. This one is for what
//! is left: reads that give back what was written, and vectors that are masked after a reset.

use crate::Errno;

/// Size of an entry in bytes (PCI Express Base Specification, 7.7.2.5).
const ENTRY: usize = 16;

/// What can be written in an entry: the address but for its two lowest bits, the data, and the mask
/// bit of vector control.
const WRITABLE: [u8; ENTRY] =
    [0xfc, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0, 0, 0];

/// Vector control: the vector is masked.
const MASKED: u8 = 1;

/// The MSI-X table and the pending bits of a function.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MsixTable {
    table: Vec<u8>,
    pending: Vec<u8>,
}

impl MsixTable {
    /// A table for `vectors`, all masked.
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

    /// The table and the pending bits, to be kept for [`restore`](Self::restore).
    pub fn bytes(&self) -> (&[u8], &[u8]) {
        (&self.table, &self.pending)
    }

    /// As they were. False, and nothing is done, if they are those of another number of vectors.
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
    /// [`Errno::INVAL`] if not all of it is inside.
    pub fn read_table(&self, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        copy(&self.table, offset, data)
    }

    /// Writes to the table.
    ///
    /// # Errors
    ///
    /// [`Errno::INVAL`] if not all of it is inside.
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

    /// Reads from the pending bits. Writes to them are to be ignored.
    ///
    /// # Errors
    ///
    /// [`Errno::INVAL`] if not all of it is inside.
    pub fn read_pending(&self, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        copy(&self.pending, offset, data)
    }

    /// The vector is masked, or does not exist.
    pub fn is_masked(&self, vector: u16) -> bool {
        let control = self.table.get(usize::from(vector) * ENTRY + 12);
        control.is_none_or(|control| control & MASKED != 0)
    }

    /// Says whether an interrupt of `vector` waits to be unmasked.
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
