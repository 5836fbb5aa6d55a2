//! An export of an NBD server as a disk: of qemu-nbd, nbdkit, nbd-server, or of our own.
//!
//! # Architecture
//!
//! | module | what it is |
//! |---|---|
//! | [`NbdSpec`] | an export as people write it |
//! | [`NbdDisk`] | the export as a disk: its properties |
//! | `hub`, `shared` | a disk's connections, and what they share |
//! | `caretaker` | the thread that connects again |
//! | `replay` | writing again what a server may have lost |
//! | `queue`, `task` | a worker's queue, and its requests as requests to the server |
//! | `link` | a connection and what is on its way by it |
//! | `holes` | what is allocated |
//! | `user` | what a queue and a connection share |
//! | `receiver`, `coverage` | what the server says, understood and checked |
//! | `part` | requests to the server, and their cookies |
//! | `journal` | what was answered and is not durable yet |
//! | `connect`, `negotiate`, `export` | a way to the server, the handshake, what it says of itself |
//! | `stream` | bytes in and out |
//! | `secured`, `relay` | the same by TLS, in the handshakes and afterwards |
//! | `kept` | the disk of a process that has died, in the next one |
//!
//! The codec is `shadowbell-nbd`'s, which the server in `shadowbell-export` uses, too.
//!
//! A queue sends and receives by itself, on its worker's thread, and never waits: there is no other
//! thread between a guest and the server. Queues share connections if the server allows only one
//! (`CAN_MULTI_CONN`). What takes time (names, connecting, the handshake) is the caretaker's.
//!
//! Data go through buffers of the connection's: the kernel sees no memory of the guest's, which
//! may change or vanish at any time.
//!
//! # When the server goes away
//!
//! Requests wait, and the caretaker tries to connect: after 10 ms, and then in steps that double, up
//! to two seconds. What had no answer is sent again. A request that the host cancels meanwhile ends.
//!
//! That is not all. A server keeps in memory what was written, until a flush; that of a server that
//! was killed may be gone, although it was answered. A host that then flushes would take it for
//! durable. So what was answered since the last flush is kept (`replay=64MiB`), and is written again
//! on the first new connection, in the order of the answers and before anything else. If it becomes
//! too much, the disk flushes by itself, and writes wait for that. If one connection of several is
//! lost, the others answer what they have first, because nobody can tell the end of a connection
//! from that of a server.
//!
//! Where that is not possible (`replay=off`, or the server refuses what it has taken before), every
//! flush and every write that is to be durable fails until the disk is opened again, and the log
//! says so. Nothing is lost silently.
//!
//! Two things are beyond this. Somebody else who writes to the same export may see old data come
//! back. And a server that goes on with requests of a connection that it has ended may carry out a
//! write after a later one: NBD has no way to call requests back.
//!
//! # What is durable when
//!
//! What was flushed. FUA is the server's if it has it, and else a flush after the write. A server
//! that has no flush has no cache as far as anybody knows.
//!
//! A discard is a Write Zeroes that lets the server give the bytes back. NBD's trim is not used: what
//! is read afterwards is anything, and a disk's blocks do not change by themselves. On a server
//! without Write Zeroes, discards do nothing.
//!
//! # TLS
//!
//! `nbds:` asks for it before anything else. Its certificates are read when the disk is opened, and
//! count for later connections as well. A connection has a thread that does its cryptography, and
//! a socket between that and the workers: so these never do more than copy.
//!
//! # Trust
//!
//! A server may say anything. Replies that do not fit their requests end the connection, and a
//! request during which that happens four times fails. Texts, replies and chunks are bounded, and
//! so is what a connection holds: 256 requests and 16 MiB of data, and what `replay` says.
//!
//! # What it does not implement
//!
//! Extended headers. Handing the disk
//! over to another process at an upgrade: what was not flushed is in this process's memory. (After
//! a death see [`NbdDisk::recover`].)
#![forbid(unsafe_code)]

mod caretaker;
mod connect;
mod coverage;
mod disk;
mod error;
mod export;
mod holes;
mod hub;
mod journal;
mod kept;
mod link;
mod negotiate;
mod part;
mod queue;
mod receiver;
mod relay;
mod replay;
mod secured;
mod shared;
mod stream;
mod task;
mod uri;
mod user;

pub use disk::NbdDisk;
pub use error::OpenError;
pub use negotiate::NegotiationError;
pub use uri::NbdSpec;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
