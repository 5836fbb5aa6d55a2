//! A disk with a volatile cache, and simulated power cuts.

use parking_lot::Mutex;
use shadowbell_disk::{Disk, DiskError, DiskInfo, Op, Queue, Request, Submitted};
use shadowbell_memory::Segments;
use std::collections::HashSet;
use std::io;
use std::sync::Arc;

/// Block size in bytes.
pub(crate) const BLOCK: usize = 512;

#[derive(Debug)]
struct Bytes {
    cached: Vec<u8>,
    stable: Vec<u8>,
    /// Blocks whose last write is only in the cache, so that a power cut would lose it.
    dirty: HashSet<usize>,
}

/// Disk whose writes stay in a cache until a flush.
#[derive(Clone, Debug)]
pub(crate) struct CachedDisk {
    blocks: u64,
    bytes: Arc<Mutex<Bytes>>,
}

impl CachedDisk {
    pub(crate) fn new(blocks: u64) -> Self {
        let zeroes = vec![0; blocks as usize * BLOCK];
        let bytes = Bytes { cached: zeroes.clone(), stable: zeroes, dirty: HashSet::new() };
        Self { blocks, bytes: Arc::new(Mutex::new(bytes)) }
    }

    /// Contents that the block would have after a power cut at this moment.
    pub(crate) fn stable(&self, block: u64) -> [u8; BLOCK] {
        let bytes = self.bytes.lock();
        bytes.stable[block as usize * BLOCK..][..BLOCK].try_into().unwrap()
    }
}

impl Disk for CachedDisk {
    fn info(&self) -> DiskInfo {
        let mut info = DiskInfo::new(BLOCK as u32, self.blocks);
        info.volatile_cache = true;
        info.discard = true;
        info
    }

    fn queue(&self) -> io::Result<Box<dyn Queue>> {
        Ok(Box::new(CachedQueue(self.clone())))
    }

    fn name(&self) -> String {
        "cached".into()
    }
}

struct CachedQueue(CachedDisk);

impl CachedQueue {
    fn run(&self, request: &Request, data: &Segments) -> Result<(), DiskError> {
        request.check(&self.0.info().bounds(), data)?;
        let mut bytes = self.0.bytes.lock();
        let Bytes { cached, stable, dirty } = &mut *bytes;
        let (at, len) = (request.offset as usize, request.len as usize);
        let (range, blocks) = (at..at + len, at / BLOCK..(at + len) / BLOCK);
        let fua = match request.op {
            Op::Flush => {
                for block in dirty.drain() {
                    let range = block * BLOCK..(block + 1) * BLOCK;
                    stable[range.clone()].copy_from_slice(&cached[range]);
                }
                return Ok(());
            }
            Op::Read => return data.write_from(0, &cached[range]).ok_or(DiskError::BadBuffer),
            Op::Verify => return Ok(()),
            Op::Write { fua } => {
                data.read_into(0, &mut cached[range.clone()]).ok_or(DiskError::BadBuffer)?;
                fua
            }
            Op::WriteZeroes { fua, .. } => {
                cached[range.clone()].fill(0);
                fua
            }
            Op::Discard => {
                cached[range.clone()].fill(0);
                false
            }
            _ => return Err(DiskError::Unsupported),
        };
        if fua {
            stable[range.clone()].copy_from_slice(&cached[range]);
            dirty.retain(|block| !blocks.contains(block));
        } else {
            dirty.extend(blocks);
        }
        Ok(())
    }
}

impl Queue for CachedQueue {
    fn submit(&mut self, _tag: u32, request: &Request, data: &mut Segments) -> Submitted {
        Submitted::Done(self.run(request, data))
    }
}
