//! Common part of the examples: attach, print the namespaces, read and write a block.

use shadowbell_driver::{AttachOptions, Buffer, Command, Controller, QueuePair, Transport};
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Prints the error, if any, and converts the outcome to an exit code.
pub(crate) fn end(outcome: Result<(), Box<dyn Error>>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Attaches to the controller, prints its namespaces, and reads the first block. With `write`,
/// writes the block first.
pub(crate) fn take(ssd: Arc<dyn Transport>, write: bool) -> Result<(), Box<dyn Error>> {
    let mut controller = Controller::attach(ssd, &AttachOptions::default())?;
    println!(
        "{}: {}, {:?} doorbells",
        controller.name(),
        controller.identity().model(),
        controller.doorbells()
    );
    for namespace in controller.namespaces() {
        let (nsid, blocks, size) = (namespace.nsid(), namespace.blocks(), namespace.block_size());
        println!("namespace {nsid}: {blocks} blocks of {size} bytes");
    }
    let namespace = controller.namespaces().first().ok_or("it has no namespace")?.clone();
    let mut queue = controller.take_queue_pair().ok_or("it has no queue pair")?;
    let pool = controller.buffers(1, namespace.block_size() as usize)?;
    let mut buffer = pool.take().ok_or("the pool is empty")?;

    if write {
        let text = b"a block that went to the disk and back";
        buffer.fill(0);
        if !buffer.copy_from(0, text) {
            return Err("a block is shorter than the text".into());
        }
        buffer = run(&mut queue, namespace.write(0, 1)?, buffer)?;
        buffer.fill(0);
    }
    let began = Instant::now();
    buffer = run(&mut queue, namespace.read(0, 1)?, buffer)?;
    let took = began.elapsed();
    for line in buffer.to_vec(64).chunks(16) {
        let hex: String = line.iter().map(|byte| format!("{byte:02x} ")).collect();
        let printable = |byte: &u8| if byte.is_ascii_graphic() { *byte as char } else { '.' };
        println!("{hex} {}", line.iter().map(printable).collect::<String>());
    }
    println!("read in {took:.0?}");

    // Normal shutdown: deletes the queues, flushes caches, disables the controller.
    drop(queue);
    Ok(controller.detach()?)
}

/// Executes one command and waits for its completion.
fn run(queue: &mut QueuePair, command: Command, buffer: Buffer) -> Result<Buffer, Box<dyn Error>> {
    queue.submit(command, Some(buffer))?;
    let deadline = Instant::now() + Duration::from_secs(10);
    while !queue.wait(Some(deadline))? {
        if Instant::now() >= deadline {
            return Err("the controller does not answer".into());
        }
    }
    let completion = queue.pop().ok_or("there is no completion after all")?;
    completion.status.into_result()?;
    completion.buffer.ok_or_else(|| "the buffer did not come back".into())
}
