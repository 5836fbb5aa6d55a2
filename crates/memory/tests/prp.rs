//! PRPs, compared with a simple implementation of the specification (Base 2.1, "PRP Entry and List
//! Layout").

mod common;

use common::{Access, BASE, GRANULE, Peer, Stretch, check, stretches};
use proptest::prelude::*;
use shadowbell_memory::{DataPointerError, Segments, View};
use shadowbell_spec::status::Status;
use shadowbell_testing::wait::LIMIT;
use std::time::Instant;

const PAGES: [usize; 5] = [4096, 8192, 16384, 32768, 65536];
/// Size of the window, enough for the pages of the largest command and its lists.
const GRANULES: usize = 512;

#[derive(Debug, PartialEq, Eq)]
enum Bad {
    Fault,
    Offset,
}

/// Reference implementation: places of `len` bytes of data, determined entry by entry as the
/// specification defines it.
fn naive(
    peer: &Peer,
    prp1: u64,
    prp2: u64,
    len: usize,
    page: usize,
    write: bool,
) -> Result<Vec<(u64, usize)>, Bad> {
    let page64 = page as u64;
    let mut data = Vec::new();
    let mut left = len;
    let mut take = |iova: u64, most: usize, left: &mut usize| {
        let n = (*left).min(most);
        // The step is small enough to check every granule of the range.
        for i in (0..n as u64).step_by(512).chain((n as u64).checked_sub(1)) {
            if !iova.checked_add(i).is_some_and(|at| peer.may(at, write)) {
                return Err(Bad::Fault);
            }
        }
        data.push((iova, n));
        *left -= n;
        Ok(())
    };
    if !prp1.is_multiple_of(4) {
        return Err(Bad::Offset);
    }
    take(prp1, (page64 - prp1 % page64) as usize, &mut left)?;
    if left == 0 {
        return Ok(data);
    }
    if left <= page {
        if !prp2.is_multiple_of(page64) {
            return Err(Bad::Offset);
        }
        take(prp2, page, &mut left)?;
        return Ok(data);
    }
    if !prp2.is_multiple_of(8) {
        return Err(Bad::Offset);
    }
    let mut at = prp2;
    while left > 0 {
        let entry = peer.get_u64(at).ok_or(Bad::Fault)?;
        if !entry.is_multiple_of(page64) {
            return Err(Bad::Offset);
        }
        let last_in_page = (at + 8).is_multiple_of(page64);
        if last_in_page && left > page {
            at = entry;
            continue;
        }
        take(entry, page, &mut left)?;
        at += 8;
    }
    Ok(data)
}

fn resolve(
    view: &View,
    (prp1, prp2): (u64, u64),
    len: usize,
    page: usize,
    write: bool,
) -> Result<Segments, DataPointerError> {
    let mut segments = Segments::new();
    view.resolve_prps(prp1, prp2, len, page, write, &mut segments).map(|()| segments)
}

/// Checks that both resolutions agree. If there is data, also checks its bytes.
fn agree(
    peer: &Peer,
    prps: (u64, u64),
    len: usize,
    page: usize,
    write: bool,
) -> Result<bool, TestCaseError> {
    let expected = naive(peer, prps.0, prps.1, len, page, write);
    match (expected, resolve(&peer.view(), prps, len, page, write)) {
        (Ok(data), Ok(segments)) => check(peer, &segments, &data, write).map(|()| true),
        // If a list has two errors, either may be reported, because the crate reads several entries
        // of a list at once.
        (Err(_), Err(_)) => Ok(false),
        (expected, got) => Err(TestCaseError::fail(format!("expected {expected:?}, got {got:?}"))),
    }
}

/// A valid data pointer: the pages of the data, and those of the lists.
#[derive(Clone, Debug)]
struct Plan {
    page: usize,
    len: usize,
    /// Offset into the first page, in dwords.
    offset: usize,
    /// Offset of the first list in its page, in entries.
    list_offset: usize,
    /// Pages of the window in the order of their use; they may repeat.
    data: Vec<usize>,
    lists: Vec<usize>,
}

impl Plan {
    /// Writes the PRP lists into the peer's memory. Returns PRP 1 and PRP 2.
    fn lay(&self, peer: &Peer) -> (u64, u64) {
        let pages = GRANULES * GRANULE / self.page;
        let address = |index: &usize| BASE + (index % pages * self.page) as u64;
        let mut data = self.data.iter().cycle().map(address);
        let mut lists = self.lists.iter().cycle().map(address);
        let offset = self.offset * 4 % self.page;
        let prp1 = data.next().unwrap() + offset as u64;
        let mut left = self.len.saturating_sub(self.page - offset).div_ceil(self.page);
        match left {
            0 => return (prp1, 0xdead_beef),
            1 => return (prp1, data.next().unwrap()),
            _ => {}
        }
        let per_page = self.page / 8;
        let mut at = lists.next().unwrap() + (self.list_offset % per_page * 8) as u64;
        let prp2 = at;
        while left > 0 {
            let last_in_page = (at + 8).is_multiple_of(self.page as u64);
            if last_in_page && left > 1 {
                let next = lists.next().unwrap();
                peer.put_u64(at, next);
                at = next;
            } else {
                peer.put_u64(at, data.next().unwrap());
                at += 8;
                left -= 1;
            }
        }
        (prp1, prp2)
    }
}

fn plan() -> impl Strategy<Value = Plan> {
    let len = prop_oneof![0..20_000usize, 0..(3usize << 20)];
    // Lists often begin at the end of a page, where a chain follows immediately.
    let list_offset = prop_oneof![Just(0), 0..1usize << 20, (1..4usize).prop_map(|n| 8192 - n)];
    let indices = || proptest::collection::vec(any::<usize>(), 1..80);
    (0..PAGES.len(), len, 0..1usize << 20, list_offset, indices(), indices()).prop_map(
        |(page, len, offset, list_offset, data, lists)| Plan {
            page: PAGES[page],
            len,
            offset,
            list_offset,
            data,
            lists,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 128, failure_persistence: None, max_shrink_iters: 400, ..ProptestConfig::default()
    })]

    /// Lists that a host would write, for memory that is mapped in any number of pieces.
    #[test]
    fn lists_resolve_to_the_naive_bytes(
        plan in plan(),
        stretches in stretches(GRANULES),
        write: bool,
        seed: u64,
    ) {
        let peer = Peer::new(&stretches);
        peer.scribble(seed);
        let prps = plan.lay(&peer);
        agree(&peer, prps, plan.len, plan.page, write)?;
    }

    /// Lists for memory without holes, nearly all of which are valid, resolve as in the reference.
    #[test]
    fn lists_over_split_maps_resolve(plan in plan(), mut stretches in stretches(GRANULES), write: bool) {
        for stretch in &mut stretches {
            stretch.access = Access::ReadWrite;
        }
        let peer = Peer::new(&stretches);
        peer.scribble(7);
        // Data and lists are in different halves of the window, because otherwise a write of data
        // would overwrite the lists.
        let pages = GRANULES * GRANULE / plan.page;
        let half = pages / 2;
        let plan = Plan {
            data: plan.data.iter().map(|i| i % half).collect(),
            lists: (half..pages).collect(),
            ..plan
        };
        let prps = plan.lay(&peer);
        prop_assert!(agree(&peer, prps, plan.len, plan.page, write)?);
    }

    /// Lists of random entries: pointers into the window, to the list itself, out of the window,
    /// and misaligned.
    #[test]
    fn garbage_is_an_error_or_data_but_never_a_panic(
        stretches in stretches(64),
        entries in proptest::collection::vec(
            prop_oneof![
                6 => (0..64u64).prop_map(|g| BASE + g * GRANULE as u64),
                1 => (0..64 * GRANULE as u64).prop_map(|o| BASE + o),
                1 => any::<u64>(),
                1 => any::<u64>().prop_map(|a| !(a % (1 << 20))),
            ],
            1..64,
        ),
        prps: (u16, u16),
        wild in proptest::option::weighted(0.1, any::<(u64, u64)>()),
        len in 0..(1usize << 20),
        page in 0..PAGES.len(),
        write: bool,
    ) {
        let peer = Peer::new(&stretches);
        for (i, entry) in entries.iter().cycle().take(peer.len() / 8).enumerate() {
            peer.put_u64(BASE + i as u64 * 8, *entry);
        }
        let near = |index: u16| {
            entries[usize::from(index) % entries.len()].wrapping_add(u64::from(index >> 12) * 4)
        };
        let prps = wild.unwrap_or((near(prps.0), near(prps.1)));
        agree(&peer, prps, len, PAGES[page], write)?;
    }
}

/// Creates a window with a list in page 0, followed by data pages.
fn one_list(page: usize) -> (Peer, u64, impl Fn(u64) -> u64) {
    let peer = Peer::plain(40 * page / GRANULE);
    let data = move |index: u64| BASE + (1 + index) * page as u64;
    for index in 0..32 {
        peer.put_u64(BASE + index * 8, data(index + 1));
    }
    (peer, BASE, data)
}

#[test]
fn each_mistake_has_its_status() {
    let invalid_offset = Status::PRP_OFFSET_INVALID.with_dnr();
    for page in PAGES {
        let (peer, list, data) = one_list(page);
        let view = peer.view();
        let status = |prps, len: usize| {
            resolve(&view, prps, len, page, true).map(|_| ()).map_err(|e| e.status())
        };
        let eight = 8 * page;
        assert_eq!(status((data(0), list), eight), Ok(()));
        assert_eq!(status((data(0) + 4, list), eight), Ok(()));
        for odd in 1..4 {
            assert_eq!(status((data(0) + odd, list), eight), Err(invalid_offset), "PRP 1");
            assert_eq!(status((data(0) + odd, 0), 1), Err(invalid_offset), "PRP 1");
        }
        for odd in 1..8 {
            assert_eq!(status((data(0), list + odd), eight), Err(invalid_offset), "list");
            let error = resolve(&view, (data(0), list + odd), eight, page, true).unwrap_err();
            assert_eq!(
                error,
                DataPointerError::PrpOffset(list + odd),
                "the list pointer is invalid, not an entry"
            );
        }
        for offset in [1, 4, 512, page as u64 - 8] {
            assert_eq!(status((data(0), data(1) + offset), 2 * page), Err(invalid_offset), "PRP 2");
            peer.put_u64(list + 16, data(3) + offset);
            assert_eq!(status((data(0), list), eight), Err(invalid_offset), "an entry");
            assert_eq!(status((data(0), list), 3 * page), Ok(()), "one that is not needed");
            peer.put_u64(list + 16, data(3));
            // The last entry of a page points to the next list, which must be aligned to a page.
            let end = list + page as u64 - 8;
            peer.put_u64(end, data(20) + offset);
            assert_eq!(status((data(0), end), eight), Err(invalid_offset), "a chain");
        }
        // If only one more entry is needed, the last entry of a page is a data pointer, and the
        // list ends.
        let end = list + page as u64 - 8;
        peer.put_u64(end, data(20));
        assert_eq!(status((data(0), end), 2 * page + 4), Err(Status::DATA_XFER_ERROR), "chained");
        assert_eq!(status((data(0), end), 2 * page), Err(invalid_offset), "PRP 2 is no list");
        assert_eq!(status((data(0) + 8, end), 2 * page - 8), Err(invalid_offset), "nor here");
    }
}

#[test]
fn unmapped_memory_is_a_transfer_error() {
    let transfer = Err(Status::DATA_XFER_ERROR);
    let page = 4096;
    // Pages 1 to 4 have data; 3 is read-only, and 4 is not mapped. Page 0 has the list.
    let stretch = |granules, access| Stretch { granules, access, apart: false };
    let peer = Peer::new(&[
        stretch(3, Access::ReadWrite),
        stretch(1, Access::Read),
        stretch(1, Access::None),
        stretch(4, Access::ReadWrite),
    ]);
    let view = peer.view();
    let at = |index: u64| BASE + index * page as u64;
    let status = |prps, len: usize, write| {
        resolve(&view, prps, len, page, write).map(|_| ()).map_err(|e| e.status())
    };
    assert_eq!(status((at(4), 0), 1, false), transfer, "PRP 1");
    assert_eq!(status((at(1), at(4)), 8192, false), transfer, "PRP 2");
    assert_eq!(status((at(1), at(4)), 3 * 4096, false), transfer, "the list");
    assert_eq!(status((0, 0), 512, false), transfer);
    assert_eq!(status((u64::MAX - 3, 0), 4, false), transfer);
    assert_eq!(status((u64::MAX - 4095, 0), 4096, true), transfer);
    assert_eq!(status((at(1), !4095), 3 * 4096, true), transfer);
    peer.put_u64(at(0), at(2));
    peer.put_u64(at(0) + 8, at(3));
    assert_eq!(status((at(1), at(0)), 3 * 4096, false), Ok(()), "a write command reads the page");
    assert_eq!(
        status((at(1), at(0)), 3 * 4096, true),
        transfer,
        "a read command may not write the page"
    );
    assert_eq!(status((at(1), at(3)), 2 * 4096, true), transfer);
    // The list may be read-only, because the device only reads it.
    peer.put_u64(at(3), at(2));
    peer.put_u64(at(3) + 8, at(5));
    assert_eq!(status((at(1), at(3)), 3 * 4096, true), Ok(()));
    // After a failed resolution, there is no data, and the view is not held.
    let watch = {
        let view = peer.view();
        let watch = view.watch();
        let mut segments = Segments::new();
        assert!(view.resolve_prps(at(1), at(4), 8192, page, true, &mut segments).is_err());
        assert!(segments.is_empty() && segments.pieces().is_empty());
        drop(view);
        assert!(watch.is_idle());
        watch
    };
    assert!(watch.is_idle());
}

#[test]
fn a_list_that_points_at_itself_ends_with_the_data() {
    for page in PAGES {
        let peer = Peer::plain(2 * page / GRANULE);
        for slot in 0..page as u64 / 8 {
            peer.put_u64(BASE + slot * 8, BASE);
        }
        let since = Instant::now();
        let len = 256 << 20;
        let segments = resolve(&peer.view(), (BASE, BASE), len, page, true).unwrap();
        assert_eq!(segments.len(), len);
        // The list begins at the last entry of the page, so that each list consists only of the
        // pointer to the next.
        let end = BASE + page as u64 - 8;
        assert!(resolve(&peer.view(), (BASE, end), len, page, true).is_ok());
        assert!(since.elapsed() < LIMIT);
    }
}
