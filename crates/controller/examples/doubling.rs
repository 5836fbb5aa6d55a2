//! Executes a host operation (OPERATION) on COUNT commands or pages under callgrind. `cargo xtask
//! test` doubles COUNT and compares the instructions of the I/O thread and the control plane.
//!
//!     cargo build --release -p shadowbell-controller --example doubling
//!     valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*measured*' \
//!         target/release/examples/doubling reset 500
//!
//! All counted code runs on one thread, so repeated runs execute the same instructions.
//! The exceptions are `preempt` and `register`: they wait for the subsystem's own
//! thread, so the number of calls of `Turns::turn` may differ by about one.

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/common/held.rs"]
mod held;

use common::{BASE, Host, MEMORY, Queue, run_beside};
use held::Held;
use shadowbell_controller::{
    Carrier, Config, Controller, NamespaceConfig, Polling, Pool, Subsystem, Turns,
};
use shadowbell_disk::Disk;
use shadowbell_memory::SharedBytes;
use shadowbell_spec::admin::{Abort, SetFeatures};
use shadowbell_spec::feature::fid;
use shadowbell_spec::nvm::DatasetManagement;
use shadowbell_spec::{Sqe, Status, regs};
use std::sync::Arc;
use std::time::Duration;

/// Number of entries of the I/O queue. It must exceed the argument COUNT of this program, because
/// up to COUNT commands are in flight at once.
const ENTRIES: u32 = 2048;

struct Field {
    host: Host,
    queue: Queue,
    /// Second host, for operations on reservations. It shares the namespace with `host`.
    other: Option<(Host, Queue)>,
    turns: Turns,
    held: Held,
}

fn main() {
    let mut args = std::env::args().skip(1);
    let (what, count) = (args.next(), args.next().and_then(|n| n.parse().ok()));
    let (Some(what), Some(count)) = (what, count) else {
        eprintln!("usage: doubling OPERATION COUNT");
        std::process::exit(2);
    };
    let operation = match what.as_str() {
        "reset" => reset,
        "delete" => delete,
        "abort" => abort,
        "ranges" => ranges,
        "map" => map,
        "unmap" => unmap,
        "preempt" => preempt,
        "register" => register,
        _ => panic!("unknown operation {what}"),
    };
    let subsystem = Subsystem::new(None).expect("a subsystem");
    let shares = ["preempt", "register"].contains(&what.as_str());
    let mut field = Field::new(shares.then_some(&subsystem));
    operation(&mut field, count);
    // Exits at once, although commands may still be in flight.
    std::process::exit(0);
}

/// Executes `what` and counts its instructions: callgrind matches the name of this function.
#[inline(never)]
fn measured<T>(what: impl FnOnce() -> T) -> T {
    std::hint::black_box(what())
}

impl Field {
    /// Creates a host, and a second one if a subsystem shares the namespace.
    fn new(subsystem: Option<&Subsystem>) -> Self {
        let held = Held::new(1 << 16);
        let (pool, mut turns) = Pool::driven(Polling::Never).expect("a pool");
        let mut host = |id: u64| {
            let disk: Arc<dyn Disk> = Arc::new(held.clone());
            let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
            let member = subsystem.map(|subsystem| subsystem.join(None).expect("a member"));
            let config = Config { namespaces, member, ..Config::default() };
            let made = Controller::new(config, pool.clone(), Carrier::default());
            let controller = made.expect("a controller");
            let is_shared = subsystem.is_some();
            run_beside(&mut turns, move || {
                let mut host = Host::attach(controller);
                host.enable();
                let mut queue = host.create(1, ENTRIES, false);
                if is_shared {
                    let at = host.alloc(4096);
                    host.poke(at, &id.to_le_bytes());
                    let fields =
                        SetFeatures { fid: fid::HOST_IDENTIFIER, ..SetFeatures::default() };
                    let sqe = Sqe::set_features(0, fields, 0).with_prps(at, 0);
                    assert_eq!(host.admin(sqe).0, Status::SUCCESS);
                    host.poke(at, &[[0; 8], id.to_le_bytes()].concat());
                    let sqe = Sqe::new(0x0d, 0, 1).with_prps(at, 0);
                    assert_eq!(host.run(&mut queue, sqe).0, Status::SUCCESS);
                }
                (host, queue)
            })
        };
        let (first, queue) = host(1);
        let other = subsystem.map(|_| host(2));
        Self { host: first, queue, other, turns, held }
    }

    /// Submits `count` reads, which the disk does not complete.
    fn hold(&mut self, count: u16) {
        self.held.instruct(|instructions| instructions.hold = true);
        let Self { host, queue, turns, .. } = self;
        let page = host.alloc(4096);
        (0..count)
            .for_each(|cid| host.put(queue, &Sqe::read(1, cid.into(), 0, cid).with_prps(page, 0)));
        host.ring(queue, 0);
        while turns.turn() {}
        assert_eq!(self.held.seen().len(), usize::from(count));
    }

    fn release(&mut self) {
        self.held.instruct(|instructions| instructions.hold = false);
    }
}

fn reset(field: &mut Field, count: u16) {
    field.hold(count);
    measured(|| {
        field.host.write32(regs::CC, 0);
        field.turns.turn();
        field.release();
        while field.host.csts().rdy() {
            field.turns.turn();
        }
    });
    assert_eq!(field.held.cancelled(), usize::from(count));
}

fn delete(field: &mut Field, count: u16) {
    field.hold(count);
    let Field { host, turns, .. } = field;
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    measured(|| {
        host.submit(&mut admin, &Sqe::delete_io_sq(1, 100));
        turns.turn();
        field.held.instruct(|instructions| instructions.hold = false);
        while host.reap(&mut admin).is_none() {
            turns.turn();
        }
    });
    assert_eq!(field.held.cancelled(), usize::from(count));
}

/// Aborts one of `count` commands in flight. The controller has to find this command among them.
fn abort(field: &mut Field, count: u16) {
    field.hold(count);
    field.held.instruct(|instructions| instructions.hold = true);
    let Field { host, turns, .. } = field;
    let mut admin = std::mem::replace(&mut host.admin, Queue::none());
    measured(|| {
        host.submit(&mut admin, &Sqe::abort(Abort { sqid: 1, cid: count - 1 }, 100));
        for _ in 0..4 {
            turns.turn();
        }
    });
    assert_eq!(field.held.cancelled(), 1);
}

/// Executes `count` Dataset Management commands of 256 ranges each.
fn ranges(field: &mut Field, count: u16) {
    let Field { host, queue, turns, .. } = field;
    let page = host.alloc(4096);
    for n in 0..256u64 {
        host.poke(page + n * 16 + 4, &1u32.to_le_bytes());
        host.poke(page + n * 16 + 8, &n.to_le_bytes());
    }
    let fields = DatasetManagement { nr0: 255, ad: true, ..DatasetManagement::default() };
    (0..count).for_each(|cid| host.put(queue, &Sqe::dsm(1, fields, cid).with_prps(page, 0)));
    host.ring(queue, 0);
    measured(|| {
        let mut left = count;
        while left > 0 {
            turns.turn();
            while host.reap(queue).is_some() {
                left -= 1;
            }
        }
    });
}

/// Addresses of `count` pages outside of the host's memory, with gaps in between, so that each
/// needs a DMA map of its own.
fn pages(count: u16) -> impl Iterator<Item = u64> {
    (0..u64::from(count)).map(|n| BASE + MEMORY + (1 << 40) + n * 8192)
}

fn page(field: &Field) -> SharedBytes {
    field.host.memory.slice(0, 4096).expect("a page")
}

fn map(field: &mut Field, count: u16) {
    let page = page(field);
    measured(|| {
        for at in pages(count) {
            field.host.controller.map_dma(at, 4096, &page).expect("a map");
            field.turns.turn();
        }
    });
}

fn unmap(field: &mut Field, count: u16) {
    let page = page(field);
    pages(count).for_each(|at| field.host.controller.map_dma(at, 4096, &page).expect("a map"));
    while field.turns.turn() {}
    measured(|| {
        for at in pages(count) {
            field.host.controller.unmap_dma(at, 4096, || ()).expect("a map");
            field.turns.turn();
        }
    });
}

/// Runs the I/O thread until `done` returns a value. The sleep gives the subsystem's own thread
/// time to work. It does not change the measured number of instructions.
fn turns_until<T>(turns: &mut Turns, mut done: impl FnMut() -> Option<T>) -> T {
    loop {
        while turns.turn() {}
        match done() {
            Some(done) => return done,
            None => std::thread::sleep(Duration::from_millis(30)),
        }
    }
}

/// Preempts the reservation of a host with `count` commands in flight.
fn preempt(field: &mut Field, count: u16) {
    // Host 1 acquires an Exclusive Access reservation, which host 2 then preempts.
    let Field { host, queue, turns, .. } = field;
    let acquire = |host: &mut Host, queue: &mut Queue, action: u32, keys: [u64; 2]| {
        let at = host.alloc(4096);
        host.poke(at, &keys.map(u64::to_le_bytes).concat());
        let cdw10 = 2 << 8 | action;
        host.submit(queue, &Sqe { cdw10, ..Sqe::new(0x11, 0, 1) }.with_prps(at, 0));
    };
    acquire(host, queue, 0, [1, 0]);
    assert_eq!(turns_until(turns, || host.reap(queue)).1, Status::SUCCESS);
    field.hold(count);
    let Field { other, turns, held, .. } = field;
    let (other, queue) = other.as_mut().expect("two hosts");
    measured(|| {
        acquire(other, queue, 2, [2, 1]);
        turns_until(turns, || (held.cancelled() == usize::from(count)).then_some(()));
        held.instruct(|instructions| instructions.hold = false);
        assert_eq!(turns_until(turns, || other.reap(queue)).1, Status::SUCCESS);
    });
}

/// Executes `count` reservation registrations.
fn register(field: &mut Field, count: u16) {
    let Field { host, queue, turns, .. } = field;
    let at = host.alloc(4096);
    host.poke(at, &[1, 1].map(u64::to_le_bytes).concat());
    let sqe = Sqe::new(0x0d, 0, 1).with_prps(at, 0);
    (0..count).for_each(|cid| host.put(queue, &Sqe { cid, ..sqe }));
    host.ring(queue, 0);
    measured(|| {
        let mut left = count;
        turns_until(turns, || {
            while host.reap(queue).is_some() {
                left -= 1;
            }
            (left == 0).then_some(())
        });
    });
}
