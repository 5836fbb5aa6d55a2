//! Functions that tests of every disk type use as the user of a disk: they submit requests in
//! batches, and compare the results with a model.

use shadowbell_disk::{Disk, DiskError, Op, Queue, Request, Submitted};
use shadowbell_memory::{Mapping, Segments, SharedBytes};

/// Number of requests in a batch. Each request of a batch accesses a different part of the disk.
const LANES: usize = 16;

/// Allocates `len` bytes that stand for a host's memory.
pub fn memory(len: usize) -> SharedBytes {
    Mapping::anonymous(len as u64).unwrap().bytes()
}

/// Describes a part of `bytes` as the data of a request.
pub fn segments(bytes: &SharedBytes, at: usize, len: usize) -> Segments {
    Segments::from_bytes(&bytes.slice(at, len).unwrap())
}

/// Submits all requests in one batch and waits for their results, in the order of the requests.
pub fn run(
    queue: &mut dyn Queue,
    requests: Vec<(Request, Segments)>,
) -> Vec<Result<(), DiskError>> {
    let mut results: Vec<Option<Result<(), DiskError>>> = vec![None; requests.len()];
    for (tag, (request, mut data)) in requests.into_iter().enumerate() {
        match queue.submit(tag as u32, &request, &mut data) {
            Submitted::Done(result) => results[tag] = Some(result),
            Submitted::Pending => assert_eq!(data.len(), 0),
        }
    }
    queue.commit();
    while queue.pending() > 0 {
        wait(queue);
        queue.reap(&mut |tag, result, _| {
            assert_eq!(results[tag as usize].replace(result), None, "{tag} ended twice");
        });
    }
    results.into_iter().map(|r| r.expect("every request ends")).collect()
}

/// Runs one request.
pub fn run_one(
    queue: &mut dyn Queue,
    op: Op,
    offset: u64,
    len: u64,
    data: Segments,
) -> Result<(), DiskError> {
    run(queue, vec![(Request { op, offset, len }, data)])[0]
}

/// Writes data, without FUA.
pub fn write(queue: &mut dyn Queue, offset: u64, data: &[u8]) -> Result<(), DiskError> {
    let bytes = memory(data.len());
    bytes.write_from(0, data).unwrap();
    let segments = Segments::from_bytes(&bytes);
    run_one(queue, Op::Write { fua: false }, offset, data.len() as u64, segments)
}

/// Reads `len` bytes from the disk.
pub fn read(queue: &mut dyn Queue, offset: u64, len: usize) -> Result<Vec<u8>, DiskError> {
    let bytes = memory(len);
    let segments = Segments::from_bytes(&bytes);
    run_one(queue, Op::Read, offset, len as u64, segments)?;
    let mut data = vec![0; len];
    bytes.read_into(0, &mut data).unwrap();
    Ok(data)
}

/// Flushes the disk.
pub fn flush(queue: &mut dyn Queue) -> Result<(), DiskError> {
    run_one(queue, Op::Flush, 0, 0, Segments::new())
}

/// Contents of the whole disk.
pub fn content(disk: &dyn Disk) -> Vec<u8> {
    let mut queue = disk.queue().unwrap();
    read(&mut *queue, 0, disk.info().bytes() as usize).unwrap()
}

/// Submits one request. The request must still be pending afterwards.
pub fn submit_pending(queue: &mut dyn Queue, tag: u32, request: &Request, mut data: Segments) {
    assert_eq!(queue.submit(tag, request, &mut data), Submitted::Pending, "{request:?}");
    queue.commit();
}

/// Waits until `count` requests have completed. Returns their results in the order of completion.
pub fn wait_completed(queue: &mut dyn Queue, count: usize) -> Vec<(u32, Result<(), DiskError>)> {
    let mut all = Vec::new();
    crate::wait::until("the ends of requests", || {
        queue.reap(&mut |tag, result, _| all.push((tag, result)));
        all.len() >= count
    });
    all
}

/// Asserts that no request completes within a short time.
pub fn assert_none_completes(queue: &mut dyn Queue) {
    crate::wait::short_pause();
    queue.reap(&mut |tag, result, _| panic!("request {tag} has ended: {result:?}"));
}

/// Waits until the queue's wake descriptor is readable.
pub fn wait(queue: &dyn Queue) {
    let fd = queue.wake_fd().expect("a queue with pending requests has a wake descriptor");
    crate::wait::readable("a signal of the wake descriptor", fd);
}

/// Deterministic random numbers.
pub struct Random(pub u64);

impl Random {
    /// Returns any number.
    pub fn any(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.any() % end.max(1)
    }

    /// Returns `len` random bytes.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.any().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }
}

/// Chooses an operation. Those that transfer data are more likely.
fn op(random: &mut Random) -> Op {
    let fua = random.below(8) == 0;
    match random.below(12) {
        0..4 => Op::Read,
        4..8 => Op::Write { fua },
        8 => Op::WriteZeroes { deallocate: random.below(2) == 0, fua },
        9 => Op::Discard,
        10 => Op::Compare,
        _ => Op::Verify,
    }
}

/// Runs a batch on the disk and on the model. The results and the data must be the same. The model
/// has as many bytes as the disk.
pub fn batch(disk: &dyn Disk, queue: &mut dyn Queue, model: &mut [u8], random: &mut Random) {
    let block = disk.info().block_size as usize;
    let size = model.len();
    let lanes = if random.below(4) == 0 { 1 } else { LANES };
    let lane_len = size / lanes;
    let bytes = memory(size);
    let mut requests = Vec::new();
    let mut expected = Vec::new();
    for lane in 0..lanes {
        let blocks = lane_len / block;
        let start = random.below(blocks as u64) as usize;
        // Half of the requests are short.
        let most = (blocks - start).min(if random.below(2) == 0 { 8 } else { blocks });
        let len = (1 + random.below(most as u64) as usize) * block;
        let at = lane * lane_len + start * block;
        let op = op(random);
        let mut result = Ok(());
        let mut data = segments(&bytes, at, len);
        match op {
            Op::Write { .. } => {
                let fresh = random.bytes(len);
                bytes.write_from(at, &fresh).unwrap();
                model[at..at + len].copy_from_slice(&fresh);
            }
            Op::Compare => {
                let mut same = model[at..at + len].to_vec();
                if random.below(2) == 0 {
                    same[random.below(len as u64) as usize] ^= 1;
                    result = Err(DiskError::CompareFailed);
                }
                bytes.write_from(at, &same).unwrap();
            }
            Op::WriteZeroes { .. } => model[at..at + len].fill(0),
            Op::Discard if disk.info().discard => model[at..at + len].fill(0),
            _ => {}
        }
        if !matches!(op, Op::Read | Op::Write { .. } | Op::Compare) {
            data = Segments::new();
        }
        requests.push((Request { op, offset: at as u64, len: len as u64 }, data));
        expected.push(result);
    }
    if random.below(3) == 0 {
        requests.push((Request { op: Op::Flush, offset: 0, len: 0 }, Segments::new()));
        expected.push(Ok(()));
    }
    let plan: Vec<_> = requests.iter().map(|(request, _)| *request).collect();
    assert_eq!(run(queue, requests), expected, "{plan:?}");
    for request in plan.iter().filter(|request| request.op == Op::Read) {
        let (at, len) = (request.offset as usize, request.len as usize);
        let mut data = vec![0; len];
        bytes.read_into(at, &mut data).unwrap();
        assert!(data == model[at..at + len], "{request:?} in {plan:?}");
    }
}
