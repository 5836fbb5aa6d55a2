//! Descriptor chains of requests that a dead process has left, which are not in the available
//! ring any more.

use super::memory::{Current, Memory, Snapshot};
use super::request::Chain;
use std::io;
use std::sync::Arc;
use virtio_queue::{Queue, QueueT};
use vm_memory::{
    Bytes, GuestAddress, GuestAddressSpace, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap,
    MmapRegion,
};

/// Bytes for an available ring of all requests.
const ROOM: u64 = 4096;
/// Bytes before the entries of an available ring.
const HEADER: u64 = 4;

/// Descriptor chains of the requests with these heads, in order.
///
/// rust-vmm creates chains only from an available ring. Therefore a temporary ring is built, in
/// memory of this process at an address that the guest's memory does not use.
///
/// # Errors
/// If the guest's memory leaves no room, or the queue is invalid.
pub(super) fn chains(queue: &Queue, memory: &Snapshot, heads: &[u16]) -> io::Result<Vec<Chain>> {
    if heads.is_empty() {
        return Ok(Vec::new());
    }
    let at = gap(memory)
        .ok_or_else(|| io::Error::other("the guest's memory leaves no address range for a ring"))?;
    let ours = MmapRegion::new(ROOM as usize).map_err(io::Error::other)?;
    let ours = GuestRegionMmap::new(ours, at).ok_or(io::ErrorKind::InvalidInput)?;
    let theirs = memory.iter().map(|region| {
        let region = GuestRegionMmap::with_arc(region.get_mmap(), region.start_addr());
        region.ok_or(io::ErrorKind::InvalidInput)
    });
    let mut regions = theirs.collect::<Result<Vec<_>, _>>()?;
    regions.push(ours);
    regions.sort_by_key(GuestMemoryRegion::start_addr);
    let both = Memory::from_regions(regions).map_err(io::Error::other)?;
    let put = |value: u16, offset: u64| {
        both.write_obj(value.to_le(), GuestAddress(at.0 + offset)).map_err(io::Error::other)
    };
    put(u16::try_from(heads.len()).map_err(io::Error::other)?, 2)?;
    for (head, offset) in heads.iter().zip((HEADER..).step_by(2)) {
        put(*head, offset)?;
    }
    let both = Current::from(Arc::new(both)).memory();
    let mut ring = Queue::new(queue.max_size()).map_err(io::Error::other)?;
    ring.set_size(queue.size());
    let (low, high) = (queue.desc_table() as u32, (queue.desc_table() >> 32) as u32);
    ring.set_desc_table_address(Some(low), Some(high));
    ring.set_avail_ring_address(Some(at.0 as u32), Some((at.0 >> 32) as u32));
    ring.set_ready(true);
    let made = heads.iter().map_while(|_| ring.pop_descriptor_chain(both.clone()));
    let made: Vec<_> = made.collect();
    (made.len() == heads.len()).then_some(made).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

/// Guest address of [`ROOM`] bytes outside the guest's memory. Not 0, which is no valid ring
/// address.
fn gap(memory: &Memory) -> Option<GuestAddress> {
    let ends = memory.iter().filter_map(|region| {
        region.start_addr().0.checked_add(region.len())?.checked_next_multiple_of(ROOM)
    });
    let is_free = |at: &u64| {
        let end = at.checked_add(ROOM);
        end.is_some_and(|end| {
            memory.iter().all(|region| {
                let start = region.start_addr().0;
                end <= start || start.saturating_add(region.len()) <= *at
            })
        })
    };
    ends.chain([ROOM]).find(is_free).map(GuestAddress)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_become_requests_with_the_guests_descriptors() {
        let ranges = [(GuestAddress(0), 0x4000), (GuestAddress(0x4000), 0x1000)];
        let memory = Memory::from_ranges(&ranges).unwrap();
        for head in 0..4_u64 {
            let at = GuestAddress(0x1000 + 16 * head);
            memory.write_obj((0x2000 + head).to_le(), at).unwrap();
            memory.write_obj(7_u32.to_le(), GuestAddress(at.0 + 8)).unwrap();
        }
        let memory = Current::from(Arc::new(memory)).memory();
        let mut queue = Queue::new(16).unwrap();
        queue.set_size(4);
        queue.set_desc_table_address(Some(0x1000), Some(0));
        let found = chains(&queue, &memory, &[3, 0, 2, 1]).unwrap();
        let heads: Vec<_> = found.iter().map(|chain| chain.head_index()).collect();
        assert_eq!(heads, [3, 0, 2, 1]);
        for chain in found {
            let head = u64::from(chain.head_index());
            let descriptors: Vec<_> = chain.map(|d| (d.addr().0, d.len())).collect();
            assert_eq!(descriptors, [(0x2000 + head, 7)]);
        }
    }

    #[test]
    fn a_gap_is_found_wherever_there_is_one() {
        let memory = |ranges: &[(u64, usize)]| {
            let ranges = ranges.iter().map(|(at, len)| (GuestAddress(*at), *len));
            Memory::from_ranges(&ranges.collect::<Vec<_>>()).unwrap()
        };
        assert_eq!(gap(&memory(&[(0, 0x3000)])), Some(GuestAddress(0x3000)));
        assert_eq!(gap(&memory(&[(0, 0x1001)])), Some(GuestAddress(0x2000)));
        assert_eq!(
            gap(&memory(&[(0, 0x1000), (0x1000, 0x1000), (0x3000, 0x1000)])),
            Some(GuestAddress(0x2000))
        );
        // A region at the end of the address space leaves no room behind it.
        assert_eq!(gap(&memory(&[(u64::MAX - 0x1fff, 0x1000)])), Some(GuestAddress(0x1000)));
        assert_eq!(gap(&memory(&[(u64::MAX - 0xfff, 0x800)])), Some(GuestAddress(0x1000)));
    }
}
