//! Options of an NBD export.

use crate::queue_server::QueueThreads;
use shadowbell_tls::ServerTls;
use std::sync::Arc;

/// Options of an NBD export.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Name of the export, which is also the default export.
    pub name: String,
    /// Description, as a line of text.
    pub description: String,
    /// Largest number of clients. A peer (a user of this machine, or an address) can have three
    /// quarters of them at most; further clients are disconnected. A client in the handshake does
    /// not count, and may be evicted by a later one.
    pub max_clients: usize,
    /// TLS configuration. If it is set, clients without TLS are refused.
    pub tls: Option<ServerTls>,
    /// I/O threads that serve the disk's queues and may also serve a client. Without them, each
    /// request needs two threads that wake each other.
    pub lender: Option<Arc<dyn QueueThreads>>,
}

impl Default for Options {
    /// Empty name, 64 clients, and no TLS.
    fn default() -> Self {
        Self {
            name: String::new(),
            description: String::new(),
            max_clients: 64,
            tls: None,
            lender: None,
        }
    }
}
