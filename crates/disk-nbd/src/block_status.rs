//! Allocation state of an export, by `NBD_CMD_BLOCK_STATUS`.
//!
//! The command uses a connection of the queues, like other requests. While the server is
//! unavailable, the command waits. It is not sent before the unflushed writes were replayed.

use crate::connections::Connections;
use crate::link::Link;
use crate::subrequest::{Owner, Subrequest};
use crate::user::User;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shadowbell_disk::{Extent, ReportExtent};
use shadowbell_nbd::wire::{Reader, allocation, command};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Maximum time to wait for a reply. Bytes without a reply are then reported as data.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes per command.
const RANGE: u64 = 1 << 30;

/// Sender of the command, registered with a connection like a queue.
struct StatusQuery<'a> {
    connections: &'a Connections,
    link: &'a Mutex<Link>,
    user: Arc<User>,
    number: u32,
}

impl Drop for StatusQuery<'_> {
    fn drop(&mut self) {
        self.link.lock().leave(self.number, &self.connections.shared);
    }
}

impl<'a> StatusQuery<'a> {
    fn new(connections: &'a Connections) -> Option<Self> {
        let user = Arc::new(User::new().ok()?);
        connections.shared.users.lock().push(Arc::downgrade(&user));
        let link = connections.links.first()?;
        let number = link.lock().join(&user).ok()?;
        Some(Self { connections, link, user, number })
    }

    /// Requests the extents from `offset` on.
    fn request(&self, offset: u64, len: u32) -> Option<Vec<Extent>> {
        let mut part = Subrequest::new(command::BLOCK_STATUS, 0, offset, len, Vec::new());
        part.owner = Some(Owner { user: self.number, task: 0, at: 0 });
        let shared = &self.connections.shared;
        let mut ended = Vec::new();
        let mut link = self.link.lock();
        link.push(part);
        link.pump(shared, Some((self.number, &mut ended)));
        drop(link);
        let until = Instant::now() + TIMEOUT;
        loop {
            self.user.completions.take(&mut ended);
            if ended.is_empty() {
                let mut link = self.link.lock();
                link.receive(shared, Some((self.number, &mut ended)));
                link.pump(shared, Some((self.number, &mut ended)));
            }
            if let Some(answer) = ended.pop() {
                answer.result.ok()?;
                return Some(extents(&answer.data));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let left =
                Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            let mut fds =
                [PollFd::new(&*self.user, PollFlags::IN), PollFd::new(&shared.stop, PollFlags::IN)];
            let _ = poll(&mut fds, Some(&left));
            if !fds[1].revents().is_empty() {
                return None;
            }
        }
    }
}

/// Decodes extents. Only an extent with `NBD_STATE_ZERO` reads as zeroes; all others count as data.
fn extents(data: &[u8]) -> Vec<Extent> {
    let mut reader = Reader(data);
    let mut next = || Some((reader.u32()?, reader.u32()?));
    let mut found = Vec::new();
    while let Some((len, flags)) = next() {
        let len = u64::from(len);
        // An extent of length zero is invalid. The position of later extents is unknown, so they
        // are ignored.
        if len == 0 {
            break;
        }
        let is_zero = flags & allocation::ZERO != 0;
        found.push(if is_zero { Extent::hole(len) } else { Extent::data(len) });
    }
    found
}

/// Reports the allocation state of the export. Bytes for which the server gives no reply are
/// reported as data.
pub(crate) fn report_extents(
    connections: &Connections,
    offset: u64,
    len: u64,
    report: &mut ReportExtent<'_>,
) {
    let (mut at, end) = (offset, offset.saturating_add(len));
    let has_block_status = connections.first.allocation.is_some()
        && connections.shared.export.lock().allocation.is_some();
    let query = if has_block_status { StatusQuery::new(connections) } else { None };
    // The NBD protocol requires a range that is a multiple of the server's minimum block size.
    let min_block = u64::from(connections.first.min_block.max(1));
    while at < end
        && let Some(query) = &query
        && at.is_multiple_of(min_block)
    {
        let range = (end - at).min(RANGE).next_multiple_of(min_block);
        let Some(found) = query.request(at, range as u32).filter(|found| !found.is_empty()) else {
            break;
        };
        for extent in found {
            // The last extent may exceed the requested range.
            let len = extent.len.min(end - at);
            if len == 0 {
                break;
            }
            at += len;
            if !report(Extent { len, ..extent }) {
                return;
            }
        }
    }
    if at < end {
        report(Extent::data(end - at));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extents_that_do_not_read_as_zeroes_count_as_data() {
        let wire = |extents: &[(u32, u32)]| -> Vec<u8> {
            extents
                .iter()
                .flat_map(|(len, flags)| [len.to_be_bytes(), flags.to_be_bytes()])
                .flatten()
                .collect()
        };
        let reply = wire(&[
            (512, 0),
            (1024, allocation::HOLE | allocation::ZERO),
            (5, allocation::HOLE),
            (7, 2),
        ]);
        let expected = [Extent::data(512), Extent::hole(1024), Extent::data(5), Extent::hole(7)];
        assert_eq!(extents(&reply), expected);
        assert_eq!(extents(&wire(&[(1, 0), (0, 2), (9, 2)])), [Extent::data(1)]);
        assert_eq!(extents(&reply[..13]), expected[..1]);
    }
}
