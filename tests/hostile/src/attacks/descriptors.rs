//! Attacks by file descriptors: eventfds with many waiters, and many descriptors of any type.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::thread::sleep;
use std::time::Duration;

use anyhow::Result;
use rustix::event::{EventfdFlags, epoll, eventfd};
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::{CreateIoCq, CreateIoSq};
use shadowbell_vfio_user::wire::{self, command, header_flags, set_irqs_flags};
use zerocopy::IntoBytes;

use crate::attack::{Attack, Field};
use crate::peer::connection::{dma_map, message};
use crate::peer::guest::{Guest, PAGE, memfd};

const MEM: &[&str] = &["mem:16MiB"];
/// Index of the MSI-X interrupts.
const MSIX: u32 = 2;

pub(crate) const ATTACKS: &[Attack] = &[
    Attack::new("irq-fds", "SET_IRQS with 64 eventfds without end", MEM, irq_fds).short(),
    Attack::new(
        "irq-waiters",
        "18,000 epoll instances wait for an interrupt's eventfd",
        MEM,
        irq_waiters,
    ),
    Attack::new("irq-full", "interrupts to eventfds that are full", MEM, irq_full),
    Attack::new("irq-triggers", "interrupts triggered by the client", MEM, irq_triggers),
    Attack::new("fd-flood", "64 descriptors with each message, of unexpected types", MEM, fd_flood),
    Attack::new("io-fds", "DEVICE_GET_REGION_IO_FDS without end", MEM, io_fds),
    Attack::new(
        "passed-sockets",
        "sockets with descriptors in flight, passed and closed",
        MEM,
        sockets,
    ),
];

fn event() -> Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

fn set_irqs(flags: u32, count: u32) -> wire::SetIrqs {
    let flags = flags | set_irqs_flags::ACTION_TRIGGER;
    wire::SetIrqs { argsz: 20, flags, index: MSIX, start: 0, count }
}

/// Assigns eventfds to the first interrupt vectors, in messages with at most `at_once` descriptors
/// each.
fn give(guest: &mut Guest, events: &[OwnedFd], at_once: usize) -> Result<()> {
    for (n, events) in events.chunks(at_once).enumerate() {
        let mut set = set_irqs(set_irqs_flags::DATA_EVENTFD, events.len() as u32);
        set.start = (n * at_once) as u32;
        let fds: Vec<BorrowedFd<'_>> = events.iter().map(AsFd::as_fd).collect();
        guest.link.request(command::DEVICE_SET_IRQS, &[set.as_bytes()], &fds)?;
    }
    Ok(())
}

fn irq_fds(field: &mut Field) -> Result<()> {
    let mut guest = field.guest()?;
    let mut events = (0..64).map(|_| event()).collect::<Result<Vec<_>>>()?;
    let mut at_once = 64;
    while !field.is_over() {
        if give(&mut guest, &events, at_once).is_err() {
            // The server has refused 64 descriptors in one message, because it advertises a maximum
            // of 16. The attack continues with this maximum.
            (at_once, guest) = (16, field.guest()?);
        }
        field.done += events.len() as u64;
        // The next messages set 64 new eventfds.
        events = (0..64).map(|_| event()).collect::<Result<Vec<_>>>()?;
    }
    field.guests.push(guest);
    Ok(())
}

/// Attaches a guest whose only queue raises the first vector with each completion.
fn interrupted(field: &Field, event: &OwnedFd) -> Result<Guest> {
    let mut guest = field.guest()?;
    give(&mut guest, &[event.try_clone()?], 1)?;
    guest.create_queue(64)?;
    // The queue is created again on the same rings, with interrupts enabled.
    let queue = guest.queues.remove(0);
    guest.admin_ok(Sqe::delete_io_sq(1, 0))?;
    guest.admin_ok(Sqe::delete_io_cq(1, 0))?;
    let (sq, cq) = guest.ring_addresses(&queue);
    let fields = CreateIoCq { qid: 1, qsize0: 63, pc: true, ien: true, iv: 0 };
    guest.admin_ok(Sqe::create_io_cq(fields, cq, 0))?;
    let fields = CreateIoSq { qid: 1, qsize0: 63, pc: true, cqid: 1, ..CreateIoSq::default() };
    guest.admin_ok(Sqe::create_io_sq(fields, sq, 0))?;
    guest.queues.push(queue);
    Ok(guest)
}

fn one_by_one(field: &mut Field, mut guest: Guest) -> Result<()> {
    let (prp1, _) = guest.buffer(PAGE)?;
    let mut make = move |_| Sqe::read(1, 0, 7, 0).with_prps(prp1, 0);
    while !field.is_over() {
        field.top_up(&mut guest, 8, &mut make)?;
        // This pause sets the pace of the attack.
        sleep(Duration::from_micros(50));
    }
    field.guests.push(guest);
    Ok(())
}

fn irq_waiters(field: &mut Field) -> Result<()> {
    let event = event()?;
    let guest = interrupted(field, &event)?;
    let mut waiters = Vec::new();
    for _ in 0..18_000 {
        let Ok(waiter) = epoll::create(epoll::CreateFlags::CLOEXEC) else { break };
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(&waiter, &event, epoll::EventData::new_u64(0), flags)?;
        waiters.push(waiter);
    }
    field.begin();
    one_by_one(field, guest)
}

fn irq_full(field: &mut Field) -> Result<()> {
    let event = eventfd(0, EventfdFlags::CLOEXEC)?;
    rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes())?;
    let guest = interrupted(field, &event)?;
    one_by_one(field, guest)
}

fn irq_triggers(field: &mut Field) -> Result<()> {
    let event = event()?;
    let mut guest = interrupted(field, &event)?;
    let set = set_irqs(set_irqs_flags::DATA_NONE, 1);
    let bytes = message(command::DEVICE_SET_IRQS, header_flags::NO_REPLY, &[set.as_bytes()]);
    let bytes = bytes.repeat(128);
    while !field.is_over() {
        guest.link.flood(&bytes)?;
        field.done += 128;
        // This pause sets the pace of the attack.
        sleep(Duration::from_micros(200));
    }
    field.guests.push(guest);
    Ok(())
}

fn fd_flood(field: &mut Field) -> Result<()> {
    let file = memfd(PAGE)?;
    let (reader, _writer) = rustix::pipe::pipe()?;
    let null = OwnedFd::from(std::fs::File::open("/dev/null")?);
    let tree = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let odd = [&file, &reader, &null, &tree];
    let map = dma_map(1 << 41, PAGE, 0);
    let bytes = message(command::DMA_MAP, 0, &[map.as_bytes()]);
    while !field.is_over() {
        let mut link = crate::peer::connection::Connection::attach(field.socket())?;
        for _ in 0..4 {
            let fds: Vec<_> = (0..64).filter_map(|n| odd.get(n % 4)).map(|fd| fd.as_fd()).collect();
            if link.send(&bytes, &fds).and_then(|()| link.throw_away()).is_err() {
                break;
            }
            field.done += 64;
        }
    }
    Ok(())
}

fn io_fds(field: &mut Field) -> Result<()> {
    let request = wire::RegionIoFds { argsz: 4096, flags: 0, index: 0, count: 0 };
    let bytes = message(command::DEVICE_GET_REGION_IO_FDS, 0, &[request.as_bytes()]).repeat(16);
    let mut guest = field.guest_with(4, 64)?;
    while !field.is_over() {
        guest.link.flood(&bytes)?;
        field.done += 16;
        // This pause sets the pace of the attack.
        sleep(Duration::from_micros(100));
    }
    guest.link.settle()?;
    field.guests.push(guest);
    Ok(())
}

/// Sends sockets that contain other sockets as messages in flight. If the outermost socket is
/// closed, the kernel's garbage collector has to close all of them.
fn sockets(field: &mut Field) -> Result<()> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let map = dma_map(1 << 41, PAGE, 0);
    let bytes = message(command::DMA_MAP, 0, &[map.as_bytes()]);
    let file = memfd(PAGE)?;
    while !field.is_over() {
        let link = crate::peer::connection::Connection::attach(field.socket())?;
        let mut inner: Option<OwnedFd> = None;
        for _ in 0..64 {
            let flags = SocketFlags::CLOEXEC;
            let (a, b) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            let fds = vec![inner.as_ref().unwrap_or(&file).as_fd(); 200];
            let carrier = crate::peer::connection::send_fds(b.as_fd(), b"x", &fds);
            if carrier.is_err() {
                break;
            }
            inner = Some(a);
        }
        if let Some(inner) = &inner {
            let _ = link.send(&bytes, &[inner.as_fd()]);
        }
        drop(inner);
        field.done += 1;
        // This pause sets the pace of the attack.
        sleep(Duration::from_millis(1));
    }
    Ok(())
}
