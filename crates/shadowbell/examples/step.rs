//! A driver and a controller that take turns on one thread: what an I/O costs each of them in
//! instructions, without any waiting, so that the figure is the same in every run.
//!
//!     cargo build --release --example step
//!     valgrind --tool=callgrind --collect-atstart=no --toggle-collect='*controller_side*' \
//!         target/release/examples/step 10000 32
//!
//! collects what the controller does (`*driver_side*`: the driver), to be divided by the number of
//! I/Os that the program prints.

use shadowbell_controller::config::{Config, NamespaceConfig, uuid_from};
use shadowbell_controller::{Carrier, Controller, Polling, Pool, Turns};
use shadowbell_driver::{AttachOptions, Buffer, Command, Completion, QueuePair};
use shadowbell_frontend::InProcess;
use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;

/// Bytes of an I/O.
const IO: u32 = 4096;
const BLOCK: u32 = 512;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let mut number = |default| args.next().map_or(Ok(default), |arg| arg.parse::<usize>());
    let (rounds, depth) = (number(1000)?, number(32)?);

    let disk = shadowbell_backend::open("null:1TiB")?;
    let namespace = NamespaceConfig { disk, uuid: uuid_from("step") };
    let config = Config { namespaces: vec![namespace], ..Config::default() };
    let (pool, mut turns) = Pool::driven(Polling::Never)?;
    let controller = Controller::new(config, pool, Carrier::default())?;
    let transport = Arc::new(InProcess::new(controller, "local:null:1TiB".into()));
    // Whoever attaches waits for what takes turns of the worker to happen.
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
    for _ in 0..rounds {
        driver_side(&mut queue, &mut free, &mut lba)?;
        controller_side(&mut turns);
        done += free.capacity().min(depth);
    }
    driver_side(&mut queue, &mut free, &mut lba)?;
    controller_side(&mut turns);
    println!("{done}");
    println!("{:?}", queue.stats());
    // Detaching would wait for turns as well: the process ends instead.
    std::process::exit(0);
}

/// One pass of the worker.
#[inline(never)]
fn controller_side(turns: &mut Turns) {
    black_box(turns.turn());
}

/// Takes every completion and submits as many reads.
#[inline(never)]
fn driver_side(
    queue: &mut QueuePair,
    free: &mut Vec<Buffer>,
    lba: &mut u64,
) -> Result<(), Box<dyn Error>> {
    while let Some(Completion { status, buffer, .. }) = queue.pop() {
        if !status.is_success() {
            return Err(status.to_string().into());
        }
        free.extend(buffer);
    }
    while let Some(buffer) = free.pop() {
        *lba = lba.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let block = (*lba >> 36) * u64::from(IO / BLOCK);
        let dwords = [block as u32, (block >> 32) as u32, IO / BLOCK - 1, 0];
        queue.submit(Command::raw(0x02, 1, dwords, IO), Some(buffer)).map_err(|e| e.reason)?;
    }
    queue.ring()?;
    Ok(())
}
