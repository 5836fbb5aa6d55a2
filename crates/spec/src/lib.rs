//! NVMe on the wire: registers, commands, completions, Identify data, log pages, status codes.
//!
//! Plain data and nothing else: no I/O, no allocation, no unsafe code. Every structure has the size
//! and the field offsets that the specification gives it (the tests check each one), may be made
//! from any bytes (`zerocopy::FromBytes`) and has no padding (`zerocopy::IntoBytes`), so that a
//! peer can neither make it invalid nor see memory of ours through it.
//!
//! | module | what |
//! |---|---|
//! | [`regs`] | controller properties and doorbell offsets |
//! | [`sqe`], [`cqe`] | submission and completion queue entries |
//! | [`opcode`], [`status`] | command opcodes; status codes with the specification's names |
//! | [`admin`], [`nvm`] | command dwords, decoded, and back |
//! | [`build`] | whole commands, for the host side |
//! | [`sgl`] | scatter gather list descriptors |
//! | [`identify`], [`log`], [`feature`] | the data of Identify, Get Log Page, Get and Set Features |
//! | [`event`] | asynchronous events |
//! | [`dbbuf`] | where a queue's shadow doorbell and EventIdx are |
//! | [`zns`] | the Zoned Namespace command set: commands, zone reports, Identify |
//! | [`pci`] | what NVMe fixes of PCI: class code, MSI-X |
//!
//! # Which documents
//!
//! Citations are short: *Base* is the NVM Express Base Specification (2.1 unless said otherwise),
//! *NVM* the NVM Command Set Specification 1.1, *PCIe* the NVMe over PCIe Transport Specification
//! 1.1. Where a clause number moved between revisions, the clause is cited by its title.
//!
//! # Bit fields
//!
//! A `with_` or `set_` function panics if the value does not fit its field: they are for values of
//! our own, and have `_checked` forms for others. What a peer sent goes in whole, through
//! `from_bits`, and every pattern of bits is valid there.
//!
//! # Byte order
//!
//! NVMe is little-endian. The structures use native integers, so the crate refuses to build for a
//! big-endian target rather than being wrong there.
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
/// Its traits make a structure from bytes and bytes from a structure.
pub use zerocopy;
