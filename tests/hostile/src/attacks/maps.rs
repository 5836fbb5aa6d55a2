//! Attacks by DMA maps: many maps, sparsely touched memory, and changes of maps in use.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::Duration;

use anyhow::Result;
use rustix::fs::{FallocateFlags, fallocate, ftruncate};
use shadowbell_spec::Sqe;
use shadowbell_vfio_user::wire::{self, command, header_flags};
use zerocopy::IntoBytes;

use crate::attack::{Attack, Field};
use crate::peer::connection::{dma_map, message, posted_write};
use crate::peer::guest::{CONFIG, Guest, PAGE, memfd};
use crate::peer::queue::BAR0;
use crate::victim::give_way;

const MEM: &[&str] = &["mem:16MiB"];
/// DMA address of additional maps.
const ELSEWHERE: u64 = 1 << 40;
/// Size of the address range for which the kernel needs one page of page tables (2 MiB).
const STRIDE: u64 = 2 << 20;

pub(crate) const ATTACKS: &[Attack] = &[
    Attack::new(
        "page-tables",
        "64 GiB mapped 32 times, a page touched per 2 MiB",
        MEM,
        page_tables,
    ),
    Attack::new(
        "punch-holes",
        "holes punched into 4 GiB of memory during DMA into it",
        MEM,
        punch_holes,
    ),
    Attack::new("truncate", "memory that is truncated during DMA into it", MEM, truncate),
    Attack::new("map-churn", "maps and unmaps of a page with I/O in flight", MEM, map_churn)
        .short(),
    Attack::new(
        "bus-master",
        "60,000 maps, and bus mastering toggled by WRITE_MULTI",
        MEM,
        bus_master,
    ),
    Attack::new(
        "many-maps",
        "60,000 maps, removed by one message, again and again",
        MEM,
        many_maps,
    ),
    Attack::new(
        "many-files",
        "maps of 4000 files, each of one page, again and again",
        MEM,
        many_files,
    ),
    Attack::new("big-unmap", "4 GiB of touched memory mapped and unmapped", MEM, big_unmap),
];

fn page_tables(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(16, 64)?;
    let lists = page_lists(&mut guest)?;
    field.fill(guest, sparse_reads(lists))
}

/// Shares sparse memory. Creates PRP lists whose pages are 2 MiB apart, so that each page needs a
/// page table of its own.
pub(super) fn page_lists(guest: &mut Guest) -> Result<Vec<(u64, u64)>> {
    let size = 64 << 30;
    let file = memfd(size)?;
    for n in 0..32 {
        let map = dma_map(ELSEWHERE + n * size, size, 0);
        let answer =
            guest.link.try_request(command::DMA_MAP, &[map.as_bytes()], &[file.as_fd()])?;
        if answer.0.error != 0 {
            break;
        }
    }
    let list = |n: u64| {
        let first = ELSEWHERE + n * 256 * STRIDE * 7 % (32 * size);
        let pages: Vec<u64> = (0..256).map(|page| first + page * STRIDE).collect();
        guest.prps(&pages)
    };
    (0..1024).map(list).collect()
}

/// Builds reads of 1 MiB, with the PRP lists in turn.
pub(super) fn sparse_reads(lists: Vec<(u64, u64)>) -> impl FnMut(u64) -> Sqe {
    move |n| {
        let (prp1, prp2) = lists.get(n as usize % lists.len()).copied().unwrap_or_default();
        Sqe::read(1, 0, 2047, 0).with_prps(prp1, prp2)
    }
}

fn punch_holes(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(16, 64)?;
    let size = 4 << 30;
    let file = memfd(size)?;
    let map = dma_map(ELSEWHERE, size, 0);
    guest.link.request(command::DMA_MAP, &[map.as_bytes()], &[file.as_fd()])?;
    let mut lists = Vec::new();
    for n in 0..512 {
        let first = ELSEWHERE + n * (size / 512);
        let pages: Vec<u64> = (0..256).map(|page| first + page * PAGE).collect();
        lists.push(guest.prps(&pages)?);
    }
    field.begin();
    let over = AtomicBool::new(false);
    scope(|threads| {
        threads.spawn(|| {
            give_way();
            while !over.load(Ordering::Relaxed) {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let _ = fallocate(&file, flags, 0, size);
                // This pause sets the pace of the attack.
                sleep(Duration::from_millis(1));
            }
        });
        let outcome = field.fill(guest, |n| {
            let (prp1, prp2) = lists.get(n as usize % lists.len()).copied().unwrap_or_default();
            Sqe::read(1, 0, 2047, 0).with_prps(prp1, prp2)
        });
        over.store(true, Ordering::Relaxed);
        outcome
    })
}

fn truncate(field: &mut Field) -> Result<()> {
    while !field.is_over() {
        let mut guest = field.guest_with(4, 64)?;
        let size = 64 << 20;
        let file = memfd(size)?;
        for n in 0..64 {
            let map = dma_map(ELSEWHERE + n * size, size, 0);
            guest.link.request(command::DMA_MAP, &[map.as_bytes()], &[file.as_fd()])?;
        }
        ftruncate(&file, 0)?;
        let mut make = |n: u64| {
            Sqe::read(1, 0, 7, 0).with_prps(ELSEWHERE + n % 64 * size + n % 1000 * PAGE, 0)
        };
        for _ in 0..4 {
            field.top_up(&mut guest, 63, &mut make)?;
            // This pause sets the pace of the attack.
            sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

fn map_churn(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(16, 64)?;
    let (prp1, _) = guest.buffer(PAGE)?;
    let mut make = move |_| Sqe::read(1, 0, 7, 0).with_prps(prp1, 0);
    let file = memfd(PAGE)?;
    let map = dma_map(ELSEWHERE, PAGE, 0);
    let unmap = wire::DmaUnmap { argsz: 24, flags: 0, address: ELSEWHERE, size: PAGE };
    while !field.is_over() {
        field.top_up(&mut guest, 8, &mut make)?;
        for _ in 0..8 {
            guest.link.request(command::DMA_MAP, &[map.as_bytes()], &[file.as_fd()])?;
            guest.link.request(command::DMA_UNMAP, &[unmap.as_bytes()], &[])?;
            field.done += 1;
        }
    }
    field.guests.push(guest);
    Ok(())
}

/// Maps `count` single pages. No page can be merged with its neighbour, because there is a gap
/// between them.
fn map_pages(guest: &mut Guest, count: u64, file: &rustix::fd::OwnedFd) -> Result<()> {
    for n in 0..count {
        let map = dma_map(ELSEWHERE + n * 2 * PAGE, PAGE, n % 2 * PAGE);
        let bytes = message(command::DMA_MAP, header_flags::NO_REPLY, &[map.as_bytes()]);
        guest.link.send(&bytes, &[file.as_fd()])?;
    }
    guest.link.settle()
}

fn bus_master(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(1, 64)?;
    let file = memfd(2 * PAGE)?;
    field.begin();
    map_pages(&mut guest, 60_000, &file)?;
    let entry = |n: u32| wire::MultiEntry {
        offset: 4,
        region: CONFIG,
        count: 2,
        data: u64::from(2 + n % 2 * 4).to_le_bytes(),
    };
    let entries: Vec<_> = (0..1000).map(entry).collect();
    let count = (entries.len() as u64).to_le_bytes();
    let parts = [&count[..], entries.as_bytes()];
    let bytes = message(command::REGION_WRITE_MULTI, header_flags::NO_REPLY, &parts);
    while !field.is_over() {
        guest.link.send(&bytes, &[])?;
        field.done += entries.len() as u64;
        // This pause sets the pace of the attack.
        sleep(Duration::from_millis(1));
    }
    field.guests.push(guest);
    Ok(())
}

fn many_maps(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(1, 64)?;
    let file = memfd(2 * PAGE)?;
    let unmap = wire::DmaUnmap { argsz: 24, flags: 0, address: ELSEWHERE, size: 1 << 32 };
    while !field.is_over() {
        map_pages(&mut guest, 10_000, &file)?;
        // One message unmaps all memory while writes are in flight.
        guest.link.try_request(command::DMA_UNMAP, &[unmap.as_bytes()], &[])?;
        guest.link.send(&posted_write(BAR0, 0x1008, &[0; 4]), &[])?;
        field.done += 10_000;
    }
    field.guests.push(guest);
    Ok(())
}

fn many_files(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(1, 64)?;
    let unmap = wire::DmaUnmap { argsz: 24, flags: 0, address: ELSEWHERE, size: 1 << 32 };
    field.begin();
    while !field.is_over() {
        for n in 0..4000 {
            let map = dma_map(ELSEWHERE + n * PAGE, PAGE, 0);
            let bytes = message(command::DMA_MAP, header_flags::NO_REPLY, &[map.as_bytes()]);
            guest.link.send(&bytes, &[memfd(PAGE)?.as_fd()])?;
            field.done += 1;
        }
        guest.link.try_request(command::DMA_UNMAP, &[unmap.as_bytes()], &[])?;
    }
    field.guests.push(guest);
    Ok(())
}

fn big_unmap(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(8, 64)?;
    let size = 1 << 30;
    let file = memfd(size)?;
    fallocate(&file, FallocateFlags::empty(), 0, size)?;
    let map = dma_map(ELSEWHERE, size, 0);
    let unmap = wire::DmaUnmap { argsz: 24, flags: 0, address: ELSEWHERE, size };
    let mut lists = Vec::new();
    for n in 0..512 {
        let first = ELSEWHERE + n * (size / 512);
        let pages: Vec<u64> = (0..256).map(|page| first + page * PAGE).collect();
        lists.push(guest.prps(&pages)?);
    }
    let mut make = |n: u64| {
        let (prp1, prp2) = lists.get(n as usize % lists.len()).copied().unwrap_or_default();
        Sqe::read(1, 0, 2047, 0).with_prps(prp1, prp2)
    };
    while !field.is_over() {
        guest.link.request(command::DMA_MAP, &[map.as_bytes()], &[file.as_fd()])?;
        for _ in 0..8 {
            field.top_up(&mut guest, 63, &mut make)?;
            // This pause sets the pace of the attack.
            sleep(Duration::from_millis(1));
        }
        guest.link.request(command::DMA_UNMAP, &[unmap.as_bytes()], &[])?;
    }
    field.guests.push(guest);
    Ok(())
}
