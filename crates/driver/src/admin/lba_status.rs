//! Get LBA Status: allocated blocks of a range. NVM 1.1, 4.2.1.

use super::identify::identify;
use super::plane::AdminCommands;
use super::queue::AdminData;
use crate::error::CommandError;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{GetLbaStatus, Identify};
use shadowbell_spec::identify::{IdentifyNvmController, cns, csi};
use shadowbell_spec::lba_status::{LbaStatusDescriptor, LbaStatusList, atype};
use std::ops::Range;
use zerocopy::FromBytes;

/// Limit of requested descriptors: the number that fits into a page of 4096 bytes.
const MAX_DESCRIPTORS: usize =
    (4096 - size_of::<LbaStatusList>()) / size_of::<LbaStatusDescriptor>();
const COMMAND: &str = "Get LBA Status";

/// Allocated blocks of a range, as far as the controller has reported them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedBlocks {
    /// Allocated ranges in ascending order.
    pub ranges: Vec<Range<u64>>,
    /// End of the reported part: blocks before `until` that are in none of the ranges are not
    /// allocated. Equal to the start of the requested range if the controller reported nothing.
    pub until: u64,
}

/// True if the controller reports allocated blocks (OACS, and AOCS in CNS 06h).
pub(super) fn reports_allocated(
    admin: &dyn AdminCommands,
    has_command: bool,
) -> Result<bool, CommandError> {
    if !has_command {
        return Ok(false);
    }
    let fields = Identify { cns: cns::CSI_CONTROLLER, csi: csi::NVM, ..Identify::default() };
    match identify(admin, 0, fields) {
        Ok(page) => Ok(IdentifyNvmController::read_from_bytes(&page)
            .is_ok_and(|nvm| nvm.aocs & IdentifyNvmController::REPORTS_ALLOCATED != 0)),
        // Controllers before version 2.0 do not have the Identify data structure of CNS 06h.
        Err(error) if error.status().is_some() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Get LBA Status: returns at most `max_ranges` allocated ranges of `range`. `range` must not be
/// empty.
pub(super) fn allocated_blocks(
    admin: &dyn AdminCommands,
    nsid: u32,
    range: Range<u64>,
    max_ranges: usize,
) -> Result<AllocatedBlocks, CommandError> {
    let count = max_ranges.clamp(1, MAX_DESCRIPTORS);
    let len = size_of::<LbaStatusList>() + count * size_of::<LbaStatusDescriptor>();
    // RL has 16 bits. For a longer range, RL is 0, which requests all blocks up to the namespace's
    // end.
    let rl = u16::try_from(range.end.saturating_sub(range.start)).unwrap_or(0);
    let mndw0 = (len / 4 - 1) as u32;
    let fields = GetLbaStatus { slba: range.start, mndw0, rl, atype: atype::ALLOCATED };
    let sqe = Sqe::get_lba_status(nsid, fields, 0);
    let data = admin.succeed(sqe, AdminData::FromController(len))?.data;
    parse(&data, range, count)
        .map_err(|what| CommandError::invalid_data(admin.plane().name(), COMMAND, what))
}

/// Decodes and validates a list of descriptors.
fn parse(data: &[u8], range: Range<u64>, count: usize) -> Result<AllocatedBlocks, &'static str> {
    let (list, mut rest) =
        LbaStatusList::read_from_prefix(data).map_err(|_| "its data are too short")?;
    if list.nlsd as usize > count {
        return Err("it returns more descriptors than there is room for");
    }
    let mut ranges: Vec<Range<u64>> = Vec::with_capacity(list.nlsd as usize);
    let mut last = range.start;
    for _ in 0..list.nlsd {
        let (entry, after) =
            LbaStatusDescriptor::read_from_prefix(rest).map_err(|_| "its data are too short")?;
        rest = after;
        let end = entry.dslba.checked_add(u64::from(entry.nlb0) + 1);
        let Some(end) = end.filter(|_| entry.dslba >= last) else {
            return Err("its descriptors are out of order");
        };
        last = end;
        if entry.dslba < range.end {
            ranges.push(entry.dslba..end.min(range.end));
        }
    }
    let until = match list.cmpc {
        LbaStatusList::COMPLETE => range.end,
        // Without COMPLETE, the report ends after the last descriptor. If there is no descriptor,
        // the report is empty.
        _ => last.min(range.end),
    };
    Ok(AllocatedBlocks { ranges, until })
}

#[cfg(test)]
mod tests {
    use super::*;
    use zerocopy::IntoBytes;

    fn list(cmpc: u8, entries: &[(u64, u32)]) -> Vec<u8> {
        let nlsd = entries.len() as u32;
        let mut data = LbaStatusList { nlsd, cmpc, ..LbaStatusList::default() }.as_bytes().to_vec();
        for &(dslba, nlb0) in entries {
            let entry = LbaStatusDescriptor { dslba, nlb0, ..LbaStatusDescriptor::default() };
            data.extend_from_slice(entry.as_bytes());
        }
        data
    }

    fn blocks(ranges: &[(u64, u64)], until: u64) -> Result<AllocatedBlocks, &'static str> {
        let ranges = ranges.iter().map(|(first, after)| *first..*after).collect();
        Ok(AllocatedBlocks { ranges, until })
    }

    #[test]
    fn an_incomplete_list_limits_the_known_range() {
        let entries = [(10, 0), (20, 9)];
        let complete = list(LbaStatusList::COMPLETE, &entries);
        assert_eq!(parse(&complete, 5..100, 8), blocks(&[(10, 11), (20, 30)], 100));
        assert_eq!(parse(&complete, 5..25, 8), blocks(&[(10, 11), (20, 25)], 25));
        for cmpc in [LbaStatusList::INCOMPLETE, LbaStatusList::NO_INDICATION, 3, 255] {
            let cut = list(cmpc, &entries);
            assert_eq!(parse(&cut, 5..100, 8), blocks(&[(10, 11), (20, 30)], 30));
            assert_eq!(parse(&cut, 5..15, 8), blocks(&[(10, 11)], 15));
            assert_eq!(parse(&list(cmpc, &[]), 5..100, 8), blocks(&[], 5));
        }
        assert_eq!(parse(&list(LbaStatusList::COMPLETE, &[]), 5..9, 8), blocks(&[], 9));
    }

    #[test]
    fn an_inconsistent_list_is_refused() {
        let complete = LbaStatusList::COMPLETE;
        for entries in [&[(4, 1)][..], &[(10, 5), (15, 0)], &[(10, 0), (9, 0)], &[(u64::MAX, 0)]] {
            assert!(parse(&list(complete, entries), 5..100, 8).is_err(), "{entries:?}");
        }
        assert!(parse(&list(complete, &[(10, 0), (20, 0)]), 5..100, 1).is_err());
        assert!(parse(&list(complete, &[(10, 0)])[..20], 5..100, 8).is_err());
        assert!(parse(&[0; 7], 5..100, 8).is_err());
    }
}
