//! What the keeper holds for the time after this process's death.

use crate::items::{self, COMPLETE, Change, Items};
use crate::keeper_link::{self, to_keeper};
use parking_lot::Mutex;
use shadowbell_memory::EventFd;
use shadowbell_state::Descriptors;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;
use tracing::error;

/// Shows that the rest is old: its descriptor, an eventfd, is signalled as soon as a change did not
/// get there. A keeper that hears nothing can not be told, and may die before it could be.
const OLD: &str = "old";

/// The way to what the keeper holds for this process. Any thread may use it; what one puts there
/// takes effect as a whole.
#[derive(Clone, Debug)]
pub(super) struct Store(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    link: OwnedFd,
    /// See [`OLD`].
    old: EventFd,
    state: Mutex<State>,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Kept,
    /// Something could not be put there, and the keeper does not know yet.
    Lost,
    /// The keeper knows that what it has is of no use.
    Over,
}

impl Store {
    /// The one of the keeper at the other end of `link`.
    ///
    /// # Errors
    /// The system has no more descriptors.
    pub(super) fn new(link: OwnedFd) -> io::Result<Self> {
        let old = EventFd::new()?;
        Ok(Self(Arc::new(Shared { link, old, state: Mutex::default() })))
    }

    /// Puts there what the rest begins with: `fence`, which has no body, and what
    /// [`is_old`] looks for.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub(super) fn begin(&self, fence: (&str, BorrowedFd<'_>)) -> io::Result<()> {
        let (key, fence) = fence;
        self.change(&[
            Change::Put { key: OLD, body: &[], fds: &[self.0.old.as_fd()] },
            Change::Put { key, body: &[], fds: &[fence] },
        ])
    }

    /// Puts an item there, in place of the one with this key.
    ///
    /// # Errors
    /// The keeper did not take it in time, now or before. Then what it has is of no use: it is told
    /// as soon as it listens, and the next process finds it [old](is_old).
    pub(super) fn put(&self, key: &str, body: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.change(&[Change::Put { key, body, fds }])
    }

    /// Takes an item away.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub(super) fn delete(&self, key: &str) -> io::Result<()> {
        self.change(&[Change::Delete { key }])
    }

    /// Puts a state there, with its descriptors.
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

    /// Changes several items together.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub(super) fn change(&self, changes: &[Change<'_>]) -> io::Result<()> {
        let mut state = self.0.state.lock();
        if *state == State::Kept {
            let Err(error) = self.send(changes, false) else { return Ok(()) };
            *state = State::Lost;
            // Before anything is done of which only this change would have told.
            self.0.old.signal();
            // If it is gone, that is noticed elsewhere.
            if !matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) {
                error!(
                    "the keeper does not take what it is to hold ({error}): if this process dies, \
                     its clients lose their controllers; `shadowbell upgrade` starts one for which \
                     it does"
                );
            }
        }
        if *state == State::Lost && self.send(&[Change::Delete { key: COMPLETE }], true).is_ok() {
            *state = State::Over;
        }
        Err(io::Error::other("the keeper does not hold what it should"))
    }

    fn send(&self, changes: &[Change<'_>], now: bool) -> io::Result<()> {
        let mut memory = Vec::new();
        for packet in items::packets(changes, &mut memory)? {
            let (bytes, fds) = (&packet.bytes, &packet.fds);
            keeper_link::send_bytes(&self.0.link, to_keeper::ITEMS, bytes, fds, now)?;
        }
        Ok(())
    }
}

/// Whether a change did not get there, of the process that left `items`. A release before this one
/// does not say so.
///
/// # Errors
/// The system's.
pub(super) fn is_old(items: &mut Items) -> io::Result<bool> {
    let Some(item) = items.remove(OLD) else { return Ok(false) };
    let ends = item.read()?.1;
    // Not taken: whoever tries next has to see it, too.
    let is_signalled = |end| EventFd::from_fd(end)?.wait(Some(Duration::ZERO));
    ends.into_iter().try_fold(false, |is, end| Ok(is || is_signalled(end)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::sockopt::{Timeout, set_socket_timeout};

    /// A store, and the keeper's end.
    fn store() -> (Store, OwnedFd) {
        let (keeper, worker) = keeper_link::pair().unwrap();
        // Expires if the other end does not read.
        let timeout = Some(Duration::from_millis(20));
        set_socket_timeout(&worker, Timeout::Send, timeout).unwrap();
        (Store::new(worker).unwrap(), keeper)
    }

    /// What the keeper holds, once it has listened to all that was said.
    fn hear(keeper: &OwnedFd, items: &mut Items) {
        while let Ok(Some(packet)) = keeper_link::receive(keeper, true) {
            assert_eq!(packet.letter, to_keeper::ITEMS);
            items.take(&packet.body, packet.fds).unwrap();
        }
    }

    #[test]
    fn threads_do_not_mix_what_they_put_there() {
        crate::descriptor_limit::raise();
        let (store, keeper) = store();
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
        let mut items = Items::default();
        while putters.iter().any(|putter| !putter.is_finished()) {
            hear(&keeper, &mut items);
        }
        hear(&keeper, &mut items);
        putters.into_iter().for_each(|putter| putter.join().unwrap());
        for n in 0..4_u8 {
            let (body, fds) = items.remove(&n.to_string()).unwrap().read().unwrap();
            assert_eq!((body, fds.len()), (vec![n; 10], 300));
        }
    }

    #[test]
    fn what_a_keeper_did_not_take_is_of_no_use_and_nobody_waits_for_it() {
        let (store, keeper) = store();
        let (fence, _write) = io::pipe().unwrap();
        store.begin(("fence", fence.as_fd())).unwrap();
        store.put(COMPLETE, b"", &[]).unwrap();
        let mut items = Items::default();
        hear(&keeper, &mut items);
        assert!(items.contains("fence") && !is_old(&mut items).unwrap());
        store.begin(("fence", fence.as_fd())).unwrap();
        let mut puts = 0;
        while store.put("a", &[1; 10_000], &[]).is_ok() {
            puts += 1;
        }
        assert!(puts > 0);
        hear(&keeper, &mut items);
        assert!(items.contains(COMPLETE), "it could not be told");
        assert!(is_old(&mut items).unwrap());
        // The next change would make it good, but not what was missed before.
        store.put("a", b"", &[]).unwrap_err();
        hear(&keeper, &mut items);
        assert!(!items.contains(COMPLETE));
        store.put(COMPLETE, b"", &[]).unwrap_err();
        hear(&keeper, &mut items);
        assert!(!items.contains(COMPLETE));
        drop(keeper);
        store.delete("a").unwrap_err();
    }
}
