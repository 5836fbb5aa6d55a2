//! Minimal NBD client based on the crate's codec.

use shadowbell_block::BlockDevice;
use shadowbell_export::nbd::handshake::Handshake;
use shadowbell_export::nbd::reply::{Chunk, Incoming};
use shadowbell_export::nbd::wire::{
    Reader, Request, answer, chunk, option, put_option, put_string,
};
use shadowbell_export::nbd::{Address, Listener, Options, Server};
use shadowbell_testing::wait::LIMIT;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

/// Serves `disk` at the UNIX socket `path`.
pub(crate) fn serve(disk: BlockDevice, path: &Path, options: &Options) -> Server {
    let listener = Listener::Unix(shadowbell_vfio_user::Listener::bind(path).unwrap());
    Server::start(disk, listener, Address::Unix(path.to_owned()), options).unwrap()
}

/// Result of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Reply {
    pub(crate) cookie: u64,
    pub(crate) error: u32,
    pub(crate) data: Vec<u8>,
    /// Block status extents: length and flags.
    pub(crate) extents: Vec<(u32, u32)>,
}

pub(crate) struct Client {
    pub(crate) socket: UnixStream,
    /// Lengths of the reads in flight, which simple replies do not contain.
    reads: std::collections::BTreeMap<u64, u32>,
    cookie: u64,
    pub(crate) size: u64,
    pub(crate) flags: u16,
}

impl Client {
    /// Connects and reads the greeting, without negotiating any option.
    pub(crate) fn greeted(path: &Path) -> Self {
        let socket = UnixStream::connect(path).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        let mut client = Self { socket, reads: Default::default(), cookie: 0, size: 0, flags: 0 };
        let expected = Handshake::greeting();
        assert_eq!(client.bytes(expected.len()), expected);
        client.socket.write_all(&3u32.to_be_bytes()).unwrap();
        client
    }

    /// Connects, and negotiates until the transmission phase.
    pub(crate) fn connect(path: &Path, structured: bool) -> Self {
        let mut client = Self::greeted(path);
        if structured {
            assert_eq!(client.option(option::STRUCTURED_REPLY, b""), [(answer::ACK, vec![])]);
            let mut contexts = Vec::new();
            put_string(&mut contexts, "");
            contexts.extend(1u32.to_be_bytes());
            put_string(&mut contexts, "base:allocation");
            assert_eq!(client.option(option::SET_META_CONTEXT, &contexts).len(), 2);
        }
        let answers = client.option(option::GO, &[0; 6]);
        let mut reader = Reader(&answers[0].1);
        assert_eq!(reader.u16(), Some(0));
        client.size = reader.u64().unwrap();
        client.flags = reader.u16().unwrap();
        assert_eq!(answers.last().unwrap().0, answer::ACK);
        client
    }

    pub(crate) fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.socket.read_exact(&mut bytes).unwrap();
        bytes
    }

    /// Sends an option, and receives all replies to it.
    pub(crate) fn option(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        let mut bytes = Vec::new();
        put_option(&mut bytes, option, data);
        self.socket.write_all(&bytes).unwrap();
        let mut answers = Vec::new();
        loop {
            let head = self.bytes(20);
            let mut reader = Reader(&head[8..]);
            assert_eq!(reader.u32(), Some(option));
            let (kind, len) = (reader.u32().unwrap(), reader.u32().unwrap());
            answers.push((kind, self.bytes(len as usize)));
            if kind == answer::ACK || kind & answer::ERROR != 0 {
                return answers;
            }
        }
    }

    /// Sends a request. Returns its cookie.
    pub(crate) fn ask(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        len: u32,
        data: &[u8],
    ) -> u64 {
        self.cookie += 1;
        let request = Request { flags, command, cookie: self.cookie, offset, len };
        if command == 0 {
            self.reads.insert(self.cookie, len);
        }
        self.socket.write_all(&request.encode()).unwrap();
        self.socket.write_all(data).unwrap();
        self.cookie
    }

    /// Receives the next reply, which may belong to any request.
    pub(crate) fn reply(&mut self) -> Reply {
        let mut head = self.bytes(16);
        if Incoming::decode(&head).unwrap().is_none() {
            head.extend(self.bytes(4));
        }
        match Incoming::decode(&head).unwrap().unwrap().0 {
            Incoming::Simple { cookie, error } => {
                let len = self.reads.remove(&cookie).filter(|_| error == 0).unwrap_or(0);
                Reply { cookie, error, data: self.bytes(len as usize), extents: Vec::new() }
            }
            Incoming::Chunk(head) => {
                let cookie = head.cookie;
                if head.flags != chunk::FLAG_DONE {
                    return self.piece(head);
                }
                let payload = self.bytes(head.len as usize);
                let mut reader = Reader(&payload);
                let mut reply = Reply { cookie, error: 0, data: Vec::new(), extents: Vec::new() };
                match head.kind {
                    chunk::NONE => assert!(payload.is_empty()),
                    chunk::OFFSET_DATA => {
                        reader.u64().unwrap();
                        reply.data = reader.0.to_vec();
                    }
                    chunk::BLOCK_STATUS => {
                        assert_eq!(reader.u32(), Some(1));
                        while let (Some(len), Some(flags)) = (reader.u32(), reader.u32()) {
                            reply.extents.push((len, flags));
                        }
                    }
                    chunk::ERROR => {
                        reply.error = reader.u32().unwrap();
                        assert_eq!(reader.u16().unwrap() as usize, reader.0.len());
                        assert!(!reader.0.is_empty(), "an error without a message");
                    }
                    other => panic!("a chunk of type {other}"),
                }
                Reply { ..reply }
            }
        }
    }

    /// Receives the other chunks of a read reply after its first chunk. No other request may be in
    /// flight.
    fn piece(&mut self, mut head: Chunk) -> Reply {
        let cookie = head.cookie;
        let mut reply = Reply { cookie, error: 0, data: Vec::new(), extents: Vec::new() };
        let first = u64::from_be_bytes(self.bytes(8).try_into().unwrap());
        let mut at = first;
        loop {
            let len = head.len - 8;
            assert_eq!(at, first + reply.data.len() as u64);
            reply.data.extend(self.bytes(len as usize));
            if head.flags & chunk::FLAG_DONE != 0 {
                return reply;
            }
            let bytes = self.bytes(20);
            let Some((Incoming::Chunk(next), _)) = Incoming::decode(&bytes).unwrap() else {
                panic!("no chunk");
            };
            assert_eq!(next.cookie, cookie);
            if next.kind == chunk::ERROR {
                let payload = self.bytes(next.len as usize);
                reply.error = u32::from_be_bytes(payload[..4].try_into().unwrap());
                return reply;
            }
            assert_eq!(next.kind, chunk::OFFSET_DATA);
            head = next;
            at = u64::from_be_bytes(self.bytes(8).try_into().unwrap());
        }
    }

    /// Sends a request and receives its reply.
    pub(crate) fn run(
        &mut self,
        command: u16,
        flags: u16,
        offset: u64,
        len: u32,
        data: &[u8],
    ) -> Reply {
        let cookie = self.ask(command, flags, offset, len, data);
        let reply = self.reply();
        assert_eq!(reply.cookie, cookie);
        reply
    }

    /// Returns true if the server has closed the connection.
    pub(crate) fn is_over(&mut self) -> bool {
        match self.socket.read(&mut [0; 64]) {
            Ok(0) => true,
            Ok(_) => false,
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
                true
            }
        }
    }
}
