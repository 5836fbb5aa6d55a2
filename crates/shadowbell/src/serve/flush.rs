//! A disk's flush, waited for.

use anyhow::anyhow;
use rustix::event::{PollFd, PollFlags, poll};
use shadowbell_backend::{Disk, Op, Request, Submitted};
use shadowbell_memory::Segments;

/// Waits until everything that was written to `disk` is on stable storage.
pub(super) fn flush(disk: &dyn Disk) -> anyhow::Result<()> {
    if !disk.info().volatile_cache {
        return Ok(());
    }
    let mut queue = disk.queue()?;
    let request = Request { op: Op::Flush, offset: 0, len: 0 };
    if let Submitted::Done(outcome) = queue.submit(0, &request, &mut Segments::default()) {
        return Ok(outcome?);
    }
    queue.commit();
    let mut outcome = None;
    loop {
        queue.reap(&mut |_, result, _| outcome = Some(result));
        if let Some(outcome) = outcome {
            return Ok(outcome?);
        }
        let Some(fd) = queue.wake_fd() else { return Err(anyhow!("the flush does not end")) };
        let mut fds = [PollFd::new(&fd, PollFlags::IN)];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
