//! Guest memory whose accesses hang: only the controller of this guest waits for it.

mod common;

use common::{Host, LIMIT, Queue, config};
use shadowbell_controller::{Carrier, Controller, Polling, Pool};
use shadowbell_memory::{Mapping, Protection, SharedBytes};
use shadowbell_spec::regs::{self, Cc};
use shadowbell_spec::{Sqe, Status};
use shadowbell_testing::stalled::{self, Mount};
use shadowbell_testing::wait::{self};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{TryRecvError, channel};
use std::time::Duration;

#[test]
fn fuse_daemon() {
    stalled::run_daemon_if_requested();
}

/// Bus address of the hung memory.
const STALLED: u64 = 1 << 40;

/// Creates a FUSE mount whose reads hang. Returns the mount, an open file, and the file's memory.
fn stalled() -> Option<(Mount, OwnedFd, SharedBytes)> {
    let mount = Mount::new("fuse_daemon")?;
    let file = mount.open();
    let memory = Mapping::from_fd(&file, 0, 4096, Protection::ReadWrite).unwrap().bytes();
    Some((mount, file, memory))
}

fn host(pool: &Pool) -> Host {
    let controller =
        Controller::new(config(&["mem:1MiB"]), pool.clone(), Carrier::default()).unwrap();
    let mut host = Host::attach(controller);
    host.enable();
    host
}

fn identify(at: u64) -> Sqe {
    Sqe { cdw10: 1, ..Sqe::new(0x06, 0, 0) }.with_prps(at, 0)
}

/// Runs `work` on a thread of its own. Fails the test if it does not return in time.
fn run_in_time<T: Send + 'static>(
    mount: &mut Mount,
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> T {
    let (done, is_done) = channel();
    std::thread::spawn(move || done.send(work()));
    is_done.recv_timeout(LIMIT).unwrap_or_else(|_| {
        // The mount must end before the test fails, because otherwise the exit of this process
        // would hang, too.
        mount.end();
        panic!("{what}: blocked by hung memory")
    })
}

/// Makes the control thread hang in a write to hung memory, by an Identify command.
fn stall(host: &mut Host, memory: &SharedBytes) -> Queue {
    host.controller.map_dma(STALLED, 4096, memory).unwrap();
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    host.submit(&mut admin, &identify(STALLED).with_cid(7));
    // Checks that the command has not completed, because the thread hangs in it.
    wait::short_pause();
    assert_eq!(host.reap(&mut admin), None);
    admin
}

#[test]
fn hung_guest_memory_delays_only_its_own_controller() {
    let Some((mut mount, _file, memory)) = stalled() else { return };
    let pool = common::pool(Polling::Adaptive(Duration::from_micros(50)));
    let mut one = host(&pool);
    let mut other = host(&pool);
    let mut admin = stall(&mut one, &memory);

    // Registers of the same controller, as a reactor reads them.
    let controller = one.controller.clone();
    run_in_time(&mut mount, "registers of the same controller", move || {
        for offset in (0..0x40).step_by(4) {
            controller.read(offset, &mut [0; 4]);
        }
        controller.write(regs::INTMS, &1u32.to_le_bytes());
    });
    // All operations of another controller: registers, admin commands, queues, I/O, an unmap, a
    // reset.
    let mut other = run_in_time(&mut mount, "another controller", move || {
        let mut queue = other.create(1, 16, false);
        let page = other.alloc(4096);
        assert!(other.run(&mut queue, Sqe::read(1, 0, 7, 0).with_prps(page, 0)).0.is_success());
        for _ in 0..100 {
            other.must(identify(page));
        }
        let more = Mapping::anonymous(4096).unwrap().bytes();
        other.controller.map_dma(STALLED, 4096, &more).unwrap();
        let (sent, unmapped) = channel();
        other.controller.unmap_dma(STALLED, 4096, move || sent.send(()).unwrap()).unwrap();
        unmapped.recv_timeout(LIMIT).unwrap();
        other.disable();
        other.enable();
        other
    });
    // A second command hangs as well, in the thread that has replaced the first one. A third thread
    // serves the other controllers.
    let mut third = host(&pool);
    let mut admin_of_third = stall(&mut third, &memory);
    let mut other = run_in_time(&mut mount, "another controller, beside two", move || {
        let page = other.alloc(4096);
        other.must(identify(page));
        other
    });

    // After the end of the mount, the hung commands complete, with success or an error.
    mount.end();
    assert_eq!(one.wait(&mut admin).0, 7);
    assert_eq!(third.wait(&mut admin_of_third).0, 7);
    let page = other.alloc(4096);
    other.must(identify(page));
}

#[test]
fn a_reset_waits_for_hung_memory() {
    let Some((mut mount, _file, memory)) = stalled() else { return };
    let pool = common::pool(Polling::Adaptive(Duration::from_micros(50)));
    let mut host = host(&pool);
    let mut admin = stall(&mut host, &memory);
    host.submit(&mut admin, &identify(common::BASE).with_cid(8));
    let cc = Cc::from_bits(host.read32(regs::CC));
    let controller = host.controller.clone();
    run_in_time(&mut mount, "the beginning of a reset", move || {
        controller.write(regs::CC, &cc.with_en(false).into_bits().to_le_bytes());
    });
    let (sent, unmapped) = channel();
    let controller = host.controller.clone();
    run_in_time(&mut mount, "the beginning of an unmap", move || {
        controller.unmap_dma(STALLED, 4096, move || sent.send(()).unwrap()).unwrap();
    });
    wait::short_pause();
    assert_eq!(unmapped.try_recv(), Err(TryRecvError::Empty));
    assert!(host.csts().rdy(), "the guest's memory is in use");
    let before = host.peek(admin.cq, 512);
    mount.end();
    unmapped.recv_timeout(LIMIT).unwrap();
    host.until("the end of the reset", || !host.csts().rdy());
    assert_eq!(host.peek(admin.cq, 512), before, "a completion after the reset began");
    host.admin = admin;
    host.enable();
    let page = host.alloc(4096);
    host.must(identify(page));
}

/// While memory of one guest hangs, resets of other controllers do not wait for it, and the
/// process's threads can be stopped.
#[test]
fn hung_memory_does_not_delay_other_resets_and_the_end() {
    let Some((mut mount, _file, memory)) = stalled() else { return };
    let pool = common::pool(Polling::Adaptive(Duration::from_micros(50)));
    let mut one = host(&pool);
    let mut admin = stall(&mut one, &memory);
    let other = host(&pool);
    run_in_time(&mut mount, "another controller that leaves", move || {
        let (sent, left) = channel();
        other.controller.disconnect(move || sent.send(()).unwrap());
        left.recv_timeout(LIMIT).unwrap();
    });
    let stats = {
        let controller = one.controller.clone();
        run_in_time(&mut mount, "statistics", move || controller.stats())
    };
    assert_eq!(stats.submission_queues[0].qid, 0, "a command in progress is counted");
    mount.end();
    let (_, status, _) = one.wait(&mut admin);
    assert!(status == Status::SUCCESS || !status.is_success());
}

/// Statistics do not wait for an I/O thread that hangs in guest memory, but contain its counters.
#[test]
fn statistics_do_not_wait_for_a_hung_io_thread() {
    let Some((mut mount, _file, memory)) = stalled() else { return };
    let pool = common::pool(Polling::Adaptive(Duration::from_micros(50)));
    let mut host = host(&pool);
    let mut queue = host.create(1, 16, false);
    let page = host.alloc(4096);
    assert!(host.run(&mut queue, Sqe::read(1, 0, 0, 0).with_prps(page, 0)).0.is_success());
    host.controller.map_dma(STALLED, 4096, &memory).unwrap();
    host.submit(&mut queue, &Sqe::read(1, 0, 0, 1).with_prps(STALLED, 0).with_cid(7));
    wait::short_pause();
    assert_eq!(host.reap(&mut queue), None);
    let controller = host.controller.clone();
    let stats = run_in_time(&mut mount, "statistics", move || controller.stats());
    let (sq, cq) = stats.io_queues();
    assert_eq!((stats.submission_queues.len(), sq.commands, cq.completions), (2, 1, 1));
    assert_eq!((stats.io.reads, stats.workers.len()), (1, 1));
    mount.end();
    assert_eq!(host.wait(&mut queue).0, 7);
}
