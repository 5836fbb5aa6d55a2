//! Protection information: generation, verification, and conversion between the host's form and the
//! stored form, in which all bits are inverted.

use shadowbell_disk::{DiskError, Metadata, MetadataBuffer, MetadataFormat};
use shadowbell_memory::{Segments, SharedBytes};
use shadowbell_spec::nvm::{PRINFO_APPTAG, PRINFO_GUARD, PRINFO_PRACT, PRINFO_REFTAG};
use shadowbell_spec::protection::ProtectionInfo;

/// Maximum size of a block, and of its metadata, in bytes.
const BLOCK: usize = 4096;
const METADATA: usize = 64;

/// Input buffer of the guard computation. It is aligned, because the CRC of unaligned data is
/// several times slower.
#[repr(align(64))]
pub(super) struct Scratch([u8; BLOCK + METADATA]);

impl Scratch {
    pub(super) fn new() -> Box<Self> {
        Box::new(Self([0; BLOCK + METADATA]))
    }
}

/// Blocks of a request: the host's buffer, the stored metadata, and the checks to make.
pub(super) struct Blocks<'a> {
    pub(super) format: &'a MetadataFormat,
    pub(super) metadata: &'a Metadata,
    pub(super) block_size: usize,
    pub(super) count: usize,
    /// Buffer of the request.
    pub(super) data: &'a Segments,
    /// Stored metadata, and the offset of the first block's metadata in that buffer.
    pub(super) stored: &'a SharedBytes,
    pub(super) at: usize,
    pub(super) scratch: &'a mut Scratch,
}

impl Blocks<'_> {
    fn size(&self) -> usize {
        self.format.size.into()
    }

    fn data_at(&self, nth: usize) -> usize {
        match self.metadata.buffer {
            MetadataBuffer::Extended => nth * (self.block_size + self.size()),
            _ => nth * self.block_size,
        }
    }

    /// Offset of a block's metadata in the host's buffer. `None` if the host transfers no metadata.
    fn metadata_at(&self, nth: usize) -> Option<usize> {
        match self.metadata.buffer {
            MetadataBuffer::None => None,
            MetadataBuffer::Behind => Some(self.count * self.block_size + nth * self.size()),
            MetadataBuffer::Extended => Some(self.data_at(nth) + self.block_size),
        }
    }

    /// Inverts the protection information in `own`. This converts between the stored form and the
    /// host's form.
    fn invert(&self, own: &mut [u8]) {
        let at = self.format.protection_at();
        let range = at..at + self.format.protection_size();
        own.get_mut(range).into_iter().flatten().for_each(|byte| *byte = !*byte);
    }

    fn load(&self, nth: usize, own: &mut [u8]) -> Result<(), DiskError> {
        let at = self.at + nth * self.size();
        self.stored.read_into(at, own).ok_or(DiskError::BadBuffer)?;
        self.invert(own);
        Ok(())
    }

    fn store(&self, nth: usize, own: &mut [u8]) -> Result<(), DiskError> {
        self.invert(own);
        let at = self.at + nth * self.size();
        self.stored.write_from(at, own).ok_or(DiskError::BadBuffer)
    }

    fn checks(&self, bit: u8) -> bool {
        self.format.protection != 0 && self.metadata.fields.prinfo & bit != 0
    }

    /// Computes the guard of a block. The guard covers the data and the metadata before the
    /// protection information. The data are zeroes if `of_zeroes` is true, and otherwise those in
    /// the host's buffer.
    fn guard(&mut self, nth: usize, own: &[u8], of_zeroes: bool) -> Result<u64, DiskError> {
        let at = self.data_at(nth);
        let before = own.get(..self.format.protection_at()).unwrap_or_default();
        let all = self.scratch.0.get_mut(..self.block_size + before.len());
        let all = all.ok_or(DiskError::BadBuffer)?;
        let (block, more) = all.split_at_mut(self.block_size);
        if of_zeroes {
            block.fill(0);
        } else {
            self.data.read_into(at, block).ok_or(DiskError::BadBuffer)?;
        }
        more.copy_from_slice(before);
        Ok(self.format.guard().guard(all, &[]))
    }

    /// Checks the protection information of a block as PRCHK requires.
    fn check(&mut self, nth: usize, own: &[u8]) -> Result<(), DiskError> {
        if !self.checks(PRINFO_GUARD | PRINFO_APPTAG | PRINFO_REFTAG) {
            return Ok(());
        }
        let (format, fields) = (self.format, &self.metadata.fields);
        let (kind, pi_type) = (format.guard(), format.protection);
        let info = own.get(format.protection_at()..).unwrap_or_default();
        let info = ProtectionInfo::decode(kind, info);
        if info.is_escape(pi_type, kind) {
            return Ok(());
        }
        if self.checks(PRINFO_GUARD) && self.guard(nth, own, false)? != info.guard {
            return Err(DiskError::GuardCheck);
        }
        if self.checks(PRINFO_APPTAG) && (info.app_tag ^ fields.app_tag) & fields.app_mask != 0 {
            return Err(DiskError::ApplicationTagCheck);
        }
        let expected = fields.ref_tag_of(pi_type, kind, nth as u64);
        if self.checks(PRINFO_REFTAG) && pi_type != 3 && info.ref_tag != expected {
            return Err(DiskError::ReferenceTagCheck);
        }
        Ok(())
    }

    /// Generates the stored metadata of written blocks. With `of_zeroes` (Write Zeroes and
    /// Deallocate), the data are zeroes and the host transfers no metadata.
    pub(super) fn write(mut self, of_zeroes: bool) -> Result<(), DiskError> {
        let generates = self.checks(PRINFO_PRACT);
        if of_zeroes && !generates {
            // Zeroes on the disk below mean that the block was never written.
            let len = self.count * self.size();
            return self.stored.fill(self.at, len, 0).ok_or(DiskError::BadBuffer);
        }
        let mut own = [0; METADATA];
        let own = own.get_mut(..self.size()).ok_or(DiskError::BadBuffer)?;
        let (kind, fields) = (self.format.guard(), &self.metadata.fields);
        for nth in 0..self.count {
            match self.metadata_at(nth).filter(|_| !of_zeroes) {
                Some(at) => self.data.read_into(at, own).ok_or(DiskError::BadBuffer)?,
                None => own.fill(0),
            }
            if generates {
                let info = ProtectionInfo {
                    guard: self.guard(nth, own, of_zeroes)?,
                    app_tag: fields.app_tag,
                    ref_tag: fields.ref_tag_of(self.format.protection, kind, nth as u64),
                };
                let at = self.format.protection_at();
                let bytes = info.encode(kind);
                own.iter_mut().skip(at).zip(&bytes[..kind.size()]).for_each(|(to, b)| *to = *b);
            } else {
                self.check(nth, own)?;
            }
            self.store(nth, own)?;
        }
        Ok(())
    }

    /// Checks the blocks after a read of the disk below, and copies their metadata to the host.
    pub(super) fn read(mut self) -> Result<(), DiskError> {
        let mut own = [0; METADATA];
        let own = own.get_mut(..self.size()).ok_or(DiskError::BadBuffer)?;
        for nth in 0..self.count {
            self.load(nth, own)?;
            if let Some(at) = self.metadata_at(nth) {
                self.data.write_from(at, own).ok_or(DiskError::BadBuffer)?;
            }
            self.check(nth, own)?;
        }
        Ok(())
    }

    /// Checks the blocks after the data were compared. Also compares the metadata, except for the
    /// protection information.
    pub(super) fn compare(mut self) -> Result<(), DiskError> {
        let (mut own, mut theirs) = ([0; METADATA], [0; METADATA]);
        let own = own.get_mut(..self.size()).ok_or(DiskError::BadBuffer)?;
        let theirs = theirs.get_mut(..self.size()).ok_or(DiskError::BadBuffer)?;
        let start = self.format.protection_at();
        let protection = start..start + self.format.protection_size();
        for nth in 0..self.count {
            self.load(nth, own)?;
            self.check(nth, own)?;
            let Some(at) = self.metadata_at(nth) else { continue };
            self.data.read_into(at, theirs).ok_or(DiskError::BadBuffer)?;
            let mut both = own.iter().zip(theirs.iter()).enumerate();
            if both.any(|(at, (own, theirs))| own != theirs && !protection.contains(&at)) {
                return Err(DiskError::CompareFailed);
            }
        }
        Ok(())
    }
}
