//! System calls of VFIO and iommufd without a safe wrapper: `ioctl` with the structures of
//! `linux/vfio.h` and `linux/iommufd.h`.
//!
//! Each function is one request. It builds the argument from safe values, so other modules need no
//! `unsafe`. A device may write to shared memory at any time; [`Mapping`] is designed for that
//! (access by copies and atomics). The kernel pins the pages, so the device cannot access other
//! memory, even after this process has unmapped the pages.

use shadowbell_memory::Mapping;
use std::ffi::{CStr, c_int, c_ulong};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use vfio_bindings::bindings::vfio;

/// Request number of VFIO or iommufd: `_IO(';', number)`, which contains no size.
const fn request(number: u32) -> c_ulong {
    ((b';' as u32) << 8 | number) as c_ulong
}

const GET_API_VERSION: c_ulong = request(vfio::VFIO_BASE);
const CHECK_EXTENSION: c_ulong = request(vfio::VFIO_BASE + 1);
const SET_IOMMU: c_ulong = request(vfio::VFIO_BASE + 2);
const GROUP_GET_STATUS: c_ulong = request(vfio::VFIO_BASE + 3);
const GROUP_SET_CONTAINER: c_ulong = request(vfio::VFIO_BASE + 4);
const GROUP_GET_DEVICE_FD: c_ulong = request(vfio::VFIO_BASE + 6);
const DEVICE_GET_INFO: c_ulong = request(vfio::VFIO_BASE + 7);
const DEVICE_GET_REGION_INFO: c_ulong = request(vfio::VFIO_BASE + 8);
const DEVICE_GET_IRQ_INFO: c_ulong = request(vfio::VFIO_BASE + 9);
const DEVICE_SET_IRQS: c_ulong = request(vfio::VFIO_BASE + 10);
const DEVICE_RESET: c_ulong = request(vfio::VFIO_BASE + 11);
const IOMMU_GET_INFO: c_ulong = request(vfio::VFIO_BASE + 12);
const IOMMU_MAP_DMA: c_ulong = request(vfio::VFIO_BASE + 13);
const IOMMU_UNMAP_DMA: c_ulong = request(vfio::VFIO_BASE + 14);
const DEVICE_BIND_IOMMUFD: c_ulong = request(vfio::VFIO_BASE + 18);
const DEVICE_ATTACH_IOMMUFD_PT: c_ulong = request(vfio::VFIO_BASE + 19);
const IOAS_ALLOC: c_ulong = request(0x81);
const IOAS_IOVA_RANGES: c_ulong = request(0x84);
const IOAS_MAP: c_ulong = request(0x85);
const IOAS_UNMAP: c_ulong = request(0x86);

/// Limit of the length of a variable-length reply; the kernel's replies have some hundred bytes.
const LONGEST: usize = 64 * 1024;

/// Repeats an `ioctl` that was interrupted by a signal.
fn retried(mut call: impl FnMut() -> c_int) -> io::Result<u32> {
    loop {
        let outcome = call();
        if let Ok(value) = u32::try_from(outcome) {
            return Ok(value);
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Executes a request with a number as argument.
fn number(fd: BorrowedFd<'_>, request: c_ulong, value: c_ulong) -> io::Result<u32> {
    // SAFETY: this function is private, and is used below with requests whose argument is a number
    // or nothing. So the kernel follows no pointer.
    retried(|| unsafe { libc::ioctl(fd.as_raw_fd(), request as _, value) })
}

/// Executes a request with a structure as argument, which the kernel reads and writes.
///
/// # Safety
///
/// `request` must take a pointer to a `T`. If the structure has a size field, the field must be the
/// size of `T`. Pointers in the structure must be valid for the call.
unsafe fn structure<T>(fd: BorrowedFd<'_>, request: c_ulong, argument: &mut T) -> io::Result<u32> {
    // SAFETY: the caller guarantees the type. `argument` stays borrowed until the call returns.
    retried(|| unsafe { libc::ioctl(fd.as_raw_fd(), request as _, std::ptr::from_mut(argument)) })
}

/// Executes a request with a variable-length reply. `head` is the beginning of the structure after
/// the size field; `fixed` is the size of the structure.
fn answer(fd: BorrowedFd<'_>, request: c_ulong, head: &[u8], fixed: usize) -> io::Result<Vec<u8>> {
    let mut len = fixed.max(4 + head.len());
    // If the reply is longer than the buffer, the buffer contains the reply's size, which the next
    // iteration uses.
    for _ in 0..3 {
        let mut bytes = vec![0u8; len];
        let size = u32::try_from(len).map_err(io::Error::other)?;
        for (to, from) in bytes.iter_mut().zip(size.to_ne_bytes().iter().chain(head)) {
            *to = *from;
        }
        // SAFETY: this function is private, and is used below with requests whose structure begins
        // with its size. The kernel writes at most that many bytes, and `bytes` has them.
        retried(|| unsafe { libc::ioctl(fd.as_raw_fd(), request as _, bytes.as_mut_ptr()) })?;
        let mut wanted = [0; 4];
        wanted.copy_from_slice(bytes.get(..4).ok_or(io::ErrorKind::InvalidData)?);
        let wanted = u32::from_ne_bytes(wanted) as usize;
        if wanted <= len {
            return Ok(bytes);
        }
        if wanted > LONGEST {
            return Err(io::Error::other(format!("a reply of {wanted} bytes exceeds the limit")));
        }
        len = wanted;
    }
    Err(io::Error::other("the reply grows with each request"))
}

fn size_of_u32<T>() -> u32 {
    // The cast cannot truncate: the structures have some dozens of bytes.
    size_of::<T>() as u32
}

/// The interface version of `/dev/vfio/vfio`.
pub(super) fn api_version(container: BorrowedFd<'_>) -> io::Result<u32> {
    number(container, GET_API_VERSION, 0)
}

/// True if the container supports an IOMMU of type `kind`.
pub(super) fn has_extension(container: BorrowedFd<'_>, kind: u32) -> io::Result<bool> {
    Ok(number(container, CHECK_EXTENSION, kind.into())? != 0)
}

/// Sets the container's IOMMU type.
pub(super) fn set_iommu(container: BorrowedFd<'_>, kind: u32) -> io::Result<()> {
    number(container, SET_IOMMU, kind.into()).map(drop)
}

/// True if all functions of a group are bound to VFIO drivers or to none.
pub(super) fn group_is_viable(group: BorrowedFd<'_>) -> io::Result<bool> {
    let argsz = size_of_u32::<vfio::vfio_group_status>();
    let mut status = vfio::vfio_group_status { argsz, ..Default::default() };
    // SAFETY: this request takes this structure. The structure has no pointers.
    unsafe { structure(group, GROUP_GET_STATUS, &mut status) }?;
    Ok(status.flags & vfio::VFIO_GROUP_FLAGS_VIABLE != 0)
}

/// Adds a group to a container.
pub(super) fn set_container(group: BorrowedFd<'_>, container: BorrowedFd<'_>) -> io::Result<()> {
    let mut fd: c_int = container.as_raw_fd();
    // SAFETY: this request takes a pointer to a descriptor.
    unsafe { structure(group, GROUP_SET_CONTAINER, &mut fd) }.map(drop)
}

/// Opens the device of this name in a group.
pub(super) fn group_device(group: BorrowedFd<'_>, name: &CStr) -> io::Result<OwnedFd> {
    let pointer = name.as_ptr();
    // SAFETY: this request takes a pointer to a string, and the string outlives the call.
    let fd =
        retried(|| unsafe { libc::ioctl(group.as_raw_fd(), GROUP_GET_DEVICE_FD as _, pointer) })?;
    let fd = c_int::try_from(fd).map_err(io::Error::other)?;
    // SAFETY: on success the request returns a new descriptor without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The flags of a device: `VFIO_DEVICE_FLAGS_...`.
pub(super) fn device_flags(device: BorrowedFd<'_>) -> io::Result<u32> {
    let argsz = size_of_u32::<vfio::vfio_device_info>();
    let mut info = vfio::vfio_device_info { argsz, ..Default::default() };
    // SAFETY: this request takes this structure. The structure has no pointers.
    unsafe { structure(device, DEVICE_GET_INFO, &mut info) }?;
    Ok(info.flags)
}

/// The kernel's description of a region, for [`RegionInfo::parse`](super::info::RegionInfo::parse).
pub(super) fn region_info(device: BorrowedFd<'_>, index: u32) -> io::Result<Vec<u8>> {
    let mut head = [0; 8];
    let (_flags, at) = head.split_at_mut(4);
    at.copy_from_slice(&index.to_ne_bytes());
    answer(device, DEVICE_GET_REGION_INFO, &head, super::info::REGION_INFO)
}

/// The flags (`VFIO_IRQ_INFO_...`) and the number of interrupts of one type.
pub(super) fn irq_info(device: BorrowedFd<'_>, index: u32) -> io::Result<(u32, u32)> {
    let argsz = size_of_u32::<vfio::vfio_irq_info>();
    let mut info = vfio::vfio_irq_info { argsz, index, ..Default::default() };
    // SAFETY: this request takes this structure. The structure has no pointers.
    unsafe { structure(device, DEVICE_GET_IRQ_INFO, &mut info) }?;
    Ok((info.flags, info.count))
}

/// Connects interrupts from `start` on to eventfds, or disconnects them. Returns 0, or the number
/// of available vectors if there are too few.
pub(super) fn set_irq_events(
    device: BorrowedFd<'_>,
    index: u32,
    start: u32,
    events: &[Option<BorrowedFd<'_>>],
) -> io::Result<u32> {
    const HEAD: usize = size_of::<vfio::vfio_irq_set>();
    let too_many = || io::Error::from(io::ErrorKind::InvalidInput);
    let count = u32::try_from(events.len()).map_err(|_| too_many())?;
    let argsz = u32::try_from(HEAD + 4 * events.len()).map_err(|_| too_many())?;
    let flags = vfio::VFIO_IRQ_SET_DATA_EVENTFD | vfio::VFIO_IRQ_SET_ACTION_TRIGGER;
    let fds = events.iter().map(|event| event.map_or(-1, |fd| fd.as_raw_fd()) as u32);
    let mut words: Vec<u32> = [argsz, flags, index, start, count].into_iter().chain(fds).collect();
    // SAFETY: the words are a `vfio_irq_set`: five fields and the data, of 4 bytes each. The first
    // field is the total length. The descriptors in the data are borrowed for the call.
    retried(|| unsafe { libc::ioctl(device.as_raw_fd(), DEVICE_SET_IRQS as _, words.as_mut_ptr()) })
}

/// Resets a device.
pub(super) fn reset(device: BorrowedFd<'_>) -> io::Result<()> {
    number(device, DEVICE_RESET, 0).map(drop)
}

/// The kernel's description of an IOMMU, for [`IommuInfo::parse`](super::info::IommuInfo::parse).
pub(super) fn iommu_info(container: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    answer(container, IOMMU_GET_INFO, &[], super::info::IOMMU_INFO)
}

/// Maps all of `mapping` at `iova`, for the devices of a container.
pub(super) fn map_dma(container: BorrowedFd<'_>, mapping: &Mapping, iova: u64) -> io::Result<()> {
    let mut map = vfio::vfio_iommu_type1_dma_map {
        argsz: size_of_u32::<vfio::vfio_iommu_type1_dma_map>(),
        flags: vfio::VFIO_DMA_MAP_FLAG_READ | vfio::VFIO_DMA_MAP_FLAG_WRITE,
        vaddr: mapping.address() as u64,
        iova,
        size: mapping.len() as u64,
    };
    // SAFETY: this request takes this structure. The address range is mapped during the call, in
    // which the kernel pins its pages. The documentation of this module explains why device writes
    // to the pages are sound.
    unsafe { structure(container, IOMMU_MAP_DMA, &mut map) }.map(drop)
}

/// Unmaps a range. Returns the number of unmapped bytes.
pub(super) fn unmap_dma(container: BorrowedFd<'_>, iova: u64, len: u64) -> io::Result<u64> {
    let argsz = size_of_u32::<vfio::vfio_iommu_type1_dma_unmap>();
    let mut unmap =
        vfio::vfio_iommu_type1_dma_unmap { argsz, iova, size: len, ..Default::default() };
    // SAFETY: this request takes this structure. The structure has no pointers.
    unsafe { structure(container, IOMMU_UNMAP_DMA, &mut unmap) }?;
    Ok(unmap.size)
}

/// Binds a device of the character device interface to an iommufd.
pub(super) fn bind_iommufd(device: BorrowedFd<'_>, iommufd: BorrowedFd<'_>) -> io::Result<()> {
    let mut bind = vfio::vfio_device_bind_iommufd {
        argsz: size_of_u32::<vfio::vfio_device_bind_iommufd>(),
        iommufd: iommufd.as_raw_fd(),
        ..Default::default()
    };
    // SAFETY: this request takes this structure. The kernel ignores its token pointer, because the
    // flag for the token is not set.
    unsafe { structure(device, DEVICE_BIND_IOMMUFD, &mut bind) }.map(drop)
}

/// Attaches a bound device to an I/O address space.
pub(super) fn attach_ioas(device: BorrowedFd<'_>, ioas: u32) -> io::Result<()> {
    let argsz = size_of_u32::<vfio::vfio_device_attach_iommufd_pt>();
    let mut attach =
        vfio::vfio_device_attach_iommufd_pt { argsz, pt_id: ioas, ..Default::default() };
    // SAFETY: this request takes this structure. The structure has no pointers.
    unsafe { structure(device, DEVICE_ATTACH_IOMMUFD_PT, &mut attach) }.map(drop)
}

/// `struct iommu_ioas_alloc`.
#[repr(C)]
struct IoasAlloc {
    size: u32,
    flags: u32,
    ioas_id: u32,
}

/// `struct iommu_ioas_iova_ranges`.
#[repr(C)]
struct IoasIovaRanges {
    size: u32,
    ioas_id: u32,
    count: u32,
    reserved: u32,
    ranges: u64,
    alignment: u64,
}

/// `struct iommu_ioas_map`.
#[repr(C)]
struct IoasMap {
    size: u32,
    flags: u32,
    ioas_id: u32,
    reserved: u32,
    user_address: u64,
    len: u64,
    iova: u64,
}

/// `struct iommu_ioas_unmap`.
#[repr(C)]
struct IoasUnmap {
    size: u32,
    ioas_id: u32,
    iova: u64,
    len: u64,
}

/// `IOMMU_IOAS_MAP_FIXED_IOVA`, `..._WRITEABLE`, `..._READABLE`.
const MAP_FLAGS: u32 = 1 | 2 | 4;

/// Creates an I/O address space.
pub(super) fn ioas_alloc(iommufd: BorrowedFd<'_>) -> io::Result<u32> {
    let mut alloc = IoasAlloc { size: size_of_u32::<IoasAlloc>(), flags: 0, ioas_id: 0 };
    // SAFETY: this request takes this structure. The structure has no pointers.
    unsafe { structure(iommufd, IOAS_ALLOC, &mut alloc) }?;
    Ok(alloc.ioas_id)
}

/// The usable IOVA ranges of an I/O address space (first and last addresses), and their alignment.
pub(super) fn ioas_ranges(
    iommufd: BorrowedFd<'_>,
    ioas_id: u32,
) -> io::Result<(Vec<[u64; 2]>, u64)> {
    let mut room = 16;
    for _ in 0..3 {
        let mut ranges = vec![[0u64; 2]; room];
        let mut ask = IoasIovaRanges {
            size: size_of_u32::<IoasIovaRanges>(),
            ioas_id,
            count: u32::try_from(room).map_err(io::Error::other)?,
            reserved: 0,
            ranges: ranges.as_mut_ptr() as u64,
            alignment: 0,
        };
        // SAFETY: this request takes this structure, which points to `count` ranges of two 64-bit
        // values each (`struct iommu_iova_range`).
        match unsafe { structure(iommufd, IOAS_IOVA_RANGES, &mut ask) } {
            Ok(_) => {
                ranges.truncate(ask.count as usize);
                return Ok((ranges, ask.alignment));
            }
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) => {
                room = (ask.count as usize).clamp(room + 1, LONGEST);
            }
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("the list of ranges grows with each request"))
}

/// Maps all of `mapping` at `iova`, for the devices of an I/O address space.
pub(super) fn ioas_map(
    iommufd: BorrowedFd<'_>,
    ioas_id: u32,
    mapping: &Mapping,
    iova: u64,
) -> io::Result<()> {
    let mut map = IoasMap {
        size: size_of_u32::<IoasMap>(),
        flags: MAP_FLAGS,
        ioas_id,
        reserved: 0,
        user_address: mapping.address() as u64,
        len: mapping.len() as u64,
        iova,
    };
    // SAFETY: this request takes this structure. The address range is mapped during the call, in
    // which the kernel pins its pages. The documentation of this module explains why device writes
    // to the pages are sound.
    unsafe { structure(iommufd, IOAS_MAP, &mut map) }.map(drop)
}

/// Unmaps a range. Returns the number of unmapped bytes.
pub(super) fn ioas_unmap(
    iommufd: BorrowedFd<'_>,
    ioas_id: u32,
    iova: u64,
    len: u64,
) -> io::Result<u64> {
    let mut unmap = IoasUnmap { size: size_of_u32::<IoasUnmap>(), ioas_id, iova, len };
    // SAFETY: this request takes this structure. The structure has no pointers.
    unsafe { structure(iommufd, IOAS_UNMAP, &mut unmap) }?;
    Ok(unmap.len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::mem::offset_of;
    use std::os::fd::AsFd;

    #[test]
    fn ioctls_and_structures_are_those_of_the_kernel() {
        assert_eq!(GET_API_VERSION, 0x3b64);
        assert_eq!(DEVICE_ATTACH_IOMMUFD_PT, 0x3b77);
        assert_eq!(IOAS_ALLOC, 0x3b81);
        assert_eq!(size_of::<IoasAlloc>(), 12);
        assert_eq!(size_of::<IoasIovaRanges>(), 32);
        assert_eq!(offset_of!(IoasIovaRanges, ranges), 16);
        assert_eq!(size_of::<IoasMap>(), 40);
        assert_eq!(offset_of!(IoasMap, user_address), 16);
        assert_eq!(size_of::<IoasUnmap>(), 24);
        assert_eq!(offset_of!(IoasUnmap, iova), 8);
        assert_eq!(size_of::<vfio::vfio_irq_set>(), 20);
    }

    #[test]
    fn every_call_fails_on_a_file_that_is_no_vfio_device() {
        let null = File::open("/dev/null").unwrap();
        let (fd, mapping) = (null.as_fd(), Mapping::shared("none", 4096).unwrap());
        let errors = [
            api_version(fd).err(),
            has_extension(fd, 1).err(),
            set_iommu(fd, 1).err(),
            group_is_viable(fd).err(),
            set_container(fd, fd).err(),
            group_device(fd, c"0000:01:00.0").err(),
            device_flags(fd).err(),
            region_info(fd, 0).err(),
            irq_info(fd, 2).err(),
            set_irq_events(fd, 2, 0, &[None, Some(fd)]).err(),
            reset(fd).err(),
            iommu_info(fd).err(),
            map_dma(fd, &mapping, 0).err(),
            unmap_dma(fd, 0, 4096).err(),
            bind_iommufd(fd, fd).err(),
            attach_ioas(fd, 1).err(),
            ioas_alloc(fd).err(),
            ioas_ranges(fd, 1).err(),
            ioas_map(fd, 1, &mapping, 0).err(),
            ioas_unmap(fd, 1, 0, 4096).err(),
        ];
        for (index, error) in errors.into_iter().enumerate() {
            assert_eq!(error.unwrap().raw_os_error(), Some(libc::ENOTTY), "request {index}");
        }
    }
}
