//! Writes of whole blocks, mixed with writes of parts of blocks. The server receives whole blocks
//! directly into buffers of the disk's queue, and copies parts of blocks. Afterwards the disk must
//! have the contents of all writes.

use crate::client::Client;
use crate::nbd::Rig;
use shadowbell_disk::DiskError;
use shadowbell_export::nbd::wire::{NbdError, Request, command};
use shadowbell_testing::wait;
use std::io::Write;

const BYTES: usize = 64 << 20;

/// Lengths of requests: each buffer size, a little more than each, and parts of blocks.
const LENGTHS: [usize; 12] = [
    512,
    4096,
    4096,
    4608,
    64 << 10,
    (64 << 10) + 512,
    256 << 10,
    (256 << 10) + 512,
    1 << 20,
    1,
    5000,
    70_001,
];

struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((self.0 >> 16) % end as u64) as usize
    }
}

/// Creates writes to disjoint, ascending ranges. Since the ranges are disjoint, the writes may
/// complete in any order.
fn requests(random: &mut Random, count: usize) -> Vec<(usize, Vec<u8>)> {
    let mut at = 0usize;
    let mut requests = Vec::new();
    for n in 0..count {
        let len = LENGTHS[random.below(LENGTHS.len())];
        // Two thirds of the writes begin at a block, the others at the end of the previous write.
        if random.below(3) != 0 {
            at = at.next_multiple_of(512);
        }
        if at + len > BYTES {
            break;
        }
        requests.push((at, (0..len).map(|i| (n + i / 256) as u8 | 1).collect()));
        at += len;
    }
    requests
}

#[test]
fn requests_of_all_lengths_and_fragmentations_are_correct() {
    let rig = Rig::new((BYTES / 512) as u64, &shadowbell_block::BlockOptions::default());
    for (round, pieces) in [(1, 1 << 20), (2, 100_000), (3, 4000)] {
        let mut random = Random(0x9e37_79b9_7f4a_7c15 ^ round);
        let mut client = Client::connect(&rig.socket(), round % 2 == 0);
        let requests = requests(&mut random, if pieces < 10_000 { 40 } else { 150 });
        let mut writer = client.socket.try_clone().unwrap();
        let mut model = vec![0; requests.last().map_or(0, |(at, data)| at + data.len())];
        for (at, data) in &requests {
            model[*at..at + data.len()].copy_from_slice(data);
        }
        let bytes = requests.iter().enumerate().flat_map(|(n, (at, data))| {
            let (offset, len) = (*at as u64, data.len() as u32);
            let request =
                Request { flags: 0, command: command::WRITE, cookie: n as u64, offset, len };
            request.encode().into_iter().chain(data.iter().copied())
        });
        let bytes: Vec<u8> = bytes.collect();
        // A separate thread writes, because the server stops reading when its request limit is
        // reached.
        let writing = std::thread::spawn(move || {
            let mut rest = &bytes[..];
            while !rest.is_empty() {
                let (now, later) = rest.split_at((1 + random.below(pieces)).min(rest.len()));
                writer.write_all(now).unwrap();
                rest = later;
            }
        });
        let mut answered: Vec<u64> = Vec::new();
        for _ in &requests {
            let reply = client.reply();
            assert_eq!(reply.error, 0);
            answered.push(reply.cookie);
        }
        writing.join().unwrap();
        answered.sort_unstable();
        assert_eq!(answered, (0..requests.len() as u64).collect::<Vec<_>>());
        let mut asked = std::collections::BTreeMap::new();
        let check = |client: &mut Client, asked: &mut std::collections::BTreeMap<_, _>| {
            let reply = client.reply();
            let (at, len): (usize, usize) = asked.remove(&reply.cookie).unwrap();
            assert_eq!(reply.error, 0);
            assert!(reply.data == model[at..at + len], "{len} bytes at {at}, round {round}");
        };
        for (n, (at, data)) in requests.iter().enumerate() {
            let cookie = client.ask(command::READ, 0, *at as u64, data.len() as u32, b"");
            asked.insert(cookie, (*at, data.len()));
            // The client can decode a reply in several chunks only if it has no other request in
            // flight, so it sends long reads alone.
            let is_long =
                |next: usize| requests.get(next).is_some_and(|(_, d)| d.len() > 256 << 10);
            let most = if is_long(n) || is_long(n + 1) { 0 } else { 6 };
            while asked.len() > most {
                check(&mut client, &mut asked);
            }
        }
        while !asked.is_empty() {
            check(&mut client, &mut asked);
        }
        // Zeroes the disk, because data of this round could hide a missing write of the next round.
        let len = model.len() as u32;
        assert_eq!(client.run(command::WRITE_ZEROES, 0, 0, len, b"").error, 0);
    }
    rig.end();
}

#[test]
fn a_disk_that_fails_costs_no_buffer() {
    let rig = Rig::new(4096, &shadowbell_block::BlockOptions::default());
    let mut client = rig.client();
    rig.backing.instruct(|instructions| instructions.fail = Some(DiskError::Io(5)));
    // There are more requests than buffers of each size. So if a request did not return its buffer,
    // the buffers would be exhausted.
    for (len, count) in [(4096, 140), (64 << 10, 40), (256 << 10, 10)] {
        for _ in 0..count {
            let reply = client.run(command::WRITE, 0, 0, len, &vec![1; len as usize]);
            assert_eq!(reply.error, NbdError::Io as u32);
        }
    }
    rig.backing.instruct(|instructions| instructions.fail = None);
    for len in [4096, 64 << 10, 256 << 10] {
        let data = vec![7; len];
        assert_eq!(client.run(command::WRITE, 0, 512, len as u32, &data).error, 0);
        assert!(client.run(command::READ, 0, 512, len as u32, b"").data == data);
    }
    rig.end();
}

/// A long read delays the requests behind it. The server waits until the client has received the
/// end of the reply. Meanwhile the client sends nothing, so the server has to notice by itself that
/// it can continue.
#[test]
fn requests_behind_a_long_read_are_answered_after_it() {
    const LEN: u32 = 2 << 20;
    let rig = Rig::new(1 << 13, &shadowbell_block::BlockOptions::default());
    // Without a wakeup, a round ends only when another event wakes the server, after a second. On a
    // busy machine, some rounds take that long anyway, so the test waits for four quick ones.
    let mut quick = 0;
    wait::until("four quick rounds", || {
        let began = std::time::Instant::now();
        let mut client = Client::connect(&rig.socket(), false);
        let reads = [(1, LEN), (2, 512)].map(|(cookie, len)| {
            Request { flags: 0, command: command::READ, cookie, offset: 0, len }.encode()
        });
        client.socket.write_all(&reads.concat()).unwrap();
        assert_eq!(client.bytes(16)[8..], 1u64.to_be_bytes());
        // The server has read all data of the reply from the disk, but the rest of the reply does
        // not fit into the socket's buffer.
        let left = 250 << 10;
        client.bytes(LEN as usize - left);
        wait::short_pause();
        client.bytes(left);
        assert_eq!(client.bytes(16)[8..], 2u64.to_be_bytes());
        client.bytes(512);
        // The round took less than the second that a lost wakeup would take.
        quick += u32::from(began.elapsed() < std::time::Duration::from_millis(700));
        quick == 4
    });
    rig.end();
}
