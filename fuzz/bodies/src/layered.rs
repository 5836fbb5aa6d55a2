//! Disks with layers: metadata and zones. Their commands have additional fields.

use crate::source::Source;
use shadowbell_disk::{Disk, MetadataFormat, ZoneFormat};
use shadowbell_disk_file::MemDisk;
use shadowbell_disk_layers::{MetadataDisk, ZonedDisk};
use shadowbell_spec::Sqe;
use std::sync::Arc;

/// NSIDs of the disk with metadata and of the zoned disk.
pub(crate) const WITH_METADATA: u32 = 3;
pub(crate) const ZONED: u32 = 4;

/// Number of logical blocks of a zone.
const ZONE: u64 = 128;

/// Adds metadata of any format to `disk`.
pub(crate) fn with_metadata(disk: impl Disk + 'static, source: &mut Source<'_>) -> Arc<dyn Disk> {
    let mut format = MetadataFormat::new(source.of(&[8, 16, 64])).expect("such metadata");
    (format.extended, format.first) = (source.bool(), source.bool());
    format.wide_guard = format.size >= 16 && source.bool();
    format.protection = source.of(&[1, 0, 2, 3]);
    if !format.is_possible() {
        format = MetadataFormat::new(8).expect("such metadata");
    }
    Arc::new(MetadataDisk::new(Arc::new(disk), format).expect("a disk that is large enough"))
}

/// A zoned disk in memory, with a low limit of open zones.
pub(crate) fn zoned(source: &mut Source<'_>) -> Arc<dyn Disk> {
    // The first MiB stores the states of the zones.
    let disk = MemDisk::new(2048 + 8 * ZONE, 512).expect("memory");
    let mut format = ZoneFormat::new(ZONE * 512).expect("such zones");
    format.capacity = source.of(&[ZONE * 512, (ZONE - 3) * 512]);
    (format.max_open, format.max_active) = source.of(&[(0, 0), (1, 1), (2, 3)]);
    format.append_limit = source.of(&[0, 4096]);
    format.extension = source.of(&[0, 1]);
    format.read_across = source.bool();
    Arc::new(ZonedDisk::new(Arc::new(disk), format, source.bool()).expect("zones"))
}

/// Sets the fields of a command that are meaningful only for a namespace with metadata or zones.
pub(crate) fn fields(source: &mut Source<'_>, sqe: &mut Sqe, metadata: u64) {
    match sqe.nsid {
        WITH_METADATA => {
            sqe.mptr = metadata;
            sqe.cdw12 |= source.of(&[0, 0, 0b1000, 0b0111, 0b1111, 0b0100, 0b0001]) << 26;
            // The reference tag that protection type 1 expects, or another one.
            sqe.cdw14 = source.of(&[sqe.cdw10, sqe.cdw10, 0, u32::MAX, 7]);
            sqe.cdw15 = source.of(&[0, 0xffff_0000, 0x1234_5678, u32::MAX]);
        }
        ZONED => {
            let opcodes = [0x79, 0x79, 0x7d, 0x7d, 0x7a, sqe.opcode, sqe.opcode, sqe.opcode];
            sqe.opcode = source.of(&opcodes);
            let zone = source.below(10) as u64 * ZONE;
            let slba = zone + source.of(&[0, 0, 0, 0, 1, ZONE - 1, 8]);
            (sqe.cdw10, sqe.cdw11) = (slba as u32, (slba >> 32) as u32);
            let all = u32::from(source.rarely(4)) << 8;
            match sqe.opcode {
                0x79 => sqe.cdw13 = source.of(&[4u32, 3, 1, 2, 5, 0x10, 0, 6]) | all,
                0x7a => {
                    sqe.cdw12 = source.of(&[15u32, 31, 127, 1023, 0, u32::MAX]);
                    let state = source.of(&[0u32, 1, 2, 3, 4, 5, 6, 7, 8, 255]);
                    sqe.cdw13 = source.of(&[0u32, 1, 2]) | state << 8 | all << 8;
                }
                _ => {}
            }
        }
        _ => {}
    }
}
