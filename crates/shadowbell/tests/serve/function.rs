//! The PCI function: regions, interrupts, memory, resets; and a guest without shared memory.

use crate::harness::{Server, until};
use crate::idle::{sleeps_of, status_of};
use crate::supervisor::worker;
use shadowbell_memory::{EventFd, Mapping, SharedBytes};
use shadowbell_spec::opcode::AdminOpcode;
use shadowbell_spec::{Cqe, Sqe, Status, regs};
use shadowbell_testing::wait::{LIMIT, short_pause, until_some};
use shadowbell_vfio_user::Client;
use shadowbell_vfio_user::client::{ClientError, DmaRange, Options};
use shadowbell_vfio_user::device::{DmaUnmap, IrqAction, irq, region};
use std::sync::Arc;

/// PCI Command register, and its bits Memory Space Enable and Bus Master Enable.
const COMMAND: u64 = 4;
const MEMORY: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;

/// Bus address and length of the guest's memory, and positions in it.
const IOVA: u64 = 1 << 32;
const LEN: u64 = 1 << 20;
const ASQ: u64 = IOVA;
const ACQ: u64 = IOVA + 0x1000;
const DATA: u64 = IOVA + 0x2000;
const ENTRIES: u16 = 16;

/// A minimal guest with an admin queue only.
struct Guest {
    client: Client,
    memory: Arc<Mapping>,
    /// Bus address of the Identify data.
    data: u64,
    tail: u16,
    head: u16,
    phase: bool,
}

impl Guest {
    fn new(server: &Server) -> Self {
        let client = Client::connect(server.socket(), Options { timeout: Some(LIMIT) }).unwrap();
        let memory = Mapping::shared("guest", LEN).unwrap();
        Self { client, memory, data: DATA, tail: 0, head: 0, phase: true }
    }

    /// Creates a guest with shared memory and an enabled controller.
    fn enabled(server: &Server) -> Self {
        let mut guest = Self::new(server);
        guest.share();
        guest.command(MEMORY | BUS_MASTER);
        guest.enable();
        guest
    }

    fn share(&self) {
        self.client.dma_map(&share(&self.memory, IOVA)).unwrap();
    }

    fn bytes(&self) -> SharedBytes {
        self.memory.bytes()
    }

    fn command(&self, value: u16) {
        self.client.region_write(region::CONFIG, COMMAND, &value.to_le_bytes()).unwrap();
    }

    fn config<const N: usize>(&self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.client.region_read(region::CONFIG, offset, &mut bytes).unwrap();
        bytes
    }

    fn read32(&self, offset: u64) -> u32 {
        let mut bytes = [0; 4];
        self.client.region_read(region::BAR0, offset, &mut bytes).unwrap();
        u32::from_le_bytes(bytes)
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        self.client.region_write(region::BAR0, offset, bytes).unwrap();
    }

    fn enable(&mut self) {
        (self.tail, self.head, self.phase) = (0, 0, true);
        self.bytes().fill(0, LEN as usize, 0).unwrap();
        let size = u32::from(ENTRIES - 1);
        self.write(regs::AQA, &(size << 16 | size).to_le_bytes());
        self.write(regs::ASQ, &ASQ.to_le_bytes());
        self.write(regs::ACQ, &ACQ.to_le_bytes());
        // CC.EN, and sizes of queue entries: 64 and 16 bytes.
        self.write(regs::CC, &(1u32 | 6 << 16 | 4 << 20).to_le_bytes());
        crate::harness::until("CSTS.RDY", || self.read32(regs::CSTS) & 1 == 1);
    }

    /// Submits an Identify Controller command and rings the doorbell.
    fn ring(&mut self) {
        let mut sqe = Sqe::new(AdminOpcode::Identify as u8, self.tail, 0).with_prps(self.data, 0);
        sqe.cdw10 = 1;
        self.submit(sqe);
    }

    fn submit(&mut self, sqe: Sqe) {
        let at = usize::from(self.tail) * Sqe::SIZE;
        self.bytes().write(at, &sqe).unwrap();
        self.tail = (self.tail + 1) % ENTRIES;
        self.write(regs::DOORBELLS, &u32::from(self.tail).to_le_bytes());
    }

    /// Takes the next completion, if it was posted.
    fn completed(&mut self) -> Option<Status> {
        let at = (ACQ - IOVA) as usize + usize::from(self.head) * Cqe::SIZE;
        let cqe: Cqe = self.bytes().read(at).unwrap();
        (cqe.phase() == self.phase).then(|| {
            self.head = (self.head + 1) % ENTRIES;
            self.phase ^= self.head == 0;
            self.write(regs::DOORBELLS + 4, &u32::from(self.head).to_le_bytes());
            cqe.status()
        })
    }

    /// Waits for the next completion.
    #[track_caller]
    fn completion(&mut self) -> Status {
        until_some("a completion", || self.completed())
    }

    #[track_caller]
    fn assert_usable(&mut self) {
        let serial = (DATA - IOVA) as usize + 4;
        self.bytes().fill(serial, 20, 0).unwrap();
        self.ring();
        assert_eq!(self.completion(), Status::SUCCESS);
        let mut text = [0; 2];
        self.bytes().read_into(serial, &mut text).unwrap();
        assert_eq!(&text, b"SB", "the serial number of Identify Controller");
    }
}

fn share(memory: &Mapping, iova: u64) -> DmaRange<'_> {
    let len = memory.len() as u64;
    DmaRange { iova, len, readable: true, writable: true, fd: memory.fd(), fd_offset: 0 }
}

#[test]
fn the_pci_function_is_an_nvme_controller() {
    let server = Server::start(&["mem:1MiB"], &[]);
    let guest = Guest::new(&server);
    let info = guest.client.device_info().unwrap();
    assert!(info.resettable);
    assert_eq!((info.regions, info.irqs), (region::COUNT, irq::COUNT));
    for index in 0..region::COUNT {
        let region = guest.client.region_info(index).unwrap();
        let expected = match index {
            region::BAR0 => 16 << 10,
            4 => 4 << 10,
            region::CONFIG => 4096,
            _ => 0,
        };
        assert_eq!(region.size, expected, "region {index}");
        assert!(region.areas.is_empty(), "nothing is mappable by default");
    }
    for index in 0..irq::COUNT {
        let info = guest.client.irq_info(index).unwrap();
        let expected = match index {
            irq::MSIX => 65,
            // QEMU warns of a device without an error interrupt.
            irq::ERR => 1,
            _ => 0,
        };
        assert_eq!((info.count, info.eventfd), (expected, expected != 0), "interrupt {index}");
    }
    assert_eq!(guest.config::<3>(9), [0x02, 0x08, 0x01], "class code");
    let mut found = Vec::new();
    let mut at = u64::from(guest.config::<1>(0x34)[0]);
    while at != 0 && found.len() < 16 {
        let [id, next] = guest.config::<2>(at);
        found.push(id);
        if id == shadowbell_spec::pci::CAP_ID_EXPRESS {
            let capabilities = u32::from_le_bytes(guest.config::<4>(at + 4));
            assert_ne!(capabilities & 1 << 28, 0, "function level reset");
        }
        at = next.into();
    }
    found.sort_unstable();
    let expected = [
        shadowbell_spec::pci::CAP_ID_PM,
        shadowbell_spec::pci::CAP_ID_EXPRESS,
        shadowbell_spec::pci::CAP_ID_MSIX,
    ];
    assert_eq!(found, expected);
}

#[test]
fn accesses_out_of_bounds_are_refused() {
    let server = Server::start(&["mem:1MiB"], &[]);
    let mut guest = Guest::enabled(&server);
    for (region, offset) in [
        (region::BAR0, 16 << 10),
        (region::BAR0, (16 << 10) - 2),
        (4, 4096),
        (region::CONFIG, 4096),
        (2, 0),
        (region::ROM, 0),
    ] {
        let refused = |outcome: Result<(), ClientError>| {
            assert!(matches!(outcome, Err(ClientError::Refused { .. })), "{region} {offset:#x}");
        };
        refused(guest.client.region_read(region, offset, &mut [0; 4]));
        refused(guest.client.region_write(region, offset, &[0; 4]));
    }
    // No registers exist at these offsets, and accesses of 3 bytes are not supported.
    for offset in [0x15u64, 0x1c, 0x2000, 0x3ffc] {
        guest.client.region_write(region::BAR0, offset, &[0xff; 3]).unwrap();
        guest.client.region_read(region::BAR0, offset, &mut [0; 3]).unwrap();
    }
    let whole = &mut [0; 16 << 10];
    guest.client.region_read(region::BAR0, 0, whole).unwrap();
    guest.assert_usable();
}

#[test]
fn doorbells_can_be_mapped_with_the_option() {
    let server = Server::start(&["mem:1MiB"], &["--doorbells", "mapped"]);
    let guest = Guest::new(&server);
    let bar0 = guest.client.region_info(region::BAR0).unwrap();
    let [area] = &bar0.areas[..] else { panic!("{bar0:?}") };
    assert_eq!((area.offset, area.len), (0x1000, 0x1000));
    assert_eq!(
        area.fd_offset, 0x1000,
        "clients expect the offset in the file to equal that in the region"
    );
}

#[test]
fn interrupts_are_eventfds() {
    let server = Server::start(&["mem:1MiB"], &[]);
    let mut guest = Guest::enabled(&server);
    let events: Vec<_> = (0..65).map(|_| EventFd::new().unwrap()).collect();
    guest.client.set_irq_eventfds(irq::MSIX, 0, &events).unwrap();
    guest.assert_usable();
    assert!(events[0].wait(Some(LIMIT)).unwrap(), "the admin queue has vector 0");
    events[0].drain();

    guest.client.act_on_irqs(irq::MSIX, 63, 2, IrqAction::Trigger).unwrap();
    guest.client.act_on_chosen_irqs(irq::MSIX, 1, &[false, true], IrqAction::Trigger).unwrap();
    let raised: Vec<_> = (0..65).filter(|n| events[*n].drain() != 0).collect();
    assert_eq!(raised, [2, 63, 64]);

    guest.client.clear_irq_eventfds(irq::MSIX, 2, 1).unwrap();
    guest.client.act_on_irqs(irq::MSIX, 2, 1, IrqAction::Trigger).unwrap();
    assert_eq!(events[2].drain(), 0);
    // An interrupt that was raised without an eventfd is delivered with the next eventfd.
    guest.client.set_irq_eventfds(irq::MSIX, 2, &events[2..3]).unwrap();
    assert_eq!(events[2].drain(), 1);

    guest.client.disable_irqs(irq::MSIX).unwrap();
    guest.client.disable_irqs(irq::INTX).unwrap();
    guest.assert_usable();
    assert_eq!(events[0].drain(), 0);
    for (index, start, count) in [(irq::MSIX, 65, 1), (irq::MSIX, 0, 66), (irq::INTX, 0, 1)] {
        let outcome = guest.client.act_on_irqs(index, start, count, IrqAction::Trigger);
        assert!(matches!(outcome, Err(ClientError::Refused { .. })), "{index} {start} {count}");
    }
    guest.client.act_on_irqs(irq::MSIX, 0, 1, IrqAction::Mask).unwrap_err();
    // The error interrupt can be configured, but is never raised. Its configuration raises no MSI-X
    // vector.
    guest.client.set_irq_eventfds(irq::MSIX, 0, &events).unwrap();
    guest.client.set_irq_eventfds(irq::ERR, 0, &events[7..8]).unwrap();
    guest.client.act_on_irqs(irq::ERR, 0, 1, IrqAction::Trigger).unwrap();
    guest.client.set_irq_eventfds(irq::ERR, 0, &events[7..9]).unwrap_err();
    guest.client.disable_irqs(irq::ERR).unwrap();
    guest.assert_usable();
    assert!(events[0].wait(Some(LIMIT)).unwrap(), "the eventfds are unchanged");
    assert!(events[1..].iter().all(|event| event.drain() == 0));
}

#[test]
fn without_bus_mastering_there_is_no_dma() {
    let server = Server::start(&["mem:1MiB"], &[]);
    let mut guest = Guest::enabled(&server);
    guest.assert_usable();
    guest.command(MEMORY);
    let before: Vec<_> = (0..LEN as usize / 8).map(|n| guest.bytes().read::<u64>(n * 8)).collect();
    guest.ring();
    let submitted = guest.bytes().read::<[u64; 8]>(Sqe::SIZE);
    short_pause();
    assert_eq!(guest.completed(), None);
    for (n, before) in before.into_iter().enumerate().filter(|(n, _)| !(8..16).contains(n)) {
        assert_eq!(guest.bytes().read::<u64>(n * 8), before, "offset {:#x}", n * 8);
    }
    assert_eq!(guest.bytes().read::<[u64; 8]>(Sqe::SIZE), submitted);
    // A driver that starts to use the controller resets it first.
    guest.write(regs::CC, &0u32.to_le_bytes());
    crate::harness::until("CSTS.RDY to go", || guest.read32(regs::CSTS) & 1 == 0);
    guest.command(MEMORY | BUS_MASTER);
    guest.enable();
    guest.assert_usable();
}

#[test]
fn resets_leave_nothing_behind() {
    let server = Server::start(&["mem:1MiB"], &[]);
    let mut guest = Guest::enabled(&server);
    let event = EventFd::new().unwrap();
    guest.client.set_irq_eventfds(irq::MSIX, 0, &[&event]).unwrap();
    let express = {
        let mut at = u64::from(guest.config::<1>(0x34)[0]);
        while guest.config::<1>(at) != [shadowbell_spec::pci::CAP_ID_EXPRESS] {
            at = guest.config::<1>(at + 1)[0].into();
        }
        at
    };
    for round in 0..6 {
        guest.assert_usable();
        guest.client.region_write(4, 0, &[0xff; 16]).unwrap();
        if round % 2 == 0 {
            guest.client.reset().unwrap();
        } else {
            // Device Control: Initiate Function Level Reset. The write is answered after the reset.
            guest
                .client
                .region_write(region::CONFIG, express + 8, &0x8000u16.to_le_bytes())
                .unwrap();
        }
        assert_eq!((guest.read32(regs::CC), guest.read32(regs::CSTS)), (0, 0));
        assert_eq!(guest.read32(regs::ASQ), 0);
        assert_eq!(guest.config::<2>(COMMAND), [0; 2]);
        let mut entry = [0; 16];
        guest.client.region_read(4, 0, &mut entry).unwrap();
        assert_eq!(entry, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], "masked");
        // Memory and eventfds of the client survive the reset.
        guest.command(MEMORY | BUS_MASTER);
        guest.enable();
        event.drain();
        guest.assert_usable();
        assert!(event.wait(Some(LIMIT)).unwrap());
    }
}

/// Trapped doorbell writes wake only the I/O thread after the first few writes. A doorbell write
/// without mapped doorbells arrives as a message on the client's socket. The reactor thread
/// receives the first messages. After 8 of them have woken the I/O thread, the I/O thread also
/// polls the socket while it sleeps, and reads doorbell messages itself.
#[test]
fn trapped_doorbells_wake_the_io_thread_without_the_reactor() {
    const COMMANDS: u16 = 200;
    let server = Server::start(&["mem:4MiB"], &["--poll", "never", "--workers", "1"]);
    let mut guest = Guest::enabled(&server);
    let (sq, cq) = (0x2_0000, 0x3_0000);
    for (opcode, at, flags) in
        [(AdminOpcode::CreateIoCq, cq, 1), (AdminOpcode::CreateIoSq, sq, 1 | 1 << 16)]
    {
        let mut sqe = Sqe::new(opcode as u8, guest.tail, 0).with_prps(IOVA + at as u64, 0);
        (sqe.cdw10, sqe.cdw11) = (255 << 16 | 1, flags);
        guest.submit(sqe);
        assert_eq!(guest.completion(), Status::SUCCESS);
    }
    let sleeps = || ["sb-reactor", "sb-worker0"].map(|name| sleeps_of(worker(&server), name));
    let mut before = sleeps();
    for n in 0..COMMANDS {
        until("the worker sleeps", || {
            status_of(worker(&server), "sb-worker0", "State").starts_with('S')
        });
        // During the first 20 commands, the I/O thread gets the socket, so the reactor still wakes.
        // The test counts only the wakeups during the later commands.
        if n == 20 {
            before = sleeps();
        }
        let read = Sqe::read(1, 0, 7, n).with_prps(DATA, 0);
        guest.bytes().write(sq + usize::from(n) * Sqe::SIZE, &read).unwrap();
        let tail = u32::from(n + 1).to_le_bytes();
        guest.client.region_write_posted(region::BAR0, regs::DOORBELLS + 8, &tail).unwrap();
        until("the completion", || {
            let cqe: Cqe = guest.bytes().read(cq + usize::from(n) * Cqe::SIZE).unwrap();
            cqe.phase() && cqe.cid == n && cqe.status() == Status::SUCCESS
        });
    }
    let after = sleeps();
    let [reactor, worker] = [after[0] - before[0], after[1] - before[1]];
    assert!(
        worker >= u64::from(COMMANDS) - 22,
        "the I/O thread sleeps before each command: {worker}"
    );
    assert!(reactor <= 20, "{reactor} wakeups of the reactor for {COMMANDS} commands");
    // The reactor still handles messages other than doorbell writes.
    guest.assert_usable();
    guest.write(regs::CC, &0_u32.to_le_bytes());
    until("CSTS.RDY to go", || guest.read32(regs::CSTS) & 1 == 0);
    guest.enable();
    guest.assert_usable();
}

#[test]
fn memory_is_mapped_and_unmapped() {
    let server = Server::start(&["mem:1MiB"], &[]);
    let mut guest = Guest::enabled(&server);
    let more = Mapping::shared("more", 1 << 16).unwrap();
    let refused = |outcome: Result<(), ClientError>| {
        assert!(matches!(outcome, Err(ClientError::Refused { .. })), "{outcome:?}");
    };
    for _ in 0..100 {
        guest.client.dma_map(&share(&more, 0)).unwrap();
        guest.client.dma_unmap(DmaUnmap::Range { iova: 0, len: 1 << 16 }).unwrap();
    }
    guest.client.dma_map(&share(&more, 0)).unwrap();
    refused(guest.client.dma_map(&share(&more, 0x8000)));
    refused(guest.client.dma_map(&share(&more, IOVA - 0x8000)));
    refused(guest.client.dma_map(&share(&more, u64::MAX - 0xffff).with_len(0x10000)));
    refused(guest.client.dma_map(&share(&more, 0x80_0001)));
    refused(guest.client.dma_unmap(DmaUnmap::Range { iova: 0, len: 0x8000 }));
    refused(guest.client.dma_unmap(DmaUnmap::Range { iova: 0x8000, len: 0x8000 }));
    refused(guest.client.dma_unmap(DmaUnmap::Range { iova: 1 << 20, len: 1 << 16 }));
    guest.assert_usable();
    // A map without a descriptor is recorded: another map of the same range is refused, and the
    // range can be unmapped.
    guest.client.dma_map(&DmaRange { fd: None, ..share(&more, 1 << 20) }).unwrap();
    refused(guest.client.dma_map(&share(&more, 1 << 20)));
    guest.client.dma_unmap(DmaUnmap::Range { iova: 1 << 20, len: 1 << 16 }).unwrap();
    guest.assert_usable();
    guest.client.dma_unmap(DmaUnmap::All).unwrap();
    guest.bytes().fill(0, LEN as usize, 0xee).unwrap();
    guest.write(regs::DOORBELLS, &3u32.to_le_bytes());
    short_pause();
    let clean = (0..LEN as usize / 8).all(|n| guest.bytes().read(n * 8) == Some([0xeeu8; 8]));
    assert!(clean, "memory that was taken back is not touched");
}

#[test]
fn a_map_of_a_non_memory_descriptor_is_refused() {
    let server = Server::start(&["mem:1MiB"], &[]);
    let mut guest = Guest::enabled(&server);
    let event = std::os::fd::OwnedFd::try_from(EventFd::new().unwrap()).unwrap();
    let fd = Some(std::os::fd::AsFd::as_fd(&event));
    guest.client.dma_map(&DmaRange { fd, ..share(&guest.memory, 0) }).unwrap_err();
    guest.client.dma_map(&DmaRange { fd_offset: 1, ..share(&guest.memory, 0) }).unwrap_err();
    guest.assert_usable();
}

trait WithLen {
    fn with_len(self, len: u64) -> Self;
}

impl WithLen for DmaRange<'_> {
    fn with_len(mut self, len: u64) -> Self {
        self.len = len;
        self
    }
}

#[test]
fn a_missing_share_option_is_logged_for_unshared_memory() {
    let server = Server::start(&["mem:1MiB"], &[]);
    let guest = Guest::new(&server);
    guest.client.dma_map(&DmaRange { fd: None, ..share(&guest.memory, IOVA) }).unwrap();
    guest.command(MEMORY | BUS_MASTER);
    assert!(!server.stderr().contains("share=on"), "not before a guest uses the controller");
    guest.write(regs::CC, &1u32.to_le_bytes());
    guest.write(regs::CC, &0u32.to_le_bytes());
    guest.write(regs::CC, &1u32.to_le_bytes());
    server.wait_for_log("memory-backend-memfd,id=mem,size=SIZE,share=on");
    drop(guest);
    server.wait_for_log("has left");
    assert_eq!(server.stderr().matches("is not shared").count(), 1, "once");
}

#[test]
fn memory_without_a_descriptor_beside_shared_memory_is_not_logged() {
    let server = Server::start(&["mem:1MiB"], &[]);
    let guest = Guest::new(&server);
    guest.client.dma_map(&DmaRange { fd: None, ..share(&guest.memory, 0) }).unwrap();
    guest.share();
    guest.command(MEMORY | BUS_MASTER);
    let mut guest = guest;
    guest.enable();
    guest.assert_usable();
    drop(guest);
    server.wait_for_log("has left");
    assert!(!server.stderr().contains("share"), "{}", server.stderr());
}

#[test]
fn a_missing_share_option_is_logged_for_a_private_file() {
    let server = Server::start(&["mem:1MiB"], &[]);
    let mut guest = Guest::new(&server);
    guest.share();
    guest.command(MEMORY | BUS_MASTER);
    guest.enable();
    // The guest's memory is private, so its writes do not reach the shared file, which stays empty.
    guest.write(regs::DOORBELLS, &1u32.to_le_bytes());
    server.wait_for_log("`share=on` is missing");
}

/// With a virtual IOMMU, the guest's kernel shares its memory page by page. If the server made one
/// mapping per page, it would nearly reach the limit of mappings of a process.
#[test]
fn a_guest_behind_an_iommu_shares_page_by_page() {
    const PAGE: u64 = 4096;
    const PAGES: u64 = 30_000;
    let server = Server::start(&["mem:1MiB"], &[]);
    let mut guest = Guest::enabled(&server);
    assert_eq!(guest.client.server().max_dma_maps, 65_535);
    let memory = Mapping::shared("guest-pages", PAGES * PAGE).unwrap();
    // Consecutive pages of the file have bus addresses that are far apart.
    let iova = |n: u64| (1 << 40) + n * 7919 % PAGES * 2 * PAGE;
    let page = |n: u64| DmaRange { fd_offset: n * PAGE, ..share(&memory, iova(n)).with_len(PAGE) };
    for n in 0..PAGES {
        guest.client.dma_map(&page(n)).unwrap();
    }
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", worker(&server))).unwrap();
    let mapped = maps.lines().filter(|line| line.contains("guest-pages")).count();
    assert!((1..=257).contains(&mapped), "{mapped} mappings");
    // The Identify data are written only to the page at the command's bus address.
    for n in [PAGES - 1, 0, 12_345] {
        guest.data = iova(n);
        guest.ring();
        assert_eq!(guest.completion(), Status::SUCCESS);
        assert_ne!(memory.bytes().read::<u16>((n * PAGE) as usize), Some(0));
    }
    let touched = |n: &u64| memory.bytes().read::<u64>((n * PAGE) as usize) != Some(0);
    assert_eq!((0..PAGES).filter(touched).count(), 3);
    // An unmapped page is not accessible.
    let range = DmaUnmap::Range { iova: iova(12_345), len: PAGE };
    guest.client.dma_unmap(range).unwrap();
    guest.ring();
    assert_ne!(guest.completion(), Status::SUCCESS);
    guest.data = DATA;
    guest.assert_usable();
}
