//! What a host says of itself: the feature Host Behavior Support. Base 2.1, 5.1.25.

use shadowbell_spec::feature::HostBehaviorSupport;
use shadowbell_spec::status::Status;

/// Copy Descriptor Formats Enable: those that name a source namespace, and that the controller has.
const COPY_FORMATS: u16 = 1 << 2 | 1 << 3;

/// What a host says of itself: whether it knows Advanced Command Retry, and which descriptors of
/// Copy that name a source namespace it uses. The rest would enable what the controller has none of
/// (formats of index 16 and above, dispersed namespaces, Copy of format 4, telemetry), and is
/// refused.
pub(super) fn host_behavior(wanted: &HostBehaviorSupport) -> Result<(bool, u16), Status> {
    let HostBehaviorSupport { acre, etdas, lbafee, hdisns, cdfe, .. } = *wanted;
    if acre > 1 || (etdas, lbafee, hdisns, cdfe & !COPY_FORMATS) != (0, 0, 0, 0) {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    Ok((acre == 1, cdfe))
}
