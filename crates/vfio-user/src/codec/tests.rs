use std::os::fd::{AsFd, AsRawFd};

use proptest::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

use super::*;
use crate::descriptor::PeerFd;
use crate::wire::command;

fn message(id: u16, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = SendQueue::default();
    let header = Header { id, command: command::REGION_WRITE, size: 0, flags, error: 0 };
    out.put(header, &[payload]);
    out.bytes
}

/// Passes `bytes` to the decoder in several receives. The last receive has the descriptors.
fn feed(decoder: &mut Decoder, mut bytes: &[u8], fds: Vec<OwnedFd>) {
    let mut fds = Some(fds);
    while !bytes.is_empty() {
        let space = decoder.space();
        assert!(!space.is_empty());
        let len = space.len().min(bytes.len());
        space[..len].copy_from_slice(&bytes[..len]);
        let last = len == bytes.len();
        let fds = if last { fds.take().unwrap_or_default() } else { Vec::new() };
        let held = |fd| Descriptor::Event(PeerFd::new(fd, &std::sync::Arc::default()));
        decoder.advance(len, fds.into_iter().map(held).collect());
        bytes = &bytes[len..];
    }
}

fn descriptor() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).unwrap()
}

fn fd_numbers(fds: &[OwnedFd]) -> Vec<i32> {
    fds.iter().map(AsRawFd::as_raw_fd).collect()
}

#[test]
fn messages_are_decoded_as_encoded() {
    let mut decoder = Decoder::new(1 << 20);
    let mut stream = message(1, 0, b"abc");
    stream.extend(message(2, header_flags::NO_REPLY, b""));
    stream.extend(message(3, header_flags::REPLY, &[7; 1000]));
    feed(&mut decoder, &stream, Vec::new());
    let first = decoder.decode().unwrap().unwrap();
    assert_eq!((first.header.id, first.payload), (1, &b"abc"[..]));
    assert!(!first.header.no_reply() && !first.header.is_reply());
    let second = decoder.decode().unwrap().unwrap();
    assert_eq!((second.header.id, second.payload.len()), (2, 0));
    assert!(second.header.no_reply());
    assert!(decoder.is_partial());
    let third = decoder.decode().unwrap().unwrap();
    assert!(third.header.is_reply());
    assert_eq!(third.payload, [7; 1000]);
    assert!(decoder.decode().unwrap().is_none());
    assert!(!decoder.is_partial());
    assert_eq!(decoder.position(), stream.len() as u64);
}

#[test]
fn a_large_message_grows_the_buffer_temporarily() {
    let mut decoder = Decoder::new(1 << 20);
    let payload: Vec<u8> = (0..1 << 20).map(|n| n as u8).collect();
    let bytes = message(9, 0, &payload);
    let (begin, end) = bytes.split_at(100);
    feed(&mut decoder, begin, Vec::new());
    assert!(decoder.decode().unwrap().is_none());
    feed(&mut decoder, end, Vec::new());
    assert_eq!(decoder.decode().unwrap().unwrap().payload, payload);
    assert!(decoder.decode().unwrap().is_none());
    assert_eq!(decoder.space().len(), BUFFER_LEN);
}

#[test]
fn descriptors_go_to_the_message_that_the_receive_ended_with() {
    let mut decoder = Decoder::new(4096);
    let (one, two, three) = (descriptor(), descriptor(), descriptor());
    let numbers = fd_numbers(&[one.try_clone().unwrap()]);
    assert!(!numbers.is_empty());
    let expected = [one.as_raw_fd(), two.as_raw_fd(), three.as_raw_fd()];
    // The first receive has two messages without descriptors, and the start of a message with two
    // descriptors. The second receive has the rest of that message, with a third descriptor.
    let with = message(3, 0, b"payload");
    let mut stream = message(1, 0, b"x");
    stream.extend(message(2, 0, b"y"));
    stream.extend(&with[..20]);
    feed(&mut decoder, &stream, vec![one, two]);
    assert!(decoder.decode().unwrap().unwrap().fds.is_empty());
    assert!(decoder.decode().unwrap().unwrap().fds.is_empty());
    assert!(decoder.decode().unwrap().is_none());
    feed(&mut decoder, &with[20..], vec![three]);
    let message = decoder.decode().unwrap().unwrap();
    let fds = message.fds.into_iter().filter_map(|fd| match fd {
        Descriptor::Event(fd) => Some(fd),
        Descriptor::Memory(file) => Some(file),
        Descriptor::Foreign => None,
    });
    let fds: Vec<_> = fds.map(|fd| fd.as_fd().as_raw_fd()).collect();
    assert_eq!(fds, expected);
}

#[test]
fn sizes_and_types_that_cannot_be_are_errors_that_stay() {
    let mut header = message(1, 0, b"");
    for (size, error) in [
        (0u32, DecodeError::TooShort { size: 0 }),
        (15, DecodeError::TooShort { size: 15 }),
        (4096 + 4097, DecodeError::TooLong { size: 8193, max: 8192 }),
        (u32::MAX, DecodeError::TooLong { size: u32::MAX, max: 8192 }),
    ] {
        header[4..8].copy_from_slice(&size.to_ne_bytes());
        let mut decoder = Decoder::new(4096);
        feed(&mut decoder, &header, Vec::new());
        assert_eq!(decoder.decode().unwrap_err(), error);
        feed(&mut decoder, &message(2, 0, b""), Vec::new());
        assert_eq!(decoder.decode().unwrap_err(), error);
    }
    let mut decoder = Decoder::new(4096);
    feed(&mut decoder, &message(1, 2, b""), Vec::new());
    assert_eq!(decoder.decode().unwrap_err(), DecodeError::UnknownType { flags: 2 });
}

#[test]
fn a_hoard_of_descriptors_is_an_error() {
    let mut decoder = Decoder::new(4096);
    let bytes = message(1, 0, &[0; 100]);
    for byte in &bytes[..MAX_MESSAGE_FDS] {
        feed(&mut decoder, &[*byte], vec![descriptor()]);
        assert!(decoder.decode().unwrap().is_none());
    }
    feed(&mut decoder, &bytes[MAX_MESSAGE_FDS..][..1], vec![descriptor()]);
    assert_eq!(decoder.decode().unwrap_err(), DecodeError::TooManyFds);
    assert!(decoder.batches.is_empty(), "they are closed, not kept");
}

/// The first half of a message arrives with the maximum number of descriptors. Then one receive
/// returns its second half and the start of the next message, with more descriptors. These belong
/// to the next message, so they must not count for the first one.
#[test]
fn descriptors_of_the_next_message_are_not_too_many_for_this_one() {
    let mut decoder = Decoder::new(4096);
    let (one, two) = (message(1, 0, &[0; 100]), message(2, 0, &[0; 100]));
    let many = |count: usize| (0..count).map(|_| descriptor()).collect::<Vec<_>>();
    feed(&mut decoder, &one[..50], many(MAX_MESSAGE_FDS));
    assert!(decoder.decode().unwrap().is_none());
    feed(&mut decoder, &[&one[50..], &two[..60]].concat(), many(2));
    assert_eq!(decoder.decode().unwrap().unwrap().fds.len(), MAX_MESSAGE_FDS);
    assert!(decoder.decode().unwrap().is_none());
    feed(&mut decoder, &two[60..], many(1));
    assert_eq!(decoder.decode().unwrap().unwrap().fds.len(), 3);
    // The maximum is per message: here, both receives belong to one message, so one more descriptor
    // exceeds it.
    feed(&mut decoder, &one[..50], many(MAX_MESSAGE_FDS));
    assert!(decoder.decode().unwrap().is_none());
    feed(&mut decoder, &one[50..], many(1));
    assert_eq!(decoder.decode().unwrap_err(), DecodeError::TooManyFds);
}

#[test]
fn an_error_reply_has_only_an_error_number() {
    let mut out = SendQueue::default();
    let to = Header { id: 5, command: 6, size: 16, flags: 0, error: 0 };
    out.put_error(&to, Errno::IO);
    out.put_error(&to, Errno::EXIST);
    let mut decoder = Decoder::new(0);
    feed(&mut decoder, out.front().0, Vec::new());
    for errno in [Errno::IO, Errno::EXIST] {
        let header = decoder.decode().unwrap().unwrap().header;
        assert_eq!(header.flags, header_flags::REPLY | header_flags::ERROR);
        assert_eq!((header.id, header.command, header.size), (5, 6, 16));
        assert_eq!(header.error, errno.raw_os_error() as u32);
    }
}

#[test]
fn posted_messages_get_no_reply() {
    let mut out = SendQueue::default();
    let to = Header { id: 5, command: 6, size: 16, flags: header_flags::NO_REPLY, error: 0 };
    out.put_reply(&to, &[b"x"]);
    out.put_error(&to, Errno::INVAL);
    out.put_reply_with_fds(&to, &[b"x"], [descriptor()]);
    out.put_reply_filled(&to, b"x", 4, |_| Ok(()));
    out.put_reply_filled(&to, b"x", 4, |_| Err(Errno::IO));
    assert!(out.is_empty());
}

#[test]
fn a_reply_that_cannot_be_filled_becomes_an_error() {
    let mut out = SendQueue::default();
    let to = Header { id: 5, command: 6, size: 16, flags: 0, error: 0 };
    out.put_reply_filled(&to, b"head", 4, |data| {
        data.copy_from_slice(b"data");
        Ok(())
    });
    out.put_reply_filled(&to, b"head", 4, |_| Err(Errno::NXIO));
    let mut decoder = Decoder::new(16);
    feed(&mut decoder, out.front().0, Vec::new());
    assert_eq!(decoder.decode().unwrap().unwrap().payload, b"headdata");
    let error = decoder.decode().unwrap().unwrap();
    assert_eq!((error.header.error, error.payload), (Errno::NXIO.raw_os_error() as u32, &b""[..]));
}

#[test]
fn descriptors_leave_with_the_first_byte_of_their_message() {
    let mut out = SendQueue::default();
    let to = Header { id: 5, command: 6, size: 16, flags: 0, error: 0 };
    out.put_reply(&to, &[b"before"]);
    out.put_reply_with_fds(&to, &[b"with"], [descriptor()]);
    out.put_reply(&to, &[b"after"]);
    out.put_reply_with_fds(&to, &[b"more"], [descriptor()]);
    let front = |out: &SendQueue| {
        let (bytes, fds) = out.front();
        (bytes.len(), fds.count())
    };
    assert_eq!(front(&out), (22, 0));
    out.sent(10);
    assert_eq!(front(&out), (12, 0));
    out.sent(12);
    assert_eq!(front(&out), (41, 1));
    out.sent(1);
    assert_eq!(front(&out), (40, 0));
    out.sent(40);
    assert_eq!(front(&out), (20, 1));
    out.sent(20);
    assert!(out.is_empty());
    assert_eq!(front(&out), (0, 0));
}

#[test]
fn a_peer_that_is_always_behind_does_not_make_the_send_queue_grow() {
    let mut out = SendQueue::default();
    let to = Header { id: 5, command: 6, size: 16, flags: 0, error: 0 };
    out.put_reply(&to, &[&[1; 1000]]);
    for _ in 0..1000 {
        out.put_reply_with_fds(&to, &[&[2; 1000]], [descriptor()]);
        while out.len() > 500 {
            let (bytes, fds) = out.front();
            let (len, with) = (bytes.len().min(700), fds.count());
            assert!(with <= 1);
            out.sent(len);
        }
        assert!(out.bytes.len() < 4 * BUFFER_LEN, "{} bytes kept", out.bytes.len());
        assert!(out.fds.len() <= 1);
    }
}

proptest! {
    /// The decoded messages do not depend on the sizes of the receives.
    #[test]
    fn messages_are_decoded_from_any_fragments(
        payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3000), 1..20),
        cuts in prop::collection::vec(1usize..5000, 1..50),
    ) {
        let mut stream = Vec::new();
        for (id, payload) in payloads.iter().enumerate() {
            stream.extend(message(id as u16, 0, payload));
        }
        let mut decoder = Decoder::new(4096);
        let mut rest = &stream[..];
        let mut cuts = cuts.iter().cycle();
        let mut seen = 0;
        while !rest.is_empty() {
            let space = decoder.space();
            let len = (*cuts.next().unwrap()).min(rest.len()).min(space.len());
            prop_assert!(len > 0);
            space[..len].copy_from_slice(&rest[..len]);
            decoder.advance(len, Vec::new());
            rest = &rest[len..];
            while let Some(message) = decoder.decode().unwrap() {
                prop_assert_eq!(usize::from(message.header.id), seen);
                prop_assert_eq!(message.payload, &payloads[seen][..]);
                seen += 1;
            }
        }
        prop_assert_eq!(seen, payloads.len());
    }

    /// Arbitrary input does not panic, and never yields more bytes than were received.
    #[test]
    fn garbage_ends_in_an_error_or_in_waiting(
        chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..200), 0..50),
        small in any::<bool>(),
    ) {
        let mut decoder = Decoder::new(4096);
        let (mut fed, mut out) = (0, 0);
        for mut chunk in chunks {
            if small && chunk.len() >= 12 {
                // Bytes of 0 make valid sizes and types likely.
                chunk[5..8].fill(0);
                chunk[8] &= 0xf1;
            }
            let space = decoder.space();
            let len = chunk.len().min(space.len());
            space[..len].copy_from_slice(&chunk[..len]);
            fed += len;
            decoder.advance(len, Vec::new());
            loop {
                match decoder.decode() {
                    Ok(Some(message)) => out += HEADER_LEN + message.payload.len(),
                    Ok(None) => break,
                    Err(_) => return Ok(()),
                }
            }
            prop_assert!(out <= fed);
        }
    }
}
