//! Keep Alive: the host sets a timer and then sends no command for a longer time.

use crate::common;
use common::Host;
use shadowbell_controller::Polling;
use shadowbell_spec::{Sqe, Status};
use shadowbell_testing::wait;
use std::thread::sleep;
use std::time::Duration;

/// Set Features, Keep Alive Timer, in milliseconds.
fn timer(milliseconds: u32) -> Sqe {
    Sqe { cdw10: 0x0f, cdw11: milliseconds, ..Sqe::new(0x09, 0, 0) }
}

/// Get Features, Keep Alive Timer.
fn granted() -> Sqe {
    Sqe { cdw10: 0x0f, ..Sqe::new(0x0a, 0, 0) }
}

fn read(host: &mut Host) -> Sqe {
    let at = host.alloc(4096);
    Sqe::new(0x02, 0, 1).with_prps(at, 0)
}

fn host() -> Host {
    Host::new(&["mem:1MiB"], Polling::Adaptive(Duration::from_micros(50)))
}

#[test]
fn a_silent_host_gets_a_fatal_status() {
    let mut host = host();
    let mut queue = host.create(1, 16, false);
    let command = read(&mut host);
    assert_eq!(host.must(granted()), 0);
    host.must(timer(4900));
    assert_eq!(host.must(granted()), 5000, "in units of a second");
    // Without Traffic Based Keep Alive, only Keep Alive commands restart the timer. The pauses
    // together are longer than the timeout, but each is much shorter.
    for _ in 0..4 {
        // Shorter than the timeout.
        sleep(Duration::from_millis(1500));
        assert_eq!(host.admin(Sqe::new(0x18, 0, 0)).0, Status::SUCCESS);
    }
    assert_eq!(host.run(&mut queue, command).0, Status::SUCCESS);
    assert!(!host.csts().cfs());
    host.until("a fatal status", || host.csts().cfs());
    host.submit(&mut queue, &command);
    wait::short_pause();
    assert_eq!(host.reap(&mut queue), None, "no command is carried out");
    // The same host or another one enables the controller again.
    host.disable();
    host.enable();
    assert!(!host.csts().cfs());
    assert_eq!(host.must(granted()), 0);
    let at = host.alloc(4096);
    let log = Sqe { cdw10: 15 << 16 | 0x01, ..Sqe::new(0x02, 0, 0).with_prps(at, 0) };
    host.must(log);
    let entry = host.peek(at, 64);
    let of = |at: usize| u16::from_le_bytes([entry[at], entry[at + 1]]);
    let expired = Status::KEEP_ALIVE_TIMER_EXPIRED.bits() << 1;
    assert_eq!((of(8), of(10), of(12)), (0xffff, 0xffff, expired), "and no command is to blame");
    let mut queue = host.create(1, 16, false);
    assert_eq!(host.run(&mut queue, command).0, Status::SUCCESS);
}

#[test]
fn a_host_without_a_timer_may_be_silent() {
    let mut host = host();
    assert_eq!(host.admin(Sqe::new(0x18, 0, 0)).0, Status::SUCCESS);
    host.must(timer(3000));
    host.must(timer(0));
    // The timer is disabled. The test sleeps for longer than its former timeout.
    sleep(Duration::from_millis(3300));
    assert!(!host.csts().cfs());
    // The timer does not run during a shutdown.
    host.must(timer(3000));
    let cc = host.read32(shadowbell_spec::regs::CC);
    host.write32(shadowbell_spec::regs::CC, cc | 1 << 14);
    // Longer than the timeout.
    sleep(Duration::from_millis(3300));
    assert!(!host.csts().cfs());
}
