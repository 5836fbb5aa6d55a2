//! Random concurrent requests of several users, compared with an array of bytes.

use proptest::prelude::*;
use shadowbell_block::{BlockDevice, BlockOptions, BlockQueue, Zeroes};
use shadowbell_testing::test_disk::TestDisk;
use std::sync::Arc;

const USERS: usize = 4;
/// Length of a slice in bytes. Slice *n* belongs to user *n* modulo the number of users. Since a
/// slice is no multiple of the block size, users share blocks, but no bytes.
const SLICE: u64 = 700;
const SLICES: u64 = 220;

#[derive(Clone, Debug)]
enum Step {
    Write {
        fua: bool,
    },
    Zeroes {
        deallocate: bool,
    },
    Read,
    Flush,
    /// Copy from another slice of the same user.
    Copy {
        from: u64,
    },
}

#[derive(Clone, Debug)]
struct Action {
    step: Step,
    slice: u64,
    from: u64,
    len: u64,
    seed: u8,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let step = prop_oneof![
        6 => any::<bool>().prop_map(|fua| Step::Write { fua }),
        2 => any::<bool>().prop_map(|deallocate| Step::Zeroes { deallocate }),
        4 => Just(Step::Read),
        1 => Just(Step::Flush),
        3 => (0..SLICES / USERS as u64).prop_map(|from| Step::Copy { from }),
    ];
    let action = (step, 0..SLICES / USERS as u64, 0..SLICE, 1..=SLICE, any::<u8>());
    let action = action.prop_map(|(step, slice, from, len, seed)| Action {
        step,
        slice,
        from,
        len: len.min(SLICE - from),
        seed,
    });
    prop::collection::vec(action, 1..60)
}

fn data(seed: u8, len: u64) -> Vec<u8> {
    (0..len).map(|i| seed.wrapping_add(i as u8).wrapping_mul(31) | 1).collect()
}

/// Executes one user's requests one after the other, on the user's own slices. Returns the expected
/// contents of these slices.
fn user(disk: &BlockQueue, user: usize, actions: &[Action]) -> Vec<u8> {
    let mut model = vec![0; (SLICE * SLICES) as usize];
    disk.block_on(async {
        for Action { step, slice, from, len, seed } in actions {
            let at = (slice * USERS as u64 + user as u64) * SLICE + from;
            let range = at as usize..(at + len) as usize;
            match step {
                Step::Write { fua } => {
                    let data = data(*seed, *len);
                    disk.write(at, &data, *fua).await.unwrap();
                    model[range].copy_from_slice(&data);
                }
                Step::Zeroes { deallocate } => {
                    let how = Zeroes { deallocate: *deallocate, ..Zeroes::default() };
                    disk.write_zeroes(at, *len, how).await.unwrap();
                    model[range].fill(0);
                }
                Step::Read => {
                    let mut bytes = vec![0xee; *len as usize];
                    disk.read(at, &mut bytes).await.unwrap();
                    assert!(bytes == model[range], "{len} bytes at {at}");
                }
                Step::Flush => disk.flush().await.unwrap(),
                Step::Copy { from: slice } => {
                    // The source may have another offset within its slice than the destination, so
                    // the copy may be misaligned.
                    let skip = if seed % 2 == 0 { *from } else { (SLICE - len).min(*seed as u64) };
                    let source = (slice * USERS as u64 + user as u64) * SLICE + skip;
                    disk.copy(source, at, *len).await.unwrap();
                    let source = source as usize;
                    model.copy_within(source..source + *len as usize, at as usize);
                }
            }
        }
    });
    model
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn users_of_one_disk_do_not_undo_each_other(
        block in prop::sample::select(vec![512u32, 4096]),
        small in 1usize..6,
        work in prop::collection::vec(actions(), USERS),
    ) {
        let bytes = (SLICE * SLICES).next_multiple_of(4096);
        let backing = TestDisk::new(bytes / u64::from(block), block);
        let mut options = BlockOptions::default();
        options.small_buffers = small;
        options.chunks = 2;
        options.chunk_bytes = 8192;
        let device = BlockDevice::new(Arc::new(backing.clone()), &options).unwrap();
        let models: Vec<_> = std::thread::scope(|scope| {
            let users: Vec<_> = work
                .iter()
                .enumerate()
                .map(|(i, actions)| {
                    let device = &device;
                    scope.spawn(move || user(&device.queue().unwrap(), i, actions))
                })
                .collect();
            users.into_iter().map(|user| user.join().unwrap()).collect()
        });
        let mut bytes = vec![0; (SLICE * SLICES) as usize];
        backing.mem.bytes().read_into(0, &mut bytes).unwrap();
        for (at, byte) in bytes.iter().enumerate() {
            let owner = (at as u64 / SLICE) as usize % USERS;
            prop_assert_eq!(*byte, models[owner][at], "byte {}", at);
        }
    }
}

/// One user sends requests of any length. Long requests are split into many.
#[test]
fn long_requests_are_split_and_arrive_whole() {
    let backing = TestDisk::new(8192, 512);
    let mut options = BlockOptions::default();
    (options.chunks, options.chunk_bytes) = (3, 16384);
    let disk = BlockDevice::new(Arc::new(backing.clone()), &options).unwrap().queue().unwrap();
    let size = disk.geometry().bytes;
    assert_eq!(size, 8192 * 512);
    for (at, len) in [(0, size), (1, size - 2), (511, 1_000_003), (4096, 16384), (512, 16385)] {
        let bytes = data((at % 251) as u8, len);
        disk.block_on(disk.write(at, &bytes, false)).unwrap();
        let mut back = vec![0; len as usize];
        disk.block_on(disk.read(at, &mut back)).unwrap();
        assert!(back == bytes, "{len} at {at}");
    }
    assert!(backing.seen().iter().all(|request| request.len <= 16384));
    disk.block_on(disk.write_zeroes(1, size - 2, Zeroes::default())).unwrap();
    let mut back = vec![0; size as usize];
    disk.block_on(disk.read(0, &mut back)).unwrap();
    assert_eq!(back.iter().position(|byte| *byte != 0), Some(0));
    assert_eq!(back.iter().rposition(|byte| *byte != 0), Some(back.len() - 1));
}
