//! How a disk is exported.

use crate::queue_server::QueueThreads;
use shadowbell_tls::ServerTls;
use std::sync::Arc;

/// How a disk is served.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// The export's name; a client that asks for no name gets it too.
    pub name: String,
    /// A line about it.
    pub description: String,
    /// The most clients at a time, of which a peer (a user of this machine, or an address) has
    /// three quarters at most. Further ones are sent away. One that has not agreed with the server
    /// on anything is not counted, and has to make room for the next.
    pub max_clients: usize,
    /// Clients have to begin with TLS. Those that do not are refused.
    pub tls: Option<ServerTls>,
    /// Threads that serve the disk's queues, and may serve a client too: of one that has no thread
    /// of another's, each request takes two threads that wake each other.
    pub lender: Option<Arc<dyn QueueThreads>>,
}

impl Default for Options {
    /// No name, 64 clients, and no TLS.
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
