//! Change of the DMA map under requests in flight: see [`ViewChange`].

use crate::dma::View;
use crate::host_ranges::Ranges;

/// State of a request's data after a change of the DMA map, from
/// [`Segments::move_to`](crate::Segments::move_to).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterChange {
    /// The request now refers to its data through the new map, and no longer holds the old one.
    Moved,
    /// Some of the data is in memory that is no longer mapped.
    Unmapped,
    /// The request still refers to its data through the old map, because it is not known whether
    /// the new map contains the data.
    Unknown,
}

/// Change of a queue's [`View`]: moves the data of requests in flight to the new view.
///
/// The owner of unmapped memory waits until no request uses an older view. So a request that waits
/// for hung storage would delay every unmap, also of memory that it does not use. A disk that
/// copies data can avoid this: it moves its requests to the new view, and ends the requests whose
/// memory is unmapped.
#[derive(Debug)]
pub struct ViewChange {
    view: View,
    /// Old view of the most recent call of `state`, and the memory of those mappings in it that the
    /// new view does not contain.
    old: Option<(View, Ranges)>,
    /// Memory of the new map.
    mapped: Option<Ranges>,
    /// Writable memory of the new map.
    writable: Option<WritableMaps>,
}

/// Writable maps, sorted by their addresses in this process. Several maps may contain the same
/// memory.
#[derive(Debug)]
struct WritableMaps {
    /// I/O virtual address, first address, and address after the last.
    maps: Vec<(u64, usize, usize)>,
    /// Highest end address of each map and those before it.
    ends: Vec<usize>,
}

impl WritableMaps {
    fn of(view: &View) -> Self {
        let maps = view.table().writable_maps();
        let mut maps: Vec<_> = maps.map(|(iova, (start, end))| (iova, start, end)).collect();
        maps.sort_unstable_by_key(|(_, start, _)| *start);
        let ends = maps.iter().scan(0, |highest: &mut usize, (.., end)| {
            *highest = (*highest).max(*end);
            Some(*highest)
        });
        let ends = ends.collect();
        Self { maps, ends }
    }

    /// Calls `each` with the I/O virtual addresses of `[from, to)`: the first one, and the length.
    fn find(&self, from: usize, to: usize, mut each: impl FnMut(u64, u64)) {
        let below = self.maps.partition_point(|(_, start, _)| *start < to);
        let maps = self.maps.iter().zip(&self.ends).take(below).rev();
        for ((iova, start, end), _) in maps.take_while(|(_, highest)| **highest > from) {
            let (first, last) = (from.max(*start), to.min(*end));
            if first < last {
                each(iova + (first - start) as u64, (last - first) as u64);
            }
        }
    }
}

impl ViewChange {
    /// Creates the change to `view`.
    #[must_use]
    pub fn new(view: &View) -> Self {
        Self { view: view.clone(), old: None, mapped: None, writable: None }
    }

    /// View after the change.
    pub(crate) fn view(&self) -> &View {
        &self.view
    }

    /// State of the memory `pieces` (address and length), which is resolved through `old`. If the
    /// request `writes` to the memory, and writes are logged, the new view records its pages.
    pub(crate) fn state(
        &mut self,
        old: &View,
        pieces: impl Iterator<Item = (usize, usize)> + Clone,
        writes: bool,
    ) -> AfterChange {
        let all = pieces.clone();
        let mut pieces = pieces;
        let Self { view, old: known, mapped, writable } = self;
        let (_, removed) = match known {
            Some(known) if known.0.is(old) => known,
            known => known.insert((old.clone(), old.table().removed_by(view.table()))),
        };
        let Some((start, len)) = pieces.find(|(at, len)| removed.overlap(*at, at + len)) else {
            if writes && view.table().is_logged() {
                let writable = writable.get_or_insert_with(|| WritableMaps::of(view));
                all.for_each(|(at, len)| {
                    writable.find(at, at + len, |iova, len| view.record_write(iova, len));
                });
            }
            return AfterChange::Moved;
        };
        // Memory that was mapped twice may still be mapped once. It is not known by which of the
        // two mappings the request addresses it.
        let mapped = mapped.get_or_insert_with(|| view.table().host_ranges());
        let is_mapped = |(at, len): (usize, usize)| mapped.overlap(at, at + len);
        let mut unmapped = std::iter::once((start, len)).chain(pieces);
        match unmapped.any(|piece| removed.overlap(piece.0, piece.0 + piece.1) && !is_mapped(piece))
        {
            true => AfterChange::Unmapped,
            false => AfterChange::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DmaSpace, Mapping, Segments};
    use std::sync::Arc;

    /// Data in memory that stays mapped moves to the new view, so that the old one is released.
    #[test]
    fn data_follow_a_change_of_other_memory() {
        let mut space = DmaSpace::default();
        let pages = Mapping::anonymous(8 * 4096).unwrap().bytes();
        for n in 0..8 {
            let page = pages.slice(n * 4096, 4096).unwrap();
            space.map(n as u64 * 8192, 4096, &page).unwrap();
        }
        let old = View::new(Arc::clone(space.table()));
        let resolve = |view: &View, n: u64| {
            let mut data = Segments::new();
            data.resolve_ranges(view, &[(n * 8192 + 512, 1024)], true).unwrap();
            data
        };
        let (mut first, mut third) = (resolve(&old, 0), resolve(&old, 2));
        let watch = old.watch();
        drop(old);
        space.unmap(2 * 8192, 4096).unwrap();
        let view = View::new(Arc::clone(space.table()));
        let mut change = ViewChange::new(&view);
        assert_eq!(first.move_to(&mut change), AfterChange::Moved);
        assert_eq!(third.move_to(&mut change), AfterChange::Unmapped);
        assert!(third.is_empty() && third.write_from(0, &[1]).is_none());
        drop(change);
        assert!(watch.is_idle(), "a request still uses the old map");
        first.write_from(0, &[7; 1024]).unwrap();
        assert_eq!(pages.read::<u8>(512), Some(7));
        // The memory is held by the new view: it stays mapped until the request has ended.
        let watch = view.watch();
        drop(view);
        space.clear();
        assert!(!watch.is_idle());
        first.write_from(0, &[8; 1024]).unwrap();
        drop(first);
        assert!(watch.is_idle());
    }

    /// Memory that is mapped twice and unmapped once: the request may have used the mapping that is
    /// left, so it keeps the old view.
    #[test]
    fn data_in_memory_with_two_maps_keep_the_old_view() {
        let mut space = DmaSpace::default();
        let page = Mapping::anonymous(4096).unwrap().bytes();
        space.map(0, 4096, &page).unwrap();
        space.map(8192, 4096, &page).unwrap();
        let old = View::new(Arc::clone(space.table()));
        let mut data = Segments::new();
        data.resolve_ranges(&old, &[(8192, 512)], true).unwrap();
        space.unmap(0, 4096).unwrap();
        let change = |space: &DmaSpace| ViewChange::new(&View::new(Arc::clone(space.table())));
        assert_eq!(data.move_to(&mut change(&space)), AfterChange::Unknown);
        assert_eq!(data.len(), 512);
        space.unmap(8192, 4096).unwrap();
        assert_eq!(data.move_to(&mut change(&space)), AfterChange::Unmapped);
    }

    /// Data that a request writes later are in the log of the view to which they have moved: of
    /// each map that contains the memory.
    #[test]
    fn data_in_a_logged_map_are_logged_by_the_new_view() {
        let mut space = DmaSpace::default();
        let pages = Mapping::anonymous(4 * 4096).unwrap().bytes();
        space.map(1 << 20, 4 * 4096, &pages).unwrap();
        space.map(8 << 20, 4096, &pages.slice(4096, 4096).unwrap()).unwrap();
        let old = View::new(Arc::clone(space.table()));
        let resolve = |iova: u64, write| {
            let mut data = Segments::new();
            data.resolve_ranges(&old, &[(iova, 4096)], write).unwrap();
            data
        };
        let (mut read, mut write) =
            (resolve((1 << 20) + 4096 + 512, true), resolve(1 << 20, false));
        let watch = old.watch();
        drop(old);
        space.start_log();
        let written = |view: View, space: &DmaSpace| {
            view.flush_log();
            let mut bitmap = [0; 64];
            space.log().unwrap().take(0, 16 << 20, 4096, &mut bitmap);
            let pages = bitmap.iter().enumerate().flat_map(|(nth, word)| {
                (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| nth * 64 + bit)
            });
            pages.collect::<Vec<_>>()
        };
        // Each view that the read has, one after the other, logs the pages.
        for _ in 0..3 {
            let view = View::new(Arc::clone(space.table()));
            let mut change = ViewChange::new(&view);
            assert_eq!(read.move_to(&mut change), AfterChange::Moved);
            assert_eq!(write.move_to(&mut change), AfterChange::Moved);
            drop(change);
            assert!(watch.is_idle(), "a request still uses the old map");
            assert_eq!(written(view, &space), [257, 258, 2048]);
        }
    }
}
