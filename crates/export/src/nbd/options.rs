//! Options of an NBD export.

use shadowbell_tls::ServerTls;

/// Options of an NBD export.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Name of the export. The same export is the default export (the empty name).
    pub name: String,
    /// Description, as a line of text.
    pub description: String,
    /// Largest number of clients after the handshake. A peer (a user of this machine, or an
    /// address) can have at most three quarters of them. Further clients are disconnected. A client
    /// in the handshake does not count, and may be evicted by a later client.
    pub max_clients: usize,
    /// TLS configuration. If it is set, clients without TLS are refused.
    pub tls: Option<ServerTls>,
}

impl Default for Options {
    /// Default options: an empty name, 64 clients, no TLS.
    fn default() -> Self {
        Self { name: String::new(), description: String::new(), max_clients: 64, tls: None }
    }
}
