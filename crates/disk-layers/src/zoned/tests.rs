//! Tests of the stored zone table, and of concurrent operations of several queues.

use super::ZonedDisk;
use super::manage::Reset;
use super::table::{Layout, Record, Table};
use super::zones::ZoneSet;
use crate::metadata::{Bell, granted};
use crate::{ErrorPolicy, HoldingDisk};
use shadowbell_disk::{
    Disk, DiskError, Op, Queue, Request, Submitted, ZoneFormat, ZoneReport, Zones,
};
use shadowbell_disk_file::MemDisk;
use shadowbell_memory::{DmaSpace, Mapping, Segments, View};
use shadowbell_spec::zns::{ZoneAction, ZoneState};
use shadowbell_testing::test_disk::TestDisk;
use std::sync::Arc;

const SIZE: u64 = 64 << 10;

fn format(options: &str) -> Result<ZoneFormat, String> {
    let options = options.split('&').filter_map(|option| option.split_once('='));
    ZoneFormat::parse(options).map(|format| format.unwrap())
}

fn zones(options: &str) -> ZoneSet {
    let layout = Layout::fitting(format(options).unwrap(), 512, 2 << 20).unwrap();
    let memory = Mapping::anonymous(layout.table_bytes()).unwrap().bytes();
    let table = Table::new(layout, memory);
    table.create().unwrap();
    ZoneSet::new(table, false)
}

fn state(zones: &ZoneSet, zone: usize) -> (ZoneState, u64) {
    let record = zones.state.lock().zones[zone].record;
    (record.state, record.written)
}

#[test]
fn zone_options_are_parsed() {
    let all = "zoned=1MiB&zone-capacity=768KiB&max-open=3&max-active=5&append-limit=64KiB&\
               zone-extension=128&read-across=on";
    let whole = format(all).unwrap();
    assert_eq!((whole.size, whole.capacity, whole.append_limit), (1 << 20, 768 << 10, 65536));
    assert_eq!((whole.max_open, whole.max_active, whole.extension), (3, 5, 2));
    assert!(whole.read_across && whole.check(4096).is_ok());
    assert_eq!(format("zoned=64KiB").unwrap(), ZoneFormat::new(SIZE).unwrap());
    // Without `max-open`, the limit of active zones is also the limit of open zones.
    assert_eq!(format("zoned=64KiB&max-active=4").unwrap().max_open, 4);
    assert_eq!(ZoneFormat::parse(std::iter::empty()), Ok(None));
    for (options, words) in [
        ("zone-capacity=1MiB", "needs a zone size"),
        ("zoned=32KiB", "a power of two, of at least 64KiB"),
        ("zoned=96KiB", "a power of two"),
        ("zoned=64KiB&zone-capacity=128KiB", "at most the size of a zone"),
        ("zoned=64KiB&zone-capacity=1000", "a multiple of 512"),
        ("zoned=64KiB&max-open=3&max-active=2", "not more than `max-active`"),
        ("zoned=64KiB&append-limit=5000", "a power of two"),
        ("zoned=64KiB&zone-extension=65", "a multiple of 64"),
        ("zoned=64KiB&zone-extension=16384", "below 16384"),
        ("zoned=64KiB&max-open=few", "is a number, not `few`"),
        ("zoned=64KiB&read-across=1", "`on` or `off`"),
        ("zoned=64KiB&zoned=64KiB", "given twice"),
    ] {
        let error = format(options).unwrap_err();
        assert!(error.contains(words), "{options}: {error}");
    }
    assert!(format("zoned=64KiB&zone-capacity=512").unwrap().check(4096).is_err());
}

#[test]
fn as_many_zones_are_made_as_fit() {
    let count = |bytes, options: &str| {
        Layout::fitting(format(options).unwrap(), 512, bytes).map(|layout| layout.zones)
    };
    assert_eq!(count(1 << 30, "zoned=64MiB"), Some(15));
    assert_eq!(count(1 << 30, "zoned=64MiB&zone-capacity=48MiB"), Some(16));
    assert_eq!(count((1 << 20) + SIZE, "zoned=64KiB"), Some(1));
    assert_eq!(count((1 << 20) + SIZE - 512, "zoned=64KiB"), None);
    assert_eq!(count(1 << 50, "zoned=64KiB"), Some(ZoneFormat::MAX_ZONES));
    assert_eq!(count(!511, "zoned=1TiB"), Some(ZoneFormat::MAX_ZONES));
}

#[test]
fn a_corrupt_zone_record_is_detected() {
    let record = Record { written: 77, state: ZoneState::Closed, has_extension: true };
    let word = record.pack(5);
    assert_eq!(Record::unpack(5, word), Some(record));
    assert_eq!(Record::unpack(6, word), None);
    for bit in 0..64 {
        assert_eq!(Record::unpack(5, word ^ 1 << bit), None, "bit {bit}");
    }
    assert_eq!(Record::unpack(0, 0), None);
}

#[test]
fn a_disk_is_made_into_zones_once() {
    let disk = MemDisk::new(4096, 512).unwrap();
    let on =
        |options: &str| ZonedDisk::new(Arc::new(disk.clone()), format(options).unwrap(), false);
    let zoned = on("zoned=64KiB&max-open=1").unwrap();
    assert_eq!(zoned.info().blocks, 16 * 128);
    on("zoned=64KiB").unwrap();
    let error = on("zoned=128KiB").unwrap_err();
    assert!(error.contains("it was made with `zoned=65536&zone-capacity=65536"), "{error}");
    // A zone with a damaged table entry can be read.
    let at = 4096 + 8 * 3;
    let word: u64 = disk.bytes().read(at).unwrap();
    disk.bytes().write(at, &(word ^ 1)).unwrap();
    let zoned = on("zoned=64KiB").unwrap();
    assert!(zoned.damaged().unwrap().contains("the stored state of 1 zones is damaged"));
    let mut queue = zoned.queue().unwrap();
    let mut data = Segments::from_bytes(&Mapping::anonymous(4096).unwrap().bytes());
    let mut run =
        |op, zone: u64| queue.submit(0, &Request { op, offset: zone * SIZE, len: 512 }, &mut data);
    assert_eq!(run(Op::Read, 3), Submitted::Done(Ok(())));
    assert_eq!(run(Op::Write { fua: true }, 3), Submitted::Done(Err(DiskError::ZoneReadOnly)));
    let offline = Op::Zone { action: ZoneAction::Offline, all: false };
    assert_eq!(run(offline, 3), Submitted::Done(Ok(())));
    assert_eq!(run(Op::Read, 3), Submitted::Done(Err(DiskError::ZoneOffline)));
    assert_eq!(run(Op::Append { fua: false }, 3), Submitted::Done(Err(DiskError::ZoneOffline)));
    drop(queue);
    // A damaged header is reported. Then the test overwrites the header with other data.
    let byte: u8 = disk.bytes().read(16).unwrap();
    disk.bytes().write(16, &!byte).unwrap();
    assert!(on("zoned=64KiB").unwrap_err().contains("is damaged"));
    disk.bytes().write(0, &7u8).unwrap();
    assert!(on("zoned=64KiB").unwrap_err().contains("it holds something"));
    disk.bytes().fill(0, 4096, 0).unwrap();
    let read_only: Arc<dyn Disk> = Arc::new(disk.clone());
    let small = Arc::new(MemDisk::new(2048, 512).unwrap());
    ZonedDisk::new(small, format("zoned=64KiB").unwrap(), false).unwrap_err();
    let null = shadowbell_disk_file::open("null:1GiB").unwrap();
    let error = ZonedDisk::new(null, format("zoned=64KiB").unwrap(), false).unwrap_err();
    assert!(error.contains("only memory and raw images"), "{error}");
    ZonedDisk::new(read_only, format("zoned=64KiB").unwrap(), false).unwrap();
}

#[test]
fn a_zone_reset_waits_for_writes_in_flight() {
    let zones = zones("zoned=64KiB");
    let bell = Arc::new(Bell::new().unwrap());
    assert_eq!(zones.begin_reset(0, (&bell, 1)), Ok(Reset::Finished));
    assert_eq!(zones.begin_append(0, 1024), Ok((0, 0)));
    assert_eq!(zones.begin_append(0, 512), Ok((0, 1024)));
    assert_eq!(zones.begin_reset(0, (&bell, 2)), Ok(Reset::Wait));
    zones.end_write(0);
    assert!(granted(&bell).is_empty());
    zones.end_write(0);
    assert_eq!(granted(&bell), [2]);
    assert_eq!(zones.begin_reset(0, (&bell, 2)), Ok(Reset::Discard(1536)));
    // During a reset, writes are refused and another reset waits.
    assert_eq!(zones.begin_write(1536, 512, false), Err(DiskError::ZoneInvalidWrite));
    assert_eq!(zones.begin_append(0, 512), Err(DiskError::ZoneFull));
    assert_eq!(zones.manage(ZoneAction::Finish, 0), Err(DiskError::ZoneTransition));
    assert_eq!(zones.begin_reset(0, (&bell, 3)), Ok(Reset::Wait));
    zones.end_reset(0, true);
    assert_eq!((state(&zones, 0), granted(&bell)), ((ZoneState::Empty, 0), vec![3]));
    assert_eq!(zones.begin_reset(0, (&bell, 3)), Ok(Reset::Finished));
    assert_eq!(zones.begin_write(0, 512, false), Ok(0));
    zones.cancel_waits(&bell);
}

/// A reset discards the data of each zone. If the discard fails, the error policy holds it, until
/// the disk is resumed or the host cancels the reset.
#[test]
fn a_held_zone_reset_can_be_cancelled() {
    let storage = TestDisk::new(4096, 512);
    let stopped = HoldingDisk::wrap(Arc::new(storage.clone()), ErrorPolicy::Stop);
    let zoned = ZonedDisk::new(Arc::clone(&stopped), format("zoned=64KiB").unwrap(), false);
    let mut queue = zoned.unwrap().queue().unwrap();
    let memory = Mapping::anonymous(4096).unwrap().bytes();
    let submit = |queue: &mut dyn Queue, op, zone: u64| {
        let mut data = Segments::from_bytes(&memory.slice(0, 512).unwrap());
        queue.submit(zone as u32, &Request { op, offset: zone * SIZE, len: 512 }, &mut data)
    };
    let reap = |queue: &mut dyn Queue| {
        let mut ended = Vec::new();
        queue.reap(&mut |tag, outcome, _| ended.push((tag, outcome)));
        ended
    };
    for zone in 0..3 {
        let written = submit(&mut *queue, Op::Write { fua: false }, zone);
        assert_eq!(written, Submitted::Done(Ok(())));
    }
    storage.instruct(|instructions| instructions.fail = Some(DiskError::Io(5)));
    for all in [false, true] {
        let reset = Op::Zone { action: ZoneAction::Reset, all };
        assert_eq!(submit(&mut *queue, reset, 0), Submitted::Pending);
        assert_eq!((reap(&mut *queue), stopped.stopped().unwrap().held), (vec![], 1));
        queue.cancel(0);
        assert_eq!(reap(&mut *queue), [(0, Err(DiskError::Cancelled))]);
        assert_eq!((queue.pending(), stopped.stopped()), (0, None));
    }
    // A cancelled reset of all zones does not continue with the next zone, even if the discard
    // succeeds meanwhile.
    let reset = Op::Zone { action: ZoneAction::Reset, all: true };
    assert_eq!(submit(&mut *queue, reset, 0), Submitted::Pending);
    assert!(reap(&mut *queue).is_empty());
    storage.instruct(|instructions| (instructions.hold, instructions.fail) = (true, None));
    assert!(stopped.resume() && reap(&mut *queue).is_empty());
    queue.cancel(0);
    storage.instruct(|instructions| instructions.hold = false);
    assert_eq!(reap(&mut *queue), [(0, Err(DiskError::Cancelled))]);
    let states = |queue: &dyn Queue| {
        let report = ZoneReport { from: 0, which: None, partial: true, extended: false, len: 256 };
        let bytes = queue.zones().unwrap().report(&report).unwrap();
        // A descriptor has 64 bytes. The upper half of its second byte is the state.
        [1, 2, 3].map(|zone| bytes[64 * zone + 1] >> 4)
    };
    assert_eq!(states(&*queue), [ZoneState::ImplicitlyOpen as u8; 3]);
    assert_eq!(submit(&mut *queue, reset, 0), Submitted::Pending);
    let mut ended = Vec::new();
    while ended.is_empty() {
        ended = reap(&mut *queue);
    }
    assert_eq!((ended, states(&*queue)), (vec![(0, Ok(()))], [ZoneState::Empty as u8; 3]));
}

#[test]
fn a_recovered_write_keeps_its_position_in_the_zone() {
    let zones = zones("zoned=64KiB&zone-capacity=1024");
    assert_eq!(zones.begin_write(0, 1024, false), Ok(0));
    assert_eq!(state(&zones, 0), (ZoneState::Full, 2));
    zones.enter();
    assert_eq!(zones.begin_write(0, 1024, false), Err(DiskError::ZoneFull));
    assert_eq!(zones.begin_write(0, 512, true), Ok(0));
    assert_eq!(zones.begin_write(0, 1536, true), Err(DiskError::ZoneFull));
    // A recovered write that the dead process had not executed takes the next position in its zone,
    // like a new write.
    assert_eq!(zones.begin_write(SIZE, 512, true), Ok(1));
    assert_eq!(zones.begin_write(SIZE + 1024, 512, true), Err(DiskError::ZoneBoundary));
}

#[test]
fn open_zones_are_counted_and_restored() {
    let zones = zones("zoned=64KiB&max-open=2&max-active=3");
    for zone in 0..3 {
        zones.begin_write(zone * SIZE, 512, false).unwrap();
    }
    assert_eq!(zones.state.lock().counts(), (2, 3, 2));
    assert_eq!(state(&zones, 0).0, ZoneState::Closed, "the first one was closed");
    assert_eq!(zones.begin_write(3 * SIZE, 512, false), Err(DiskError::TooManyActiveZones));
    for zone in 1..3 {
        zones.manage(ZoneAction::Open, zone * SIZE).unwrap();
    }
    assert_eq!(zones.begin_write(512, 512, false), Err(DiskError::TooManyOpenZones));
    assert_eq!(zones.manage_all(ZoneAction::Open), Err(DiskError::TooManyOpenZones));
    zones.enter();
    assert_eq!(zones.state.lock().counts(), (2, 3, 0), "read again");
    zones.leave();
    let report = |len, partial| {
        let report = ZoneReport { from: SIZE, which: None, partial, extended: false, len };
        zones.report(&report).map(|bytes| (bytes.len(), bytes[0]))
    };
    assert_eq!(report(64 + 128, true), Ok((192, 2)));
    assert_eq!(report(64 + 127, false), Ok((128, 15)));
    assert_eq!(report(63, false), Err(DiskError::InvalidZone));
    assert_eq!(zones.manage_all(ZoneAction::Finish), Ok(()));
    assert_eq!(zones.state.lock().counts(), (0, 0, 0));
}

/// An unmap of guest memory does not wait for a hung disk below: neither for the flush after a
/// durable write, nor for a read in parts.
#[test]
fn an_unmap_does_not_wait_for_requests_in_the_zone_layer() {
    let mut storage = TestDisk::new(4096, 512);
    storage.cache = true;
    let all = format("zoned=64KiB&read-across=on").unwrap();
    let disk = ZonedDisk::new(Arc::new(storage.clone()), all, false).unwrap();
    let mut queue = disk.queue().unwrap();
    let mut space = DmaSpace::default();
    let iovas = [0, 1 << 20, 2 << 20];
    for iova in iovas {
        space.map(iova, 2 * SIZE, &Mapping::anonymous(2 * SIZE).unwrap().bytes()).unwrap();
    }
    let view = View::new(Arc::clone(space.table()));
    let mut submit = |tag, op, offset, len, iova| {
        let mut data = Segments::new();
        data.resolve_ranges(&view, &[(iova, len as usize)], op == Op::Read).unwrap();
        queue.submit(tag, &Request { op, offset, len }, &mut data)
    };
    for zone in 0..2 {
        let write = Op::Write { fua: false };
        assert_eq!(submit(0, write, zone * SIZE, 512, 0), Submitted::Done(Ok(())));
    }
    storage.instruct(|instructions| {
        instructions.hold = true;
        instructions.follow_memory = true;
    });
    assert_eq!(submit(1, Op::Read, 0, SIZE + 512, iovas[0]), Submitted::Pending);
    assert_eq!(submit(2, Op::Read, 0, SIZE + 512, iovas[1]), Submitted::Pending);
    storage.instruct(|instructions| {
        instructions.hold = false;
        // A flush has the offset 0.
        instructions.hold_at = Some(0);
    });
    let write = Op::Write { fua: true };
    assert_eq!(submit(3, write, 512, 512, iovas[2]), Submitted::Pending);
    let watch = view.watch();
    drop(view);
    for iova in &iovas[1..] {
        space.unmap(*iova, 2 * SIZE).unwrap();
    }
    queue.memory_changed(&View::new(Arc::clone(space.table())));
    assert!(watch.is_idle(), "a request holds the memory");
    storage.instruct(|instructions| instructions.hold_at = None);
    let mut ended = Vec::new();
    queue.reap(&mut |tag, outcome, _| ended.push((tag, outcome)));
    ended.sort_unstable_by_key(|(tag, _)| *tag);
    assert_eq!(ended, [(1, Ok(())), (2, Err(DiskError::BadBuffer)), (3, Ok(()))]);
}
