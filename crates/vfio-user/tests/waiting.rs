//! Requests that do not complete immediately, and the requests of the same client that arrive after
//! them.

mod common;

use shadowbell_testing::wait;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::*;
use shadowbell_state::Descriptors;
use shadowbell_vfio_user::server::{Limits, PortRecorder, RestoredPort, SavedPort};
use shadowbell_vfio_user::wire::{self, command, header_flags};
use shadowbell_vfio_user::{Errno, Listener, Reactor};
use zerocopy::IntoBytes;

fn unmap() -> wire::DmaUnmap {
    wire::DmaUnmap { argsz: 24, flags: 0, address: 0x1000, size: 0x1000 }
}

#[test]
fn messages_wait_behind_an_unfinished_one_of_the_same_client() {
    let (server, path, shared) = Server::with_device(Limits::default());
    let (other_path, ..) = server.add("other");
    let mut raw = Raw::attach(&path);
    let mut other = Raw::attach(&other_path);
    shared.hold.store(true, Ordering::SeqCst);
    // All requests are sent by one call. So when the server handles the first one, it has already
    // received the others.
    let write = access(0, 0, 1);
    let mut stream = raw.message(command::DEVICE_RESET, 0, &[]);
    stream.extend(raw.message(command::REGION_WRITE, 0, &[write.as_bytes(), &[7]]));
    stream.extend(raw.message(command::REGION_READ, 0, &[write.as_bytes()]));
    raw.send(&stream);
    let done = shared.wait_held();
    raw.assert_silent();
    // A further request arrives later.
    let late = raw.message(command::REGION_READ, 0, &[write.as_bytes()]);
    raw.send(&late);
    raw.assert_silent();
    assert_eq!(shared.log()[1..], ["reset"]);
    for n in 0..100 {
        other.write(n, &[1]).ok();
    }

    std::thread::spawn(|| done.complete(Err(Errno::BUSY))).join().unwrap();
    let reply = raw.reply();
    assert_eq!((reply.header.command, reply.errno()), (command::DEVICE_RESET, Errno::BUSY));
    assert_eq!(raw.reply().ok(), write.as_bytes());
    assert_eq!(raw.reply().ok()[16..], [7]);
    assert_eq!(raw.reply().ok()[16..], [7]);
}

/// An unmap may wait for commands in flight on slow storage. Meanwhile the server handles later
/// messages of the client, including those that it had received before the unmap began to wait.
#[test]
fn messages_do_not_wait_behind_an_unmap_of_the_same_client() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    shared.hold.store(true, Ordering::SeqCst);
    let mut stream = raw.message(command::DMA_UNMAP, 0, &[unmap().as_bytes()]);
    let write = access(0, 0, 1);
    stream.extend(raw.message(command::REGION_WRITE, 0, &[write.as_bytes(), &[7]]));
    raw.send(&stream);
    assert_eq!(raw.reply().ok(), write.as_bytes());
    let done = shared.wait_held();
    assert_eq!(raw.read(0, 1).ok()[16..], [7]);
    let irqs = wire::SetIrqs { argsz: 20, flags: 4 | 32, index: 2, start: 0, count: 2 };
    raw.request_with_fds(command::DEVICE_SET_IRQS, &[irqs.as_bytes()], &eventfds(2)).ok();
    // A second unmap also waits. A reset waits for neither of the two.
    let second = raw.message(command::DMA_UNMAP, 0, &[unmap().as_bytes()]);
    raw.send(&second);
    let second = shared.wait_held();
    let reset = raw.message(command::DEVICE_RESET, 0, &[]);
    raw.send(&reset);
    shared.wait_held().ok();
    assert_eq!(raw.reply().header.command, command::DEVICE_RESET);
    second.complete(Err(Errno::BUSY));
    assert_eq!(raw.reply().errno(), Errno::BUSY);
    assert_eq!(raw.read(0, 1).ok()[16..], [7]);
    std::thread::spawn(|| done.ok()).join().unwrap();
    assert_eq!(raw.reply().ok(), unmap().as_bytes());
    assert_eq!(raw.read(0, 1).ok()[16..], [7]);
}

/// The checkpoint contains an unmap that waits while later messages are handled. It waits for
/// accesses of the device, which end with the process. So the next process can reply to it at once.
#[test]
fn the_next_process_replies_to_an_unmap_that_was_overtaken() {
    let (server, path, shared) = Server::with_recorded_device(Limits::default());
    let mut raw = Raw::attach(&path);
    shared.hold.store(true, Ordering::SeqCst);
    let message = raw.message(command::DMA_UNMAP, 0, &[unmap().as_bytes()]);
    raw.send(&message);
    // Another message arrives while the unmap waits.
    let _held = shared.wait_held();
    raw.write(0, &[7]).ok();

    let mut next = Server::start(Limits::default());
    next.handle.freeze();
    let _ = next.frozen();
    next.run(server.successor(&[&shared]));
    assert_eq!(raw.reply().ok(), unmap().as_bytes());
    raw.assert_silent();
    let last = server.checkpoints.lock().unwrap()[0].clone();
    eventually("a checkpoint without the unmap", || !last.text().contains("unmaps"));
}

/// Recorder that also logs the replay of a client. The replay may begin at the second attempt.
#[derive(Clone, Default)]
struct Replays(Last, Arc<Mutex<Vec<&'static str>>>);

impl PortRecorder for Replays {
    fn record(&mut self, port: &SavedPort, fds: Descriptors) {
        self.0.record(port, fds);
    }

    fn begin_replay(&mut self) -> bool {
        self.1.lock().unwrap().push("begin");
        self.1.lock().unwrap().len() > 1
    }

    fn end_replay(&mut self, is_done: bool) {
        self.1.lock().unwrap().push(if is_done { "end" } else { "interruption" });
    }
}

/// The first message that a restored client has in its socket may have crashed the previous
/// process. Its replay is reported until it is handled, also while it waits for the device. A
/// restored client without a message has no replay.
#[test]
fn the_first_message_of_a_restored_client_is_a_replay() {
    for has_message in [true, false] {
        let mut server = Server::start(Limits::default());
        let path = server.directory.path().join("device");
        let (device, shared) = TestDevice::new();
        let last = Replays::default();
        let listener = Listener::bind(&path).unwrap();
        server.handle.add_recorded(listener, device, Box::new(last.clone()));
        let mut raw = Raw::attach(&path);
        raw.write(0, &[7]).ok();
        let old = server.freeze();
        assert!(last.1.lock().unwrap().is_empty());
        let (saved, mut fds) = last.0.copy();
        shared.hold.store(true, Ordering::SeqCst);
        let reset = raw.message(command::DEVICE_RESET, 0, &[]);
        if has_message {
            raw.send(&reset);
        }
        let mut next = Server::start(Limits::default());
        drop(next.freeze());
        let mut reactor = Reactor::new(next.limits).unwrap();
        let device = TestDevice::of(&shared);
        let restored = RestoredPort::new(saved, &mut fds, device, &next.limits).unwrap();
        let port = reactor.serve_restored(restored).unwrap();
        reactor.record_with(port, Box::new(last.clone()));
        old.release_to_successor();
        next.run(reactor);
        let log = || last.1.lock().unwrap().clone();
        if has_message {
            let done = shared.wait_held();
            assert_eq!(log(), ["begin", "begin"]);
            done.ok();
        } else {
            eventually("the end", || log() == ["end"]);
            raw.send(&reset);
            shared.wait_held().ok();
        }
        assert_eq!(raw.reply().header.command, command::DEVICE_RESET);
        raw.read(0, 1).ok();
        let all = if has_message { &["begin", "begin", "end"][..] } else { &["end"] };
        eventually("the end", || log() == all);
    }
}

/// The number of waiting unmaps is limited. A client that has reached the limit can still
/// disconnect.
#[test]
fn a_client_with_many_waiting_unmaps_waits_itself() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    shared.hold.store(true, Ordering::SeqCst);
    for _ in 0..=64 {
        let message = raw.message(command::DMA_UNMAP, 0, &[unmap().as_bytes()]);
        raw.send(&message);
    }
    let mut waiting = shared.wait_all_held(65);
    let read = raw.message(command::REGION_READ, 0, &[access(0, 0, 1).as_bytes()]);
    raw.send(&read);
    raw.assert_silent();
    waiting.pop().unwrap().ok();
    assert_eq!(raw.reply().ok(), unmap().as_bytes());
    assert_eq!(raw.reply().header.command, command::REGION_READ);
    drop(raw);
    shared.wait_held().ok();
    assert_eq!(shared.log().last().unwrap(), "disconnected");
    drop(waiting);
    Raw::attach(&path).write(0, &[1]).ok();
}

/// A client that sends unmaps without waiting for the replies gets each reply when its unmap has
/// ended, even if a later unmap still waits.
#[test]
fn an_unmap_is_answered_while_a_later_one_waits() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    shared.hold.store(true, Ordering::SeqCst);
    // The last unmap waits although the number of unmaps before it is at its limit.
    for count in [2, 65] {
        let mut stream = Vec::new();
        for _ in 0..count {
            stream.extend(raw.message(command::DMA_UNMAP, 0, &[unmap().as_bytes()]));
        }
        raw.send(&stream);
        let mut held = shared.wait_all_held(count);
        let last = held.pop().unwrap();
        let ids: Vec<_> = held
            .into_iter()
            .map(|done| {
                done.ok();
                raw.reply().header.id
            })
            .collect();
        assert!(ids.is_sorted() && ids.len() == count - 1);
        last.ok();
        assert_eq!(raw.reply().header.id, ids[count - 2] + 1);
    }
}

#[test]
fn a_dropped_completion_handle_is_an_error() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    shared.hold.store(true, Ordering::SeqCst);
    let reset = raw.message(command::DEVICE_RESET, 0, &[]);
    raw.send(&reset);
    drop(shared.wait_held());
    assert_eq!(raw.reply().errno(), Errno::IO);
}

#[test]
fn a_waiting_posted_request_keeps_its_order() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    shared.hold.store(true, Ordering::SeqCst);
    let posted = header_flags::NO_REPLY;
    let mut stream = raw.message(command::DMA_UNMAP, posted, &[unmap().as_bytes()]);
    stream.extend(raw.message(command::DEVICE_RESET, posted, &[]));
    stream.extend(raw.message(command::REGION_READ, 0, &[access(0, 0, 1).as_bytes()]));
    raw.send(&stream);
    let mut held = shared.wait_all_held(2);
    let (reset, unmapped) = (held.pop().unwrap(), held.pop().unwrap());
    raw.assert_silent();
    reset.complete(Err(Errno::IO));
    assert_eq!(raw.reply().header.command, command::REGION_READ);
    assert_eq!(shared.log()[1..], ["unmap 0x1000+0x1000", "reset"]);
    unmapped.ok();
    raw.assert_silent();
}

#[test]
fn a_register_write_may_wait_alone_or_in_a_multi_write() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    shared.hold.store(true, Ordering::SeqCst);
    let slow = access(0, SLOW, 4);
    let write = raw.message(command::REGION_WRITE, 0, &[slow.as_bytes(), &[1; 4]]);
    raw.send(&write);
    let done = shared.wait_held();
    raw.assert_silent();
    done.ok();
    assert_eq!(raw.reply().ok(), slow.as_bytes());

    let entry = |offset, value| wire::MultiEntry { offset, region: 0, count: 1, data: [value; 8] };
    let entries = [entry(0, 1), entry(SLOW, 2), entry(1, 3), entry(SLOW, 4), entry(2, 5)];
    let count = wire::WriteMulti { count: 5 };
    let multi =
        raw.message(command::REGION_WRITE_MULTI, 0, &[count.as_bytes(), entries.as_bytes()]);
    raw.send(&multi);
    shared.wait_held().ok();
    let second = shared.wait_held();
    raw.assert_silent();
    second.ok();
    assert_eq!(raw.reply().ok(), count.as_bytes());
    assert_eq!(raw.read(0, 3).ok()[16..], [1, 3, 5]);

    // If one write fails, the rest of the message is not executed.
    raw.send(&multi);
    shared.wait_held().complete(Err(Errno::NXIO));
    assert_eq!(raw.reply().errno(), Errno::NXIO);
    raw.assert_silent();
}

#[test]
fn disconnected_is_called_after_the_request_in_flight() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    shared.hold.store(true, Ordering::SeqCst);
    let reset = raw.message(command::DEVICE_RESET, 0, &[]);
    raw.send(&reset);
    let done = shared.wait_held();
    drop(raw);
    let mut next = Raw::connect(&path);
    let hello = next.message(command::VERSION, 0, &[&[0, 0, 1, 0]]);
    next.send(&hello);
    wait::short_pause();
    assert_eq!(shared.log()[1..], ["reset"]);
    done.ok();
    shared.wait_log("disconnected");
    // The next client waits until the device has completed the disconnection of the previous one.
    let done = shared.wait_held();
    next.assert_silent();
    assert_eq!(shared.log()[1..], ["reset", "disconnected"]);
    done.ok();
    next.reply().ok();
    shared.wait_log("connected, 1 fds");
}

#[test]
fn a_disconnect_right_after_a_message_is_noticed() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    shared.hold.store(true, Ordering::SeqCst);
    let posted = header_flags::NO_REPLY;
    let reset = raw.message(command::DEVICE_RESET, posted, &[]);
    raw.send(&reset);
    let done = shared.wait_held();
    // The write and the end of the connection arrive while the server waits for the reset, so it
    // finds both at one wakeup. The write is posted: the server cannot notice the disconnection by
    // a reply that fails.
    let last = access(0, 0, 1);
    let last = raw.message(command::REGION_WRITE, posted, &[last.as_bytes(), &[1]]);
    raw.send(&last);
    drop(raw);
    wait::short_pause();
    done.ok();
    shared.wait_log("disconnected");
}

#[test]
fn a_failed_disconnect_does_not_end_the_service() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let raw = Raw::attach(&path);
    shared.hold.store(true, Ordering::SeqCst);
    drop(raw);
    drop(shared.wait_held());
    Raw::attach(&path);
}

#[test]
fn a_second_client_waits_for_the_first_to_leave() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let mut first = Raw::attach(&path);
    let mut second = Raw::connect(&path);
    let hello = second.message(command::VERSION, 0, &[&[0, 0, 1, 0]]);
    second.send(&hello);
    // A client that disconnects while it waits does not block others.
    drop(Raw::connect(&path));
    let mut third = Raw::connect(&path);
    let hello = third.message(command::VERSION, 0, &[&[0, 0, 1, 0]]);
    third.send(&hello);
    second.assert_silent();
    first.write(0, &[1]).ok();
    drop(first);
    second.reply().ok();
    third.assert_silent();
    drop(second);
    third.reply().ok();
    assert_eq!(shared.log().len(), 5, "{:?}", shared.log());
}

#[test]
fn a_client_may_reconnect_many_times() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    for _ in 0..200 {
        Raw::attach(&path).write(0, &[1]).ok();
    }
    eventually("all have left", || shared.log().len() == 400);
}

#[test]
fn removing_a_device_disconnects_and_removes_the_socket() {
    let mut server = Server::start(Limits::default());
    let (path, shared, port) = server.add("one");
    let (other, ..) = server.add("other");
    let mut raw = Raw::attach(&path);
    shared.hold.store(true, Ordering::SeqCst);
    let gone = server.handle.remove(port);
    raw.assert_closed();
    let done = shared.wait_held();
    wait::short_pause();
    assert!(gone.try_recv().is_err(), "the device is still releasing its client");
    assert!(!path.exists());
    done.ok();
    gone.recv_timeout(wait::LIMIT).unwrap();
    assert_eq!(std::sync::Arc::strong_count(&shared), 1);
    assert!(server.handle.remove(port).recv().is_err(), "the port does not exist any more");

    let mut raw = Raw::attach(&other);
    server.stop();
    raw.assert_closed();
    assert!(!other.exists());
}

#[test]
fn a_removed_device_finishes_its_request() {
    let server = Server::start(Limits::default());
    let (path, shared, port) = server.add("one");
    let mut raw = Raw::attach(&path);
    shared.hold.store(true, Ordering::SeqCst);
    let reset = raw.message(command::DEVICE_RESET, 0, &[]);
    raw.send(&reset);
    let done = shared.wait_held();
    let gone = server.handle.remove(port);
    raw.assert_closed();
    assert_eq!(shared.log()[1..], ["reset"]);
    done.ok();
    shared.wait_held().ok();
    gone.recv_timeout(wait::LIMIT).unwrap();
    assert_eq!(shared.log()[1..], ["reset", "disconnected"]);
}

#[test]
fn a_stop_has_a_timeout() {
    // The limit is short, because the test waits for its expiry.
    let limits = Limits { stop: Duration::from_millis(50), ..Limits::default() };
    let (mut server, path, shared) = Server::with_device(limits);
    let raw = Raw::attach(&path);
    shared.hold.store(true, Ordering::SeqCst);
    server.stop();
    shared.wait_held().ok();
    drop(raw);
    assert_eq!(std::sync::Arc::strong_count(&shared), 1);
}

/// Runs all of these tests again, with servers that store checkpoints.
#[test]
fn all_tests_pass_with_recorded_servers() {
    if is_recorded() {
        return;
    }
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .env("SHADOWBELL_TEST_RECORDED", "1")
        .status()
        .unwrap();
    assert!(status.success());
}
