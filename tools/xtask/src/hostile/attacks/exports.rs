//! Peers of an export: NBD clients, and a VM on vhost-user-blk. The victim is an NBD client of the
//! same process.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;

use super::messages::silent_connection;
use crate::hostile::attack::{Attack, Field, Kind};
use crate::peer::nbd::{FLUSH, LIST, NbdClient, READ, option, request};
use crate::peer::virtio::{ENTRIES, INDIRECT, MEMORY, NEXT, ROOM, VirtioGuest, WRITE, descriptor};

const DISK: &[&str] = &["mem:16MiB"];
/// Large reads and writes, as long as NBD has them.
const LARGE: u32 = 16 << 20;

const fn export(
    name: &'static str,
    about: &'static str,
    run: fn(&mut Field) -> Result<()>,
) -> Attack {
    Attack { kind: Kind::Export, ..Attack::new(name, about, DISK, run) }
}

pub(crate) const ATTACKS: &[Attack] = &[
    export("nbd-silent", "500 NBD clients that say nothing", nbd_silent),
    // A bound of memory: whether that is kept does not depend on what else the machine does.
    export("nbd-unread", "NBD clients that ask for 16 MiB reads and read no reply", nbd_unread)
        .short(),
    export("nbd-reads", "8 NBD clients with 16 MiB reads without end", nbd_reads),
    export("nbd-options", "NBD options without end", nbd_options),
    export("nbd-flushes", "NBD flushes without end", nbd_flushes),
    export("vhost-loops", "virtio chains that loop, on vhost-user-blk", vhost_loops),
    export("vhost-huge", "virtio chains of gigabytes, on vhost-user-blk", vhost_huge),
    export("vhost-reads", "256 virtio reads of 1 MiB in flight", vhost_reads),
    export("vhost-bad", "virtio requests that are refused", vhost_bad),
    export("vhost-attach", "VMs that come and go with requests in flight", vhost_attach),
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
        // Those who were sent away come back.
        // The pace of the attack.
        sleep(Duration::from_millis(5));
        streams.truncate(400);
    }
    Ok(())
}

/// Sends as much as fits, and does not wait.
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
        // The pace of the attack.
        sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Sends the same over and over from so many clients, and throws away what comes back.
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
        // The pace of the attack.
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
            // The pace of the attack.
            sleep(Duration::from_micros(200));
        }
    }
    Ok(())
}

/// Offers such chains over and over; comes back when it was sent away.
fn offer(field: &mut Field, prepare: fn(&VirtioGuest) -> Result<()>, heads: &[u16]) -> Result<()> {
    while !field.is_over() {
        let mut guest = VirtioGuest::attach(&vhost(field))?;
        prepare(&guest)?;
        while !field.is_over() && !guest.is_closed() {
            // A device that is broken uses nothing any more, and is kicked all the same.
            let room = usize::from(ENTRIES.saturating_sub(guest.outstanding()));
            let heads: Vec<u16> = heads.iter().copied().cycle().take(room).collect();
            guest.offer(&heads)?;
            field.done += heads.len() as u64;
            // The pace of the attack.
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
            // To itself, and to each other.
            descriptor(ROOM, 16, NEXT, 0),
            descriptor(ROOM, 16, NEXT, 2),
            descriptor(ROOM, 4096, NEXT | WRITE, 1),
            // A table in a table, and one of as many entries as there can be, all of which go on.
            descriptor(ROOM, 32, INDIRECT, 0),
            descriptor(ROOM, 16 * 65535, INDIRECT, 0),
        ],
    )
}

/// A request's header: what to do, and where.
fn header(kind: u32, sector: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    bytes
}

fn vhost_huge(field: &mut Field) -> Result<()> {
    offer(field, huge, &[0])
}

/// 1022 descriptors that each say all of the guest's memory.
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

/// Four reads of 1 MiB in pieces of 4 KiB.
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

/// Kinds that there are not, sectors beyond the end, and memory that is not there.
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
        // The pace of the attack.
        sleep(Duration::from_millis(1));
    }
    Ok(())
}
