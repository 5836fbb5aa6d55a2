//! Synchronous flush of a disk.

use anyhow::{anyhow, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use shadowbell_disk::{Disk, Op, Request, Submitted};
use shadowbell_memory::Segments;
use std::time::{Duration, Instant};

/// Time limit for a flush, because a remote disk may be unreachable forever. Local disks are always
/// faster.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(600);

/// Waits until all data written to `disk` is on stable storage.
///
/// # Errors
/// The disk reports an error, or does not answer for ten minutes.
pub(super) fn flush(disk: &dyn Disk) -> anyhow::Result<()> {
    flush_within(disk, FLUSH_TIMEOUT)
}

/// Like [`flush`], with a time limit.
///
/// # Errors
/// The disk reports an error, or does not answer in time.
pub(super) fn flush_within(disk: &dyn Disk, most: Duration) -> anyhow::Result<()> {
    // A flush also waits for orphans, which a disk without a cache may have as well.
    if !disk.info().volatile_cache && disk.orphans() == 0 {
        return Ok(());
    }
    let mut queue = disk.queue()?;
    let request = Request { op: Op::Flush, offset: 0, len: 0 };
    if let Submitted::Done(outcome) = queue.submit(0, &request, &mut Segments::default()) {
        return Ok(outcome?);
    }
    queue.commit();
    let until = Instant::now() + most;
    let mut outcome = None;
    loop {
        queue.reap(&mut |_, result, _| outcome = Some(result));
        if let Some(outcome) = outcome {
            return Ok(outcome?);
        }
        let Some(fd) = queue.wake_fd() else { return Err(anyhow!("the flush does not complete")) };
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        let left = Timespec::try_from(until.saturating_duration_since(Instant::now())).ok();
        match poll(&mut fds, left.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
        if Instant::now() >= until {
            // The queue is leaked, because its drop might wait for the same flush.
            std::mem::forget(queue);
            bail!("no answer for {} s; data written last may be lost", most.as_secs());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_disk::{DiskInfo, Queue};
    use shadowbell_disk_file::NullDisk;
    use std::io::{self, PipeReader, PipeWriter};
    use std::os::fd::{AsFd, BorrowedFd};

    /// A disk that never completes a request, with this number of orphans.
    #[derive(Debug)]
    struct Mute {
        volatile_cache: bool,
        orphans: usize,
    }

    struct MuteQueue {
        woken: PipeReader,
        _writer: PipeWriter,
    }

    impl Disk for Mute {
        fn info(&self) -> DiskInfo {
            let mut info = NullDisk::new(8, 512).info();
            info.volatile_cache = self.volatile_cache;
            info
        }

        fn orphans(&self) -> usize {
            self.orphans
        }

        fn queue(&self) -> io::Result<Box<dyn Queue>> {
            let (woken, _writer) = io::pipe()?;
            Ok(Box::new(MuteQueue { woken, _writer }))
        }

        fn name(&self) -> String {
            "mute".to_owned()
        }
    }

    impl Queue for MuteQueue {
        fn submit(&mut self, _: u32, _: &Request, _: &mut Segments) -> Submitted {
            Submitted::Pending
        }

        fn wake_fd(&self) -> Option<BorrowedFd<'_>> {
            Some(self.woken.as_fd())
        }
    }

    #[test]
    fn a_disk_that_never_answers_is_not_waited_for_for_ever() {
        // The test waits until this limit expires, so it is short.
        for (volatile_cache, orphans) in [(true, 0), (false, 1)] {
            let mute = Mute { volatile_cache, orphans };
            let error = flush_within(&mute, Duration::from_millis(20)).unwrap_err();
            assert!(error.to_string().contains("may be lost"), "{error}");
        }
        let mute = Mute { volatile_cache: false, orphans: 0 };
        flush_within(&mute, Duration::from_millis(20)).unwrap();
    }
}
