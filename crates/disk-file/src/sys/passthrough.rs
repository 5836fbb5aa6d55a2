//! NVMe passthrough commands through a generic character device (`/dev/ng0n1`).
//!
//! The kernel passes a command to the device unchanged. The command contains the address of its
//! data in this process, and the kernel maps the data for the device. Commands are passed to the
//! kernel by io_uring (`IORING_OP_URING_CMD`, Linux 5.19) or by `ioctl`. The kernel does not split,
//! merge or repeat them.

use super::call::{Kind, NVME_STATUS, Prepared};
use shadowbell_spec::Sqe;
use shadowbell_spec::admin::Identify;
use shadowbell_spec::identify::{
    IDENTIFY_SIZE, IdentifyController, IdentifyNamespace, NamespaceIds, cns,
};
use shadowbell_spec::nvm::{DatasetManagement, DsmRange};

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use zerocopy::{Immutable, IntoBytes, transmute};

/// Parameters for building commands to a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Namespace {
    pub(crate) nsid: u32,
    /// Logical block size as a power of two.
    pub(crate) block_shift: u32,
    /// Maximum number of bytes per command, a multiple of the block size.
    pub(crate) max_transfer: u32,
}

/// Maximum number of blocks of a command without data: the limit of the NLB field. Every device
/// also accepts a Dataset Management range of this length.
const MAX_BLOCKS: u64 = 1 << 16;

/// Layout of `struct nvme_passthru_cmd`. `struct nvme_uring_cmd` is the same without the last
/// field, `result`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, IntoBytes, Immutable)]
pub(super) struct Command {
    opcode: u8,
    flags: u8,
    reserved: u16,
    nsid: u32,
    cdw2: u32,
    cdw3: u32,
    metadata: u64,
    /// Address of the data, or of a list of `iovec`s.
    pub(super) addr: u64,
    metadata_len: u32,
    /// Length of the data in bytes, or the number of `iovec`s.
    pub(super) data_len: u32,
    cdw10: u32,
    cdw11: u32,
    cdw12: u32,
    cdw13: u32,
    cdw14: u32,
    cdw15: u32,
    /// Timeout in ms; 0 for the kernel's default.
    timeout_ms: u32,
    result: u32,
}

/// `_IO('N', 0x40)`: returns the namespace identifier.
const NVME_IOCTL_ID: libc::c_ulong = 0x4e40;
/// `_IOWR('N', 0x41, struct nvme_passthru_cmd)`.
const NVME_IOCTL_ADMIN_CMD: libc::c_ulong = 0xc048_4e41;
/// `_IOWR('N', 0x43, struct nvme_passthru_cmd)`.
const NVME_IOCTL_IO_CMD: libc::c_ulong = 0xc048_4e43;
/// `_IOWR('N', 0x80, struct nvme_uring_cmd)`: `addr` refers to the data.
pub(super) const NVME_URING_CMD_IO: u32 = 0xc048_4e80;
/// `_IOWR('N', 0x81, struct nvme_uring_cmd)`: `addr` refers to a list of `iovec`s.
pub(super) const NVME_URING_CMD_IO_VEC: u32 = 0xc048_4e81;

impl Command {
    /// Creates a command without data.
    fn without_buffer(sqe: &Sqe) -> Self {
        Self {
            opcode: sqe.opcode,
            flags: sqe.flags,
            nsid: sqe.nsid,
            cdw2: sqe.cdw2,
            cdw3: sqe.cdw3,
            cdw10: sqe.cdw10,
            cdw11: sqe.cdw11,
            cdw12: sqe.cdw12,
            cdw13: sqe.cdw13,
            cdw14: sqe.cdw14,
            cdw15: sqe.cdw15,
            ..Self::default()
        }
    }

    fn with_buffer(self, addr: u64, data_len: u32) -> Self {
        Self { addr, data_len, ..self }
    }
}

impl Namespace {
    /// Length in bytes of the first command of a call for `len` bytes. The call may need several
    /// commands.
    pub(super) fn max_len(&self, moves_data: bool, len: u64) -> u64 {
        let max_transfer =
            if moves_data { u64::from(self.max_transfer) } else { MAX_BLOCKS << self.block_shift };
        len.min(max_transfer)
    }

    /// Builds the command of a call, without its data pointer. Also returns the length of the data
    /// that the device accesses. `None` if the range does not consist of whole blocks, or is too
    /// long for one command.
    pub(super) fn command(&self, kind: Kind, offset: u64, len: u64) -> Option<(Command, u64)> {
        let block = 1u64 << self.block_shift;
        let is_whole = (offset | len) & (block - 1) == 0;
        let blocks = len >> self.block_shift;
        let nlb0 = u16::try_from(blocks.checked_sub(1)?).ok().filter(|_| is_whole)?;
        let (nsid, slba) = (self.nsid, offset >> self.block_shift);
        let (sqe, data) = match kind {
            Kind::Read => (Sqe::read(nsid, slba, nlb0, 0), len),
            Kind::Write { flags } => {
                let write = Sqe::write(nsid, slba, nlb0, 0);
                let is_durable = flags & libc::RWF_DSYNC != 0;
                (if is_durable { write.with_fua() } else { write }, len)
            }
            Kind::Allocate { mode } => {
                let deallocates = mode & libc::FALLOC_FL_PUNCH_HOLE != 0;
                (Sqe::write_zeroes(nsid, slba, nlb0, deallocates, 0), 0)
            }
            Kind::Deallocate => {
                let fields = DatasetManagement { ad: true, ..Default::default() };
                (Sqe::dsm(nsid, fields, 0), size_of::<DsmRange>() as u64)
            }
        };
        Some((Command::without_buffer(&sqe), data))
    }

    /// Builds the range of a Dataset Management command.
    pub(super) fn range(&self, offset: u64, len: u64) -> DsmRange {
        let blocks = u32::try_from(len >> self.block_shift).unwrap_or(u32::MAX);
        DsmRange { attributes: 0, blocks, slba: offset >> self.block_shift }
    }

    /// Builds the command of a call, with its data pointer. The flag is true if that pointer refers
    /// to a list of `iovec`s. Returns an error number if the length of the data is not that of the
    /// command. Without this check, the device could access memory beyond the data.
    pub(super) fn with_data(
        &self,
        call: &Prepared<'_>,
        range: &DsmRange,
    ) -> Result<(Command, bool), i32> {
        let (command, data) =
            self.command(call.kind, call.offset, call.len).ok_or(-libc::EINVAL)?;
        if call.kind == Kind::Deallocate {
            let addr = std::ptr::from_ref(range).expose_provenance() as u64;
            return Ok((command.with_buffer(addr, size_of::<DsmRange>() as u32), false));
        }
        let total: u64 = call.iovecs.iter().map(|piece| piece.iov_len as u64).sum();
        if total != data {
            return Err(-libc::EFAULT);
        }
        Ok(match call.iovecs {
            [] => (command, false),
            [one] => {
                (command.with_buffer(one.iov_base.expose_provenance() as u64, data as u32), false)
            }
            list => (
                command.with_buffer(list.as_ptr().expose_provenance() as u64, list.len() as u32),
                true,
            ),
        })
    }

    /// Executes a call by `ioctl`, and waits until it has ended. Returns the number of transferred
    /// bytes, or a negative error number: `EINVAL` if the call has several `iovec`s.
    ///
    /// # Safety
    /// The memory of the call's `iovecs` must be valid, and writable for a read.
    pub(super) unsafe fn call(&self, file: &File, call: &Prepared<'_>) -> i32 {
        let range = self.range(call.offset, call.len);
        let mut command = match self.with_data(call, &range) {
            Ok((command, false)) => command,
            Ok((_, true)) => return -libc::EINVAL,
            Err(error) => return error,
        };
        // SAFETY: the data of the command are the call's only piece, or the range.
        match unsafe { io(file, NVME_IOCTL_IO_CMD, &mut command) } {
            0 => i32::try_from(call.len).unwrap_or(i32::MAX),
            error => error,
        }
    }
}

/// Passes a command to the kernel and waits until it has ended. Returns 0 or a negative error
/// number.
///
/// # Safety
/// The command's data must be valid at its address, and writable if the command reads.
unsafe fn io(file: &File, request: libc::c_ulong, command: &mut Command) -> i32 {
    // SAFETY: the structure matches the request and outlives the call; the caller guarantees that
    // its data are valid.
    let status =
        unsafe { libc::ioctl(file.as_raw_fd(), request as _, std::ptr::from_mut(command)) };
    match status {
        0 => 0,
        ..0 => -io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO),
        status => -(NVME_STATUS + status),
    }
}

/// Sends a Flush and waits until it has ended. Returns 0 or a negative error number.
pub(crate) fn flush(file: &File, nsid: u32) -> i32 {
    // SAFETY: a Flush has no data.
    unsafe { io(file, NVME_IOCTL_IO_CMD, &mut Command::without_buffer(&Sqe::flush(nsid, 0))) }
}

/// Reads the first `into.len()` bytes of a namespace. The length must be a multiple of the block
/// size. Blocks the thread.
///
/// # Errors
/// The system's error, or the device's status as a message.
pub(crate) fn read_start(file: &File, namespace: &Namespace, into: &mut [u8]) -> io::Result<()> {
    let piece = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let call = Prepared {
        id: 0,
        kind: Kind::Read,
        iovecs: &[piece],
        offset: 0,
        len: into.len() as u64,
        nowait: false,
    };
    // SAFETY: the piece is the slice `into`, which this function may write.
    result_of(unsafe { namespace.call(file, &call) })
}

fn result_of(result: i32) -> io::Result<()> {
    match -result {
        status if status >= NVME_STATUS => {
            let status = shadowbell_spec::Status::from_bits((status - NVME_STATUS) as u16);
            Err(io::Error::other(format!("the device says: {status}")))
        }
        errno if errno > 0 => Err(io::Error::from_raw_os_error(errno)),
        _ => Ok(()),
    }
}

/// Identify data of a namespace and its controller.
pub(crate) struct Identity {
    pub(crate) nsid: u32,
    pub(crate) namespace: IdentifyNamespace,
    pub(crate) controller: IdentifyController,
    /// Namespace Identification Descriptor list, which contains the Command Set Identifier. `None`
    /// if the controller is too old to have one.
    pub(crate) ids: Option<NamespaceIds>,
}

/// Reads the Identify data of a namespace.
///
/// # Errors
/// The system's error: `ENOTTY` if the file is not an NVMe generic character device.
pub(crate) fn identify(file: &File) -> io::Result<Identity> {
    // SAFETY: the request has no argument.
    let nsid = unsafe { libc::ioctl(file.as_raw_fd(), NVME_IOCTL_ID as _) };
    let nsid = u32::try_from(nsid).map_err(|_| io::Error::last_os_error())?;
    let ask = |nsid: u32, cns: u8| -> io::Result<[u8; IDENTIFY_SIZE]> {
        let mut data = [0; IDENTIFY_SIZE];
        let sqe = Sqe::identify(nsid, Identify { cns, ..Default::default() }, 0);
        let mut command = Command::without_buffer(&sqe)
            .with_buffer(data.as_mut_ptr().expose_provenance() as u64, IDENTIFY_SIZE as u32);
        // SAFETY: an Identify command writes `IDENTIFY_SIZE` bytes, the length of `data`.
        result_of(unsafe { io(file, NVME_IOCTL_ADMIN_CMD, &mut command) })?;
        Ok(data)
    };
    Ok(Identity {
        nsid,
        namespace: transmute!(ask(nsid, cns::NAMESPACE)?),
        controller: transmute!(ask(0, cns::CONTROLLER)?),
        ids: match ask(nsid, cns::NAMESPACE_IDS) {
            Ok(bytes) => Some(NamespaceIds { bytes }),
            // An error without an error number is a status of the device.
            Err(error) if error.raw_os_error().is_none() => None,
            Err(error) => return Err(error),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_spec::nvm::RwFields;

    const NAMESPACE: Namespace = Namespace { nsid: 3, block_shift: 12, max_transfer: 128 << 10 };

    fn sqe(command: &Command) -> Sqe {
        let Command { cdw10, cdw11, cdw12, .. } = *command;
        Sqe { cdw10, cdw11, cdw12, ..Sqe::new(command.opcode, 0, command.nsid) }
    }

    fn command_of(kind: Kind, offset: u64, len: u64) -> Option<(u8, RwFields, u64)> {
        let (command, data) = NAMESPACE.command(kind, offset, len)?;
        assert_eq!(command.nsid, 3);
        Some((command.opcode, RwFields::decode(&sqe(&command)), data))
    }

    #[test]
    fn the_passthrough_command_has_the_kernels_size() {
        assert_eq!(size_of::<Command>(), 72);
        for (code, number) in [
            (NVME_IOCTL_ADMIN_CMD, 0x41),
            (NVME_IOCTL_IO_CMD, 0x43),
            (NVME_URING_CMD_IO.into(), 0x80),
            (NVME_URING_CMD_IO_VEC.into(), 0x81),
        ] {
            let length = (size_of::<Command>() as libc::c_ulong) << 16;
            assert_eq!(code, 3 << 30 | length | u64::from(b'N') << 8 | number);
        }
    }

    #[test]
    fn calls_become_commands() {
        let (opcode, fields, data) = command_of(Kind::Read, 3 << 12, 2 << 12).unwrap();
        assert_eq!((opcode, fields.slba, fields.nlb0, data), (2, 3, 1, 2 << 12));
        let (opcode, fields, data) =
            command_of(Kind::Write { flags: libc::RWF_DSYNC }, 1 << 44, 4096).unwrap();
        assert_eq!((opcode, fields.slba, fields.nlb0, data), (1, 1 << 32, 0, 4096));
        assert!(fields.fua);
        assert!(!command_of(Kind::Write { flags: 0 }, 0, 4096).unwrap().1.fua);
        for (mode, deallocates) in
            [(libc::FALLOC_FL_PUNCH_HOLE, true), (libc::FALLOC_FL_ZERO_RANGE, false)]
        {
            let (opcode, fields, data) =
                command_of(Kind::Allocate { mode }, 4096, 1 << 28).unwrap();
            assert_eq!((opcode, fields.nlb0, fields.deac, data), (8, 0xffff, deallocates, 0));
        }
        let (command, data) = NAMESPACE.command(Kind::Deallocate, 4096, 8192).unwrap();
        assert_eq!((command.opcode, command.cdw10, command.cdw11, data), (9, 0, 4, 16));
        let range = NAMESPACE.range(4096, 8192);
        assert_eq!((range.slba, range.blocks), (1, 2));
    }

    #[test]
    fn requests_without_a_matching_command_are_not_converted() {
        for (offset, len) in [(512, 4096), (0, 512), (0, 0), (0, (MAX_BLOCKS + 1) << 12)] {
            assert_eq!(command_of(Kind::Read, offset, len), None, "{offset} {len}");
        }
        assert_eq!(NAMESPACE.max_len(true, 1 << 30), 128 << 10);
        assert_eq!(NAMESPACE.max_len(true, 4096), 4096);
        assert_eq!(NAMESPACE.max_len(false, 1 << 40), 1 << 28);
    }

    #[test]
    fn commands_never_exceed_the_length_of_their_buffers() {
        let mut room = [0u8; 8192];
        let mut piece = |len| libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: len };
        let with = |iovecs: &[libc::iovec], len| {
            let call = Prepared { id: 0, kind: Kind::Read, iovecs, offset: 0, len, nowait: false };
            let command_of = NAMESPACE.with_data(&call, &DsmRange::default());
            command_of.map(|(command, is_list)| (command.data_len, is_list))
        };
        let (short, whole) = (piece(4096), piece(8192));
        assert_eq!(with(&[whole], 8192), Ok((8192, false)));
        assert_eq!(with(&[short, short], 8192), Ok((2, true)));
        for iovecs in [&[][..], &[short], &[whole, short]] {
            assert_eq!(with(iovecs, 8192), Err(-libc::EFAULT));
        }
        assert_eq!(with(&[whole], 8000), Err(-libc::EINVAL));
    }

    #[test]
    fn a_file_that_is_no_namespace_returns_errors() {
        let null = File::options().read(true).write(true).open("/dev/null").unwrap();
        let errno = |error: io::Error| error.raw_os_error();
        assert_eq!(identify(&null).err().and_then(errno), Some(libc::ENOTTY));
        assert_eq!(flush(&null, 1), -libc::ENOTTY);
        let read = read_start(&null, &NAMESPACE, &mut [0; 4096]);
        assert_eq!(errno(read.unwrap_err()), Some(libc::ENOTTY));
        let message = result_of(-(NVME_STATUS + 0x4002)).unwrap_err().to_string();
        assert!(message.contains("Invalid Field"), "{message}");
    }
}
