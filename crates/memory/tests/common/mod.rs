//! Memory of a simulated peer: mapped through the crate under test, and for comparison as a list of
//! granules.
#![allow(dead_code, reason = "each test binary uses its part")]

use proptest::prelude::*;
use shadowbell_memory::{DmaSpace, Mapping, Protection, Segments, SharedBytes, View};
use std::sync::Arc;

/// Unit in which memory is mapped, independent of the controller's page size.
pub(crate) const GRANULE: usize = 4096;
/// First address of the window that may be mapped. It is not 0, so that the tests detect a
/// confusion of addresses and offsets.
pub(crate) const BASE: u64 = 0x7_0000_0000;

/// Access to a granule of the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    None,
    Read,
    ReadWrite,
}

/// Consecutive granules that are mapped by one call. If `apart` is true, their memory is elsewhere
/// in this process, so that it is not contiguous with that of the neighbours.
#[derive(Clone, Debug)]
pub(crate) struct Stretch {
    pub(crate) granules: usize,
    pub(crate) access: Access,
    pub(crate) apart: bool,
}

pub(crate) struct Peer {
    space: DmaSpace,
    /// Memory of each granule of the window, `None` if it is not mapped. The test can write to it
    /// even if the peer's mapping is read-only.
    backing: Vec<Option<SharedBytes>>,
    pub(crate) access: Vec<Access>,
}

impl Peer {
    pub(crate) fn new(stretches: &[Stretch]) -> Self {
        let total: usize = stretches.iter().map(|s| s.granules).sum();
        // Maps without `apart` are consecutive in this pool.
        let pool = Mapping::shared("pool", (total * GRANULE) as u64).unwrap();
        let mut peer = Self { space: DmaSpace::default(), backing: Vec::new(), access: Vec::new() };
        let mut from_pool = 0;
        for stretch in stretches {
            let len = stretch.granules * GRANULE;
            let iova = BASE + (peer.access.len() * GRANULE) as u64;
            let owner = if stretch.apart {
                Mapping::shared("apart", len as u64).unwrap()
            } else {
                Arc::clone(&pool)
            };
            let offset = if stretch.apart { 0 } else { from_pool };
            let writable = owner.bytes().slice(offset, len).unwrap();
            match stretch.access {
                Access::None => {}
                Access::ReadWrite => peer.space.map(iova, len as u64, &writable).unwrap(),
                Access::Read => {
                    let fd = owner.fd().unwrap();
                    let read_only =
                        Mapping::from_fd(fd, offset as u64, len as u64, Protection::Read).unwrap();
                    peer.space.map(iova, len as u64, &read_only.bytes()).unwrap();
                }
            }
            from_pool += if stretch.apart { 0 } else { len };
            for granule in 0..stretch.granules {
                let bytes = writable.slice(granule * GRANULE, GRANULE).unwrap();
                peer.backing.push((stretch.access != Access::None).then_some(bytes));
                peer.access.push(stretch.access);
            }
        }
        peer
    }

    /// A peer whose whole window of `granules` is one writable map.
    pub(crate) fn plain(granules: usize) -> Self {
        Self::new(&[Stretch { granules, access: Access::ReadWrite, apart: false }])
    }

    pub(crate) fn view(&self) -> View {
        View::new(Arc::clone(self.space.table()))
    }

    pub(crate) fn len(&self) -> usize {
        self.access.len() * GRANULE
    }

    /// Contents of the window, with zeroes for unmapped parts.
    pub(crate) fn content(&self) -> Vec<u8> {
        let mut all = vec![0; self.len()];
        for (granule, bytes) in self.backing.iter().enumerate() {
            if let Some(bytes) = bytes {
                let at = granule * GRANULE;
                bytes.read_into(0, &mut all[at..at + GRANULE]).unwrap();
            }
        }
        all
    }

    /// Writes bytes into the window, even to read-only parts. Unmapped parts are skipped.
    pub(crate) fn put(&self, iova: u64, data: &[u8]) {
        for (i, byte) in data.iter().enumerate() {
            let at = (iova - BASE) as usize + i;
            if let Some(Some(bytes)) = self.backing.get(at / GRANULE) {
                bytes.write(at % GRANULE, byte).unwrap();
            }
        }
    }

    pub(crate) fn put_u64(&self, iova: u64, value: u64) {
        self.put(iova, &value.to_le_bytes());
    }

    /// Fills the mapped memory with pseudo-random bytes.
    pub(crate) fn scribble(&self, seed: u64) {
        let mut state = seed | 1;
        for bytes in self.backing.iter().flatten() {
            let noise: Vec<u8> = (0..GRANULE)
                .map(|_| {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    (state >> 24) as u8
                })
                .collect();
            bytes.write_from(0, &noise).unwrap();
        }
    }

    pub(crate) fn may(&self, iova: u64, write: bool) -> bool {
        let granule = iova.checked_sub(BASE).map(|offset| offset / GRANULE as u64);
        match granule.and_then(|g| self.access.get(usize::try_from(g).ok()?)) {
            Some(Access::ReadWrite) => true,
            Some(Access::Read) => !write,
            _ => false,
        }
    }

    /// Simple reference: reads byte by byte.
    pub(crate) fn get(&self, iova: u64, len: usize) -> Option<Vec<u8>> {
        (0..len as u64)
            .map(|i| {
                let at = iova.checked_add(i).filter(|at| self.may(*at, false))?;
                let offset = (at - BASE) as usize;
                self.backing[offset / GRANULE].as_ref()?.read(offset % GRANULE)
            })
            .collect()
    }

    pub(crate) fn get_u64(&self, iova: u64) -> Option<u64> {
        Some(u64::from_le_bytes(self.get(iova, 8)?.try_into().ok()?))
    }
}

pub(crate) fn stretches(granules: usize) -> impl Strategy<Value = Vec<Stretch>> {
    let access = prop_oneof![
        12 => Just(Access::ReadWrite),
        1 => Just(Access::Read),
        1 => Just(Access::None),
    ];
    proptest::collection::vec((1..40usize, access, any::<bool>()), 1..24).prop_map(move |parts| {
        let mut left = granules;
        let mut stretches = Vec::new();
        for (n, access, apart) in parts {
            let n = n.min(left);
            if n > 0 {
                stretches.push(Stretch { granules: n, access, apart });
            }
            left -= n;
        }
        if left > 0 {
            let (access, apart) = (Access::ReadWrite, false);
            stretches.push(Stretch { granules: left, access, apart });
        }
        stretches
    })
}

/// Compares resolved segments with the expected places of the data (IOVA and length). Also checks
/// the bytes that are read, and those that are written, through the segments.
pub(crate) fn check(
    peer: &Peer,
    segments: &Segments,
    expected: &[(u64, usize)],
    write: bool,
) -> Result<(), TestCaseError> {
    let len: usize = expected.iter().map(|(_, len)| len).sum();
    prop_assert_eq!(segments.len(), len);
    prop_assert_eq!(segments.pieces().iter().map(|p| p.len()).sum::<usize>(), len);
    let mut memory = peer.content();
    let mut wanted = Vec::with_capacity(len);
    for (iova, n) in expected {
        let at = (iova - BASE) as usize;
        wanted.extend_from_slice(&memory[at..at + n]);
    }
    let mut got = vec![0; len];
    segments.read_into(0, &mut got).unwrap();
    prop_assert!(got == wanted, "the resolved bytes differ");
    prop_assert!(segments.read_into(len, &mut [0]).is_none(), "there is more than that");
    // Reads and copies parts of the data that start and end inside any segment.
    let scratch = Mapping::anonymous(len as u64 + 1).unwrap().bytes();
    for part in 1..9 {
        let offset = len * part / 9;
        let n = (len - offset) / (part % 3 + 1);
        let mut got = vec![0; n];
        segments.read_into(offset, &mut got).unwrap();
        prop_assert!(got == wanted[offset..offset + n], "the bytes from {} differ", offset);
        segments.copy_to(offset, &scratch, 1, n).unwrap();
        scratch.read_into(1, &mut got).unwrap();
        prop_assert!(got == wanted[offset..offset + n], "the copy from {} differs", offset);
    }
    if !write {
        prop_assert!(segments.is_empty() || segments.write_from(0, &[0]).is_none());
        return Ok(());
    }
    // The writes are in order. If two ranges overlap, the later one determines the bytes on both
    // sides.
    let fresh: Vec<u8> = (0..len).map(|i| ((i * 31) >> 3) as u8 ^ 0x5a).collect();
    // Each piece of the data is written by one of the methods.
    let (third, half) = (len / 3, len / 2);
    segments.write_from(0, &fresh[..third]).unwrap();
    segments.write_from(third, &fresh[third..half]).unwrap();
    scratch.write_from(1, &fresh[half..]).unwrap();
    segments.copy_from(half, &scratch, 1, len - half).unwrap();
    let mut done = 0;
    for (iova, n) in expected {
        let at = (iova - BASE) as usize;
        memory[at..at + n].copy_from_slice(&fresh[done..done + n]);
        done += n;
    }
    prop_assert!(peer.content() == memory, "a write changed other bytes than the data's");
    Ok(())
}
