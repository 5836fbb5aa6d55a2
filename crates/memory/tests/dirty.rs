//! Views that log the memory that they resolve for writing.

use shadowbell_memory::{DmaSpace, Mapping, Segments, View};
use std::sync::Arc;

const BASE: u64 = 0x1_0000;
const PAGES: u64 = 8;

#[test]
fn a_view_logs_memory_resolved_for_writing() {
    let mut space = DmaSpace::default();
    let memory = Mapping::anonymous(PAGES * 4096).unwrap().bytes();
    space.map(BASE, PAGES * 4096, &memory).unwrap();
    let unlogged = View::new(Arc::clone(space.table()));
    assert!(space.start_log() && !space.start_log());
    let view = View::new(Arc::clone(space.table()));
    let log = Arc::clone(space.log().unwrap());
    let taken = || {
        let mut bitmap = [0; 1];
        log.take(BASE, PAGES * 4096, 4096, &mut bitmap);
        bitmap[0]
    };
    unlogged.write(BASE + 0x7000, &[1]).unwrap();
    view.read(BASE, &mut [0; 4096]).unwrap();
    view.write(BASE + 0x1ff0, &[1; 32]).unwrap();
    // A second write to the same map is also logged.
    view.write(BASE + 0x4000, &[1]).unwrap();
    let mut data = Segments::new();
    view.resolve_prps(BASE + 0x5000, 0, 512, 4096, true, &mut data).unwrap();
    let mut source = Segments::new();
    view.resolve_prps(BASE + 0x3000, 0, 512, 4096, false, &mut source).unwrap();
    drop((unlogged, view, source));
    assert_eq!(taken(), 0, "a command is in flight");
    drop(data);
    assert_eq!(taken(), 0b11_0110);
    assert_eq!(taken(), 0);
    // The log continues after a change of the maps.
    space.clear();
    space.map(BASE, 4096, &memory).unwrap();
    View::new(Arc::clone(space.table())).write(BASE, &[1]).unwrap();
    assert_eq!(taken(), 1);
    assert!(space.stop_log() && !space.stop_log());
    View::new(Arc::clone(space.table())).write(BASE, &[1]).unwrap();
    assert_eq!(taken(), 0);
}

#[test]
fn read_only_memory_is_refused_with_a_log() {
    let owner = Mapping::shared("ro", 4096).unwrap();
    let read = shadowbell_memory::Protection::Read;
    let memory = Mapping::from_fd(owner.fd().unwrap(), 0, 4096, read).unwrap().bytes();
    let mut space = DmaSpace::default();
    space.map(BASE, 4096, &memory).unwrap();
    space.start_log();
    let view = View::new(Arc::clone(space.table()));
    view.read(BASE, &mut [0; 4]).unwrap();
    assert!(view.write(BASE, &[1]).is_err());
    let log = Arc::clone(space.log().unwrap());
    drop(view);
    let mut bitmap = [0; 1];
    log.take(BASE, 4096, 4096, &mut bitmap);
    assert_eq!(bitmap, [0]);
}
