//! From nothing to a block that was read, in a few steps.
//!
//! # A block in twenty lines
//!
//! This program needs no SSD: it makes one, in its own memory, and drives it. Everything after the
//! first two lines is the same for a real one.
//!
//! ```
//! use shadowbell_driver::{AttachOptions, Controller};
//! use std::sync::Arc;
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     // The way to the controller: here one in this process, over a disk in memory.
//!     let disk = shadowbell_backend::open("mem:64MiB")?;
//!     let ssd = Arc::new(shadowbell_frontend::InProcess::over(disk)?);
//!     // Takes the controller over: resets and enables it, makes queues, asks what it is.
//!     let mut controller = Controller::attach(ssd, &AttachOptions::default())?;
//!     let namespace = controller.namespace(1).ok_or("there is no namespace 1")?.clone();
//!     let mut queue = controller.take_queue_pair().ok_or("there is no queue pair")?;
//!     // Memory that the controller can reach: one buffer of one block.
//!     let buffers = controller.buffers(1, namespace.block_size() as usize)?;
//!     // One command: read one block, the first.
//!     queue.submit(namespace.read(0, 1)?, buffers.take())?;
//!     queue.wait(None)?;
//!     let completion = queue.pop().ok_or("the controller went away")?;
//!     completion.status.into_result()?;
//!     let block = completion.buffer.ok_or("there is no buffer")?.to_vec(512);
//!     assert_eq!(block, [0; 512]);
//!     drop(queue);
//!     Ok(controller.detach()?)
//! }
//! ```
//!
//! What happened there:
//!
//! * **A transport** is the way to one controller. [`Controller::attach`] has it to itself.
//! * **A namespace** is a disk of the controller, with blocks of 512 or 4096 bytes. Its methods
//!   make commands, and refuse what it can not do before the controller has to.
//! * **A queue pair** belongs to one thread. [`submit`](QueuePair::submit) only writes the command
//!   down; the controller is notified by [`ring`](QueuePair::ring), or by
//!   [`wait`](QueuePair::wait), which rings first.
//! * **A buffer** goes along with its command and comes back with its completion. In between nobody
//!   can touch it, so nothing can be freed under the controller's hands.
//!
//! # Many at a time
//!
//! An SSD is fast with many commands under way. Submit any number, ring once, take completions in
//! whatever order they come, and use the buffer of each for the next:
//!
//! ```
//! # use shadowbell_driver::{AttachOptions, Controller};
//! # use std::sync::Arc;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let disk = shadowbell_backend::open("mem:64MiB")?;
//! # let ssd = Arc::new(shadowbell_frontend::InProcess::over(disk)?);
//! # let mut controller = Controller::attach(ssd, &AttachOptions::default())?;
//! # let namespace = controller.namespace(1).ok_or("there is no namespace 1")?.clone();
//! # let mut queue = controller.take_queue_pair().ok_or("there is no queue pair")?;
//! let buffers = controller.buffers(32, 4096)?;
//! let mut offsets = (0..64 << 20).step_by(4096);
//! let per_read = namespace.blocks_in(4096)? as u32;
//! let mut read = 0;
//! loop {
//!     while let Some(buffer) = buffers.take() {
//!         let Some(offset) = offsets.next() else { break };
//!         queue.submit(namespace.read(namespace.blocks_in(offset)?, per_read)?, Some(buffer))?;
//!     }
//!     if queue.outstanding() == 0 {
//!         break;
//!     }
//!     queue.wait(None)?;
//!     while let Some(completion) = queue.pop() {
//!         completion.status.into_result()?;
//!         // Dropped with the completion, the buffer is back in its pool.
//!         read += 4096;
//!     }
//! }
//! assert_eq!(read, 64 << 20);
//! # drop(queue);
//! # Ok(controller.detach()?)
//! # }
//! ```
//!
//! # With futures
//!
//! An [`AsyncQueue`] takes commands from any thread and any executor. Whoever has a thread that
//! does nothing but wait had best [drive the queue](crate::async_queue) with it.
//!
//! ```
//! # use shadowbell_driver::{AsyncQueue, AttachOptions, Controller};
//! # use std::sync::Arc;
//! # use std::{future::Future, pin::pin, task::{Context, Poll, Wake, Waker}, thread::Thread};
//! # struct Unpark(Thread);
//! # impl Wake for Unpark { fn wake(self: Arc<Self>) { self.0.unpark() } }
//! # fn block_on<F: Future>(future: F) -> F::Output {
//! #     let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
//! #     let mut future = pin!(future);
//! #     loop {
//! #         match future.as_mut().poll(&mut Context::from_waker(&waker)) {
//! #             Poll::Ready(output) => return output,
//! #             Poll::Pending => std::thread::park(),
//! #         }
//! #     }
//! # }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let disk = shadowbell_backend::open("mem:64MiB")?;
//! # let ssd = Arc::new(shadowbell_frontend::InProcess::over(disk)?);
//! # let mut controller = Controller::attach(ssd, &AttachOptions::default())?;
//! let queue = AsyncQueue::start(controller.take_queue_pair().ok_or("there is no queue pair")?)?;
//! let disk = queue.open(controller.namespace(1).ok_or("there is no namespace 1")?);
//! let buffers = controller.buffers(16, 4096)?;
//! let mut buffer = buffers.take().ok_or("all buffers are in use")?;
//! buffer.fill(0x17);
//! // With the executor of your choice in place of this `block_on`.
//! let buffer = block_on(async {
//!     let buffer = disk.write(8, buffer).await?;
//!     disk.flush().await?;
//!     disk.read(8, buffer).await
//! })?;
//! assert_eq!(buffer.to_vec(4096), [0x17; 4096]);
//! # Ok(())
//! # }
//! ```
//!
//! # Copies that never come here
//!
//! A controller with a Copy command moves blocks to another place by itself; all that is sent is
//! where they are:
//!
//! ```
//! # use shadowbell_driver::{AttachOptions, Controller};
//! # use shadowbell_spec::nvm::CopyRange;
//! # use std::sync::Arc;
//! # use shadowbell_spec::zerocopy::IntoBytes;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let disk = shadowbell_backend::open("mem:64MiB")?;
//! # let ssd = Arc::new(shadowbell_frontend::InProcess::over(disk)?);
//! # let mut controller = Controller::attach(ssd, &AttachOptions::default())?;
//! # let namespace = controller.namespace(1).ok_or("there is no namespace 1")?.clone();
//! # let mut queue = controller.take_queue_pair().ok_or("there is no queue pair")?;
//! let limits = namespace.copy_limits().ok_or("there is no Copy command")?;
//! // 1000 blocks from block 0 on, in as many ranges as it takes.
//! let sources: Vec<CopyRange> = limits.split(0, 1000).collect();
//! let mut buffer = controller.buffers(1, 4096)?.take().ok_or("all buffers are in use")?;
//! assert!(buffer.copy_from(0, sources.as_bytes()));
//! queue.submit(namespace.copy(5000, &sources)?, Some(buffer))?;
//! queue.wait(None)?;
//! let completion = queue.pop().ok_or("the controller went away")?;
//! completion.status.into_result()?;
//! # drop((completion, queue));
//! # Ok(controller.detach()?)
//! # }
//! ```
//!
//! # Metadata
//!
//! Blocks whose metadata are protection information alone are read and written as above: the
//! controller inserts, checks and strips it. Whoever wants to know that data arrive unharmed makes
//! it before the write and checks it after the read:
//!
//! ```
//! # use shadowbell_backend::{MetadataDisk, MetadataFormat};
//! # use shadowbell_driver::{AttachOptions, Controller};
//! # use std::sync::Arc;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let format = MetadataFormat::parse([("metadata", "8"), ("pi", "1")].into_iter())?;
//! # let disk = MetadataDisk::new(shadowbell_backend::open("mem:64MiB")?, format.ok_or("none")?)?;
//! # let ssd = Arc::new(shadowbell_frontend::InProcess::over(Arc::new(disk))?);
//! # let mut controller = Controller::attach(ssd, &AttachOptions::default())?;
//! # let namespace = controller.namespace(1).ok_or("there is no namespace 1")?.clone();
//! # let mut queue = controller.take_queue_pair().ok_or("there is no queue pair")?;
//! use shadowbell_spec::nvm::{PRINFO_GUARD, PRINFO_REFTAG};
//! use shadowbell_spec::protection::ProtectionFields;
//!
//! // What the controller checks, and with which tags: of type 1, the number of the first block.
//! let (lba, prinfo) = (100, PRINFO_GUARD | PRINFO_REFTAG);
//! let fields = ProtectionFields { prinfo, ref_tag: lba, ..ProtectionFields::default() };
//! let write = namespace.write_with_metadata(lba, 8, fields)?;
//! // Data, and behind them the metadata of 8 blocks.
//! let pool = controller.buffers(1, write.buffer_bytes())?;
//! let mut buffer = pool.take().ok_or("all buffers are in use")?;
//! buffer.fill(7);
//! assert!(write.protect(&mut buffer));
//! queue.submit_with_metadata(&write, Some(buffer))?;
//! queue.wait(None)?;
//! let completion = queue.pop().ok_or("the controller went away")?;
//! completion.status.into_result()?;
//!
//! let read = namespace.read_with_metadata(lba, 8, fields)?;
//! queue.submit_with_metadata(&read, completion.buffer)?;
//! queue.wait(None)?;
//! let completion = queue.pop().ok_or("the controller went away")?;
//! completion.status.into_result()?;
//! read.check(&completion.buffer.ok_or("there is no buffer")?)?;
//! # drop(queue);
//! # Ok(controller.detach()?)
//! # }
//! ```
//!
//! For bytes instead of blocks, of any length and at any place, there is the crate
//! `shadowbell-block` on top of this.
//!
//! # A real SSD
//!
//! In place of the first two lines:
//!
//! ```no_run
//! # use shadowbell_driver::{Vfio, VfioUser};
//! # use std::sync::Arc;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A PCI device of this machine, after `shadowbell bind 0000:01:00.0` (as root).
//! let ssd = Arc::new(Vfio::open("0000:01:00.0".parse()?)?);
//! // A controller behind a socket: `shadowbell serve --socket /run/vm0.sock mem:1GiB`, or SPDK.
//! let ssd = Arc::new(VfioUser::connect("/run/vm0.sock", std::time::Duration::from_secs(5))?);
//! # Ok(())
//! # }
//! ```
//!
//! The directory `examples` has a program for each:
//!
//! ```text
//! cargo run -p shadowbell-driver --example in_process
//! cargo run -p shadowbell-driver --example vfio_user -- /run/vm0.sock
//! cargo run -p shadowbell-driver --example vfio -- 0000:01:00.0
//! ```
#![allow(unused_imports, reason = "the links above")]

use crate::{AsyncQueue, Controller, QueuePair};
