//! Errors of a ublk device. Each message contains the remedy.

use rustix::io::Errno;
use std::io;

/// Reason why a disk could not become a block device.
#[derive(Debug, thiserror::Error)]
pub enum UblkError {
    /// The driver is not loaded.
    #[error(
        "there is no /dev/ublk-control: `modprobe ublk_drv` (without that module, use --fuse and a \
         loop device)"
    )]
    NoDriver,
    /// The kernel is too old.
    #[error(
        "Linux {release} is too old for --ublk, which needs 6.4 or later; use --fuse and a loop \
         device instead"
    )]
    TooOld {
        /// Release of the kernel.
        release: String,
    },
    /// The process lacks the privilege to use the driver.
    #[error("--ublk needs root (CAP_SYS_ADMIN): /dev/ublk-control: {0}")]
    Denied(io::Error),
    /// The process is not allowed to use io_uring.
    #[error("io_uring, which ublk needs, is not available: {0}")]
    NoRing(io::Error),
    /// A device with this number already exists.
    #[error("/dev/ublkb{id} already exists: choose another --ublk-id")]
    Taken {
        /// Device number.
        id: u32,
    },
    /// The device exists, and its server has died.
    #[error("/dev/ublkb{id} already exists and waits for a server: add --recover to take it over")]
    Orphan {
        /// Device number.
        id: u32,
    },
    /// The device exists, and has a server.
    #[error("/dev/ublkb{id} is served by process {pid}")]
    Served {
        /// Device number.
        id: u32,
        /// Process ID of the server.
        pid: i32,
    },
    /// The device cannot be taken over.
    #[error("/dev/ublkb{id} cannot be taken over: {why}")]
    Different {
        /// Device number.
        id: u32,
        /// Difference between the device and the disk.
        why: String,
    },
    /// The driver refused a command.
    #[error("ublk: {doing} failed: {source}")]
    Driver {
        /// Step that failed.
        doing: &'static str,
        /// Error of the driver.
        source: io::Error,
    },
    /// A thread cannot be created.
    #[error("the device cannot be served: {0}")]
    System(io::Error),
}

impl UblkError {
    /// Converts the failure to open the control device into an error.
    pub(super) fn of_open(error: io::Error) -> Self {
        let release = release();
        match errno(&error) {
            Some(Errno::NOENT | Errno::NXIO | Errno::NODEV) if !is_recent(&release) => {
                Self::TooOld { release }
            }
            Some(Errno::NOENT | Errno::NXIO | Errno::NODEV) => Self::NoDriver,
            Some(Errno::ACCESS | Errno::PERM) => Self::Denied(error),
            _ => Self::Driver { doing: "opening /dev/ublk-control", source: error },
        }
    }

    /// Converts the failure of a command into an error.
    pub(super) fn of_command(doing: &'static str, error: io::Error) -> Self {
        let release = release();
        match errno(&error) {
            Some(Errno::PERM | Errno::ACCESS) => Self::Denied(error),
            _ if !is_recent(&release) => Self::TooOld { release },
            _ => Self::Driver { doing, source: error },
        }
    }
}

fn errno(error: &io::Error) -> Option<Errno> {
    error.raw_os_error().map(Errno::from_raw_os_error)
}

fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// True if the kernel has the command numbers of Linux 6.4.
fn is_recent(release: &str) -> bool {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse::<u32>);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => (major, minor) >= (6, 4),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_age_is_read_off_its_release() {
        for (release, recent) in [
            ("6.1.0-50-cloud-amd64", false),
            ("5.15.0", false),
            ("6.4", true),
            ("6.18.44-fc", true),
            ("7.2.12+deb13-cloud-amd64", true),
            ("10.0", true),
            ("unheard of", true),
        ] {
            assert_eq!(is_recent(release), recent, "{release}");
        }
    }

    #[test]
    fn ublk_errors_contain_the_remedy() {
        let of = |errno: Errno| UblkError::of_open(errno.into()).to_string();
        if is_recent(&release()) {
            assert!(of(Errno::NOENT).contains("modprobe ublk_drv"));
        }
        assert!(of(Errno::ACCESS).contains("root"));
        let error = UblkError::of_command("adding a device", Errno::PERM.into());
        assert!(error.to_string().contains("CAP_SYS_ADMIN"), "{error}");
    }
}
