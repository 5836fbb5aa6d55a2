//! Inline writes: writes that the queue's thread executes itself, if it may block briefly.
//!
//! Most file systems do not support non-blocking buffered writes, so such writes go to other
//! threads. Passing a write to another thread and back takes longer than the write itself. A thread
//! that serves only one queue therefore writes inline, unless a recent write was slow
//! (`InlineWrites`).
//!
//! `EAGAIN` of io_uring has two possible causes: the file does not support non-blocking writes, or
//! only this write would block. The error of `pwritev2` for the same write distinguishes the two.

use super::super::slot::{Call, Slot};
use super::{Blocking, Key, Kind, Ring};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::Instant;

impl<T> Ring<T> {
    /// Allows inline writes, because the thread of this ring may block briefly.
    pub(crate) fn may_wait(&mut self) {
        self.blocking.inline.may = true;
    }

    /// True if [`try_inline`](Self::try_inline) may execute a write.
    pub(crate) fn writes_inline(&self) -> bool {
        self.blocking.inline.may && self.blocking.writes && !self.blocking.off
    }

    /// Executes a write inline. The arguments are those of [`prepare`](Self::prepare). Returns the
    /// result of the call. `None` if the write was not executed and has to be prepared instead.
    pub(crate) fn try_inline(
        &mut self,
        key: Key,
        call: Call,
        skip: usize,
        offset: u64,
        len: u64,
    ) -> Option<i32> {
        let began = Instant::now();
        if !self.writes_inline() || !self.blocking.inline.allows(began) {
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
        blocking.inline.took(now.saturating_duration_since(began), now);
        Some(result)
    }

    /// Tests whether the file supports non-blocking writes, with the writes that io_uring has
    /// returned. If a write succeeds in the test, its completion is added to `into`.
    pub(super) fn probe_writes(&mut self, into: &mut Vec<(Key, i32)>) {
        let Self { slots, busy, blocking, .. } = self;
        let Blocking { retries, inline, writes, file, .. } = blocking;
        retries.retain(|index| {
            let slot = &mut slots[*index as usize];
            if inline.supports_nowait || *writes || slot.kind != (Kind::Write { flags: 0 }) {
                return true;
            }
            let result = slot.write(file, slot.offset, libc::RWF_NOWAIT);
            if result < 0 {
                (*writes, inline.supports_nowait) = support_after(-result);
                return true;
            }
            inline.supports_nowait = true;
            slot.busy = false;
            *busy -= 1;
            into.push((Key { index: *index, generation: slot.generation }, result));
            false
        });
    }
}

/// Interprets the error of a non-blocking write as two flags. The first one is true if the file
/// does not support non-blocking writes; the second is true if it does. Both are false if the error
/// shows neither.
fn support_after(error: i32) -> (bool, bool) {
    match error {
        libc::EOPNOTSUPP | libc::EINVAL => (true, false),
        // Only this write would have blocked, so the file supports the flag.
        libc::EAGAIN => (false, true),
        _ => (false, false),
    }
}

impl<T> Slot<T> {
    /// Writes the memory that the slot's `iovecs` describe. Returns the number of transferred
    /// bytes, or a negative error number.
    fn write(&self, file: &File, offset: u64, flags: i32) -> i32 {
        let count = libc::c_int::try_from(self.iovecs.len()).unwrap_or(0);
        let (pieces, offset) = (self.iovecs.as_ptr(), offset as libc::off_t);
        // SAFETY: the pieces are in mappings that the slot holds, and the slot is borrowed until
        // the call returns. If the call was passed to io_uring before, io_uring has returned it.
        let moved = unsafe { libc::pwritev2(file.as_raw_fd(), pieces, count, offset, flags) };
        if moved < 0 {
            return -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        }
        // The result fits, because a call transfers at most MAX_BYTES.
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
    fn a_file_without_nowait_is_not_tried_again() {
        assert_eq!(support_after(libc::EAGAIN), (false, true));
        assert_eq!(support_after(libc::EOPNOTSUPP), (true, false));
        assert_eq!(support_after(libc::EINVAL), (true, false));
        assert_eq!(support_after(libc::EIO), (false, false));
    }

    #[test]
    fn only_buffered_writes_are_executed_inline() {
        let memfd = rustix::fs::memfd_create("disk", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = Arc::new(File::from(memfd));
        let bytes = Mapping::anonymous(4096).unwrap().bytes();
        bytes.write_from(0, &[7; 4096]).unwrap();
        for waits in [true, false] {
            let file = Arc::clone(&file);
            let mut ring: Ring<()> = Ring::new(file, EngineKind::Uring, waits, false).unwrap();
            let key = ring.insert((), Segments::from_bytes(&bytes));
            let write = |dsync| Call::Write { from: Memory::Data, dsync, atomic: false };
            assert_eq!(
                ring.try_inline(key, write(false), 0, 512, 4096),
                None,
                "no thread may block"
            );
            ring.may_wait();
            let made = ring.try_inline(key, write(false), 512, 512, 2048);
            assert_eq!(made, waits.then_some(2048));
            assert_eq!(ring.try_inline(key, write(true), 0, 0, 4096), None);
            assert_eq!(ring.try_inline(key, Call::Read(Memory::Data), 0, 0, 4096), None);
            ring.blocking.inline.took(Duration::from_secs(60), Instant::now());
            assert_eq!(ring.try_inline(key, write(false), 0, 0, 4096), None);
            ring.remove(key).unwrap();
        }
        let mut found = [0; 2561];
        assert_eq!(file.read_at(&mut found, 0).unwrap(), 2560);
        assert!(found[..512].iter().all(|byte| *byte == 0));
        assert!(found[512..2560].iter().all(|byte| *byte == 7));
    }
}
