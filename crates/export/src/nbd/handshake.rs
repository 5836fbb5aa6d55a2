//! Server side of the NBD handshake, without a socket: a state machine on bytes.

use shadowbell_block::BlockDevice;
use shadowbell_nbd::wire::{
    BASE_ALLOCATION, MAGIC, MAX_PAYLOAD, MAX_STRING, OPTION_MAGIC, Reader, answer, handshake, info,
    option, put_answer, put_string, transmission,
};
use std::sync::Arc;

/// Length in bytes of the longest option that is processed. A longer option is refused and skipped.
const MAX_OPTION: u32 = 64 << 10;
/// Length in bytes of the longest option that is skipped. A longer one ends the session.
const MAX_SKIPPED: u32 = 16 << 20;
/// Largest number of options in a session. It limits the length of the handshake.
const MAX_OPTIONS: u32 = 1024;
/// Identifier of the metadata context [`BASE_ALLOCATION`] in replies.
pub const ALLOCATION_CONTEXT: u32 = 1;

/// Properties of the exported disk.
#[derive(Clone, Debug)]
pub struct Export {
    /// Name of the export. The same export is the default export (the empty name).
    pub name: String,
    /// Description, as a line of text.
    pub description: String,
    /// Size in bytes.
    pub size: u64,
    /// Preferred block size of requests in bytes.
    pub preferred: u32,
    /// [`transmission`] flags, without those that depend on the client.
    pub flags: u16,
}

impl Export {
    /// Properties of `disk`.
    #[must_use]
    pub fn of(disk: &BlockDevice, name: &str, description: &str) -> Self {
        let geometry = disk.geometry();
        let mut flags = transmission::SEND_FLUSH
            | transmission::SEND_FUA
            | transmission::CAN_MULTI_CONN
            | transmission::SEND_CACHE;
        if geometry.read_only {
            flags |= transmission::READ_ONLY;
        } else {
            flags |= transmission::SEND_WRITE_ZEROES | transmission::SEND_FAST_ZERO;
            if geometry.discard {
                flags |= transmission::SEND_TRIM;
            }
        }
        Self {
            name: name.to_owned(),
            description: description.to_owned(),
            size: geometry.bytes,
            preferred: geometry.block_size.max(4096),
            flags,
        }
    }
}

/// Result of the negotiation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    /// True if replies are structured.
    pub structured: bool,
    /// True if the client has selected the metadata context `base:allocation`.
    pub allocation: bool,
}

/// TLS state of a handshake.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Security {
    /// The server has no TLS.
    #[default]
    None,
    /// The server requires TLS, and the client has not started it.
    Required,
    /// TLS has started.
    Begun,
}

/// Result of a step of the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// More bytes are needed.
    More,
    /// TLS starts after the pending reply was sent, and the handshake continues in TLS.
    BeginTls,
    /// The transmission phase starts.
    Transmission(Agreed),
    /// The session ends after the pending replies were sent. The value is the reason, if an error
    /// has ended the session.
    Over(Option<String>),
}

enum State {
    ClientFlags,
    Options,
}

/// State of a handshake.
pub struct Handshake {
    export: Arc<Export>,
    state: State,
    no_zeroes: bool,
    agreed: Agreed,
    security: Security,
    options: u32,
    /// Number of bytes of a skipped option that were not received yet.
    skip: u64,
}

impl Handshake {
    /// Creates a handshake for `export`.
    #[must_use]
    pub fn new(export: Arc<Export>, security: Security) -> Self {
        Self {
            export,
            state: State::ClientFlags,
            no_zeroes: false,
            agreed: Agreed::default(),
            security,
            options: 0,
            skip: 0,
        }
    }

    /// Greeting, which is the first message of the server.
    #[must_use]
    pub fn greeting() -> Vec<u8> {
        let mut out = Vec::new();
        out.extend(MAGIC.to_be_bytes());
        out.extend(OPTION_MAGIC.to_be_bytes());
        out.extend((handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).to_be_bytes());
        out
    }

    /// Size in bytes of an input buffer for [`advance`](Self::advance). The longest option that is
    /// processed fits into it, so a full buffer is always processed.
    pub const LONGEST: usize = MAX_OPTION as usize + 16;

    /// Processes input of the client, appends replies to `out`, and returns the number of bytes
    /// used. The caller calls this method again with the remaining input and new input, until the
    /// result is not [`Step::More`] or no bytes are used.
    pub fn advance(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, Step) {
        if self.skip > 0 {
            let here = self.skip.min(input.len() as u64);
            self.skip -= here;
            return (here as usize, Step::More);
        }
        let mut reader = Reader(input);
        let step = match self.state {
            State::ClientFlags => self.client_flags(&mut reader),
            State::Options => self.option(&mut reader, out),
        };
        match step {
            Some(step) => (input.len() - reader.0.len(), step),
            None => (0, Step::More),
        }
    }

    fn client_flags(&mut self, reader: &mut Reader<'_>) -> Option<Step> {
        let flags = reader.u32()?;
        let known = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        if flags & !known != 0 {
            let why =
                format!("the client requests features that were not offered (flags {flags:#x})");
            return Some(Step::Over(Some(why)));
        }
        self.no_zeroes = flags & u32::from(handshake::NO_ZEROES) != 0;
        self.state = State::Options;
        Some(Step::More)
    }

    fn option(&mut self, reader: &mut Reader<'_>, out: &mut Vec<u8>) -> Option<Step> {
        let (magic, option, len) = (reader.u64()?, reader.u32()?, reader.u32()?);
        let over = |why: String| Some(Step::Over(Some(why)));
        if magic != OPTION_MAGIC {
            return over(format!("the client does not speak NBD (option magic {magic:#x})"));
        }
        // An option that arrives in pieces counts once.
        let is_whole = len > MAX_OPTION || reader.0.len() >= len as usize;
        self.options += u32::from(is_whole);
        if self.options > MAX_OPTIONS {
            return over(format!("the client sent more than {MAX_OPTIONS} options"));
        }
        if len > MAX_OPTION {
            if len > MAX_SKIPPED || option == option::EXPORT_NAME {
                return over(format!("the client sent an option of {len} bytes"));
            }
            put_answer(out, option, answer::ERR_TOO_BIG, b"");
            self.skip = len.into();
            return Some(Step::More);
        }
        let data = reader.bytes(usize::try_from(len).ok()?)?;
        Some(self.execute(option, data, out))
    }

    fn execute(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Step {
        if self.security == Security::Required {
            match option {
                option::STARTTLS | option::ABORT => {}
                // The protocol has no error reply to EXPORT_NAME, so the session ends.
                option::EXPORT_NAME => {
                    return Step::Over(Some(
                        "the client does not use TLS, which is required".into(),
                    ));
                }
                _ => {
                    put_answer(out, option, answer::ERR_TLS_REQD, b"this server requires TLS");
                    return Step::More;
                }
            }
        }
        match option {
            option::STARTTLS => return self.start_tls(data, out),
            option::EXPORT_NAME => return self.export_name(data, out),
            option::ABORT => {
                put_answer(out, option, answer::ACK, b"");
                return Step::Over(None);
            }
            option::LIST if data.is_empty() => {
                let mut name = Vec::new();
                put_string(&mut name, &self.export.name);
                put_answer(out, option, answer::SERVER, &name);
                put_answer(out, option, answer::ACK, b"");
            }
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.agreed.structured = true;
                put_answer(out, option, answer::ACK, b"");
            }
            option::LIST | option::STRUCTURED_REPLY => {
                put_answer(out, option, answer::ERR_INVALID, b"the option takes no data");
            }
            option::INFO | option::GO => {
                let refusal = self.info(option, data, out).err();
                match refusal {
                    Some((error, text)) => put_error(out, option, error, &text),
                    None => {
                        put_answer(out, option, answer::ACK, b"");
                        if option == option::GO {
                            return Step::Transmission(self.agreed);
                        }
                    }
                }
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                match self.meta_context(option, data, out) {
                    Some((error, text)) => put_error(out, option, error, &text),
                    None => put_answer(out, option, answer::ACK, b""),
                }
            }
            _ => put_answer(out, option, answer::ERR_UNSUP, b"the option is not supported"),
        }
        Step::More
    }

    fn start_tls(&mut self, data: &[u8], out: &mut Vec<u8>) -> Step {
        let refusal: (u32, &[u8]) = match self.security {
            _ if !data.is_empty() => (answer::ERR_INVALID, b"the option takes no data"),
            Security::None => (answer::ERR_POLICY, b"this server has no TLS"),
            Security::Begun => (answer::ERR_INVALID, b"TLS has already started"),
            Security::Required => {
                self.security = Security::Begun;
                // A man in the middle may have injected options before TLS, so their results are
                // discarded.
                self.agreed = Agreed::default();
                put_answer(out, option::STARTTLS, answer::ACK, b"");
                return Step::BeginTls;
            }
        };
        put_answer(out, option::STARTTLS, refusal.0, refusal.1);
        Step::More
    }

    fn is_ours(&self, name: &str) -> bool {
        name.is_empty() || name == self.export.name
    }

    fn flags(&self) -> u16 {
        let flags = self.export.flags | transmission::HAS_FLAGS;
        if self.agreed.structured { flags | transmission::SEND_DF } else { flags }
    }

    fn export_name(&self, name: &[u8], out: &mut Vec<u8>) -> Step {
        // The protocol has no error reply to EXPORT_NAME, so the session ends.
        let Some(name) = std::str::from_utf8(name).ok().filter(|name| self.is_ours(name)) else {
            return Step::Over(Some("the client requests an export that does not exist".into()));
        };
        tracing::debug!(name, "chosen by name");
        out.extend(self.export.size.to_be_bytes());
        out.extend(self.flags().to_be_bytes());
        if !self.no_zeroes {
            out.extend([0; 124]);
        }
        Step::Transmission(self.agreed)
    }

    fn info(&self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Result<(), (u32, String)> {
        let invalid = || (answer::ERR_INVALID, "the option is incomplete".to_owned());
        let mut reader = Reader(data);
        let name = reader.string().ok_or_else(invalid)?;
        let count = reader.u16().ok_or_else(invalid)?;
        if reader.0.len() != usize::from(count) * 2 {
            return Err(invalid());
        }
        if !self.is_ours(name) {
            return Err((answer::ERR_UNKNOWN, format!("there is no export named {name:?}")));
        }
        let mut about = info::EXPORT.to_be_bytes().to_vec();
        about.extend(self.export.size.to_be_bytes());
        about.extend(self.flags().to_be_bytes());
        put_answer(out, option, answer::INFO, &about);
        // The block sizes are sent without a request. A client that has not requested them ignores
        // them.
        let mut sizes = info::BLOCK_SIZE.to_be_bytes().to_vec();
        for size in [1, self.export.preferred, MAX_PAYLOAD] {
            sizes.extend(size.to_be_bytes());
        }
        put_answer(out, option, answer::INFO, &sizes);
        let mut asked = [false; 2];
        while let Some(kind) = reader.u16() {
            asked[0] |= kind == info::NAME;
            asked[1] |= kind == info::DESCRIPTION;
        }
        let texts =
            [(info::NAME, &self.export.name), (info::DESCRIPTION, &self.export.description)];
        for ((kind, text), _) in texts.into_iter().zip(asked).filter(|(_, asked)| *asked) {
            let mut data = kind.to_be_bytes().to_vec();
            data.extend(text.as_bytes());
            put_answer(out, option, answer::INFO, &data);
        }
        Ok(())
    }

    /// Replies to a metadata context option, or returns the error for the reply.
    fn meta_context(
        &mut self,
        option: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Option<(u32, String)> {
        let set = option == option::SET_META_CONTEXT;
        if set {
            // Even if the option fails, contexts that an earlier option selected are deselected.
            self.agreed.allocation = false;
        }
        if !self.agreed.structured {
            return Some((
                answer::ERR_INVALID,
                "structured replies must be negotiated first".into(),
            ));
        }
        let mut reader = Reader(data);
        let mut parse = || {
            let (name, count) = (reader.string()?, reader.u32()?);
            let mut wanted = count == 0 && !set;
            // Each query has at least four bytes, so the length of the data limits the number of
            // queries.
            for _ in 0..count {
                let query = reader.string()?;
                wanted |= query == BASE_ALLOCATION || (!set && query == "base:");
            }
            reader.0.is_empty().then_some((name, wanted))
        };
        let Some((name, wanted)) = parse() else {
            return Some((answer::ERR_INVALID, "the option is incomplete".into()));
        };
        if !self.is_ours(name) {
            return Some((answer::ERR_UNKNOWN, format!("there is no export named {name:?}")));
        }
        if wanted {
            let mut context = ALLOCATION_CONTEXT.to_be_bytes().to_vec();
            context.extend(BASE_ALLOCATION.as_bytes());
            put_answer(out, option, answer::META_CONTEXT, &context);
            self.agreed.allocation |= set;
        }
        None
    }
}

/// Appends an error reply. The text is cut at the longest length that the protocol permits, because
/// it may contain a string of the client.
fn put_error(out: &mut Vec<u8>, option: u32, error: u32, text: &str) {
    let end = text.floor_char_boundary(MAX_STRING);
    put_answer(out, option, error, &text.as_bytes()[..end]);
}

#[cfg(test)]
mod tests;
