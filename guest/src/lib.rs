//! The test machine: builds and boots a Linux guest under QEMU, and works in it from outside.
//!
//! # Architecture
//!
//! * [`host`]: what this machine must offer (root, `mmdebstrap`, a Debian mirror), and one clear
//!   sentence when it does not.
//! * [`roots`]: what is fetched once and kept under `target/guest/`: a Debian root with QEMU and
//!   the guest's programs, and the guest kernels.
//! * [`cpio`], [`initramfs`]: the guest's whole user land, packed from that root in memory. The
//!   guest has no disk but the ones under test.
//! * [`frame`], [`agent`]: a command goes in, its exit code and output come back, over a serial
//!   port that nothing else writes to. The kernel's console is another port.
//! * [`config`], [`machine`], [`qmp`]: the QEMU command line, the running guest, its control
//!   socket.
//! * [`rundir`], [`process`], [`server`]: the files of one run, a child that cannot outlive us, and
//!   `shadowbell serve`.
//! * [`ack`]: which writes a guest saw acknowledged, and whether the disk still has them.
//! * [`tool`]: the program that runs inside the guest.
//! * [`esp`]: a disk image that boots through UEFI.
//! * [`trace`]: counting doorbells and interrupts in QEMU's own trace.
//!
//! # What it doesn't do
//!
//! KVM: every guest runs under TCG, so that a result does not depend on the host's virtualisation.
//! Networks, graphics and guests other than Linux are not built.
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
