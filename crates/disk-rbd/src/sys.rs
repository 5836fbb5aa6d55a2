//! Bindings of librados and librbd, which are loaded when the first image is opened, and a safe
//! type for an image.

use crate::completions::{CallResult, Completions};
use crate::error::CONNECTING;
use crate::exit::{self, Counted};
use crate::uri::RbdSpec;
use libloading::Library;
use shadowbell_disk::notify_resize;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// Maximum time, in seconds, that opening an image waits for the cluster.
const MOUNT_TIMEOUT: &str = "15";
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`
const THICK: c_int = 1;

/// Configuration options of each Ceph client.
const SETTINGS: [(&str, &str); 5] = [
    ("client_mount_timeout", MOUNT_TIMEOUT),
    // With this setting, the calling thread itself starts a call. That saves a switch to another
    // thread.
    ("rbd_non_blocking_aio", "false"),
    // 0 means no limit. With a limit on operations in flight, a further call would block the I/O
    // thread until the cluster answers. The buffers of a queue limit the operations instead.
    ("objecter_inflight_ops", "0"),
    ("objecter_inflight_op_bytes", "0"),
    // Ceph's write-through until the first flush is not needed: NVMe hosts know that the disk has a
    // volatile write cache, and flush it.
    ("rbd_cache_writethrough_until_flush", "false"),
];
/// Configuration option of a client without a cache. Its writes complete when the cluster has
/// stored them.
const NO_CACHE: (&str, &str) = ("rbd_cache", "false");

/// Option for the number of threads of a client that send and receive, and its default.
const SENDERS: (&str, usize) = ("ms_async_op_threads", 3);
/// `LIBRADOS_OP_FLAG_FADVISE_FUA`
const FUA: c_int = 0x80;

type Handle = *mut c_void;
type Callback = extern "C" fn(Handle, *mut c_void);
type Changed = extern "C" fn(*mut c_void);

/// `rbd_config_option_t`: an image option with its effective value.
#[repr(C)]
struct Setting {
    name: *mut c_char,
    value: *mut c_char,
    source: c_int,
}

macro_rules! api {
    ($($name:ident: fn($($arg:ty),*) -> $ret:ty, $library:ident;)*) => {
        /// Functions of the libraries, as declared in the headers of Ceph 16.
        struct Api { $($name: unsafe extern "C" fn($($arg),*) -> $ret,)* }

        impl Api {
            fn load(rados: &Library, rbd: &Library) -> Result<Self, libloading::Error> {
                let libraries = Libraries { rados, rbd };
                Ok(Self { $(
                    // SAFETY: the signature is the one in Ceph's header.
                    $name: unsafe { *libraries.$library.get(stringify!($name).as_bytes())? },
                )* })
            }
        }
    };
}

struct Libraries<'a> {
    rados: &'a Library,
    rbd: &'a Library,
}

api! {
    rados_create: fn(*mut Handle, *const c_char) -> c_int, rados;
    rados_conf_read_file: fn(Handle, *const c_char) -> c_int, rados;
    rados_conf_set: fn(Handle, *const c_char, *const c_char) -> c_int, rados;
    rados_conf_get: fn(Handle, *const c_char, *mut c_char, usize) -> c_int, rados;
    rados_connect: fn(Handle) -> c_int, rados;
    rados_shutdown: fn(Handle) -> (), rados;
    rados_getaddrs: fn(Handle, *mut *mut c_char) -> c_int, rados;
    rados_blocklist_add: fn(Handle, *mut c_char, u32) -> c_int, rados;
    rados_wait_for_latest_osdmap: fn(Handle) -> c_int, rados;
    rados_ioctx_create: fn(Handle, *const c_char, *mut Handle) -> c_int, rados;
    rados_set_pool_full_try: fn(Handle) -> (), rados;
    rados_ioctx_set_namespace: fn(Handle, *const c_char) -> (), rados;
    rados_ioctx_destroy: fn(Handle) -> (), rados;
    rbd_open: fn(Handle, *const c_char, *mut Handle, *const c_char) -> c_int, rbd;
    rbd_open_read_only: fn(Handle, *const c_char, *mut Handle, *const c_char) -> c_int, rbd;
    rbd_close: fn(Handle) -> c_int, rbd;
    rbd_get_size: fn(Handle, *mut u64) -> c_int, rbd;
    rbd_get_stripe_unit: fn(Handle, *mut u64) -> c_int, rbd;
    rbd_config_image_list: fn(Handle, *mut Setting, *mut c_int) -> c_int, rbd;
    rbd_config_image_list_cleanup: fn(*mut Setting, c_int) -> (), rbd;
    rbd_aio_create_completion: fn(*mut c_void, Callback, *mut Handle) -> c_int, rbd;
    rbd_aio_get_return_value: fn(Handle) -> isize, rbd;
    rbd_aio_release: fn(Handle) -> (), rbd;
    rbd_aio_read: fn(Handle, u64, usize, *mut c_char, Handle) -> c_int, rbd;
    rbd_aio_write2: fn(Handle, u64, usize, *const c_char, Handle, c_int) -> c_int, rbd;
    rbd_aio_write_zeroes: fn(Handle, u64, usize, Handle, c_int, c_int) -> c_int, rbd;
    rbd_aio_flush: fn(Handle, Handle) -> c_int, rbd;
    rbd_aio_compare_and_write:
        fn(Handle, u64, usize, *const c_char, *const c_char, Handle, *mut u64, c_int) -> isize, rbd;
    rbd_update_watch: fn(Handle, *mut u64, Changed, *mut c_void) -> c_int, rbd;
    rbd_update_unwatch: fn(Handle, u64) -> c_int, rbd;
}

unsafe extern "C" {
    /// Registers `function` as a callback, which the C library calls at the exit of the process.
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// Exit callback. The C library calls it in `exit`, or when `main` returns.
extern "C" fn on_process_exit(status: c_int, _: *mut c_void) {
    if !exit::wait() {
        // SAFETY: ends the process without running any other code.
        unsafe { libc::_exit(status) }
    }
}

/// Returns the functions of the libraries. The libraries are loaded by the first call and never
/// unloaded.
fn api() -> Result<&'static Api, String> {
    static API: OnceLock<Result<Api, String>> = OnceLock::new();
    let load = || {
        // SAFETY: Ceph's own libraries; their initializers do the same as in a program that is
        // linked to them.
        let (rados, rbd) =
            unsafe { (Library::new("librados.so.2")?, Library::new("librbd.so.1")?) };
        let api = Api::load(&rados, &rbd)?;
        // The callback is registered after the libraries were loaded, so it is called before their
        // destructors.
        // SAFETY: the function has the required signature, and is never unloaded.
        unsafe { on_exit(on_process_exit, null_mut()) };
        // The threads of the libraries may run after every image is closed, so the libraries are
        // never unloaded.
        std::mem::forget((rados, rbd));
        Ok(api)
    };
    let load = || load().map_err(|error: libloading::Error| error.to_string());
    API.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// Error of opening an image.
pub(crate) enum Failure {
    Library(String),
    Call(&'static str, io::Error),
}

/// Kind of librbd's cache. With a cache, writes complete before the cluster has stored them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cache {
    None,
    /// `rbd_cache_policy=writearound`: a write, and a compare and write, with the FUA flag bypass
    /// the cache.
    Around,
    Other,
}

/// Call on an image, from an offset on.
pub(crate) enum Call {
    /// Reads as many bytes as the buffer is long.
    Read,
    /// Writes the buffer. With `fua`, completes only when the cluster has stored the data, if the
    /// cache [supports that](Cache::Around).
    Write {
        fua: bool,
    },
    /// Zeroes `len` bytes. If `is_thick` is true, they stay allocated.
    Zero {
        len: usize,
        is_thick: bool,
    },
    Flush,
    /// Compares the first half of the buffer with the image. If they are equal, writes the second
    /// half.
    CompareAndWrite,
}

/// Open image.
pub(crate) struct Image {
    api: &'static Api,
    cluster: Handle,
    pool: Handle,
    image: Handle,
    /// Handle of the registration for Ceph's reports of changed properties, such as the size.
    watch: Option<u64>,
    /// True after Ceph has reported a change. Ceph's callback has the address of this flag, so the
    /// flag must outlive the watch.
    has_changed: Arc<AtomicBool>,
    counted: Counted,
}

// SAFETY: Ceph's handles may be used on any thread, and on several threads at once.
unsafe impl Send for Image {}
// SAFETY: Ceph's handles may be used on several threads at once.
unsafe impl Sync for Image {}

/// State of a call in flight. Ceph holds the only pointer to it, and passes it to
/// `on_completion`.
struct Running {
    id: u64,
    buffer: Vec<u8>,
    to: Arc<Completions>,
    api: &'static Api,
    /// Offset at which a comparison has found a difference. Ceph writes it.
    mismatch: u64,
}

/// Callback for a change of the image. One of Ceph's threads calls it.
extern "C" fn changed(argument: *mut c_void) {
    // SAFETY: `argument` is the flag of an image. The flag exists as long as the image is open, and
    // the watch is removed before the image is closed.
    unsafe { &*argument.cast::<AtomicBool>() }.store(true, Ordering::Release);
    notify_resize();
}

/// Callback for a completed call. One of Ceph's threads calls it.
extern "C" fn on_completion(completion: Handle, argument: *mut c_void) {
    // SAFETY: `argument` is the box from `Image::start`. Ceph passes it back once.
    let running = unsafe { Box::from_raw(argument.cast::<Running>()) };
    let Running { id, buffer, to, api, .. } = *running;
    // SAFETY: the completion has completed, and is released once.
    let value = unsafe {
        let value = (api.rbd_aio_get_return_value)(completion);
        (api.rbd_aio_release)(completion);
        value
    };
    to.push(CallResult { id, value: value as i64, buffer });
}

fn c_text(text: impl AsRef<[u8]>) -> CString {
    // The conversion cannot fail, because a specification contains no NUL.
    CString::new(text.as_ref()).unwrap_or_default()
}

fn check(what: &'static str, value: c_int) -> Result<(), Failure> {
    if value < 0 {
        return Err(Failure::Call(what, io::Error::from_raw_os_error(-value)));
    }
    Ok(())
}

impl Image {
    /// Adds the clients `dead` to the cluster's blocklist, then opens the image. Blocks until the
    /// cluster answers. `caches` permits librbd's cache in the memory of this process, but settings
    /// of the cluster have priority over it: see [`cache`](Self::cache).
    pub(crate) fn open(spec: &RbdSpec, dead: &[String], caches: bool) -> Result<Self, Failure> {
        let api = api().map_err(Failure::Library)?;
        let mut image = Self {
            api,
            cluster: null_mut(),
            pool: null_mut(),
            image: null_mut(),
            watch: None,
            has_changed: Arc::default(),
            counted: Counted::new(),
        };
        let id = c_text(&spec.id);
        // SAFETY: pointers refer to values that live until the call returns, and handles are those
        // that Ceph has returned; a handle that Ceph has not returned is not used.
        let made = unsafe { (api.rados_create)(&mut image.cluster, id.as_ptr()) };
        check("creating a client of the cluster", made)?;
        let conf = spec.conf.as_ref().map(|path| c_text(path.as_os_str().as_bytes()));
        let conf = conf.as_ref().map_or(std::ptr::null(), |path| path.as_ptr());
        // SAFETY: the pointers and handles are valid, as for `rados_create`.
        check("reading the cluster's configuration (`conf=FILE`)", unsafe {
            (api.rados_conf_read_file)(image.cluster, conf)
        })?;
        for (name, value) in SETTINGS.into_iter().chain((!caches).then_some(NO_CACHE)) {
            image.set(name, value);
        }
        image.set_senders();
        // SAFETY: the pointers and handles are valid, as for `rados_create`.
        check(CONNECTING, unsafe { (api.rados_connect)(image.cluster) })?;
        image.blocklist(dead)?;
        let pool = c_text(&spec.pool);
        // SAFETY: the pointers and handles are valid, as for `rados_create`.
        check("opening the pool", unsafe {
            (api.rados_ioctx_create)(image.cluster, pool.as_ptr(), &mut image.pool)
        })?;
        if !caches {
            // Without a cache, a write for which there is no space fails instead of waiting. With a
            // cache, the write has already completed when the cluster refuses it, so it must wait.
            // SAFETY: the pointers and handles are valid, as for `rados_create`.
            unsafe { (api.rados_set_pool_full_try)(image.pool) };
        }
        if let Some(namespace) = &spec.namespace {
            let namespace = c_text(namespace);
            // SAFETY: the pointers and handles are valid, as for `rados_create`.
            unsafe { (api.rados_ioctx_set_namespace)(image.pool, namespace.as_ptr()) };
        }
        let name = c_text(&spec.image);
        let snapshot = spec.snapshot.as_ref().map(c_text);
        let snapshot = snapshot.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
        let open = if spec.read_only { api.rbd_open_read_only } else { api.rbd_open };
        // SAFETY: the pointers and handles are valid, as for `rados_create`.
        check("opening the image", unsafe {
            open(image.pool, name.as_ptr(), &mut image.image, snapshot)
        })?;
        let (mut watch, flag) = (0, Arc::as_ptr(&image.has_changed).cast_mut().cast());
        // SAFETY: the pointers and handles are valid; the flag lives until the watch is removed
        // (`drop`).
        let value = unsafe { (api.rbd_update_watch)(image.image, &mut watch, changed, flag) };
        // If the registration failed, a new size is detected only when the size is queried.
        image.watch = (value >= 0).then_some(watch);
        Ok(image)
    }

    /// Sets an option of the client. If the library does not know the option, the call has no
    /// effect.
    fn set(&self, name: &str, value: &str) {
        let (name, value) = (c_text(name), c_text(value));
        // SAFETY: the handle is open, and the texts live until the call returns.
        unsafe { (self.api.rados_conf_set)(self.cluster, name.as_ptr(), value.as_ptr()) };
    }

    /// Limits the number of Ceph's network threads to half of the CPUs, because replies that arrive
    /// at the same time would wake all of these threads. A number that the user has configured is
    /// not changed.
    fn set_senders(&self) {
        let (name, usual) = SENDERS;
        let (option, mut value) = (c_text(name), [0; 16]);
        // SAFETY: the handle is open. Ceph writes at most `room` bytes, with a final NUL.
        let known = unsafe {
            let room = value.len();
            (self.api.rados_conf_get)(self.cluster, option.as_ptr(), value.as_mut_ptr(), room)
        };
        // SAFETY: the array contains a text with a final NUL, or only zeroes.
        let value = unsafe { CStr::from_ptr(value.as_ptr()) }.to_bytes();
        let processors = std::thread::available_parallelism().map_or(usual, Into::into);
        let senders = (processors / 2).clamp(1, usual);
        if known >= 0 && value == usual.to_string().as_bytes() && senders < usual {
            self.set(name, &senders.to_string());
        }
    }

    /// Adds clients to the cluster's blocklist, with the default expiry. Then waits until this
    /// client has the OSD map with these entries.
    fn blocklist(&self, dead: &[String]) -> Result<(), Failure> {
        for client in dead {
            let address = c_text(client);
            // SAFETY: the handle is open, and the text is only read.
            check("adding the dead client to the blocklist", unsafe {
                (self.api.rados_blocklist_add)(self.cluster, address.as_ptr().cast_mut(), 0)
            })?;
        }
        if dead.is_empty() {
            return Ok(());
        }
        // SAFETY: the handle is open.
        let known = unsafe { (self.api.rados_wait_for_latest_osdmap)(self.cluster) };
        check("waiting for the map with the blocklist", known)
    }

    /// Addresses, in Ceph's format, by which the cluster identifies this client.
    pub(crate) fn addresses(&self) -> io::Result<String> {
        let mut text = null_mut();
        // SAFETY: the client is connected, and the argument refers to a pointer that is filled in.
        let value = unsafe { (self.api.rados_getaddrs)(self.cluster, &mut text) };
        if value < 0 || text.is_null() {
            return Err(io::Error::from_raw_os_error(if value < 0 { -value } else { libc::EIO }));
        }
        // SAFETY: Ceph has allocated the text, and the caller has to free it.
        unsafe {
            let addresses = CStr::from_ptr(text).to_string_lossy().into_owned();
            libc::free(text.cast());
            Ok(addresses)
        }
    }

    /// Current size of the image in bytes.
    pub(crate) fn size(&self) -> io::Result<u64> {
        let mut size = 0;
        // SAFETY: the image is open, and the argument refers to a number.
        match unsafe { (self.api.rbd_get_size)(self.image, &mut size) } {
            0.. => Ok(size),
            error => Err(io::Error::from_raw_os_error(-error)),
        }
    }

    /// Records that the size may have changed, as the callback `changed` does.
    pub(crate) fn set_changed(&self) {
        self.has_changed.store(true, Ordering::Release);
        notify_resize();
    }

    /// Returns true if the size may have changed since the last call.
    pub(crate) fn take_changed(&self) -> bool {
        self.has_changed.load(Ordering::Relaxed) && self.has_changed.swap(false, Ordering::Acquire)
    }

    /// Kind of cache that is in use. It may differ from this client's configuration, because
    /// settings of the pool or of the image in the cluster have priority.
    pub(crate) fn cache(&self) -> Cache {
        let is = |name, value| self.setting(name).as_deref() == Some(value);
        // A persistent cache in local files does not support FUA.
        let in_files = self.setting("rbd_persistent_cache_mode");
        match in_files.is_some_and(|mode| mode != "disabled") {
            true => Cache::Other,
            false if is("rbd_cache", "false") => Cache::None,
            false if is("rbd_cache_policy", "writearound") => Cache::Around,
            false => Cache::Other,
        }
    }

    /// Effective value of an option of the image.
    fn setting(&self, name: &str) -> Option<String> {
        let mut count = 0;
        // SAFETY: the image is open; without an array, Ceph returns the required length.
        unsafe { (self.api.rbd_config_image_list)(self.image, null_mut(), &mut count) };
        let mut settings: Vec<Setting> = Vec::with_capacity(usize::try_from(count).ok()?);
        // SAFETY: the array has room for `count` entries.
        let value = unsafe {
            (self.api.rbd_config_image_list)(self.image, settings.as_mut_ptr(), &mut count)
        };
        if value < 0 {
            return None;
        }
        // SAFETY: Ceph has filled in `count` entries, which is within the capacity. Each entry has
        // two texts, which are read here and freed once.
        unsafe {
            settings.set_len(usize::try_from(count).ok()?);
            let text = |text| CStr::from_ptr(text).to_string_lossy().into_owned();
            let one =
                settings.iter().find(|one| CStr::from_ptr(one.name).to_bytes() == name.as_bytes());
            let found = one.map(|one| text(one.value));
            (self.api.rbd_config_image_list_cleanup)(settings.as_mut_ptr(), count);
            found
        }
    }

    /// Stripe unit: number of bytes that are contiguous in an object.
    pub(crate) fn stripe_unit(&self) -> u64 {
        let mut unit = 0;
        // SAFETY: the image is open, and the argument refers to a number.
        unsafe { (self.api.rbd_get_stripe_unit)(self.image, &mut unit) };
        unit
    }

    /// Marks the image as being closed, before a separate thread drops it. The exit callback waits
    /// for marked images.
    pub(crate) fn closes(&mut self) {
        self.counted.closes();
    }

    /// Starts a call without blocking. Its completion, with this `id`, is added to `to`.
    pub(crate) fn start(
        &self,
        id: u64,
        call: &Call,
        offset: u64,
        buffer: Vec<u8>,
        to: &Arc<Completions>,
    ) {
        let api = self.api;
        let running = Box::new(Running { id, buffer, to: Arc::clone(to), api, mismatch: 0 });
        let running = Box::into_raw(running);
        let mut completion = null_mut();
        // SAFETY: `running` is a box. `on_completion` frees it, or the code below does if Ceph does
        // not accept the call. The buffer in it does not move until then.
        let value = unsafe {
            match (api.rbd_aio_create_completion)(running.cast(), on_completion, &mut completion) {
                0.. => {
                    let len = (*running).buffer.len();
                    let bytes = (*running).buffer.as_mut_ptr().cast::<c_char>();
                    let image = self.image;
                    let value = match *call {
                        Call::Read => (api.rbd_aio_read)(image, offset, len, bytes, completion),
                        Call::Write { fua } => {
                            let flags = if fua { FUA } else { 0 };
                            (api.rbd_aio_write2)(image, offset, len, bytes, completion, flags)
                        }
                        Call::Zero { len, is_thick } => {
                            let flags = if is_thick { THICK } else { 0 };
                            (api.rbd_aio_write_zeroes)(image, offset, len, completion, flags, 0)
                        }
                        Call::Flush => (api.rbd_aio_flush)(image, completion),
                        Call::CompareAndWrite => {
                            let (len, mismatch) = (len / 2, &raw mut (*running).mismatch);
                            // The call returns at most the length of a buffer, so the cast loses
                            // nothing.
                            (api.rbd_aio_compare_and_write)(
                                image,
                                offset,
                                len,
                                bytes,
                                bytes.add(len),
                                completion,
                                mismatch,
                                0,
                            ) as c_int
                        }
                    };
                    if value < 0 {
                        (api.rbd_aio_release)(completion);
                    }
                    value
                }
                error => error,
            }
        };
        if value < 0 {
            // SAFETY: Ceph has not accepted the box.
            let Running { id, buffer, to, .. } = *unsafe { Box::from_raw(running) };
            to.push(CallResult { id, value: value.into(), buffer });
        }
    }
}

impl Drop for Image {
    /// Waits for calls in flight, and releases the image's lock.
    fn drop(&mut self) {
        // SAFETY: each handle was returned by Ceph, and is released once, in this order.
        unsafe {
            if !self.image.is_null() {
                if let Some(watch) = self.watch {
                    // Unregistering waits until a running call of `changed` has returned.
                    (self.api.rbd_update_unwatch)(self.image, watch);
                }
                (self.api.rbd_close)(self.image);
            }
            if !self.pool.is_null() {
                (self.api.rados_ioctx_destroy)(self.pool);
            }
            if !self.cluster.is_null() {
                (self.api.rados_shutdown)(self.cluster);
            }
        }
    }
}
