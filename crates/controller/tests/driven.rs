//! A pool whose worker takes its turns when the program says so.

mod common;

use common::{Host, config};
use controller::{Carrier, Controller, Pool};
use shadowbell_controller as controller;
use spec::{Sqe, Status};

#[test]
fn nothing_happens_between_turns() {
    let (pool, mut turns) = Pool::driven().unwrap();
    let controller = Controller::new(config(&["null:1GiB"]), pool, Carrier::default()).unwrap();
    // Creating a queue needs a turn, and whoever creates it waits: so somebody else does.
    let host = std::thread::spawn(move || {
        let mut host = Host::attach(controller);
        host.enable();
        let queue = host.create(1, 8, true);
        (host, queue)
    });
    while !host.is_finished() {
        if !turns.turn() {
            std::thread::yield_now();
        }
    }
    let (mut host, mut queue) = host.join().unwrap();
    while turns.turn() {}

    let buffer = host.alloc(4096);
    let read = Sqe::read(1, 0, 7, 7).with_prps(buffer, 0);
    host.submit(&mut queue, &read);
    assert!(host.reap(&mut queue).is_none(), "nobody has taken a turn");
    assert!(turns.turn());
    let done = host.reap(&mut queue).expect("a turn is all that a null disk needs");
    assert_eq!(done, (7, Status::SUCCESS, 0));
    assert!(!turns.turn());

    // With something to do there is no sleep; the doorbell that ends one is a trapped write.
    host.submit(&mut queue, &read.with_cid(8));
    assert!(!turns.sleep());
    assert!(turns.turn());
    assert_eq!(host.reap(&mut queue).map(|done| done.0), Some(8));
    // A pool that is gone ends the turns.
    drop(host);
    while turns.turn() {}
    assert!(!turns.turn());
}
