//! NBD client: an export of an NBD server (qemu-nbd, nbdkit, nbd-server, Shadowbell's own) as a
//! disk.
//!
//! # Architecture
//!
//! | module | content |
//! |---|---|
//! | [`NbdSpec`] | specification of an export |
//! | [`NbdDisk`] | the export as a disk: its properties |
//! | `connections`, `shared` | connections of a disk, and their shared state |
//! | `reconnect` | reconnection thread |
//! | `replay` | replay of writes that a server may have lost |
//! | `queue`, `task` | queue of an I/O thread, and its requests split into subrequests |
//! | `link` | a connection and its requests in flight |
//! | `block_status` | allocation state |
//! | `user` | completions of a queue's subrequests, and its wake-up |
//! | `receiver`, `coverage` | parser and checks of replies |
//! | `subrequest` | subrequests to the server, and their cookies |
//! | `unflushed` | answered writes that are not flushed |
//! | `connect`, `negotiate`, `export` | connecting, handshake, properties of the export |
//! | `stream` | socket input and output |
//! | `tls`, `tls_proxy` | TLS in the handshake and afterwards |
//! | `recovery` | crash recovery |
//!
//! The wire format is in `shadowbell-nbd`, which the server in `shadowbell-export` uses too.
//!
//! A queue sends and receives on its I/O thread without blocking; no other thread is between a
//! guest and the server. Queues share connections if the server allows only one (`CAN_MULTI_CONN`).
//! Blocking work (name resolution, connecting, handshake) is done by the reconnection thread.
//!
//! Data are copied through buffers of the connection, so that the kernel never accesses guest
//! memory, which may change or be unmapped at any time.
//!
//! # Unavailable server
//!
//! Requests wait while the reconnection thread tries to connect: after 10 ms, then with doubled
//! delays up to two seconds. Then requests without a reply are sent again. A request that the host
//! aborts during the wait ends at once.
//!
//! Resending is not sufficient. A server may store written data in memory until a flush. If it is
//! killed, it loses these data although it has answered the writes, and a later flush would report
//! the data as durable. Therefore the disk stores the requests that were answered since the last
//! flush (`replay=64MiB`). It replays them on the first new connection, in the order of the replies
//! and before other requests. If they exceed the limit, the disk sends a flush itself, and writes
//! wait for that flush. If one of several connections is lost, there is a replay too, because a
//! client cannot distinguish a lost connection from a dead server. The replay starts after all
//! replies on the other connections.
//!
//! If a replay is impossible (`replay=off`, or the server refuses a request that it executed
//! before), every flush and every FUA write fails until the disk is opened again, and an error is
//! logged. No data are lost silently.
//!
//! Two cases are out of reach. If another client writes to the same export, a replay may overwrite
//! its data with older data. If a server continues the requests of a closed connection, it may
//! execute an old write after a newer one, because NBD cannot cancel requests. So if a lost
//! connection had writes in flight, requests wait for the time `settle` before they are sent again.
//! Without this option, they are sent again at once.
//!
//! # Durability
//!
//! Flushed data are durable. FUA is passed to the server if it supports FUA; otherwise the write is
//! followed by a flush. A server without flush is assumed to have no cache.
//!
//! A discard is a Write Zeroes that allows the server to deallocate. NBD's trim is not used: it
//! leaves the data undefined, but discarded blocks of a disk must read as zeroes. Without Write
//! Zeroes, discards have no effect.
//!
//! # TLS
//!
//! `nbds:` starts TLS before any other option. Certificates are loaded when the disk is opened, and
//! are used for later connections too. Each connection has a thread for cryptography. The I/O
//! threads exchange plain data with it through a socket.
//!
//! # Trust
//!
//! Servers are untrusted. If a reply does not match its request, the disk closes the connection. A
//! request fails if it was in flight on four connections that were closed for this reason. Texts,
//! replies and chunks are bounded, and so is the state of a connection: 256 requests and 16 MiB of
//! data, and the limit of `replay`.
//!
//! # Limitations
//!
//! Extended headers are not implemented. The disk cannot be transferred to another process, because
//! unflushed writes are in this process's memory. (For crash recovery see [`NbdDisk::recover`].)
#![forbid(unsafe_code)]

mod block_status;
mod connect;
mod connections;
mod coverage;
mod disk;
mod error;
mod export;
mod link;
mod negotiate;
mod queue;
mod receiver;
mod reconnect;
mod recovery;
mod replay;
mod shared;
mod stream;
mod subrequest;
mod task;
mod tls;
mod tls_proxy;
mod unflushed;
mod uri;
mod user;

pub use connect::{Connector, connect_by};
pub use disk::NbdDisk;
pub use error::OpenError;
pub use negotiate::NegotiationError;
pub use uri::{NbdSpec, Peer};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
