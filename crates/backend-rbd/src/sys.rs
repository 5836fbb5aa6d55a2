//! librados and librbd, loaded when the first image is opened, and an image as a safe type.

use crate::completions::{Completions, Ended};
use crate::error::CONNECTING;
use crate::exit::{self, Counted};
use crate::uri::RbdSpec;
use libloading::Library;
use shadowbell_backend::tell_new_size;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// How long a cluster may take to answer when an image is opened, in seconds.
const MOUNT_TIMEOUT: &str = "15";
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`
const THICK: c_int = 1;

/// The settings of each client.
const SETTINGS: [(&str, &str); 5] = [
    ("client_mount_timeout", MOUNT_TIMEOUT),
    // A call is begun by the thread that makes it: a hand-over between threads less for each.
    ("rbd_non_blocking_aio", "false"),
    // With a limit on what is under way, a call that is beyond it waits: with the line above, a
    // worker, and for as long as the cluster does not answer. Our own limits are a queue's buffers.
    ("objecter_inflight_ops", "0"),
    ("objecter_inflight_op_bytes", "0"),
    // NVMe hosts know of a volatile write cache, and flush it.
    ("rbd_cache_writethrough_until_flush", "false"),
];
/// That of a client whose writes are answered when they are in the cluster.
const NO_CACHE: (&str, &str) = ("rbd_cache", "false");

/// Threads of a client that send and receive, and how many it has if nobody says otherwise.
const SENDERS: (&str, usize) = ("ms_async_op_threads", 3);
/// `LIBRADOS_OP_FLAG_FADVISE_FUA`
const FUA: c_int = 0x80;

type Handle = *mut c_void;
type Callback = extern "C" fn(Handle, *mut c_void);
type Changed = extern "C" fn(*mut c_void);

/// `rbd_config_option_t`: a setting of an image, as it is in use.
#[repr(C)]
struct Setting {
    name: *mut c_char,
    value: *mut c_char,
    source: c_int,
}

macro_rules! api {
    ($($name:ident: fn($($arg:ty),*) -> $ret:ty, $library:ident;)*) => {
        /// The functions that are called, as the headers of Ceph 16 declare them.
        struct Api { $($name: unsafe extern "C" fn($($arg),*) -> $ret,)* }

        impl Api {
            fn load(rados: &Library, rbd: &Library) -> Result<Self, libloading::Error> {
                let libraries = Libraries { rados, rbd };
                Ok(Self { $(
                    // SAFETY: the signature is the header's.
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
    /// The C library's: `function` is called with the status when the process ends.
    fn on_exit(function: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
}

/// The process ends, by `exit` or the end of `main`.
extern "C" fn process_ends(status: c_int, _: *mut c_void) {
    if !exit::wait() {
        // SAFETY: it ends the process, and calls nothing more.
        unsafe { libc::_exit(status) }
    }
}

/// The libraries, loaded once and never let go of.
fn api() -> Result<&'static Api, String> {
    static API: OnceLock<Result<Api, String>> = OnceLock::new();
    let load = || {
        // SAFETY: Ceph's own libraries; what their initialisers do is no more than that of a
        // program that is linked to them.
        let (rados, rbd) =
            unsafe { (Library::new("librados.so.2")?, Library::new("librbd.so.1")?) };
        let api = Api::load(&rados, &rbd)?;
        // What was registered last is called first: before the libraries take themselves apart.
        // SAFETY: a function for that, which is there as long as the process.
        unsafe { on_exit(process_ends, null_mut()) };
        // Threads of theirs may outlive every image.
        std::mem::forget((rados, rbd));
        Ok(api)
    };
    let load = || load().map_err(|error: libloading::Error| error.to_string());
    API.get_or_init(load).as_ref().map_err(Clone::clone)
}

/// Why there is no image.
pub(crate) enum Failure {
    Library(String),
    Call(&'static str, io::Error),
}

/// What answers writes before they are in the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cache {
    None,
    /// `rbd_cache_policy=writearound`: Write and Compare and Write can go by it.
    Around,
    Other,
}

/// What is done with an image, from a byte on.
pub(crate) enum Call {
    /// As many bytes as the buffer has.
    Read,
    /// With `fua` it ends when it is in the cluster, if the cache [takes that](Cache::Around).
    Write {
        fua: bool,
    },
    /// So many bytes; whether they have to keep their place in the cluster.
    Zero {
        len: usize,
        is_thick: bool,
    },
    Flush,
    /// The first half of the buffer is compared, and the second written.
    CompareAndWrite,
}

/// An image that is open.
pub(crate) struct Image {
    api: &'static Api,
    cluster: Handle,
    pool: Handle,
    image: Handle,
    /// Ceph says by this that something else than the content has changed: the size, for one.
    watch: Option<u64>,
    /// It has said so. Ceph has the address of what is inside.
    has_changed: Arc<AtomicBool>,
    counted: Counted,
}

// SAFETY: Ceph's handles may be used from any thread, and from several at once.
unsafe impl Send for Image {}
// SAFETY: as above.
unsafe impl Sync for Image {}

/// What Ceph has while a call is under way.
struct Running {
    id: u64,
    buffer: Vec<u8>,
    to: Arc<Completions>,
    api: &'static Api,
    /// Where a comparison has found a difference; Ceph's.
    mismatch: u64,
}

/// Something of the image has changed; one of Ceph's threads says so.
extern "C" fn changed(argument: *mut c_void) {
    // SAFETY: `argument` is the flag of an image that is open until it is not watched any more.
    unsafe { &*argument.cast::<AtomicBool>() }.store(true, Ordering::Release);
    tell_new_size();
}

/// A call is over; one of Ceph's threads says so.
extern "C" fn done(completion: Handle, argument: *mut c_void) {
    // SAFETY: `argument` is what `Image::start` made of a box, and comes back once.
    let running = unsafe { Box::from_raw(argument.cast::<Running>()) };
    let Running { id, buffer, to, api, .. } = *running;
    // SAFETY: the completion is over, and is released once.
    let value = unsafe {
        let value = (api.rbd_aio_get_return_value)(completion);
        (api.rbd_aio_release)(completion);
        value
    };
    to.push(Ended { id, value: value as i64, buffer });
}

fn c_text(text: impl AsRef<[u8]>) -> CString {
    // A specification has no zero bytes.
    CString::new(text.as_ref()).unwrap_or_default()
}

fn check(what: &'static str, value: c_int) -> Result<(), Failure> {
    if value < 0 {
        return Err(Failure::Call(what, io::Error::from_raw_os_error(-value)));
    }
    Ok(())
}

impl Image {
    /// Opens the image, when the cluster keeps the clients `dead` out. It waits for the cluster.
    /// `caches` says whether a write may be answered from memory of this process; who has set up
    /// the cluster can [have that](Self::cache) nevertheless.
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
        // SAFETY: pointers are to what lives until the call is over, and handles are those that
        // Ceph gave; those that it did not give are not used.
        let made = unsafe { (api.rados_create)(&mut image.cluster, id.as_ptr()) };
        check("making a client of the cluster", made)?;
        let conf = spec.conf.as_ref().map(|path| c_text(path.as_os_str().as_bytes()));
        let conf = conf.as_ref().map_or(std::ptr::null(), |path| path.as_ptr());
        // SAFETY: as above.
        check("reading the cluster's configuration (`conf=FILE`)", unsafe {
            (api.rados_conf_read_file)(image.cluster, conf)
        })?;
        for (name, value) in SETTINGS.into_iter().chain((!caches).then_some(NO_CACHE)) {
            image.set(name, value);
        }
        image.set_senders();
        // SAFETY: as above.
        check(CONNECTING, unsafe { (api.rados_connect)(image.cluster) })?;
        image.keep_out(dead)?;
        let pool = c_text(&spec.pool);
        // SAFETY: as above.
        check("opening the pool", unsafe {
            (api.rados_ioctx_create)(image.cluster, pool.as_ptr(), &mut image.pool)
        })?;
        if !caches {
            // A write for which the cluster has no room fails, and does not wait for some. With a
            // cache it would be lost: it was answered before.
            // SAFETY: as above.
            unsafe { (api.rados_set_pool_full_try)(image.pool) };
        }
        if let Some(namespace) = &spec.namespace {
            let namespace = c_text(namespace);
            // SAFETY: as above.
            unsafe { (api.rados_ioctx_set_namespace)(image.pool, namespace.as_ptr()) };
        }
        let name = c_text(&spec.image);
        let snapshot = spec.snapshot.as_ref().map(c_text);
        let snapshot = snapshot.as_ref().map_or(std::ptr::null(), |name| name.as_ptr());
        let open = if spec.read_only { api.rbd_open_read_only } else { api.rbd_open };
        // SAFETY: as above.
        check("opening the image", unsafe {
            open(image.pool, name.as_ptr(), &mut image.image, snapshot)
        })?;
        let (mut watch, flag) = (0, Arc::as_ptr(&image.has_changed).cast_mut().cast());
        // SAFETY: as above; the flag stays until the watch is gone (`drop`).
        let value = unsafe { (api.rbd_update_watch)(image.image, &mut watch, changed, flag) };
        // Without one, changes are seen when somebody asks.
        image.watch = (value >= 0).then_some(watch);
        Ok(image)
    }

    /// Sets an option of the client. One that does not know it does what it does.
    fn set(&self, name: &str, value: &str) {
        let (name, value) = (c_text(name), c_text(value));
        // SAFETY: as in `open`.
        unsafe { (self.api.rados_conf_set)(self.cluster, name.as_ptr(), value.as_ptr()) };
    }

    /// No more threads that send and receive than half of the processors: with each more, answers
    /// that came together wake several. Who has set a number has that.
    fn set_senders(&self) {
        let (name, usual) = SENDERS;
        let (option, mut value) = (c_text(name), [0; 16]);
        // SAFETY: as in `open`; Ceph writes no more than it is told, with a zero at the end.
        let known = unsafe {
            let room = value.len();
            (self.api.rados_conf_get)(self.cluster, option.as_ptr(), value.as_mut_ptr(), room)
        };
        // SAFETY: text with a zero at the end, or zeroes.
        let value = unsafe { CStr::from_ptr(value.as_ptr()) }.to_bytes();
        let processors = std::thread::available_parallelism().map_or(usual, Into::into);
        let senders = (processors / 2).clamp(1, usual);
        if known >= 0 && value == usual.to_string().as_bytes() && senders < usual {
            self.set(name, &senders.to_string());
        }
    }

    /// Has the cluster take nothing of these clients any more, for as long as it does by itself.
    fn keep_out(&self, dead: &[String]) -> Result<(), Failure> {
        for client in dead {
            let address = c_text(client);
            // SAFETY: as in `open`; the text is read only.
            check("keeping the client before out of the cluster", unsafe {
                (self.api.rados_blocklist_add)(self.cluster, address.as_ptr().cast_mut(), 0)
            })?;
        }
        if dead.is_empty() {
            return Ok(());
        }
        // SAFETY: as in `open`.
        let known = unsafe { (self.api.rados_wait_for_latest_osdmap)(self.cluster) };
        check("waiting until the cluster knows of that", known)
    }

    /// By what the cluster knows this client, as Ceph writes it.
    pub(crate) fn addresses(&self) -> io::Result<String> {
        let mut text = null_mut();
        // SAFETY: the client is connected, and the pointer is to one that is filled in.
        let value = unsafe { (self.api.rados_getaddrs)(self.cluster, &mut text) };
        if value < 0 || text.is_null() {
            return Err(io::Error::from_raw_os_error(if value < 0 { -value } else { libc::EIO }));
        }
        // SAFETY: it is text that Ceph has made for us, to be freed by us.
        unsafe {
            let addresses = CStr::from_ptr(text).to_string_lossy().into_owned();
            libc::free(text.cast());
            Ok(addresses)
        }
    }

    /// Bytes of the image, as it is now.
    pub(crate) fn size(&self) -> io::Result<u64> {
        let mut size = 0;
        // SAFETY: the image is open, and the pointer is to a number.
        match unsafe { (self.api.rbd_get_size)(self.image, &mut size) } {
            0.. => Ok(size),
            error => Err(io::Error::from_raw_os_error(-error)),
        }
    }

    /// The size may have changed while nobody was told.
    pub(crate) fn set_changed(&self) {
        self.has_changed.store(true, Ordering::Release);
        tell_new_size();
    }

    /// Whether Ceph has said, since this was asked last, that the size may have changed.
    pub(crate) fn take_changed(&self) -> bool {
        self.has_changed.load(Ordering::Relaxed) && self.has_changed.swap(false, Ordering::Acquire)
    }

    /// The cache that is in use: what the cluster has set for the pool or the image is stronger
    /// than what we have asked for.
    pub(crate) fn cache(&self) -> Cache {
        let is = |name, value| self.setting(name).as_deref() == Some(value);
        // One that keeps writes in a file of this machine knows nothing of such flags.
        let in_files = self.setting("rbd_persistent_cache_mode");
        match in_files.is_some_and(|mode| mode != "disabled") {
            true => Cache::Other,
            false if is("rbd_cache", "false") => Cache::None,
            false if is("rbd_cache_policy", "writearound") => Cache::Around,
            false => Cache::Other,
        }
    }

    /// A setting of the image, as it is in use.
    fn setting(&self, name: &str) -> Option<String> {
        let mut count = 0;
        // SAFETY: the image is open; without room, Ceph says how much it takes.
        unsafe { (self.api.rbd_config_image_list)(self.image, null_mut(), &mut count) };
        let mut settings: Vec<Setting> = Vec::with_capacity(usize::try_from(count).ok()?);
        // SAFETY: there is room for so many.
        let value = unsafe {
            (self.api.rbd_config_image_list)(self.image, settings.as_mut_ptr(), &mut count)
        };
        if value < 0 {
            return None;
        }
        // SAFETY: Ceph has filled in `count` of them, no more than there is room for; each is two
        // texts, which are read here and given back once.
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

    /// Bytes that lie together in the cluster.
    pub(crate) fn stripe_unit(&self) -> u64 {
        let mut unit = 0;
        // SAFETY: as above.
        unsafe { (self.api.rbd_get_stripe_unit)(self.image, &mut unit) };
        unit
    }

    /// It is dropped soon, by a thread that nobody waits for.
    pub(crate) fn closes(&mut self) {
        self.counted.closes();
    }

    /// Starts a call, which ends as `id` in `to`. Does not wait.
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
        // SAFETY: `running` is a box that `done` takes, or the code below if Ceph does not take it.
        // Its buffer stays where it is until then.
        let value = unsafe {
            match (api.rbd_aio_create_completion)(running.cast(), done, &mut completion) {
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
                            // As long as a buffer can be, so no error is cut off.
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
            // SAFETY: Ceph has not taken it.
            let Running { id, buffer, to, .. } = *unsafe { Box::from_raw(running) };
            to.push(Ended { id, value: value.into(), buffer });
        }
    }
}

impl Drop for Image {
    /// Waits for what is under way, and lets go of the image's lock.
    fn drop(&mut self) {
        // SAFETY: each handle was given by Ceph, and is given back once, in this order.
        unsafe {
            if !self.image.is_null() {
                if let Some(watch) = self.watch {
                    // Waits for a call of `changed` that is under way.
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
