//! Namespace properties from Identify, and construction of commands.

use crate::command::Command;
use crate::copy_limits::CopyLimits;
use crate::error::RequestError;
use crate::metadata::{BlockMetadata, MetadataCommand};
use shadowbell_spec::Sqe;
use shadowbell_spec::identify::{
    IdentifyController, IdentifyNamespace, NamespaceId, NamespaceIds, Oncs,
};
use shadowbell_spec::nvm::{
    CopyFields, CopyRange, DSM_MAX_RANGES, PRINFO_GUARD, PRINFO_PRACT, PRINFO_REFTAG,
};
use shadowbell_spec::opcode::NvmOpcode;
use shadowbell_spec::protection::{GuardKind, ProtectionFields};

/// Maximum number of blocks of one command. NVM 1.1, "Read command" (NLB: 16 bits, 0's based).
const MAX_BLOCKS: u64 = 1 << 16;

/// A namespace as described by Identify; its methods create commands.
///
/// Blocks are the namespace's logical blocks, of [`block_size`](Self::block_size) bytes.
///
/// # Metadata
///
/// Plain commands are those without explicit metadata: [`read`](Self::read), [`write`](Self::write)
/// and similar. If the metadata of each block are protection information and nothing else, plain
/// commands transfer data alone: the controller inserts protection information, and checks and
/// strips it (PRACT). As in Linux, the reference tag is the LBA, truncated to the tag's width (zero
/// for type 3), and the application tag is zero. If blocks have other metadata, plain commands that
/// transfer data are refused, because they do not specify the metadata. For any metadata, the
/// commands `..._with_metadata` transfer or specify metadata explicitly.
#[derive(Clone, Debug)]
pub struct Namespace {
    nsid: u32,
    block_shift: u32,
    /// Block limit of a command on the fast path of `rw`; 0 if the blocks have metadata or are
    /// unusable.
    max_blocks: u32,
    /// Block limit of a plain command, whether the blocks have metadata or not; 0 if the blocks are
    /// unusable.
    max_plain_blocks: u32,
    /// Transfer limit of one command in bytes.
    pub(crate) max_bytes: u64,
    metadata: Option<BlockMetadata>,
    blocks: u64,
    max_transfer: u64,
    read_only: bool,
    oncs: Oncs,
    copies: Option<CopyLimits>,
    volatile_cache: bool,
    unusable: Option<&'static str>,
    nguid: Option<[u8; 16]>,
    eui64: Option<[u8; 8]>,
    uuid: Option<[u8; 16]>,
    identity: Box<IdentifyNamespace>,
}

impl Namespace {
    pub(crate) fn new(
        nsid: u32,
        controller: &IdentifyController,
        (identity, elbaf, ids): (IdentifyNamespace, Option<u32>, Option<&NamespaceIds>),
        max_transfer: u64,
    ) -> Self {
        let format = identity.format().unwrap_or_default();
        let size = format.block_size().filter(|size| *size <= u64::from(u32::MAX / 2));
        let known = BlockMetadata::of(&identity, format, elbaf);
        let metadata = known.ok().flatten().filter(|_| size.is_some_and(|s| s <= max_transfer));
        let unusable = match (size, known) {
            (None, _) => Some("has an invalid block size"),
            (_, Err(what)) => Some(what),
            (Some(size), _) if size > max_transfer => Some("has blocks longer than a transfer"),
            (_, Ok(Some(metadata))) if !metadata.is_protection_only() => {
                Some("has metadata that are more than protection information")
            }
            _ => None,
        };
        let block_shift = size.map_or(9, u64::trailing_zeros);
        let max_plain_blocks = match unusable {
            None => (max_transfer >> block_shift).min(MAX_BLOCKS) as u32,
            Some(_) => 0,
        };
        let mut namespace = Self {
            nsid,
            block_shift,
            max_blocks: if metadata.is_none() { max_plain_blocks } else { 0 },
            max_plain_blocks,
            max_bytes: max_transfer,
            metadata,
            blocks: identity.nsze,
            max_transfer: u64::from(max_plain_blocks) << block_shift,
            // NSATTR bit 0: the namespace is write protected (NVM 1.1).
            read_only: identity.nsattr & 1 != 0,
            oncs: controller.oncs,
            copies: CopyLimits::of(controller, &identity),
            volatile_cache: controller.vwc.vwcp(),
            unusable,
            nguid: Some(identity.nguid).filter(|id| *id != [0; 16]),
            eui64: Some(identity.eui64).filter(|id| *id != [0; 8]),
            uuid: None,
            identity: Box::new(identity),
        };
        for id in ids.iter().flat_map(|ids| ids.iter()) {
            match id {
                NamespaceId::Uuid(uuid) => namespace.uuid = Some(uuid),
                NamespaceId::Nguid(nguid) => namespace.nguid = Some(nguid),
                NamespaceId::Eui64(eui64) => namespace.eui64 = Some(eui64),
                NamespaceId::Csi(_) | NamespaceId::Other { .. } => {}
            }
        }
        namespace
    }

    /// The namespace identifier.
    #[must_use]
    pub fn nsid(&self) -> u32 {
        self.nsid
    }

    /// The size of a logical block in bytes.
    #[must_use]
    pub fn block_size(&self) -> u32 {
        1 << self.block_shift
    }

    /// The number of logical blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// The size in bytes, saturating at `u64::MAX`.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.blocks.saturating_mul(self.block_size().into())
    }

    /// The transfer limit of one command in bytes, a multiple of the block size.
    #[must_use]
    pub fn max_transfer_bytes(&self) -> u64 {
        self.max_transfer
    }

    /// True if the namespace was write protected at Identify (NSATTR).
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.read_only
    }

    /// True if the controller has a volatile write cache: a power loss before a Flush loses writes.
    #[must_use]
    pub fn has_volatile_cache(&self) -> bool {
        self.volatile_cache
    }

    /// The optional commands that the controller supports.
    #[must_use]
    pub fn optional_commands(&self) -> Oncs {
        self.oncs
    }

    /// The reason why plain commands cannot transfer data, as the end of a sentence "the namespace
    /// ...". Commands with metadata can still transfer data if [`metadata`](Self::metadata) is
    /// `Some`.
    #[must_use]
    pub fn unusable(&self) -> Option<&'static str> {
        self.unusable
    }

    /// Metadata format of the blocks, if they have metadata and the driver supports the format.
    #[must_use]
    pub fn metadata(&self) -> Option<&BlockMetadata> {
        self.metadata.as_ref()
    }

    /// True if [`compare`](Self::compare) is supported: the controller has the Compare command, and
    /// the blocks have no metadata.
    #[must_use]
    pub fn compares(&self) -> bool {
        self.oncs.compare() && self.metadata.is_none()
    }

    /// The Namespace Globally Unique Identifier.
    #[must_use]
    pub fn nguid(&self) -> Option<[u8; 16]> {
        self.nguid
    }

    /// The IEEE Extended Unique Identifier.
    #[must_use]
    pub fn eui64(&self) -> Option<[u8; 8]> {
        self.eui64
    }

    /// The UUID.
    #[must_use]
    pub fn uuid(&self) -> Option<[u8; 16]> {
        self.uuid
    }

    /// The Identify Namespace data structure (CNS 00h).
    #[must_use]
    pub fn identity(&self) -> &IdentifyNamespace {
        &self.identity
    }

    /// Converts bytes to blocks.
    ///
    /// # Errors
    /// [`RequestError::Unaligned`].
    pub fn blocks_in(&self, bytes: u64) -> Result<u64, RequestError> {
        if bytes & (u64::from(self.block_size()) - 1) == 0 {
            Ok(bytes >> self.block_shift)
        } else {
            Err(RequestError::Unaligned { bytes, block_size: self.block_size() })
        }
    }

    /// Read: `blocks` blocks from `lba` into the buffer.
    ///
    /// # Errors
    /// [`RequestError`], as for every method that creates a command: too many blocks for one
    /// command, or blocks beyond the end.
    #[inline]
    pub fn read(&self, lba: u64, blocks: u32) -> Result<Command, RequestError> {
        self.rw(NvmOpcode::Read, lba, blocks)
    }

    /// Write: `blocks` blocks from the buffer to `lba`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    #[inline]
    pub fn write(&self, lba: u64, blocks: u32) -> Result<Command, RequestError> {
        self.rw(NvmOpcode::Write, lba, blocks)
    }

    /// Compare: compares `blocks` blocks from `lba` with the buffer. Ends with Compare Failure if
    /// they differ.
    ///
    /// # Errors
    /// As [`read`](Self::read), and [`RequestError::CompareMetadata`] if the blocks have metadata,
    /// because the controller would compare or require metadata as well.
    pub fn compare(&self, lba: u64, blocks: u32) -> Result<Command, RequestError> {
        self.rw(NvmOpcode::Compare, lba, blocks)
    }

    /// Verify: the controller reads `blocks` blocks from `lba` without a data transfer, and checks
    /// protection information if the blocks have it.
    ///
    /// # Errors
    /// As [`read`](Self::read), but [`max_transfer_bytes`](Self::max_transfer_bytes) does not
    /// apply, because the command transfers no data.
    pub fn verify(&self, lba: u64, blocks: u32) -> Result<Command, RequestError> {
        let command = self.without_data(NvmOpcode::Verify, lba, blocks)?;
        Ok(self.protected(command, 0))
    }

    /// Write Uncorrectable: makes `blocks` blocks from `lba` unreadable until the next write.
    ///
    /// # Errors
    /// As [`verify`](Self::verify).
    pub fn write_uncorrectable(&self, lba: u64, blocks: u32) -> Result<Command, RequestError> {
        self.without_data(NvmOpcode::WriteUncorrectable, lba, blocks)
    }

    /// Write Zeroes: zeroes `blocks` blocks from `lba`. With `deallocate`, the controller may
    /// deallocate them. The command's Deallocate bit is set only if the controller supports the bit
    /// (DLFEAT, bit 3), because SPDK's target refuses a command with an unsupported Deallocate bit.
    ///
    /// If the blocks have protection information, the controller inserts protection information
    /// that matches zeroes. If the blocks may be deallocated, the protection information reads as
    /// FFh instead, which disables its checks.
    ///
    /// # Errors
    /// As [`verify`](Self::verify).
    pub fn write_zeroes(
        &self,
        lba: u64,
        blocks: u32,
        deallocate: bool,
    ) -> Result<Command, RequestError> {
        let mut command = self.without_data(NvmOpcode::WriteZeroes, lba, blocks)?;
        let deallocate = deallocate && self.identity.dlfeat.wzds();
        command.cdw12 |= u32::from(deallocate) << 25;
        let checks = self.metadata.map_or(0, |metadata| metadata.checks());
        let inserts = !deallocate && checks != 0;
        Ok(if inserts {
            self.tagged(command, PRINFO_PRACT | checks & PRINFO_REFTAG)
        } else {
            command
        })
    }

    /// Flush: makes all completed writes durable.
    #[must_use]
    pub fn flush(&self) -> Command {
        Command::flush(self.nsid)
    }

    /// Dataset Management, Deallocate. The buffer begins with `ranges` (1 to 256)
    /// [`DsmRange`](shadowbell_spec::nvm::DsmRange)s.
    ///
    /// # Errors
    /// [`RequestError::Ranges`].
    pub fn deallocate(&self, ranges: usize) -> Result<Command, RequestError> {
        match u8::try_from(ranges.wrapping_sub(1)) {
            Ok(zero_based) if ranges <= DSM_MAX_RANGES => {
                Ok(Command::deallocate(self.nsid, zero_based))
            }
            _ => Err(RequestError::Ranges { ranges }),
        }
    }

    /// Limits of one Copy command; `None` if the controller or this format does not support Copy.
    #[must_use]
    pub fn copy_limits(&self) -> Option<CopyLimits> {
        // Blocks with 64-bit guards need source range entries of another format, and the driver
        // does not support this format.
        let is_narrow = |metadata: BlockMetadata| metadata.guard() == GuardKind::Crc16;
        let is_plain = self.unusable.is_none() && self.metadata.is_none_or(is_narrow);
        self.copies.filter(|_| is_plain)
    }

    /// Copy: copies the blocks of `sources`, one range after the other, to consecutive blocks from
    /// `to` on. The buffer begins with the same [`CopyRange`]s.
    ///
    /// If a source overlaps the destination, a second execution would read different data. So the
    /// command is created with [`once`](Command::once), and fails if its outcome is unknown. The
    /// result of an overlapping copy depends on the controller, because the specification does not
    /// define the order of its reads and writes.
    ///
    /// If the command fails, dword 0 of its completion is the lowest source range that was not
    /// copied.
    ///
    /// # Errors
    /// [`RequestError::NoCopy`]; [`RequestError::CopyTooLong`] if the sources are empty or exceed
    /// [`copy_limits`](Self::copy_limits); [`RequestError::PastEnd`].
    pub fn copy(&self, to: u64, sources: &[CopyRange]) -> Result<Command, RequestError> {
        let limits = self.copy_limits().ok_or(RequestError::NoCopy)?;
        let longest = sources.iter().map(|range| u32::from(range.nlb0) + 1).max().unwrap_or(0);
        let total: u64 = sources.iter().map(|range| u64::from(range.nlb0) + 1).sum();
        let nr0 = u8::try_from(sources.len().wrapping_sub(1)).ok();
        let nr0 = nr0.filter(|_| {
            sources.len() <= limits.ranges
                && longest <= limits.range_blocks
                && total <= limits.blocks.into()
        });
        let Some(nr0) = nr0 else {
            return Err(RequestError::CopyTooLong {
                ranges: sources.len(),
                longest,
                blocks: total,
                limits,
            });
        };
        let end_of = |lba: u64, count: u64| match lba.checked_add(count) {
            Some(end) if end <= self.blocks() => Ok(end),
            _ => Err(RequestError::PastEnd {
                lba,
                end: lba.saturating_add(count),
                blocks: self.blocks(),
            }),
        };
        let to_end = end_of(to, total)?;
        let mut overlaps = false;
        for range in sources {
            let end = end_of(range.slba, u64::from(range.nlb0) + 1)?;
            overlaps |= range.slba < to_end && to < end;
        }
        // The controller inserts new reference tags at the destination, because they depend on the
        // LBA. It does not check the tags of the sources, because the ranges in the buffer have no
        // expected tags.
        let checks = self.metadata.map_or(0, |metadata| metadata.checks());
        let prinfor = if checks == 0 { 0 } else { PRINFO_PRACT | PRINFO_GUARD };
        let fields = CopyFields { sdlba: to, nr0, prinfor, ..CopyFields::default() };
        let sqe = Sqe::copy(self.nsid(), fields, 0);
        let transfer = std::mem::size_of_val(sources) as u32;
        let dwords = [sqe.cdw10, sqe.cdw11, sqe.cdw12, sqe.cdw13];
        let mut command = Command::raw(sqe.opcode, self.nsid(), dwords, transfer);
        command.once = overlaps;
        let inserts = PRINFO_PRACT | checks & PRINFO_REFTAG;
        Ok(if checks == 0 { command } else { self.tagged(command, inserts) })
    }

    #[inline]
    fn rw(&self, opcode: NvmOpcode, lba: u64, blocks: u32) -> Result<Command, RequestError> {
        let zero_based = blocks.wrapping_sub(1);
        if zero_based >= self.max_blocks || !self.contains(lba, blocks) {
            return self.rw_slow(opcode, lba, blocks);
        }
        let transfer = blocks << self.block_shift;
        Ok(Command::rw(opcode, self.nsid, lba, zero_based as u16, transfer))
    }

    /// Slow path of `rw`: blocks with metadata, and invalid requests.
    #[cold]
    fn rw_slow(&self, opcode: NvmOpcode, lba: u64, blocks: u32) -> Result<Command, RequestError> {
        let zero_based = blocks.wrapping_sub(1);
        if zero_based >= self.max_plain_blocks || !self.contains(lba, blocks) {
            return Err(self.refuse(lba, blocks, true));
        }
        if opcode == NvmOpcode::Compare {
            return Err(RequestError::CompareMetadata { nsid: self.nsid });
        }
        let transfer = blocks << self.block_shift;
        let command = Command::rw(opcode, self.nsid, lba, zero_based as u16, transfer);
        Ok(self.protected(command, PRINFO_PRACT))
    }

    /// Adds the check of protection information to the command, and with `pract` its insertion or
    /// stripping.
    fn protected(&self, command: Command, pract: u8) -> Command {
        match self.metadata.map_or(0, |metadata| metadata.checks()) {
            0 => command,
            checks => self.tagged(command, checks | pract),
        }
    }

    fn tagged(&self, command: Command, prinfo: u8) -> Command {
        let guard = self.metadata.map(|metadata| metadata.guard()).unwrap_or_default();
        command.with_prinfo(prinfo).with_lba_tag(guard)
    }

    pub(crate) fn without_data(
        &self,
        opcode: NvmOpcode,
        lba: u64,
        blocks: u32,
    ) -> Result<Command, RequestError> {
        let Ok(zero_based) = u16::try_from(blocks.wrapping_sub(1)) else {
            return Err(self.refuse(lba, blocks, false));
        };
        if !self.contains(lba, blocks) {
            return Err(self.refuse(lba, blocks, false));
        }
        Ok(Command::rw(opcode, self.nsid, lba, zero_based, 0))
    }

    #[inline]
    fn contains(&self, lba: u64, blocks: u32) -> bool {
        lba.checked_add(blocks.into()).is_some_and(|end| end <= self.blocks)
    }

    #[cold]
    fn refuse(&self, lba: u64, blocks: u32, moves_data: bool) -> RequestError {
        if let (Some(what), true) = (self.unusable, moves_data) {
            return RequestError::Unusable { nsid: self.nsid, what };
        }
        let count = u64::from(blocks);
        if count == 0 || count > MAX_BLOCKS {
            return RequestError::Blocks { blocks: count };
        }
        if !self.contains(lba, blocks) {
            return RequestError::PastEnd {
                lba,
                end: lba.saturating_add(count),
                blocks: self.blocks,
            };
        }
        RequestError::TooLong { bytes: count << self.block_shift, max: self.max_transfer }
    }
}

impl Namespace {
    /// Read with metadata: `blocks` blocks from `lba` into the buffer. [`MetadataCommand`]
    /// describes the layout of the buffer; `fields` select the checks of protection information.
    ///
    /// # Errors
    /// As [`read`](Self::read), and [`RequestError::NoMetadata`].
    pub fn read_with_metadata(
        &self,
        lba: u64,
        blocks: u32,
        fields: ProtectionFields,
    ) -> Result<MetadataCommand, RequestError> {
        self.with_metadata(NvmOpcode::Read, lba, blocks, fields)
    }

    /// Write with metadata: `blocks` blocks from the buffer to `lba`.
    ///
    /// # Errors
    /// As [`read_with_metadata`](Self::read_with_metadata).
    pub fn write_with_metadata(
        &self,
        lba: u64,
        blocks: u32,
        fields: ProtectionFields,
    ) -> Result<MetadataCommand, RequestError> {
        self.with_metadata(NvmOpcode::Write, lba, blocks, fields)
    }

    /// Compare with metadata: compares `blocks` blocks from `lba` with the buffer, and their
    /// metadata as far as the controller compares metadata. PRACT is not defined for Compare.
    ///
    /// # Errors
    /// As [`read_with_metadata`](Self::read_with_metadata).
    pub fn compare_with_metadata(
        &self,
        lba: u64,
        blocks: u32,
        fields: ProtectionFields,
    ) -> Result<MetadataCommand, RequestError> {
        self.with_metadata(NvmOpcode::Compare, lba, blocks, fields)
    }

    /// Verify: the controller checks the protection information of `blocks` blocks from `lba` as
    /// `fields` specify, without a data transfer.
    ///
    /// # Errors
    /// As [`read_with_metadata`](Self::read_with_metadata), but without a transfer limit.
    pub fn verify_with_metadata(
        &self,
        lba: u64,
        blocks: u32,
        fields: ProtectionFields,
    ) -> Result<MetadataCommand, RequestError> {
        let command = self.without_data(NvmOpcode::Verify, lba, blocks)?;
        self.of_metadata(command, lba, blocks, fields)
    }

    fn with_metadata(
        &self,
        opcode: NvmOpcode,
        lba: u64,
        blocks: u32,
        fields: ProtectionFields,
    ) -> Result<MetadataCommand, RequestError> {
        let command = self.without_data(opcode, lba, blocks)?;
        let command = self.of_metadata(command, lba, blocks, fields)?;
        let most = command.max_blocks_of(self.max_bytes);
        if u64::from(blocks) > most {
            let bytes = u64::from(blocks) * u64::from(self.block_size());
            return Err(RequestError::TooLong { bytes, max: most * u64::from(self.block_size()) });
        }
        Ok(command.with_transfer_length())
    }

    fn of_metadata(
        &self,
        command: Command,
        lba: u64,
        blocks: u32,
        fields: ProtectionFields,
    ) -> Result<MetadataCommand, RequestError> {
        let format =
            self.metadata().copied().ok_or(RequestError::NoMetadata { nsid: self.nsid() })?;
        let size = self.block_size();
        Ok(MetadataCommand::new(command, format, fields, (lba, blocks), size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_spec::identify::{Dlfeat, LbaFormat};

    const LIMITS: CopyLimits = CopyLimits { ranges: 3, range_blocks: 100, blocks: 250 };

    fn namespace(limits: CopyLimits) -> Namespace {
        let controller = IdentifyController {
            oncs: Oncs::new().with_copy(true),
            ocfs: 0b101,
            ..IdentifyController::default()
        };
        let mut identity = IdentifyNamespace {
            nsze: 10_000,
            mssrl: limits.range_blocks as u16,
            mcl: limits.blocks,
            msrc: (limits.ranges - 1) as u8,
            ..IdentifyNamespace::default()
        };
        identity.lbaf[0] = LbaFormat { lbads: 9, ..LbaFormat::default() };
        Namespace::new(1, &controller, (identity, None, None), 1 << 17)
    }

    fn range(slba: u64, blocks: u32) -> CopyRange {
        CopyRange { slba, nlb0: (blocks - 1) as u16, ..CopyRange::default() }
    }

    #[test]
    fn write_zeroes_deallocates_only_if_supported() {
        for understood in [true, false] {
            let mut identity = IdentifyNamespace { nsze: 8, ..IdentifyNamespace::default() };
            identity.lbaf[0].lbads = 9;
            identity.dlfeat = Dlfeat::new().with_wzds(understood);
            let controller = IdentifyController::default();
            let namespace = Namespace::new(1, &controller, (identity, None, None), 4096);
            let bit = |wanted| namespace.write_zeroes(0, 8, wanted).unwrap().cdw12 >> 25 & 1;
            assert_eq!((bit(false), bit(true)), (0, u32::from(understood)));
        }
    }

    #[test]
    fn copies_are_bounded_by_the_limits() {
        let namespace = namespace(LIMITS);
        assert_eq!(namespace.copy_limits(), Some(LIMITS));
        let command = namespace.copy(0x1_0000, &[range(1, 1)]);
        assert!(matches!(command, Err(RequestError::PastEnd { .. })));
        let sources = [range(1000, 100), range(2000, 100), range(0, 50)];
        let command = namespace.copy(9750, &sources).unwrap();
        assert_eq!(command.transfer_bytes(), 96);
        assert!(!command.writes_buffer() && command.is_repeatable());
        let sqe = command.with_fua().sqe(0);
        let fields = CopyFields { sdlba: 9750, nr0: 2, fua: true, ..CopyFields::default() };
        assert_eq!((sqe.opcode, sqe.nsid, CopyFields::decode(&sqe)), (0x19, 1, fields));
        for sources in [
            &[][..],
            &[range(0, 101)],
            &[range(0, 100), range(0, 100), range(0, 51)],
            &[range(0, 1); 4],
            &[range(0, 1); 257],
        ] {
            let error = namespace.copy(5000, sources).unwrap_err();
            assert!(matches!(error, RequestError::CopyTooLong { .. }), "{error}");
        }
        for (to, source) in [
            (9901, range(0, 100)),
            (u64::MAX, range(0, 1)),
            (0, range(9999, 2)),
            (0, range(u64::MAX, 1)),
        ] {
            let error = namespace.copy(to, &[source]).unwrap_err();
            assert!(matches!(error, RequestError::PastEnd { .. }), "{error}");
        }
    }

    #[test]
    fn overlapping_copies_are_not_repeated() {
        let namespace = namespace(LIMITS);
        let repeatable = |to, sources: &[CopyRange]| {
            let command = namespace.copy(to, sources).unwrap();
            command.is_repeatable()
        };
        assert!(repeatable(100, &[range(0, 100)]));
        assert!(repeatable(100, &[range(200, 100)]));
        assert!(!repeatable(100, &[range(1, 100)]));
        assert!(!repeatable(100, &[range(199, 100)]));
        assert!(repeatable(100, &[range(110, 10)]) && repeatable(100, &[range(90, 10)]));
        assert!(!repeatable(100, &[range(90, 20)]));
        // The destination is as long as all sources together, so it overlaps the second source.
        assert!(!repeatable(100, &[range(0, 50), range(120, 50)]));
        assert!(repeatable(100, &[range(0, 50), range(200, 50)]));
        // The ranges in the buffer of a raw Copy are unknown, so the command is not repeatable.
        assert!(!Command::raw(0x19, 1, [100, 0, 0, 0], 32).is_repeatable());
    }
}
