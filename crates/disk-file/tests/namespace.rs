//! Cancellation of requests to NVMe character devices during I/O. The devices execute each command
//! after a delay.

mod common;

use common::{Host, open, run, wait};
use shadowbell_disk::{Op, Queue, Request, Submitted};
use shadowbell_testing::outside;
use std::time::Duration;

const PAGE: usize = 4096;
/// Number of requests. It exceeds the number of requests that the disk submits to the kernel at a
/// time, so some are in flight and others wait.
const PAGES: usize = 1536;
const ROUNDS: u64 = 8;
/// Waiting time that is longer than the delay of the devices.
const LATER: Duration = Duration::from_millis(200);
/// Content of the host's memory at times when no request may access it.
const NOBODYS: u8 = 0xa5;

fn page(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(PAGE / 8)
}

/// Possible contents of each page of the disk.
struct Pages(Vec<Vec<u64>>);

impl Pages {
    /// Checks that a page that was read has one of its possible contents. From then on, this is its
    /// only possible content.
    fn contains(&mut self, at: usize, data: &[u8]) {
        let number = u64::from_le_bytes(data[..8].try_into().unwrap());
        assert!(data == page(number), "a page is in parts: {number} and others");
        assert!(self.0[at].contains(&number), "a page has {number}, not of {:?}", self.0[at]);
        self.0[at] = vec![number];
    }

    fn read_all(&mut self, queue: &mut dyn Queue, host: &Host) {
        let request = |at: usize| Request { op: Op::Read, offset: offset(at), len: PAGE as u64 };
        let reads = (0..PAGES).map(|at| (request(at), host.buffer(&[(at * PAGE, PAGE)], true)));
        for result in run(queue, reads.collect()) {
            assert_eq!(result, Ok(()));
        }
        for (at, data) in host.content().chunks_exact(PAGE).enumerate() {
            self.contains(at, data);
        }
    }
}

fn offset(page: usize) -> u64 {
    (page * PAGE) as u64
}

/// Requests are cancelled while many are in flight. Each request ends once, as executed or as
/// cancelled. A cancelled write is on the disk completely or not at all. No request accesses the
/// disk or the host's memory after its end.
fn cancelled_in_mid_io(disk: &str) {
    let disk = open(disk.as_ref(), "");
    let mut queue = disk.queue().unwrap();
    let host = Host::new((PAGES * PAGE) as u64);
    let mut pages = Pages(vec![Vec::new(); PAGES]);
    let mut last = 0;
    let fua = false;
    let (mut carried_out, mut cancelled) = (0, 0);
    for round in 0..ROUNDS {
        let first = last + 1;
        let mut requests = Vec::new();
        for (at, may) in pages.0.iter().enumerate() {
            last += 1;
            let op = if may.is_empty() || last % 3 != 0 { Op::Write { fua } } else { Op::Read };
            host.bytes.write_from(at * PAGE, &page(last)).unwrap();
            let data = host.buffer(&[(at * PAGE, PAGE)], op == Op::Read);
            requests.push((Request { op, offset: offset(at), len: PAGE as u64 }, data));
        }
        let ops: Vec<Op> = requests.iter().map(|(request, _)| request.op).collect();
        for (tag, (request, mut data)) in requests.into_iter().enumerate() {
            let submitted = queue.submit(tag as u32, &request, &mut data);
            assert!(matches!(submitted, Submitted::Pending), "{submitted:?}");
        }
        queue.commit();
        // The first round fills the disk, and cancels nothing.
        if round > 0 {
            // Moment of the cancellation. It differs in each round, because any moment must be
            // safe.
            std::thread::sleep(Duration::from_millis(round * 3));
            (0..PAGES as u32).for_each(|tag| queue.cancel(tag));
        }
        let mut results = vec![None; PAGES];
        while queue.pending() > 0 {
            wait(&*queue);
            queue.reap(&mut |tag, result, _| {
                assert_eq!(results[tag as usize].replace(result), None, "{tag} ended twice");
            });
        }
        let content = host.content();
        for (at, (result, data)) in results.iter().zip(content.chunks_exact(PAGE)).enumerate() {
            let number = first + at as u64;
            let is_read = ops[at] == Op::Read;
            match result.expect("every request ends") {
                Ok(()) if is_read => pages.contains(at, data),
                Ok(()) => pages.0[at] = vec![number],
                Err(shadowbell_disk::DiskError::Cancelled) => {
                    cancelled += 1;
                    if !is_read {
                        pages.0[at].push(number);
                    }
                    continue;
                }
                Err(error) => panic!("{error}"),
            }
            carried_out += usize::from(round > 0);
        }
        // All requests have ended. If a request accessed the memory later, the pattern in the
        // memory would change, or the pattern would be on the disk.
        host.bytes.write_from(0, &vec![NOBODYS; PAGES * PAGE]).unwrap();
        // Waits long enough for a late read into the memory.
        std::thread::sleep(LATER);
        assert!(host.content().iter().all(|byte| *byte == NOBODYS), "a read after its end");
        pages.read_all(&mut *queue, &host);
        // Waits long enough for a late write to the disk.
        std::thread::sleep(LATER);
        pages.read_all(&mut *queue, &host);
    }
    println!("{carried_out} were carried out, and {cancelled} cancelled");
    assert!(carried_out > 0 && cancelled > 0, "{carried_out} and {cancelled}");
}

#[test]
fn requests_can_be_cancelled_in_mid_io() {
    for device in outside::namespaces() {
        for options in ["", "?aio=threads"] {
            cancelled_in_mid_io(&format!("{device}{options}"));
        }
    }
}
