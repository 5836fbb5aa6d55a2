//! NBD server for tests, with configurable behaviour. A kill of the server loses the unflushed
//! data.
#![allow(dead_code, reason = "each test binary uses its part")]

use parking_lot::{Condvar, Mutex};
use shadowbell_disk_nbd::{NbdDisk, NbdSpec, OpenError};
use shadowbell_nbd::reply::Head;
use shadowbell_nbd::wire::{
    MAGIC, NbdError, OPTION_MAGIC, Reader, Request, answer, command, flag, handshake, info, option,
    put_answer, transmission,
};
use shadowbell_testing::wait::LIMIT;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use tempfile::TempDir;

pub(crate) const ALL: u16 = transmission::HAS_FLAGS
    | transmission::SEND_FLUSH
    | transmission::SEND_FUA
    | transmission::SEND_TRIM
    | transmission::SEND_WRITE_ZEROES
    | transmission::CAN_MULTI_CONN;

/// Function that returns bytes to send in place of a reply, or `None` for the correct reply.
pub(crate) type Violation = fn(&Request) -> Option<Vec<u8>>;

/// Behaviour of the server.
#[derive(Clone, Default)]
pub(crate) struct Manner {
    pub(crate) flags: u16,
    pub(crate) structured: bool,
    pub(crate) violation: Option<Violation>,
    /// Error code for each command that has to fail.
    pub(crate) errors: BTreeMap<u16, u32>,
    /// True if the server receives all requests, but neither executes nor answers them.
    pub(crate) condition: bool,
    /// Function that returns true for a request that the server must receive but neither execute
    /// nor answer.
    pub(crate) holds: Option<fn(&Request) -> bool>,
    /// Number of requests after which a connection ends.
    pub(crate) hangs_up_after: Option<u64>,
    /// True if the server refuses requests with ESHUTDOWN, as a server that is about to end.
    pub(crate) is_ending: bool,
    /// Command whose next request fails, once, and the error code.
    pub(crate) refused_once: Option<(u16, NbdError)>,
    /// Minimum and maximum size of requests in bytes.
    pub(crate) sizes: Option<(u32, u32)>,
}

struct Store {
    /// Data that remain after a kill of the server.
    durable: Vec<u8>,
    /// Current data, which reads return.
    cache: Vec<u8>,
    epoch: u64,
    manner: Manner,
    /// Number of executed requests, by command.
    counts: BTreeMap<u16, u64>,
    /// Number of received requests.
    received: u64,
    sockets: Vec<UnixStream>,
    /// Number of negotiated connections.
    connections: u64,
    /// Number of negotiated connections that have not ended.
    open: usize,
}

struct State {
    store: Mutex<Store>,
    changed: Condvar,
}

pub(crate) struct Fake {
    state: Arc<State>,
    directory: TempDir,
    listener: Option<(UnixListener, JoinHandle<()>)>,
}

impl Fake {
    pub(crate) fn new(size: usize, flags: u16) -> Self {
        let manner = Manner { flags, structured: true, ..Manner::default() };
        let state = State {
            store: Mutex::new(Store {
                durable: vec![0; size],
                cache: vec![0; size],
                epoch: 0,
                manner,
                counts: BTreeMap::new(),
                received: 0,
                sockets: Vec::new(),
                connections: 0,
                open: 0,
            }),
            changed: Condvar::new(),
        };
        let directory = tempfile::tempdir().unwrap();
        let mut fake = Self { state: Arc::new(state), directory, listener: None };
        fake.start();
        fake
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("nbd")
    }

    /// Opens the export with these options.
    pub(crate) fn try_open(&self, options: &str) -> Result<NbdDisk, OpenError> {
        let more = if options.is_empty() { "" } else { "&" };
        let spec = format!("nbd+unix:///x?socket={}{more}{options}", self.socket().display());
        NbdDisk::open(&NbdSpec::parse(&spec)?)
    }

    pub(crate) fn open(&self, options: &str) -> NbdDisk {
        self.try_open(options).unwrap()
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut Manner)) {
        change(&mut self.state.store.lock().manner);
        self.state.changed.notify_all();
    }

    pub(crate) fn count(&self, command: u16) -> u64 {
        self.state.store.lock().counts.get(&command).copied().unwrap_or(0)
    }

    /// Number of received requests, executed or not.
    pub(crate) fn received(&self) -> u64 {
        self.state.store.lock().received
    }

    pub(crate) fn connections(&self) -> u64 {
        self.state.store.lock().connections
    }

    /// Waits until `condition` returns true for the numbers of executed requests by command.
    pub(crate) fn wait(&self, condition: impl Fn(&BTreeMap<u16, u64>) -> bool) {
        let mut store = self.state.store.lock();
        while !condition(&store.counts) {
            assert!(!self.state.changed.wait_for(&mut store, LIMIT).timed_out());
        }
    }

    pub(crate) fn durable(&self) -> Vec<u8> {
        self.state.store.lock().durable.clone()
    }

    pub(crate) fn cache(&self) -> Vec<u8> {
        self.state.store.lock().cache.clone()
    }

    /// Kills the server. Unflushed data are lost.
    pub(crate) fn kill(&mut self) {
        let Some((listener, thread)) = self.listener.take() else { return };
        let mut store = self.state.store.lock();
        store.epoch += 1;
        store.cache = store.durable.clone();
        store.sockets.drain(..).for_each(|socket| drop(socket.shutdown(Shutdown::Both)));
        drop(store);
        self.state.changed.notify_all();
        // The socket file is removed, so that new connections fail. The shutdown of the listening
        // socket makes `accept` return.
        let _ = std::fs::remove_file(self.socket());
        let _ = rustix::net::shutdown(&listener, rustix::net::Shutdown::Both);
        drop(thread.join());
    }

    /// Ends one connection. The server continues to serve the others.
    pub(crate) fn disconnect(&self, connection: usize) {
        let store = self.state.store.lock();
        let _ = store.sockets[connection].shutdown(Shutdown::Both);
    }

    /// Ends the server in order, as on SIGTERM: it accepts no connection, refuses requests, and
    /// runs until its clients have disconnected. The export's data remain.
    pub(crate) fn end_in_order(&mut self) {
        self.change(|manner| manner.is_ending = true);
        let Some((listener, thread)) = self.listener.take() else { return };
        let _ = std::fs::remove_file(self.socket());
        let _ = rustix::net::shutdown(&listener, rustix::net::Shutdown::Both);
        drop(thread.join());
    }

    /// Number of connections that have not ended.
    pub(crate) fn open_connections(&self) -> usize {
        self.state.store.lock().open
    }

    pub(crate) fn resize(&self, size: usize) {
        let mut store = self.state.store.lock();
        store.durable.resize(size, 0);
        store.cache.resize(size, 0);
    }

    pub(crate) fn start(&mut self) {
        let listener = UnixListener::bind(self.socket()).unwrap();
        let (state, own) = (Arc::clone(&self.state), listener.try_clone().unwrap());
        let epoch = state.store.lock().epoch;
        let thread = std::thread::spawn(move || {
            while let Ok((socket, _)) = own.accept() {
                let state = Arc::clone(&state);
                let mut store = state.store.lock();
                if store.epoch != epoch {
                    return;
                }
                store.sockets.push(socket.try_clone().unwrap());
                drop(store);
                // The server ignores errors of a connection: the client under test has to handle
                // them.
                std::thread::spawn(move || drop(serve(socket, &state, epoch)));
            }
        });
        self.listener = Some((listener, thread));
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.kill();
    }
}

fn disconnected() -> io::Error {
    io::ErrorKind::ConnectionReset.into()
}

fn serve(mut socket: UnixStream, state: &State, epoch: u64) -> io::Result<()> {
    let mut out = MAGIC.to_be_bytes().to_vec();
    out.extend(OPTION_MAGIC.to_be_bytes());
    out.extend((handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).to_be_bytes());
    socket.write_all(&out)?;
    socket.read_exact(&mut [0; 4])?;
    let mut structured = false;
    loop {
        let mut head = [0; 16];
        socket.read_exact(&mut head)?;
        let mut reader = Reader(&head[8..]);
        let (kind, len) = (reader.u32().unwrap(), reader.u32().unwrap());
        let mut data = vec![0; len as usize];
        socket.read_exact(&mut data)?;
        let mut out = Vec::new();
        let store = state.store.lock();
        match kind {
            option::STRUCTURED_REPLY if store.manner.structured => {
                structured = true;
                put_answer(&mut out, kind, answer::ACK, &[]);
            }
            option::GO | option::INFO => {
                let mut export = info::EXPORT.to_be_bytes().to_vec();
                export.extend((store.cache.len() as u64).to_be_bytes());
                export.extend(store.manner.flags.to_be_bytes());
                put_answer(&mut out, kind, answer::INFO, &export);
                if let Some((least, most)) = store.manner.sizes {
                    let mut sizes = info::BLOCK_SIZE.to_be_bytes().to_vec();
                    [least, least.max(4096), most]
                        .iter()
                        .for_each(|size: &u32| sizes.extend(size.to_be_bytes()));
                    put_answer(&mut out, kind, answer::INFO, &sizes);
                }
                put_answer(&mut out, kind, answer::ACK, &[]);
            }
            _ => put_answer(&mut out, kind, answer::ERR_UNSUP, &[]),
        }
        drop(store);
        socket.write_all(&out)?;
        if kind == option::GO {
            break;
        }
    }
    let mut store = state.store.lock();
    store.connections += 1;
    store.open += 1;
    drop(store);
    state.changed.notify_all();
    let outcome = transmit(&mut socket, state, epoch, structured);
    state.store.lock().open -= 1;
    state.changed.notify_all();
    outcome
}

/// Serves the requests of a connection until it ends.
fn transmit(
    socket: &mut UnixStream,
    state: &State,
    epoch: u64,
    structured: bool,
) -> io::Result<()> {
    let mut served = 0;
    loop {
        let mut head = [0; Request::SIZE];
        socket.read_exact(&mut head)?;
        let request = Request::decode(&head).unwrap();
        let mut data = vec![0; request.payload() as usize];
        socket.read_exact(&mut data)?;
        let mut store = state.store.lock();
        store.received += 1;
        while (store.manner.condition || store.manner.holds.is_some_and(|holds| holds(&request)))
            && store.epoch == epoch
        {
            state.changed.wait(&mut store);
        }
        if store.epoch != epoch {
            return Err(disconnected());
        }
        if let Some(violation) = store.manner.violation
            && let Some(violation) = violation(&request)
        {
            drop(store);
            socket.write_all(&violation)?;
            continue;
        }
        if request.command == command::DISC {
            *store.counts.entry(request.command).or_default() += 1;
            return Ok(());
        }
        let is_refused = |(refused, _): &mut (u16, NbdError)| *refused == request.command;
        let error = match store.manner.refused_once.take_if(is_refused) {
            Some((_, error)) => error as u32,
            None if store.manner.is_ending => NbdError::Shutdown as u32,
            None => execute(&mut store, &request, &data),
        };
        *store.counts.entry(request.command).or_default() += 1;
        served += 1;
        if store.manner.hangs_up_after == Some(served) {
            // The request was executed. The server closes the connection before it replies.
            state.changed.notify_all();
            return socket.shutdown(Shutdown::Both);
        }
        let cookie = request.cookie;
        let range = request.offset as usize..request.offset as usize + request.len as usize;
        let out = match (error, request.command) {
            (0, command::READ) => {
                let data = store.cache.get(range).unwrap_or_default();
                let head = if structured {
                    Head::data(cookie, request.offset, request.len, true)
                } else {
                    Head::simple(cookie, Ok(()))
                };
                [head.bytes(), data].concat()
            }
            (0, _) if structured => Head::done(cookie).bytes().to_vec(),
            (0, _) => Head::simple(cookie, Ok(())).bytes().to_vec(),
            (error, _) => {
                // Replies with any error number, including numbers that the protocol does not
                // define.
                let mut out = Head::simple(cookie, Ok(())).bytes().to_vec();
                if structured {
                    out = Head::error(cookie, NbdError::Io, "no").bytes().to_vec();
                    out[20..24].copy_from_slice(&error.to_be_bytes());
                } else {
                    out[4..8].copy_from_slice(&error.to_be_bytes());
                }
                out
            }
        };
        drop(store);
        state.changed.notify_all();
        socket.write_all(&out)?;
    }
}

fn execute(store: &mut Store, request: &Request, data: &[u8]) -> u32 {
    if let Some(error) = store.manner.errors.get(&request.command) {
        return *error;
    }
    let start = request.offset as usize;
    let range = start..start + request.len as usize;
    if range.end > store.cache.len() {
        return 22;
    }
    match request.command {
        command::WRITE => store.cache[range.clone()].copy_from_slice(data),
        command::WRITE_ZEROES | command::TRIM => store.cache[range.clone()].fill(0),
        command::FLUSH => store.durable = store.cache.clone(),
        command::READ => {}
        _ => return 22,
    }
    if request.flags & flag::FUA != 0 {
        let fresh = store.cache[range.clone()].to_vec();
        store.durable[range].copy_from_slice(&fresh);
    }
    0
}
