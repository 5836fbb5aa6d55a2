//! What a controller is, before anybody has attached to it.

use disk::Disk;
use std::sync::Arc;

/// One namespace of a controller.
#[derive(Clone, Debug)]
pub struct NamespaceConfig {
    /// Where it keeps its bytes.
    pub disk: Arc<dyn Disk>,
    /// Its UUID (RFC 4122, big-endian bytes). The NGUID and EUI-64 are derived from it.
    pub uuid: [u8; 16],
}

/// A controller as its owner wants it. Namespace `n` (from 0) gets NSID n + 1.
#[derive(Clone, Debug)]
pub struct Config {
    /// Serial number: printable ASCII, at most 20 characters.
    pub serial: String,
    /// Model number: printable ASCII, at most 40 characters.
    pub model: String,
    /// Its namespaces, at least one.
    pub namespaces: Vec<NamespaceConfig>,
    /// I/O queue pairs that a host may have, 1 to 64.
    pub io_queues: u16,
    /// Entries of the largest queue, 2 to 4096 (CAP.MQES + 1).
    pub max_queue_entries: u32,
    /// MDTS: the largest transfer is 2^mdts pages of 4096 bytes; 8 is 1 MiB.
    pub mdts: u8,
    /// Whether Doorbell Buffer Config is offered.
    pub shadow_doorbells: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            serial: "SHADOWBELL0".into(),
            model: "Shadowbell NVMe Controller".into(),
            namespaces: Vec::new(),
            io_queues: 64,
            max_queue_entries: 4096,
            mdts: 8,
            shadow_doorbells: true,
        }
    }
}
