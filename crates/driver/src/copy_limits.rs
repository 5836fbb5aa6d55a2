//! Limits of the Copy command. NVM 1.1, "Copy command".

use shadowbell_spec::identify::{IdentifyController, IdentifyNamespace};
use shadowbell_spec::nvm::CopyRange;

/// Limits of one Copy command on a namespace, from Identify Namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyLimits {
    /// Maximum number of source ranges, at most 256 (MSRC + 1).
    pub ranges: usize,
    /// Maximum number of blocks of one source range (MSSRL).
    pub range_blocks: u32,
    /// Maximum number of blocks of all source ranges together (MCL).
    pub blocks: u32,
}

impl CopyLimits {
    /// Copy limits of a namespace. `None` if the controller does not support Copy with source range
    /// entries of format 0h.
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

    /// The maximum number of blocks that one command can copy if they are contiguous.
    #[must_use]
    pub fn max(&self) -> u32 {
        let ranges = u32::try_from(self.ranges).unwrap_or(u32::MAX);
        self.blocks.min(self.range_blocks.saturating_mul(ranges))
    }

    /// Splits `blocks` blocks from `lba` on into source ranges of one command. If `blocks` exceeds
    /// [`max`](Self::max), the ranges cover only the first [`max`](Self::max) blocks.
    pub fn split(&self, lba: u64, blocks: u32) -> impl Iterator<Item = CopyRange> + use<> {
        let step = self.range_blocks.clamp(1, 1 << 16);
        let left = blocks.min(self.max());
        (0..left.div_ceil(step)).map(move |index| {
            let at = index * step;
            let nlb0 = ((left - at).min(step) - 1) as u16;
            CopyRange { slba: lba.saturating_add(at.into()), nlb0, ..CopyRange::default() }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_spec::identify::Oncs;

    const LIMITS: CopyLimits = CopyLimits { ranges: 3, range_blocks: 100, blocks: 250 };

    #[test]
    fn copy_support_is_decoded_from_identify() {
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
    }

    #[test]
    fn blocks_are_split_into_ranges() {
        let split = |limits: CopyLimits, lba, blocks| {
            let ranges = limits.split(lba, blocks);
            ranges.map(|range| (range.slba, u32::from(range.nlb0) + 1)).collect::<Vec<_>>()
        };
        assert_eq!((LIMITS.max(), CopyLimits { ranges: 2, ..LIMITS }.max()), (250, 200));
        assert_eq!(split(LIMITS, 7, 100), [(7, 100)]);
        assert_eq!(split(LIMITS, 7, 101), [(7, 100), (107, 1)]);
        assert_eq!(split(LIMITS, 7, 1000), [(7, 100), (107, 100), (207, 50)]);
        assert_eq!(split(LIMITS, 7, 0), []);
        let all = CopyLimits { ranges: 256, range_blocks: 65535, blocks: u32::MAX };
        assert_eq!(all.max(), 256 * 65535);
        assert_eq!(split(all, 0, u32::MAX).len(), 256);
    }
}
