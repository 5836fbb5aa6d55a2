//! Host Behavior Support feature. Base 2.1, 5.1.25.

use shadowbell_spec::feature::HostBehaviorSupport;
use shadowbell_spec::status::Status;

/// Supported bits of Copy Descriptor Formats Enable: formats whose ranges have a source NSID.
const COPY_FORMATS: u16 = 1 << 2 | 1 << 3;

/// LBAFEE: the host supports formats with guards of more than 16 bits. Stored in one word with the
/// enabled descriptor formats of Copy, which use lower bits.
pub(crate) const EXTENDED_FORMATS: u16 = 1 << 15;

/// Decodes the feature: whether the host supports Advanced Command Retry, and the enabled
/// descriptor formats of Copy, with [`EXTENDED_FORMATS`] set for 64-bit guards. Values that would
/// enable unsupported functions (dispersed namespaces, Copy format 4, telemetry data area 4) are
/// refused.
pub(super) fn host_behavior(wanted: &HostBehaviorSupport) -> Result<(bool, u16), Status> {
    let HostBehaviorSupport { acre, etdas, lbafee, hdisns, cdfe, .. } = *wanted;
    if acre > 1 || lbafee > 1 || (etdas, hdisns, cdfe & !COPY_FORMATS) != (0, 0, 0) {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    Ok((acre == 1, if lbafee == 1 { cdfe | EXTENDED_FORMATS } else { cdfe }))
}

/// LBAFEE and CDFE from the word that [`host_behavior`] returns.
pub(super) fn extended_and_copy(formats: u16) -> (u8, u16) {
    (u8::from(formats & EXTENDED_FORMATS != 0), formats & !EXTENDED_FORMATS)
}
