//! Client side of the NBD handshake, over any byte stream.

use crate::export::Export;
use shadowbell_nbd::wire::{
    BASE_ALLOCATION, MAGIC, OPTION_MAGIC, OPTION_REPLY_MAGIC, Reader, answer, handshake, info,
    option, put_option, put_string,
};
use shadowbell_tls::{Session, SessionError};
use std::io::{self, Read, Write};

/// Maximum length of an option reply. Names and texts have at most 4096 bytes.
const MAX_REPLY_LEN: u32 = 16 << 10;
/// Maximum number of replies to one option.
const MAX_REPLIES: usize = 64;
/// Magic after the greeting of an oldstyle server.
const OLDSTYLE: u64 = 0x0000_4202_8186_1253;

/// Error of the handshake.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NegotiationError {
    /// The connection ended.
    #[error("the connection failed in the handshake: {0}")]
    Io(#[source] io::Error),
    /// The peer is not an NBD server.
    #[error("the peer is no NBD server; correct the address")]
    NoServer,
    /// The server supports only the oldstyle protocol from before 2011.
    #[error("the server supports only the oldstyle protocol; start one with `fixed newstyle`")]
    Oldstyle,
    /// The export does not exist.
    #[error("the server has no such export{}; `nbdinfo --list` shows its exports", server_message(.0))]
    Unknown(String),
    /// The server requires TLS.
    #[error(
        "the server requires TLS{}; write `nbds:` and `tls-certificates=DIR`",
        server_message(.0)
    )]
    TlsRequired(String),
    /// The server does not support TLS.
    #[error(
        "the server does not support TLS{}; configure its certificates, or write `nbd:`",
        server_message(.0)
    )]
    NoTls(String),
    /// The TLS handshake failed.
    #[error("the TLS handshake failed: {0}")]
    Tls(SessionError),
    /// The server refuses the export.
    #[error("the server refuses the export{}", server_message(.0))]
    Refused(String),
    /// The server violates the protocol.
    #[error("the server violates the protocol: {0}")]
    Protocol(&'static str),
}

impl From<io::Error> for NegotiationError {
    fn from(error: io::Error) -> Self {
        match Session::fault(&error) {
            Some(fault) => Self::Tls(fault.clone()),
            None => Self::Io(error),
        }
    }
}

/// Formats the server's message as the end of a sentence.
fn server_message(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(" (it says: {text})") }
}

/// Result of the greeting. `no_zeroes` is true if the reply to `EXPORT_NAME` will not have its zero
/// padding.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Greeted {
    no_zeroes: bool,
}

/// Requests TLS; the TLS handshake follows the reply.
///
/// # Errors
/// [`NegotiationError`].
pub(crate) fn request_tls(stream: &mut (impl Read + Write)) -> Result<(), NegotiationError> {
    send_option(stream, option::STARTTLS, &[])?;
    match receive(stream, option::STARTTLS)? {
        (answer::ACK, data) if data.is_empty() => Ok(()),
        (kind, data) if kind & answer::ERROR != 0 => Err(NegotiationError::NoTls(readable(&data))),
        _ => Err(NegotiationError::Protocol("a reply does not match its option")),
    }
}

/// Negotiates the export of this name with the server at the other end of `stream`, after the
/// greeting.
///
/// # Errors
/// [`NegotiationError`].
pub(crate) fn negotiate(
    stream: &mut (impl Read + Write),
    name: &str,
    greeted: Greeted,
) -> Result<Export, NegotiationError> {
    send_option(stream, option::STRUCTURED_REPLY, &[])?;
    let structured = match receive(stream, option::STRUCTURED_REPLY)? {
        (answer::ACK, _) => true,
        (answer::ERR_TLS_REQD, text) => {
            return Err(NegotiationError::TlsRequired(readable(&text)));
        }
        (kind, _) if kind & answer::ERROR != 0 => false,
        _ => return Err(NegotiationError::Protocol("a reply does not match its option")),
    };
    let allocation = if structured { negotiate_allocation(stream, name)? } else { None };
    let mut go = Vec::new();
    put_string(&mut go, name);
    go.extend(1_u16.to_be_bytes());
    go.extend(info::BLOCK_SIZE.to_be_bytes());
    send_option(stream, option::GO, &go)?;
    let mut export = match described(stream, option::GO)? {
        Some(export) => export,
        None => export_name(stream, name, greeted.no_zeroes)?,
    };
    export.structured = structured;
    export.allocation = allocation;
    Ok(export)
}

/// Requests the context `base:allocation`. Returns its id if the server supports it.
fn negotiate_allocation(
    stream: &mut (impl Read + Write),
    name: &str,
) -> Result<Option<u32>, NegotiationError> {
    let mut wanted = Vec::new();
    put_string(&mut wanted, name);
    wanted.extend(1_u32.to_be_bytes());
    put_string(&mut wanted, BASE_ALLOCATION);
    send_option(stream, option::SET_META_CONTEXT, &wanted)?;
    let mut found = None;
    for _ in 0..MAX_REPLIES {
        match receive(stream, option::SET_META_CONTEXT)? {
            (answer::META_CONTEXT, data) => {
                let mut reader = Reader(&data);
                let number = reader.u32();
                if reader.0 == BASE_ALLOCATION.as_bytes() {
                    found = number;
                }
            }
            (answer::ACK, _) => return Ok(found),
            // Either the server refuses this metadata context, or the export does not exist. The
            // reply to the next option distinguishes the two.
            (kind, _) if kind & answer::ERROR != 0 => return Ok(None),
            _ => break,
        }
    }
    Err(NegotiationError::Protocol("it sends too many replies to an option"))
}

/// Requests the current properties of the export, and ends the handshake.
///
/// # Errors
/// [`NegotiationError`].
pub(crate) fn request_export(
    stream: &mut (impl Read + Write),
    name: &str,
) -> Result<Export, NegotiationError> {
    let mut wanted = Vec::new();
    put_string(&mut wanted, name);
    wanted.extend(0_u16.to_be_bytes());
    send_option(stream, option::INFO, &wanted)?;
    let export = described(stream, option::INFO)?;
    send_option(stream, option::ABORT, &[])?;
    export.ok_or(NegotiationError::Protocol("it does not describe the export"))
}

/// Exchanges the greetings.
///
/// # Errors
/// [`NegotiationError`].
pub(crate) fn greet(stream: &mut (impl Read + Write)) -> Result<Greeted, NegotiationError> {
    let mut greeting = [0; 16];
    stream.read_exact(&mut greeting)?;
    let mut reader = Reader(&greeting);
    match (reader.u64(), reader.u64()) {
        (Some(MAGIC), Some(OPTION_MAGIC)) => {}
        (Some(MAGIC), Some(OLDSTYLE)) => return Err(NegotiationError::Oldstyle),
        _ => return Err(NegotiationError::NoServer),
    }
    let mut flags = [0; 2];
    stream.read_exact(&mut flags)?;
    let flags = u16::from_be_bytes(flags);
    if flags & handshake::FIXED_NEWSTYLE == 0 {
        return Err(NegotiationError::Oldstyle);
    }
    let ours = flags & (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
    stream.write_all(&u32::from(ours).to_be_bytes())?;
    Ok(Greeted { no_zeroes: ours & handshake::NO_ZEROES != 0 })
}

fn send_option(stream: &mut impl Write, kind: u32, data: &[u8]) -> io::Result<()> {
    let mut out = Vec::new();
    put_option(&mut out, kind, data);
    stream.write_all(&out)
}

/// Receives one option reply: its type and its data.
fn receive(stream: &mut impl Read, to: u32) -> Result<(u32, Vec<u8>), NegotiationError> {
    let mut head = [0; 20];
    stream.read_exact(&mut head)?;
    let mut reader = Reader(&head);
    if reader.u64() != Some(OPTION_REPLY_MAGIC) || reader.u32() != Some(to) {
        return Err(NegotiationError::Protocol("a reply belongs to no option"));
    }
    let (kind, len) = (reader.u32().unwrap_or(0), reader.u32().unwrap_or(u32::MAX));
    if len > MAX_REPLY_LEN {
        return Err(NegotiationError::Protocol("a reply is too long"));
    }
    let mut data = vec![0; len as usize];
    stream.read_exact(&mut data)?;
    Ok((kind, data))
}

/// Receives the replies to `INFO` or `GO`; `None` if the server does not support the option.
fn described(stream: &mut impl Read, to: u32) -> Result<Option<Export>, NegotiationError> {
    let mut export: Option<Export> = None;
    let mut sizes = None;
    for _ in 0..MAX_REPLIES {
        let (kind, data) = receive(stream, to)?;
        let mut reader = Reader(&data);
        match kind {
            answer::ACK => {
                let broken = NegotiationError::Protocol("it does not describe the export");
                let mut export = export.ok_or(broken)?;
                if let Some((min_block, preferred, max_payload)) = sizes
                    && !export.set_sizes(min_block, preferred, max_payload)
                {
                    let why = "its block sizes are invalid";
                    return Err(NegotiationError::Protocol(why));
                }
                return Ok(Some(export));
            }
            answer::INFO => {
                let broken =
                    || NegotiationError::Protocol("its description of the export is too short");
                match reader.u16().ok_or_else(broken)? {
                    info::EXPORT => {
                        let size = reader.u64().ok_or_else(broken)?;
                        export = Some(Export::new(size, reader.u16().ok_or_else(broken)?));
                    }
                    info::BLOCK_SIZE => {
                        let mut next = || reader.u32().ok_or_else(broken);
                        sizes = Some((next()?, next()?, next()?));
                    }
                    // The protocol requires a client to ignore information types that it does not
                    // know.
                    _ => {}
                }
            }
            kind if kind & answer::ERROR != 0 => {
                let text = readable(&data);
                return Err(match kind {
                    answer::ERR_UNSUP => return Ok(None),
                    answer::ERR_UNKNOWN => NegotiationError::Unknown(text),
                    answer::ERR_TLS_REQD => NegotiationError::TlsRequired(text),
                    _ => NegotiationError::Refused(text),
                });
            }
            _ => {}
        }
    }
    Err(NegotiationError::Protocol("it sends too many replies to an option"))
}

/// Cleans a text of the server for a log line.
fn readable(text: &[u8]) -> String {
    let text = String::from_utf8_lossy(text);
    let clean = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().take(200).map(clean).collect::<String>().trim().to_owned()
}

/// Opens the export with `EXPORT_NAME`, for servers without `GO`.
fn export_name(
    stream: &mut (impl Read + Write),
    name: &str,
    no_zeroes: bool,
) -> Result<Export, NegotiationError> {
    send_option(stream, option::EXPORT_NAME, name.as_bytes())?;
    let mut head = [0; 10];
    match stream.read_exact(&mut head) {
        // This option has no error reply: the server closes the connection instead.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return Err(NegotiationError::Unknown(String::new()));
        }
        outcome => outcome?,
    }
    let mut reader = Reader(&head);
    let export = Export::new(reader.u64().unwrap_or(0), reader.u16().unwrap_or(0));
    if !no_zeroes {
        stream.read_exact(&mut [0; 124])?;
    }
    Ok(export)
}

#[cfg(test)]
mod tests {
    use super::*;
    use shadowbell_nbd::wire::{put_answer, transmission};

    /// A server with scripted output.
    struct Script {
        replies: io::Cursor<Vec<u8>>,
        sent: Vec<u8>,
    }

    impl Read for Script {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.replies.read(into)
        }
    }

    impl Write for Script {
        fn write(&mut self, from: &[u8]) -> io::Result<usize> {
            self.sent.extend(from);
            Ok(from.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn greeting(flags: u16) -> Vec<u8> {
        let mut out = MAGIC.to_be_bytes().to_vec();
        out.extend(OPTION_MAGIC.to_be_bytes());
        out.extend(flags.to_be_bytes());
        out
    }

    fn with(replies: Vec<u8>) -> Result<Export, NegotiationError> {
        let mut script = Script { replies: io::Cursor::new(replies), sent: Vec::new() };
        let greeted = greet(&mut script)?;
        negotiate(&mut script, "disk", greeted)
    }

    fn export_info(size: u64, flags: u16) -> Vec<u8> {
        let mut data = info::EXPORT.to_be_bytes().to_vec();
        data.extend(size.to_be_bytes());
        data.extend(flags.to_be_bytes());
        data
    }

    #[test]
    fn an_export_is_agreed_on() {
        let mut replies = greeting(3);
        put_answer(&mut replies, option::STRUCTURED_REPLY, answer::ACK, &[]);
        let context = [&[0, 0, 0, 7], BASE_ALLOCATION.as_bytes()].concat();
        put_answer(&mut replies, option::SET_META_CONTEXT, answer::META_CONTEXT, &context);
        put_answer(&mut replies, option::SET_META_CONTEXT, answer::ACK, &[]);
        let flags = transmission::HAS_FLAGS | transmission::SEND_FLUSH;
        put_answer(&mut replies, option::GO, answer::INFO, &[0, 2, b'a']);
        put_answer(&mut replies, option::GO, answer::INFO, &export_info(1 << 30, flags));
        let mut sizes = info::BLOCK_SIZE.to_be_bytes().to_vec();
        for size in [512_u32, 65536, 1 << 20] {
            sizes.extend(size.to_be_bytes());
        }
        put_answer(&mut replies, option::GO, answer::INFO, &sizes);
        put_answer(&mut replies, option::GO, answer::ACK, &[]);
        let export = with(replies).unwrap();
        assert_eq!((export.size, export.structured), (1 << 30, true));
        assert_eq!(export.allocation, Some(7));
        assert_eq!((export.min_block, export.preferred, export.max_payload), (512, 65536, 1 << 20));
        assert!(export.has(transmission::SEND_FLUSH) && !export.has(transmission::SEND_FUA));
    }

    #[test]
    fn a_server_without_go_is_negotiated_by_export_name() {
        for no_zeroes in [0, handshake::NO_ZEROES] {
            let mut replies = greeting(handshake::FIXED_NEWSTYLE | no_zeroes);
            put_answer(&mut replies, option::STRUCTURED_REPLY, answer::ERR_UNSUP, &[]);
            put_answer(&mut replies, option::GO, answer::ERR_UNSUP, b"what?");
            let before = replies.clone();
            replies.extend((1_u64 << 20).to_be_bytes());
            replies.extend(1_u16.to_be_bytes());
            replies.extend(vec![0; if no_zeroes == 0 { 124 } else { 0 }]);
            let export = with(replies).unwrap();
            assert_eq!((export.size, export.flags, export.structured), (1 << 20, 1, false));
            assert!(matches!(with(before), Err(NegotiationError::Unknown(_))));
        }
    }

    #[test]
    fn other_protocols_and_refusals_have_different_errors() {
        let mut oldstyle = MAGIC.to_be_bytes().to_vec();
        oldstyle.extend(OLDSTYLE.to_be_bytes());
        oldstyle.extend([0; 200]);
        for (replies, words) in [
            (b"SSH-2.0-OpenSSH_9.2p1 Debian".to_vec(), "no NBD server"),
            (oldstyle, "oldstyle protocol"),
            (greeting(0), "oldstyle protocol"),
            (greeting(1), "connection failed"),
        ] {
            let error = with(replies).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
        let refused = |kind: u32, text: &[u8]| {
            let mut replies = greeting(3);
            put_answer(&mut replies, option::STRUCTURED_REPLY, answer::ACK, &[]);
            put_answer(&mut replies, option::SET_META_CONTEXT, answer::ERR_UNSUP, &[]);
            put_answer(&mut replies, option::GO, kind, text);
            with(replies).unwrap_err().to_string()
        };
        let error = refused(answer::ERR_UNKNOWN, b"no\nsuch\x1bthing");
        assert!(error.contains("no such export (it says: no such thing)"), "{error}");
        assert!(refused(answer::ERR_TLS_REQD, b"").contains("requires TLS"));
        assert!(refused(answer::ERR_POLICY, b"go away").contains("it says: go away"));
    }

    #[test]
    fn replies_that_violate_the_protocol_are_refused() {
        let broken = |parts: &[(u32, u32, Vec<u8>)]| {
            let mut replies = greeting(3);
            put_answer(&mut replies, option::STRUCTURED_REPLY, answer::ACK, &[]);
            put_answer(&mut replies, option::SET_META_CONTEXT, answer::ERR_UNSUP, &[]);
            parts.iter().for_each(|(to, kind, data)| put_answer(&mut replies, *to, *kind, data));
            with(replies).unwrap_err().to_string()
        };
        let go = option::GO;
        assert!(broken(&[(go, answer::ACK, vec![])]).contains("describe the export"));
        assert!(broken(&[(option::LIST, answer::ACK, vec![])]).contains("belongs to no option"));
        assert!(broken(&[(go, answer::INFO, vec![0])]).contains("too short"));
        assert!(broken(&[(go, answer::INFO, vec![0, 0, 1])]).contains("too short"));
        let long = vec![0; MAX_REPLY_LEN as usize + 1];
        assert!(broken(&[(go, answer::INFO, long)]).contains("too long"));
        let endless = vec![(go, answer::INFO, export_info(1, 1)); MAX_REPLIES + 1];
        assert!(broken(&endless).contains("too many replies"));
        let mut odd = info::BLOCK_SIZE.to_be_bytes().to_vec();
        odd.extend([0; 12]);
        let parts = [
            (go, answer::INFO, export_info(1, 1)),
            (go, answer::INFO, odd),
            (go, answer::ACK, vec![]),
        ];
        assert!(broken(&parts).contains("block sizes are invalid"));
    }
}
