use super::*;
use crate::nbd::wire::{OPTION_REPLY_MAGIC, put_option};
use proptest::prelude::*;

fn export() -> Arc<Export> {
    Arc::new(Export {
        name: "disk".into(),
        description: "a disk".into(),
        size: 1 << 30,
        preferred: 4096,
        flags: transmission::SEND_FLUSH,
    })
}

struct Client {
    handshake: Handshake,
    out: Vec<u8>,
}

type Answer = (u32, u32, Vec<u8>);

impl Client {
    fn new() -> Self {
        Self::with(Security::None)
    }

    fn with(security: Security) -> Self {
        let mut client = Self { handshake: Handshake::new(export(), security), out: Vec::new() };
        assert_eq!(client.send(&3u32.to_be_bytes()), Step::More);
        client
    }

    /// Sends all bytes to the handshake, in pieces of a few bytes.
    fn send(&mut self, bytes: &[u8]) -> Step {
        let (mut there, mut at) = (0, 0);
        while at < bytes.len() || there < bytes.len() {
            there = (there + 7).min(bytes.len());
            let (used, step) = self.handshake.advance(&bytes[at..there], &mut self.out);
            at += used;
            if step != Step::More {
                assert_eq!(at, bytes.len());
                return step;
            }
            if used == 0 && there == bytes.len() {
                break;
            }
        }
        Step::More
    }

    fn option(&mut self, option: u32, data: &[u8]) -> (Step, Vec<Answer>) {
        let mut bytes = Vec::new();
        put_option(&mut bytes, option, data);
        let step = self.send(&bytes);
        let out = std::mem::take(&mut self.out);
        let mut reader = Reader(&out);
        let mut answers = Vec::new();
        while !reader.0.is_empty() {
            assert_eq!(reader.u64(), Some(OPTION_REPLY_MAGIC));
            let (option, answer) = (reader.u32().unwrap(), reader.u32().unwrap());
            let len = reader.u32().unwrap() as usize;
            answers.push((option, answer, reader.bytes(len).unwrap().to_vec()));
        }
        (step, answers)
    }

    fn kinds(&mut self, option: u32, data: &[u8]) -> Vec<u32> {
        self.option(option, data).1.into_iter().map(|(_, answer, _)| answer).collect()
    }
}

fn go(name: &str, infos: &[u16]) -> Vec<u8> {
    let mut data = Vec::new();
    put_string(&mut data, name);
    data.extend((infos.len() as u16).to_be_bytes());
    infos.iter().for_each(|info| data.extend(info.to_be_bytes()));
    data
}

fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = Vec::new();
    put_string(&mut data, name);
    data.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| put_string(&mut data, query));
    data
}

#[test]
fn the_greeting_is_fixed_newstyle() {
    assert_eq!(Handshake::greeting(), b"NBDMAGICIHAVEOPT\0\x03");
}

#[test]
fn option_go_returns_size_and_flags() {
    let mut client = Client::new();
    let (step, answers) = client.option(option::GO, &go("disk", &[info::NAME]));
    assert_eq!(step, Step::Transmission(Agreed::default()));
    let mut about = vec![0, 0];
    about.extend((1u64 << 30).to_be_bytes());
    about.extend([0, 5]);
    assert_eq!(answers[0], (option::GO, answer::INFO, about));
    assert_eq!(answers[1].2, b"\0\x03\0\0\0\x01\0\0\x10\0\x02\0\0\0");
    assert_eq!(answers[2].2, b"\0\x01disk");
    assert_eq!(answers[3].1, answer::ACK);
}

#[test]
fn export_name_pads_with_zeroes_unless_declined() {
    for (flags, zeroes) in [(0u32, 124), (1, 124), (2, 0), (3, 0)] {
        let mut handshake = Handshake::new(export(), Security::None);
        let mut out = Vec::new();
        assert_eq!(handshake.advance(&flags.to_be_bytes(), &mut out), (4, Step::More));
        let mut option = Vec::new();
        put_option(&mut option, option::EXPORT_NAME, b"");
        let (used, step) = handshake.advance(&option, &mut out);
        assert_eq!((used, step), (16, Step::Transmission(Agreed::default())));
        assert_eq!(out.len(), 10 + zeroes);
        assert_eq!(&out[..10], b"\0\0\0\0\x40\0\0\0\0\x05");
    }
    let mut client = Client::new();
    let mut option = Vec::new();
    put_option(&mut option, option::EXPORT_NAME, b"other");
    assert!(matches!(client.send(&option), Step::Over(Some(_))));
}

#[test]
fn the_list_has_the_name() {
    let mut client = Client::new();
    let (step, answers) = client.option(option::LIST, b"");
    assert_eq!(step, Step::More);
    assert_eq!(answers[0], (option::LIST, answer::SERVER, b"\0\0\0\x04disk".to_vec()));
    assert_eq!(answers[1].1, answer::ACK);
    assert_eq!(client.kinds(option::LIST, b"x"), [answer::ERR_INVALID]);
}

#[test]
fn the_allocation_context_requires_structured_replies() {
    let mut client = Client::new();
    let ask = contexts("disk", &["base:allocation", "qemu:dirty-bitmap"]);
    assert_eq!(client.kinds(option::SET_META_CONTEXT, &ask), [answer::ERR_INVALID]);
    assert_eq!(client.kinds(option::STRUCTURED_REPLY, b""), [answer::ACK]);
    let list = |queries: &[&str]| contexts("", queries);
    for (queries, expected) in [
        (list(&[]), true),
        (list(&["base:"]), true),
        (list(&["base:allocation"]), true),
        (list(&["other:"]), false),
    ] {
        let kinds = client.kinds(option::LIST_META_CONTEXT, &queries);
        assert_eq!(kinds.len(), 1 + usize::from(expected));
    }
    let kinds = client.kinds(option::SET_META_CONTEXT, &ask);
    assert_eq!(kinds, [answer::META_CONTEXT, answer::ACK]);
    assert!(client.handshake.agreed.allocation);
    // Each selection of metadata contexts replaces the previous one.
    assert_eq!(client.kinds(option::SET_META_CONTEXT, &list(&[])), [answer::ACK]);
    assert!(!client.handshake.agreed.allocation);
    client.kinds(option::SET_META_CONTEXT, &ask);
    let (step, _) = client.option(option::GO, &go("", &[]));
    assert_eq!(step, Step::Transmission(Agreed { structured: true, allocation: true }));
}

#[test]
fn invalid_options_are_refused_and_the_handshake_continues() {
    let mut client = Client::new();
    let strange = contexts("disk", &["x"]);
    client.kinds(option::STRUCTURED_REPLY, b"");
    for (option, data, expected) in [
        (option::STARTTLS, vec![], answer::ERR_POLICY),
        (4711, vec![0; 100], answer::ERR_UNSUP),
        (option::GO, go("other", &[]), answer::ERR_UNKNOWN),
        (option::INFO, go("other", &[]), answer::ERR_UNKNOWN),
        (option::GO, vec![], answer::ERR_INVALID),
        (option::GO, [go("disk", &[]), vec![0]].concat(), answer::ERR_INVALID),
        (option::GO, b"\xff\xff\xff\xffdisk\0\0".to_vec(), answer::ERR_INVALID),
        (option::SET_META_CONTEXT, vec![0; 3], answer::ERR_INVALID),
        (option::SET_META_CONTEXT, [strange.clone(), vec![0]].concat(), answer::ERR_INVALID),
        (option::SET_META_CONTEXT, strange[..strange.len() - 1].to_vec(), answer::ERR_INVALID),
        (option::SET_META_CONTEXT, b"\0\0\0\0\xff\xff\xff\xff".to_vec(), answer::ERR_INVALID),
        (option::SET_META_CONTEXT, contexts("other", &[]), answer::ERR_UNKNOWN),
        (option::LIST, vec![0; MAX_OPTION as usize + 1], answer::ERR_TOO_BIG),
    ] {
        assert_eq!(client.kinds(option, &data), [expected], "option {option}");
    }
    let (step, _) = client.option(option::GO, &go("disk", &[]));
    assert!(matches!(step, Step::Transmission(_)));
}

/// A name has at most 4096 bytes, and so has the text of a reply that contains it.
#[test]
fn the_text_of_an_error_has_at_most_4096_bytes() {
    for name in ["x".repeat(4064), "x".repeat(4065), "x".repeat(4096), "\u{e4}\n".repeat(1365)] {
        let mut client = Client::new();
        client.kinds(option::STRUCTURED_REPLY, b"");
        for (option, data) in [
            (option::GO, go(&name, &[])),
            (option::INFO, go(&name, &[])),
            (option::SET_META_CONTEXT, contexts(&name, &[])),
        ] {
            let (_, answers) = client.option(option, &data);
            let [(_, answer::ERR_UNKNOWN, text)] = &answers[..] else { panic!("{answers:?}") };
            assert!(text.len() <= 4096, "{} bytes", text.len());
            assert!(text.starts_with(b"there is no export named"));
            assert!(String::from_utf8(text.clone()).is_ok());
        }
    }
}

#[test]
fn a_client_that_aborts_is_answered() {
    let (step, answers) = Client::new().option(option::ABORT, b"");
    assert_eq!((step, answers[0].1), (Step::Over(None), answer::ACK));
}

#[test]
fn connections_of_other_protocols_are_closed() {
    for bytes in [b"\xff\xff\xff\xff".to_vec(), b"GET / HTTP/1.1\r\nHost: disk\r\n".to_vec()] {
        let mut handshake = Handshake::new(export(), Security::None);
        let step = handshake.advance(&bytes, &mut Vec::new()).1;
        assert!(matches!(step, Step::Over(Some(_))));
    }
    let mut client = Client::new();
    assert!(matches!(client.send(&[7; 16]), Step::Over(Some(_))));
    let mut option = Vec::new();
    put_option(&mut option, option::LIST, b"");
    option[12..].copy_from_slice(&u32::MAX.to_be_bytes());
    assert!(matches!(Client::new().send(&option), Step::Over(Some(_))));
    let mut client = Client::new();
    let mut options = 0;
    while matches!(client.option(option::LIST, b"").0, Step::More) {
        options += 1;
        assert!(options <= MAX_OPTIONS);
    }
}

proptest! {
    #[test]
    fn garbage_never_panics_and_always_ends(
        options in prop::collection::vec((0u32..12, prop::collection::vec(any::<u8>(), 0..60)), 0..20),
        garbage in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let mut bytes = Vec::new();
        for (option, data) in &options {
            put_option(&mut bytes, *option, data);
        }
        bytes.extend(&garbage);
        let mut handshake = Handshake::new(export(), Security::None);
        let mut out = Vec::new();
        handshake.advance(&3u32.to_be_bytes(), &mut out);
        let mut at = 0;
        loop {
            let (used, step) = handshake.advance(&bytes[at..], &mut out);
            prop_assert!(used <= bytes.len() - at);
            at += used;
            if used == 0 || step != Step::More {
                break;
            }
        }
    }
}

#[test]
fn a_server_with_required_tls_refuses_other_options() {
    let mut client = Client::with(Security::Required);
    for option in [option::LIST, option::GO, option::STRUCTURED_REPLY, option::SET_META_CONTEXT, 99]
    {
        let (step, answers) = client.option(option, b"");
        assert_eq!((step, answers[0].1), (Step::More, answer::ERR_TLS_REQD), "{option}");
        assert_eq!(answers.len(), 1);
    }
    assert!(matches!(client.option(option::EXPORT_NAME, b"").0, Step::Over(Some(_))));
    let mut client = Client::with(Security::Required);
    assert_eq!(client.option(option::STARTTLS, b"x").1[0].1, answer::ERR_INVALID);
    let (step, answers) = client.option(option::STARTTLS, b"");
    assert_eq!((step, answers), (Step::BeginTls, vec![(option::STARTTLS, answer::ACK, vec![])]));
    assert_eq!(client.option(option::STARTTLS, b"").1[0].1, answer::ERR_INVALID);
    assert_eq!(client.option(option::LIST, b"").1.last().unwrap().1, answer::ACK);
    // A server without TLS refuses STARTTLS.
    let mut client = Client::new();
    let (step, answers) = client.option(option::STARTTLS, b"");
    assert_eq!((step, answers[0].1), (Step::More, answer::ERR_POLICY));
}
