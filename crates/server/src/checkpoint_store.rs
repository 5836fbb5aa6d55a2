//! Transport of checkpoint changes to the supervisor.

use parking_lot::Mutex;
use shadowbell_memory::EventFd;
use shadowbell_state::Descriptors;
use shadowbell_supervisor::checkpoint::{self, COMPLETE, Change, Checkpoint};
use shadowbell_supervisor::protocol::{self, to_supervisor};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tracing::error;

/// Key of the item that marks a checkpoint as outdated. Its descriptor is an eventfd, which is
/// signalled as soon as a change could not be sent. A message to the supervisor would not suffice:
/// a hung supervisor may die before it reads the message.
const OUTDATED: &str = "old";

/// Sender of checkpoint changes, usable from any thread. A change of several items is atomic.
#[derive(Clone, Debug)]
pub(super) struct CheckpointStore(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    link: OwnedFd,
    /// Eventfd of the item [`OUTDATED`].
    outdated: EventFd,
    state: Mutex<State>,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Valid,
    /// A change was lost, and the supervisor still has the item [`COMPLETE`].
    Lost,
    /// A change was lost, and the supervisor was sent the deletion of [`COMPLETE`].
    Invalid,
}

impl CheckpointStore {
    /// Creates a sender for the supervisor at the other end of `link`.
    ///
    /// # Errors
    /// The descriptor limit is reached.
    pub(super) fn new(link: OwnedFd) -> io::Result<Self> {
        let outdated = EventFd::new()?;
        Ok(Self(Arc::new(Shared { link, outdated, state: Mutex::default() })))
    }

    /// Sends the first items: [`OUTDATED`], by which [`is_outdated`] recognizes an outdated
    /// checkpoint, and the two items `others`, each a key and its descriptors. These items have
    /// descriptors and no body.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub(super) fn begin(&self, others: [(&str, &[BorrowedFd<'_>]); 2]) -> io::Result<()> {
        let outdated: &[_] = &[self.0.outdated.as_fd()];
        let [first, second] = others;
        self.change(&[(OUTDATED, outdated), first, second].map(|(key, fds)| Change::Put {
            key,
            body: &[],
            fds,
        }))
    }

    /// Sends an item. It replaces an earlier item with the same key.
    ///
    /// # Errors
    /// This or an earlier change could not be sent in time. From then on the checkpoint is invalid:
    /// the item [`COMPLETE`] is deleted when the supervisor reads again, and the next process finds
    /// the checkpoint [outdated](is_outdated).
    pub(super) fn put(&self, key: &str, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.change(&[Change::Put { key, body, fds }])
    }

    /// Deletes an item.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub(super) fn delete(&self, key: &str) -> io::Result<()> {
        self.change(&[Change::Delete { key }])
    }

    /// Serializes a state and sends it with its descriptors.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub(super) fn put_state(
        &self,
        key: &str,
        state: &impl serde::Serialize,
        fds: &Descriptors,
    ) -> io::Result<()> {
        let body = serde_json::to_vec(state)?;
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        self.put(key, &body, &fds)
    }

    /// Sends changes of several items. The changes take effect together.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub(super) fn change(&self, changes: &[Change<'_>]) -> io::Result<()> {
        let mut state = self.0.state.lock();
        if *state == State::Valid {
            let Err(error) = self.send(changes, false) else { return Ok(()) };
            *state = State::Lost;
            // The eventfd is signalled before the caller continues, because the checkpoint does not
            // contain the caller's change.
            self.0.outdated.signal();
            // The death of the supervisor is reported by the main loop.
            if !matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) {
                error!(
                    "the supervisor does not accept the checkpoint ({error}): the clients will \
                     lose their controllers if this process crashes; run `shadowbell upgrade` to \
                     start a process with a new checkpoint"
                );
            }
        }
        if *state == State::Lost && self.send(&[Change::Delete { key: COMPLETE }], true).is_ok() {
            *state = State::Invalid;
        }
        Err(io::Error::other("the checkpoint at the supervisor is incomplete"))
    }

    fn send(&self, changes: &[Change<'_>], now: bool) -> io::Result<()> {
        let mut memory = Vec::new();
        for packet in checkpoint::packets(changes, &mut memory)? {
            let (bytes, fds) = (&packet.bytes, &packet.fds);
            protocol::send_bytes(&self.0.link, to_supervisor::CHECKPOINT, bytes, fds, now)?;
        }
        Ok(())
    }
}

/// Returns true if the checkpoint `items` is outdated, since its process could not send a change.
///
/// # Errors
/// A system call fails.
pub(super) fn is_outdated(items: &mut Checkpoint) -> io::Result<bool> {
    let Some(item) = items.remove(OUTDATED) else { return Ok(false) };
    let ends = item.read()?.1;
    // `EventFd::wait` does not consume the signal, so a later recovery from the same checkpoint
    // sees it too.
    let is_signalled = |end| EventFd::from_fd(end)?.wait(Some(Duration::ZERO));
    ends.into_iter().try_fold(false, |is, end| Ok(is || is_signalled(end)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    use shadowbell_testing::wait::LIMIT;

    /// A store, and the supervisor's end of its socket. A send fails if the supervisor does not
    /// receive within `timeout`.
    fn store(timeout: Duration) -> (CheckpointStore, OwnedFd) {
        let (supervisor, worker) = protocol::pair().unwrap();
        set_socket_timeout(&worker, Timeout::Send, Some(timeout)).unwrap();
        (CheckpointStore::new(worker).unwrap(), supervisor)
    }

    /// Reads all packets into the supervisor's copy of the items.
    fn receive_all(supervisor: &OwnedFd, items: &mut Checkpoint) {
        while let Ok(Some(packet)) = protocol::receive(supervisor, true) {
            assert_eq!(packet.code, to_supervisor::CHECKPOINT);
            items.take(&packet.body, packet.fds).unwrap();
        }
    }

    #[test]
    fn concurrent_checkpoint_changes_are_not_mixed() {
        shadowbell_process::descriptor_limit::raise();
        let (store, supervisor) = store(LIMIT);
        let (read, _write) = io::pipe().unwrap();
        let putters: Vec<_> = (0..4_u8)
            .map(|n| {
                let (store, fd) = (store.clone(), read.try_clone().unwrap());
                let fds: Vec<_> = (0..300).map(|_| fd.try_clone().unwrap()).collect();
                std::thread::spawn(move || {
                    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
                    for len in [1, 20_000, 10] {
                        store.put(&n.to_string(), &vec![n; len], &fds).unwrap();
                    }
                })
            })
            .collect();
        let mut items = Checkpoint::default();
        while putters.iter().any(|putter| !putter.is_finished()) {
            receive_all(&supervisor, &mut items);
        }
        receive_all(&supervisor, &mut items);
        putters.into_iter().for_each(|putter| putter.join().unwrap());
        for n in 0..4_u8 {
            let (body, fds) = items.remove(&n.to_string()).unwrap().read().unwrap();
            assert_eq!((body, fds.len()), (vec![n; 10], 300));
        }
    }

    #[test]
    fn an_unread_checkpoint_is_invalid_and_delays_no_thread() {
        // The test waits until this limit expires, so it is short.
        let (store, supervisor) = store(Duration::from_millis(20));
        let (fence, _write) = io::pipe().unwrap();
        store.begin([("fence", &[fence.as_fd()]), ("attempts", &[])]).unwrap();
        store.put(COMPLETE, b"", &[]).unwrap();
        let mut items = Checkpoint::default();
        receive_all(&supervisor, &mut items);
        assert!(items.contains("fence") && !is_outdated(&mut items).unwrap());
        store.begin([("fence", &[fence.as_fd()]), ("attempts", &[])]).unwrap();
        let mut puts = 0;
        while store.put("a", &[1; 10_000], &[]).is_ok() {
            puts += 1;
        }
        assert!(puts > 0);
        receive_all(&supervisor, &mut items);
        assert!(items.contains(COMPLETE), "it could not be told");
        assert!(is_outdated(&mut items).unwrap());
        // The next change could be sent, but fails too, because the changes before it are lost.
        store.put("a", b"", &[]).unwrap_err();
        receive_all(&supervisor, &mut items);
        assert!(!items.contains(COMPLETE));
        store.put(COMPLETE, b"", &[]).unwrap_err();
        receive_all(&supervisor, &mut items);
        assert!(!items.contains(COMPLETE));
        drop(supervisor);
        store.delete("a").unwrap_err();
    }
}
