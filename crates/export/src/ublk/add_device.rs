//! Adding a device to the kernel's driver, or taking over a device whose server has died.

use super::error::UblkError;
use super::parameters::{MAX_BYTES, difference};
use super::sys::Control;
use super::wire::{ControlCommand, DeviceInfo, Parameters, control, feature, state};
use rustix::io::Errno;
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// Largest number of requests in flight per queue.
const DEPTH: u16 = 128;
/// Server flags that identify a device of this program.
const SERVER_FLAGS: u64 = u64::from_be_bytes(*b"shadowbl");
/// Time limit for the exit of a killed server.
const EXIT_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of the checks whether a killed server has exited.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Creates the header of a command for a device as a whole.
pub(super) fn header(dev_id: u32, data: u64) -> ControlCommand {
    ControlCommand { dev_id, queue_id: u16::MAX, data, ..ControlCommand::default() }
}

/// Adds a device without a server, and returns its number. With `zero_copy`, the driver does not
/// copy the device's data.
pub(super) fn add(
    control: &mut Control,
    id: Option<u32>,
    queues: usize,
    zero_copy: bool,
) -> Result<u32, UblkError> {
    let dev_id = id.unwrap_or(u32::MAX);
    let data = if zero_copy { feature::ZERO_COPY } else { 0 };
    let mut info = DeviceInfo {
        queues: u16::try_from(queues).unwrap_or(u16::MAX).clamp(1, 4096),
        depth: DEPTH,
        max_io_bytes: MAX_BYTES,
        dev_id,
        flags: feature::USER_RECOVERY | feature::USER_RECOVERY_REISSUE | data,
        server_flags: SERVER_FLAGS,
        ..DeviceInfo::default()
    };
    let added = control.command(control::ADD_DEV, header(dev_id, 0), info.as_mut_bytes());
    match added {
        Ok(()) => Ok(info.dev_id),
        Err(error) if error.raw_os_error() == Some(Errno::EXIST.raw_os_error()) => {
            Err(UblkError::Taken { id: dev_id })
        }
        Err(error) => Err(UblkError::of_command("adding a device", error)),
    }
}

/// Information about a device, if it exists.
pub(super) fn find(control: &mut Control, id: u32) -> Result<Option<DeviceInfo>, UblkError> {
    match control.info(id) {
        Ok(info) => Ok(Some(info)),
        Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => Ok(None),
        Err(error) => Err(UblkError::of_command("looking for the device", error)),
    }
}

/// True if a server created the device and was killed before it started the device. With `recover`,
/// this function removes the unstarted device.
pub(super) fn was_never_started(
    control: &mut Control,
    id: u32,
    info: &DeviceInfo,
    recover: bool,
) -> Result<bool, UblkError> {
    if info.state != state::DEAD || info.server_flags != SERVER_FLAGS || !recover {
        return Ok(false);
    }
    // If a server is about to start the device, it has the device open, and this process cannot
    // open it.
    if let Err(error) = control.serve(id) {
        return Err(match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::BUSY) => UblkError::Taken { id },
            _ => UblkError::of_command("opening the device", error),
        });
    }
    let removed = control.command(control::DEL_DEV, header(id, 0), &mut []);
    removed.map_err(|error| {
        UblkError::of_command("removing the device that was never started", error)
    })?;
    Ok(true)
}

/// Takes over a device whose server has died.
pub(super) fn adopt(
    control: &mut Control,
    id: u32,
    info: &DeviceInfo,
    wanted: &Parameters,
    recover: bool,
) -> Result<(), UblkError> {
    let different = |why: String| UblkError::Different { id, why };
    if info.server_flags != SERVER_FLAGS || feature::is_foreign(info.flags) {
        return Err(if recover {
            different("another program created it".into())
        } else {
            UblkError::Taken { id }
        });
    }
    if is_running(info.server_pid) && info.state == state::LIVE {
        return Err(UblkError::Served { id, pid: info.server_pid });
    }
    if !recover {
        let dead = info.state == state::DEAD;
        return Err(if dead { UblkError::Taken { id } } else { UblkError::Orphan { id } });
    }
    if info.flags & feature::USER_RECOVERY == 0 {
        return Err(different("it has no user recovery, so it does not outlive its server".into()));
    }
    let mut there = Parameters { len: wanted.len, ..Parameters::default() };
    let read = control.command(control::GET_PARAMS, header(id, 0), there.as_mut_bytes());
    read.map_err(|error| UblkError::of_command("reading the device's size", error))?;
    if let Some(why) = difference(&there, wanted) {
        return Err(different(why));
    }
    let deadline = Instant::now() + EXIT_TIMEOUT;
    loop {
        match control.command(control::START_USER_RECOVERY, header(id, 0), &mut []) {
            Ok(()) => return Ok(()),
            Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {
                // The kernel releases the resources of the dead server in the background. Until
                // then, the command fails with EBUSY.
                let now = control.info(id);
                let now = now.map_err(|e| UblkError::of_command("looking at the device", e))?;
                if now.state == state::DEAD {
                    return Err(different("it was never started, or stopped".into()));
                }
                if Instant::now() >= deadline {
                    return Err(UblkError::Served { id, pid: now.server_pid });
                }
                std::thread::sleep(POLL_INTERVAL);
            }
            Err(error) => return Err(UblkError::of_command("taking the device over", error)),
        }
    }
}

/// True if the process exists and is not a zombie.
fn is_running(pid: i32) -> bool {
    if pid <= 0 {
        return false;
    }
    // Format: `pid (name) state ...`, where the name may contain any characters.
    let about = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = about.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    state.is_some_and(|state| !"ZXx".contains(state))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_processes_are_not_running() {
        assert!(is_running(std::process::id() as i32));
        assert!(!is_running(-1));
        assert!(!is_running(0));
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = child.id() as i32;
        // The child becomes a zombie: it ends before its parent waits for it.
        shadowbell_testing::wait::until("its end", || !is_running(pid));
        child.wait().unwrap();
        assert!(!is_running(pid));
    }
}
