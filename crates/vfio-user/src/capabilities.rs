//! What the two ends tell each other about themselves in the VERSION exchange, as JSON.

use serde::{Deserialize, Serialize};

use crate::migration::LOG_PAGE;

/// How many descriptors an end takes with one message if it does not say.
pub const DEFAULT_MAX_MSG_FDS: u32 = 1;

/// How many bytes an end takes in one data transfer if it does not say.
pub const DEFAULT_MAX_DATA_XFER_SIZE: u64 = 1 << 20;

/// How many ranges of memory may be shared at once if a server does not say, and the most that QEMU
/// lets one say.
pub const DEFAULT_MAX_DMA_MAPS: u32 = 65_535;

/// The capabilities of one end. What the other end sends and this crate has no use for
/// (`pgsizes`, `twin_socket`) is passed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Capabilities {
    /// How many descriptors the sender takes with one message.
    ///
    /// QEMU refuses a server that says more than 16.
    pub max_msg_fds: u32,
    /// How many bytes the sender takes in one data transfer, in either direction.
    pub max_data_xfer_size: u64,
    /// How many ranges of memory may be shared (DMA_MAP) at once.
    pub max_dma_maps: u32,
    /// REGION_WRITE_MULTI is understood.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub write_multiple: bool,
    /// Migration is understood. Later texts of the specification do without it, and have whoever
    /// wants to know ask for the feature: so nothing depends on it here.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration: Option<MigrationCapability>,
}

/// What an end says of migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MigrationCapability {
    /// The page of its log of pages that were written, in bytes.
    pub pgsize: u64,
    /// The longest bitmap of such pages, in bytes.
    pub max_bitmap_size: u64,
}

impl MigrationCapability {
    /// What a server says that transfers so many bytes at once.
    pub(crate) fn of_server(max_data_xfer_size: u64) -> Self {
        Self { pgsize: LOG_PAGE, max_bitmap_size: max_data_xfer_size }
    }
}

impl Default for MigrationCapability {
    /// What an end has that names it, and nothing in it.
    fn default() -> Self {
        Self { pgsize: LOG_PAGE, max_bitmap_size: 256 << 20 }
    }
}

impl Default for Capabilities {
    /// What an end has that says nothing.
    fn default() -> Self {
        Self {
            max_msg_fds: DEFAULT_MAX_MSG_FDS,
            max_data_xfer_size: DEFAULT_MAX_DATA_XFER_SIZE,
            max_dma_maps: DEFAULT_MAX_DMA_MAPS,
            write_multiple: false,
            migration: None,
        }
    }
}

#[derive(Serialize, Deserialize)]
struct VersionData {
    #[serde(default)]
    capabilities: Capabilities,
}

impl Capabilities {
    /// The version data that follows [`Version`](crate::wire::Version), with its NUL.
    pub fn to_version_data(&self) -> Vec<u8> {
        // Numbers and booleans in a flat structure: serializing them cannot fail.
        let mut json = serde_json::to_vec(&VersionData { capabilities: *self }).unwrap_or_default();
        json.push(0);
        json
    }

    /// Reads the version data of the other end.
    ///
    /// None at all, or an empty string, means the defaults (SPDK sends none). A missing NUL is
    /// forgiven, and whatever follows one is not looked at.
    ///
    /// # Errors
    ///
    /// Text that is not JSON, or whose members have the wrong type.
    pub fn from_version_data(data: &[u8]) -> Result<Self, serde_json::Error> {
        let json = data.split(|byte| *byte == 0).next().unwrap_or_default();
        if json.is_empty() {
            return Ok(Self::default());
        }
        serde_json::from_slice::<VersionData>(json).map(|data| data.capabilities)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_means_the_defaults() {
        assert_eq!(Capabilities::from_version_data(b"").unwrap(), Capabilities::default());
        assert_eq!(Capabilities::from_version_data(b"\0").unwrap(), Capabilities::default());
        assert_eq!(Capabilities::from_version_data(b"{}\0").unwrap(), Capabilities::default());
        assert_eq!(
            Capabilities::from_version_data(b"{\"capabilities\":{}}").unwrap(),
            Capabilities::default()
        );
    }

    #[test]
    fn what_qemu_says_is_understood() {
        let said =
            br#"{"capabilities": {"migration": {"pgsize": 4096, "max_bitmap_size": 268435456},
            "max_msg_fds": 8, "max_data_xfer_size": 1048576, "pgsizes": 4096,
            "max_dma_maps": 1000, "write_multiple": true}}"#;
        let capabilities = Capabilities::from_version_data(said).unwrap();
        assert_eq!(
            capabilities,
            Capabilities {
                max_msg_fds: 8,
                max_data_xfer_size: 1 << 20,
                max_dma_maps: 1000,
                write_multiple: true,
                migration: Some(MigrationCapability { pgsize: 4096, max_bitmap_size: 256 << 20 }),
            }
        );
    }

    #[test]
    fn what_is_said_is_exactly_this() {
        let said = Capabilities { max_msg_fds: 16, write_multiple: true, ..Default::default() };
        assert_eq!(
            said.to_version_data(),
            b"{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":1048576,\
              \"max_dma_maps\":65535,\"write_multiple\":true}}\0"
        );
        assert_eq!(Capabilities::from_version_data(&said.to_version_data()).unwrap(), said);
        let migration = Some(MigrationCapability::of_server(1 << 20));
        let said = Capabilities { migration, ..Default::default() };
        let text = String::from_utf8(said.to_version_data()).unwrap();
        let migration = r#","migration":{"pgsize":4096,"max_bitmap_size":1048576}}}"#;
        assert!(text.trim_end_matches('\0').ends_with(migration), "{text}");
    }

    #[test]
    fn nonsense_is_an_error() {
        for nonsense in [
            &b"{"[..],
            b"garbage\0",
            b"[7]",
            b"{\"capabilities\":7}",
            b"{\"capabilities\":{\"max_msg_fds\":-1}}",
            b"{\"capabilities\":{\"max_msg_fds\":\"many\"}}",
            b"\xff\xfe\0",
        ] {
            assert!(Capabilities::from_version_data(nonsense).is_err(), "{nonsense:?}");
        }
        let deep = [b'['; 100_000];
        assert!(Capabilities::from_version_data(&deep).is_err());
    }
}
