//! Capabilities that client and server exchange as JSON in the VERSION messages.

use serde::{Deserialize, Serialize};

use crate::migration::LOG_PAGE;

/// Default of [`Capabilities::max_msg_fds`].
pub const DEFAULT_MAX_MSG_FDS: u32 = 1;

/// Default of [`Capabilities::max_data_xfer_size`].
pub const DEFAULT_MAX_DATA_XFER_SIZE: u64 = 1 << 20;

/// Default of [`Capabilities::max_dma_maps`], and the maximum that QEMU accepts from a server.
pub const DEFAULT_MAX_DMA_MAPS: u32 = 65_535;

/// Capabilities of a client or a server. Received members that this crate does not use (`pgsizes`,
/// `twin_socket`) are ignored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Capabilities {
    /// Maximum number of descriptors per message that the sender accepts.
    ///
    /// QEMU refuses a server with more than 16.
    pub max_msg_fds: u32,
    /// Maximum number of bytes per data transfer, in either direction.
    pub max_data_xfer_size: u64,
    /// Maximum number of memory ranges that can be mapped (DMA_MAP) at the same time.
    pub max_dma_maps: u32,
    /// True if REGION_WRITE_MULTI is supported.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub write_multiple: bool,
    /// Migration parameters, if migration is supported. Later versions of the specification do not
    /// have this capability, and a client queries the device's migration feature instead. So this
    /// crate does not rely on the capability.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub migration: Option<MigrationCapability>,
}

/// Migration parameters of a client or a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MigrationCapability {
    /// Page size of the dirty page log, in bytes.
    pub pgsize: u64,
    /// Maximum length of a dirty page bitmap, in bytes.
    pub max_bitmap_size: u64,
}

impl MigrationCapability {
    /// Migration parameters of a server with this maximum transfer size.
    pub(crate) fn of_server(max_data_xfer_size: u64) -> Self {
        Self { pgsize: LOG_PAGE, max_bitmap_size: max_data_xfer_size }
    }
}

impl Default for MigrationCapability {
    /// Default values of the members that a peer's migration capability omits.
    fn default() -> Self {
        Self { pgsize: LOG_PAGE, max_bitmap_size: 256 << 20 }
    }
}

impl Default for Capabilities {
    /// Values that apply to a peer which sends no capabilities.
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
    /// Encodes the version data that follows [`Version`](crate::wire::Version), with the final NUL.
    pub fn to_version_data(&self) -> Vec<u8> {
        // The structure contains only numbers and booleans, so its serialization cannot fail.
        let mut json = serde_json::to_vec(&VersionData { capabilities: *self }).unwrap_or_default();
        json.push(0);
        json
    }

    /// Parses the version data of the peer.
    ///
    /// If the data are missing or empty, the defaults apply (SPDK sends no data). The final NUL may
    /// be missing, and bytes after it are ignored.
    ///
    /// # Errors
    ///
    /// The data are not JSON, or a member has the wrong type.
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
    fn version_data_of_qemu_are_parsed() {
        let shown =
            br#"{"capabilities": {"migration": {"pgsize": 4096, "max_bitmap_size": 268435456},
            "max_msg_fds": 8, "max_data_xfer_size": 1048576, "pgsizes": 4096,
            "max_dma_maps": 1000, "write_multiple": true}}"#;
        let capabilities = Capabilities::from_version_data(shown).unwrap();
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
    fn version_data_have_the_expected_text() {
        let shown = Capabilities { max_msg_fds: 16, write_multiple: true, ..Default::default() };
        assert_eq!(
            shown.to_version_data(),
            b"{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":1048576,\
              \"max_dma_maps\":65535,\"write_multiple\":true}}\0"
        );
        assert_eq!(Capabilities::from_version_data(&shown.to_version_data()).unwrap(), shown);
        let migration = Some(MigrationCapability::of_server(1 << 20));
        let shown = Capabilities { migration, ..Default::default() };
        let text = String::from_utf8(shown.to_version_data()).unwrap();
        let migration = r#","migration":{"pgsize":4096,"max_bitmap_size":1048576}}}"#;
        assert!(text.trim_end_matches('\0').ends_with(migration), "{text}");
    }

    #[test]
    fn invalid_capabilities_are_errors() {
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
