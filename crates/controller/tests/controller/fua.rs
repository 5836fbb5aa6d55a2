//! Read, Compare and Verify with Force Unit Access, on a disk with a volatile cache.

use crate::{common, held};
use common::{Host, Queue};
use held::Held;
use shadowbell_controller::{Config, NamespaceConfig, Polling};
use shadowbell_disk::{Disk, Op};
use shadowbell_spec::admin::SetFeatures;
use shadowbell_spec::feature::fid;
use shadowbell_spec::{Sqe, Status};
use std::sync::Arc;

const FUA: u32 = 1 << 30;

struct Field {
    host: Host,
    queue: Queue,
    held: Held,
    page: u64,
}

fn field(volatile: bool) -> Field {
    let mut held = Held::new(1024);
    held.volatile = volatile;
    held.mark();
    let disk: Arc<dyn Disk> = Arc::new(held.clone());
    let namespaces = vec![NamespaceConfig { disk, uuid: [7; 16] }];
    let config = Config { namespaces, ..Config::default() };
    let mut host = Host::with(config, Polling::Never);
    let queue = host.create(1, 64, false);
    let page = host.alloc(4096);
    Field { host, queue, held, page }
}

impl Field {
    /// Runs a command with these bits set in dword 12. Returns its status and the disk's requests.
    fn run(&mut self, sqe: Sqe, cdw12: u32) -> (Status, Vec<Op>) {
        self.held.instruct(|instructions| instructions.seen.clear());
        let mut sqe = sqe.with_prps(self.page, 0);
        sqe.cdw12 |= cdw12;
        self.host.submit(&mut self.queue, &sqe);
        let status = self.host.wait(&mut self.queue).1;
        (status, self.held.seen().iter().map(|request| request.op).collect())
    }
}

fn reads() -> [(Sqe, Op); 3] {
    let compare = Sqe { opcode: 0x05, ..Sqe::read(1, 3, 0, 2) };
    let verify = Sqe { opcode: 0x0c, ..Sqe::read(1, 3, 0, 3) };
    [(Sqe::read(1, 3, 0, 1), Op::Read), (compare, Op::Compare), (verify, Op::Verify)]
}

#[test]
fn a_read_with_fua_flushes_first() {
    let mut field = field(true);
    for (sqe, op) in reads() {
        assert_eq!(field.run(sqe, 0), (Status::SUCCESS, vec![op]));
        assert_eq!(field.run(sqe, FUA), (Status::SUCCESS, vec![Op::Flush, op]));
    }
    assert_eq!(field.host.peek(field.page, 8), 3u64.to_le_bytes());
    // If the flush fails, the read is not submitted.
    for (sqe, _) in reads() {
        field.held.instruct(|instructions| instructions.fail_at = Some(0));
        let (status, seen) = field.run(sqe, FUA);
        assert_eq!((status.is_success(), seen), (false, vec![Op::Flush]));
        // If the flush succeeds and the read fails, the command fails.
        field.held.instruct(|instructions| instructions.fail_at = Some(3 * 512));
        let (status, seen) = field.run(sqe, FUA);
        assert_eq!((status.is_success(), seen.len()), (false, 2));
        field.held.instruct(|instructions| instructions.fail_at = None);
    }
    let elsewhere = Sqe { opcode: 0x05, ..Sqe::read(1, 4, 0, 2) };
    assert_eq!(field.run(elsewhere, FUA).0.code(), Status::COMPARE_FAILURE);
}

#[test]
fn fua_needs_no_flush_without_a_cache() {
    let mut other = field(false);
    for (sqe, op) in reads() {
        assert_eq!(other.run(sqe, FUA), (Status::SUCCESS, vec![op]));
    }
    // If the host has switched the cache off, there is no flush either, because later writes are
    // already on the medium.
    let mut field = field(true);
    let off = SetFeatures { fid: fid::VOLATILE_WRITE_CACHE, ..SetFeatures::default() };
    field.host.must(off.encode(Sqe::new(0x09, 0, 0)));
    for (sqe, op) in reads() {
        assert_eq!(field.run(sqe, FUA), (Status::SUCCESS, vec![op]));
    }
}

#[test]
fn a_reset_does_not_wait_for_unsubmitted_reads() {
    let mut field = field(true);
    field.held.instruct(|instructions| instructions.hold = true);
    for (cid, (sqe, _)) in (0..).zip(reads()) {
        let mut sqe = sqe.with_prps(field.page, 0).with_cid(cid);
        sqe.cdw12 |= FUA;
        field.host.put(&mut field.queue, &sqe);
    }
    field.host.ring(&field.queue, 0);
    field.host.until("the flushes", || field.held.seen().len() == 3);
    let held = field.held.clone();
    let release = std::thread::spawn(move || {
        while held.cancelled() < 3 {
            std::thread::yield_now();
        }
        held.instruct(|instructions| instructions.hold = false);
    });
    field.host.disable();
    release.join().unwrap();
    assert_eq!(field.held.seen().len(), 3, "nothing was read");
}
