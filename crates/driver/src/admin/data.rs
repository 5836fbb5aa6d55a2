//! Data and result of an admin command.

use shadowbell_spec::Status;

/// The data of an admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminData<'a> {
    /// No data.
    None,
    /// Bytes to transfer to the controller.
    ToController(&'a [u8]),
    /// Number of bytes to transfer from the controller.
    FromController(usize),
}

/// Result of an admin command.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdminResult {
    /// Status of the completion.
    pub status: Status,
    /// Command specific result, dword 0.
    pub dw0: u32,
    /// Command specific result, dword 1.
    pub dw1: u32,
    /// Bytes from the controller, for [`AdminData::FromController`].
    pub data: Vec<u8>,
}
