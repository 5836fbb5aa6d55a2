//! Hosts of controllers that share a namespace.
#![allow(dead_code, reason = "every test file uses its own part of it")]
#![allow(unreachable_pub, reason = "a module of tests")]

use crate::common::{Host, Queue};
use shadowbell_controller::{
    Carrier, Config, Controller, NamespaceConfig, Polling, Pool, PoolOptions, Subsystem,
};
use shadowbell_disk::Disk;
use shadowbell_spec::admin::SetFeatures;
use shadowbell_spec::feature::fid;
use shadowbell_spec::nvm::{CopyFields, DatasetManagement};
use shadowbell_spec::reservation::{RegisteredController, ReservationStatus};
use shadowbell_spec::{Sqe, Status};
use std::fs::File;
use std::sync::Arc;
use std::time::Duration;
use zerocopy::FromBytes;

pub const ADAPTIVE: Polling = Polling::Adaptive(Duration::from_micros(50));
pub const UUID: [u8; 16] = [7; 16];

/// A host with a queue, and memory for keys and data.
pub struct SharingHost {
    pub host: Host,
    pub queue: Queue,
    pub keys: u64,
    pub data: u64,
}

pub fn config(disk: &Arc<dyn Disk>, subsystem: &Subsystem) -> Config {
    let namespaces = vec![NamespaceConfig { disk: Arc::clone(disk), uuid: UUID }];
    Config { namespaces, member: Some(subsystem.join(None).unwrap()), ..Config::default() }
}

pub fn pool() -> Pool {
    Pool::start(&PoolOptions { workers: 2, polling: ADAPTIVE, pin: Vec::new() }).unwrap()
}

/// Creates hosts with a namespace in common. Their host identifiers are 1, 2 and so on.
pub fn hosts<const N: usize>(disk: Arc<dyn Disk>, state: Option<File>) -> [SharingHost; N] {
    let (pool, subsystem) = (pool(), Subsystem::new(state).unwrap());
    std::array::from_fn(|n| {
        let config = config(&disk, &subsystem);
        let controller = Controller::new(config, pool.clone(), Carrier::default()).unwrap();
        let mut host = Host::attach(controller);
        host.enable();
        let mut one = SharingHost::new(host);
        one.identify_as(n as u64 + 1).unwrap();
        one
    })
}

pub fn mem<const N: usize>() -> [SharingHost; N] {
    hosts(shadowbell_disk_file::open("mem:1MiB").unwrap(), None)
}

impl SharingHost {
    pub fn new(mut host: Host) -> Self {
        let queue = host.create(1, 16, false);
        let (keys, data) = (host.alloc(4096), host.alloc(4096));
        Self { host, queue, keys, data }
    }

    pub fn identify_as(&mut self, id: u64) -> Result<(), Status> {
        self.host.poke(self.keys, &id.to_le_bytes());
        let fields = SetFeatures { fid: fid::HOST_IDENTIFIER, ..SetFeatures::default() };
        let (status, _) = self.host.admin(Sqe::set_features(0, fields, 0).with_prps(self.keys, 0));
        if status.is_success() { Ok(()) } else { Err(status) }
    }

    pub fn run(&mut self, sqe: Sqe) -> Status {
        self.host.run(&mut self.queue, sqe).0
    }

    pub fn entry(&self, opcode: u8, cdw10: u32, keys: (u64, u64)) -> Sqe {
        self.host.poke(self.keys, &keys.0.to_le_bytes());
        self.host.poke(self.keys + 8, &keys.1.to_le_bytes());
        Sqe { cdw10, ..Sqe::new(opcode, 0, 1) }.with_prps(self.keys, 0)
    }

    pub fn register(&mut self, key: u64) -> Status {
        let sqe = self.entry(0x0d, 0, (0, key));
        self.run(sqe)
    }

    pub fn acquire(&mut self, key: u64, kind: u32) -> Status {
        let sqe = self.entry(0x11, kind << 8, (key, 0));
        self.run(sqe)
    }

    pub fn preempt(&mut self, key: u64, of: u64, kind: u32) -> Status {
        let sqe = self.entry(0x11, kind << 8 | 1, (key, of));
        self.run(sqe)
    }

    pub fn release(&mut self, key: u64, kind: u32) -> Status {
        let sqe = self.entry(0x15, kind << 8, (key, 0));
        self.run(sqe)
    }

    pub fn clear(&mut self, key: u64) -> Status {
        let sqe = self.entry(0x15, 1, (key, 0));
        self.run(sqe)
    }

    /// Header of the reservation report, and its controllers.
    pub fn report(&mut self) -> (ReservationStatus, Vec<RegisteredController>) {
        let sqe = Sqe { cdw10: 1023, ..Sqe::new(0x0e, 0, 1) }.with_prps(self.data, 0);
        assert_eq!(self.run(sqe), Status::SUCCESS);
        let page = self.host.peek(self.data, 4096);
        let (head, rest) = ReservationStatus::read_from_prefix(&page).unwrap();
        let count = u16::from_le_bytes(head.regctl);
        let all = rest.chunks(24).take(count.into());
        (head, all.map(|one| RegisteredController::read_from_bytes(one).unwrap()).collect())
    }

    /// Runs every command that reads or writes. Returns for each command: its name, true if it
    /// needs read access, true if it needs write access, and its status.
    pub fn run_all_commands(&mut self) -> Vec<(&'static str, bool, bool, Status)> {
        let at = self.data;
        let range = |host: &Host, slba: u64| {
            host.poke(at, &[0; 32]);
            host.poke(at + 4, &1u32.to_le_bytes());
            host.poke(at + 8, &slba.to_le_bytes());
        };
        let plain = |sqe: Sqe| sqe.with_prps(at, 0);
        let mut done = Vec::new();
        let mut step = |name, reads, writes, status| done.push((name, reads, writes, status));
        step("read", true, false, self.run(plain(Sqe::read(1, 9, 0, 0))));
        step("long read", true, false, self.run(plain(Sqe::read(1, 9, 7, 0))));
        step("compare", true, false, self.run(plain(Sqe::compare(1, 9, 0, 0))));
        step("verify", true, false, self.run(Sqe::verify(1, 9, 0, 0)));
        step("write", false, true, self.run(plain(Sqe::write(1, 9, 0, 0))));
        step("FUA write", false, true, self.run(plain(Sqe::write(1, 9, 0, 0).with_fua())));
        step("write zeroes", false, true, self.run(Sqe::write_zeroes(1, 9, 0, false, 0)));
        step("flush", false, true, self.run(Sqe::flush(1, 0)));
        step("flush of all", false, true, self.run(Sqe::flush(u32::MAX, 0)));
        range(&self.host, 20);
        let dsm = DatasetManagement { ad: true, ..DatasetManagement::default() };
        step("deallocate", false, true, self.run(plain(Sqe::dsm(1, dsm, 0))));
        let copy = CopyFields { sdlba: 30, ..CopyFields::default() };
        self.host.poke(at, &[0; 32]);
        self.host.poke(at + 8, &20u64.to_le_bytes());
        step("copy", true, true, self.run(plain(Sqe::copy(1, copy, 0))));
        step("write uncorrectable", false, true, self.run(Sqe::write_uncorrectable(1, 40, 0, 0)));
        step("make it good", false, true, self.run(plain(Sqe::write(1, 40, 0, 0))));
        // A fused Compare and Write. If the host may read but not write, only the Compare succeeds.
        self.host.poke(at, &[0; 512]);
        let first = Sqe { flags: 1, ..plain(Sqe::compare(1, 50, 0, 1)) };
        let second = Sqe { flags: 2, ..plain(Sqe::write(1, 50, 0, 2)) };
        let old = self.queue.tail;
        self.host.put(&mut self.queue, &first);
        self.host.put(&mut self.queue, &second);
        self.host.ring(&self.queue, old);
        let mut both = [self.host.wait(&mut self.queue), self.host.wait(&mut self.queue)];
        both.sort_by_key(|end| end.0);
        step("fused compare", true, false, both[0].1);
        if both[0].1.is_success() {
            step("fused write", false, true, both[1].1);
        } else {
            assert_eq!(both[1].1.code(), Status::FUSED_FAILED);
        }
        done
    }

    pub fn may(&mut self, reads: bool, writes: bool, who: &str) {
        for (name, needs_read, needs_write, status) in self.run_all_commands() {
            let may = (reads || !needs_read) && (writes || !needs_write);
            let expected = if may { Status::SUCCESS } else { Status::RESERVATION_CONFLICT };
            assert_eq!(status.code(), expected, "{who}: {name}");
        }
    }
}
