//! Tutorial: from an in-memory SSD to asynchronous I/O, Copy and metadata.
//!
//! # A block in twenty lines
//!
//! This program needs no SSD: it creates an NVMe controller in its own memory and drives it. The
//! code after the first two lines is the same for a real SSD.
//!
//! ```
//! use shadowbell_driver::{AttachOptions, Controller};
//! use std::sync::Arc;
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     // Transport to the controller: here to one in this process, with a disk in memory.
//!     let disk = shadowbell_disk_file::open("mem:64MiB")?;
//!     let ssd = Arc::new(shadowbell_frontend::InProcess::over(disk)?);
//!     // Resets, enables and identifies the controller, and creates its queues.
//!     let mut controller = Controller::attach(ssd, &AttachOptions::default())?;
//!     let namespace = controller.namespace(1).ok_or("there is no namespace 1")?.clone();
//!     let mut queue = controller.take_queue_pair().ok_or("there is no queue pair")?;
//!     // Memory that is shared with the controller: one buffer of one block.
//!     let buffers = controller.buffers(1, namespace.block_size() as usize)?;
//!     // One command: read one block, the first.
//!     queue.submit(namespace.read(0, 1)?, buffers.take())?;
//!     queue.wait(None)?;
//!     let completion = queue.pop().ok_or("the controller was removed")?;
//!     completion.status.into_result()?;
//!     let block = completion.buffer.ok_or("there is no buffer")?.to_vec(512);
//!     assert_eq!(block, [0; 512]);
//!     drop(queue);
//!     Ok(controller.detach()?)
//! }
//! ```
//!
//! The types of this program:
//!
//! * **A transport** connects to one controller. [`Controller::attach`] takes exclusive control.
//! * **A namespace** is a disk of the controller, with blocks of 512 or 4096 bytes. Its methods
//!   create commands, and return an error for requests that the namespace does not support.
//! * **A queue pair** belongs to one thread. [`submit`](QueuePair::submit) only writes the command
//!   to the submission queue; [`ring`](QueuePair::ring) notifies the controller, and so does
//!   [`wait`](QueuePair::wait) before it waits.
//! * **A buffer** is passed in with its command and returned with the completion. In between the
//!   program cannot access the buffer, so the program cannot free memory that the controller uses.
//!
//! # Many commands in flight
//!
//! An SSD is fast with many commands in flight. Submit any number, ring once, take completions in
//! any order, and reuse the buffer of each completion for the next command:
//!
//! ```
//! # use shadowbell_driver::{AttachOptions, Controller};
//! # use std::sync::Arc;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let disk = shadowbell_disk_file::open("mem:64MiB")?;
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
//!         // The drop of the completion returns the buffer to its pool.
//!         read += 4096;
//!     }
//! }
//! assert_eq!(read, 64 << 20);
//! # drop(queue);
//! # Ok(controller.detach()?)
//! # }
//! ```
//!
//! # Futures
//!
//! An [`AsyncQueue`] takes commands from any thread and any executor. If a thread does nothing but
//! wait for its futures, let that thread [drive the queue](crate::async_queue).
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
//! # let disk = shadowbell_disk_file::open("mem:64MiB")?;
//! # let ssd = Arc::new(shadowbell_frontend::InProcess::over(disk)?);
//! # let mut controller = Controller::attach(ssd, &AttachOptions::default())?;
//! let queue = AsyncQueue::start(controller.take_queue_pair().ok_or("there is no queue pair")?)?;
//! let disk = queue.open(controller.namespace(1).ok_or("there is no namespace 1")?);
//! let buffers = controller.buffers(16, 4096)?;
//! let mut buffer = buffers.take().ok_or("all buffers are in use")?;
//! buffer.fill(0x17);
//! // `block_on` stands for any executor.
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
//! # Copy inside the controller
//!
//! The Copy command copies blocks inside the controller; the host sends only the source ranges and
//! the destination:
//! ```
//! # use shadowbell_driver::{AttachOptions, Controller};
//! # use shadowbell_spec::nvm::CopyRange;
//! # use std::sync::Arc;
//! # use shadowbell_spec::zerocopy::IntoBytes;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let disk = shadowbell_disk_file::open("mem:64MiB")?;
//! # let ssd = Arc::new(shadowbell_frontend::InProcess::over(disk)?);
//! # let mut controller = Controller::attach(ssd, &AttachOptions::default())?;
//! # let namespace = controller.namespace(1).ok_or("there is no namespace 1")?.clone();
//! # let mut queue = controller.take_queue_pair().ok_or("there is no queue pair")?;
//! let limits = namespace.copy_limits().ok_or("there is no Copy command")?;
//! // 1000 blocks from block 0 on, split into ranges.
//! let sources: Vec<CopyRange> = limits.split(0, 1000).collect();
//! let mut buffer = controller.buffers(1, 4096)?.take().ok_or("all buffers are in use")?;
//! assert!(buffer.copy_from(0, sources.as_bytes()));
//! queue.submit(namespace.copy(5000, &sources)?, Some(buffer))?;
//! queue.wait(None)?;
//! let completion = queue.pop().ok_or("the controller was removed")?;
//! completion.status.into_result()?;
//! # drop((completion, queue));
//! # Ok(controller.detach()?)
//! # }
//! ```
//!
//! # Metadata
//!
//! If the metadata of a block are protection information and nothing else, the namespace is read
//! and written as above: the controller inserts, checks and strips protection information. For
//! end-to-end protection, the program generates protection information before the write and checks
//! it after the read:
//! ```
//! # use shadowbell_disk::MetadataFormat;
//! # use shadowbell_disk_layers::MetadataDisk;
//! # use shadowbell_driver::{AttachOptions, Controller};
//! # use std::sync::Arc;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let format = MetadataFormat::parse([("metadata", "8"), ("pi", "1")].into_iter())?;
//! # let disk = MetadataDisk::new(shadowbell_disk_file::open("mem:64MiB")?,
//! format.ok_or("none")?)?;
//! # let ssd = Arc::new(shadowbell_frontend::InProcess::over(Arc::new(disk))?);
//! # let mut controller = Controller::attach(ssd, &AttachOptions::default())?;
//! # let namespace = controller.namespace(1).ok_or("there is no namespace 1")?.clone();
//! # let mut queue = controller.take_queue_pair().ok_or("there is no queue pair")?;
//! use shadowbell_spec::nvm::{PRINFO_GUARD, PRINFO_REFTAG};
//! use shadowbell_spec::protection::ProtectionFields;
//!
//! // The controller checks guard and reference tag. With type 1, the latter is the LBA.
//! let (lba, prinfo) = (100, PRINFO_GUARD | PRINFO_REFTAG);
//! let fields = ProtectionFields { prinfo, ref_tag: lba, ..ProtectionFields::default() };
//! let write = namespace.write_with_metadata(lba, 8, fields)?;
//! // The buffer has the data, followed by the metadata of 8 blocks.
//! let pool = controller.buffers(1, write.buffer_bytes())?;
//! let mut buffer = pool.take().ok_or("all buffers are in use")?;
//! buffer.fill(7);
//! assert!(write.protect(&mut buffer));
//! queue.submit_with_metadata(&write, Some(buffer))?;
//! queue.wait(None)?;
//! let completion = queue.pop().ok_or("the controller was removed")?;
//! completion.status.into_result()?;
//!
//! let read = namespace.read_with_metadata(lba, 8, fields)?;
//! queue.submit_with_metadata(&read, completion.buffer)?;
//! queue.wait(None)?;
//! let completion = queue.pop().ok_or("the controller was removed")?;
//! completion.status.into_result()?;
//! read.check(&completion.buffer.ok_or("there is no buffer")?)?;
//! # drop(queue);
//! # Ok(controller.detach()?)
//! # }
//! ```
//!
//! The crate `shadowbell-block` provides byte ranges of any offset and length on top of this crate.
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
//! The directory `examples` has one program for each transport:
//!
//! ```text
//! cargo run -p shadowbell-driver --example in_process
//! cargo run -p shadowbell-driver --example vfio_user -- /run/vm0.sock
//! cargo run -p shadowbell-driver --example vfio -- 0000:01:00.0
//! ```
#![allow(unused_imports, reason = "the links above")]

use crate::{AsyncQueue, Controller, QueuePair};
