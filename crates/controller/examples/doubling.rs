//! What a host can have done by the worker and the control plane, as often as it says: for counting
//! the instructions as that number doubles (`cargo xtask test` does).
//!
//!     cargo build --release -p shadowbell-controller --example doubling
//!     valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*measured*' \
//!         target/release/examples/doubling reset 500
//!
//! All of it takes place on one thread, so every run executes the same instructions.

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "../tests/common/held.rs"]
mod held;

use common::{BASE, Host, MEMORY, Queue, meanwhile};
use held::Held;
use shadowbell_backend::Disk;
use shadowbell_controller::{Carrier, Config, Controller, NamespaceConfig, Polling, Pool, Turns};
use shadowbell_memory::SharedBytes;
use shadowbell_spec::admin::Abort;
use shadowbell_spec::nvm::DatasetManagement;
use shadowbell_spec::{Sqe, regs};
use std::sync::Arc;

/// Entries of the I/O queue: more than any number here.
const ENTRIES: u32 = 2048;

struct Field {
    host: Host,
    queue: Queue,
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
        _ => panic!("there is no operation {what}"),
    };
    let mut field = Field::new();
    operation(&mut field, count);
    // What is left is not waited for.
    std::process::exit(0);
}

/// Everything that is counted.
#[inline(never)]
fn measured<T>(what: impl FnOnce() -> T) -> T {
    std::hint::black_box(what())
}

impl Field {
    fn new() -> Self {
        let held = Held::new(1 << 16);
        let disk: Arc<dyn Disk> = Arc::new(held.clone());
        let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
        let config = Config { namespaces, ..Config::default() };
        let (pool, mut turns) = Pool::driven(Polling::Never).expect("a pool");
        let controller = Controller::new(config, pool, Carrier::default()).expect("a controller");
        let (host, queue) = meanwhile(&mut turns, move || {
            let mut host = Host::attach(controller);
            host.enable();
            let queue = host.create(1, ENTRIES, false);
            (host, queue)
        });
        Self { host, queue, turns, held }
    }

    /// So many reads that do not end.
    fn hold(&mut self, count: u16) {
        self.held.order(|orders| orders.hold = true);
        let Self { host, queue, turns, .. } = self;
        let page = host.alloc(4096);
        (0..count)
            .for_each(|cid| host.put(queue, &Sqe::read(1, cid.into(), 0, cid).with_prps(page, 0)));
        host.ring(queue, 0);
        while turns.turn() {}
        assert_eq!(self.held.seen().len(), usize::from(count));
    }

    fn release(&mut self) {
        self.held.order(|orders| orders.hold = false);
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
        field.held.order(|orders| orders.hold = false);
        while host.reap(&mut admin).is_none() {
            turns.turn();
        }
    });
    assert_eq!(field.held.cancelled(), usize::from(count));
}

/// An Abort of one of so many: each looks for its command among all of them.
fn abort(field: &mut Field, count: u16) {
    field.hold(count);
    field.held.order(|orders| orders.hold = true);
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

/// Commands of 256 ranges each, to their end.
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

/// Pages beside the host's memory, each a map of its own, with room between them.
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
