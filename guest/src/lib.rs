//! The test machine: builds and boots a Linux guest under QEMU, and runs commands in it.
//!
//! # Architecture
//!
//! * [`host`]: prerequisites of this machine (root, `mmdebstrap`, a Debian mirror), and error
//!   messages if they are missing.
//! * [`roots`]: downloads, stored under `target/guest/` for later runs: a Debian root with QEMU and
//!   the guest's programs, and the guest kernels.
//! * [`cpio`], [`initramfs`]: the guest's user land, packed from that root in memory. The guest
//!   has no disks except those under test.
//! * [`frame`], [`agent`]: commands to the guest, and their exit codes and output, over a serial
//!   port of their own. The console of the kernel is another port.
//! * [`config`], [`machine`], [`qmp`]: the QEMU command line, the running guest, QEMU's control
//!   socket.
//! * [`rundir`], [`process`], [`server`]: files of one run, child processes that end with this
//!   one, and `shadowbell serve`.
//! * [`ack`]: acknowledged writes of a guest, and the check that the disk has them.
//! * [`tool`]: the program that runs inside the guest.
//! * [`esp`]: a disk image for UEFI boot.
//! * [`trace`]: counts of doorbells and interrupts from QEMU's trace.
//!
//! # Limits
//!
//! KVM is not used: every guest runs under TCG, so that results do not depend on the host's
//! virtualisation. Networks, graphics and guests other than Linux are not supported.
#![forbid(unsafe_code)]

pub mod ack;
pub mod agent;
pub mod config;
pub mod cpio;
pub mod esp;
pub mod frame;
pub mod host;
pub mod initramfs;
pub mod machine;
pub mod process;
pub mod qmp;
pub mod roots;
pub mod rundir;
pub mod server;
pub mod tool;
pub mod trace;

pub use agent::Output;
pub use config::{Config, Device, Drive, Firmware, Kernel};
pub use machine::Guest;
pub use roots::Roots;
pub use rundir::RunDir;
pub use server::{Serve, Server, Small};
