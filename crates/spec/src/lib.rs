//! NVMe data structures: registers, commands, completions, Identify data, log pages, status codes.
//!
//! The crate contains plain data: no I/O, no allocation, no unsafe code. Every structure has the
//! size and the field offsets of the specification. Tests check this. Any bytes are a valid
//! structure (`zerocopy::FromBytes`), and no structure has padding (`zerocopy::IntoBytes`). So a
//! peer can neither create an invalid structure nor read uninitialized memory from one.
//!
//! | module | content |
//! |---|---|
//! | [`regs`] | controller properties and doorbell offsets |
//! | [`sqe`], [`cqe`] | submission and completion queue entries |
//! | [`opcode`], [`status`] | command opcodes; status codes with the specification's names |
//! | [`admin`], [`nvm`] | command dwords, decoded and encoded |
//! | [`build`] | complete commands, for the host side |
//! | [`sgl`] | scatter gather list descriptors |
//! | [`identify`], [`log`], [`feature`] | data of Identify, Get Log Page, Get and Set Features |
//! | [`event`] | asynchronous events |
//! | [`dbbuf`] | offsets in the Shadow Doorbell and EventIdx buffers |
//! | [`zns`] | Zoned Namespace command set: commands, zone reports, Identify |
//! | [`pci`] | PCI constants of NVMe: class code, capabilities, MSI-X |
//!
//! # Specifications
//!
//! Citations are short: *Base* is the NVM Express Base Specification (2.1 unless stated otherwise),
//! *NVM* the NVM Command Set Specification 1.1, *PCIe* the NVMe over PCIe Transport Specification
//! 1.1. If the number of a clause differs between revisions, the clause is cited by its title.
//!
//! # Bit fields
//!
//! `with_` and `set_` functions panic if the value does not fit into the field. They are for values
//! that the caller's own code chooses; for other values there are `_checked` variants. Values of a
//! peer are converted by `from_bits`, which accepts every bit pattern.
//!
//! # Byte order
//!
//! NVMe is little-endian. The structures use native integers, so the crate does not compile for
//! big-endian targets.
#![forbid(unsafe_code)]

#[cfg(not(target_endian = "little"))]
compile_error!("NVMe structures are little-endian, and this crate lays them over native integers");

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}

pub mod admin;
mod admin_namespaces;
pub mod build;
pub mod cqe;
pub mod dbbuf;
pub mod event;
pub mod feature;
pub mod identify;
mod layout;
pub mod lba_status;
pub mod log;
pub mod nvm;
pub mod opcode;
pub mod pci;
pub mod protection;
pub mod regs;
pub mod reservation;
pub mod sgl;
pub mod sqe;
pub mod status;
pub mod zns;

pub use cqe::Cqe;
pub use sqe::Sqe;
pub use status::Status;
/// Traits for converting structures from and to bytes.
pub use zerocopy;
