//! Scatter Gather Lists (Base 2.1, "Scatter Gather List (SGL)").

use crate::bit_bucket::bucket;
use crate::dma::View;
use crate::error::{DataPointerError, Fault};
use crate::segments::Segments;

/// Largest number of descriptors of a command, over all its segments. It is enough for 1 MiB in the
/// smallest useful pieces, and limits a list that points to itself.
pub const MAX_SGL_DESCRIPTORS: usize = 4096;

const DESCRIPTOR: usize = 16;
/// Descriptors per read: 512 bytes, copied before they are validated.
const CHUNK: usize = 32;

const DATA_BLOCK: u8 = 0x0;
const BIT_BUCKET: u8 = 0x1;
const SEGMENT: u8 = 0x2;
const LAST_SEGMENT: u8 = 0x3;

/// Descriptor that was copied from the host's memory: address, length, and type with sub type.
#[derive(Clone, Copy)]
struct Descriptor {
    address: u64,
    len: usize,
    identifier: u8,
}

impl Descriptor {
    fn decode(raw: &[u8; DESCRIPTOR]) -> Self {
        let [a0, a1, a2, a3, a4, a5, a6, a7, l0, l1, l2, l3, _, _, _, identifier] = *raw;
        Self {
            address: u64::from_le_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            len: u32::from_le_bytes([l0, l1, l2, l3]) as usize,
            identifier,
        }
    }

    /// Descriptor type. Fails unless the sub type is "address" (0h), the only one that is supported
    /// for memory-based queues.
    fn kind(self) -> Result<u8, DataPointerError> {
        match self.identifier {
            id if id & 0xf == 0 => Ok(id >> 4),
            id => Err(DataPointerError::SglType(id)),
        }
    }
}

impl View {
    /// Resolves `len` bytes of data that the SGL descriptor in a command's data pointer describes:
    /// a data block, or a segment or last segment with further descriptors.
    ///
    /// Data that the device writes to a bit bucket is discarded. If the device reads the data, a
    /// bit bucket contributes no bytes. The list may describe more than `len` bytes; the bytes
    /// after the first `len` are not accessed. It is an error if the list describes fewer bytes.
    /// `write` is true if the device writes the data.
    ///
    /// # Errors
    /// [`DataPointerError`]; `into` is empty then.
    pub fn resolve_sgl(
        &self,
        descriptor: &[u8; 16],
        len: usize,
        write: bool,
        into: &mut Segments,
    ) -> Result<(), DataPointerError> {
        into.start_list(self, write);
        let outcome = self.sgl(Descriptor::decode(descriptor), len, into);
        if outcome.is_err() {
            into.clear();
        }
        outcome
    }

    fn sgl(
        &self,
        first: Descriptor,
        len: usize,
        into: &mut Segments,
    ) -> Result<(), DataPointerError> {
        let mut left = len;
        let mut seen = 1;
        let mut segment = match first.kind()? {
            DATA_BLOCK => {
                self.data_block(first, &mut left, into)?;
                return check_remaining(left);
            }
            BIT_BUCKET => {
                bit_bucket(first, &mut left, into)?;
                return check_remaining(left);
            }
            SEGMENT | LAST_SEGMENT => first,
            _ => return Err(DataPointerError::SglType(first.identifier)),
        };
        loop {
            let last = segment.identifier >> 4 == LAST_SEGMENT;
            if segment.len == 0 || !segment.len.is_multiple_of(DESCRIPTOR) {
                return Err(DataPointerError::SglSegment);
            }
            let count = segment.len / DESCRIPTOR;
            seen += count;
            into.add_list();
            if seen > MAX_SGL_DESCRIPTORS {
                return Err(DataPointerError::SglCount);
            }
            let mut next = None;
            let mut done = 0;
            while done < count {
                let take = (count - done).min(CHUNK);
                let mut raw = [[0u8; DESCRIPTOR]; CHUNK];
                let descriptors = &mut raw[..take];
                let at = segment
                    .address
                    .checked_add((done * DESCRIPTOR) as u64)
                    .ok_or(Fault { iova: u64::MAX, write: false })?;
                self.read(at, descriptors.as_flattened_mut())?;
                for (index, raw) in descriptors.iter().enumerate() {
                    let descriptor = Descriptor::decode(raw);
                    let is_final = done + index + 1 == count;
                    match descriptor.kind()? {
                        DATA_BLOCK => self.data_block(descriptor, &mut left, into)?,
                        BIT_BUCKET => bit_bucket(descriptor, &mut left, into)?,
                        // A Segment ends with the descriptor of the next segment, a Last Segment
                        // does not.
                        SEGMENT | LAST_SEGMENT if is_final && !last => next = Some(descriptor),
                        // Base 2.1, "Invalid Number of SGL Descriptors": a segment descriptor
                        // that is not the last descriptor of its segment.
                        SEGMENT | LAST_SEGMENT if !last => return Err(DataPointerError::SglCount),
                        SEGMENT | LAST_SEGMENT => return Err(DataPointerError::SglSegment),
                        _ => return Err(DataPointerError::SglType(descriptor.identifier)),
                    }
                }
                done += take;
            }
            segment = match next {
                Some(next) => next,
                None if last => return check_remaining(left),
                // The last descriptor of a Segment must be a segment descriptor.
                None => return Err(DataPointerError::SglSegment),
            };
        }
    }

    fn data_block(
        &self,
        block: Descriptor,
        left: &mut usize,
        into: &mut Segments,
    ) -> Result<(), DataPointerError> {
        let take = block.len.min(*left);
        if take > 0 {
            into.push(self, block.address, take)?;
            *left -= take;
        }
        Ok(())
    }
}

/// Resolves a bit bucket descriptor (Base 2.1, 4.3.2, "SGL Bit Bucket descriptor"): if the device
/// writes data, discards that many bytes. If the device reads data, the descriptor contributes no
/// bytes.
fn bit_bucket(
    descriptor: Descriptor,
    left: &mut usize,
    into: &mut Segments,
) -> Result<(), DataPointerError> {
    let take = if into.is_writable() { descriptor.len.min(*left) } else { 0 };
    if take > 0 {
        // If the memory is not available, the controller completes the command as if it did not
        // support the descriptor type.
        let bucket = bucket().ok_or(DataPointerError::SglType(descriptor.identifier))?;
        into.push_repeated(bucket, take);
        *left -= take;
    }
    Ok(())
}

fn check_remaining(left: usize) -> Result<(), DataPointerError> {
    if left == 0 { Ok(()) } else { Err(DataPointerError::SglLength) }
}
