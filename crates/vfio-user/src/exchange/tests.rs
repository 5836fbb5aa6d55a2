use std::os::unix::net::UnixStream;

use super::*;
use crate::socket::{SCM_MAX_FD, receive_some, send};

fn pair() -> (UnixStream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_nonblocking(true).unwrap();
    (ours, theirs)
}

fn exchange_once(
    exchange: &mut Exchange,
    ours: &UnixStream,
    reply: &[u8],
    fds: &[OwnedFd],
    len: usize,
) -> Exchanged {
    exchange.reply_and_receive(ours.as_fd(), reply, fds.iter(), len, &Arc::default()).unwrap()
}

/// Reads from the socket. Returns the received bytes, and the number of descriptors.
fn read(socket: &UnixStream) -> (Vec<u8>, usize) {
    let mut bytes = vec![0; 1 << 20];
    match receive_some(socket.as_fd(), &mut bytes, &Arc::default()) {
        Ok(arrival) => (bytes[..arrival.bytes].to_vec(), arrival.fds.len()),
        Err(errno) => panic!("{errno}"),
    }
}

/// Exchanges that send by `SENDMSG` and by `WRITE`.
fn exchanges() -> [Exchange; 2] {
    let write_only = sys::Ring::write_only().unwrap();
    [Exchange::new().unwrap(), Exchange { ring: write_only, scratch: Vec::new() }]
}

#[test]
fn a_reply_is_sent_and_its_request_removed() {
    exchanges().into_iter().for_each(replies_are_sent_and_requests_removed);
}

fn replies_are_sent_and_requests_removed(mut exchange: Exchange) {
    let (ours, theirs) = pair();
    for n in 0..100_u8 {
        send(theirs.as_fd(), &[&[n; 48]], &[]).unwrap();
        send(theirs.as_fd(), &[&[n; 7]], &[]).unwrap();
        let done = exchange_once(&mut exchange, &ours, &[n + 1; 100], &[], 48);
        assert_eq!((done.sent, done.received, done.fds.len()), (Ok(100), Ok(48), 0));
        assert_eq!(read(&theirs), (vec![n + 1; 100], 0));
        // The exchange has removed only the request: the next message is still in the socket.
        assert_eq!(read(&ours), (vec![n; 7], 0));
    }
}

#[test]
fn descriptors_are_sent_and_received_with_their_messages() {
    let (ours, theirs) = pair();
    let mut exchange = Exchange::new().unwrap();
    let files: Vec<OwnedFd> = (0..SCM_MAX_FD).map(|_| ours.try_clone().unwrap().into()).collect();
    for count in [1, 2, 3, SCM_MAX_FD] {
        let with: Vec<_> = files.iter().take(count).map(AsFd::as_fd).collect();
        send(theirs.as_fd(), &[&[1; 32]], &with).unwrap();
        let done = exchange_once(&mut exchange, &ours, &[2; 64], &files[..count], 32);
        assert_eq!((done.sent, done.received, done.fds.len()), (Ok(64), Ok(32), count));
        assert_eq!(read(&theirs), (vec![2; 64], count));
    }
}

#[test]
fn a_ring_for_writes_leaves_descriptors_and_their_request() {
    let (ours, theirs) = pair();
    let [_, mut exchange] = exchanges();
    send(theirs.as_fd(), &[&[1; 32]], &[]).unwrap();
    let file = OwnedFd::from(ours.try_clone().unwrap());
    let fds = [&file].into_iter();
    assert!(exchange.reply_and_receive(ours.as_fd(), &[2; 64], fds, 32, &Arc::default()).is_none());
    assert_eq!(read(&ours), (vec![1; 32], 0));
}

#[test]
fn a_reply_to_a_full_socket_is_sent_later() {
    exchanges().into_iter().for_each(reply_to_a_full_socket_fails);
}

fn reply_to_a_full_socket_fails(mut exchange: Exchange) {
    let (ours, theirs) = pair();
    // The kernel waits in a write without its flag.
    ours.set_nonblocking(false).unwrap();
    let fill = || rustix::net::send(&ours, &[0; 4096], rustix::net::SendFlags::DONTWAIT);
    while fill().is_ok() {}
    send(theirs.as_fd(), &[&[1; 32]], &[]).unwrap();
    let done = exchange_once(&mut exchange, &ours, &[2; 64], &[], 32);
    assert_eq!((done.sent, done.received), (Err(Errno::AGAIN), Ok(32)));
    drop(theirs);
    let done = exchange_once(&mut exchange, &ours, &[2; 64], &[], 32);
    assert_eq!((done.sent, done.received), (Err(Errno::PIPE), Err(Errno::CONNRESET)));
}

#[test]
fn a_large_message_is_sent_at_once() {
    for mut exchange in exchanges() {
        let (ours, theirs) = pair();
        let large = vec![7; 68 << 10];
        assert_eq!(send(theirs.as_fd(), &[&large], &[]), Ok(large.len()));
        let done = exchange_once(&mut exchange, &ours, &large, &[], large.len());
        assert_eq!((done.sent, done.received), (Ok(large.len()), Ok(large.len())));
    }
}
