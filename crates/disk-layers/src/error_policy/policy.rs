//! Error policies, and the errors to which they apply.

use serde::{Deserialize, Serialize};
use shadowbell_disk::{DiskError, Op};
use shadowbell_spec::Status;
use std::fmt;
use std::str::FromStr;

/// Policy for requests that fail because of the storage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ErrorPolicy {
    /// The host gets the error.
    #[default]
    Report,
    /// Holds a request if the storage is full or has failed.
    Stop,
    /// Holds a request if the storage is full. Other errors are reported to the host.
    StopOnFull,
}

/// Error numbers that are caused by the request or by this process, and not by the storage. A
/// repetition would fail again.
const OF_REQUEST: [i32; 6] = {
    // EPERM, EBADF, ENOMEM, EFAULT, EINVAL and EOPNOTSUPP of Linux.
    [1, 9, 12, 14, 22, 95]
};

impl ErrorPolicy {
    /// Name of the option in disk specifications.
    pub const OPTION: &'static str = "on-error";

    /// Name of the policy.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Report => "report",
            Self::Stop => "stop",
            Self::StopOnFull => "stop-on-full",
        }
    }

    /// True if a request is held that fails with `error`.
    ///
    /// A flush is never held: after a failed flush, the storage may have dropped the written data,
    /// and a repeated flush could succeed nevertheless. A compare and write is held only if the
    /// storage is full. After another failure, the write may have been executed, so a repeated
    /// comparison could fail.
    pub(super) fn holds(self, op: Op, error: DiskError) -> bool {
        let is_full = error == DiskError::NoSpace;
        match self {
            Self::Report => false,
            _ if op == Op::Flush => false,
            Self::Stop if !matches!(op, Op::CompareAndWrite { .. }) => is_full || fails(error),
            Self::Stop | Self::StopOnFull => is_full,
        }
    }
}

impl fmt::Display for ErrorPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ErrorPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let all = [Self::Report, Self::Stop, Self::StopOnFull];
        let found = all.into_iter().find(|policy| policy.name() == text);
        found.ok_or_else(|| {
            format!(
                "the option `{}` is `report`, `stop` or `stop-on-full`, not `{text}`",
                Self::OPTION
            )
        })
    }
}

/// True if the storage has failed, so that a repetition may succeed after a repair.
fn fails(error: DiskError) -> bool {
    const PATH: u8 = 3;
    match error {
        DiskError::Io(errno) => !OF_REQUEST.contains(&errno),
        DiskError::Device(bits) => {
            let status = Status::from_bits(bits);
            status.sct() == PATH
                || matches!(
                    status.code(),
                    Status::DATA_XFER_ERROR
                        | Status::ABORTED_POWER_LOSS
                        | Status::INTERNAL
                        | Status::COMMAND_INTERRUPTED
                        | Status::TRANSIENT_TRANSPORT_ERROR
                        | Status::NAMESPACE_NOT_READY
                        | Status::WRITE_FAULT
                        | Status::UNRECOVERED_READ
                )
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_of_the_storage_are_held() {
        let write = Op::Write { fua: false };
        let device = |status: Status| DiskError::Device(status.bits());
        for (error, stop, on_full) in [
            (DiskError::NoSpace, true, true),
            (DiskError::Io(5), true, false),
            (DiskError::Io(19), true, false),
            (device(Status::WRITE_FAULT), true, false),
            (device(Status::UNRECOVERED_READ.with_dnr()), true, false),
            (device(Status::INTERNAL_PATH_ERROR), true, false),
            (DiskError::Io(22), false, false),
            (DiskError::Io(1), false, false),
            (device(Status::GUARD_CHECK), false, false),
            (device(Status::INVALID_FIELD), false, false),
            (DiskError::OutOfRange, false, false),
            (DiskError::ReadOnly, false, false),
            (DiskError::CompareFailed, false, false),
            (DiskError::Unsupported, false, false),
            (DiskError::Cancelled, false, false),
        ] {
            assert_eq!(ErrorPolicy::Stop.holds(write, error), stop, "{error:?}");
            assert_eq!(ErrorPolicy::StopOnFull.holds(write, error), on_full, "{error:?}");
            assert!(!ErrorPolicy::Report.holds(write, error), "{error:?}");
            assert!(!ErrorPolicy::Stop.holds(Op::Flush, error), "{error:?}");
        }
        let compare = Op::CompareAndWrite { fua: false };
        assert!(ErrorPolicy::Stop.holds(compare, DiskError::NoSpace));
        assert!(!ErrorPolicy::Stop.holds(compare, DiskError::Io(5)));
    }

    #[test]
    fn policies_have_names() {
        for policy in [ErrorPolicy::Report, ErrorPolicy::Stop, ErrorPolicy::StopOnFull] {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        let error = "halt".parse::<ErrorPolicy>().unwrap_err();
        assert!(error.contains("`stop-on-full`, not `halt`"), "{error}");
    }
}
