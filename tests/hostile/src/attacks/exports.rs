//! Attacks on an export by NBD clients, and by a VM on vhost-user-blk. The victim is an NBD
//! client of the same process.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;

use super::isolation::victim_is_served;
use super::messages::silent_connection;
use crate::attack::{Attack, Field, Kind};
use crate::peer::nbd::{FLUSH, LIST, NbdClient, READ, option, request};
use crate::peer::virtio::{
    ENTRIES, INDIRECT, MEMORY, NEXT, ROOM, VirtioGuest, WRITE, descriptor, header,
};
use crate::random::Random;

const DISK: &[&str] = &["mem:16MiB"];
/// Largest reads and writes of NBD, in bytes.
const LARGE: u32 = 16 << 20;

const fn export(
    name: &'static str,
    about: &'static str,
    run: fn(&mut Field) -> Result<()>,
) -> Attack {
    Attack { kind: Kind::Export, ..Attack::new(name, about, DISK, run) }
}

pub(crate) const ATTACKS: &[Attack] = &[
    export("nbd-silent", "500 NBD clients that send nothing", nbd_silent),
    // In the short suite, because this attack is evaluated by memory usage, which does not depend
    // on other load of the machine.
    export(
        "nbd-unread",
        "NBD clients that request 16 MiB reads and do not read the replies",
        nbd_unread,
    )
    .short(),
    export("nbd-reads", "8 NBD clients with 16 MiB reads without end", nbd_reads),
    export("nbd-options", "NBD options without end", nbd_options),
    export("nbd-flushes", "NBD flushes without end", nbd_flushes),
    export("vhost-loops", "virtio chains that loop, on vhost-user-blk", vhost_loops),
    export("vhost-huge", "virtio chains of gigabytes, on vhost-user-blk", vhost_huge),
    export("vhost-reads", "256 virtio reads of 1 MiB in flight", vhost_reads),
    export("vhost-bad", "virtio requests that are refused", vhost_bad),
    // The attack is evaluated by the victim's number of reads: after a lost wakeup, the victim
    // would read nothing more.
    Attack {
        kind: Kind::CountedExport,
        ..export("vhost-random", "VMs that kick random chains and disconnect", vhost_random)
    },
    export("vhost-attach", "VMs that connect and disconnect with requests in flight", vhost_attach),
];

fn nbd(field: &Field) -> PathBuf {
    field.directory.join("disk.sock")
}

fn vhost(field: &Field) -> PathBuf {
    field.directory.join("blk.sock")
}

fn nbd_silent(field: &mut Field) -> Result<()> {
    let mut streams = Vec::new();
    while !field.is_over() {
        while streams.len() < 500 && !field.is_over() {
            streams.push(silent_connection(&nbd(field))?);
            field.done += 1;
        }
        // This pause sets the pace of the attack. After it, a hundred clients disconnect, and the
        // loop connects others.
        sleep(Duration::from_millis(5));
        streams.truncate(400);
    }
    Ok(())
}

/// Sends a part of the endlessly repeated `bytes` without blocking. Returns false if the socket
/// buffer is full.
fn push(stream: &UnixStream, bytes: &[u8], sent: &mut usize) -> Result<bool> {
    use std::io::ErrorKind::{Interrupted, WouldBlock};
    let from = *sent % bytes.len();
    let mut stream = stream;
    match stream.write(bytes.get(from..).unwrap_or_default()) {
        Ok(count) => *sent += count,
        Err(error) if matches!(error.kind(), WouldBlock | Interrupted) => return Ok(false),
        Err(error) => return Err(error.into()),
    }
    Ok(true)
}

fn nbd_unread(field: &mut Field) -> Result<()> {
    let bytes = request(READ, 7, 0, LARGE).repeat(256);
    let mut clients = Vec::new();
    for _ in 0..4 {
        let client = NbdClient::attach(&nbd(field))?;
        client.stream.set_nonblocking(true)?;
        clients.push((client, 0));
    }
    while !field.is_over() {
        for (client, sent) in &mut clients {
            field.done += u64::from(push(&client.stream, &bytes, sent)?);
        }
        // This pause sets the pace of the attack.
        sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Sends `bytes` repeatedly from `clients` clients, and discards the replies.
fn flood(field: &mut Field, clients: usize, bytes: &[u8]) -> Result<()> {
    use std::io::Read;
    let mut links = Vec::new();
    for _ in 0..clients {
        let client = NbdClient::attach(&nbd(field))?;
        client.stream.set_nonblocking(true)?;
        links.push((client, 0));
    }
    let mut trash = vec![0; 1 << 20];
    while !field.is_over() {
        for (client, sent) in &mut links {
            field.done += u64::from(push(&client.stream, bytes, sent)?);
            while matches!(client.stream.read(&mut trash), Ok(1..)) {}
        }
        // This pause sets the pace of the attack.
        sleep(Duration::from_micros(200));
    }
    Ok(())
}

fn nbd_reads(field: &mut Field) -> Result<()> {
    flood(field, 8, &request(READ, 7, 0, LARGE).repeat(16))
}

fn nbd_flushes(field: &mut Field) -> Result<()> {
    flood(field, 4, &request(FLUSH, 7, 0, 0).repeat(64))
}

fn nbd_options(field: &mut Field) -> Result<()> {
    use std::io::Read;
    let bytes = option(LIST, &[]).repeat(64);
    let mut trash = vec![0; 1 << 16];
    while !field.is_over() {
        let mut client = NbdClient::greet(&nbd(field))?;
        client.stream.set_nonblocking(true)?;
        let mut sent = 0;
        while !field.is_over() && push(&client.stream, &bytes, &mut sent).is_ok() {
            field.done += 1;
            while matches!(client.stream.read(&mut trash), Ok(1..)) {}
            // This pause sets the pace of the attack.
            sleep(Duration::from_micros(200));
        }
    }
    Ok(())
}

/// Submits the descriptor chains that begin at `heads`, again and again. If the device disconnects,
/// connects again.
fn offer(field: &mut Field, prepare: fn(&VirtioGuest) -> Result<()>, heads: &[u16]) -> Result<()> {
    while !field.is_over() {
        let mut guest = VirtioGuest::attach(&vhost(field))?;
        prepare(&guest)?;
        while !field.is_over() && !guest.is_closed() {
            // A broken device does not return chains as used any more, but the guest still kicks
            // it.
            let room = usize::from(ENTRIES.saturating_sub(guest.outstanding()));
            let heads: Vec<u16> = heads.iter().copied().cycle().take(room).collect();
            guest.offer(&heads)?;
            field.done += heads.len() as u64;
            // This pause sets the pace of the attack.
            sleep(Duration::from_micros(300));
        }
    }
    Ok(())
}

fn vhost_loops(field: &mut Field) -> Result<()> {
    offer(field, loops, &[0, 1, 3, 4])
}

fn loops(guest: &VirtioGuest) -> Result<()> {
    let table = [descriptor(ROOM, 16, NEXT | INDIRECT, 0), descriptor(ROOM, 4096, NEXT, 0)];
    guest.put(ROOM, table.as_flattened())?;
    guest.describe(
        0,
        &[
            // The first descriptor links to itself, and the next two link to each other.
            descriptor(ROOM, 16, NEXT, 0),
            descriptor(ROOM, 16, NEXT, 2),
            descriptor(ROOM, 4096, NEXT | WRITE, 1),
            // Indirect tables: one that is itself in an indirect table, and one with the maximum
            // number of entries, each of which has the flag NEXT.
            descriptor(ROOM, 32, INDIRECT, 0),
            descriptor(ROOM, 16 * 65535, INDIRECT, 0),
        ],
    )
}

fn vhost_huge(field: &mut Field) -> Result<()> {
    offer(field, huge, &[0])
}

/// Writes 1022 descriptors, each of which covers all of the guest's memory.
fn huge(guest: &VirtioGuest) -> Result<()> {
    let (table, head) = (ROOM, ROOM + (1 << 16));
    guest.put(head, &header(0, 0))?;
    let mut descriptors = vec![descriptor(head, 16, NEXT, 1)];
    for n in 1..1023 {
        descriptors.push(descriptor(1 << 20, (MEMORY - (1 << 20)) as u32, NEXT | WRITE, n + 1));
    }
    descriptors.push(descriptor(head + 16, 1, WRITE, 0));
    guest.put(table, descriptors.as_flattened())?;
    guest.describe(0, &[descriptor(table, 16 * 1024, INDIRECT, 0)])
}

fn vhost_reads(field: &mut Field) -> Result<()> {
    offer(field, reads, &[0, 1, 2, 3])
}

/// Writes requests for four reads of 1 MiB in segments of 4 KiB.
fn reads(guest: &VirtioGuest) -> Result<()> {
    for n in 0..4u16 {
        let table = ROOM + u64::from(n) * (1 << 14);
        let head = table + (1 << 13);
        guest.put(head, &header(0, u64::from(n) * 2048))?;
        let mut descriptors = vec![descriptor(head, 16, NEXT, 1)];
        for piece in 1..253 {
            let at = (1 << 20) * (1 + u64::from(n)) + u64::from(piece) * 4096;
            descriptors.push(descriptor(at, 4096, NEXT | WRITE, piece + 1));
        }
        descriptors.push(descriptor(head + 16, 1, WRITE, 0));
        guest.put(table, descriptors.as_flattened())?;
        guest.describe(n, &[descriptor(table, 16 * 254, INDIRECT, 0)])?;
    }
    Ok(())
}

fn vhost_bad(field: &mut Field) -> Result<()> {
    offer(field, bad, &[0, 3, 6, 9])
}

/// Writes requests with invalid types, with sectors beyond the end, and with unmapped memory.
fn bad(guest: &VirtioGuest) -> Result<()> {
    let requests = [(0x55, 0, ROOM), (0, u64::MAX, ROOM), (0, 0, 1 << 60), (8, 1 << 40, ROOM)];
    for (n, (kind, sector, data)) in (0u16..).zip(requests) {
        let head = ROOM + 0x1000 + u64::from(n) * 64;
        guest.put(head, &header(kind, sector))?;
        let first = n * 3;
        let chain = [
            descriptor(head, 16, NEXT, first + 1),
            descriptor(data, 4096, NEXT | WRITE, first + 2),
            descriptor(head + 16, 1, WRITE, 0),
        ];
        guest.describe(first, &chain)?;
    }
    Ok(())
}

fn vhost_attach(field: &mut Field) -> Result<()> {
    while !field.is_over() {
        let mut guest = VirtioGuest::attach(&vhost(field))?;
        reads(&guest)?;
        let heads: Vec<u16> = (0..ENTRIES).map(|n| n % 4).collect();
        guest.offer(&heads)?;
        field.done += 1;
        // This pause sets the pace of the attack.
        sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Number of hostile VMs after which the attack checks that the victim still completes reads.
const VMS: u64 = 16;

/// Each VM kicks random chains a few times, and disconnects with requests in flight.
fn vhost_random(field: &mut Field) -> Result<()> {
    // Sectors of the hostile VMs. The victim's blocks are before them.
    let sectors = (1 << 20) / 512..(16 << 20) / 512;
    let mut random = Random::new(1);
    for vm in 1.. {
        if field.is_over() {
            break;
        }
        if vm % VMS == 0 {
            victim_is_served(field, "while VMs disconnect with requests in flight");
        }
        let mut guest = VirtioGuest::attach(&vhost(field))?;
        for _ in 0..random.below(8) {
            field.done += guest.offer_random(&mut random, &sectors)?;
            // This pause sets the pace of the attack.
            sleep(Duration::from_micros(random.below(500)));
        }
    }
    Ok(())
}
