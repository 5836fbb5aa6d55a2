//! Errors of a disk in the specification's terms.

use shadowbell_backend::DiskError;
use shadowbell_spec::status::Status;

/// Medium errors and full storage, as the specification names them.
pub(super) fn status_of(error: DiskError, reading: bool) -> Status {
    match error {
        DiskError::OutOfRange => Status::LBA_OUT_OF_RANGE.with_dnr(),
        DiskError::ReadOnly => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(),
        DiskError::NoSpace => Status::CAPACITY_EXCEEDED.with_dnr(),
        DiskError::CompareFailed => Status::COMPARE_FAILURE.with_dnr(),
        DiskError::GuardCheck => Status::GUARD_CHECK,
        DiskError::ApplicationTagCheck => Status::APPLICATION_TAG_CHECK,
        DiskError::ReferenceTagCheck => Status::REFERENCE_TAG_CHECK,
        DiskError::BadBuffer => Status::INTERNAL,
        DiskError::Unsupported => Status::INVALID_OPCODE.with_dnr(),
        DiskError::Cancelled => Status::ABORT_REQUESTED,
        DiskError::Device(bits) => Status::from_bits(bits),
        DiskError::Io(_) if reading => Status::UNRECOVERED_READ,
        DiskError::Io(_) => Status::WRITE_FAULT,
        _ => Status::INTERNAL,
    }
}

/// Whether the medium is to blame.
pub(super) fn is_media_error(status: Status) -> bool {
    let code = status.code();
    code == Status::UNRECOVERED_READ || code == Status::WRITE_FAULT
}
