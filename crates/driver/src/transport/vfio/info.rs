//! Variable-length replies of the kernel: a structure, followed by a chain of capabilities.
//!
//! `linux/vfio.h`, `struct vfio_info_cap_header`: each capability begins with its identifier (16
//! bits), its version (16 bits) and the offset of the next one (32 bits, 0 for none), counted from
//! the start of the structure. The bytes are not trusted: offsets outside of the reply are not
//! followed, and a cyclic chain ends.

use std::ops::RangeInclusive;
use vfio_bindings::bindings::vfio;

/// Length of a capability header in bytes.
const HEADER: usize = 8;
/// Size of `struct vfio_region_info` in bytes.
pub(super) const REGION_INFO: usize = 32;
/// Size of `struct vfio_iommu_type1_info` in bytes, including the offset of the capabilities.
pub(super) const IOMMU_INFO: usize = 24;

fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    let end = offset.checked_add(4)?;
    Some(u32::from_ne_bytes(bytes.get(offset..end)?.try_into().ok()?))
}

fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    let end = offset.checked_add(8)?;
    Some(u64::from_ne_bytes(bytes.get(offset..end)?.try_into().ok()?))
}

/// Finds capability `id` in the chain that begins at `first`. Returns the bytes from its header to
/// the end of the reply.
fn capability(answer: &[u8], first: u32, id: u32) -> Option<&[u8]> {
    let mut at = first as usize;
    // Headers do not overlap. So a chain with more headers than fit into the reply has a cycle.
    for _ in 0..answer.len() / HEADER {
        if at < HEADER {
            return None;
        }
        let bytes = answer.get(at..).filter(|bytes| bytes.len() >= HEADER)?;
        if u32_at(bytes, 0)? & 0xffff == id {
            return Some(bytes);
        }
        at = u32_at(bytes, 4)? as usize;
    }
    None
}

/// Pairs of 64-bit values of a capability, after its header, a count and 4 reserved bytes. The
/// number of pairs is limited by the count and by the length of the reply.
fn pairs(capability: &[u8]) -> impl Iterator<Item = (u64, u64)> {
    let count = u32_at(capability, HEADER).unwrap_or(0) as usize;
    let bodies = capability.get(HEADER + 8..).unwrap_or_default().chunks_exact(16).take(count);
    bodies.filter_map(|body| Some((u64_at(body, 0)?, u64_at(body, 8)?)))
}

/// Description of a device region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RegionInfo {
    /// Length in bytes; 0 if the region does not exist.
    pub(super) size: u64,
    /// Offset in the device's file.
    pub(super) offset: u64,
    pub(super) readable: bool,
    pub(super) writable: bool,
    /// Mappable areas, inside of the region: offset and length.
    pub(super) areas: Vec<(u64, u64)>,
}

impl RegionInfo {
    /// Parses the kernel's reply. Returns `None` if the reply is too short.
    pub(super) fn parse(answer: &[u8]) -> Option<Self> {
        let flags = u32_at(answer, 4)?;
        let first = u32_at(answer, 12)?;
        let (size, offset) = (u64_at(answer, 16)?, u64_at(answer, 24)?);
        let has = |flag| flags & flag != 0;
        let mut areas = Vec::new();
        if has(vfio::VFIO_REGION_INFO_FLAG_MMAP) {
            let sparse = has(vfio::VFIO_REGION_INFO_FLAG_CAPS)
                .then(|| capability(answer, first, vfio::VFIO_REGION_INFO_CAP_SPARSE_MMAP))
                .flatten();
            match sparse {
                Some(sparse) => areas.extend(pairs(sparse)),
                None => areas.push((0, size)),
            }
        }
        areas.retain(|&(start, len)| {
            len != 0
                && start.is_multiple_of(4096)
                && start.checked_add(len).is_some_and(|end| end <= size)
                && offset.checked_add(size).is_some()
        });
        Some(Self {
            size,
            offset,
            readable: has(vfio::VFIO_REGION_INFO_FLAG_READ),
            writable: has(vfio::VFIO_REGION_INFO_FLAG_WRITE),
            areas,
        })
    }
}

/// Description of a type 1 IOMMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IommuInfo {
    /// Smallest page size.
    pub(super) granule: u64,
    /// Usable IOVA ranges; `None` if the kernel does not report them.
    pub(super) ranges: Option<Vec<RangeInclusive<u64>>>,
}

impl IommuInfo {
    /// Parses the kernel's reply. Returns `None` if the reply is too short.
    pub(super) fn parse(answer: &[u8]) -> Option<Self> {
        let flags = u32_at(answer, 4)?;
        let sizes = u64_at(answer, 8)?;
        // The lowest set bit is the smallest page size.
        let known = flags & vfio::VFIO_IOMMU_INFO_PGSIZES != 0 && sizes != 0;
        let granule = if known { 1 << sizes.trailing_zeros() } else { 4096 };
        let ranges = (flags & vfio::VFIO_IOMMU_INFO_CAPS != 0)
            .then(|| {
                let first = u32_at(answer, 16)?;
                let id = vfio::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE;
                Some(pairs(capability(answer, first, id)?).map(|(a, b)| a..=b).collect())
            })
            .flatten();
        Some(Self { granule, ranges })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words(values: &[u32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    /// Builds a reply: argsz, flags, index, cap_offset, size, offset, then capabilities.
    fn region(flags: u32, capabilities: &[u32]) -> Vec<u8> {
        let mut all = vec![0, flags, 0, REGION_INFO as u32, 0x4000, 0, 0, 1];
        all.extend(capabilities);
        words(&all)
    }

    const ALL: u32 = 0xf;

    #[test]
    fn a_region_without_capabilities_is_mapped_whole_or_not_at_all() {
        let info = RegionInfo::parse(&region(0x7, &[])).unwrap();
        assert!(info.readable && info.writable);
        assert_eq!((info.size, info.offset), (0x4000, 1 << 32));
        assert_eq!(info.areas, [(0, 0x4000)]);
        assert_eq!(RegionInfo::parse(&region(0x3, &[])).unwrap().areas, []);
        assert!(!RegionInfo::parse(&region(0x1, &[])).unwrap().writable);
    }

    #[test]
    fn the_sparse_areas_are_found_behind_other_capabilities() {
        let info = RegionInfo::parse(&region(
            ALL,
            &[3, 40, 1, 0, 2, 0, 0, 0, 0x1000, 0, 0x2000, 0, 0x1000, 0],
        ))
        .unwrap();
        assert_eq!(info.areas, [(0, 0x1000), (0x2000, 0x1000)]);
        // With an empty list of areas, nothing may be mapped.
        assert_eq!(RegionInfo::parse(&region(ALL, &[1, 0, 0, 0])).unwrap().areas, []);
        // A capability for a mappable MSI-X table (id 3) does not restrict the mapping.
        assert_eq!(RegionInfo::parse(&region(ALL, &[3, 0])).unwrap().areas, [(0, 0x4000)]);
    }

    #[test]
    fn areas_that_reach_outside_are_left_out() {
        for area in [
            [0x4000, 0, 0x1000, 0],
            [0, 0, 0x5000, 0],
            [0x800, 0, 0x800, 0],
            [0x1000, 0, 0, 0],
            [0xffff_f000, 0xffff_ffff, 0x2000, 0],
        ] {
            let mut capability = vec![1, 0, 1, 0];
            capability.extend(area);
            assert_eq!(RegionInfo::parse(&region(ALL, &capability)).unwrap().areas, []);
        }
        // The count exceeds the number of pairs in the reply.
        let cut = [1, 0, u32::MAX, 0, 0x1000, 0, 0x1000, 0, 0, 0];
        assert_eq!(RegionInfo::parse(&region(ALL, &cut)).unwrap().areas, [(0x1000, 0x1000)]);
    }

    #[test]
    fn a_cyclic_capability_chain_ends() {
        for next in [REGION_INFO as u32, 40, 1, 7, 0xffff_fff8] {
            let info = RegionInfo::parse(&region(ALL, &[9, next, 9, 32])).unwrap();
            assert_eq!(info.areas, [(0, 0x4000)]);
        }
        let mut misplaced = region(ALL, &[1, 0, 0, 0]);
        for offset in [0u32, 4, 45, 60, u32::MAX] {
            misplaced[12..16].copy_from_slice(&offset.to_ne_bytes());
            assert_eq!(RegionInfo::parse(&misplaced).unwrap().areas, [(0, 0x4000)]);
        }
    }

    #[test]
    fn page_sizes_and_ranges_of_an_iommu_are_parsed() {
        // Words of the reply: argsz, flags, page sizes, cap_offset, padding; then the ranges.
        let info = |flags, sizes| {
            words(&[
                0,
                flags,
                sizes,
                0,
                24,
                0,
                1,
                0,
                2,
                0,
                0,
                0,
                0xfedf_ffff,
                0,
                0xfef0_0000,
                0,
                0xffff_ffff,
                0x7f,
            ])
        };
        let whole = IommuInfo::parse(&info(3, 0x4020_1000)).unwrap();
        assert_eq!(whole.granule, 4096);
        assert_eq!(
            whole.ranges.as_deref(),
            Some(&[0..=0xfedf_ffff, 0xfef0_0000..=0x7f_ffff_ffff][..])
        );
        let silent = IommuInfo::parse(&info(0, 0x4020_0000)).unwrap();
        assert_eq!(silent, IommuInfo { granule: 4096, ranges: None });
        assert_eq!(IommuInfo::parse(&info(1, 0x4001_0000)).unwrap().granule, 0x1_0000);
        assert_eq!(IommuInfo::parse(&info(3, 0)[..20]).unwrap().ranges, None);
        assert_eq!(IommuInfo::parse(&[0; 15]), None);
    }

    proptest! {
        #[test]
        fn areas_of_any_bytes_are_inside_the_region(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Some(info) = RegionInfo::parse(&bytes) {
                for (start, len) in info.areas {
                    prop_assert!(start + len <= info.size);
                }
            }
            let _ = IommuInfo::parse(&bytes);
        }

        #[test]
        fn any_capability_chain_ends(
            bytes in proptest::collection::vec(0u32..64, 0..60), offset in 0u32..256
        ) {
            let mut answer = region(ALL, &bytes);
            answer[12..16].copy_from_slice(&offset.to_ne_bytes());
            prop_assert!(RegionInfo::parse(&answer).is_some());
        }
    }
}
