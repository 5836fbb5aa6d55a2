//! Bytes from one place of the disk to another.

use crate::buffers::Lease;
use crate::device::BlockDevice;
use crate::error::BlockError;
use crate::flight::Flight;
use crate::locks::RangeGuard;
use crate::operations::{Edge, Write, is_refusal, put};
use crate::stream::MAX_BLOCKS;
use shadowbell_driver::{Command, CopyLimits};
use shadowbell_spec::nvm::CopyRange;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use zerocopy::IntoBytes;

/// A copy of whole blocks of the destination, and in which order it has to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Course {
    from: u64,
    to: u64,
    len: u64,
    /// The last bytes first: the destination begins inside of the source.
    backward: bool,
    /// How far what is written may be ahead of what was read: the distance of source and destination
    /// if they overlap, and else no limit.
    reach: u64,
}

impl Course {
    fn of(from: u64, to: u64, len: u64) -> Self {
        let distance = from.abs_diff(to);
        let overlaps = distance < len;
        let reach = if overlaps { distance } else { u64::MAX };
        Self { from, to, len, backward: overlaps && to > from, reach }
    }

    /// The part of this course that writes the bytes from `start` to `end`.
    fn part(self, start: u64, end: u64) -> Self {
        let from = start - self.to + self.from;
        Self { from, to: start, len: end.saturating_sub(start), ..self }
    }

    /// Where `len` bytes are that are copied after `done` others: at the source and at the
    /// destination.
    fn at(self, done: u64, len: u64) -> (u64, u64) {
        let skip = if self.backward { self.len - done - len } else { done };
        (self.from + skip, self.to + skip)
    }
}

impl BlockDevice {
    /// Copies `len` bytes from `from` to `to`. The two may overlap: the destination holds afterwards
    /// what the source held before.
    ///
    /// Whole blocks that move by whole blocks are copied by the controller itself, if it can
    /// ([`Geometry::copy`](crate::Geometry)); everything else is read and written. Other requests on
    /// the source happen before or after, block for block, as they would with a read; to others, the
    /// destination is written.
    ///
    /// Each command copies between places that do not overlap, so that the driver may submit it again
    /// when its completion is lost.
    ///
    /// # Errors
    /// [`BlockError`]. Some of the bytes may be copied then, and of a source that overlaps the
    /// destination some may be lost.
    pub async fn copy(&self, from: u64, to: u64, len: u64) -> Result<(), BlockError> {
        self.range(from, len)?;
        let range = self.change(to, len)?;
        if from == to {
            return Ok(());
        }
        let Some(guard) = self.lock(&range).await else { return Ok(()) };
        let course = Course::of(from, to, len);
        let whole = course.part(range.first_whole, range.end_whole);
        // The parts of blocks at both ends have their turns where they are.
        let before = |edge: &Edge| (edge.at < range.first_whole) != course.backward;
        for edge in range.edges().filter(before) {
            self.copy_edge(course, edge, &guard).await?;
        }
        self.copy_whole(whole, &guard).await?;
        for edge in range.edges().filter(|edge| !before(edge)) {
            self.copy_edge(course, edge, &guard).await?;
        }
        Ok(())
    }

    async fn copy_edge(
        &self,
        course: Course,
        edge: Edge,
        guard: &Arc<RangeGuard>,
    ) -> Result<(), BlockError> {
        let mut bytes = vec![0; edge.len];
        self.read(edge.at - course.to + course.from, &mut bytes).await?;
        self.modify(edge, &bytes, false, guard).await
    }

    async fn copy_whole(&self, course: Course, guard: &Arc<RangeGuard>) -> Result<(), BlockError> {
        let mut done = 0;
        if let Some(limits) = self.copies_itself(course) {
            let (copied, outcome) = self.copy_by_command(course, limits, guard).await;
            match outcome {
                Err(error) if is_refusal(&error) => self.forget_copy(),
                outcome => outcome?,
            }
            done = copied;
        }
        self.copy_by_hand(course, done, guard).await
    }

    /// What the controller's commands may be, if it is to copy this.
    fn copies_itself(&self, course: Course) -> Option<CopyLimits> {
        if !self.inner().copies.load(Ordering::Relaxed) || course.len == 0 {
            return None;
        }
        let lane = self.lane().ok()?;
        let block = u64::from(self.geometry().block_size);
        // Of places that overlap, commands copy no more than their distance: if that is small, reading
        // and writing takes fewer of them.
        let worth_it = course.reach >= lane.large.size() as u64;
        let limits = self.namespace().ok()?.copy_limits()?;
        (course.from.is_multiple_of(block) && worth_it).then_some(CopyLimits {
            // As many as the buffer has room for.
            ranges: limits.ranges.min(lane.small.size() / size_of::<CopyRange>()),
            ..limits
        })
    }

    /// Has the controller copy whole blocks, with several commands under way. It returns when nothing
    /// is under way any more: how many bytes were copied, in the order of the course, and why it is
    /// not all of them.
    async fn copy_by_command(
        &self,
        course: Course,
        limits: CopyLimits,
        guard: &Arc<RangeGuard>,
    ) -> (u64, Result<(), BlockError>) {
        let block = u64::from(self.geometry().block_size);
        let most = u64::from(limits.most()).min(MAX_BLOCKS) * block;
        let step = most.min(course.reach / block * block).max(block);
        let mut window: VecDeque<(u64, Flight)> = VecDeque::with_capacity(self.inner().window);
        let (mut done, mut next, mut outcome) = (0, 0, Ok(()));
        loop {
            while outcome.is_ok() && next < course.len && window.len() < self.inner().window {
                let end = course.len.min(next + step);
                // Whoever is under way must not have its source written by the next.
                if end - done > course.reach {
                    break;
                }
                let lease = match self.copy_lease(window.is_empty()).await {
                    Ok(Some(lease)) => lease,
                    Ok(None) => break,
                    Err(error) => {
                        outcome = Err(error);
                        break;
                    }
                };
                match self.launch_copy(
                    course.at(next, end - next),
                    end - next,
                    limits,
                    lease,
                    guard,
                ) {
                    Ok(mut flight) => {
                        flight.submit().await;
                        window.push_back((end, flight));
                    }
                    Err(error) => outcome = Err(error),
                }
                next = end;
            }
            let Some((end, flight)) = window.pop_front() else { break };
            let landed = flight.await.map(drop);
            if outcome.is_ok() && landed.is_ok() {
                done = end;
            }
            outcome = outcome.and(landed);
        }
        (done, outcome)
    }

    /// A buffer for source ranges. Who has one already does not wait for another.
    async fn copy_lease(&self, alone: bool) -> Result<Option<Lease>, BlockError> {
        let small = &self.lane()?.small;
        match small.try_take() {
            None if alone => small.take().await.map(Some),
            lease => Ok(lease),
        }
    }

    fn launch_copy(
        &self,
        (from, to): (u64, u64),
        len: u64,
        limits: CopyLimits,
        mut lease: Lease,
        guard: &Arc<RangeGuard>,
    ) -> Result<Flight, BlockError> {
        let lane = self.lane()?;
        let namespace = lane.disk.namespace();
        // A step is as long as the limits allow, which are of 32 bits.
        let blocks = u32::try_from(namespace.blocks_in(len)?).unwrap_or(u32::MAX);
        let sources: Vec<CopyRange> = limits.split(namespace.blocks_in(from)?, blocks).collect();
        put(&mut lease, sources.as_bytes())?;
        let command: Command = namespace.copy(namespace.blocks_in(to)?, &sources)?;
        let orphans = &self.inner().orphans;
        let guard = Some(Arc::clone(guard));
        Ok(Flight::new(lane.disk.queue(), command, Some(lease), guard, orphans))
    }

    /// Reads and writes whole blocks of the destination, after the first `done` bytes of the course.
    async fn copy_by_hand(
        &self,
        course: Course,
        mut done: u64,
        guard: &Arc<RangeGuard>,
    ) -> Result<(), BlockError> {
        if done >= course.len {
            return Ok(());
        }
        // As much as is under way at the same time. All of a piece is read before any is written.
        let inner = self.inner();
        let piece = self.lane()?.large.size().saturating_mul(inner.window) as u64;
        let mut memory = vec![0; usize::try_from(piece.min(course.len - done)).unwrap_or(0)];
        while done < course.len {
            let len = piece.min(course.len - done);
            let (from, to) = course.at(done, len);
            let data = memory.get_mut(..len as usize).ok_or(BlockError::Buffer)?;
            self.read(from, data).await?;
            let mut parts = Write { offset: to, from: data, fua: false };
            self.stream(to, to + len, Some(guard), &mut parts).await?;
            done += len;
        }
        Ok(())
    }

    /// The controller refused Copy: from now on, bytes are read and written.
    fn forget_copy(&self) {
        if self.inner().copies.swap(false, Ordering::Relaxed) {
            tracing::warn!("the controller refuses Copy; bytes are read and written instead");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_is_copied_in_the_order_that_reads_before_it_writes() {
        let course = |from, to, len| {
            let Course { backward, reach, .. } = Course::of(from, to, len);
            (backward, reach)
        };
        assert_eq!(course(0, 1000, 1000), (false, u64::MAX));
        assert_eq!(course(1000, 0, 1000), (false, u64::MAX));
        assert_eq!(course(0, 999, 1000), (true, 999));
        assert_eq!(course(999, 0, 1000), (false, 999));
        assert_eq!(course(0, 1, 1000), (true, 1));
    }

    #[test]
    fn parts_keep_the_distance() {
        let part = Course::of(100, 1000, 50).part(1010, 1030);
        assert_eq!((part.from, part.to, part.len), (110, 1010, 20));
        assert_eq!((part.at(0, 5), part.at(15, 5)), ((110, 1010), (125, 1025)));
        let part = Course::of(980, 1000, 50).part(1010, 1030);
        assert_eq!((part.at(0, 5), part.at(15, 5)), ((1005, 1025), (990, 1010)));
        // Nothing is left of it between two edges.
        assert_eq!(Course::of(100, 1000, 5).part(1024, 1024).len, 0);
    }

    proptest::proptest! {
        /// In the order of the course, a piece at a time, it comes to what a copy of all at once does.
        #[test]
        fn the_order_is_right(from in 0usize..64, to in 0usize..64, len in 0usize..64, piece in 1u64..9) {
            let mut bytes: Vec<usize> = (0..128).collect();
            let mut expected = bytes.clone();
            expected.copy_within(from..from + len, to);
            let course = Course::of(from as u64, to as u64, len as u64);
            let mut done = 0;
            while done < course.len {
                let now = piece.min(course.len - done);
                let (from, to) = course.at(done, now);
                bytes.copy_within(from as usize..(from + now) as usize, to as usize);
                done += now;
            }
            assert_eq!(bytes, expected);
        }
    }
}
