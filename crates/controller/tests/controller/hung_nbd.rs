//! Commands in flight on an NBD server that does not answer. Whatever the host does to end them
//! must not wait for the server.

#[path = "../../../disk-nbd/tests/common/mod.rs"]
mod server;

use crate::common;
use common::{Host, LIMIT};
use server::{ALL, Fake};
use shadowbell_controller::{Config, NamespaceConfig, Polling};
use shadowbell_memory::Mapping;
use shadowbell_nbd::wire::command;
use shadowbell_spec::admin::Abort;
use shadowbell_spec::nvm::{DatasetManagement, DsmRange};
use shadowbell_spec::{Sqe, Status};
use std::sync::{Arc, mpsc};
use std::time::Duration;
use zerocopy::IntoBytes;

const MIB: usize = 1 << 20;
const CID: u16 = 9;

/// Function that builds a command. Its arguments are the addresses of the data and of the
/// parameters.
type Make = fn(u64, u64) -> Sqe;

const COMMANDS: [(&str, Make); 7] = [
    ("Read", |data, _| Sqe::read(1, 0, 7, CID).with_prps(data, 0)),
    ("Write", |data, _| Sqe::write(1, 0, 7, CID).with_prps(data, 0)),
    ("Write Zeroes", |_, _| Sqe::write_zeroes(1, 0, 7, false, CID)),
    ("Dataset Management", |_, ranges| {
        let fields = DatasetManagement { nr0: 0, ad: true, ..DatasetManagement::default() };
        Sqe::dsm(1, fields, CID).with_prps(ranges, 0)
    }),
    ("Flush", |_, _| Sqe::flush(1, CID)),
    ("Compare", |data, _| Sqe::compare(1, 0, 7, CID).with_prps(data, 0)),
    ("Read with FUA", |data, _| {
        let mut read = Sqe::read(1, 0, 7, CID).with_prps(data, 0);
        read.cdw12 |= 1 << 30;
        read
    }),
];

/// Ways in which the host ends the command or its memory. None of them may wait for the server.
const ENDS: [&str; 6] =
    ["reset", "queue deletion", "Abort", "function level reset", "client loss", "unmap"];

fn check(command: (&str, Make), end: &str) {
    let (name, make) = command;
    let context = format!("{name}, {end}");
    let fake = Fake::new(MIB, ALL);
    let disk = Arc::new(fake.open("connections=1"));
    let polling = Polling::Adaptive(Duration::from_micros(50));
    let namespaces = vec![NamespaceConfig { disk: Arc::clone(&disk) as _, uuid: [7; 16] }];
    let mut host = Host::with(Config { namespaces, ..Config::default() }, polling);
    let mut queue = host.create(1, 16, false);
    let data = Mapping::shared("data", 4096).unwrap().bytes();
    let (iova, ranges) = (common::BASE + common::MEMORY, host.alloc(4096));
    host.controller.map_dma(iova, 4096, &data).unwrap();
    let range = DsmRange { attributes: 0, blocks: 8, slba: 0 };
    host.poke(ranges, range.as_bytes());
    // The disk and the guest's memory have different contents. A write that is not flushed makes a
    // later flush wait for the server.
    let page = host.alloc(4096);
    host.poke(page, &[5; 4096]);
    let written = host.run(&mut queue, Sqe::write(1, 0, 7, 0).with_prps(page, 0));
    assert_eq!(written.0, Status::SUCCESS, "{context}");
    let before = fake.received();
    fake.change(|manner| manner.condition = true);
    host.submit(&mut queue, &make(iova, ranges));
    host.until(&format!("the request of {context}"), || fake.received() > before);

    let (sent, ended) = mpsc::channel();
    let done = move || sent.send(()).unwrap();
    match end {
        "reset" => {
            host.disable();
            done();
        }
        "queue deletion" => {
            host.must(Sqe::delete_io_sq(1, 0));
            let (cid, status, _) = host.wait(&mut queue);
            assert_eq!((cid, status.code()), (CID, Status::ABORTED_SQ_DELETION), "{context}");
            done();
        }
        "Abort" => {
            host.must(Sqe::abort(Abort { sqid: 1, cid: CID }, 0));
            let (cid, status, _) = host.wait(&mut queue);
            assert_eq!((cid, status.code()), (CID, Status::ABORT_REQUESTED), "{context}");
            done();
        }
        "function level reset" => host.controller.reset(done),
        "client loss" => host.controller.disconnect(done),
        "unmap" => host.controller.unmap_dma(iova, 4096, done).unwrap(),
        end => panic!("{end}"),
    }
    assert!(ended.recv_timeout(LIMIT).is_ok(), "{context} waits for the server");
    assert!(!host.csts().cfs(), "{context}");
    data.fill(0, 4096, 0xcc).unwrap();
    fake.change(|manner| manner.condition = false);
    host.until("the answers to orphans", || shadowbell_disk::Disk::orphans(&*disk) == 0);
    // Replies arrive in order. So when the reply to this request arrives, the replies to all
    // earlier requests have arrived.
    let mut other = shadowbell_disk::Disk::queue(&*disk).unwrap();
    let mut none = shadowbell_memory::Segments::new();
    let flush = shadowbell_disk::Request { op: shadowbell_disk::Op::Flush, offset: 0, len: 0 };
    other.submit(1, &flush, &mut none);
    other.commit();
    let flushes = fake.count(command::FLUSH);
    host.until("a flush", || {
        let mut ended = 0;
        other.reap(&mut |_, _, _| ended += 1);
        ended == 1 || fake.count(command::FLUSH) > flushes && other.pending() == 0
    });
    assert!((0..4096).all(|at| data.read::<u8>(at) == Some(0xcc)), "{context} wrote to memory");
}

#[test]
fn no_end_of_a_command_waits_for_a_hung_nbd_server() {
    for command in COMMANDS {
        ENDS.iter().for_each(|end| check(command, end));
    }
}
