//! Memory disk with atomic compare-and-write.

use shadowbell_disk::{Disk, DiskError, DiskInfo, Op, Queue, Request, Submitted};
use shadowbell_memory::Segments;
use std::io;
use std::sync::Arc;

/// Wrapper of a memory disk. The wrapper completes all requests inline.
#[derive(Debug)]
pub(crate) struct OneStep(pub(crate) Arc<dyn Disk>);

impl Disk for OneStep {
    fn info(&self) -> DiskInfo {
        self.0.info()
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(OneStepQueue(self.0.queue()?)))
    }

    fn name(&self) -> String {
        self.0.name()
    }

    fn inner(&self) -> Option<&Arc<dyn Disk>> {
        Some(&self.0)
    }
}

struct OneStepQueue(Box<dyn Queue>);

impl Queue for OneStepQueue {
    fn submit(&mut self, tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        let Op::CompareAndWrite { fua } = request.op else {
            return self.0.submit(tag, request, data);
        };
        let len = request.len as usize;
        let mut new = Segments::new();
        if data.select((len, len), 2 * len, 1, &mut new).is_none() {
            return Submitted::Done(Err(DiskError::BadBuffer));
        }
        match self.0.submit(tag, &Request { op: Op::Compare, ..*request }, data) {
            Submitted::Done(Ok(())) => {
                self.0.submit(tag, &Request { op: Op::Write { fua }, ..*request }, &mut new)
            }
            other => other,
        }
    }

    fn compares_and_writes(&self) -> bool {
        true
    }
}
