//! What a host says of itself: the feature Host Behavior Support. Base 2.1, 5.1.25.

use shadowbell_spec::feature::HostBehaviorSupport;
use shadowbell_spec::status::Status;

/// Copy Descriptor Formats Enable: those that name a source namespace, and that the controller has.
const COPY_FORMATS: u16 = 1 << 2 | 1 << 3;

/// The host knows formats with guards of more than 16 bits (LBAFEE); beside the descriptor formats
/// of Copy that it has enabled, which are lower bits.
pub(crate) const EXTENDED_FORMATS: u16 = 1 << 15;

/// What a host says of itself: whether it knows Advanced Command Retry, and which descriptors of
/// Copy that name a source namespace it uses; beside these, whether it knows guards of 64 bits
/// ([`EXTENDED_FORMATS`]). The rest would enable what the controller has none of (dispersed
/// namespaces, Copy of format 4, telemetry), and is refused.
pub(super) fn host_behavior(wanted: &HostBehaviorSupport) -> Result<(bool, u16), Status> {
    let HostBehaviorSupport { acre, etdas, lbafee, hdisns, cdfe, .. } = *wanted;
    if acre > 1 || lbafee > 1 || (etdas, hdisns, cdfe & !COPY_FORMATS) != (0, 0, 0) {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    Ok((acre == 1, if lbafee == 1 { cdfe | EXTENDED_FORMATS } else { cdfe }))
}

/// LBAFEE and CDFE, of what [`host_behavior`] has made of them.
pub(super) fn extended_and_copy(formats: u16) -> (u8, u16) {
    (u8::from(formats & EXTENDED_FORMATS != 0), formats & !EXTENDED_FORMATS)
}
