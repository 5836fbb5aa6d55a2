//! Writes that the thread of a queue makes itself, which may wait a little.
//!
//! A write into the page cache can not be asked to fail rather than wait on most file systems, so
//! it is for other threads; to hand it over and back takes longer than to make it. A thread that
//! serves one queue and nothing else makes it itself, as long as none was slow lately (`Here`).
//!
//! io_uring says of such a file what it says of one that would wait this time only (`EAGAIN`), so
//! the system is asked once more by another call, which knows the difference.

use super::super::slot::{Call, Slot};
use super::{Blocking, Key, Kind, Ring};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::Instant;

impl<T> Ring<T> {
    /// The thread that has this may wait a little for a call.
    pub(crate) fn may_wait(&mut self) {
        self.blocking.here.may = true;
    }

    /// Whether [`make_here`](Self::make_here) is worth asking for a write.
    pub(crate) fn writes_here(&self) -> bool {
        self.blocking.here.may && self.blocking.writes && !self.blocking.off
    }

    /// Makes a call that others would make, as [`prepare`](Self::prepare) has it: its result.
    /// Nothing, if it is to be prepared.
    pub(crate) fn make_here(
        &mut self,
        key: Key,
        call: Call,
        skip: usize,
        offset: u64,
        len: u64,
    ) -> Option<i32> {
        let began = Instant::now();
        if !self.writes_here() || !self.blocking.here.makes(began) {
            return None;
        }
        let Self { slots, blocking, .. } = self;
        let slot = slots.get_mut(key.index as usize)?;
        if slot.generation != key.generation || slot.busy {
            return None;
        }
        if slot.gather_for(call, skip, len) != (Kind::Write { flags: 0 }) {
            return None;
        }
        let result = slot.write(&blocking.file, offset, 0);
        let now = Instant::now();
        blocking.here.took(now.saturating_duration_since(began), now);
        Some(result)
    }

    /// Finds out of writes that io_uring has given back whether every one of this file would be.
    /// One that has ended with that goes to `into`.
    pub(super) fn ask_about_writes(&mut self, into: &mut Vec<(Key, i32)>) {
        let Self { slots, busy, blocking, .. } = self;
        let Blocking { again, here, writes, file, .. } = blocking;
        again.retain(|index| {
            let slot = &mut slots[*index as usize];
            if here.can_ask || *writes || slot.kind != (Kind::Write { flags: 0 }) {
                return true;
            }
            let result = slot.write(file, slot.offset, libc::RWF_NOWAIT);
            if result < 0 {
                (*writes, here.can_ask) = learn(-result);
                return true;
            }
            here.can_ask = true;
            slot.busy = false;
            *busy -= 1;
            into.push((Key { index: *index, generation: slot.generation }, result));
            false
        });
    }
}

/// What the error number says that a write ends with which was not to wait: whether all of this
/// file are for others, and whether the file can be asked.
fn learn(error: i32) -> (bool, bool) {
    match error {
        libc::EOPNOTSUPP | libc::EINVAL => (true, false),
        // This one would have waited, and that is an answer.
        libc::EAGAIN => (false, true),
        _ => (false, false),
    }
}

impl<T> Slot<T> {
    /// Writes what was gathered: the bytes that were moved, or a negative error number.
    fn write(&self, file: &File, offset: u64, flags: i32) -> i32 {
        let count = libc::c_int::try_from(self.iovecs.len()).unwrap_or(0);
        let (pieces, offset) = (self.iovecs.as_ptr(), offset as libc::off_t);
        // SAFETY: the pieces lie in mappings that the slot holds, and it is borrowed until the call
        // returns. A kernel that has the call as well has given it back.
        let moved = unsafe { libc::pwritev2(file.as_raw_fd(), pieces, count, offset, flags) };
        if moved < 0 {
            return -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        }
        // A call moves MAX_BYTES at most.
        i32::try_from(moved).unwrap_or(i32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::slot::Memory;
    use super::super::EngineKind;
    use super::*;
    use shadowbell_memory::{Mapping, Segments};
    use std::os::unix::fs::FileExt as _;
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn a_file_that_would_have_waited_is_not_asked_again() {
        assert_eq!(learn(libc::EAGAIN), (false, true));
        assert_eq!(learn(libc::EOPNOTSUPP), (true, false));
        assert_eq!(learn(libc::EINVAL), (true, false));
        assert_eq!(learn(libc::EIO), (false, false));
    }

    #[test]
    fn writes_that_would_wait_are_made_at_once_and_nothing_else_is() {
        let memfd = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = Arc::new(File::from(memfd));
        let bytes = Mapping::anonymous(4096).unwrap().bytes();
        bytes.write_from(0, &[7; 4096]).unwrap();
        for waits in [true, false] {
            let file = Arc::clone(&file);
            let mut ring: Ring<()> = Ring::new(file, EngineKind::Uring, waits, false).unwrap();
            let key = ring.insert((), Segments::from_bytes(&bytes));
            let write = |dsync| Call::Write { from: Memory::Data, dsync, whole: false };
            assert_eq!(ring.make_here(key, write(false), 0, 512, 4096), None, "nobody may wait");
            ring.may_wait();
            let made = ring.make_here(key, write(false), 512, 512, 2048);
            assert_eq!(made, waits.then_some(2048));
            assert_eq!(ring.make_here(key, write(true), 0, 0, 4096), None);
            assert_eq!(ring.make_here(key, Call::Read(Memory::Data), 0, 0, 4096), None);
            ring.blocking.here.took(Duration::from_secs(60), Instant::now());
            assert_eq!(ring.make_here(key, write(false), 0, 0, 4096), None);
            ring.remove(key).unwrap();
        }
        let mut found = [0; 2561];
        assert_eq!(file.read_at(&mut found, 0).unwrap(), 2560);
        assert!(found[..512].iter().all(|byte| *byte == 0));
        assert!(found[512..2560].iter().all(|byte| *byte == 7));
    }
}
