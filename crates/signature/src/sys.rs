//! Bindings to libblkid, which is loaded on first use.

use crate::found::{FindError, Found};
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::null;
use std::sync::OnceLock;

/// `BLKID_SUBLKS_TYPE`: the probe reports the type of a superblock.
const SUBLKS_TYPE: c_int = 1 << 5;
/// Result of `blkid_do_safeprobe`: a signature was found.
const FOUND: c_int = 0;
/// Result of `blkid_do_safeprobe`: no signature was found.
const NOTHING: c_int = 1;
/// Result of `blkid_do_safeprobe`: several conflicting signatures were found.
const AMBIVALENT: c_int = -2;

type Probe = *mut c_void;

/// Functions of libblkid, with the signatures of `blkid.h`.
struct Api {
    new_probe: unsafe extern "C" fn() -> Probe,
    free_probe: unsafe extern "C" fn(Probe),
    set_device: unsafe extern "C" fn(Probe, c_int, i64, i64) -> c_int,
    enable_superblocks: unsafe extern "C" fn(Probe, c_int) -> c_int,
    set_superblocks_flags: unsafe extern "C" fn(Probe, c_int) -> c_int,
    enable_partitions: unsafe extern "C" fn(Probe, c_int) -> c_int,
    do_safeprobe: unsafe extern "C" fn(Probe) -> c_int,
    lookup_value:
        unsafe extern "C" fn(Probe, *const c_char, *mut *const c_char, *mut usize) -> c_int,
}

impl Api {
    fn load() -> Result<Self, libloading::Error> {
        // SAFETY: libblkid is a system library. Its initializers do the same here as in a program
        // that is linked to it. The function types are those of its header.
        unsafe {
            let library = Library::new("libblkid.so.1")?;
            let api = Self {
                new_probe: *library.get(b"blkid_new_probe\0")?,
                free_probe: *library.get(b"blkid_free_probe\0")?,
                set_device: *library.get(b"blkid_probe_set_device\0")?,
                enable_superblocks: *library.get(b"blkid_probe_enable_superblocks\0")?,
                set_superblocks_flags: *library.get(b"blkid_probe_set_superblocks_flags\0")?,
                enable_partitions: *library.get(b"blkid_probe_enable_partitions\0")?,
                do_safeprobe: *library.get(b"blkid_do_safeprobe\0")?,
                lookup_value: *library.get(b"blkid_probe_lookup_value\0")?,
            };
            // The library stays loaded, since its functions are used for the lifetime of the
            // process.
            std::mem::forget(library);
            Ok(api)
        }
    }
}

fn api() -> Result<&'static Api, FindError> {
    static API: OnceLock<Result<Api, String>> = OnceLock::new();
    let api = API.get_or_init(|| Api::load().map_err(|error| error.to_string()));
    api.as_ref().map_err(|why| FindError::Library(why.clone()))
}

/// Probe that is freed on drop.
struct OwnProbe(&'static Api, Probe);

impl Drop for OwnProbe {
    fn drop(&mut self) {
        // SAFETY: the probe came from `new_probe`, and this is its only owner.
        unsafe { (self.0.free_probe)(self.1) };
    }
}

/// Detects the signature in `image`.
pub(crate) fn probe(image: &OwnedFd) -> Result<Option<Found>, FindError> {
    let api = api()?;
    // SAFETY: the function has no arguments.
    let probe = unsafe { (api.new_probe)() };
    if probe.is_null() {
        return Err(io::Error::from(io::ErrorKind::OutOfMemory).into());
    }
    let probe = OwnProbe(api, probe);
    // SAFETY: the probe and the descriptor are valid. The probe does not own the descriptor.
    let outcome = unsafe {
        let prepared = [
            (api.set_device)(probe.1, image.as_raw_fd(), 0, 0),
            (api.enable_superblocks)(probe.1, 1),
            (api.set_superblocks_flags)(probe.1, SUBLKS_TYPE),
            (api.enable_partitions)(probe.1, 1),
        ];
        if prepared.iter().all(|status| *status == 0) { (api.do_safeprobe)(probe.1) } else { -1 }
    };
    match outcome {
        NOTHING => Ok(None),
        FOUND => Ok(named(&probe, c"TYPE", false).or_else(|| named(&probe, c"PTTYPE", true))),
        AMBIVALENT => {
            Ok(Some(Found { is_table: false, name: "signatures of several kinds".to_owned() }))
        }
        _ => Err(io::Error::other("libblkid cannot probe the disk").into()),
    }
}

fn named(probe: &OwnProbe, name: &CStr, is_table: bool) -> Option<Found> {
    let (mut data, mut len) = (null(), 0);
    // SAFETY: the probe is valid, `name` is a C string, and the other arguments point to local
    // variables.
    let status =
        unsafe { (probe.0.lookup_value)(probe.1, name.as_ptr(), &raw mut data, &raw mut len) };
    if status != 0 || data.is_null() {
        return None;
    }
    // SAFETY: a value of a probe is a C string that lives as long as the probe.
    let value = unsafe { CStr::from_ptr(data) };
    Some(Found { is_table, name: value.to_string_lossy().into_owned() })
}
