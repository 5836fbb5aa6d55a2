//! A namespace that grows and shrinks.

use crate::host::{
    OUTSIDE, change, changed, ends, event, host, no_event, request_event, size, want_events,
    write_and_read,
};
use crate::late::Late;
use shadowbell_spec::{Sqe, Status};
use shadowbell_testing::wait;

#[test]
fn a_namespace_grows_and_shrinks() {
    let small = Late::memory(64);
    let mut host = host(&small);
    let mut queues = [host.create(1, 16, true), host.create(2, 16, false)];
    want_events(&mut host, 500);
    assert!(write_and_read(&mut host, &mut queues[0], 1, 63, 5).is_success());
    let page = host.alloc(4096);
    // A command that was in flight at the change is completed by the old disk.
    small.hold(true);
    host.submit(&mut queues[1], &Sqe::read(1, 63, 0, 1).with_prps(page, 0));
    host.until("the read", || small.seen().len() == 3);
    let large = small.of_blocks(1000);
    let outcome = change(&host, 1, &large);
    wait::short_pause();
    no_event(&mut host);
    assert_eq!(size(&mut host, 1), 64);
    small.hold(false);
    ends(&outcome).unwrap();
    assert_eq!(host.wait(&mut queues[1]).1, Status::SUCCESS);
    assert_eq!(host.peek(page, 512), [5; 512]);
    event(&mut host, 500);
    request_event(&mut host, 501);
    assert_eq!((changed(&mut host), size(&mut host, 1)), (vec![1], 1000));
    for queue in &mut queues {
        let (status, _) = host.run(queue, Sqe::read(1, 63, 0, 0).with_prps(page, 0));
        assert!(
            status.is_success() && host.peek(page, 512) == [5; 512],
            "the resized disk has the same data"
        );
        assert!(write_and_read(&mut host, queue, 1, 999, 8).is_success());
        assert_eq!(write_and_read(&mut host, queue, 1, 1000, 8), OUTSIDE);
    }
    let begun = small.seen().len();
    large.hold(true);
    host.submit(&mut queues[1], &Sqe::read(1, 999, 0, 1).with_prps(page, 0));
    host.until("the read", || large.seen().len() == 2 * 3 + 1);
    let outcome = change(&host, 1, &large.of_blocks(10));
    // The host gets the event Namespace Attribute Changed for a smaller size before the change has
    // ended.
    event(&mut host, 501);
    assert_eq!(size(&mut host, 1), 10);
    large.hold(false);
    ends(&outcome).unwrap();
    assert_eq!(host.wait(&mut queues[1]).1, Status::SUCCESS);
    for queue in &mut queues {
        assert!(write_and_read(&mut host, queue, 1, 9, 8).is_success());
        assert_eq!(write_and_read(&mut host, queue, 1, 10, 8), OUTSIDE);
    }
    assert_eq!(small.seen().len(), begun);
}
