//! Device parameters of a disk for the kernel's driver.

use super::wire::{Parameters, SECTOR, attribute, parameter};
use shadowbell_block::Geometry;

/// Largest request in bytes. Each tag has a buffer of this size, whose pages are allocated on
/// first use.
pub(super) const MAX_BYTES: u32 = 256 << 10;
/// Largest block size of a device, in bytes. If the disk has larger blocks, a request can be for a
/// part of a block.
pub(super) const LARGEST_BLOCK: u32 = 4096;
/// Largest number of sectors of a discard or write zeroes request.
const MAX_RANGE: u32 = u32::MAX >> 9;

/// Device parameters of a disk.
pub(super) fn parameters(geometry: &Geometry) -> Parameters {
    // The block size of the device is limited to the page size, because the driver does not support
    // larger blocks.
    let exponent = |bytes: u32| bytes.trailing_zeros() as u8;
    let block = exponent(geometry.block_size.min(LARGEST_BLOCK));
    let mut attributes = 0;
    if geometry.read_only {
        attributes |= attribute::READ_ONLY;
    }
    if geometry.volatile_cache {
        attributes |= attribute::VOLATILE_CACHE | attribute::FUA;
    }
    let range = |has: bool| if has && !geometry.read_only { MAX_RANGE } else { 0 };
    Parameters {
        len: size_of::<Parameters>() as u32,
        types: parameter::BASIC | parameter::DISCARD,
        attributes,
        logical_block: block,
        physical_block: block,
        io_optimal: exponent(geometry.block_size.max(4096)),
        io_minimal: exponent(geometry.block_size),
        max_request: MAX_BYTES >> 9,
        size: geometry.bytes / SECTOR,
        discard_granularity: geometry.block_size,
        max_discard: range(geometry.discard),
        max_write_zeroes: range(geometry.write_zeroes),
        max_discard_segments: 1,
        ..Parameters::default()
    }
}

/// Adds the memory alignment of a device. The storage gets the memory of requests, and requires
/// addresses that are multiples of `align`.
pub(super) fn aligned(parameters: Parameters, align: usize) -> Parameters {
    // The driver's default is 4, and its maximum 4096.
    let align = align.clamp(4, 4096) as u32;
    let types = parameters.types | parameter::MEMORY;
    Parameters { types, memory_mask: align - 1, ..parameters }
}

/// Describes the difference that prevents the takeover of a device with the parameters `existing`
/// for a disk with the parameters `wanted`. `None` if the takeover is possible.
pub(super) fn difference(existing: &Parameters, wanted: &Parameters) -> Option<String> {
    if existing.size != wanted.size {
        let bytes = |parameters: &Parameters| parameters.size * SECTOR;
        return Some(format!("it has {} bytes, and this disk {}", bytes(existing), bytes(wanted)));
    }
    if existing.logical_block != wanted.logical_block {
        let bytes = |parameters: &Parameters| {
            1u64.checked_shl(parameters.logical_block.into()).unwrap_or(0)
        };
        return Some(format!(
            "it has blocks of {} bytes, and this disk of {}",
            bytes(existing),
            bytes(wanted)
        ));
    }
    (existing.attributes != wanted.attributes).then(|| {
        "it differs from this disk in write protection or in the volatile cache".to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GEOMETRY: Geometry = Geometry {
        bytes: 1 << 30,
        block_size: 512,
        read_only: false,
        volatile_cache: true,
        write_zeroes: true,
        discard: false,
    };

    #[test]
    fn the_parameters_are_those_of_the_disk() {
        let given = parameters(&GEOMETRY);
        assert_eq!((given.size, given.logical_block, given.io_optimal), (2 << 20, 9, 12));
        assert_eq!(given.attributes, attribute::VOLATILE_CACHE | attribute::FUA);
        assert_eq!((given.max_discard, given.max_write_zeroes), (0, MAX_RANGE));
        let given = parameters(&Geometry { read_only: true, volatile_cache: false, ..GEOMETRY });
        assert_eq!((given.attributes, given.max_write_zeroes), (attribute::READ_ONLY, 0));
        // The disk's blocks are larger than the driver supports.
        let given = parameters(&Geometry { block_size: 65_536, ..GEOMETRY });
        assert_eq!((given.logical_block, given.io_minimal, given.io_optimal), (12, 16, 16));
        assert_eq!(given.discard_granularity, 65_536);
    }

    #[test]
    fn memory_alignment_is_that_of_the_storage() {
        let given = parameters(&GEOMETRY);
        assert_eq!((given.types & parameter::MEMORY, given.memory_mask), (0, 0));
        for (align, mask) in [(1, 3), (4, 3), (512, 511), (4096, 4095), (65_536, 4095)] {
            let given = aligned(given, align);
            assert_eq!((given.types & parameter::MEMORY, given.memory_mask), (16, mask));
        }
    }

    #[test]
    fn a_device_does_not_go_on_with_another_disk() {
        let existing = parameters(&GEOMETRY);
        assert_eq!(difference(&existing, &existing), None);
        // The driver may set more fields, which are not compared.
        let more = Parameters { types: 7, rest: [3; 2], ..existing };
        assert_eq!(difference(&more, &existing), None);
        // A different alignment is permitted, because data that the storage refuses is copied.
        assert_eq!(difference(&aligned(existing, 512), &existing), None);
        for (other, words) in [
            (Geometry { bytes: 1 << 20, ..GEOMETRY }, "1048576"),
            (Geometry { block_size: 4096, ..GEOMETRY }, "blocks of 512 bytes"),
            (Geometry { read_only: true, ..GEOMETRY }, "write protection"),
        ] {
            let why = difference(&existing, &parameters(&other)).unwrap();
            assert!(why.contains(words), "{why}");
        }
        let odd = Parameters { logical_block: 255, ..existing };
        assert!(difference(&odd, &existing).is_some());
    }
}
