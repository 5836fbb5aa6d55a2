//! Get LBA Status: which blocks are allocated. NVM 1.1, 4.2.1.

use super::data::AdminData;
use super::identify::identify;
use super::plane::AdminCommands;
use crate::error::CommandError;
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{GetLbaStatus, Identify};
use shadowbell_spec::identify::{IdentifyNvmController, cns, csi};
use shadowbell_spec::lba_status::{LbaStatusDescriptor, LbaStatusList, atype};
use std::ops::Range;
use zerocopy::FromBytes;

/// The most descriptors that are asked for: as many as a page has room for.
const MAX_DESCRIPTORS: usize =
    (4096 - size_of::<LbaStatusList>()) / size_of::<LbaStatusDescriptor>();
const COMMAND: &str = "Get LBA Status";

/// Which of a range's blocks are allocated, as far as the controller has told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedBlocks {
    /// The allocated ones, in ascending order.
    pub ranges: Vec<Range<u64>>,
    /// What is known ends before this block: those before it that are not in a range are not
    /// allocated. If this is the first block that was asked about, nothing is known.
    pub until: u64,
}

/// Whether the controller tells which blocks are allocated (OACS, and AOCS in CNS 06h).
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
        // Before 2.0 there was no such structure.
        Err(error) if error.status().is_some() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Asks for the allocated blocks of `range`, which is not empty, at most `most` ranges of them.
pub(super) fn allocated_blocks(
    admin: &dyn AdminCommands,
    nsid: u32,
    range: Range<u64>,
    most: usize,
) -> Result<AllocatedBlocks, CommandError> {
    let count = most.clamp(1, MAX_DESCRIPTORS);
    let len = size_of::<LbaStatusList>() + count * size_of::<LbaStatusDescriptor>();
    // RL has 16 bits. Of a longer range the end of the namespace is the end.
    let rl = u16::try_from(range.end.saturating_sub(range.start)).unwrap_or(0);
    let mndw0 = (len / 4 - 1) as u32;
    let fields = GetLbaStatus { slba: range.start, mndw0, rl, atype: atype::ALLOCATED };
    let sqe = Sqe::get_lba_status(nsid, fields, 0);
    let data = admin.succeed(sqe, AdminData::FromController(len))?.data;
    parse(&data, range, count)
        .map_err(|what| CommandError::nonsense(admin.plane().name(), COMMAND, what))
}

/// Reads a list. Nothing of it is believed that contradicts itself.
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
        // Up to the last descriptor; without one, it has not said how far it has got.
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
    fn what_is_known_ends_where_the_list_does() {
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
    fn a_list_that_contradicts_itself_is_not_believed() {
        let complete = LbaStatusList::COMPLETE;
        for entries in [&[(4, 1)][..], &[(10, 5), (15, 0)], &[(10, 0), (9, 0)], &[(u64::MAX, 0)]] {
            assert!(parse(&list(complete, entries), 5..100, 8).is_err(), "{entries:?}");
        }
        assert!(parse(&list(complete, &[(10, 0), (20, 0)]), 5..100, 1).is_err());
        assert!(parse(&list(complete, &[(10, 0)])[..20], 5..100, 8).is_err());
        assert!(parse(&[0; 7], 5..100, 8).is_err());
    }
}
