//! Attacks on the isolation between clients: by replacement of the server process, memory that the
//! server shares with a client, storage servers, and management endpoints. They are evaluated by
//! counts.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::{
    FlockOperation, MemfdFlags, SealFlags, fcntl_add_seals, fcntl_lock, ftruncate, memfd_create,
};
use rustix::process::{Pid, Signal, kill_process};
use shadowbell_spec::admin::{Identify, NamespaceAttachment, NamespaceManagement, Sanitize};
use shadowbell_spec::identify::{ControllerList, NamespaceToCreate};
use shadowbell_spec::{Sqe, regs};
use shadowbell_testing::wait;
use shadowbell_vfio_user::client::{Client, Options};
use shadowbell_vfio_user::migration::MigrationState;
use shadowbell_vfio_user::wire::command;
use zerocopy::IntoBytes;

use super::maps::{page_lists, sparse_reads};
use super::messages::{set_migration_state, start_logging};
use crate::attack::{Attack, Field, Kind};
use crate::peer::connection::{Connection, dma_map};
use crate::peer::guest::Guest;
use crate::peer::queue::BAR0;
use crate::random::Random;
use crate::server::{server_process, worker_of};

const MEM: &[&str] = &["mem:16MiB"];
const FILE: &[&str] = &["DIR/attacker.img=16777216"];
/// Number of completed reads that show that the victim is served.
const PROGRESS: u64 = 20;

/// Attack that is evaluated by counts. It is in the short suite, because counts do not depend on
/// other load of the machine.
const fn counted(
    name: &'static str,
    about: &'static str,
    disks: &'static [&'static str],
    run: fn(&mut Field) -> Result<()>,
) -> Attack {
    Attack { kind: Kind::Counted, ..Attack::new(name, about, disks, run).short() }
}

pub(crate) const ATTACKS: &[Attack] = &[
    counted("sealed-memory", "memory that the next process cannot map, and upgrades", MEM, sealed),
    counted("locked-image", "an image that another program locks after a crash", FILE, locked),
    counted("no-quiesce", "a stopped VMM with commands in flight, and upgrades", FILE, stopped),
    counted("grow-memory", "attempts to grow and seal the server's memory", MEM, grow),
    Attack {
        options: &["--sandbox", "off"],
        prepare: Some(storage_server),
        ..counted(
            "nbd-errors",
            "an NBD server that answers a read with error chunks without end",
            &["nbd+unix:///?socket=DIR/storage.sock"],
            error_chunks,
        )
    },
    counted(
        "overwrite",
        "Sanitize with 16 passes, and the bytes that are written per second",
        &["pool:DIR/pool?capacity=64MiB&overwrite-rate=16MiB"],
        overwrite,
    ),
    Attack {
        prepare: Some(packed_image),
        ..counted(
            "inflate",
            "reads of a compressed qcow2 image at a high queue depth",
            &["DIR/packed.qcow2?format=qcow2"],
            inflate,
        )
    },
    counted("dirty-log", "a page written per 2 MiB of memory with a dirty log", MEM, dirty_log),
    Attack {
        options: &["--metrics", "127.0.0.1:0"],
        ..counted("metrics", "silent and foreign clients of the metrics", MEM, metrics)
    },
];

/// Restarts the server for upgrade. Returns the output, or `None` if the server cannot be upgraded
/// at the moment.
fn upgrade(field: &mut Field) -> Result<Option<String>> {
    let target = field.server.to_string();
    let output = Command::new(&field.binary).args(["upgrade", &target]).output()?;
    let text =
        [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    let text = text.concat();
    if output.status.success() {
        return Ok(Some(text));
    }
    if text.contains("try again") || text.contains("another upgrade") {
        wait::pause();
        return Ok(None);
    }
    field.found(format!("an upgrade fails: {text}"));
    Ok(None)
}

/// Checks that the victim's reads still complete.
pub(super) fn victim_is_served(field: &mut Field, while_: &str) {
    let wanted = field.clock.reads() + PROGRESS;
    let deadline = wait::deadline();
    while field.clock.reads() < wanted && !field.is_over() {
        if Instant::now() > deadline {
            return field.found(format!("the victim is not served {while_}"));
        }
        wait::pause();
    }
}

/// Waits until `done` returns true. Records a failure if the common time limit of waits expires
/// before.
fn wait_until(field: &mut Field, what: &str, mut done: impl FnMut() -> bool) {
    let deadline = wait::deadline();
    while !done() {
        if Instant::now() > deadline {
            return field.found(what.to_owned());
        }
        wait::pause();
    }
}

/// Shares memory, seals it so that no other process can map it for writing, and upgrades the
/// server.
fn sealed(field: &mut Field) -> Result<()> {
    while !field.is_over() {
        let file = memfd_create("sealed", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)?;
        ftruncate(&file, 1 << 20)?;
        let mut link = Connection::attach(field.socket())?;
        let map = dma_map(0, 1 << 20, 0);
        link.request(command::DMA_MAP, &[map.as_bytes()], &[file.as_fd()])?;
        fcntl_add_seals(&file, SealFlags::FUTURE_WRITE)?;
        let Some(output) = upgrade(field)? else { continue };
        if !output.contains("vm1.sock: its client") {
            field.found(format!("the upgrade does not name the dropped client: {output}"));
        }
        victim_is_served(field, "after an upgrade without the attacker");
        wait_until(field, "the attacker's client remains", || link.is_closed());
        field.done += 1;
    }
    Ok(())
}

/// Simulation of another program that locks an image as soon as the server process releases it.
struct Locker {
    locked: Receiver<()>,
    release: Sender<()>,
}

impl Locker {
    fn of(image: &Path) -> Result<Self> {
        let file = fs::OpenOptions::new().read(true).write(true).open(image)?;
        let (lock, locked) = channel();
        let (release, released) = channel();
        std::thread::spawn(move || {
            // This type of lock belongs to a process, and conflicts with the lock of the server.
            if fcntl_lock(&file, FlockOperation::LockExclusive).is_ok() && lock.send(()).is_ok() {
                let _ = released.recv();
            }
        });
        Ok(Self { locked, release })
    }
}

/// Kills the server process until another program has the lock of the attacker's image.
fn locked(field: &mut Field) -> Result<()> {
    while !field.is_over() {
        let mut guest = field.guest()?;
        guest.link.set_patience(wait::LIMIT)?;
        let locker = Locker::of(&field.directory.join("attacker.img"))?;
        let deadline = wait::deadline();
        loop {
            // The server process serves the victim for a while, so that its death is not part of a
            // crash loop.
            victim_is_served(field, "between two crashes");
            let worker = worker_of(field.server).context("no server process")?;
            let pid = Pid::from_raw(worker.cast_signed()).context("a process number")?;
            kill_process(pid, Signal::KILL)?;
            // On a busy machine, the next server process may get the lock before the other program.
            // Then the kill is repeated.
            if locker.locked.recv_timeout(Duration::from_millis(100)).is_ok() {
                break;
            }
            ensure!(Instant::now() < deadline, "the other program gets no lock");
        }
        victim_is_served(field, "while another program has the attacker's image");
        let _ = locker.release.send(());
        if let Err(error) = guest.link.read(BAR0, regs::CSTS, 4) {
            field.found(format!("the attacker is not served after the wait: {error:#}"));
        }
        field.done += 1;
    }
    Ok(())
}

/// Upgrades the server in two conditions at once: a VMM has stopped its controller for migration,
/// and another client always has writes in flight.
fn stopped(field: &mut Field) -> Result<()> {
    while !field.is_over() {
        let mut guest = field.guest_with(4, 64)?;
        let buffer = guest.buffer(1 << 20)?;
        let mut make = |_| Sqe::write(1, 0, 2047, 0).with_prps(buffer.0, buffer.1);
        field.top_up(&mut guest, 63, &mut make)?;
        let stops = field.done.is_multiple_of(2);
        if stops && !set_migration_state(&mut guest, MigrationState::StopCopy)? {
            bail!("the controller cannot be stopped");
        }
        field.top_up(&mut guest, 63, &mut make)?;
        if upgrade(field)?.is_some() {
            victim_is_served(field, "after an upgrade that the attacker did not quiesce for");
            field.done += 1;
        }
    }
    Ok(())
}

/// Tries to enlarge and to seal all memory files that the server shares with a client.
fn grow(field: &mut Field) -> Result<()> {
    while !field.is_over() {
        let client = Client::connect(field.socket(), Options { timeout: Some(wait::LIMIT) })?;
        let mut areas = 0;
        for region in 0..9 {
            for area in client.region_info(region)?.areas {
                areas += 1;
                if ftruncate(&*area.fd, 2 << 30).is_ok() {
                    field.found(format!("a client grows the memory of region {region}"));
                }
                if fcntl_add_seals(&*area.fd, SealFlags::WRITE).is_ok() {
                    field.found(format!("a client seals the memory of region {region}"));
                }
            }
        }
        ensure!(areas > 0, "the server gives no memory to its clients");
        field.done += areas;
    }
    Ok(())
}

/// True if the storage server sends error chunks without end.
static IS_HOSTILE: AtomicBool = AtomicBool::new(false);
/// Number of replies that consist of error chunks, and the largest number of chunks in one reply.
static REPLIES: AtomicU64 = AtomicU64::new(0);
static MAX_CHUNKS: AtomicU64 = AtomicU64::new(0);
/// Number of chunks after which the storage server ends a reply. They are far more than fit into
/// the buffers of a socket, so the client must have read most of them.
const MAX_SENT: u64 = 200_000;

/// Starts an NBD server at `storage.sock`. Its export has 16 MiB of zeroes, and accepts writes.
pub fn storage_server(directory: &Path) -> Result<()> {
    IS_HOSTILE.store(false, Ordering::Relaxed);
    MAX_CHUNKS.store(0, Ordering::Relaxed);
    REPLIES.store(0, Ordering::Relaxed);
    let listener = UnixListener::bind(directory.join("storage.sock"))?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || serve_storage(stream));
        }
    });
    Ok(())
}

fn array<const N: usize>(stream: &mut UnixStream) -> Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// Serves one connection: 16 MiB of zeroes, or error chunks.
fn serve_storage(mut stream: UnixStream) -> Result<()> {
    const ACK: u32 = 1;
    const INFO: u32 = 3;
    const UNSUPPORTED: u32 = 1 << 31 | 1;
    stream.write_all(b"NBDMAGICIHAVEOPT\0\x03")?;
    array::<4>(&mut stream)?;
    loop {
        let head: [u8; 16] = array(&mut stream)?;
        let word = |at: usize| head[at..at + 4].iter().fold(0, |sum, b| sum << 8 | u32::from(*b));
        let (option, len) = (word(8), word(12));
        stream.read_exact(&mut vec![0; len as usize])?;
        let mut reply = |kind: u32, data: &[u8]| {
            let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
            [option, kind, data.len() as u32].iter().for_each(|n| bytes.extend(n.to_be_bytes()));
            bytes.extend(data);
            stream.write_all(&bytes)
        };
        match option {
            // NBD_OPT_STRUCTURED_REPLY
            8 => reply(ACK, &[])?,
            // NBD_OPT_GO: the size, and the flags "has flags" and "flush".
            7 => {
                let info = [&0u16.to_be_bytes()[..], &(16u64 << 20).to_be_bytes(), &[0, 5]];
                reply(INFO, &info.concat())?;
                reply(ACK, &[])?;
                break;
            }
            _ => reply(UNSUPPORTED, &[])?,
        }
    }
    loop {
        let request: [u8; 28] = array(&mut stream)?;
        let (kind, cookie) = (request[7], &request[8..16]);
        let len = u32::from_be_bytes([request[24], request[25], request[26], request[27]]);
        let chunk = |flags: u16, kind: u16, data: &[u8]| {
            let mut bytes = 0x668e_33ef_u32.to_be_bytes().to_vec();
            bytes.extend(flags.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend(cookie);
            bytes.extend((data.len() as u32).to_be_bytes());
            bytes.extend(data);
            bytes
        };
        match kind {
            0 if IS_HOSTILE.load(Ordering::Relaxed) => {
                // NBD_REPLY_TYPE_ERROR with EIO and no message, not the last chunk.
                let error = chunk(0, 1 << 15 | 1, &[0, 0, 0, 5, 0, 0]);
                REPLIES.fetch_add(1, Ordering::Relaxed);
                let mut count = 0;
                while count < MAX_SENT && stream.write_all(&error).is_ok() {
                    count += 1;
                }
                MAX_CHUNKS.fetch_max(count, Ordering::Relaxed);
                return Ok(());
            }
            0 => {
                let data = [&request[16..24], &vec![0; len as usize]].concat();
                stream.write_all(&chunk(1, 1, &data))?;
            }
            1 => {
                stream.read_exact(&mut vec![0; len as usize])?;
                stream.write_all(&chunk(1, 0, &[]))?;
            }
            2 => return Ok(()),
            _ => stream.write_all(&chunk(1, 0, &[]))?,
        }
    }
}

/// Reads from a disk whose storage server answers with error chunks.
fn error_chunks(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(1, 64)?;
    let (prp1, prp2) = guest.buffer(4096)?;
    IS_HOSTILE.store(true, Ordering::Relaxed);
    field.fill_many(vec![guest], 4, |n| Sqe::read(1, n % 1024, 7, 0).with_prps(prp1, prp2))?;
    wait_until(field, "no read reaches the storage server", || REPLIES.load(Ordering::Relaxed) > 0);
    // When the client closes the connection, the reply that is being sent ends, and its number of
    // chunks is known.
    wait_until(field, "a connection with error chunks does not end", || {
        MAX_CHUNKS.load(Ordering::Relaxed) > 0
    });
    let most = MAX_CHUNKS.load(Ordering::Relaxed);
    if most >= MAX_SENT {
        field.found(format!("the server reads {most} error chunks of one reply"));
    }
    field.done = REPLIES.load(Ordering::Relaxed);
    Ok(())
}

/// Bytes that a process has passed to `write` and the like.
fn written_by(pid: u32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/io"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("wchar: "));
    line.context("no wchar")?.trim().parse().context("wchar")
}

/// CNTLID of the guest's controller.
fn controller_id(guest: &mut Guest) -> Result<u16> {
    let page = guest.alloc(4096)?;
    let fields = Identify { cns: 1, ..Identify::default() };
    guest.admin_ok(Sqe::identify(0, fields, 0).with_prps(Guest::address(page), 0))?;
    guest.memory.read(page as usize + 78).context("Identify data")
}

/// Starts a sanitize operation that overwrites a namespace in 16 passes, and compares the number of
/// bytes that the server writes with the rate limit of the pool.
fn overwrite(field: &mut Field) -> Result<()> {
    const RATE: u64 = 16 << 20;
    /// Size of the namespace in bytes, and the number of bytes that may be written at once before
    /// the rate limit applies.
    const BYTES: u64 = 32 << 20;
    const AT_ONCE: u64 = 16 << 20;
    let mut guest = field.guest()?;
    let blocks = BYTES / 512;
    let wanted = NamespaceToCreate { nsze: blocks, ncap: blocks, ..NamespaceToCreate::default() };
    let page = guest.place(wanted.as_bytes())?;
    let fields = NamespaceManagement { sel: NamespaceManagement::CREATE, csi: 0 };
    let created = guest.admin(Sqe::namespace_management(0, fields, 0).with_prps(page, 0))?;
    // In a later round the namespace exists already, so it cannot be created.
    let nsid = if created.status().is_success() { created.dw0 } else { 1 };
    let own = controller_id(&mut guest)?;
    let controllers = guest.place(ControllerList::from(0, [own]).as_bytes())?;
    let fields = NamespaceAttachment { sel: NamespaceAttachment::ATTACH };
    guest.admin(Sqe::namespace_attachment(nsid, fields, 0).with_prps(controllers, 0))?;
    guest.create_queue(16)?;
    let (prp1, prp2) = guest.buffer(128 << 10)?;
    for block in (0..blocks).step_by(256) {
        let sqe = Sqe::write(nsid, block, 255, 0).with_prps(prp1, prp2);
        let status = guest.io(0, sqe)?.status();
        ensure!(status.is_success(), "a write: {status}");
    }
    field.begin();
    let worker = server_process(field.server)?;
    let (before, began) = (written_by(worker)?, Instant::now());
    let fields = Sanitize { sanact: Sanitize::OVERWRITE, ause: true, ..Sanitize::default() };
    guest.admin_ok(Sqe::sanitize(fields, 0))?;
    while !field.is_over() {
        let written = written_by(worker)?.saturating_sub(before);
        let permitted = RATE as f64 * began.elapsed().as_secs_f64();
        if written > permitted as u64 + AT_ONCE {
            field.found(format!(
                "an overwrite of {} MiB per second has written {} MiB in {} ms",
                RATE >> 20,
                written >> 20,
                began.elapsed().as_millis()
            ));
            break;
        }
        field.done = written;
        // The interval of the measurements.
        sleep(Duration::from_millis(10));
    }
    if field.done == 0 {
        field.found("the overwrite writes nothing".to_owned());
    }
    field.guests.push(guest);
    Ok(())
}

/// Starts a dirty log, and reads into one page in every 2 MiB of sparse memory. The bound on the
/// growth of the server's memory also applies to the log.
fn dirty_log(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(16, 64)?;
    if !start_logging(&mut guest)? {
        bail!("the controller logs no writes");
    }
    let lists = page_lists(&mut guest)?;
    field.fill(guest, sparse_reads(lists))
}

/// Asks for `/metrics` with this Host header. Returns the status.
fn scrape(address: &str, host: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(wait::LIMIT))?;
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n")?;
    let mut head = [0; 12];
    stream.read_exact(&mut head)?;
    Ok(String::from_utf8_lossy(&head[9..]).into_owned())
}

/// Holds silent connections to the metrics endpoint, and sends requests with forbidden host names.
/// An honest client must still get the metrics.
fn metrics(field: &mut Field) -> Result<()> {
    let log = fs::read_to_string(field.directory.join("log"))?;
    let address = log.split("http://").nth(1).and_then(|rest| rest.split('/').next());
    let address = address.context("the log has no address of the metrics")?.to_owned();
    let mut silent = Vec::new();
    while !field.is_over() {
        while silent.len() < 64 {
            silent.push(TcpStream::connect(&*address)?);
        }
        for (host, wanted) in [(&*address, "200"), ("evil.example", "400"), ("", "400")] {
            match scrape(&address, host) {
                Ok(status) if status == wanted => field.done += 1,
                Ok(status) => field.found(format!("host {host:?}: {status}, not {wanted}")),
                Err(error) => field.found(format!("host {host:?}: no response: {error:#}")),
            }
        }
        silent.drain(..32);
    }
    Ok(())
}

/// Makes a compressed qcow2 image of 64 MiB.
fn packed_image(directory: &Path) -> Result<()> {
    let (raw, packed) = (directory.join("raw.img"), directory.join("packed.qcow2"));
    let mut random = Random::new(1);
    // Each byte has a few bits of entropy, so that decompression takes far longer than reading.
    let bytes: Vec<u8> = (0..64 << 20).map(|_| b'a' + random.below(9) as u8).collect();
    fs::write(&raw, bytes)?;
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-c", "-f", "raw", "-O", "qcow2"]).args([&raw, &packed]);
    let status = command.status().context("`qemu-img`, which is in Debian's qemu-utils")?;
    ensure!(status.success(), "`qemu-img convert` has failed");
    Ok(fs::remove_file(raw)?)
}

/// Number of a process's threads with this name, and their total CPU time in clock ticks.
fn threads_named(pid: u32, name: &str) -> Result<(u64, u64)> {
    let (mut count, mut ticks) = (0, 0);
    for task in fs::read_dir(format!("/proc/{pid}/task"))?.flatten() {
        // A thread may end meanwhile.
        let Ok(stat) = fs::read_to_string(task.path().join("stat")) else { continue };
        let Some((head, rest)) = stat.rsplit_once(") ") else { continue };
        if head.split_once('(').is_some_and(|(_, its)| its == name) {
            let fields = rest.split(' ').skip(11).take(2);
            count += 1;
            ticks += fields.filter_map(|field| field.parse::<u64>().ok()).sum::<u64>();
        }
    }
    Ok((count, ticks))
}

/// Reads compressed clusters with many commands in flight. The server must decompress only on its
/// threads for this purpose, which may use at most half of the CPUs.
fn inflate(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(4, 64)?;
    let (prp1, prp2) = guest.buffer(64 << 10)?;
    field.fill(guest, |n| Sqe::read(1, n * 7 % 1024 * 128, 127, 0).with_prps(prp1, prp2))?;
    let worker = server_process(field.server)?;
    let (inflating, own) = threads_named(worker, "sb-inflate")?;
    let (_, others) = threads_named(worker, "sb-qcow2")?;
    let most = std::thread::available_parallelism().map_or(1, |count| count.get() / 2).max(1);
    if inflating == 0 || inflating > most as u64 {
        field.found(format!("{inflating} threads inflate, at most {most} may"));
    }
    if others > own {
        field.found(format!("the disk's threads ran for {others} ticks, the others for {own}"));
    }
    Ok(())
}
