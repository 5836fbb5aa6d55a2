//! Attacks by messages: floods, invalid requests, silent connections.

use std::os::fd::AsFd;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use shadowbell_spec::regs;
use shadowbell_vfio_user::migration::{
    DeviceFeature, DeviceState, LOG_PAGE, LoggingControl, MigData, MigrationState, feature,
    feature_flags,
};
use shadowbell_vfio_user::wire::{self, command, header_flags};
use zerocopy::IntoBytes;

use crate::attack::{Attack, Field};
use crate::peer::connection::{Connection, dma_map, message, posted_write, read_request};
use crate::peer::guest::{BASE, CONFIG, Guest, PAGE, memfd};
use crate::peer::queue::BAR0;
use crate::server::LogReader;

const MEM: &[&str] = &["mem:16MiB"];

pub(crate) const ATTACKS: &[Attack] = &[
    Attack {
        log: LogReader::Nobody,
        ..Attack::new("log-stalled", "refused maps, and the log has no reader", MEM, bad_maps)
    },
    Attack::new("log-flood", "refused maps: size of the log", MEM, bad_maps).short(),
    Attack::new("log-doorbells", "invalid doorbell values: size of the log", MEM, bad_doorbells),
    Attack::new("log-connects", "clients that send invalid messages", MEM, nonsense),
    Attack::new("register-flood", "register reads without end", MEM, register_flood),
    Attack::new("large-reads", "reads of 1 MiB of BAR0 without end", MEM, large_reads),
    Attack::new("unread", "1 MiB reads whose replies are not read", MEM, unread),
    Attack::new("doorbell-flood", "doorbells of one queue without end", MEM, doorbell_flood),
    Attack::new("write-multi", "REGION_WRITE_MULTI of as many writes as fit", MEM, write_multi)
        .short(),
    Attack::new("byte-by-byte", "messages that are sent byte by byte", MEM, byte_by_byte),
    Attack::new("connects", "connections without end", MEM, connects),
    Attack::new("silent", "2000 connections that send nothing", MEM, silent),
    Attack::new("device-reset", "DEVICE_RESET without end", MEM, device_reset),
    Attack::new("nested-json", "VERSION with 1 MB of nested JSON", MEM, nested_json),
    Attack::new("migration-states", "migration states of 1 MB without end", MEM, migration_states),
];

/// Sends `messages` repeatedly until the end of the attack.
fn repeat(field: &mut Field, messages: &[u8], each: u64) -> Result<()> {
    let mut guest = field.guest_with(1, 64)?;
    while !field.is_over() {
        guest.link.flood(messages)?;
        field.done += each;
        // This pause sets the pace of the attack.
        sleep(Duration::from_micros(100));
    }
    guest.link.settle()?;
    field.guests.push(guest);
    Ok(())
}

/// Sends DMA maps that the server refuses for four different reasons. Without a rate limit, the
/// server would log each refusal, and so fill its log.
fn bad_maps(field: &mut Field) -> Result<()> {
    let file = memfd(1 << 20)?;
    let mut guest = field.guest_with(1, 64)?;
    // Unaligned, beyond the file, overlapping, and without a descriptor.
    let maps = [(1 << 40 | 1, PAGE, 0), (1 << 41, PAGE, 1 << 30), (BASE, PAGE, 0), (0, 3, 5)];
    let maps = maps.map(|(address, size, offset)| dma_map(address, size, offset));
    while !field.is_over() {
        for n in 0..64 {
            for map in &maps {
                let bytes = message(command::DMA_MAP, 0, &[map.as_bytes()]);
                let fds = [file.as_fd()];
                let with = if n % 8 == 0 { &fds[..0] } else { &fds[..] };
                guest.link.send(&bytes, with)?;
            }
            guest.link.throw_away()?;
        }
        field.done += 256;
        // This pause sets the pace of the attack.
        sleep(Duration::from_micros(100));
    }
    guest.link.settle()?;
    field.guests.push(guest);
    Ok(())
}

fn bad_doorbells(field: &mut Field) -> Result<()> {
    let write = |offset, value: u32| posted_write(BAR0, offset, &value.to_le_bytes());
    let (mine, other) = (regs::sq_doorbell_offset(1, 0), regs::sq_doorbell_offset(44, 0));
    let messages = [write(mine, 0xffff), write(other, 5), write(mine + 4, 60)].concat();
    repeat(field, &messages.repeat(64), 192)
}

fn nonsense(field: &mut Field) -> Result<()> {
    while !field.is_over() {
        for _ in 0..16 {
            let link = Connection::open(field.socket())?;
            let _ = link.send(&[0xff; 64], &[]);
            field.done += 1;
        }
        // This pause sets the pace of the attack.
        sleep(Duration::from_micros(500));
    }
    Ok(())
}

fn register_flood(field: &mut Field) -> Result<()> {
    repeat(field, &read_request(BAR0, regs::CSTS, 4).repeat(256), 256)
}

fn large_reads(field: &mut Field) -> Result<()> {
    let messages = [read_request(BAR0, 0, 0x4000), read_request(CONFIG, 0, 4096)].concat();
    repeat(field, &messages.repeat(64), 128)
}

fn unread(field: &mut Field) -> Result<()> {
    let guest = field.guest()?;
    let messages = read_request(BAR0, 0, 0x4000).repeat(64);
    while !field.is_over() {
        // Sends messages until the socket is full because the server has stopped reading.
        let sent = rustix::net::send(
            guest.link.socket(),
            &messages,
            rustix::net::SendFlags::DONTWAIT | rustix::net::SendFlags::NOSIGNAL,
        );
        field.done += u64::from(sent.is_ok());
        // This pause sets the pace of the attack.
        sleep(Duration::from_millis(1));
    }
    Ok(())
}

fn doorbell_flood(field: &mut Field) -> Result<()> {
    let offset = regs::sq_doorbell_offset(1, 0);
    let pair = |n: u32| posted_write(BAR0, offset, &(n % 64).to_le_bytes());
    let messages: Vec<u8> = (0..512).flat_map(pair).collect();
    repeat(field, &messages, 512)
}

fn write_multi(field: &mut Field) -> Result<()> {
    let entry = |n: u32| wire::MultiEntry {
        offset: regs::sq_doorbell_offset(1, 0),
        region: BAR0,
        count: 4,
        data: u64::from(n % 64).to_le_bytes(),
    };
    let entries: Vec<_> = (0..40_000).map(entry).collect();
    let count = (entries.len() as u64).to_le_bytes();
    let parts = [&count[..], entries.as_bytes()];
    let bytes = message(command::REGION_WRITE_MULTI, header_flags::NO_REPLY, &parts);
    repeat(field, &bytes, entries.len() as u64)
}

fn byte_by_byte(field: &mut Field) -> Result<()> {
    let guest = field.guest()?;
    let bytes = posted_write(BAR0, regs::INTMS, &[0; 4]);
    while !field.is_over() {
        for byte in &bytes {
            guest.link.send(std::slice::from_ref(byte), &[])?;
        }
        field.done += 1;
    }
    field.guests.push(guest);
    Ok(())
}

fn connects(field: &mut Field) -> Result<()> {
    while !field.is_over() {
        for _ in 0..32 {
            drop(Connection::open(field.socket()));
            field.done += 1;
        }
        // This pause sets the pace of the attack.
        sleep(Duration::from_micros(200));
    }
    Ok(())
}

fn silent(field: &mut Field) -> Result<()> {
    let mut links = Vec::new();
    while !field.is_over() {
        while links.len() < 2000 && !field.is_over() {
            links.push(silent_connection(field.socket())?);
            field.done += 1;
        }
        // This pause sets the pace of the attack.
        sleep(Duration::from_millis(1));
    }
    Ok(())
}

/// Connects and sends nothing. The socket is non-blocking, because connecting would block if the
/// backlog of the listening socket is full.
pub(super) fn silent_connection(path: &std::path::Path) -> Result<std::os::fd::OwnedFd> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    if rustix::net::connect(&socket, &SocketAddrUnix::new(path)?).is_err() {
        // This pause sets the pace of the attack.
        sleep(Duration::from_micros(200));
    }
    Ok(socket)
}

fn device_reset(field: &mut Field) -> Result<()> {
    repeat(field, &message(command::DEVICE_RESET, 0, &[]).repeat(16), 16)
}

fn nested_json(field: &mut Field) -> Result<()> {
    let json = [br#"{"capabilities":"#.as_slice(), &vec![b'['; 1_000_000]].concat();
    let bytes = message(command::VERSION, 0, &[&[0, 0, 1, 0], &json, &[0]]);
    while !field.is_over() {
        let link = Connection::open(field.socket())?;
        let _ = link.send(&bytes, &[]);
        field.done += 1;
    }
    Ok(())
}

/// Starts a log of all pages that the device writes. Returns true if the server accepts that.
pub(super) fn start_logging(guest: &mut Guest) -> Result<bool> {
    let control = LoggingControl { page_size: LOG_PAGE, num_ranges: 0, reserved: 0 };
    let flags = feature_flags::SET | feature::DMA_LOGGING_START;
    let request = DeviceFeature { argsz: 24, flags };
    let payload = [request.as_bytes(), control.as_bytes()];
    let (header, _) = guest.link.try_request(command::DEVICE_FEATURE, &payload, &[])?;
    Ok(header.error == 0)
}

/// Changes the migration state. Returns true if the server accepts the change.
pub(super) fn set_migration_state(guest: &mut Guest, state: MigrationState) -> Result<bool> {
    let request =
        DeviceFeature { argsz: 16, flags: feature_flags::SET | feature::MIG_DEVICE_STATE };
    let state = DeviceState { state: state as u32, data_fd: u32::MAX };
    let payload = [request.as_bytes(), state.as_bytes()];
    let (header, _) = guest.link.try_request(command::DEVICE_FEATURE, &payload, &[])?;
    Ok(header.error == 0)
}

/// Sends a migration state that takes long to parse, and is invalid only at its end.
fn migration_states(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(1, 64)?;
    if !set_migration_state(&mut guest, MigrationState::StopCopy)? {
        bail!("the controller cannot be stopped");
    }
    let request = MigData { argsz: 8 + 4096, size: 4096 };
    let own = guest.link.request(command::MIG_DATA_READ, &[request.as_bytes()], &[])?;
    // Magic number, version and number of descriptors, copied from a state that the controller has
    // sent.
    let head = own.get(8..24).context("the beginning of the state")?;
    let lists = vec!["[]"; 300_000].join(",");
    let body = format!(r#"[{{"name":"x","mandatory":false,"body":[{lists}]}}]"#);
    let stream = [head, &(body.len() as u64).to_le_bytes(), body.as_bytes()].concat();
    while !field.is_over() {
        if !set_migration_state(&mut guest, MigrationState::Resuming)? {
            bail!("the controller takes no state");
        }
        for piece in stream.chunks(1 << 18) {
            let size = piece.len() as u32;
            let request = MigData { argsz: 8 + size, size };
            guest.link.request(command::MIG_DATA_WRITE, &[request.as_bytes(), piece], &[])?;
        }
        if set_migration_state(&mut guest, MigrationState::Stop)? {
            bail!("the state is accepted");
        }
        field.refused += 1;
        field.done += 1;
        guest.link.request(command::DEVICE_RESET, &[], &[])?;
    }
    field.guests.push(guest);
    Ok(())
}
