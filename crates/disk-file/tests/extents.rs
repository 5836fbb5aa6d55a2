//! Tests of the extents that disks report.

mod common;

use common::directory;
use shadowbell_disk::{Disk, Extent};
use shadowbell_disk_file::{MemDisk, NullDisk};
use shadowbell_testing::programs::skipped;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

const MIB: u64 = 1 << 20;

/// Extents of a range, as pairs: number of bytes, and true if they are allocated. Adjacent extents
/// of the same kind are merged.
fn extents(disk: &dyn Disk, offset: u64, len: u64) -> Vec<(u64, bool)> {
    let mut all: Vec<(u64, bool)> = Vec::new();
    disk.extents(offset, len, &mut |Extent { len, allocated }| {
        assert_ne!(len, 0);
        match all.last_mut() {
            Some(last) if last.1 == allocated => last.0 += len,
            _ => all.push((len, allocated)),
        }
        true
    });
    assert_eq!(all.iter().map(|extent| extent.0).sum::<u64>(), len);
    all
}

/// Creates an image of 16 MiB with 1 MiB of data at 4 MiB. Returns `None` if the file system does
/// not support holes.
fn sparse(path: &Path) -> Option<File> {
    let file = File::options().create_new(true).read(true).write(true).open(path).unwrap();
    file.set_len(16 * MIB).unwrap();
    file.write_all_at(&vec![7; MIB as usize], 4 * MIB).unwrap();
    file.sync_all().unwrap();
    let keeps_holes = file.metadata().unwrap().blocks() * 512 < 8 * MIB;
    if !keeps_holes {
        skipped("the file system keeps no holes");
    }
    keeps_holes.then_some(file)
}

fn open(path: &Path, options: &str) -> std::sync::Arc<dyn Disk> {
    shadowbell_disk_file::open(&format!("{}{options}", path.display())).unwrap()
}

#[test]
fn a_file_reports_the_extents_of_its_file_system() {
    let directory = directory();
    let path = directory.path().join("image");
    let Some(file) = sparse(&path) else { return };
    for options in ["", "?direct=off", "?aio=threads", "?read-only=on", "?block-size=4096"] {
        let disk = open(&path, options);
        let all = [(4 * MIB, false), (MIB, true), (11 * MIB, false)];
        assert_eq!(extents(&*disk, 0, 16 * MIB), all, "{options}");
        assert_eq!(extents(&*disk, 4 * MIB + 512, MIB), [(MIB - 512, true), (512, false)]);
        assert_eq!(extents(&*disk, 15 * MIB, MIB), [(MIB, false)]);
        assert_eq!(extents(&*disk, 16 * MIB, 0), []);
        // Reporting stops when the callback returns false.
        let mut told = 0;
        disk.extents(0, 16 * MIB, &mut |_| {
            told += 1;
            told < 2
        });
        assert_eq!(told, 2);
    }
    // The written data are only in the page cache.
    file.write_all_at(&[7; 512], 9 * MIB).unwrap();
    let disk = open(&path, "");
    let [.., (_, true), (_, false)] = extents(&*disk, 0, 16 * MIB)[..] else {
        panic!("{:?}", extents(&*disk, 0, 16 * MIB));
    };
    assert!(extents(&*disk, 9 * MIB, 512) == [(512, true)]);
}

#[test]
fn the_truncated_part_of_a_file_is_no_hole() {
    let directory = directory();
    let path = directory.path().join("image");
    let Some(file) = sparse(&path) else { return };
    let disk = open(&path, "");
    file.set_len(6 * MIB).unwrap();
    let all = [(4 * MIB, false), (MIB, true), (MIB, false), (10 * MIB, true)];
    assert_eq!(extents(&*disk, 0, 16 * MIB), all);
    assert_eq!(extents(&*disk, 8 * MIB, MIB), [(MIB, true)]);
    file.set_len(0).unwrap();
    assert_eq!(extents(&*disk, 0, 16 * MIB), [(16 * MIB, true)]);
    // The file has grown, but the disk keeps its size.
    file.set_len(32 * MIB).unwrap();
    assert_eq!(extents(&*disk, 0, 16 * MIB), [(16 * MIB, false)]);
}

#[test]
fn lasting_memory_reports_holes() {
    let lasting = MemDisk::recoverable(32 << 11, 512).unwrap();
    assert_eq!(extents(&lasting, 0, 32 * MIB), [(32 * MIB, false)]);
    lasting.bytes().write(20 << 20, &1u8).unwrap();
    assert_eq!(extents(&lasting, 20 * MIB, 512), [(512, true)]);
    assert_eq!(extents(&lasting, 0, 16 * MIB), [(16 * MIB, false)]);
    // The new disk has the same memory and another size.
    let smaller = lasting.resized(Some(21 * MIB)).unwrap();
    assert_eq!(extents(&*smaller, 20 * MIB, 512), [(512, true)]);
    let plain = MemDisk::new(2048, 512).unwrap();
    assert_eq!(extents(&plain, 0, MIB), [(MIB, true)]);
}

#[test]
fn a_null_disk_with_read_zeroes_is_a_hole() {
    let disk = NullDisk::new(2048, 512);
    assert_eq!(extents(&disk, 512, MIB - 512), [(MIB - 512, true)]);
    assert_eq!(extents(&disk.with_read_zeroes(true), 0, MIB), [(MIB, false)]);
}
