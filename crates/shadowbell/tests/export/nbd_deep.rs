//! NBD clients with many requests in flight, and clients with one request at a time.

use super::Export;
use shadowbell_testing::wait::LIMIT;
use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

const BLOCK: usize = 4096;
/// Queue depth of the client with many requests in flight.
const DEPTH: usize = 32;
const REQUESTS: usize = 1100;

struct Client(UnixStream);

impl Client {
    fn connect(socket: &Path) -> Self {
        let mut client = UnixStream::connect(socket).unwrap();
        client.set_read_timeout(Some(LIMIT)).unwrap();
        let mut greeting = [0; 18];
        client.read_exact(&mut greeting).unwrap();
        client.write_all(&3u32.to_be_bytes()).unwrap();
        client.write_all(b"IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
        client.read_exact(&mut [0; 10]).unwrap();
        Self(client)
    }

    /// Encodes a read (0) or a write (1) of a block; the cookie is the block number.
    fn request(command: u16, block: usize, data: &[u8]) -> Vec<u8> {
        let mut request = 0x2560_9513u32.to_be_bytes().to_vec();
        request.extend(0u16.to_be_bytes());
        request.extend(command.to_be_bytes());
        request.extend((block as u64).to_be_bytes());
        request.extend(((block * BLOCK) as u64).to_be_bytes());
        request.extend((BLOCK as u32).to_be_bytes());
        request.extend(data);
        request
    }

    /// Block number of the next reply.
    fn read_reply(&mut self) -> usize {
        let mut reply = [0; 16];
        self.0.read_exact(&mut reply).unwrap();
        assert_eq!((&reply[..4], &reply[4..8]), (&b"\x67\x44\x66\x98"[..], &[0; 4][..]));
        u64::from_be_bytes(reply[8..].try_into().unwrap()) as usize
    }

    /// Writes these blocks with at most `depth` requests in flight. Each block is filled with a
    /// byte that depends on its number and `salt`.
    fn write(&mut self, blocks: std::ops::Range<usize>, depth: usize, salt: usize) {
        let all: Vec<_> = blocks.collect();
        for some in all.chunks(depth) {
            let requests = some
                .iter()
                .flat_map(|block| Self::request(1, *block, &[fill(*block, salt); BLOCK]));
            self.0.write_all(&requests.collect::<Vec<u8>>()).unwrap();
            let mut answered: Vec<_> = some.iter().map(|_| self.read_reply()).collect();
            answered.sort_unstable();
            assert_eq!(answered, some);
        }
    }

    /// Reads these blocks with at most `depth` requests in flight, and checks their contents.
    fn check(&mut self, blocks: std::ops::Range<usize>, depth: usize, salt: usize) {
        let all: Vec<_> = blocks.collect();
        for some in all.chunks(depth) {
            let requests = some.iter().flat_map(|block| Self::request(0, *block, &[]));
            self.0.write_all(&requests.collect::<Vec<u8>>()).unwrap();
            let mut found = HashMap::new();
            for _ in some {
                let block = self.read_reply();
                let mut data = vec![0; BLOCK];
                self.0.read_exact(&mut data).unwrap();
                found.insert(block, data);
            }
            for block in some {
                assert_eq!(found[block], vec![fill(*block, salt); BLOCK], "block {block}");
            }
        }
    }
}

fn fill(block: usize, salt: usize) -> u8 {
    (block * 31 + salt * 7) as u8
}

/// A client with many requests in flight reads and writes: first alone, then beside another client
/// with many requests. Then the client reads with one request at a time, and again with many. At
/// the end, the server stops while a client is connected.
fn check_changing_clients(target: &str) {
    let export = Export::start(&[target, "--nbd", "unix:DIR/nbd"]);
    let socket = export.path("nbd");
    let mut client = Client::connect(&socket);
    client.write(0..REQUESTS, DEPTH, 1);
    client.check(0..REQUESTS, DEPTH, 1);
    let mut other = Client::connect(&socket);
    std::thread::scope(|scope| {
        scope.spawn(|| other.write(REQUESTS..2 * REQUESTS, DEPTH, 2));
        client.write(0..REQUESTS, DEPTH, 3);
    });
    client.check(REQUESTS..2 * REQUESTS, DEPTH, 2);
    other.check(0..REQUESTS, DEPTH, 3);
    client.check(0..REQUESTS, 1, 3);
    client.write(0..2 * REQUESTS, DEPTH, 4);
    client.check(0..2 * REQUESTS, DEPTH, 4);
    // After a client has disconnected with requests in flight, the next client can use the disk.
    let unread = (0..DEPTH).flat_map(|block| Client::request(1, block, &[fill(block, 4); BLOCK]));
    client.0.write_all(&unread.collect::<Vec<u8>>()).unwrap();
    drop((client, other));
    let mut next = Client::connect(&socket);
    next.check(0..2 * REQUESTS, DEPTH, 4);
    export.stop();
}

#[test]
fn deep_clients_of_memory_are_served() {
    check_changing_clients("mem:16MiB");
}

#[test]
fn deep_clients_of_a_file_are_served() {
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("image");
    std::fs::File::create(&image).unwrap().set_len(16 << 20).unwrap();
    check_changing_clients(image.to_str().unwrap());
}
