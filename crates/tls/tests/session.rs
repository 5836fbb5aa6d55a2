//! Client and server sessions that are connected without sockets, and configuration errors.

use proptest::prelude::*;
use shadowbell_testing::certificates::{Authority, CertificatePurpose, CertificateSpec};
use shadowbell_tls::{CertificateError, ClientTls, MOST_PENDING, ServerTls, Session, SessionError};
use std::collections::VecDeque;
use std::io::{self, IoSlice, Read, Write};
use std::path::PathBuf;
use tempfile::TempDir;

/// A byte pipe of limited capacity.
struct Pipe {
    bytes: VecDeque<u8>,
    holds: usize,
    ended: bool,
}

impl Pipe {
    fn new(holds: usize) -> Self {
        Self { bytes: VecDeque::new(), holds, ended: false }
    }
}

impl Read for Pipe {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.bytes.read(into)? {
            0 if !self.ended => Err(io::ErrorKind::WouldBlock.into()),
            count => Ok(count),
        }
    }
}

impl Write for Pipe {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        let room = self.holds - self.bytes.len();
        if room == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let count = room.min(from.len());
        self.bytes.extend(&from[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The client and the server, and the pipes between them.
struct Ends {
    ends: [Session; 2],
    ways: [Pipe; 2],
}

impl Ends {
    fn new(client: &ClientTls, server: &ServerTls, name: &str, holds: usize) -> Self {
        let ends = [client.session(name).unwrap(), server.session().unwrap()];
        Self { ends, ways: [Pipe::new(holds), Pipe::new(holds)] }
    }

    /// Runs the handshake. On failure, returns the error of the client and that of the server;
    /// `None` for an end without an error.
    fn agree(&mut self) -> Result<(), [Option<SessionError>; 2]> {
        let mut faults = [None, None];
        for _ in 0..2000 {
            for (at, known) in faults.iter_mut().enumerate() {
                let (end, [first, second]) = (&mut self.ends[at], &mut self.ways);
                let (out, into) = if at == 0 { (first, second) } else { (second, first) };
                // After its handshake, an end continues to receive, because the other end may send
                // an alert.
                let outcome = if end.is_handshaking() {
                    end.handshake(into)
                } else {
                    end.receive(into, &mut [0]).map(drop)
                };
                if let Err(error) = outcome
                    && let Some(fault) = Session::fault(&error)
                {
                    known.get_or_insert(fault.clone());
                }
                let _ = end.flush(out);
            }
        }
        if faults.iter().any(Option::is_some) {
            return Err(faults);
        }
        assert!(self.ends.iter().all(|end| !end.is_handshaking()));
        Ok(())
    }

    /// Sends `data` from one end to the other, in parts.
    fn carry(&mut self, from: usize, data: &[u8], part: usize) -> Vec<u8> {
        let way = &mut self.ways[from];
        let [client, server] = &mut self.ends;
        let (sender, receiver) = if from == 0 { (client, server) } else { (server, client) };
        let (mut sent, mut got) = (0, Vec::new());
        let mut room = vec![0; part.max(1)];
        while got.len() < data.len() {
            let rest = &data[sent..data.len().min(sent + 3 * part)];
            let parts: Vec<_> = rest.chunks(part).map(IoSlice::new).collect();
            sent += sender.put(&parts).unwrap();
            sender.flush(way).unwrap();
            match receiver.receive(way, &mut room) {
                Ok(count) => got.extend(&room[..count]),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock, "{error}"),
            }
        }
        got
    }
}

struct Place(TempDir);

impl Place {
    fn new(fill: impl FnOnce(&std::path::Path)) -> Self {
        let directory = tempfile::tempdir().unwrap();
        fill(directory.path());
        Self(directory)
    }

    fn client(&self) -> ClientTls {
        ClientTls::load(self.0.path()).unwrap()
    }

    fn server(&self) -> ServerTls {
        ServerTls::load(self.0.path(), false).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

fn random(len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u8).collect()
}

#[test]
fn data_is_transferred_in_both_directions() {
    let place = Place::new(|path| Authority::new().write_all(path));
    let mut ends = Ends::new(&place.client(), &place.server(), "localhost", 5000);
    ends.agree().unwrap();
    let data = random(600_000);
    for (from, part) in [(0, 1000), (1, 17), (1, 70_000), (0, 300_000)] {
        assert!(ends.carry(from, &data, part) == data, "from {from} in parts of {part}");
    }
}

/// The peer reads nothing, so the session has to store its output. It stores only a limited amount.
#[test]
fn a_session_has_bounded_memory() {
    let place = Place::new(|path| Authority::new().write_all(path));
    let mut ends = Ends::new(&place.client(), &place.server(), "127.0.0.1", 5000);
    ends.agree().unwrap();
    let data = random(4 * MOST_PENDING);
    let sender = &mut ends.ends[0];
    let took = sender.put(&[IoSlice::new(&data)]).unwrap();
    assert!(took > 0 && took <= MOST_PENDING, "{took}");
    assert!(!sender.flush(&mut ends.ways[0]).unwrap() && sender.is_pending());
    assert_eq!(sender.put(&[IoSlice::new(&data)]).unwrap(), 0);
}

#[test]
fn orderly_and_abrupt_ends_are_distinguished() {
    let place = Place::new(|path| Authority::new().write_all(path));
    for is_orderly in [true, false] {
        let mut ends = Ends::new(&place.client(), &place.server(), "localhost", 50_000);
        ends.agree().unwrap();
        let [client, server] = &mut ends.ends;
        let way = &mut ends.ways[0];
        assert_eq!(client.put(&[IoSlice::new(b"last")]).unwrap(), 4);
        if is_orderly {
            client.close();
        }
        assert!(client.flush(way).unwrap());
        way.ended = !is_orderly;
        let mut room = [0; 9];
        assert_eq!(server.receive(way, &mut room).unwrap(), 4);
        for _ in 0..3 {
            assert_eq!(server.receive(way, &mut room).unwrap(), 0);
        }
    }
}

/// Each configuration error ends the handshake. The end that detects the error reports it with one
/// message. The other end receives an alert, and reports another message.
#[test]
fn each_failed_handshake_has_its_message() {
    let (authority, stranger) = (Authority::new(), Authority::new());
    let good = Place::new(|path| authority.write_all(path));
    let faults = |client: &Place, server: &Place, name: &str| {
        Ends::new(&client.client(), &server.server(), name, 50_000).agree().unwrap_err()
    };
    let names = &["a.example", "10.1.2.3"];
    let server_with = |spec: CertificateSpec<'_>| {
        Place::new(|path| {
            authority.write_ca(path);
            authority.write_certificate(path, CertificatePurpose::Server, &spec);
        })
    };
    let other = server_with(CertificateSpec { names, ..CertificateSpec::default() });
    let [client, _] = faults(&good, &other, "localhost");
    let text = client.unwrap().to_string();
    assert!(text.ends_with("not for this host but for a.example, 10.1.2.3"), "{text}");
    let nameless = server_with(CertificateSpec::default());
    let [client, _] = faults(&good, &nameless, "localhost");
    assert!(client.unwrap().to_string().contains("subjectAltName"));
    let old = server_with(CertificateSpec { names: &["localhost"], has_expired: true });
    let [client, server] = faults(&good, &old, "localhost");
    assert_eq!(client, Some(SessionError::Expired));
    assert_eq!(server, Some(SessionError::Refused("it has expired")));
    // The certificate of the server is of another CA than the certificate of the client.
    let strange = Place::new(|path| stranger.write_all(path));
    let [client, server] = faults(&good, &strange, "localhost");
    assert_eq!(client, Some(SessionError::Issuer));
    assert_eq!(server, Some(SessionError::Refused("it does not know the CA that has signed it")));
    // The client has no certificate, a certificate of another CA, or the certificate of a server.
    let ca_only = Place::new(|path| authority.write_ca(path));
    let [client, server] = faults(&ca_only, &good, "localhost");
    assert_eq!((client, server), (Some(SessionError::Wanted), Some(SessionError::None)));
    let foreign = Place::new(|path| {
        authority.write_ca(path);
        stranger.write_certificate(path, CertificatePurpose::Client, &CertificateSpec::default());
    });
    let [client, server] = faults(&foreign, &good, "localhost");
    assert_eq!(server, Some(SessionError::Issuer));
    assert!(matches!(client, Some(SessionError::Refused(_))), "{client:?}");
    let disguised = Place::new(|path| {
        authority.write_ca(path);
        authority.write_certificate(path, CertificatePurpose::Server, &CertificateSpec::default());
        std::fs::rename(path.join("server-cert.pem"), path.join("client-cert.pem")).unwrap();
        std::fs::rename(path.join("server-key.pem"), path.join("client-key.pem")).unwrap();
    });
    let [_, server] = faults(&disguised, &good, "localhost");
    assert_eq!(server, Some(SessionError::Purpose));
    assert!(matches!(good.client().session("a b"), Err(SessionError::Name(_))));
}

#[test]
fn clients_without_certificates_are_accepted_on_request() {
    let authority = Authority::new();
    let good = Place::new(|path| authority.write_all(path));
    let ca_only = Place::new(|path| authority.write_ca(path));
    let server = ServerTls::load(good.0.path(), true).unwrap();
    Ends::new(&ca_only.client(), &server, "::1", 50_000).agree().unwrap();
}

#[test]
fn an_incomplete_directory_is_refused_with_the_reason() {
    let authority = Authority::new();
    let load = |place: &Place| match ServerTls::load(place.0.path(), false) {
        Err(error) => error.to_string(),
        Ok(_) => panic!("an incomplete directory was accepted"),
    };
    let place = Place::new(|_| {});
    let text = load(&place);
    assert!(text.contains("ca-cert.pem cannot be read"), "{text}");
    assert!(text.ends_with("contain ca-cert.pem, server-cert.pem and server-key.pem"), "{text}");
    authority.write_all(place.0.path());
    assert!(ServerTls::load(place.0.path(), false).is_ok());
    std::fs::copy(place.path("client-key.pem"), place.path("server-key.pem")).unwrap();
    let text = load(&place);
    assert!(text.contains("they do not match"), "{text}");
    std::fs::write(place.path("server-cert.pem"), "what?\n").unwrap();
    assert!(load(&place).contains("server-cert.pem contains no certificate in PEM format"));
    let damaged = "-----BEGIN CERTIFICATE-----\n!!!!\n-----END CERTIFICATE-----\n";
    std::fs::write(place.path("server-cert.pem"), damaged).unwrap();
    assert!(load(&place).contains("is damaged"), "{}", load(&place));
    // A certificate without its key is an error. It must not be ignored, as if the client had no
    // certificate.
    let half = Place::new(|path| {
        authority.write_all(path);
        std::fs::remove_file(path.join("client-key.pem")).unwrap();
    });
    let error = ClientTls::load(half.0.path()).unwrap_err();
    assert!(
        matches!(&error, CertificateError::Read { path, .. } if path.ends_with("client-key.pem"))
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// The peer sends random bytes, during the handshake and after it.
    #[test]
    fn random_bytes_end_the_session(
        bytes in prop::collection::vec(any::<u8>(), 1..300), late: bool, flip in 0..400_usize
    ) {
        let place = Place::new(|path| Authority::new().write_all(path));
        let mut ends = Ends::new(&place.client(), &place.server(), "localhost", 50_000);
        if late {
            ends.agree().unwrap();
        }
        let [way, back] = &mut ends.ways;
        if late {
            ends.ends[0].put(&[IoSlice::new(&bytes)]).unwrap();
        }
        ends.ends[0].flush(way).unwrap();
        let at = flip % way.bytes.len();
        way.bytes[at] ^= 1 | bytes[0];
        way.bytes.extend(&bytes);
        way.ended = true;
        let mut room = [0; 1000];
        for _ in 0..10 {
            let server = &mut ends.ends[1];
            if server.is_handshaking() {
                let _ = server.handshake(way);
            } else if let Ok(count) = server.receive(way, &mut room) {
                prop_assert!(bytes.starts_with(&room[..count]));
            }
            let _ = server.flush(back);
        }
    }
}
