//! Instruction count per I/O of the driver and of the controller. The two take turns on one thread,
//! and neither of them waits, so the count is equal in every run.
//!
//!     cargo build --release --example step
//!     valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*controller_side*' \
//!         target/release/examples/step 10000 32
//!
//! These commands count the instructions of the controller (with `*driver_side*`, those of the
//! driver). Divide the count by the number of I/Os that the program prints.
//!
//! Optional arguments: disk, opcode, metadata format of the blocks, bits of PRINFO. For example
//! `10000 32 mem:256MiB 2`, and `10000 32 mem:256MiB 2 'metadata=8&pi=3' 12` for reads with guard
//! checks. The last printed number is the time per I/O in nanoseconds, of driver and controller
//! together. It is meaningful only for a disk that completes every request inline, such as a memory
//! disk.

use shadowbell_controller::config::{Config, NamespaceConfig, uuid_from};
use shadowbell_controller::{Carrier, Controller, Polling, Pool, Turns};
use shadowbell_disk::{Disk, MetadataFormat, Op, Request, Submitted};
use shadowbell_disk_layers::MetadataDisk;
use shadowbell_driver::{AttachOptions, Buffer, Command, Completion, QueuePair};
use shadowbell_frontend::InProcess;
use shadowbell_memory::{Mapping, Segments};
use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

/// Bytes per I/O.
const IO: u32 = 4096;
/// Bytes per write when the disk is filled.
const FILL: u64 = 1 << 20;

/// Parameters of the I/O commands that the program submits.
struct Form {
    opcode: u8,
    prinfo: u32,
    /// Number of logical blocks per I/O, and the number of positions on the disk for I/Os of this
    /// size.
    blocks: u32,
    places: u64,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let text = |nth: usize, default| args.get(nth).map_or(default, String::as_str);
    let (rounds, depth): (usize, usize) = (text(0, "1000").parse()?, text(1, "32").parse()?);
    let (opcode, prinfo): (u8, u32) = (text(3, "2").parse()?, text(5, "0").parse()?);

    let mut disk = shadowbell_disk_file::open(text(2, "null:1TiB"))?;
    let options = text(4, "").split('&').filter_map(|option| option.split_once('='));
    if let Some(format) = MetadataFormat::parse(options)? {
        disk = Arc::new(MetadataDisk::new(disk, format)?);
    }
    let info = disk.info();
    if args.len() > 2 {
        fill(&*disk)?;
    }
    let blocks = IO / info.block_size;
    let form = Form { opcode, prinfo, blocks, places: info.blocks / u64::from(blocks) };
    let namespace = NamespaceConfig { disk, uuid: uuid_from("step") };
    let config = Config { namespaces: vec![namespace], ..Config::default() };
    let (pool, mut turns) = Pool::driven(Polling::Never)?;
    let controller = Controller::new(config, pool, Carrier::default())?;
    let transport = Arc::new(InProcess::new(controller, "local:null:1TiB".into()));
    // `attach` runs on another thread, because it waits for the controller, which this thread runs
    // by `turn`.
    let options = AttachOptions { queue_pairs: 1, interrupts: false, ..AttachOptions::default() };
    let attaching =
        std::thread::spawn(move || shadowbell_driver::Controller::attach(transport, &options));
    while !attaching.is_finished() {
        if !turns.turn() {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
    let mut attached = attaching.join().map_err(|_| "attaching panicked")??;
    let mut queue = attached.take_queue_pair().ok_or("there is no queue pair")?;
    let pool = attached.buffers(depth, IO as usize)?;
    let mut free: Vec<Buffer> = std::iter::from_fn(|| pool.take()).collect();
    let mut lba = 1u64;

    let mut done = 0;
    let began = Instant::now();
    for _ in 0..rounds {
        driver_side(&mut queue, &mut free, &mut lba, &form)?;
        controller_side(&mut turns);
        done += free.capacity().min(depth);
    }
    driver_side(&mut queue, &mut free, &mut lba, &form)?;
    controller_side(&mut turns);
    let took = began.elapsed();
    println!("{done}");
    println!("{:?}", queue.stats());
    println!("{:.1}", took.as_nanos() as f64 / done as f64);
    // The program exits without detaching. Detaching would wait for the controller, which no longer
    // runs.
    std::process::exit(0);
}

/// Writes the whole disk before reads are measured. For blocks that were never written, metadata
/// are not checked, and all data come from one page of zeroes that stays in the CPU caches.
fn fill(disk: &dyn Disk) -> Result<(), Box<dyn Error>> {
    let (mut queue, bytes) = (disk.queue()?, disk.info().bytes());
    let memory = Mapping::anonymous(FILL)?.bytes();
    memory.fill(0, FILL as usize, 0xa5).ok_or("memory")?;
    let mut offset = 0;
    while offset < bytes {
        let len = FILL.min(bytes - offset);
        let request = Request { op: Op::Write { fua: false }, offset, len };
        let submitted = queue.submit(0, &request, &mut Segments::from_bytes(&memory));
        queue.commit();
        while queue.pending() != 0 {
            let mut outcome = Ok(());
            queue.reap(&mut |_, ended, _| outcome = ended);
            outcome?;
        }
        if let Submitted::Done(outcome) = submitted {
            outcome?;
        }
        offset += len;
    }
    Ok(())
}

/// One turn of the controller's I/O thread.
#[inline(never)]
fn controller_side(turns: &mut Turns) {
    black_box(turns.turn());
}

/// One turn of the driver: takes all completions, and submits the same number of commands.
#[inline(never)]
fn driver_side(
    queue: &mut QueuePair,
    free: &mut Vec<Buffer>,
    lba: &mut u64,
    form: &Form,
) -> Result<(), Box<dyn Error>> {
    while let Some(Completion { status, buffer, .. }) = queue.pop() {
        if !status.is_success() {
            return Err(status.to_string().into());
        }
        free.extend(buffer);
    }
    while let Some(buffer) = free.pop() {
        *lba = lba.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let block = (*lba >> 36) % form.places * u64::from(form.blocks);
        let dwords =
            [block as u32, (block >> 32) as u32, (form.blocks - 1) | (form.prinfo << 26), 0];
        queue
            .submit(Command::raw(form.opcode, 1, dwords, IO), Some(buffer))
            .map_err(|e| e.reason)?;
    }
    queue.ring()?;
    Ok(())
}
