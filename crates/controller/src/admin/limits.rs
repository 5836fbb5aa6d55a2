//! Limits and constants of the controller, as reported in Identify Controller.

/// Maximum number of concurrent Abort commands: ACL of Identify Controller, not 0's based here.
pub(crate) const ABORT_LIMIT: u32 = 4;
/// Maximum number of outstanding Asynchronous Event Requests: AERL of Identify Controller, not 0's
/// based here.
pub(crate) const MAX_EVENT_REQUESTS: usize = 4;
/// Number of entries of the Error Information log page: ELPE + 1 of Identify Controller.
pub(crate) const ERROR_LOG_ENTRIES: usize = 64;
/// Maximum duration of an extended self-test in minutes: EDSTT of Identify Controller.
pub(crate) const EXTENDED_MINUTES: u16 = 30;
/// Maximum size of the Persistent Event log page in units of 64 KiB: PELS of Identify Controller.
pub(crate) const PELS: u32 = 1;
/// Composite temperature of the emulated controller in kelvins.
pub(crate) const TEMPERATURE: u16 = 300;
/// Warning threshold of the composite temperature in kelvins: WCTEMP of Identify Controller.
pub(crate) const WARNING_TEMPERATURE: u16 = 343;
/// Critical threshold of the composite temperature in kelvins: CCTEMP of Identify Controller.
pub(crate) const CRITICAL_TEMPERATURE: u16 = 358;
/// Firmware revision: the version of this program, truncated to the field.
pub(crate) const FIRMWARE_REVISION: [u8; 8] = firmware_revision();

/// Pads or truncates the version to an ASCII field.
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
