//! Tests of clients that send garbage, truncate messages, flood the server or stall, and of the
//! clients that connect after them.

use crate::common;
use shadowbell_testing::wait;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use common::*;
use proptest::prelude::*;
use shadowbell_vfio_user::server::Limits;
use shadowbell_vfio_user::wire::{self, command, header_flags};
use zerocopy::IntoBytes;

/// Checks that the device accepts a new client and handles its requests.
fn assert_served(path: &Path) {
    let mut raw = Raw::attach(path);
    raw.write(3, &[42]).ok();
    assert_eq!(raw.read(3, 1).ok()[16..], [42]);
}

#[test]
fn garbage_ends_the_connection() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let mut wrong_size = Raw::attach(&path);
    let mut message = wrong_size.message(command::DEVICE_GET_INFO, 0, &[&[0; 16]]);
    for size in [0, 15, (1 << 20) + 4097, u32::MAX] {
        let mut raw = Raw::new(wrong_size.stream.try_clone().unwrap());
        message[4..8].copy_from_slice(&u32::to_ne_bytes(size));
        raw.send(&message);
        raw.assert_closed();
        wrong_size = Raw::attach(&path);
    }
    let wrong_type = wrong_size.message(command::DEVICE_RESET, 7, &[]);
    wrong_size.send(&wrong_type);
    wrong_size.assert_closed();

    let mut raw = Raw::attach(&path);
    let reply = raw.message(command::DMA_READ, header_flags::REPLY, &[&[0; 16]]);
    raw.send(&reply);
    raw.assert_closed();

    let mut raw = Raw::connect(&path);
    raw.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    raw.assert_closed();
    assert_served(&path);
    let connects = shared.log().iter().filter(|line| line.starts_with("connected")).count();
    assert_eq!(connects, 7);
}

#[test]
fn due_replies_are_sent_before_the_disconnect() {
    let (_server, path, _shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    let mut stream = raw.message(command::REGION_READ, 0, &[access(0, 0, 1).as_bytes()]);
    stream.extend([0; 16]);
    raw.send(&stream);
    raw.reply().ok();
    raw.assert_closed();
}

#[test]
fn a_client_may_disconnect_in_mid_message() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    let half = |raw: &mut Raw, len| {
        let access = access(0, 0, 4);
        let message = raw.message(command::REGION_WRITE, 0, &[access.as_bytes(), &[1; 4]]);
        raw.send(&message[..len]);
    };
    for len in [1, 8, 15, 16, 20, 35] {
        // If a client shuts down its socket for writing, the server closes the connection.
        let mut raw = Raw::attach(&path);
        half(&mut raw, len);
        raw.stream.shutdown(std::net::Shutdown::Write).unwrap();
        raw.assert_closed();
        // This client closes its socket in the middle of a message.
        let mut raw = Raw::attach(&path);
        half(&mut raw, len);
    }
    let mut raw = Raw::attach(&path);
    assert_eq!(raw.read(0, 4).ok()[16..], [0; 4], "half a write was carried out");
    drop(raw);
    eventually("the device is free", || shared.log().len() == 26);
    assert_served(&path);
}

#[test]
fn a_silent_or_slow_client_is_disconnected() {
    let (_server, path, _shared) = Server::with_device(short_limits());
    // The first client sends no message.
    let started = Instant::now();
    let mut silent = Raw::connect(&path);
    silent.assert_closed();
    // The server must not close the connection before the time limit.
    assert!(started.elapsed() >= SHORT_LIMIT, "{:?}", started.elapsed());
    // The second client sends VERSION byte by byte, so the message is not complete within the
    // limit.
    let mut slow = Raw::connect(&path);
    let message = slow.message(command::VERSION, 0, &[&[0; 4000]]);
    let is_dropped = message.into_iter().any(|byte| {
        wait::short_pause();
        slow.stream.write_all(&[byte]).is_err()
    });
    assert!(is_dropped, "it has had time for all of it");
    // The third client starts correctly, and later sends half a message. Each complete message in
    // between restarts the timeout.
    let mut raw = Raw::attach(&path);
    let message = raw.message(command::REGION_READ, 0, &[access(0, 0, 1).as_bytes()]);
    for _ in 0..4 {
        raw.send(&message[..20]);
        // Each pause is shorter than the time limit, and all pauses together are longer, so a limit
        // that is not restarted would expire.
        std::thread::sleep(SHORT_LIMIT / 3);
        raw.send(&message[20..]);
        raw.reply().ok();
    }
    // No time limit applies between two messages.
    std::thread::sleep(SHORT_LIMIT * 3 / 2);
    raw.write(0, &[1]).ok();
    let started = Instant::now();
    raw.send(&message[..20]);
    raw.assert_closed();
    // The server must not close the connection before the time limit.
    assert!(started.elapsed() >= SHORT_LIMIT, "{:?}", started.elapsed());
    assert_served(&path);
}

#[test]
fn a_flooding_client_is_disconnected_without_delay_for_others() {
    let (server, path, _shared) = Server::with_device(short_limits());
    let (other_path, ..) = server.add("other");
    let mut other = Raw::attach(&other_path);
    let mut raw = Raw::attach(&path);
    let started = Instant::now();
    let read = raw.message(command::REGION_READ, 0, &[access(0, 0, 0x8000).as_bytes()]);
    let flood = std::thread::spawn(move || {
        // The client sends requests until the server disconnects it.
        let stream = read.repeat(100);
        while raw.stream.write_all(&stream).is_ok() {}
    });
    let mut served = 0;
    while !flood.is_finished() {
        other.write(0, &[1, 2, 3, 4]).ok();
        served += 1;
        wait::pause();
        assert!(started.elapsed() < wait::LIMIT, "a slow client is tolerated for ever");
    }
    flood.join().unwrap();
    assert!(served > 1, "another client waits as long as the flood");
    assert_served(&path);
}

#[test]
fn a_flood_of_posted_messages_does_not_starve_others() {
    let (server, path, _shared) = Server::with_device(Limits::default());
    let (other_path, ..) = server.add("other");
    let mut other = Raw::attach(&other_path);
    let mut raw = Raw::attach(&path);
    let posted = header_flags::NO_REPLY;
    let write = access(0, 0, 4);
    let message = raw.message(command::REGION_WRITE, posted, &[write.as_bytes(), &[1; 4]]);
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let flood = std::thread::spawn(move || {
        let stream = message.repeat(100);
        while !stopped.load(Ordering::Relaxed) {
            raw.send(&stream);
        }
        raw.read(0, 4).ok();
    });
    for _ in 0..200 {
        other.write(0, &[1]).ok();
    }
    stop.store(true, Ordering::Relaxed);
    flood.join().unwrap();
}

#[test]
fn many_messages_of_a_client_are_interleaved_with_others() {
    let (server, path, shared) = Server::with_device(Limits::default());
    let (other_path, other_shared, _) = server.add("other");
    let mut other = Raw::attach(&other_path);
    let reset = other.message(command::DEVICE_RESET, 0, &[]);
    // The busy client sends many messages. The first and the last message call hooks on the
    // server's thread: the first hook makes the other client send a message, and the second hook
    // checks that this message has been handled.
    let arrived = Arc::new(AtomicBool::new(false));
    let (hooks, note) = (Arc::clone(&shared), Arc::clone(&arrived));
    *shared.hook.lock().unwrap() = Some(Box::new(move || {
        other.send(&reset);
        *hooks.hook.lock().unwrap() = Some(Box::new(move || {
            note.store(other_shared.log().contains(&"reset".to_owned()), Ordering::SeqCst);
            drop(other);
        }));
    }));
    let mut raw = Raw::attach(&path);
    let mut write = |offset| {
        let access = access(0, offset, 1);
        raw.message(command::REGION_WRITE, header_flags::NO_REPLY, &[access.as_bytes(), &[1]])
    };
    let mut stream = write(HOOK);
    stream.extend(write(0).repeat(450));
    stream.extend(write(HOOK));
    raw.send(&stream);
    raw.read(0, 1).ok();
    assert!(arrived.load(Ordering::SeqCst));
}

/// A message can contain about 40,000 writes. The server executes them in batches, and handles
/// other clients between two batches.
#[test]
fn a_message_of_many_writes_is_interleaved_with_others() {
    let (server, path, shared) = Server::with_device(Limits::default());
    let (other_path, other_shared, _) = server.add("other");
    let mut other = Raw::attach(&other_path);
    let reset = other.message(command::DEVICE_RESET, 0, &[]);
    let arrived = Arc::new(AtomicBool::new(false));
    let (hooks, note) = (Arc::clone(&shared), Arc::clone(&arrived));
    *shared.hook.lock().unwrap() = Some(Box::new(move || {
        other.send(&reset);
        *hooks.hook.lock().unwrap() = Some(Box::new(move || {
            note.store(other_shared.log().contains(&"reset".to_owned()), Ordering::SeqCst);
            drop(other);
        }));
    }));
    let mut raw = Raw::attach(&path);
    let write = |offset| wire::MultiEntry { offset, region: 0, count: 1, data: [1; 8] };
    let mut entries = vec![write(HOOK)];
    // One write among the others is slow: the device completes it later.
    entries.extend((0..20_000).map(|_| write(0)));
    entries.push(write(SLOW));
    entries.extend((0..20_000).map(|_| write(0)));
    entries.push(write(HOOK));
    let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.as_bytes().to_vec()).collect();
    let count = wire::WriteMulti { count: entries.len() as u64 };
    let answer = raw.request(command::REGION_WRITE_MULTI, &[count.as_bytes(), &bytes]).ok();
    assert_eq!(answer, count.as_bytes());
    assert!(arrived.load(Ordering::SeqCst));
    // While a slow write of a message is pending, the server must not handle the client's next
    // message: the read must return the value that the last write has stored.
    shared.hold.store(true, Ordering::SeqCst);
    let multi = raw.message(
        command::REGION_WRITE_MULTI,
        0,
        &[wire::WriteMulti { count: 2 }.as_bytes(), write(SLOW).as_bytes(), write(7).as_bytes()],
    );
    let read = raw.message(command::REGION_READ, 0, &[access(0, 7, 1).as_bytes()]);
    raw.send(&[multi, read].concat());
    shared.wait_held().ok();
    raw.reply().ok();
    assert_eq!(raw.reply().ok()[16..], [1]);
}

/// Each new client costs a reset of the device. Clients that reconnect endlessly are delayed, but
/// each of them is served.
#[test]
fn reconnecting_clients_are_all_served() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    for _ in 0..270 {
        assert_served(&path);
    }
    let connects = shared.log().iter().filter(|line| line.starts_with("connected")).count();
    assert_eq!(connects, 270);
}

#[test]
fn a_slow_reader_gets_all_replies() {
    let (_server, path, _shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    // The client reads no reply until it has sent all requests. The replies exceed the buffers of
    // the socket and of the server.
    let read = raw.message(command::REGION_READ, 0, &[access(0, 0, 0x8000).as_bytes()]);
    let mut asker = raw.stream.try_clone().unwrap();
    let asker = std::thread::spawn(move || {
        for _ in 0..200 {
            asker.write_all(&read).unwrap();
        }
    });
    wait::short_pause();
    for _ in 0..200 {
        assert_eq!(raw.reply().ok().len(), 16 + 0x8000);
    }
    asker.join().unwrap();
}

#[test]
fn too_many_descriptors_end_the_connection() {
    let (_server, path, _shared) = Server::with_device(Limits::default());
    let mut raw = Raw::attach(&path);
    let fds = eventfds(33);
    let fds: Vec<_> = fds.iter().map(std::os::fd::AsFd::as_fd).collect();
    let message = raw.message(command::DEVICE_RESET, 0, &[]);
    raw.send_with_fds(&message, &fds[..16]);
    raw.reply().ok();
    // The messages have more descriptors than the negotiated maximum.
    for count in [17, 32] {
        raw.send_with_fds(&message, &fds[..count]);
        assert_eq!(raw.reply().errno(), shadowbell_vfio_user::Errno::INVAL);
    }
    raw.send_with_fds(&message, &fds);
    raw.assert_closed();
    assert_served(&path);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Messages with valid headers and arbitrary payloads: each gets exactly one reply, success or
    /// error.
    #[test]
    fn any_payload_of_any_command_gets_a_reply(
        messages in prop::collection::vec(
            (0u16..20, prop::collection::vec(any::<u8>(), 0..80), 0usize..3), 1..40
        )
    ) {
        let mut server = Server::start(Limits::default());
        let (path, ..) = server.add("device");
        let mut raw = Raw::attach(&path);
        for (command, mut payload, fds) in messages {
            // Most of the payload is zeroed, so that lengths and indexes are small and messages
            // pass the first checks.
            for (at, byte) in payload.iter_mut().enumerate() {
                if at % 4 != 0 && *byte < 240 {
                    *byte = 0;
                }
            }
            let reply = match fds {
                0 => raw.request(command, &[&payload]),
                _ => raw.request_with_fds(command, &[&payload], &eventfds(fds)),
            };
            let flags = reply.header.flags;
            prop_assert!(flags == header_flags::REPLY || reply.header.error != 0);
        }
        drop(raw);
        assert_served(&path);
        server.stop();
    }

    /// The server survives any byte stream.
    #[test]
    fn any_stream_is_survived(stream in prop::collection::vec(any::<u8>(), 0..400), agreed: bool) {
        let mut server = Server::start(short_limits());
        let (path, ..) = server.add("device");
        let mut raw = if agreed { Raw::attach(&path) } else { Raw::connect(&path) };
        let _ = raw.stream.write_all(&stream);
        drop(raw);
        assert_served(&path);
        server.stop();
    }
}
