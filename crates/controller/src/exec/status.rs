//! Conversion of disk errors to NVMe status codes.

use shadowbell_backend::DiskError;
use shadowbell_spec::status::Status;

/// NVMe status of a disk error; `reading` selects the status of I/O errors.
pub(super) fn status_of(error: DiskError, reading: bool) -> Status {
    match error {
        DiskError::OutOfRange => Status::LBA_OUT_OF_RANGE.with_dnr(),
        DiskError::ReadOnly => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(),
        DiskError::NoSpace => Status::CAPACITY_EXCEEDED.with_dnr(),
        DiskError::CompareFailed => Status::COMPARE_FAILURE.with_dnr(),
        DiskError::GuardCheck => Status::GUARD_CHECK,
        DiskError::ApplicationTagCheck => Status::APPLICATION_TAG_CHECK,
        DiskError::ReferenceTagCheck => Status::REFERENCE_TAG_CHECK,
        DiskError::ZoneBoundary => Status::ZONE_BOUNDARY_ERROR.with_dnr(),
        DiskError::ZoneFull => Status::ZONE_IS_FULL.with_dnr(),
        DiskError::ZoneReadOnly => Status::ZONE_IS_READ_ONLY.with_dnr(),
        DiskError::ZoneOffline => Status::ZONE_IS_OFFLINE.with_dnr(),
        DiskError::ZoneInvalidWrite => Status::ZONE_INVALID_WRITE.with_dnr(),
        DiskError::TooManyActiveZones => Status::TOO_MANY_ACTIVE_ZONES.with_dnr(),
        DiskError::TooManyOpenZones => Status::TOO_MANY_OPEN_ZONES.with_dnr(),
        DiskError::ZoneTransition => Status::INVALID_ZONE_STATE_TRANSITION.with_dnr(),
        DiskError::InvalidZone => Status::INVALID_FIELD.with_dnr(),
        DiskError::BadBuffer => Status::INTERNAL,
        DiskError::Unsupported => Status::INVALID_OPCODE.with_dnr(),
        DiskError::Cancelled => Status::ABORT_REQUESTED,
        DiskError::Device(bits) => Status::from_bits(bits),
        DiskError::Io(_) if reading => Status::UNRECOVERED_READ,
        DiskError::Io(_) => Status::WRITE_FAULT,
        _ => Status::INTERNAL,
    }
}

/// True if the status is a media error.
pub(super) fn is_media_error(status: Status) -> bool {
    let code = status.code();
    code == Status::UNRECOVERED_READ || code == Status::WRITE_FAULT
}
