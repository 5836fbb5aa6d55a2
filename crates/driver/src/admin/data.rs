//! What goes with an admin command, and what comes of it.

use shadowbell_spec::Status;

/// The data of an admin command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdminData<'a> {
    /// None.
    None,
    /// These bytes go to the controller.
    ToController(&'a [u8]),
    /// So many bytes come from the controller.
    FromController(usize),
}

/// What an admin command came to.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdminResult {
    /// How it went.
    pub status: Status,
    /// Command specific result, dword 0.
    pub dw0: u32,
    /// Command specific result, dword 1.
    pub dw1: u32,
    /// With [`AdminData::FromController`], the bytes.
    pub data: Vec<u8>,
}
