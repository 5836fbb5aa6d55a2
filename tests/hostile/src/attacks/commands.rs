//! Attacks by I/O commands: many, large, or expensive ones.

use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::Abort;
use shadowbell_spec::nvm::{CopyFields, CopyRange, DatasetManagement, DsmRange};
use shadowbell_spec::sgl::SglDescriptor;
use zerocopy::IntoBytes;

use crate::attack::{Attack, Field, Kind, MEMORY};
use crate::peer::guest::{BASE, Guest};
use crate::server::SERVER_PRIORITY;

/// Disks of the attackers: without a backing store, in memory, and in a file.
const NULL: &[&str] = &["null:1TiB"];
const MEM: &[&str] = &["mem:16MiB"];
const FILE: &[&str] = &["DIR/attacker.img=1073741824"];
/// Default number of queues of a controller.
const QUEUES: usize = 64;
/// Size of the largest transfer in bytes, and its number of blocks, 0's based.
const LARGE: u64 = 1 << 20;
const LARGE_NLB0: u16 = 2047;

pub(crate) const ATTACKS: &[Attack] = &[
    Attack {
        kind: Kind::Honest,
        ..Attack::new("honest", "3 neighbours, 32 reads of 4 KiB in flight each", HONEST, honest)
            .short()
    },
    Attack {
        kind: Kind::Control,
        ..Attack::new("burn", "no attack: two threads compute, at the server's priority", MEM, burn)
    },
    Attack::new(
        "dsm-reset",
        "400 DSM commands of 256 ranges on a file, then CC.EN=0",
        FILE,
        dsm_reset,
    )
    .short(),
    Attack::new(
        "dsm-delete",
        "400 DSM commands of 256 ranges on a file, then Delete SQ",
        FILE,
        dsm_delete,
    ),
    Attack::new(
        "dsm-abort",
        "400 DSM commands of 256 ranges on a file, then an Abort for each",
        FILE,
        dsm_abort,
    ),
    Attack::new("dsm-mem", "DSM of 256 ranges on a memory disk", MEM, dsm_mem),
    Attack::new("big-reads", "64 queues of 1 MiB reads on a memory disk", MEM, big_reads).short(),
    Attack::new("big-writes", "64 queues of 1 MiB writes on a memory disk", MEM, big_writes),
    Attack::new("big-null", "64 queues of 1 MiB reads on a null disk", NULL, big_null),
    Attack::new("big-file", "64 queues of 1 MiB writes on a file", FILE, big_file),
    Attack::new("small-reads", "64 queues of 512 byte reads, 1023 in each", NULL, small_reads),
    Attack::new("zeroes", "64 queues of Write Zeroes of 32 MiB", MEM, zeroes),
    Attack::new("zeroes-file", "64 queues of Write Zeroes of 32 MiB on a file", FILE, zeroes),
    Attack::new("verify", "64 queues of Verify of 16 MiB on a memory disk", MEM, verify),
    Attack::new("verify-file", "64 queues of Verify of 32 MiB on a file", FILE, verify),
    Attack::new("compare", "64 queues of 1 MiB Compare", MEM, compare),
    Attack::new("copy", "64 queues of Copy of 128 ranges", MEM, copy),
    Attack::new("copy-file", "64 queues of Copy of 128 ranges on a file", FILE, copy),
    Attack::new("flush", "64 queues of Flush behind writes, on a file", FILE, flush),
    Attack::new("sgl", "16 queues of writes with 3584 SGL descriptors on a file", FILE, sgl)
        .short(),
    Attack::new("sgl-mem", "64 queues of reads with 3584 SGL descriptors", MEM, sgl_mem),
    Attack::new("bad-sgl", "64 queues of SGLs that point at themselves", NULL, bad_sgl),
    Attack::new("bad-commands", "64 queues of commands that are refused", NULL, bad_commands),
    Attack::new("resets", "CC.EN toggled with 64 queues in flight", MEM, resets),
];

const HONEST: &[&str] = &["mem:16MiB", "mem:16MiB", "null:1TiB"];

fn honest(field: &mut Field) -> Result<()> {
    let mut guests = Vec::new();
    let mut page = 0;
    for socket in field.sockets.clone() {
        let mut guest = Guest::attach(&socket, MEMORY)?;
        guest.create_queue(64)?;
        page = guest.buffer(4096)?.0;
        guests.push(guest);
    }
    // All guests use the same buffer address, so the same commands are valid in each of them.
    field.fill_many(guests, 32, |n| Sqe::read(1, n * 8 % 16384, 7, 0).with_prps(page, 0))
}

/// Control measurement: two threads that only compute, and so occupy two CPUs.
fn burn(field: &mut Field) -> Result<()> {
    let field = &*field;
    let compute = || {
        let _ = rustix::process::setpriority_process(None, SERVER_PRIORITY);
        while !field.is_over() {
            std::hint::spin_loop();
        }
    };
    std::thread::scope(|threads| {
        threads.spawn(compute);
        compute();
    });
    Ok(())
}

fn dsm(guest: &mut Guest) -> Result<impl Fn(u64) -> Sqe + use<>> {
    let ranges: Vec<DsmRange> =
        (0..256).map(|n| DsmRange { attributes: 0, blocks: 8, slba: n * 4096 % 30000 }).collect();
    let list = guest.place(ranges.as_bytes())?;
    let fields = DatasetManagement { nr0: 255, ad: true, ..DatasetManagement::default() };
    Ok(move |_| Sqe::dsm(1, fields, 0).with_prps(list, 0))
}

/// Submits 100 Dataset Management commands to each of four queues, and gives the server some time
/// to fetch them.
fn many_dsm(field: &mut Field, guest: &mut Guest) -> Result<()> {
    let mut make = dsm(guest)?;
    field.top_up(guest, 100, &mut make)?;
    // The server usually fetches all commands in this time. The attack does not depend on it.
    sleep(Duration::from_millis(20));
    Ok(())
}

fn dsm_reset(field: &mut Field) -> Result<()> {
    let mut guest = field.guest()?;
    while !field.is_over() {
        (0..4).try_for_each(|_| guest.create_queue(128))?;
        many_dsm(field, &mut guest)?;
        field.resets.push(guest.reset()?);
        guest = {
            drop(guest);
            field.guest()?
        };
    }
    field.guests.push(guest);
    Ok(())
}

fn dsm_delete(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(4, 128)?;
    while !field.is_over() {
        many_dsm(field, &mut guest)?;
        let queues = std::mem::take(&mut guest.queues);
        for queue in &queues {
            guest.admin_ok(Sqe::delete_io_sq(queue.qid, 0))?;
            guest.admin_ok(Sqe::delete_io_cq(queue.qid, 0))?;
        }
        queues.into_iter().try_for_each(|queue| guest.create(queue))?;
    }
    field.guests.push(guest);
    Ok(())
}

fn dsm_abort(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(4, 128)?;
    let mut make = dsm(&mut guest)?;
    let (mut sqid, mut cid) = (0, 0);
    while !field.is_over() {
        field.top_up(&mut guest, 100, &mut make)?;
        let (queue, link) = guest.admin_queue();
        while queue.pop().is_some() {}
        for _ in 0..queue.room() {
            queue.push(Sqe::abort(Abort { sqid: 1 + sqid, cid }, 0))?;
            sqid = (sqid + 1) % 4;
            cid = if sqid == 0 { (cid + 1) % 0x8000 } else { cid };
        }
        link.send(&[queue.head_bell(), queue.bell()].concat(), &[])?;
        // This pause sets the pace of the attack.
        sleep(Duration::from_micros(200));
    }
    field.guests.push(guest);
    Ok(())
}

fn dsm_mem(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(QUEUES, 64)?;
    let make = dsm(&mut guest)?;
    field.fill(guest, make)
}

/// Keeps commands of this opcode, with 1 MiB each, in flight. All commands use the same buffer.
fn large(field: &mut Field, opcode: fn(u64) -> Sqe) -> Result<()> {
    let mut guest = field.guest_with(QUEUES, 32)?;
    let (prp1, prp2) = guest.buffer(LARGE)?;
    field.fill(guest, move |n| opcode(n * 2048 % 30720).with_prps(prp1, prp2))
}

fn big_reads(field: &mut Field) -> Result<()> {
    large(field, |slba| Sqe::read(1, slba, LARGE_NLB0, 0))
}

fn big_writes(field: &mut Field) -> Result<()> {
    large(field, |slba| Sqe::write(1, slba, LARGE_NLB0, 0))
}

fn big_null(field: &mut Field) -> Result<()> {
    large(field, |slba| Sqe::read(1, slba, LARGE_NLB0, 0))
}

fn big_file(field: &mut Field) -> Result<()> {
    large(field, |slba| Sqe::write(1, slba, LARGE_NLB0, 0))
}

fn compare(field: &mut Field) -> Result<()> {
    large(field, |slba| Sqe::compare(1, slba, LARGE_NLB0, 0))
}

fn small_reads(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(QUEUES, 1024)?;
    let (prp1, _) = guest.buffer(4096)?;
    field.fill(guest, move |n| Sqe::read(1, n, 0, 0).with_prps(prp1, 0))
}

fn zeroes(field: &mut Field) -> Result<()> {
    let guest = field.guest_with(QUEUES, 32)?;
    field.fill(guest, |_| Sqe::write_zeroes(1, 0, 32767, false, 0))
}

fn verify(field: &mut Field) -> Result<()> {
    let guest = field.guest_with(QUEUES, 32)?;
    field.fill(guest, |_| Sqe::verify(1, 0, 32767, 0))
}

fn copy(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(QUEUES, 32)?;
    let range = |n: u64| CopyRange {
        snsid: 0,
        reserved4: 0,
        slba: n % 64 * 64,
        nlb0: 63,
        reserved18: [0; 4],
        sopt: 0,
        reftag: 0,
        apptag: 0,
        apptag_mask: 0,
    };
    let ranges: Vec<CopyRange> = (0..128).map(range).collect();
    let list = guest.place(ranges.as_bytes())?;
    let fields = CopyFields { sdlba: 16384, nr0: 127, ..CopyFields::default() };
    field.fill(guest, move |_| Sqe::copy(1, fields, 0).with_prps(list, 0))
}

fn flush(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(QUEUES, 32)?;
    let (prp1, _) = guest.buffer(4096)?;
    field.fill(guest, move |n| {
        let write = Sqe::write(1, n * 8 % 100_000, 7, 0).with_prps(prp1, 0);
        if n % 2 == 0 { write } else { Sqe::flush(1, 0) }
    })
}

/// Makes an SGL with 3584 data descriptors of 256 bytes.
fn pieces(guest: &mut Guest) -> Result<[u8; 16]> {
    let at = Guest::address(guest.alloc(LARGE)?);
    let list: Vec<SglDescriptor> =
        (0..3584).map(|n| SglDescriptor::data_block(at + n * 256, 256)).collect();
    let bytes = list.as_bytes();
    let list = guest.place(bytes)?;
    Ok(SglDescriptor::last_segment(list, bytes.len() as u32).to_dptr())
}

fn with_sgl(mut sqe: Sqe, dptr: [u8; 16]) -> Sqe {
    (sqe.dptr, sqe.flags) = (dptr, 0x40);
    sqe
}

fn sgl(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(16, 1024)?;
    let dptr = pieces(&mut guest)?;
    field.fill(guest, move |n| with_sgl(Sqe::write(1, n * 2048 % 100_000, 1791, 0), dptr))
}

fn sgl_mem(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(QUEUES, 64)?;
    let dptr = pieces(&mut guest)?;
    field.fill(guest, move |n| with_sgl(Sqe::read(1, n * 2048 % 28_672, 1791, 0), dptr))
}

fn bad_sgl(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(QUEUES, 64)?;
    // An SGL segment whose last descriptor points to the segment itself, so the list has no end.
    // The other descriptors are data blocks of zero bytes.
    let at = Guest::address(guest.alloc(4096)?);
    let mut list: Vec<SglDescriptor> = (0..255).map(|_| SglDescriptor::data_block(at, 0)).collect();
    list.push(SglDescriptor::segment(at, 4096));
    let bytes = list.as_bytes();
    guest.memory.write_from((at - BASE) as usize, bytes).context("the list")?;
    let dptr = SglDescriptor::segment(at, 4096).to_dptr();
    field.fill(guest, move |_| with_sgl(Sqe::read(1, 0, LARGE_NLB0, 0), dptr))
}

fn bad_commands(field: &mut Field) -> Result<()> {
    let guest = field.guest_with(QUEUES, 64)?;
    field.fill(guest, |n| match n % 4 {
        0 => Sqe::new(0x55, 0, 1),
        1 => Sqe::read(1, u64::MAX - 4, 7, 0),
        2 => Sqe::read(1, 0, 7, 0).with_prps(1 << 60, 3),
        _ => Sqe::read(77, 0, 7, 0),
    })
}

fn resets(field: &mut Field) -> Result<()> {
    let mut guest = field.guest_with(QUEUES, 32)?;
    let (prp1, _) = guest.buffer(4096)?;
    let mut make = move |n: u64| Sqe::read(1, n % 2048, 7, 0).with_prps(prp1, 0);
    while !field.is_over() {
        field.top_up(&mut guest, 31, &mut make)?;
        let queues = guest.queues.clone();
        field.resets.push(guest.reset()?);
        guest.enable()?;
        queues.into_iter().try_for_each(|queue| guest.create(queue))?;
    }
    field.guests.push(guest);
    Ok(())
}
