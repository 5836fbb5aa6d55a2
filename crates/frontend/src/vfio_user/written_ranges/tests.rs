//! Tests of the range table in shared memory: a recovery restores exactly the ranges of the last
//! checkpoint, even if the table was changed afterwards.

use super::super::files::Files;
use super::*;
use shadowbell_memory::FileStatus;
use shadowbell_vfio_user::descriptor::PeerFd;

const PAGE: u64 = 4096;
const MAX_RANGES: u32 = 64;

/// Pseudo-random number generator (xorshift64).
struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most
    }
}

fn file() -> Arc<PeerFd> {
    let fd = rustix::fs::memfd_create("file", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&fd, PAGE).unwrap();
    Arc::new(PeerFd::new(fd, &Arc::default()))
}

fn inode(fd: impl AsFd) -> u64 {
    FileStatus::of(&fd).unwrap().inode
}

/// Range that the test has added, and its file.
#[derive(Clone)]
struct Shared {
    len: u64,
    offset: u64,
    writable: bool,
    file: Option<Arc<RetainedFile>>,
}

type Seen = Vec<(u64, u64, u64, bool, Option<u64>)>;

fn seen(shared: &BTreeMap<u64, Shared>) -> Seen {
    let one = |(iova, it): (&u64, &Shared)| {
        (
            *iova,
            it.len,
            it.offset,
            it.writable,
            it.file.as_ref().map(|retained| inode(&*retained.fd)),
        )
    };
    shared.iter().map(one).collect()
}

#[test]
fn changes_after_the_last_record_do_not_count() {
    for seed in 1..=40 {
        let mut random = Random(seed);
        let mut files = Files::default();
        let mut written = WrittenRanges::new(MAX_RANGES, 0).unwrap();
        let mut now: BTreeMap<u64, Shared> = BTreeMap::new();
        let mut lasting: BTreeMap<u64, OwnedFd> = BTreeMap::new();
        let mut last: Option<(SavedRanges, OwnedFd, Seen)> = None;
        let some = [file(), file(), file()];
        for _ in 0..600 {
            match random.below(10) {
                0..5 if now.len() < MAX_RANGES as usize => {
                    let iova = random.below(1000) * PAGE;
                    if now.contains_key(&iova) {
                        continue;
                    }
                    let protection = [Protection::Read, Protection::ReadWrite];
                    let protection = protection[random.below(2) as usize];
                    // The range gets a known file, a new file, or no file.
                    let file = match random.below(4) {
                        0 => None,
                        1 => files.retain_file(&file(), protection),
                        _ => files.retain_file(&some[random.below(3) as usize], protection),
                    };
                    let (len, offset) = (random.below(9) + 1, random.below(1 << 40));
                    let writable = protection == Protection::ReadWrite;
                    let it = Shared { len, offset, writable, file };
                    let (file, is_mapped) = (it.file.as_ref(), it.file.is_some());
                    written.add((iova, len), (file, offset), is_mapped, protection);
                    now.insert(iova, it);
                }
                5..8 => {
                    let nth = random.below(now.len().max(1) as u64) as usize;
                    let Some(iova) = now.keys().nth(nth).copied() else { continue };
                    let it = now.remove(&iova).unwrap();
                    written.remove(iova, it.file.as_ref(), it.file.is_some());
                }
                8 => {
                    let mut fds = Descriptors::default();
                    let saved = written.record(&mut fds).unwrap();
                    for change in fds.take_changes() {
                        match change {
                            LastingChange::Put(number, fd) => {
                                assert!(lasting.insert(number, fd).is_none());
                            }
                            LastingChange::Remove(number) => {
                                lasting.remove(&number).unwrap();
                            }
                        }
                    }
                    let memory = fds.into_fds().pop().unwrap();
                    last = Some((saved, memory, seen(&now)));
                }
                _ => {}
            }
            // Simulates a crash: restores the last checkpoint, with the table as it is now.
            let Some((saved, memory, expected)) = &last else { continue };
            let mut fds = Descriptors::default();
            let at = fds.add(memory.try_clone().unwrap());
            let saved = SavedRanges { memory: at, sequence: saved.sequence, slots: saved.slots };
            for (number, fd) in &lasting {
                fds.add_lasting(*number, fd.try_clone().unwrap());
            }
            let (mut ranges, files) = read(&saved, &mut fds).unwrap();
            ranges.sort_by_key(|range| range.iova);
            let found = ranges.into_iter().map(|range| {
                let file = range.file.map(|number| inode(&files[&number]));
                (range.iova, range.len, range.offset, range.writable, file)
            });
            assert_eq!(found.collect::<Seen>(), *expected, "seed {seed}");
        }
        // The table does not grow, because slots are reused. Files that were in no checkpoint leave
        // nothing behind.
        assert!(written.unused_slot <= 2 * MAX_RANGES, "{}", written.unused_slot);
        let (given, _) = written.end();
        let mut given: Vec<_> = given.into_iter().collect();
        given.sort_unstable();
        assert_eq!(given, lasting.keys().copied().collect::<Vec<_>>());
    }
}

/// A client whose memory does not allow checkpoints may add and remove ranges without limit, and
/// the table does not grow.
#[test]
fn unrecorded_changes_take_bounded_memory() {
    let mut files = Files::default();
    let mut written = WrittenRanges::new(MAX_RANGES, 0).unwrap();
    written.add((0, PAGE), (None, 0), true, Protection::Read);
    for n in 0..10_000 {
        let retained = files.retain_file(&file(), Protection::Read).unwrap();
        written.add((PAGE * (1 + n % 7), PAGE), (Some(&retained), 0), true, Protection::Read);
        assert!(written.record(&mut Descriptors::default()).is_err());
        written.remove(PAGE * (1 + n % 7), Some(&retained), true);
    }
    assert_eq!(
        (written.unused_slot, written.removed_slots.len(), written.changes.len()),
        (2, 0, 0)
    );
}
