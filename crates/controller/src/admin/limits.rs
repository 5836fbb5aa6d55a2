//! What the controller has of everything, in Identify Controller and in force.

/// Aborts that may be under way at once: ACL of Identify Controller, not zero-based here.
pub(crate) const ABORT_LIMIT: u32 = 4;
/// Asynchronous Event Requests that may wait at once: AERL of Identify Controller, not zero-based
/// here.
pub(crate) const MAX_EVENT_REQUESTS: usize = 4;
/// Entries of the Error Information log page: ELPE + 1 of Identify Controller.
pub(crate) const ERROR_LOG_ENTRIES: usize = 64;
/// How long an extended self-test may take, in minutes: EDSTT of Identify Controller.
pub(crate) const EXTENDED_MINUTES: u16 = 30;
/// The longest Persistent Event log page, in units of 64 KiB: PELS of Identify Controller.
pub(crate) const PELS: u32 = 1;
/// What the emulated controller's temperature is, in kelvins.
pub(crate) const TEMPERATURE: u16 = 300;
/// The composite temperature that is worth a warning, in kelvins: WCTEMP of Identify Controller.
pub(crate) const WARNING_TEMPERATURE: u16 = 343;
/// The composite temperature that is critical, in kelvins: CCTEMP of Identify Controller.
pub(crate) const CRITICAL_TEMPERATURE: u16 = 358;
/// The firmware revision: the version of this program, as far as it fits.
pub(crate) const FIRMWARE_REVISION: [u8; 8] = firmware_revision();

/// Padded with spaces, and cut off, as ASCII fields are.
const fn firmware_revision() -> [u8; 8] {
    let version = env!("CARGO_PKG_VERSION").as_bytes();
    let mut field = [b' '; 8];
    let mut at = 0;
    while at < version.len() && at < field.len() {
        field[at] = version[at];
        at += 1;
    }
    field
}
