//! Copies that the controller makes by itself, without the data coming here. NVM 1.1, "Copy command".

use crate::command::Command;
use crate::error::RequestError;
use crate::namespace::Namespace;
use shadowbell_spec::Sqe;
use shadowbell_spec::identify::{IdentifyController, IdentifyNamespace};
use shadowbell_spec::nvm::{CopyFields, CopyRange};

/// What one Copy command of a namespace may be (Identify Namespace).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyLimits {
    /// Source ranges, at most 256 (MSRC + 1).
    pub ranges: usize,
    /// Blocks of one source range (MSSRL).
    pub range_blocks: u32,
    /// Blocks of all of them together (MCL).
    pub blocks: u32,
}

impl CopyLimits {
    /// None if there is no Copy command, or none that takes source range entries of format 0h.
    pub(crate) fn of(
        controller: &IdentifyController,
        identity: &IdentifyNamespace,
    ) -> Option<Self> {
        if !controller.oncs.copy() || controller.ocfs & 1 == 0 {
            return None;
        }
        let limits = Self {
            ranges: usize::from(identity.msrc) + 1,
            range_blocks: identity.mssrl.into(),
            blocks: identity.mcl,
        };
        (limits.range_blocks != 0 && limits.blocks != 0).then_some(limits)
    }

    /// The most blocks that one command copies from one place.
    #[must_use]
    pub fn most(&self) -> u32 {
        let ranges = u32::try_from(self.ranges).unwrap_or(u32::MAX);
        self.blocks.min(self.range_blocks.saturating_mul(ranges))
    }

    /// The source ranges for `blocks` blocks from `lba` on: at most as many as there may be, so that
    /// not all of the blocks are among them if they are more than [`most`](Self::most).
    pub fn split(&self, lba: u64, blocks: u32) -> impl Iterator<Item = CopyRange> + use<> {
        let step = self.range_blocks.clamp(1, 1 << 16);
        let left = blocks.min(self.most());
        (0..left.div_ceil(step)).map(move |index| {
            let at = index * step;
            let nlb0 = ((left - at).min(step) - 1) as u16;
            CopyRange { slba: lba.saturating_add(at.into()), nlb0, ..CopyRange::default() }
        })
    }
}

impl Namespace {
    /// What one Copy command may be; nothing if the controller has no such command.
    #[must_use]
    pub fn copy_limits(&self) -> Option<CopyLimits> {
        self.copies.filter(|_| self.unusable().is_none())
    }

    /// Copy the blocks of `sources`, one range after the other, to `to` and what follows. The buffer
    /// begins with the same [`CopyRange`]s.
    ///
    /// Whether the driver may submit the command again if it is not known how it ended depends on
    /// them: the second time, a source that overlaps the destination would be another. Such a copy is
    /// submitted [`once`](Command::once), and fails then. What it does is the controller's choice: the
    /// specification leaves to it in which order it reads and writes.
    ///
    /// If the command fails, dword 0 of its completion is the lowest source range that was not
    /// copied.
    ///
    /// # Errors
    /// [`RequestError::NoCopy`], [`RequestError::CopyTooLong`] if that is more than
    /// [`copy_limits`](Self::copy_limits) (or nothing), [`RequestError::PastEnd`].
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
        let fields = CopyFields { sdlba: to, nr0, ..CopyFields::default() };
        let sqe = Sqe::copy(self.nsid(), fields, 0);
        let transfer = std::mem::size_of_val(sources) as u32;
        let dwords = [sqe.cdw10, sqe.cdw11, sqe.cdw12, sqe.cdw13];
        let mut command = Command::raw(sqe.opcode, self.nsid(), dwords, transfer);
        command.once = overlaps;
        Ok(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_spec::identify::{LbaFormat, Oncs};

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
        Namespace::new(1, &controller, identity, None, 1 << 17)
    }

    fn range(slba: u64, blocks: u32) -> CopyRange {
        CopyRange { slba, nlb0: (blocks - 1) as u16, ..CopyRange::default() }
    }

    const LIMITS: CopyLimits = CopyLimits { ranges: 3, range_blocks: 100, blocks: 250 };

    #[test]
    fn who_can_copy() {
        let can = |copy, ocfs, mssrl, mcl| {
            let oncs = Oncs::new().with_copy(copy);
            let controller = IdentifyController { oncs, ocfs, ..IdentifyController::default() };
            let identity = IdentifyNamespace { mssrl, mcl, msrc: 2, ..Default::default() };
            CopyLimits::of(&controller, &identity)
        };
        assert_eq!(can(true, 1, 100, 250), Some(LIMITS));
        assert_eq!(can(false, 1, 100, 250), None);
        assert_eq!(can(true, 0b10, 100, 250), None, "only other formats");
        assert_eq!(can(true, 1, 0, 250), None);
        assert_eq!(can(true, 1, 100, 0), None);
        assert_eq!(namespace(LIMITS).copy_limits(), Some(LIMITS));
    }

    #[test]
    fn copies_are_what_the_limits_allow() {
        let namespace = namespace(LIMITS);
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
    fn what_overlaps_is_not_repeated() {
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
        // The destination is as long as all sources together.
        assert!(!repeatable(100, &[range(0, 50), range(120, 50)]));
        assert!(repeatable(100, &[range(0, 50), range(200, 50)]));
        // Nobody knows what the buffer of this one says.
        assert!(!Command::raw(0x19, 1, [100, 0, 0, 0], 32).is_repeatable());
    }

    #[test]
    fn a_place_is_split_into_ranges() {
        let split = |limits: CopyLimits, lba, blocks| {
            let ranges = limits.split(lba, blocks);
            ranges.map(|range| (range.slba, u32::from(range.nlb0) + 1)).collect::<Vec<_>>()
        };
        assert_eq!((LIMITS.most(), CopyLimits { ranges: 2, ..LIMITS }.most()), (250, 200));
        assert_eq!(split(LIMITS, 7, 100), [(7, 100)]);
        assert_eq!(split(LIMITS, 7, 101), [(7, 100), (107, 1)]);
        assert_eq!(split(LIMITS, 7, 1000), [(7, 100), (107, 100), (207, 50)]);
        assert_eq!(split(LIMITS, 7, 0), []);
        let all = CopyLimits { ranges: 256, range_blocks: 65535, blocks: u32::MAX };
        assert_eq!(all.most(), 256 * 65535);
        assert_eq!(split(all, 0, u32::MAX).len(), 256);
    }
}
