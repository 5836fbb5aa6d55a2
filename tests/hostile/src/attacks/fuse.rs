//! Attacks by descriptors of files on a client's FUSE file system. The file system's daemon does
//! not answer.
//!
//! Nearly every system call on one of these descriptors waits for the daemon, even `close`. This
//! daemon answers only INIT, OPEN and GETATTR for other processes, so a process that closes the
//! file hangs.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::fs::OFlags;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use shadowbell_guest::process::Process;
use shadowbell_vfio_user::wire::{self, command};
use zerocopy::IntoBytes;

use crate::attack::{Attack, Field};
use crate::peer::connection::{dma_map, message, send_fds};
use crate::peer::guest::PAGE;
use crate::peer::queue::BAR0;
use rustix::net::{Shutdown, shutdown};
use shadowbell_spec::regs;

const MEM: &[&str] = &["mem:16MiB"];

pub(crate) const ATTACKS: &[Attack] = &[
    Attack::new(
        "fuse-doorbell",
        "a descriptor of a FUSE file behind a doorbell",
        MEM,
        behind_a_doorbell,
    )
    .short(),
    Attack::new("fuse-map", "descriptors of a FUSE file with maps", MEM, with_maps),
];

/// File on a FUSE file system. Dropping the value kills the daemon, and the kernel then aborts all
/// requests to it.
///
/// The daemon is a separate process. If it were a thread of this process, the exit would hang: the
/// kernel closes the descriptors of the file at the exit, and waits for the daemon.
struct SlowFile {
    path: PathBuf,
    daemon: Process,
}

impl SlowFile {
    fn mount(field: &Field) -> Result<Self> {
        let path = field.directory.join(format!("slow-{}", field.done));
        File::create(&path)?;
        let device = File::options().read(true).write(true).open("/dev/fuse")?;
        let fd = device.as_raw_fd();
        let options = format!("fd={fd},rootmode=100000,user_id=0,group_id=0,allow_other");
        let options = std::ffi::CString::new(options)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount("slow", &path, "fuse", flags, options.as_c_str()).context("mounting a FUSE file")?;
        // This path works even if a build has replaced the program's file since the start.
        let ourselves = format!("/proc/{}/exe", std::process::id());
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]).arg(ourselves);
        command.arg(DAEMON).arg(std::process::id().to_string()).stdin(device);
        let daemon = Process::spawn("a FUSE daemon", &mut command)?;
        Ok(Self { path, daemon })
    }

    fn open(&self) -> Result<File> {
        let flags = OFlags::CLOEXEC.bits() as i32;
        let file = File::options().read(true).write(true).custom_flags(flags).open(&self.path);
        file.context("opening a FUSE file")
    }
}

impl Drop for SlowFile {
    fn drop(&mut self) {
        // The end of the daemon closes the last descriptor of the FUSE connection, and so ends the
        // connection.
        self.daemon.kill();
        let _ = unmount(&self.path, UnmountFlags::DETACH);
    }
}

/// Hidden subcommand of `cargo xtask` that runs the daemon.
pub(crate) const DAEMON: &str = "fuse-daemon";

/// Runs the FUSE daemon with the device as standard input. It answers FLUSH and RELEASE only if
/// they come from the process `friend`.
pub fn daemon(friend: u32) -> Result<()> {
    let mut device = File::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let mut request = vec![0; 1 << 17];
    loop {
        let len = device.read(&mut request).context("the kernel's requests")?;
        if let Some(answer) = request.get(..len).and_then(|request| answer(request, friend)) {
            // An error is ignored: the request may have been aborted.
            let _ = device.write(&answer);
        }
    }
}

/// Answer to a request, or `None` if the request stays unanswered.
fn answer(request: &[u8], friend: u32) -> Option<Vec<u8>> {
    let word = |at: usize| Some(u32::from_ne_bytes(request.get(at..at + 4)?.try_into().ok()?));
    let mut body = match word(4)? {
        // INIT: the protocol version, without options.
        26 => {
            let mut body = vec![0u8; 64];
            body[..4].copy_from_slice(&7u32.to_ne_bytes());
            body[4..8].copy_from_slice(&31u32.to_ne_bytes());
            body[8..12].copy_from_slice(&65536u32.to_ne_bytes());
            body[20..24].copy_from_slice(&65536u32.to_ne_bytes());
            body
        }
        // GETATTR and SETATTR: a regular file of 1 MiB.
        3 | 4 => {
            let mut body = vec![0u8; 104];
            body[16..24].copy_from_slice(&1u64.to_ne_bytes());
            body[24..32].copy_from_slice(&(1u64 << 20).to_ne_bytes());
            body[76..80].copy_from_slice(&0o100_666_u32.to_ne_bytes());
            body[80..84].copy_from_slice(&1u32.to_ne_bytes());
            body
        }
        // OPEN.
        14 => vec![0u8; 16],
        // FLUSH and RELEASE.
        25 | 18 if is_thread_of(word(32)?, friend) => Vec::new(),
        _ => return None,
    };
    let mut reply = ((16 + body.len()) as u32).to_ne_bytes().to_vec();
    reply.extend(0u32.to_ne_bytes());
    reply.extend(request.get(8..16)?);
    reply.append(&mut body);
    Some(reply)
}

/// True if `thread`, the thread of a request, belongs to `process`.
fn is_thread_of(thread: u32, process: u32) -> bool {
    PathBuf::from(format!("/proc/{process}/task/{thread}")).exists()
}

/// Sends a doorbell message, which an I/O thread reads from the socket, and behind it the
/// descriptor. Then shuts down the socket for writing.
fn behind_a_doorbell(field: &mut Field) -> Result<()> {
    let slow = SlowFile::mount(field)?;
    let outcome = knock(field, &slow);
    drop(slow);
    outcome
}

fn knock(field: &mut Field, slow: &SlowFile) -> Result<()> {
    while !field.is_over() {
        let mut guest = field.guest_with(1, 64)?;
        // Each doorbell message wakes an I/O thread, which then begins to read from the socket
        // itself. The messages request replies.
        let access =
            wire::RegionAccess { offset: regs::sq_doorbell_offset(1, 0), region: BAR0, count: 4 };
        let bell = message(command::REGION_WRITE, 0, &[access.as_bytes(), &[0; 4]]);
        for _ in 0..24 {
            guest.link.send(&bell, &[])?;
            // This pause sets the pace of the attack.
            sleep(Duration::from_micros(400));
        }
        guest.link.throw_away()?;
        let file = slow.open()?;
        let map = dma_map(1 << 41, PAGE, 0);
        let map = message(command::DMA_MAP, 0, &[map.as_bytes()]);
        // The server sends the reply to the doorbell message, and the send fails. The server checks
        // the descriptor later. Which of the two comes first depends on the scheduler. So the
        // socket is closed at three different moments, one after the other.
        let turn = field.done % 3;
        let end = |when| match when == turn {
            true => shutdown(guest.link.socket(), Shutdown::Read),
            false => Ok(()),
        };
        let fds = [file.as_fd()];
        let sent = end(0).and_then(|()| send_fds(guest.link.socket(), &bell, &[]));
        let sent = sent.and_then(|_| end(1));
        let sent = sent.and_then(|()| send_fds(guest.link.socket(), &map, &fds));
        let _ = sent.and_then(|_| end(2));
        field.done += 1;
        // This pause sets the pace of the attack.
        sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn with_maps(field: &mut Field) -> Result<()> {
    let slow = SlowFile::mount(field)?;
    let outcome = pass(field, &slow);
    drop(slow);
    outcome
}

fn pass(field: &mut Field, slow: &SlowFile) -> Result<()> {
    while !field.is_over() {
        let mut guest = field.guest()?;
        // The server may wait for the slow file and answer late. The attack waits no longer than
        // this limit.
        guest.link.set_patience(Duration::from_millis(500))?;
        for _ in 0..8 {
            let file = slow.open()?;
            let map = dma_map(1 << 41, PAGE, 0);
            let sent = guest.link.try_request(command::DMA_MAP, &[map.as_bytes()], &[file.as_fd()]);
            if sent.is_err() {
                break;
            }
            field.done += 1;
        }
        // This pause sets the pace of the attack.
        sleep(Duration::from_millis(20));
    }
    Ok(())
}
